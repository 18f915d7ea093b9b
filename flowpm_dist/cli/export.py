"""The command `flowpm-dist export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowpm_dist.cli.common import Which, planning, working
from flowpm_dist.cosmoflow.training.export import ExportFolder, export_bytes, export_network
from flowpm_dist.cosmoflow.training.saved import read_training
from flowpm_dist.io.errors import UserError
from meshimpl import launch

EXAMPLE = "flowpm-dist export run-training --output network"

SNIPPET = """import tensorflow as tf
network = tf.saved_model.load({path!r})
found = network.ask(volumes)  # {shape}
found["mean"]{sigma}  # {names}"""


def export(
    training: Annotated[Path, typer.Argument(metavar="DIR", help="A training.")],
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to; by default DIR-network.")
    ] = None,
    checkpoint: Which = "best",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the exported network in DIR.")
    ] = False,
) -> None:
    """Write a trained network as a SavedModel, which TensorFlow runs without this package.

    The training may have been on any mesh of ranks. The network takes whole volumes, and gives
    parameters with their error bars, as flowpm-dist predict does.
    """
    where = output or training.with_name(f"{training.absolute().name}-network")
    folder = ExportFolder(where)
    with planning():
        if launch.detect().size > 1:
            raise UserError("flowpm-dist export is work for one rank: start it without mpirun")
        trained = read_training(training)
        folder.check(overwrite=overwrite, needed=export_bytes(trained))
    with working() as progress:
        progress.note("reading the network")
        folder.begin(overwrite=overwrite)
        try:
            about = export_network(trained, folder, checkpoint)
        finally:
            folder.release()
    *sides, channels = about["volumes"]
    shape = [*map(str, sides), *([str(channels)] if channels > 1 else [])]
    print(f"Network of step {about['weights_of_step']} in {where}. Without this package:\n")
    print(
        SNIPPET.format(
            path=str(where),
            shape=f"[n, {', '.join(shape)}]",
            sigma=', found["sigma"]' if trained.plan.network.loss == "likelihood" else "",
            names=", ".join(about["parameters"]),
        )
    )
