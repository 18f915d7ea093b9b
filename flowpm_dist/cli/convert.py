"""The command `flowpm-dist convert`: the snapshot of a run in a format of another code."""

from __future__ import annotations

import math
import signal
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from flowpm_dist.cli.common import ENDS, full_disks_reported, planning, refuse, refuse_after
from flowpm_dist.io.conversion import check_conversion, convert_snapshot
from flowpm_dist.io.particle_formats import PARTICLE_FORMATS
from flowpm_dist.io.particles import ID_BYTES
from flowpm_dist.io.snapshot import VECTORS, snapshot_bytes
from flowpm_dist.jobs.folder import check_ground, check_room
from flowpm_dist.jobs.progress import Progress

Format = StrEnum("Format", [*PARTICLE_FORMATS])  # type: ignore[misc] # not a literal
EXAMPLE = "flowpm-dist convert universe --format gadget-hdf5"


def convert(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A finished run, or its snapshot.zarr.")
    ],
    format: Annotated[
        Format,
        typer.Option(
            help="; ".join(f"{n}: {each.help}" for n, each in PARTICLE_FORMATS.items()) + "."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where to make it; by default next to snapshot.zarr."),
    ] = None,
    files: Annotated[
        int, typer.Option(min=1, help="Files that the particles are shared between.")
    ] = 1,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the one that was made before.")
    ] = False,
) -> None:
    """Write the particles of a run for other codes: positions, velocities and ids.

    The run may have been made by any number of ranks. This takes little memory, whatever its size.
    """
    where = output or (folder.parent if folder.name.endswith(".zarr") else folder)
    with planning():
        snapshot = check_conversion(folder, where, format, overwrite=overwrite)
        check_ground(where)
        grid, itemsize = snapshot.attributes["grid"], np.dtype(snapshot.array(VECTORS[0]).dtype)
        needed = snapshot_bytes(grid, itemsize.itemsize, VECTORS) + ID_BYTES * math.prod(grid)
        check_room(where, needed, "the snapshot needs about")
    try:
        with full_disks_reported(), Progress() as progress:
            count = min(files, grid[0])
            path = convert_snapshot(
                snapshot, where, format, files, lambda done: progress("files", done, count)
            )
    except ENDS as error:
        refuse_after(error)
    except KeyboardInterrupt:
        refuse("interrupted; no snapshot was written", status=128 + signal.SIGINT)
    print(f"{math.prod(grid):,} particles in {path}")
