"""The command `flowpm-dist predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowpm_dist.cli import common
from flowpm_dist.cosmoflow.evaluation.meshes import asking_demand, prediction_mesh
from flowpm_dist.cosmoflow.evaluation.posteriors import (
    ANSWER_FILES,
    Question,
    check_prediction_folder,
    fitted_heads,
)
from flowpm_dist.cosmoflow.evaluation.prediction import (
    VolumePrediction,
    check_question,
    predict_volume,
)
from flowpm_dist.cosmoflow.evaluation.trainings import PosteriorError
from flowpm_dist.cosmoflow.training.saved import SavedTraining, read_training
from meshimpl import launch

EXAMPLE = "flowpm-dist predict run-training volume.npy"


def predict(
    training: Annotated[Path, typer.Argument(metavar="DIR", help="A training.")],
    volume: Annotated[
        str,
        typer.Argument(
            metavar="VOLUME",
            help="A density or counts: .npy, zarr or HDF5; or maps of lensing.",
        ),
    ],
    ranks: common.Ranks = None,
    mesh: common.Mesh = None,
    box_size: Annotated[
        float | None, typer.Option(help="Side of the volume in Mpc/h, if its file does not say.")
    ] = None,
    checkpoint: common.Which = "best",
    head: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Head of the posterior, one that evaluate --posteriors has fitted."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the posterior's samples; by default DIR/predictions/VOLUME.",
        ),
    ] = None,
    check: common.Check = False,
    ignore_memory: common.IgnoreMemory = False,
) -> None:
    """Find the parameters of a volume, or of maps of lensing, with a trained network."""
    with common.planning():
        trained = read_training(training)
        shape = prediction_mesh(trained, common.job_size(ranks), mesh)
        # Rank 0 alone looks: one pass through the volume is enough.
        if launch.detect().rank == 0:
            check_question(trained, volume, box_size)
        folder = _checked_folder(trained, volume, head, output)
        demand = asking_demand(trained, shape, "the prediction")
        work = common.Preview(trained.plan.resolved(), demand, demand.estimate())
        work.check_memory(ignore=ignore_memory)
    with work.begun(ranks, check=check) as progress:
        from meshimpl.process_mesh import ProcessMesh

        prediction = predict_volume(
            trained,
            volume,
            ProcessMesh(shape),
            progress,
            box_size,
            which=checkpoint,
            head=head,
            needed=output is not None,
        )
        if launch.detect().rank == 0 and prediction.posterior is not None:
            prediction.posterior.write(folder, progress.warn)
    if launch.detect().rank == 0:
        print(answer(prediction, folder))


def _checked_folder(
    trained: SavedTraining, volume: str, head: str | None, output: Path | None
) -> Path:
    """Returns the folder of the posterior's samples, in which they can be written.

    Args:
        trained: the training.
        volume, head, output: see `predict`.

    Raises:
        PosteriorError: there is no posterior whose samples could be written to `output`.
        OutputError: the folder holds other things.
    """
    folder = output or trained.folder.prediction(Path(volume).name.replace(":", "."))
    fitted = fitted_heads(trained, head)
    if fitted and output is None:
        trained.folder.check_links(["predictions"], "a prediction is written there")
    if fitted:
        check_prediction_folder(folder, Question.of(volume, trained))
    elif output is not None:
        training = trained.folder.path
        raise PosteriorError(
            f"--output {output}: {training} has no posterior whose samples could go there; "
            f"flowpm-dist evaluate {training} --posteriors fits one"
        )
    return folder


def answer(found: VolumePrediction, folder: Path) -> str:
    """The parameters of a volume, a line each, and what one should know about them.

    Args:
        found: the parameters.
        folder: folder of the posterior, if one was written.
    """
    width = max(len(name) for name, _, _ in found.parameters)
    lines = []
    for name, value, sigma in found.parameters:
        bar = "" if sigma is None else f" ± {sigma:.2g}"
        lines.append(f"{name:{width}} = {value:.4g}{bar}")
    if found.posterior is not None:
        lines += found.posterior.sentences()
        lines.append(f"Posterior ({found.posterior.head}) in {folder}: {', '.join(ANSWER_FILES)}")
    return "\n".join([*lines, *found.notes])
