"""The command `flowpm-dist measure`: densities and statistics of snapshots of any code."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

import typer

from flowpm_dist.cli import common
from flowpm_dist.grid.options import Scheme
from flowpm_dist.io.errors import UserError
from flowpm_dist.io.formats import UNITS
from flowpm_dist.simulate.snapshots import Choices, Source, demand_of, sources_of, unfinished
from flowpm_dist.statistics.register import STATISTICS
from meshimpl import launch

EXAMPLE = "flowpm-dist measure snapdir_004 --statistic power --statistic multipoles"

Grid = Annotated[
    int | None,
    typer.Option(
        min=4, max=2**20, help="Cells along the longest side; by default as many as particles."
    ),
]
SchemeOption = Annotated[
    Scheme,
    typer.Option(help="cic, cloud in cell; tsc, triangular-shaped cloud; pcs, cubic spline."),
]
Types = Annotated[
    list[int] | None,
    typer.Option(
        "--type",
        min=0,
        help="A type of particles: 0 gas, 1 dark matter, 4 stars; can be repeated. Default: all.",
    ),
]
Units = Annotated[
    list[str] | None,
    typer.Option(
        "--unit",
        metavar="NAME=CGS",
        help="A unit that the files lack, as UnitLength_in_cm=3.085678e21 for kpc/h.",
    ),
]
Weights = Annotated[
    Literal["mass", "number"], typer.Option(help="Whether particles count by mass or by number.")
]


def units_of(texts: list[str] | None) -> dict[str, float]:
    """Returns the units that a user gives.

    Raises:
        UserError: a text is not of the form NAME=NUMBER.
    """
    units = {}
    for text in texts or []:
        name, _, value = text.partition("=")
        try:
            units[name] = float(value)
        except ValueError:
            names = ", ".join(UNITS)
            raise UserError(
                f"--unit {text}: must be a name and a number, as UnitLength_in_cm=3.085678e24; "
                f"the names are {names}"
            ) from None
    return units


def measure(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Snapshots: a file, one of several files, or a folder, for each of them.",
        ),
    ],
    output: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder of the results, one for each snapshot.")
    ] = Path("measured"),
    statistic: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{', '.join(STATISTICS)}, or package.module:object; can be repeated. "
            "Default: power."
        ),
    ] = None,
    grid: Grid = None,
    scheme: SchemeOption = "tsc",
    type: Types = None,
    unit: Units = None,
    weights: Weights = "mass",
    line_of_sight: Annotated[
        Literal["x", "y", "z"], typer.Option(help="For multipoles and wedges, in redshift space.")
    ] = "z",
    interlaced: Annotated[
        bool, typer.Option(help="Paint twice, half a cell apart, for spectra without aliases.")
    ] = True,
    subtract_shot_noise: Annotated[
        bool, typer.Option("--subtract-shot-noise", help="Subtract the power of random particles.")
    ] = False,
    density: Annotated[
        bool, typer.Option("--density", help="Write the density as well, as density.npy.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Measure again what is in DIR.")
    ] = False,
    ranks: common.Ranks = None,
    mesh: Annotated[str | None, common.mesh_option("row:2,col:2")] = None,
    check: common.Check = False,
    ignore_memory: common.IgnoreMemory = False,
) -> None:
    """Measure snapshots of Gadget, AREPO, SWIFT, MP-Gadget, FastPM: spectra, densities, pictures.

    A snapshot that has been measured with the same options is left out.
    """
    with common.planning():
        choices = Choices(
            grid, scheme, tuple(type or ()), units_of(unit), weights,
            tuple(statistic or ["power"]), line_of_sight, interlaced, subtract_shot_noise,
        )  # fmt: skip
        sources = sources_of(files, choices)
        size = common.job_size(ranks)
        demand = demand_of(sources, choices, size, mesh, "the measurement")
        left = sources
        if launch.detect().rank == 0 or not check:
            left = unfinished(sources, choices, output, density=density, overwrite=overwrite)
        disk = sum(4 * math.prod(source.grid) for source in left) if density else 0
        work = common.Preview(described(sources), demand, demand.estimate(disk), output)
        work.check_memory(ignore=ignore_memory)
    if left or check:
        with work.begun(ranks, check=check) as progress:
            from flowpm_dist.simulate.snapshot_results import measure_snapshot
            from meshimpl.process_mesh import ProcessMesh

            ours = ProcessMesh(demand.mesh)
            ours.check_equal("measure", snapshots=[source.name for source in left])
            for number, source in enumerate(left):
                measure_snapshot(
                    source, choices, ours, output / source.name, progress.warn, density=density
                )
                progress("snapshots", number + 1, len(left))
    if launch.detect().rank == 0:
        again = "" if len(left) == len(sources) else f" ({len(sources) - len(left)} from before)"
        print(f"{len(sources)} measured{again}:")
        print("\n".join(f"  {output / source.name}" for source in sources))


def described(sources: list[Source]) -> str:
    """Returns a line for each snapshot."""
    lines = []
    for source in sources:
        kinds = ", ".join(f"{n:,} of type {kind}" for kind, n in source.files.counts.items())
        sides = " x ".join(f"{side:g}" for side in source.files.box_size)
        cells = " x ".join(map(str, source.grid))
        lines.append(
            f"{source.path}: a = {source.files.a:.6g}, {sides} Mpc/h, {kinds}; {cells} cells"
        )
    return "\n".join(lines)
