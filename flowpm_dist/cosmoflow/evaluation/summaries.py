"""What a trained network and statistics make of the volumes of a training's splits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmoflow.network.keras_network import AnyNetwork
from flowpm_dist.cosmoflow.network.network import Network, of_all_replicas
from flowpm_dist.cosmoflow.training.held_out import fields_of
from flowpm_dist.cosmoflow.training.parts import block_of_volumes, cell_values_of, maker_of
from flowpm_dist.cosmoflow.training.trained import TrainedNetwork, Training, trained_network
from flowpm_dist.cosmoflow.volumes.arrays import arrays_of
from flowpm_dist.cosmoflow.volumes.file_source import in_order
from flowpm_dist.cosmoflow.volumes.in_situ import Batch
from flowpm_dist.cosmoflow.volumes.map_layout import as_maps
from flowpm_dist.cosmoflow.volumes.record_files import dataset_files
from flowpm_dist.cosmoflow.volumes.universes import Lanes
from flowpm_dist.io.files import read_arrays, save_arrays
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.statistics.map_summaries import MAP_STATISTICS, NoisyMaps, measured_maps
from flowpm_dist.statistics.summaries import DEFINITION, STATISTICS, measured
from meshimpl.process_mesh import ProcessMesh

MOST = 4096
"""Greatest number of volumes of a split in files that are measured or summarised: the first."""
OUTPUTS, HIDDEN = "network outputs", "network features"
"""Names of a network's outputs, and of what its last layer makes them of."""


@dataclass(frozen=True)
class SplitSummaries:
    """Summaries of the volumes of a split, sorted by their truth.

    Attributes:
        truth: [n, p] [physical units].
        parts: by name, `OUTPUTS`, `HIDDEN` or that of a statistic, [n, value] each.
        step: number of steps that the network was trained for.
    """

    truth: np.ndarray
    parts: dict[str, np.ndarray]
    step: int

    def write(self, path: Path) -> None:
        """Writes what does not depend on a user's own code to a .npz file. Raises WriteError."""
        known = {OUTPUTS, HIDDEN, *STATISTICS, *MAP_STATISTICS}
        kept = {name: values for name, values in self.parts.items() if name in known}
        numbers = {"step": np.array(self.step), "definition": np.array(DEFINITION)}
        save_arrays(path, {"truth": self.truth, **numbers, **kept})

    @classmethod
    def read(cls, path: Path) -> SplitSummaries:
        """Reads what `write` wrote.

        Raises:
            KeyError or ValueError: a file that is not such, or of statistics that have been
                defined otherwise since.
        """
        held = read_arrays(path)
        if held.pop("definition") != DEFINITION:
            raise ValueError(f"{path} holds statistics of another definition")
        truth, step = held.pop("truth"), int(held.pop("step"))
        return cls(truth, held, step)


