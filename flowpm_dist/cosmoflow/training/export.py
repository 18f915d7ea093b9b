"""A trained network as a SavedModel, which TensorFlow runs without this package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typing_extensions import override

from flowpm_dist.cosmoflow.planning.memory import weights_bytes
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.cosmoflow.training.saved import SavedTraining, trained_network
from flowpm_dist.io.files import WriteError
from flowpm_dist.jobs.folder import WorkFolder
from flowpm_dist.observables.light_cone.map_files import cone_table

MARK = "network.json"
GRAPH_BYTES = 4 * 2**20
"""Room for a saved model besides its weights [bytes]."""


class ExportFolder(WorkFolder):
    """The folder of an exported network."""

    kind = "exported network"
    contents = (MARK, "saved_model.pb", "fingerprint.pb", "variables", "assets")
    begun = MARK

    @override
    def alternative(self) -> str:
        return ""

    @override
    def older_work(self) -> str | None:
        return f"an {self.kind}" if self.mark() else None


def export_bytes(training: SavedTraining) -> int:
    """Returns the size of what an export will write, about [bytes]."""
    return weights_bytes(training.plan, training.plan.box.grid) + GRAPH_BYTES


def export_network(
    training: SavedTraining, folder: ExportFolder, which: str = "best"
) -> dict[str, Any]:
    """Writes a trained network into a folder, which has been begun. By one rank alone.

    The saved model has a function `ask`, which is its signature "serving_default" too. It is given
    `volumes` [n, x, y, z], or with channels as a last dimension, such as `flowpm-dist predict`
    takes. They are divided by their mean if the volumes of the training were. Cells that the
    training did not observe must hold "unobserved_cells" of network.json. Maps of weak lensing are
    [n, x, y, 1], with the source as a last dimension where there are several. It returns "mean"
    and, of networks that give error bars, "sigma", float64 [n, parameter] [physical units].

    Args:
        training: whose network is exported.
        folder: where to.
        which: see `trained_network`.

    Returns:
        What the file network.json in the folder says.

    Raises:
        TrainedError: the checkpoint is damaged, or not of this network.
        WriteError: the folder cannot be written.
    """
    import tensorflow as tf

    from flowpm_dist.cosmoflow.network.layers import split_prediction
    from meshimpl.process_mesh import ProcessMesh

    regressor = trained_network(training, ProcessMesh("replica:1"), 1, which)
    network, standardiser, header = regressor.network, regressor.standardiser, training.header()
    over_mean = training.divides_by_mean(header)
    shape = [None, *training.plan.input_shape]
    if network.channels > 1:
        shape.append(network.channels)
    spec = tf.TensorSpec(shape, training.plan.precision, "volumes")

    def ask(volumes: tf.Tensor) -> dict[str, tf.Tensor]:
        if over_mean:
            volumes /= tf.reduce_mean(volumes, axis=[1, 2, 3], keepdims=True)
        outputs = tf.cast(network.on_whole_volumes(volumes), tf.float64)
        mean, sigma = split_prediction(network.loss, outputs)
        answer = {"mean": standardiser.restore(mean)}
        return answer if sigma is None else answer | {"sigma": standardiser.restore_sigma(sigma)}

    saved = tf.Module()
    saved.kept = network.saved
    saved.ask = tf.function(ask, input_signature=[spec], autograph=False)
    about = {
        "parameters": list(standardiser.names),
        "priors": {name: list(map(float, ends)) for name, ends in standardiser.ranges.items()},
        "volumes": [*training.plan.input_shape, network.channels],
        "divided_by_mean": over_mean,
        **_expected_input(training.plan),
        "network": training.plan.network.name,
        "weights_of_step": regressor.step,
    }
    _save(saved, folder.path)
    folder.write_mark(complete=True, **about)
    return about


def _expected_input(plan: TrainingPlan) -> dict[str, Any]:
    """Returns what a network sees: its axes and extent, what was observed, and masked cells."""
    record, cone = plan.record, plan.lightcone
    expected: dict[str, Any] = {"axes": ["x", "y", "z", "channel"], "box_size": list(plan.box.size)}
    if cone is not None:
        expected = {"axes": ["x", "y", "one layer", "source"], "lightcone": cone_table(cone)}
    if record is not None:
        expected["observation"] = record.table()
        if record.options.value("mask") is not None:
            expected["unobserved_cells"] = record.options.unobserved
    return expected


def _save(saved: Any, path: Path) -> None:
    import tensorflow as tf

    try:
        tf.saved_model.save(saved, str(path), signatures=saved.ask)
    except (tf.errors.OpError, OSError) as error:
        raise WriteError.of(path, error) from error
