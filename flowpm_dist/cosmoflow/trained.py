"""Trainings that have a checkpoint, and their networks on any mesh.

TensorFlow is imported when a network is rebuilt: a command can say what is wrong before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flowpm_dist.cosmoflow.folder import TrainedError, TrainingFolder
from flowpm_dist.cosmoflow.plan import TrainingPlan

if TYPE_CHECKING:
    import tensorflow as tf

    from flowpm_dist.cosmoflow.losses import Standardiser
    from flowpm_dist.cosmoflow.network import Network
    from flowpm_dist.cosmoflow.records import RecordDataset
    from meshimpl.process_mesh import ProcessMesh


@dataclass(frozen=True)
class Training:
    """A training that has a checkpoint.

    Attributes:
        folder: of the training.
        plan: what was trained.
        complete: whether all steps were made.
    """

    folder: TrainingFolder
    plan: TrainingPlan
    complete: bool

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.path.absolute().name

    @property
    def simulated(self) -> bool:
        """Whether its volumes are simulations of its own."""
        return self.plan.simulates

    def files(self, split: str, block: Sequence[int] = (0, 1, 0, 1)) -> RecordDataset:
        """Returns a split that is in files: of simulated data the test or the validation set.

        Raises:
            TrainedError: it was trained on one random batch.
            RecordError: files that cannot serve.
        """
        from flowpm_dist.cosmoflow.records import RecordDataset

        data = self.plan.data
        if data.source == "dummy":
            raise TrainedError(
                f'{self.folder.path} was trained with data.source = "dummy", random numbers: there '
                "is nothing to find"
            )
        folder = self.folder.held_out if self.simulated else data.folder
        assert folder is not None
        names = None if self.simulated else data.parameters
        grid = self.plan.grid
        return RecordDataset(folder, split, grid=grid, block=block, parameters=names)


@dataclass(frozen=True)
class TrainedNetwork:
    """A network with the best or the last weights of its training.

    Attributes:
        network: on a mesh.
        standardiser: of its parameters.
        step: number of steps it was trained for.
    """

    network: Network
    standardiser: Standardiser
    step: int


def trained_network(
    training: Training,
    mesh: ProcessMesh,
    batch: int,
    files: RecordDataset | None,
    which: str = "best",
) -> TrainedNetwork:
    """Returns the network of a training, rebuilt on any mesh that fits. On all ranks together.

    Args:
        training: that was read.
        mesh: the ranks.
        batch: volumes that are asked about at once, over all replicas.
        files: of the same dataset as it was trained on; None for simulated data.
        which: the weights, "best" of the validations or "last".

    Raises:
        TrainedError: the checkpoint is damaged, or not of this network.
        ValueError: the mesh does not fit.
    """
    from flowpm_dist.cosmoflow.parts import network_of, standardiser_of

    standardiser = standardiser_of(training.plan, files)
    network = network_of(
        training.plan,
        mesh,
        batch=batch,
        parameters=len(standardiser.names),
        channels=1 if files is None else files.block_shape[-1],
    )
    step = restore_weights(training.folder.weights(which), mesh, network.state)
    return TrainedNetwork(network, standardiser, step)


def restore_weights(folder: Path, mesh: ProcessMesh, weights: Sequence[tf.Variable]) -> int:
    """Restores the weights alone from the latest checkpoint, on all ranks.

    Returns:
        The number of steps it was written after.

    Raises:
        TrainedError: on all ranks; it is damaged, missing, or not of this network.
    """
    import tensorflow as tf

    from flowpm_dist.cosmoflow.checkpoints import take_up

    step = tf.Variable(0, dtype=tf.int64, trainable=False)
    checkpoint = tf.train.Checkpoint(weights=list(weights), step=step)
    found = take_up(folder, mesh, checkpoint, [step, *weights], earlier=False)
    if found is None:
        raise TrainedError(f"{folder} holds no checkpoint")
    return found.step
