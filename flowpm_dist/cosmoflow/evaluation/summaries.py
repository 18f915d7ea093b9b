"""Summaries of volumes: the features of a trained network, and statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmoflow.network.network import BaseNetwork, Network, of_all_replicas
from flowpm_dist.cosmoflow.training.held_out import fields_of
from flowpm_dist.cosmoflow.training.saved import SavedTraining, trained_network
from flowpm_dist.cosmoflow.training.trainer import Regressor
from flowpm_dist.cosmoflow.volumes.arrays import arrays_of
from flowpm_dist.cosmoflow.volumes.draws import Lanes
from flowpm_dist.cosmoflow.volumes.record_files import Block, dataset_files
from flowpm_dist.cosmoflow.volumes.sources import Batch, in_order
from flowpm_dist.cosmoflow.volumes.universes import (
    as_maps,
    cell_values_of,
    draws_of,
    line_of_sight_of,
    maker_of,
)
from flowpm_dist.io.files import read_arrays, save_arrays
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.posteriors.features import measured
from flowpm_dist.statistics.noisy_maps import NoisyMaps
from flowpm_dist.statistics.register import MAP_STATISTICS, STATISTICS, STATISTICS_VERSION
from meshimpl.process_mesh import ProcessMesh

MOST = 4096
"""If a split is in files, only the first volumes are measured and summarised: so many at most."""
OUTPUTS, HIDDEN = "network outputs", "network features"
"""Names of a network's outputs, and of the features that enter its last layer."""


@dataclass(frozen=True)
class SplitSummaries:
    """Summaries of the volumes of a split, sorted by their truth.

    Attributes:
        truth: [n, p] [physical units].
        parts: `OUTPUTS`, `HIDDEN` and statistics by name, each [n, value].
        step: number of steps that the network was trained for.
    """

    truth: np.ndarray
    parts: dict[str, np.ndarray]
    step: int

    def write(self, path: Path) -> None:
        """Writes a .npz file, without the parts that a user's code computes. Raises WriteError."""
        parts = {name: values for name, values in self.parts.items() if _is_ours(name)}
        numbers = {"step": np.array(self.step), "version": np.array(STATISTICS_VERSION)}
        save_arrays(path, {"truth": self.truth, **numbers, **parts})

    @classmethod
    def read(cls, path: Path) -> SplitSummaries:
        """Reads what `write` wrote.

        Raises:
            KeyError or ValueError: the file holds no summaries, or statistics of another version.
        """
        arrays = read_arrays(path)
        if arrays.pop("version") != STATISTICS_VERSION:
            raise ValueError(f"{path} holds statistics of another version")
        truth, step = arrays.pop("truth"), int(arrays.pop("step"))
        return cls(truth, arrays, step)


def _is_ours(name: str) -> bool:
    """Returns whether this package computes the part with this name, and not a user's code."""
    homes = [register[name] for register in (STATISTICS, MAP_STATISTICS) if name in register]
    in_package = (isinstance(home, str) and home.startswith("flowpm_dist.") for home in homes)
    return name in (OUTPUTS, HIDDEN) or (bool(homes) and all(in_package))