def summarise(
    training: Training,
    splits: Sequence[str],
    statistics: Sequence[str],
    mesh: ProcessMesh,
    progress: Progress,
    which: str = "best",
) -> dict[str, SplitSummaries]:
    """Returns summaries of the volumes of splits. On all ranks together.

    Training universes of simulations are simulated again. What was summarised before is read,
    unless the network, or the files, have changed since.

    Args:
        training: whose network is asked.
        splits: their names.
        statistics: names of `STATISTICS`, or of maps of `MAP_STATISTICS`, or
            "package.module:function".
        mesh: the ranks, of axes replica, row and col; no more replicas than volumes.
        progress: of this rank.
        which: the weights, "best" of the validations or "last".

    Returns:
        Of each split, on rank 0; nothing on the others.

    Raises:
        TrainedError: the checkpoint is damaged.
        RecordError: files that cannot serve.
        ValueError: a statistic that does not return a vector of finite numbers.
    """
    batch = min(training.plan.training.batch, *(count_of(training, split) for split in splits))
    lanes = Lanes.of(mesh, mesh.axis_size("replica") * max(1, batch // mesh.axis_size("replica")))
    asked = trained_network(training, mesh, lanes.batch, which)
    found = {}
    for split in splits:
        path = training.folder.summaries(split)
        there = _there(training, split, path, asked.step, statistics) if mesh.rank == 0 else False
        if not mesh.world.broadcast(tf.constant(int(there))).numpy():
            found[split] = _made(training, split, statistics, asked, lanes, progress)
            if mesh.rank == 0:
                found[split].write(path)
        elif mesh.rank == 0:
            found[split] = SplitSummaries.read(path)
    return found if mesh.rank == 0 else {}


def count_of(training: Training, split: str) -> int:
    """Returns how many volumes of a split are summarised: the first, see `MOST`."""
    if training.simulated and split == "train":
        return training.plan.data.simulations
    count = training.samples(split)
    return count if training.simulated else min(count, MOST)


def _there(
    training: Training, split: str, path: Path, step: int, statistics: Sequence[str]
) -> bool:
    """Returns whether a file has all summaries, of this network and of the volumes as they are."""
    try:
        held = SplitSummaries.read(path)
    except (ValueError, KeyError):
        return False
    data, written = training.plan.data, path.stat().st_mtime
    files: Sequence[Path] = ()
    if not training.simulated:
        files = dataset_files(data.folder, split) if data.folder else arrays_of(training.plan).files
    checkpoints = (training.folder.weights(w) / "checkpoint" for w in ("best", "last"))
    sources = [*files, *(file for file in checkpoints if file.exists())]
    fresh = all(file.stat().st_mtime < written for file in sources)
    whole = len(held.truth) == count_of(training, split)
    return fresh and whole and held.step == step and set(statistics) <= set(held.parts)


def _made(
    training: Training,
    split: str,
    statistics: Sequence[str],
    asked: TrainedNetwork,
    lanes: Lanes,
    progress: Progress,
) -> SplitSummaries:
    mesh, count = asked.network.mesh, count_of(training, split)
    truth: list[np.ndarray] = []
    parts: dict[str, list[np.ndarray]] = {}
    progress.note(f"summarising the volumes of {split}; compiling")
    for batch in _volumes(training, split, lanes, mesh):
        row = features_of(asked.network, batch.volumes)
        row |= _measured(training, statistics, batch.volumes, mesh)
        for name, values in row.items():
            parts.setdefault(name, []).append(values)
        truth.append(of_all_replicas(batch.parameters, mesh))
        done = len(truth) * lanes.batch
        progress(f"summarising {split}", min(done, count), count)
        if done >= count:
            break
    whole = np.concatenate(truth)[:count]
    order = np.lexsort(whole.astype(np.float32).T[::-1])
    named = {name: np.concatenate(rows)[:count][order] for name, rows in parts.items()}
    return SplitSummaries(whole[order], named, asked.step)


def features_of(network: AnyNetwork, volumes: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the features of volumes that heads are fitted to, [n, value] each by name.

    On all ranks together.

    Args:
        network: a Keras model gives its outputs alone.
        volumes: this rank's blocks of a batch.

    Returns:
        Those of the whole batch, on every rank.
    """
    if not isinstance(network, Network):
        return {OUTPUTS: network.whole_outputs(network.predict(volumes))}
    outputs, hidden = network.predict_with_hidden(volumes)
    return {OUTPUTS: outputs, HIDDEN: hidden}


def _measured(
    training: Training, statistics: Sequence[str], volumes: np.ndarray, mesh: ProcessMesh
) -> dict[str, np.ndarray]:
    """Returns statistics of a batch of volumes or maps, [n, value] each, of all replicas.

    Those of volumes are of one channel after another.

    Volumes in files are measured one at a time: the memory of a batch of fields, which simulating
    one takes anyway, is not foreseen for them.
    """
    plan = training.plan
    if plan.lightcone is not None:
        cone = plan.lightcone
        maps = NoisyMaps(as_maps(volumes), cone.fov, cone.pixel_sigma())
        found = measured_maps(statistics, maps)
        return {name: of_all_replicas(values, mesh) for name, values in found.items()}
    together, box_size = len(volumes) if training.simulated else 1, plan.box_size
    values = cell_values_of(plan)
    rows = []
    for first in range(0, len(volumes) if statistics else 0, together):
        fields = fields_of(volumes[first : first + together], box_size, mesh)
        of_channels = [measured(statistics, field, values) for field in fields]
        rows.append(
            [np.concatenate([found[n] for found in of_channels], axis=1) for n in statistics]
        )
    return {
        name: of_all_replicas(np.concatenate([row[place] for row in rows]), mesh)
        for place, name in enumerate(statistics)
    }


def _volumes(training: Training, split: str, lanes: Lanes, mesh: ProcessMesh) -> Iterator[Batch]:
    """Yields this rank's blocks of every volume of a split; the last batch is filled up."""
    if not training.simulated or split != "train":
        yield from in_order(training.files(split, block_of_volumes(mesh), mesh), lanes)
        return
    maker = maker_of(training.plan, mesh, lanes)
    for number in range(-(-training.plan.data.simulations // lanes.batch)):
        made = maker.make("train", number)
        yield Batch(made.volumes, made.parameters, made.index)
        mesh.barrier()  # replicas are never further apart than a generation
