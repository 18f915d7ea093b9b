"""Trainings that have a checkpoint, and their networks on any mesh.

TensorFlow is imported when a network is rebuilt: a command can say what is wrong before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flowpm_dist.cosmoflow.planning.folder import TrainedError, TrainingFolder, is_fresh
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.cosmoflow.volumes.arrays import ArrayDataset, arrays_of
from flowpm_dist.cosmoflow.volumes.record_files import (
    DATASET,
    MEAN_ONE,
    DatasetHeader,
    RecordError,
    read_header,
    splits_of,
)
from flowpm_dist.jobs import cone_record
from flowpm_dist.observables.options import ObservationError
from flowpm_dist.observables.record import ATTRIBUTE, ObservationRecord

if TYPE_CHECKING:
    import tensorflow as tf

    from flowpm_dist.cosmoflow.network.keras_network import AnyNetwork
    from flowpm_dist.cosmoflow.network.losses import Standardiser
    from flowpm_dist.cosmoflow.volumes.file_source import FilesDataset
    from meshimpl.process_mesh import ProcessMesh


@dataclass(frozen=True)
class Training:
    """A training that has a checkpoint.

    Attributes:
        folder: of the training.
        plan: what was trained.
        complete: whether all steps were made.
        steps: that were made, where ranks have agreed on it: a training may go on meanwhile.
        fresh_in: the folder that has fresh test sets: its own, or of a training of the same
            universes.
    """

    folder: TrainingFolder
    plan: TrainingPlan
    complete: bool
    steps: int | None = None
    fresh_in: TrainingFolder | None = None

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.path.absolute().name

    @property
    def steps_made(self) -> int:
        """The number of steps that were made."""
        made = int(str(self.folder.mark().get("step", self.plan.total_steps)))
        return made if self.steps is None else self.steps

    @property
    def ended_early(self) -> bool:
        """Whether it ended by itself, before its last step, as validations got no better."""
        return bool(self.folder.mark().get("ended_early"))

    def told(self, step: int) -> str:
        """Returns which weights are asked, and how far the training has come.

        Args:
            step: number of steps that the weights were trained for.
        """
        made = self.folder.mark().get("step", step)
        return f"weights of step {step}; {made} of {self.plan.total_steps} steps made"

    @property
    def simulated(self) -> bool:
        """Whether its volumes are simulations of its own."""
        return self.plan.simulates

    def split_there(self, asked: str) -> tuple[str, str]:
        """Returns the split to judge on: validation where there is no test set, as in public files.

        Args:
            asked: "test", or another split.

        Returns:
            The split, and a sentence where it is not the one that was asked for, else "".
        """
        folder = self.plan.data.folder
        if asked != "test" or folder is None or "test" in splits_of(folder):
            return asked, ""
        return "validation", (f"{folder} has no split 'test': these are the volumes of validation.")

    def header(self) -> DatasetHeader | None:
        """Returns what the files have in common that it was trained on; None of simulations.

        Raises:
            RecordError: files that cannot serve.
        """
        from flowpm_dist.cosmoflow.volumes.public_files import public_header_of

        data = self.plan.data
        if data.source == "arrays":
            return arrays_of(self.plan).header
        if data.folder is None:
            return None
        if (data.folder / DATASET).exists():
            return read_header(data.folder)[0]
        return public_header_of(data.folder, "train", data.parameters)

    def channels(self, header: DatasetHeader | None) -> int:
        """Returns the number of values of a cell.

        Args:
            header: see `header`.
        """
        return self.plan.channels if header is None else header.channels

    def divides_by_mean(self, header: DatasetHeader | None) -> bool:
        """Returns whether a volume is divided by its mean before the network is asked about it.

        Args:
            header: see `header`.
        """
        seen = self.plan.observation
        if seen is not None and not seen.has_mean_one:
            return False
        return header is None or header.unit == MEAN_ONE

    def samples(self, split: str) -> int:
        """Returns the number of volumes of a split; files are not indexed if names tell it.

        Raises:
            TrainedError, RecordError: see `files`.
        """
        from flowpm_dist.cosmoflow.volumes.public_files import samples_of_names

        folder = self.plan.data.folder
        if is_fresh(split) and not (self.keeper(split).dataset(split) / DATASET).exists():
            return self.plan.data.test
        if folder is not None and not (folder / DATASET).exists():
            return samples_of_names(folder, split) or len(self.files(split))
        return len(self.files(split))

    def keeper(self, split: str) -> TrainingFolder:
        """Returns the folder that has the simulations of a split that was not trained on."""
        return (self.fresh_in or self.folder) if is_fresh(split) else self.folder

    def files(
        self,
        split: str,
        block: Sequence[int] = (0, 1, 0, 1),
        mesh: ProcessMesh | None = None,
    ) -> FilesDataset:
        """Returns a split that is in files: of simulated data a test or the validation set.

        Args:
            split: its name.
            block: this rank's part of each volume.
            mesh: ranks that index the files together, see `RecordDataset`.

        Raises:
            TrainedError: it was trained on one random batch.
            RecordError: files that cannot serve.
            ObservationError: files of another observation than that of the training.
        """
        from flowpm_dist.cosmoflow.volumes.records import RecordDataset

        data = self.plan.data
        if data.source == "dummy":
            raise TrainedError(
                f'{self.folder.path} was trained with data.source = "dummy", random numbers: there '
                "is nothing to find"
            )
        if data.source == "arrays":
            return ArrayDataset(arrays_of(self.plan), split, block)
        folder = self.keeper(split).dataset(split) if self.simulated else data.folder
        assert folder is not None
        names = None if self.simulated else data.parameters
        grid = self.plan.seen
        found = RecordDataset(folder, split, grid=grid, block=block, parameters=names, mesh=mesh)
        self.check_seen(found.header, folder)
        return found

    def check_held_out(self) -> None:
        """Checks that what was held out before is what the training would hold out now.

        Raises:
            ObservationError: files that the observation names have changed since.
        """
        folder = self.folder.held_out
        try:
            header = read_header(folder)[0]
        except (RecordError, OSError):
            return  # they are made anew, see `hold_out`
        self.check_seen(header, folder)

    def check_seen(self, header: DatasetHeader, folder: Path) -> None:
        """Checks that the volumes of a dataset are of what the network is trained for.

        Args:
            header: of the dataset.
            folder: where it is, for messages.

        Raises:
            ObservationError: they are not.
        """
        told, what = header.attributes.get(ATTRIBUTE), f"the dataset in {folder}"
        if told is not None and self.plan.observation is not None:
            record = ObservationRecord.of_table(told, str(folder))
            self.plan.observation.check(record, what)
        there, cone = header.attributes.get(cone_record.ATTRIBUTE), self.plan.lightcone
        if there is None or cone is None:
            return
        if found := cone_record.differences(cone_record.cone_table(cone), there):
            raise ObservationError(
                f"{what} has maps of another light cone: {', '.join(found)} of [lightcone] differ, "
                "or the file of an n(z) was changed since: train anew"
            )


@dataclass(frozen=True)
class TrainedNetwork:
    """A network with the best or the last weights of its training.

    Attributes:
        network: on a mesh.
        standardiser: of its parameters.
        step: number of steps it was trained for.
    """

    network: AnyNetwork
    standardiser: Standardiser
    step: int


def trained_network(
    training: Training, mesh: ProcessMesh, batch: int, which: str = "best"
) -> TrainedNetwork:
    """Returns the network of a training, rebuilt on any mesh that fits. On all ranks together.

    Args:
        training: that was read.
        mesh: the ranks.
        batch: volumes that are asked about at once, over all replicas.
        which: the weights, "best" of the validations or "last".

    Raises:
        TrainedError: the checkpoint is damaged, or not of this network.
        ValueError: the mesh does not fit.
    """
    from flowpm_dist.cosmoflow.training.parts import network_of, standardiser_of

    header = training.header()
    standardiser = standardiser_of(training.plan, header)
    network = network_of(
        training.plan,
        mesh,
        batch=batch,
        parameters=len(standardiser.names),
        channels=training.channels(header),
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

    from flowpm_dist.cosmoflow.training.checkpoints import take_up

    step = tf.Variable(0, dtype=tf.int64, trainable=False)
    checkpoint = tf.train.Checkpoint(weights=list(weights), step=step)
    found = take_up(folder, mesh, checkpoint, [step, *weights], earlier=False)
    if found is None:
        raise TrainedError(f"{folder} holds no checkpoint")
    return found.step
