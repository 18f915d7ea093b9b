"""The command `flowpm-dist evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from flowpm_dist.cli import common
from flowpm_dist.cosmoflow.evaluation.meshes import asking_demand, common_mesh
from flowpm_dist.cosmoflow.evaluation.results import Evaluation, check_evaluation_folder, rich_table
from flowpm_dist.cosmoflow.evaluation.trainings import (
    check_comparable,
    check_written,
    posterior_options,
)
from flowpm_dist.cosmoflow.planning.folder import TrainedError, fresh_split, is_fresh
from flowpm_dist.cosmoflow.planning.memory import volume_bytes
from flowpm_dist.cosmoflow.training.saved import SavedTraining, read_training
from flowpm_dist.io.errors import decoration
from flowpm_dist.jobs.folder import check_room
from flowpm_dist.jobs.progress import output_columns
from flowpm_dist.jobs.usage import Usage
from meshimpl import launch

EXAMPLE = "flowpm-dist evaluate run-training another-seed --ranks 2"


COLUMNS = 112
"""Width of the table where there is no terminal."""


Trainings = Annotated[
    list[Path], typer.Argument(metavar="DIR...", help="Trainings that differ in their seeds.")
]
Output = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="By default DIR/evaluation, -validation, or DIR/fresh/N/evaluation."
    ),
]
Split = Annotated[
    Literal["validation", "test"],
    typer.Option(help="The volumes to judge on: validation leaves the test set alone."),
]
Fresh = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="Simulate a fresh test set, the N-th, and judge on that."
    ),
]
Posteriors = Annotated[
    bool,
    typer.Option(
        "--posteriors", help="Fit and judge posteriors: simulates the training set again, once."
    ),
]
Heads = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME", help='independent, gaussian, flow, or "package.module:object"; all three.'
    ),
]
Baselines = Annotated[
    list[str] | None,
    typer.Option(
        metavar="A+B", help='Statistics such as power+histograms+"package.module:function".'
    ),
]


def evaluate(
    trainings: Trainings,
    ranks: common.Ranks = None,
    mesh: common.Mesh = None,
    output: Output = None,
    split: Split = "test",
    fresh: Fresh = None,
    checkpoint: common.Which = "best",
    posteriors: Posteriors = False,
    head: Heads = None,
    baseline: Baselines = None,
    check: common.Check = False,
    ignore_memory: common.IgnoreMemory = False,
    elsewhere: common.Elsewhere = False,
) -> None:
    """Judge trained networks on new simulations, and compare them with other methods."""
    with common.planning():
        fits = bool(posteriors or head or baseline)
        requested = split if fresh is None else fresh_split(fresh)
        if fresh is not None and split == "validation":
            raise TrainedError("--fresh and --split validation are two test sets: give one of them")
        read = [read_training(folder) for folder in trainings]
        check_comparable(read, requested)
        check_written(read, requested)
        of_maps = read[0].plan.lightcone is not None
        wanted = posterior_options(head, baseline, of_maps=of_maps) if fits else None
        shape = common_mesh(read, common.job_size(ranks), mesh, requested, fits=fits, planned=True)
        demand = asking_demand(
            read[0],
            shape,
            "the evaluation",
            networks=len(read),
            simulating=fits or fresh is not None,
            statistics=wanted.statistics if wanted else (),
        )
        work = common.Preview(read[0].plan.resolved(), demand, demand.estimate())
        work.check_memory(ignore=ignore_memory)
        _check_folders(read[0], requested, output, room=not (check and elsewhere))
    with work.begun(ranks, check=check) as progress, Usage() as usage:
        from flowpm_dist.cosmoflow.evaluation.evaluation import evaluate as judge
        from flowpm_dist.jobs.session import gather
        from meshimpl.process_mesh import ProcessMesh

        shape = common_mesh(read, launch.detect().size, mesh, requested, fits=fits)
        options = {"split": requested, "which": checkpoint}
        ranks_mesh = ProcessMesh(shape)
        evaluation = judge(read, ranks_mesh, progress, posteriors=wanted, **options)
        used = usage.of_job(gather(ranks_mesh))
        if evaluation is not None:
            written = evaluation.write(output, used)
            with decoration("summary", progress.warn), common.output_dropped_if_broken():
                show(evaluation, written)


def _check_folders(training: SavedTraining, split: str, output: Path | None, *, room: bool) -> None:
    """Checks that a fresh test set has room, and that the evaluation can be written.

    Args:
        training: the first training, in whose folder both are by default.
        split: the volumes to judge on.
        output: see `evaluate`.
        room: whether the test set needs room on the disk here.

    Raises:
        OutputError: one of them cannot be written.
    """
    folder, plan = training.folder, training.plan
    if is_fresh(split) and not folder.dataset(split).exists():
        count = plan.simulated.test if room else 0
        needed = count * volume_bytes(plan, plan.box.grid)
        check_room(folder.path, needed, "the fresh test set needs")
    judged, _ = training.split_there(split)
    check_evaluation_folder(output or folder.evaluation(judged), own=output is None)


def show(evaluation: Evaluation, folder: Path) -> None:
    """Print the table, remarks on it, and the names of the files with all results."""
    columns = output_columns()
    console = Console(width=columns or COLUMNS, force_terminal=columns is not None, highlight=False)
    count = len(evaluation.predictions[evaluation.main].truth)
    fitted = "" if evaluation.split == "validation" else ", which no method was fitted to"
    console.print(f"On {count} {evaluation.split} samples{fitted}:")
    console.print(rich_table(evaluation.scores, console.width))
    if evaluation.posteriors is not None:
        console.print(evaluation.posteriors.table())
    lines = [
        *evaluation.sentences(),
        "",
        f"Evaluation in {folder}:",
        "  predicted.png       predicted against true; table.md, table.csv: all numbers",
        "  learning_curve.png  error against the number of simulations",
    ]
    if (folder / "calibration.png").exists():
        lines.append("  calibration.png     whether the error bars are right")
    if evaluation.posteriors is not None:
        lines.append(
            "  posteriors.md       all posteriors; ranks.png, tarp.png: whether they are right"
        )
    print("\n".join(lines), flush=True)
