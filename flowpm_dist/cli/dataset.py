"""The command `flowpm-dist dataset`."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
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

OF_SNAPSHOTS = ("table", "columns", "parameters", "grid", "scheme", "type", "unit", "weights")
OF_SIMULATIONS = ("run_file", "split", "dtype", "compressed", "samples_per_file", "changes")
"""Arguments that go with --from, and those that go with a run file."""

Split = StrEnum("Split", ["train", "validation", "test"])


def dataset(
    context: typer.Context,
    output: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the files.")],
    run_file: Annotated[
        Path | None, typer.Argument(metavar="[RUN.TOML]", help="What to simulate.")
    ] = None,
    snapshots: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FOLDER",
            help='Paint snapshots of any code instead: a folder of them, or "runs/{}/snap_004", '
            "with the number of the row or {NAME} for its text in a column.",
        ),
    ] = None,
    table: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --from: parameters, a row for each.")
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="With --from: names of columns of a table without names."),
    ] = None,
    parameters: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="With --from: columns to learn; by default all numbers."),
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
    with common.planning():
        _check_given(context, OF_SNAPSHOTS if snapshots is None else OF_SIMULATIONS)
    if snapshots is not None:
        with common.planning():
            if table is None:
                raise UserError("--from FOLDER needs --table FILE")
            choices = Choices(grid, scheme, tuple(type or ()), units_of(unit), weights)
        _paint(
            (snapshots, table, _split(columns), _split(parameters), output, choices), ranks, mesh,
            overwrite=overwrite, check=check, ignore_memory=ignore_memory,
        )  # fmt: skip
        return
    with common.planning():
        if run_file is None:
            raise UserError("give a RUN.TOML to simulate, or --from FOLDER with snapshots")
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


def _split(names: str | None) -> list[str] | None:
    return names.split(",") if names else None


def _check_given(context: typer.Context, others: Sequence[str]) -> None:
    """Checks that no argument of the other kind of dataset was given.

    Raises:
        UserError: one was.
    """
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if parameter.name in others and source is not None and source.name == "COMMANDLINE":
            argument = parameter.opts[0] if parameter.param_type_name == "option" else "a run file"
            rule = "goes with" if others is OF_SNAPSHOTS else "does not go with"
            raise UserError(f"{argument} {rule} --from FOLDER")


def _paint(
    request: tuple[str, Path, list[str] | None, list[str] | None, Path, Choices],
    ranks: int | None,
    mesh: str | None,
    *,
    overwrite: bool,
    check: bool,
    ignore_memory: bool,
) -> None:
    """Paints volumes from snapshots, see `dataset`; the request is `plan_volumes`'s."""
    output, choices = request[-2:]
    with common.planning():
        plan = plan_volumes(*request)
        size = common.job_size(ranks)
        demand = demand_of(plan.sources, choices, size, mesh, "the dataset")
        if launch.detect().rank == 0:
            check_volumes(plan, overwrite=overwrite)
        volume = 4 * math.prod(plan.sources[0].grid)
        disk = volume * len(plan.sources if overwrite else plan.missing)
        check_room(output, disk, "the volumes need")
        times = sorted({source.files.a for source in plan.sources})
        warnings = (
            (f"the snapshots are of scale factors from {times[0]:g} to {times[-1]:g}",)
            if times[-1] > times[0] * (1 + 1e-3)
            else ()
        )
        work = common.Preview(
            described(plan.sources), demand, demand.estimate(disk), output, warnings=warnings
        )
        work.check_memory(ignore=ignore_memory)
    with work.begun(ranks, check=check) as progress:
        from meshimpl.process_mesh import ProcessMesh

        for warning in warnings:
            progress.warn(warning)
        write_volumes(plan, ProcessMesh(demand.mesh), progress, overwrite=overwrite)
    if launch.detect().rank == 0:
        print(f"""
{len(plan.sources)} volumes in {output}, parameters: {", ".join(plan.names)}.
To train on them: flowpm-dist train {output / RUN_FILE}""")
        try:
            TrainingPlan.load(output / RUN_FILE)
        except UserError as error:
            print(f"Give another --grid with --overwrite, or change the run file first: {error}")
