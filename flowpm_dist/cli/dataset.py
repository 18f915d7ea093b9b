"""The command `flowpm-dist dataset`."""

from __future__ import annotations

import functools
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flowpm_dist.cli import common
from flowpm_dist.cosmoflow.planning.memory import check_training_mesh, dataset_memory
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.cosmoflow.training.dataset import check_dataset, dataset_bytes, write_dataset
from flowpm_dist.cosmoflow.volumes.record_files import read_header
from flowpm_dist.jobs.run_file import parse_settings
from flowpm_dist.simulation.demand import Demand
from meshimpl import launch

EXAMPLE = "flowpm-dist dataset run.toml --output volumes --split train"

Split = StrEnum("Split", ["train", "validation", "test"])


def dataset(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.TOML", help="What to simulate.")],
    output: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the files.")],
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
    """Simulate volumes and write them as TFRecord files, for data.source = "files"."""
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
