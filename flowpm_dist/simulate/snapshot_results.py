"""Densities and statistics of snapshots of any code, written into a folder for each."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.catalogues.particles import ParticleSnapshot
from flowpm_dist.grid.box import Box
from flowpm_dist.grid.field import Field, project
from flowpm_dist.io.drawing import drawing
from flowpm_dist.io.files import (
    GENERATOR,
    WriteError,
    read_json,
    remove_unfinished,
    versions,
    write_json,
)
from flowpm_dist.io.particle_files import parameters_of
from flowpm_dist.simulate.measured import check_statistics, write_statistic
from flowpm_dist.simulate.snapshots import (
    DENSITY,
    RECORD,
    SLAB,
    Choices,
    Source,
    asked,
    planned_files,
)
from flowpm_dist.statistics.register import short_name, statistic_named
from meshimpl.process_mesh import ProcessMesh

Warn = Callable[[str], None]
VALUES = np.dtype("<f4")
"""Of a density in a file."""


def particles_of(source: Source, choices: Choices, mesh: ProcessMesh) -> ParticleSnapshot:
    """Returns the particles of a snapshot, of the types that were chosen."""
    types = choices.types or tuple(source.files.counts)
    return ParticleSnapshot(source.files, mesh, types, parameters_of(source.files))


def measure_snapshot(
    source: Source,
    choices: Choices,
    mesh: ProcessMesh,
    folder: Path,
    warn: Warn,
    *,
    density: bool,
) -> None:
    """Paints and measures a snapshot; writes tables, figures and the density. On all ranks.

    Args:
        source, choices: what to measure.
        mesh: the ranks.
        folder: folder of the results; older ones in it are removed first.
        warn: shows a warning, about a figure that cannot be drawn.
        density: whether to write the density, in real space.

    Raises:
        SnapshotError: the snapshot cannot be read, or lacks what redshift space needs.
        WriteError: a file cannot be written. Only the rank that cannot write raises it.
    """
    check_statistics(choices.statistics)
    particles = particles_of(source, choices, mesh)
    box = Box(source.grid, particles.box_size, mesh, tf.float64)
    statistics = {name: statistic_named(name) for name in choices.statistics}
    if any(statistic.takes("axis") for statistic in statistics.values()):
        particles.check_redshift_space()
    shifts = (0.0, 0.5) if choices.interlaced else (0.0,)
    noise = particles.shot_noise(choices.weights)
    record = _record(source, choices, noise, density=density)
    if mesh.rank == 0:
        _begin(folder, record)
    mesh.barrier()
    plain, *moved = particles.densities(box, shifts, weights=choices.weights, scheme=choices.scheme)
    apparent: list[Field] | None = None
    for name, statistic in statistics.items():
        along = choices.line_of_sight if statistic.takes("axis") else None
        if along is not None and apparent is None:
            apparent = particles.densities(
                box, shifts, weights=choices.weights, redshift_space=along, scheme=choices.scheme
            )
        field, *others = [plain, *moved] if along is None or apparent is None else apparent
        result = statistic.measured(
            field,
            axis=along,
            interlaced=others[0] if others else None,
            shot_noise=noise if choices.subtract_shot_noise else 0.0,
            window=choices.scheme,
        )
        if mesh.rank == 0:
            write_statistic(folder / short_name(name), result, warn)
            if choices.subtract_shot_noise and not statistic.takes("shot_noise"):
                warn(f"{name} of {source.path} keeps its shot noise: it cannot be subtracted")
    if density:
        write_volume(folder / DENSITY, plain)
    _draw(folder, plain, particles.a, warn)
    if mesh.rank == 0:
        write_json(folder / RECORD, {**record, "complete": True})


def _record(source: Source, choices: Choices, noise: float, *, density: bool) -> dict[str, Any]:
    """Returns what is written about the results, which JSON can take."""
    return {
        "generator": GENERATOR,
        "files": planned_files(choices, density=density),
        "asked": asked(source, choices, density=density),
        "shot_noise": noise,
        "units": {"box_size": "Mpc/h", "shot_noise": "(Mpc/h)^3"},
        "versions": versions(),
    }


def _begin(folder: Path, record: Mapping[str, Any]) -> None:
    """Makes the folder of results, without the files of older ones, and begins their record."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in read_json(folder / RECORD).get("files", []):
            if Path(str(name)).name == name:
                (folder / name).unlink(missing_ok=True)
        remove_unfinished(folder)
    except OSError as error:
        raise WriteError.of(folder, error) from error
    write_json(folder / RECORD, {**record, "complete": False})


def _draw(folder: Path, field: Field, a: float, warn: Warn) -> None:
    """Draws a slab of the density. On all ranks together."""
    layers = max(1, field.box.grid[2] // 8)
    slab = project(field, layers)
    if slab is None:
        return
    with drawing(folder / SLAB, warn) as save:
        from flowpm_dist.io.figures import density_figure

        save(density_figure(slab, field.box.size, layers * field.box.cell[2], a))


def write_volume(path: Path, field: Field) -> None:
    """Writes a field as a .npy file [x, y, z], float32; each rank writes its block.

    On all ranks together. The file appears when it is whole.

    Raises:
        WriteError: it cannot be written; only this rank raises it, and the job must end.
    """
    box, mesh = field.box, field.mesh
    numbers = np.array([secrets.randbits(32), 0], np.int64)
    aside = path.with_name(f".{path.name}.{mesh.array_from_root(numbers)[0]:08x}.partial")
    try:
        if mesh.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            numbers[1] = _laid_out(aside, box.grid)
        begin = int(mesh.array_from_root(numbers)[1])
        _write_block(aside, begin, box, field.block.numpy().astype(VALUES))
        mesh.barrier()
        if mesh.rank == 0:
            aside.replace(path)
    except BaseException as error:
        if mesh.rank == 0:
            with suppress(OSError):
                aside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise WriteError.of(path, error) from error
        raise
    mesh.barrier()


def _laid_out(path: Path, grid: tuple[int, int, int]) -> int:
    """Writes a .npy file without its values, for which it takes the room; returns their place."""
    with path.open("wb") as file:
        about = {"descr": VALUES.str, "fortran_order": False, "shape": grid}
        np.lib.format.write_array_header_1_0(file, about)
        begin = file.tell()
        os.posix_fallocate(file.fileno(), begin, math.prod(grid) * VALUES.itemsize)
    return begin


def _write_block(path: Path, begin: int, box: Box, block: np.ndarray) -> None:
    """Writes this rank's block of an array into its file, plane by plane."""
    (x, y, _), (_, ny, nz) = box.offset, box.grid
    with path.open("r+b") as file:
        for number, plane in enumerate(block):
            file.seek(begin + ((x + number) * ny + y) * nz * VALUES.itemsize)
            file.write(plane.tobytes())
