"""A snapshot on disk, written again in a format of another code.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from flowpm_dist.io.errors import UserError
from flowpm_dist.io.files import UnreadableError, remove, snapshot_attributes
from flowpm_dist.io.formats import writer_of
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
    check_particles,
    load_snapshot,
    snapshot_name,
)


def check_conversion(source: Path, folder: Path, format: str, *, overwrite: bool) -> Snapshot:
    """Returns the snapshot to convert, after all checks; nothing is changed.

    Args:
        source: `snapshot.zarr`, or the folder that holds it.
        folder: the folder to make the converted snapshot in.
        format: see `particle_formats.PARTICLE_FORMATS`.
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


def convert_snapshot(
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
        format: see `particle_formats.PARTICLE_FORMATS`.
        files: number of files to write, at most one for each row of the grid.
        report: called with the number of files that are complete.

    Returns:
        The path of the new snapshot, a folder.

    Raises:
        SnapshotError: the snapshot is damaged, or a value is not finite.
        WriteError: it cannot be written.
    """
    writer, header = writer_of(format), Header.of(snapshot.attributes)
    x, v = (snapshot.array(name) for name in VECTORS)
    files = min(files, header.grid[0])
    rows = [number * header.grid[0] // files for number in range(files + 1)]
    path = folder / snapshot_name(format)
    aside, replaced = (folder / f".{path.name}.{word}" for word in ("partial", "replaced"))
    try:
        for old in (aside, replaced):
            remove(old, ignore_errors=True)
        aside.mkdir(parents=True)
        parts = []
        for number in range(files):
            block = ParticleBlock(x, v, (0, 0, 0), rows[number], rows[number + 1], snapshot.path)
            parts.append(writer.write_part(aside, number, files, block, header))
            report(number + 1)
        writer.finish(aside, parts, header)
        mark_particles_complete(aside, dict(snapshot.attributes))
        if os.path.lexists(path):
            path.rename(replaced)
        aside.rename(path)
        remove(replaced, ignore_errors=True)
    except OSError as error:
        raise write_error(path, error) from error
    except UnreadableError as error:
        raise SnapshotError(str(error)) from error
    finally:
        remove(aside, ignore_errors=True)
    return path
