"""Trainings that have a checkpoint, and their networks on any mesh.

TensorFlow is imported only when a network is rebuilt, so that a command can report mistakes before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from flowpm_dist.cosmoflow.planning.completion import read_dataset
from flowpm_dist.cosmoflow.planning.folder import TrainedError, TrainingFolder, is_fresh
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.cosmoflow.volumes.public_files import public_header, samples_of_names
from flowpm_dist.cosmoflow.volumes.record_files import (
    DATASET,
    MEAN_ONE,
    DatasetHeader,
    RecordError,
    dataset_files,
    read_header,
    splits_of,
)
from flowpm_dist.observables.light_cone import map_files
from flowpm_dist.observables.record import ATTRIBUTE, ObservationRecord
from flowpm_dist.observables.tracers import ObservationError

if TYPE_CHECKING:
    from flowpm_dist.cosmoflow.training.trainer import Regressor
    from flowpm_dist.cosmoflow.volumes.records import Dataset
    from meshimpl.process_mesh import ProcessMesh


@dataclass(frozen=True)
class SavedTraining:
    """A training that has a checkpoint.

    Attributes:
        folder: the training's folder.
        plan: the plan of the training.
        complete: whether all steps were made.
        steps: the number of steps made. Set if ranks have agreed on it, because the training may
            still be running; otherwise None.
        fresh_in: the folder that has fresh test sets: the folder of this training, or of another
            one on the same universes.
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
        made = int(str(self.folder.mark().get("step", self.plan.training.steps)))
        return made if self.steps is None else self.steps

    @property
    def ended_early(self) -> bool:
        """Whether it ended before its last step, because validations no longer improved."""
        return bool(self.folder.mark().get("ended_early"))

    def progress_note(self, step: int) -> str:
        """Returns a sentence: which weights are used, and how many steps the training has made.

        Args:
            step: number of steps that the weights were trained for.
        """
        made = self.folder.mark().get("step", step)
        return f"weights of step {step}; {made} of {self.plan.training.steps} steps made"

    def split_there(self, split: str) -> tuple[str, str]:
        """Returns the split to evaluate on: validation if there is no test set, as in public files.

        Args:
            split: "test", or another split.

        Returns:
            The split, and a sentence if it is not the requested one, else "".
        """
        folder = self.plan.dataset_folder
        if split != "test" or folder is None or "test" in splits_of(folder):
            return split, ""
        return "validation", (f"{folder} has no split 'test': these are the volumes of validation.")

    def header(self) -> DatasetHeader | None:
        """Returns the header of the files it was trained on; None if it was trained on simulations.

        Raises:
            RecordError: files that are damaged or do not match.
        """
        data = self.plan.data
        if data.source == "files" and not (data.folder / DATASET).exists():
            return public_header(dataset_files(data.folder, "train", 1)[0], data.parameters)
        return read_dataset(self.plan)[0]

    def divides_by_mean(self, header: DatasetHeader | None) -> bool:
        """Returns whether a volume is divided by its mean before the network reads it.

        Args:
            header: see `header`.
        """
        record = self.plan.record
        if record is not None and not record.has_mean_one:
            return False
        return header is None or header.unit == MEAN_ONE

    def samples(self, split: str) -> int:
        """Returns the number of volumes of a split, if possible from file names, without indexing.

        Raises:
            TrainedError, RecordError: see `files`.
        """
        folder = self.plan.dataset_folder
        if is_fresh(split) and not (self.keeper(split).dataset(split) / DATASET).exists():
            return self.plan.simulated.test
        if folder is not None and not (folder / DATASET).exists():
            return samples_of_names(folder, split) or len(self.files(split))
        return len(self.files(split))

    def keeper(self, split: str) -> TrainingFolder:
        """Returns the folder that holds the simulations of a split that is not the training set."""
        return (self.fresh_in or self.folder) if is_fresh(split) else self.folder

    def files(
        self,
        split: str,
        block: Sequence[int] = (0, 1, 0, 1),
        mesh: ProcessMesh | None = None,
    ) -> Dataset:
        """Returns a split that is stored in files; of simulations, a test or the validation set.

        Args:
            split: its name.
            block: this rank's part of each volume.
            mesh: ranks that index the files together, see `RecordDataset`.

        Raises:
            TrainedError: the network was trained on one random batch.
            RecordError: files that are damaged or do not match.
            ObservationError: the observation of the files differs from the training's.
        """
        from flowpm_dist.cosmoflow.volumes.sources import stored_split

        data = self.plan.data
        if data.source == "dummy":
            raise TrainedError(
                f'{self.folder.path} was trained with data.source = "dummy", random numbers: there '
                "is nothing to find"
            )
        simulated = self.keeper(split).dataset(split)
        dataset = stored_split(self.plan, split, simulated, block, mesh)
        self.check_observation(dataset.header, self.plan.dataset_folder or simulated)
        return dataset

    def check_held_out(self) -> None:
        """Checks that the volumes held out earlier are what the training would hold out now.

        Raises:
            ObservationError: files that the observation names have changed since.
        """
        folder = self.folder.held_out
        try:
            header = read_header(folder)[0]
        except (RecordError, OSError):
            return  # they are made anew, see `hold_out`
        self.check_observation(header, folder)

    def check_observation(self, header: DatasetHeader, folder: Path) -> None:
        """Checks that a dataset has the kind of volumes that the network is trained for.

        Args:
            header: the dataset's header.
            folder: the dataset's folder, for messages.

        Raises:
            ObservationError: it has volumes of another kind.
        """
        observation, where = header.attributes.get(ATTRIBUTE), f"the dataset in {folder}"
        if observation is not None and self.plan.record is not None:
            record = ObservationRecord.of_table(observation, str(folder))
            self.plan.record.check(record, where)
        there, cone = header.attributes.get(map_files.ATTRIBUTE), self.plan.lightcone
        if there is None or cone is None:
            return
        if names := map_files.differences(map_files.cone_table(cone), there):
            raise ObservationError(
                f"{where} has maps of another light cone: {', '.join(names)} of [lightcone] "
                "differ, or the file of an n(z) was changed since: train anew"
            )


