"""The command `flowpm-dist dataset`."""

from __future__ import annotations

import functools
import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flowpm_dist.cli import common
from flowpm_dist.cli.measure import Grid, SchemeOption, Types, Units, Weights, described, units_of
from flowpm_dist.cosmoflow.planning.memory import check_training_mesh, dataset_memory
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.cosmoflow.training.dataset import check_dataset, dataset_bytes, write_dataset
from flowpm_dist.cosmoflow.training.snapshot_volumes import (
    RUN_FILE,
    check_volumes,
    plan_volumes,
    write_volumes,
)
from flowpm_dist.cosmoflow.volumes.record_files import read_header
from flowpm_dist.io.errors import UserError
from flowpm_dist.jobs.folder import check_room
from flowpm_dist.jobs.run_file import parse_settings
from flowpm_dist.simulate.snapshots import Choices, demand_of
from flowpm_dist.simulation.demand import Demand
from meshimpl import launch

EXAMPLE = "flowpm-dist dataset run.toml --output volumes --split train"

Split = StrEnum("Split", ["train", "validation", "test"])


def dataset(
    output: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the files.")],
    run_file: Annotated[
        Path | None, typer.Argument(metavar="[RUN.TOML]", help="What to simulate.")
    ] = None,
    snapshots: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FOLDER",
            help='Paint snapshots of any code instead: a folder of them, or "runs/{}/snap_004".',
        ),
    ] = None,
    table: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --from: parameters, a row for each.")
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="With --from: names of columns of a table without names."),
    ] = None,
    grid: Grid = None,
    scheme: SchemeOption = "cic",
    type: Types = None,
    unit: Units = None,
    weights: Weights = "mass",
    ranks: common.Ranks = None,
    mesh: common.Mesh = None,
    split: Annotated[
        list[Split] | None, typer.Option(help="Write only this split; can be repeated.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "int16"], typer.Option(help="Type of the stored densities.")
    ] = "float32",
    compressed: Annotated[
        bool, typer.Option("--compressed", help="Smaller files, slower to read.")
    ] = False,
    samples_per_file: Annotated[int, typer.Option(min=1)] = 64,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace these splits in DIR.")
    ] = False,
    check: common.Check = False,
    ignore_memory: common.IgnoreMemory = False,
    elsewhere: common.Elsewhere = False,
    changes: common.Set = None,
) -> None:
    """Simulate volumes and write them as TFRecord files, for data.source = "files".

    Or, with --from, paint snapshots of any code: volumes with a table of parameters and a run file
    to train on them. The volumes that are there already are kept.
    """
    if snapshots is not None:
        with common.planning():
            if run_file is not None or table is None:
                raise UserError("--from FOLDER needs --table FILE, and no RUN.TOML")
            choices = Choices(grid, scheme, tuple(type or ()), units_of(unit), weights)
        _paint(
            snapshots, table, columns.split(",") if columns else None, output, choices, ranks, mesh,
            overwrite=overwrite, check=check, ignore_memory=ignore_memory,
        )  # fmt: skip
        return
    with common.planning():
        if run_file is None:
            raise UserError("give a RUN.TOML to simulate, or --from FOLDER with snapshots")
        if table is not None or columns is not None or grid is not None or type or unit:
            raise UserError("--table, --columns, --grid, --type and --unit go with --from FOLDER")
    splits = [chosen.value for chosen in split or Split]
    options: dict[str, Any] = {"dtype": dtype, "compressed": compressed, "overwrite": overwrite}
    with common.planning():
        plan = TrainingPlan.load(run_file, parse_settings(changes or []))
        shape = check_training_mesh(plan, common.job_size(ranks), source=run_file, shape=mesh)
        demand = Demand(
            "the dataset",
            plan.box.grid,
            shape,
            functools.partial(dataset_memory, plan),
            lambda ranks: check_training_mesh(plan.with_mesh(None), ranks, source=run_file),
        )
        needed = dataset_bytes(plan, splits, dtype=dtype, compressed=compressed)
        resolved = plan.with_mesh(shape).resolved()
        work = common.Preview(resolved, demand, demand.estimate(needed), output)
        work.check_memory(ignore=ignore_memory)
        # Rank 0 alone looks: soon the ranks write there.
        if launch.detect().rank == 0:
            check_dataset(plan, output, splits, elsewhere=check and elsewhere, **options)
    with work.begun(ranks, check=check) as progress:
        from meshimpl.process_mesh import ProcessMesh

        write_dataset(
            plan.with_mesh(shape), ProcessMesh(shape), output, splits,
            samples_per_file=samples_per_file, progress=progress, **options,
        )  # fmt: skip
    if launch.detect().rank == 0:
        written = ", ".join(
            f"{count['samples']} of {name}" for name, count in read_header(output)[1].items()
        )
        print(f"""
Dataset in {output}: {written}.
To train on it, in the run file: [data] source = "files", folder = "{output}".""")


def _paint(
    snapshots: str,
    table: Path,
    columns: list[str] | None,
    output: Path,
    choices: Choices,
    ranks: int | None,
    mesh: str | None,
    *,
    overwrite: bool,
    check: bool,
    ignore_memory: bool,
) -> None:
    """Paints volumes from snapshots; see `dataset`."""
    with common.planning():
        plan = plan_volumes(snapshots, table, columns, output, choices)
        size = common.job_size(ranks)
        demand = demand_of(plan.sources, choices, size, mesh, "the dataset")
        if launch.detect().rank == 0:
            check_volumes(plan, overwrite=overwrite)
        volume = 4 * math.prod(plan.sources[0].grid)
        disk = volume * len(plan.sources if overwrite else plan.missing)
        check_room(output, disk, "the volumes need")
        work = common.Preview(described(plan.sources), demand, demand.estimate(disk), output)
        work.check_memory(ignore=ignore_memory)
    with work.begun(ranks, check=check) as progress:
        from meshimpl.process_mesh import ProcessMesh

        write_volumes(plan, ProcessMesh(demand.mesh), progress, overwrite=overwrite)
    if launch.detect().rank == 0:
        print(f"""
{len(plan.sources)} volumes in {output}, parameters: {", ".join(plan.names)}.
To train on them: flowpm-dist train {output / RUN_FILE}""")
