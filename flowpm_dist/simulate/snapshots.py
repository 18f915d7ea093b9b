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
from flowpm_dist.io.particle_files import ParticleFiles, parameters_of
from flowpm_dist.io.particle_formats import particle_folders
from flowpm_dist.io.particle_readers import open_particles
from flowpm_dist.jobs.folder import check_foreign, check_ground
from flowpm_dist.observables.tracers import LineOfSight
from flowpm_dist.simulation.cost import field_bytes, process_bytes, statistics_values
from flowpm_dist.simulation.demand import Demand
from flowpm_dist.statistics.register import checked_statistic, short_name, twice_named

RECORD = "measured.json"
"""Written first, into the folder of each snapshot, and marked as complete at the end."""
DENSITY, SLAB = "density.npy", "density.png"
IN_REDSHIFT_SPACE = {"multipoles", "wedges"}
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
        short = [short_name(name) for name in self.statistics]
        taken = twice_named(self.statistics) or [
            n for n in short if n in (Path(SLAB).stem, "measured")
        ]
        if taken:
            raise UserError(f"--statistic: {taken[0]}: two results would share a file")
        if len({*self.types}) < len(self.types):
            raise UserError(f"--type {self.types[0]}: give each type once")
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

    Several files of one snapshot are one source.

    Raises:
        UserError: one cannot be opened, or lacks particles of a type or what redshift space needs.
    """
    opened: dict[Path, tuple[Path, ParticleFiles]] = {}
    for path in paths:
        files = open_particles(path, choices.units)
        files.check_types(choices.types)
        if {*choices.statistics} & IN_REDSHIFT_SPACE:
            files.factor("velocity")
            if not parameters_of(files).get("Omega_m"):
                raise UserError(
                    f"{path} has no Omega_m, which redshift space needs: measure it in Python, "
                    "with fpm.read_particles(..., cosmology=...)"
                )
        opened.setdefault(place_of(path, files), (path, files))
    names = _names([*opened])
    return [
        Source(path, name, files, choices.cells(files))
        for name, (path, files) in zip(names, opened.values(), strict=True)
    ]


def place_of(path: Path, files: ParticleFiles) -> Path:
    """Returns the path of a snapshot without endings and, of several files, without the number."""
    absolute = Path(os.path.abspath(path))
    if absolute.is_dir():
        return absolute
    number = r"(\.\d+)?" if len(files.parts) > 1 else ""
    return absolute.with_name(re.sub(rf"{number}(\.hdf5|\.h5)?$", "", absolute.name))


def _names(places: Sequence[Path]) -> list[str]:
    """Returns a name for each path: its last part, or as many parts as make them differ."""
    parts = [place.parts[1:] or ("root",) for place in places]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(of_path[-depth:]) for of_path in parts]
        if len({*names}) == len(names):
            break
    return names


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
        for part in (folder, *folder.parents[: source.name.count("/")]):
            if part.is_symlink():
                raise UserError(f"{part} is a symbolic link: give another --output, or remove it")
        record = _record_in(folder)
        if not record:
            check_foreign(folder, planned_files(choices, density=density))
        if overwrite or not record.get("complete"):
            left.append(source)
        elif record.get("asked") != asked(source, choices, density=density):
            raise UserError(
                f"{folder} has results of other options, or the snapshot has changed since: add "
                "--overwrite to replace them, or give another --output"
            )
    return left


def planned_files(choices: Choices, *, density: bool) -> list[str]:
    """Returns the names of the files that measuring writes."""
    tables = [f"{short_name(name)}{end}" for name in choices.statistics for end in (".csv", ".png")]
    return [*tables, SLAB, RECORD, *([DENSITY] if density else [])]


def asked(source: Source, choices: Choices, *, density: bool) -> dict[str, Any]:
    """Returns what tells whether results are the ones that are asked for; JSON can take it."""
    files = source.files
    about = {
        "snapshot": os.path.abspath(source.path),
        "files": _stamps(source),
        "particles": {str(kind): count for kind, count in files.counts.items()},
        "a": files.a,
        "box_size": list(files.box_size),
        "cosmology": parameters_of(files),
        "cells": list(source.grid),
        "density": density,
    }
    plain: dict[str, Any] = json.loads(json.dumps({**about, **choices.record()}))
    return plain


def _stamps(source: Source) -> list[list[Any]]:
    """Returns name, size and time of change of the files of a snapshot."""
    path = Path(os.path.abspath(source.path))
    if path.is_dir():
        places = (path, *(path / name for name in particle_folders()))
        # A bigfile is folders in a folder; other results may lie below the folder of files.
        inner = [p.rglob("*") if (p / "Header").is_dir() else p.glob("*") for p in places]
        files = sorted(file for each in inner for file in each if file.is_file())
    else:
        name = place_of(path, source.files).name
        numbered = re.compile(rf"{re.escape(name)}(\.\d+)?(\.hdf5|\.h5)?")
        files = sorted(file for file in path.parent.iterdir() if numbered.fullmatch(file.name))
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def _record_in(folder: Path) -> dict[str, Any]:
    """Returns the record of the results in a folder; an empty one if they are not ours."""
    record = read_json(folder / RECORD)
    return record if record.get("generator") == GENERATOR else {}