def read_training(path: Path) -> SavedTraining:
    """Returns the training in a folder. The network is not loaded yet.

    Raises:
        TrainedError: the folder holds no training, or the training has not saved a checkpoint.
        ConfigError: its run file was changed and has mistakes now.
    """
    folder = TrainingFolder(Path(path))
    mark = folder.mark()
    if not mark:
        raise TrainedError(
            f"{path} holds no training: give the folder that flowpm-dist train wrote"
        )
    if folder.checkpoints.last is None or not folder.run_file.exists():
        raise TrainedError(
            f"the training in {path} has not saved a checkpoint yet: go on with it (flowpm-dist "
            "train --resume), or save earlier (training.checkpoint_every)"
        )
    return SavedTraining(folder, TrainingPlan.load(folder.run_file), bool(mark.get("complete")))


def trained_network(
    training: SavedTraining, mesh: ProcessMesh, batch: int, which: str = "best"
) -> Regressor:
    """Returns the network of a training, rebuilt on any mesh that fits. All ranks call this.

    Args:
        training: the training.
        mesh: the ranks.
        batch: the number of volumes that are predicted at once, over all replicas.
        which: which weights: "best" in the validations, or "last".

    Raises:
        TrainedError: the checkpoint is damaged, or belongs to another network.
        ValueError: the mesh does not fit.
    """
    from flowpm_dist.cosmoflow.training.checkpoints import restore_weights
    from flowpm_dist.cosmoflow.training.trainer import regressor_of

    regressor = regressor_of(training.plan, mesh, training.header(), batch)
    step = restore_weights(training.folder.weights(which), mesh, regressor.network.state)
    return replace(regressor, step=step)
