"""Trainings that were run: what they were of, and their networks on any mesh.

Nothing here imports TensorFlow before a network is made, so that a command can say what is wrong
before its work begins.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowpm_dist.config.training import TrainingConfig, check_training_mesh, load_training
from flowpm_dist.cosmoflow.folder import TrainedError, TrainingFolder
from flowpm_dist.grid.decomposition import parse_mesh

if TYPE_CHECKING:
    import tensorflow as tf

    from flowpm_dist.cosmoflow.losses import Standardiser
    from flowpm_dist.cosmoflow.network import Network
    from flowpm_dist.cosmoflow.records import RecordDataset
    from meshimpl.process_mesh import ProcessMesh

OF_UNIVERSES = ("box", "cosmology", "priors", "initial", "evolution")
"""Sections that say what is simulated."""


@dataclass(frozen=True)
class Training:
    """A training that has a checkpoint.

    Attributes:
        folder: of the training.
        config: its run file.
        complete: whether all steps were made.
    """

    folder: TrainingFolder
    config: TrainingConfig
    complete: bool

    @property
    def name(self) -> str:
        """Of its folder."""
        return self.folder.path.absolute().name

    @property
    def simulated(self) -> bool:
        """Whether its volumes are simulations of its own."""
        return self.config.data.source == "simulate"

    def files(self, split: str, block: Sequence[int] = (0, 1, 0, 1)) -> RecordDataset:
        """A split that is in files: of simulated data the test and validation sets.

        Raises:
            TrainedError: it was trained on one random batch.
            RecordError: files that cannot serve.
        """
        from flowpm_dist.cosmoflow.records import RecordDataset

        data = self.config.data
        if data.source == "dummy":
            raise TrainedError(
                f'{self.folder.path} was trained with data.source = "dummy", random numbers: there '
                "is nothing to find"
            )
        folder = self.folder.held_out if self.simulated else data.folder
        assert folder is not None
        names = None if self.simulated else data.parameters
        grid = self.config.box.grid
        return RecordDataset(folder, split, grid=grid, block=block, parameters=names)


def read_training(path: Path) -> Training:
    """What is in the folder of a training. Nothing is loaded yet.

    Raises:
        TrainedError: no training is there, or none that has saved a checkpoint.
        ConfigError: its run file is not what it was.
    """
    folder = TrainingFolder(Path(path))
    mark = folder.mark()
    if not mark:
        raise TrainedError(
            f"{path} holds no training: give the folder that flowpm-dist train wrote"
        )
    if not (folder.checkpoints / "checkpoint").exists() or not folder.run_file.exists():
        raise TrainedError(
            f"the training in {path} has not saved a checkpoint yet: go on with it (flowpm-dist "
            "train --resume), or save earlier (training.checkpoint_every)"
        )
    return Training(folder, load_training(folder.run_file), bool(mark.get("complete")))


def universes(config: TrainingConfig) -> dict[str, Any]:
    """All settings that what is simulated depends on, for data that is simulated."""
    table = tomllib.loads(config.resolved())
    found = {section: table.get(section) for section in OF_UNIVERSES}
    precision = "float64" if config.network.precision == "float64" else "float32"
    return {**found, "data.seed": config.data.seed, "precision of the simulation": precision}


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names of the settings that differ, of two nested tables."""
    found = []
    for key in dict.fromkeys([*one, *other]):
        a, b = one.get(key), other.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += [f"{key}.{name}" for name in differences(a, b)]
        elif a != b:
            found.append(key)
    return found


def asking_mesh(training: Training, ranks: int, samples: int, shape: str | None) -> str:
    """The mesh to ask a network on, for so many volumes.

    Unless it is given: the mesh of the training where there are as many ranks and volumes were
    split, else a replica for each rank, as far as there are volumes, and those split further.

    Args:
        training: whose network is asked.
        ranks: of the job.
        samples: volumes.
        shape: that was asked for.

    Raises:
        ConfigError: it does not fit.
        TrainedError: fewer volumes than replicas.
    """
    config, source = training.config, training.folder.run_file
    before = parse_mesh(config.mesh.shape, batched=True) if config.mesh.shape else {}
    if shape is None and math.prod(before.values()) == ranks > before.get("replica", 1):
        shape = config.mesh.shape
    if shape is None:
        batch = max(n for n in range(1, ranks + 1) if ranks % n == 0 and n <= samples)
    else:
        batch = _replicas(shape)
        if batch > samples:
            raise TrainedError(f"mesh {shape}: {batch} replicas are more than {samples} volumes")
    config = config.model_copy(update={"mesh": type(config.mesh)()})
    return check_training_mesh(with_batch(config, batch), ranks, source=source, shape=shape)


def _replicas(shape: str) -> int:
    try:
        return parse_mesh(shape, batched=True).get("replica", 1)
    except ValueError:
        return 1  # `check_training_mesh` says what is wrong


def with_batch(config: TrainingConfig, batch: int) -> TrainingConfig:
    """The same with another number of volumes in a batch."""
    return config.model_copy(
        update={"training": config.training.model_copy(update={"batch": batch})}
    )


@dataclass(frozen=True)
class TrainedNetwork:
    """A network with the weights of the latest checkpoint.

    Attributes:
        network: on a mesh.
        standardiser: of its parameters.
        step: number of steps it was trained for.
    """

    network: Network
    standardiser: Standardiser
    step: int


def trained_network(
    training: Training, mesh: ProcessMesh, batch: int, files: RecordDataset | None
) -> TrainedNetwork:
    """Rebuild the network of a training on any mesh that fits. On all ranks together.

    Args:
        training: that was read.
        mesh: the ranks.
        batch: volumes that are asked about at once, over all replicas.
        files: of the same dataset as it was trained on; None for simulated data.

    Raises:
        TrainedError: the checkpoint is damaged, or not of this network.
        ValueError: the mesh does not fit.
    """
    from flowpm_dist.cosmoflow.parts import network_of, standardiser_of

    standardiser = standardiser_of(training.config, files)
    network = network_of(
        with_batch(training.config, batch),
        mesh,
        parameters=len(standardiser.names),
        channels=1 if files is None else files.block_shape[-1],
    )
    step = restore_weights(training.folder.checkpoints, mesh, network.state)
    return TrainedNetwork(network, standardiser, step)


def restore_weights(folder: Path, mesh: ProcessMesh, weights: Sequence[tf.Variable]) -> int:
    """Take up the weights of the latest checkpoint alone, on all ranks.

    Returns:
        The number of steps it was written after.

    Raises:
        TrainedError: on all ranks; it is damaged, missing, or not of this network.
    """
    import tensorflow as tf

    from flowpm_dist.cosmoflow.checkpoints import take_up

    step = tf.Variable(0, dtype=tf.int64, trainable=False)
    checkpoint = tf.train.Checkpoint(weights=list(weights), step=step)
    if not take_up(folder, mesh, checkpoint, [step, *weights], partly=True):
        raise TrainedError(f"{folder} holds no checkpoint")
    return int(step)
