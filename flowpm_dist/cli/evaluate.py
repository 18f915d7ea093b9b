"""The commands that ask trained networks: `evaluate` and `predict`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flowpm_dist.cli.common import Mesh, Ranks, begin_job, job, job_size, refuse
from flowpm_dist.cosmoflow.evaluation_results import Evaluation, check_evaluation_folder
from flowpm_dist.cosmoflow.folder import TrainingFolder
from flowpm_dist.cosmoflow.prediction import Found, predict_volume, prediction_mesh
from flowpm_dist.cosmoflow.trained import asking_mesh, read_training
from flowpm_dist.io.errors import UserError
from flowpm_dist.io.volume import open_volume
from meshimpl import launch

COLUMNS = 112
"""Width of the table where there is no terminal."""


def add_to(app: typer.Typer) -> None:
    """Give a program these commands."""
    app.command(
        epilog="Example: [bold]flowpm-dist evaluate run-training another-seed --ranks 2[/bold]"
    )(evaluate)
    app.command(epilog="Example: [bold]flowpm-dist predict run-training volume.npy[/bold]")(predict)


def evaluate(
    trainings: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Trainings that differ in their seeds.")
    ],
    ranks: Ranks = None,
    mesh: Mesh = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where it goes; by default evaluation in the first DIR."),
    ] = None,
) -> None:
    """Judge trained networks on simulations they never saw, beside other methods."""
    try:
        for training in map(read_training, trainings):
            config = training.config
            samples = config.data.test if training.simulated else config.training.batch
            asking_mesh(training, job_size(ranks), samples, mesh)
        check_evaluation_folder(output or TrainingFolder(trainings[0]).evaluation)
    except UserError as error:
        refuse(str(error))
    begin_job(ranks)
    with job() as progress:
        from flowpm_dist.cosmoflow.evaluation import evaluate as judge

        evaluation = judge(trainings, mesh, progress)
        if evaluation is not None:
            show(evaluation, evaluation.write(output))


def show(evaluation: Evaluation, folder: Path) -> None:
    """Print the table, what it does not say, and where all of it is."""
    console = Console(width=None if sys.stdout.isatty() else COLUMNS, highlight=False)
    count = len(evaluation.predictions[evaluation.main].truth)
    console.print(f"On {count} test volumes, which no method has seen:")
    console.print(evaluation.table())
    lines = [
        *evaluation.sentences(),
        "",
        f"Evaluation in {folder}:",
        "  predicted.png       predicted against true; table.md, table.csv: all numbers",
        "  learning_curve.png  error against the number of simulations",
    ]
    if (folder / "calibration.png").exists():
        lines.append("  calibration.png     whether the error bars are right")
    print("\n".join(lines), flush=True)


def predict(
    training: Annotated[Path, typer.Argument(metavar="DIR", help="A training.")],
    volume: Annotated[
        str,
        typer.Argument(metavar="VOLUME", help="A density: .npy, zarr such as a run's, or HDF5."),
    ],
    ranks: Ranks = None,
    mesh: Mesh = None,
    box_size: Annotated[
        float | None, typer.Option(help="Side of the volume in Mpc/h, if its file does not tell.")
    ] = None,
) -> None:
    """Find the parameters of a volume with a trained network."""
    try:
        shape = prediction_mesh(read_training(training), job_size(ranks), mesh)
        open_volume(volume)
    except UserError as error:
        refuse(str(error))
    begin_job(ranks)
    with job() as progress:
        found = predict_volume(training, volume, shape, progress, box_size)
    if launch.detect().rank == 0:
        print(answer(found))


def answer(found: Found) -> str:
    """The parameters of a volume, a line each, and what one should know about them."""
    width = max(len(name) for name, _, _ in found.parameters)
    lines = []
    for name, value, sigma in found.parameters:
        bar = "" if sigma is None else f" ± {sigma:.2g}"
        lines.append(f"{name:{width}} = {value:.4g}{bar}")
    return "\n".join([*lines, *found.notes])
