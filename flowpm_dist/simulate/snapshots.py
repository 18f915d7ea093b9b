"""The plan of measuring snapshots of any code. Nothing here imports TensorFlow."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flowpm_dist.grid.decomposition import Grid, default_mesh, misfits, parse_mesh
from flowpm_dist.grid.options import SCHEMES, Scheme
from flowpm_dist.io.errors import UserError
from flowpm_dist.io.files import GENERATOR, read_json
from flowpm_dist.io.particle_files import ParticleFiles
from flowpm_dist.io.particle_readers import open_particles
from flowpm_dist.jobs.folder import check_ground
from flowpm_dist.observables.tracers import LineOfSight
from flowpm_dist.simulation.cost import field_bytes, process_bytes, statistics_values
from flowpm_dist.simulation.demand import Demand
from flowpm_dist.statistics.register import checked_statistic, twice_named

RECORD = "measured.json"
"""Written last, into the folder of each snapshot."""
DENSITY, SLAB = "density.npy", "density.png"
STEP, SMALLEST, LARGEST = 16, 16, 512
"""A mesh that is not given has as many cells as there are particles: a multiple of `STEP` along the
longest side, within these limits."""
PAINTING = 6
"""Values in float64 of a cell while two densities are painted, moved between ranks and measured."""
POINTS = 160 * 2**20
"""Memory of the particles that wait to be painted, and of a piece of the files [bytes]."""


@dataclass(frozen=True)
class Choices:
    """How snapshots are painted and measured.

    Attributes:
        grid: cells along the longest side; None for as many as there are particles.
        scheme: see `flowpm_dist.paint`.
        types: numbers of the types of particles; all if empty.
        units: units that the files lack, by name.
        weights: whether particles count by mass or by number.
        statistics: names of `STATISTICS`, or "package.module:object".
        line_of_sight: of statistics in redshift space.
        interlaced: whether spectra have a second density half a cell away.
        subtract_shot_noise: whether spectra lose the power of particles at random.
    """

    grid: int | None = None
    scheme: Scheme = "tsc"
    types: tuple[int, ...] = ()
    units: Mapping[str, float] = field(default_factory=dict)
    weights: Literal["mass", "number"] = "mass"
    statistics: tuple[str, ...] = ("power",)
    line_of_sight: LineOfSight = "z"
    interlaced: bool = True
    subtract_shot_noise: bool = False

    def __post_init__(self) -> None:
        for name in self.statistics:
            try:
                checked_statistic(name)
            except ValueError as error:
                raise UserError(f"--statistic: {error}") from error
        if twice := twice_named(self.statistics):
            raise UserError(f"--statistic: several are called {twice[0]}, and would share a file")
        if self.scheme not in SCHEMES:
            raise UserError(f"--scheme {self.scheme}: must be one of {', '.join(SCHEMES)}")

    def cells(self, files: ParticleFiles) -> Grid:
        """Returns the cells of the mesh of a snapshot along each side; cells are nearly cubes.

        Raises:
            UserError: a grid that is not even, or too small.
        """
        kinds = self.types or tuple(files.counts)
        count, sides = sum(files.counts.get(kind, 0) for kind in kinds), np.array(files.box_size)
        longest = self.grid
        if longest is None:
            equal = (count / math.prod(sides)) ** (1 / 3) * max(sides)
            longest = int(np.clip(STEP * round(equal / STEP), SMALLEST, LARGEST))
        x, y, z = (max(4, 2 * round(longest * side / max(sides) / 2)) for side in sides)
        if longest not in (x, y, z):
            raise UserError(f"--grid {longest}: must be an even number of at least 4")
        return x, y, z

    def record(self) -> dict[str, Any]:
        """Returns the choices for a file."""
        return {key: dict(v) if isinstance(v, Mapping) else v for key, v in asdict(self).items()}


@dataclass(frozen=True)
class Source:
    """A snapshot to measure.

    Attributes:
        path: as it was given.
        name: name of its folder of results.
        files: its files, which were opened and checked.
        grid: cells along each side.
    """

    path: Path
    name: str
    files: ParticleFiles
    grid: Grid


def sources_of(paths: Sequence[Path], choices: Choices) -> list[Source]:
    """Returns the snapshots at some paths, after all checks that need no particles.

    Raises:
        UserError: one cannot be opened, or lacks particles of a type, or is given twice.
    """
    found = []
    for path, name in zip(paths, _names(paths), strict=True):
        files = open_particles(path, choices.units)
        if missing := [kind for kind in choices.types if kind not in files.counts]:
            there = ", ".join(f"{n:,} of type {kind}" for kind, n in files.counts.items())
            raise UserError(f"{path} has no particles of type {missing[0]}; it has {there}")
        found.append(Source(path, name, files, choices.cells(files)))
    return found


def _names(paths: Sequence[Path]) -> list[str]:
    """Returns a name for each path: its last part, or as many parts as make them differ.

    Numbers of files and endings are left out.

    Raises:
        UserError: two paths are the same snapshot.
    """
    parts = [Path(os.path.abspath(path)).parts[1:] for path in paths]
    for place, of_path in enumerate(parts):
        stem = re.sub(r"(\.\d+)?(\.hdf5|\.h5)?$", "", of_path[-1] if of_path else "")
        parts[place] = (*of_path[:-1], stem or of_path[-1]) if of_path else ("root",)
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(of_path[-depth:]) for of_path in parts]
        if len({*names}) == len(names):
            return names
    twice = next(name for name in names if names.count(name) > 1)
    raise UserError(f"/{twice} is given twice: give each snapshot once")


def demand_of(
    sources: Sequence[Source], choices: Choices, ranks: int, shape: str | None, job_name: str
) -> Demand:
    """Returns what the largest of the snapshots takes, on a mesh of ranks that suits all of them.

    Raises:
        UserError: the mesh does not fit.
    """
    largest = max(sources, key=lambda source: math.prod(source.grid)).grid

    def mesh_of(count: int) -> str:
        try:
            mesh = shape if shape is not None and count == ranks else default_mesh(count, largest)
            axes = parse_mesh(mesh)
        except ValueError as error:
            raise UserError(str(error)) from error
        for source in sources:
            if wrong := misfits(axes, source.grid, count):
                raise UserError(f"mesh {mesh} for {source.path}: {'; '.join(wrong)}")
        return mesh

    def memory(grid: Grid, axes: Mapping[str, int]) -> int:
        values = PAINTING + statistics_values(choices.statistics)
        return process_bytes(axes) + POINTS + field_bytes(values, grid, axes, "float64")

    return Demand(job_name, largest, mesh_of(ranks), memory, mesh_of)


def unfinished(
    sources: Sequence[Source], choices: Choices, output: Path, *, density: bool, overwrite: bool
) -> list[Source]:
    """Returns the snapshots that are still to be measured; the results of the others are there.

    Raises:
        UserError: a folder holds results of other choices, or files from elsewhere.
    """
    check_ground(output)
    left = []
    for source in sources:
        folder = output / source.name
        done = _record_in(folder)
        if overwrite and done is not None:
            left.append(source)
        elif done is None:
            if not overwrite and folder.exists() and _foreign(folder):
                raise UserError(
                    f"{folder} holds {_foreign(folder)[0]} from elsewhere: give another --output"
                )
            left.append(source)
        elif done.get("asked") != asked(source, choices, density=density):
            raise UserError(
                f"{folder} has results of other options, or of another snapshot: add --overwrite "
                "to replace them, or give another --output"
            )
    return left


def asked(source: Source, choices: Choices, *, density: bool) -> dict[str, Any]:
    """Returns what tells whether results are the ones that are asked for; JSON can take it."""
    counts = {str(kind): count for kind, count in source.files.counts.items()}
    about = {"snapshot": os.path.abspath(source.path), "particles": counts, "a": source.files.a}
    cells = {"cells": list(source.grid), "density": density}
    plain: dict[str, Any] = json.loads(json.dumps({**about, **cells, **choices.record()}))
    return plain


def _record_in(folder: Path) -> dict[str, Any] | None:
    """Returns the record of the results in a folder; None if there are none that are complete."""
    record = read_json(folder / RECORD)
    return record if record.get("generator") == GENERATOR else None


def _foreign(folder: Path) -> list[str]:
    """Returns names of files in a folder that are no results of ours."""
    if not folder.is_dir():
        return [folder.name]
    ours = {".csv", ".png"}
    there = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    return [name for name in there if Path(name).suffix not in ours and name != DENSITY]
