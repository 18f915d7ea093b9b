"""Snapshots in any format: written by all ranks of a run, or converted afterwards.

Nothing here imports TensorFlow before it is loaded.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from flowpm_dist.io.errors import UserError
from flowpm_dist.io.files import OF_PARTICLES, SNAPSHOT, WriteError, snapshot_attributes
from flowpm_dist.io.particle_formats import BigFile, GadgetHDF5, ParticleFormat
from flowpm_dist.io.particles import (
    Header,
    ParticleBlock,
    mark_particles_complete,
    write_error,
)
from flowpm_dist.io.snapshot import (
    VECTORS,
    Snapshot,
    SnapshotError,
    load_snapshot,
    mark_complete,
    write_snapshot,
)

if TYPE_CHECKING:
    from flowpm_dist.grid.field import Field

FormatName = Literal["zarr", "gadget-hdf5", "bigfile"]
PARTICLE_FORMATS: dict[str, ParticleFormat] = {
    kind.name: kind for kind in (GadgetHDF5(), BigFile())
}
"""Name -> format that holds particles only."""


def snapshot_name(format: str) -> str:
    """Returns the name of the folder of a snapshot in a format.

    Raises:
        ValueError: there is no such format.
    """
    if format == "zarr":
        return SNAPSHOT
    if format not in PARTICLE_FORMATS:
        known = ", ".join(map(repr, ("zarr", *PARTICLE_FORMATS)))
        raise ValueError(f"format {format!r}: must be one of {known}")
    return OF_PARTICLES[format]


def save_fields(
    folder: Path, fields: Mapping[str, Field], attributes: Mapping[str, Any], format: str = "zarr"
) -> Path:
    """Writes a whole snapshot: each rank writes its part, and all ranks call it together.

    Args:
        folder: the folder to make the snapshot in, on a file system that all ranks see.
        fields: the fields by name; for a format of particles, displacement and velocity.
        attributes: the snapshot's attributes; JSON can hold them.
        format: see `FormatName`.

    Returns:
        The path of the snapshot, a folder itself.

    Raises:
        FileExistsError: the folder has such a snapshot. Raised on every rank.
        ValueError: there is no such format.
        WriteError: this rank cannot write. Only this rank raises it, and the job must end.
    """
    import tensorflow as tf

    path = folder / snapshot_name(format)
    mesh = next(iter(fields.values())).mesh
    if int(mesh.world.allreduce(tf.constant(int(path.exists())), "max")):
        raise FileExistsError(f"{path} exists: give another folder, or remove it")
    if format == "zarr":
        write_snapshot(path, fields, attributes)
    else:
        _write_particles(path, fields, attributes, PARTICLE_FORMATS[format])
    if mesh.rank == 0 and format == "zarr":
        mark_complete(path)
    elif mesh.rank == 0:
        mark_particles_complete(path, attributes)
    mesh.barrier()
    return path


def _write_particles(
    path: Path,
    fields: Mapping[str, Field],
    attributes: Mapping[str, Any],
    kind: ParticleFormat,
) -> None:
    """Writes a snapshot of particles: each rank writes a part, and all ranks call it together."""
    displacement, velocity = (fields[name] for name in VECTORS)
    box, header = displacement.box, Header.of(attributes)
    mesh, x, v = box.mesh, np.asarray(displacement.block), np.asarray(velocity.block)
    block = ParticleBlock(x, v, box.offset, 0, box.block[0])
    try:
        if mesh.rank == 0:
            path.mkdir(parents=True)
        mesh.barrier()
        found = mesh.gather_to_root(kind.write_part(path, mesh.rank, mesh.size, block, header))
        if found is not None:
            kind.finish(path, found, header)
    except OSError as error:
        raise write_error(path, error) from error


def check_conversion(source: Path, folder: Path, format: str, *, overwrite: bool) -> Snapshot:
    """Returns the snapshot to convert, after all checks; nothing is changed.

    Args:
        source: `snapshot.zarr`, or the folder that holds it.
        folder: the folder to make the converted snapshot in.
        format: see `PARTICLE_FORMATS`.
        overwrite: whether an older snapshot there may be replaced.

    Raises:
        SnapshotError: there is no whole snapshot, or it lacks the particles.
        UserError: there is a snapshot in the folder, or files from elsewhere.
    """
    snapshot = load_snapshot(source)
    check_particles(source, snapshot)
    path = folder / snapshot_name(format)
    if os.path.lexists(path) and snapshot_attributes(path) is None:
        raise UserError(f"{path} is from elsewhere: move it away, or give another --output")
    if os.path.lexists(path) and not overwrite:
        raise UserError(f"{path} exists: add --overwrite to replace it, or give another --output")
    return snapshot


def check_particles(source: str | Path, snapshot: Snapshot) -> None:
    """Check that a snapshot has the particles.

    Raises:
        SnapshotError: it lacks their displacement or velocity.
    """
    missing = [name for name in VECTORS if name not in snapshot.arrays]
    if missing:
        raise SnapshotError(
            f"{source} has no {' and no '.join(missing)}, which is needed here; it has "
            f"{', '.join(snapshot.arrays)} (a run writes what [output] fields names)"
        )


def convert(
    snapshot: Snapshot,
    folder: Path,
    format: str,
    files: int = 1,
    report: Callable[[int], None] = lambda done: None,
) -> Path:
    """Writes the particles of a snapshot in another format, slab by slab.

    An older snapshot there is replaced when the new one is complete.

    Args:
        snapshot: the snapshot that `check_conversion` returned.
        folder: the folder to make the new snapshot in.
        format: see `PARTICLE_FORMATS`.
        files: number of files to write, at most one for each row of the grid.
        report: called with the number of files that are complete.

    Returns:
        The path of the new snapshot, a folder.

    Raises:
        WriteError: it cannot be written.
    """
    kind, header = PARTICLE_FORMATS[format], Header.of(snapshot.attributes)
    x, v = (snapshot.array(name) for name in VECTORS)
    files = min(files, header.grid[0])
    rows = [number * header.grid[0] // files for number in range(files + 1)]
    path = folder / snapshot_name(format)
    aside, replaced = (folder / f".{path.name}.{word}" for word in ("partial", "replaced"))
    try:
        for old in (aside, replaced):
            shutil.rmtree(old, ignore_errors=True)
        aside.mkdir(parents=True)
        found = []
        for number in range(files):
            block = ParticleBlock(x, v, (0, 0, 0), rows[number], rows[number + 1])
            found.append(kind.write_part(aside, number, files, block, header))
            report(number + 1)
        kind.finish(aside, found, header)
        mark_particles_complete(aside, dict(snapshot.attributes))
        if path.exists():
            path.rename(replaced)
        aside.rename(path)
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        raise write_error(path, error) from error
    except (ValueError, RuntimeError, KeyError) as error:
        if isinstance(error, WriteError):
            raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise SnapshotError(f"the snapshot is damaged: {reason}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return path