def summarise(
    trainings: Sequence[SavedTraining],
    splits: Sequence[str],
    statistics: Sequence[Sequence[str]],
    mesh: ProcessMesh,
    progress: Progress,
    which: str = "best",
) -> list[dict[str, SplitSummaries]]:
    """Returns summaries of the volumes of splits, for each training. On all ranks together.

    Simulated training universes are simulated again, once for all networks. Existing summaries are
    read, unless the network or the files have changed since.

    Args:
        trainings: the trainings. All have the same volumes, but some may have used fewer of them.
        splits: the names of the splits.
        statistics: the statistics to measure for each training: names of `STATISTICS`, for maps of
            `MAP_STATISTICS`, or "package.module:function".
        mesh: the ranks, of axes replica, row and col; no more replicas than volumes.
        progress: of this rank.
        which: the weights, "best" of the validations or "last".

    Returns:
        The summaries of each training and split on rank 0; nothing on the other ranks.

    Raises:
        TrainedError: a checkpoint is damaged.
        RecordError: files that are damaged or do not match.
        StatisticError: a statistic does not return a vector of finite numbers.
    """
    counts = [count_of(training, split) for training in trainings for split in splits]
    batch = min(*counts, *(training.plan.training.batch for training in trainings))
    lanes = Lanes.of(mesh, mesh.axis_size("replica") * max(1, batch // mesh.axis_size("replica")))
    questions = [
        _SummaryRequest(training, trained_network(training, mesh, lanes.batch, which), tuple(names))
        for training, names in zip(trainings, statistics, strict=True)
    ]
    tables: list[dict[str, SplitSummaries]] = [{} for _ in questions]
    for split in splits:
        there = [mesh.rank == 0 and question.is_answered(split) for question in questions]
        known = mesh.world.broadcast(tf.constant(there, tf.int32)).numpy()
        # Questions about the same volumes are answered together; if universes are simulated again,
        # some may need fewer of them. Ranks write files in turns, so the first volumes of a split
        # in files depend on its number of volumes.
        groups: dict[int, list[_SummaryRequest]] = {}
        for question, is_known in zip(questions, known, strict=True):
            if not is_known:
                again = question.training.plan.simulates and split == "train"
                count = 0 if again else count_of(question.training, split)
                groups.setdefault(count, []).append(question)
        for alike in groups.values():
            _answer(alike, split, lanes, mesh, progress)
        if mesh.rank == 0:
            for question, table in zip(questions, tables, strict=True):
                table[split] = question.summaries(split)
    return tables if mesh.rank == 0 else []


Row = tuple[np.ndarray, dict[str, np.ndarray]]
"""The truth and the parts of a batch, as in `SplitSummaries`."""


@dataclass
class _SummaryRequest:
    """The summaries that are requested for one training.

    Attributes:
        training: the training.
        regressor: its network.
        statistics: the statistics to measure.
        made: the new summaries by split, on rank 0.
    """

    training: SavedTraining
    regressor: Regressor
    statistics: tuple[str, ...]
    made: dict[str, SplitSummaries] = field(default_factory=dict)

    def is_answered(self, split: str) -> bool:
        """Returns whether a file has all summaries of this network and of the present volumes."""
        held = self._held(split)
        return held is not None and set(self.statistics) <= set(held.parts)

    def _held(self, split: str) -> SplitSummaries | None:
        """Returns the summaries in a file, if they belong to this network and these volumes."""
        training, path = self.training, self.training.folder.summaries(split)
        try:
            held = SplitSummaries.read(path)
        except (ValueError, KeyError):
            return None
        written = path.stat().st_mtime
        files = () if training.plan.simulates else files_of(training, split)
        saved = [training.folder.saved_at(which) for which in ("best", "last")]
        changed = [*(file.stat().st_mtime for file in files), *filter(None, saved)]
        fresh = all(time < written for time in changed)
        whole = len(held.truth) == count_of(training, split)
        return held if fresh and whole and held.step == self.regressor.step else None

    def keep(self, split: str, rows: Sequence[Row]) -> None:
        """Joins the summaries of all batches, keeps and writes them. On rank 0."""
        count = count_of(self.training, split)
        truth = np.concatenate([row[0] for row in rows])[:count]
        order = np.lexsort(truth.astype(np.float32).T[::-1])
        parts = {
            name: np.concatenate([row[1][name] for row in rows])[:count][order]
            for name in rows[0][1]
            if name in (OUTPUTS, HIDDEN, *self.statistics)
        }
        self.made[split] = SplitSummaries(truth[order], parts, self.regressor.step)
        held = self._held(split)
        if held is not None and np.array_equal(held.truth, truth[order]):
            parts = {**held.parts, **parts}  # statistics measured earlier
        whole = SplitSummaries(truth[order], parts, self.regressor.step)
        whole.write(self.training.folder.summaries(split))

    def summaries(self, split: str) -> SplitSummaries:
        """Returns the new summaries, or those in the file."""
        made = self.made.get(split)
        return SplitSummaries.read(self.training.folder.summaries(split)) if made is None else made


def files_of(training: SavedTraining, split: str) -> Sequence[Path]:
    """Returns the files that a split is read from."""
    folder = training.plan.dataset_folder
    return dataset_files(folder, split) if folder else arrays_of(training.plan).files


def trained_on(training: SavedTraining, *, planned: bool = False) -> int:
    """Returns the number of volumes that a training could use in the steps that it made.

    Args:
        training: the training.
        planned: whether to count all planned steps, even if the training ended early.
    """
    if not training.plan.simulates:
        return training.samples("train")
    draws = draws_of(training.plan)
    early = planned and training.ended_early
    steps = training.plan.training.steps if early else training.steps_made
    return draws.made(max(0, steps - 1)) * draws.batch


def count_of(training: SavedTraining, split: str) -> int:
    """Returns how many of the first volumes of a split are summarised, see `MOST`."""
    if training.plan.simulates and split == "train":
        return trained_on(training)
    count = training.samples(split)
    return count if training.plan.simulates else min(count, MOST)


def _answer(
    questions: Sequence[_SummaryRequest],
    split: str,
    lanes: Lanes,
    mesh: ProcessMesh,
    progress: Progress,
) -> None:
    """Computes the summaries of a split for all networks; each may use fewer of the volumes."""
    counts = [count_of(question.training, split) for question in questions]
    largest = questions[int(np.argmax(counts))].training
    names = tuple(dict.fromkeys(name for question in questions for name in question.statistics))
    rows: list[list[Row]] = [[] for _ in questions]
    progress.note(f"summarising the volumes of {split}; compiling")
    for number, batch in enumerate(_volumes(largest, split, lanes, mesh)):
        begin, measured_here = number * lanes.batch, None
        truth = of_all_replicas(batch.parameters, mesh)
        for question, count, made in zip(questions, counts, rows, strict=True):
            if begin >= count:
                continue
            row = features_of(question.regressor.network, batch.volumes)
            if question.statistics:
                if measured_here is None:
                    measured_here = _measured(largest, names, batch.volumes, mesh)
                row |= measured_here
            made.append((truth, row))
        progress(f"summarising {split}", min(begin + lanes.batch, max(counts)), max(counts))
        if begin + lanes.batch >= max(counts):
            break
    if mesh.rank == 0:
        for question, made in zip(questions, rows, strict=True):
            question.keep(split, made)


def features_of(network: BaseNetwork, volumes: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the features of volumes that heads are fitted to, by name, each [n, value].

    On all ranks together.

    Args:
        network: the network; a Keras model returns its outputs only.
        volumes: this rank's blocks of a batch.

    Returns:
        The features of the whole batch, on every rank.
    """
    if not isinstance(network, Network):
        return {OUTPUTS: of_all_replicas(network.predict(volumes), network.mesh)}
    outputs, hidden = network.predict_with_hidden(volumes)
    return {OUTPUTS: outputs, HIDDEN: hidden}


def _measured(
    training: SavedTraining, statistics: Sequence[str], volumes: np.ndarray, mesh: ProcessMesh
) -> dict[str, np.ndarray]:
    """Returns statistics of a batch of volumes or maps of all replicas, each [n, value].

    The values of the channels of a volume follow one another. Volumes in files are measured one at
    a time, because the estimate of memory does not include a batch of fields for them.
    """
    plan = training.plan
    if plan.lightcone is not None:
        cone = plan.lightcone
        maps = NoisyMaps(as_maps(volumes), cone.fov, cone.pixel_sigma())
        of_maps = measured(statistics, maps)
        return {name: of_all_replicas(values, mesh) for name, values in of_maps.items()}
    together, box_size = len(volumes) if training.plan.simulates else 1, plan.box.size
    values, axis = cell_values_of(plan), line_of_sight_of(plan)
    rows = []
    for first in range(0, len(volumes) if statistics else 0, together):
        fields = fields_of(volumes[first : first + together], box_size, mesh)
        of_channels = [measured(statistics, field, values, axis=axis) for field in fields]
        rows.append([np.concatenate([of[n] for of in of_channels], axis=1) for n in statistics])
    return {
        name: of_all_replicas(np.concatenate([row[place] for row in rows]), mesh)
        for place, name in enumerate(statistics)
    }


def _volumes(
    training: SavedTraining, split: str, lanes: Lanes, mesh: ProcessMesh
) -> Iterator[Batch]:
    """Yields this rank's blocks of every volume of a split; the last batch is filled up."""
    if not training.plan.simulates or split != "train":
        yield from in_order(training.files(split, Block.of(mesh), mesh), lanes)
        return
    maker = maker_of(training.plan, mesh, lanes)
    for number in range(-(-trained_on(training) // lanes.batch)):
        made = maker.make("train", number)
        yield Batch(made.volumes, made.parameters, made.index)
        mesh.barrier()  # replicas are never further apart than a generation
