"""Batches of volumes that are read from files, or of one made-up batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from flowpm_dist.cosmoflow.planning.phases import PhaseClock
from flowpm_dist.cosmoflow.volumes.arrays import ArrayDataset
from flowpm_dist.cosmoflow.volumes.augmentation import Augment, View, seen
from flowpm_dist.cosmoflow.volumes.in_situ import Batch
from flowpm_dist.cosmoflow.volumes.records import DummyDataset, RecordDataset
from flowpm_dist.cosmoflow.volumes.universes import Lanes
from meshimpl.process_mesh import ProcessMesh

FilesDataset = RecordDataset | ArrayDataset


class FileSource:
    """Batches of a dataset, shuffled over all its samples before they are shared out.

    Args:
        dataset: this rank's blocks of it.
        mesh: all ranks.
        lanes: this replica's places of each batch.
        seed: of the shuffling.
        augment: whether a volume is seen otherwise each time: see `View.draw`.
        axis: the line of sight, see `View.draw`.
        clock: counts "read", the time that the training waits for a batch, and "augment".
    """

    def __init__(
        self,
        dataset: FilesDataset | DummyDataset,
        mesh: ProcessMesh,
        lanes: Lanes,
        *,
        seed: int,
        augment: Augment,
        axis: str | None = None,
        clock: PhaseClock,
    ) -> None:
        self.dataset, self.mesh, self.lanes = dataset, mesh, lanes
        self.seed, self.augment, self.axis, self.clock = seed, augment, axis, clock
        self._batches: Iterator[tuple[Any, Any, Any]] = iter(())

    def start(self, step: int, progress: Callable[[int, int], None] | None = None) -> None:
        """Reads ahead from a step on; there is no progress to report."""
        lane = self.lanes.first, self.lanes.count
        batches = self.dataset.batches(self.lanes.batch, lane, seed=self.seed, start_step=step)
        self._batches = iter(batches)

    def batch(self, step: int) -> Batch:
        """Returns the batch of a step. Raises RecordError for a damaged file."""
        with self.clock("read"):
            found = _as_batch(next(self._batches))
        volumes = found.volumes
        if self.augment:
            with self.clock("augment"):
                lanes = [np.random.default_rng([self.seed, step, lane]) for lane in self.lanes]
                width = volumes.shape[3]
                views = [View.draw(rng, width, self.augment, self.axis) for rng in lanes]
                volumes = seen(volumes, views, self.mesh)
        samples = np.array([step * self.lanes.batch + lane for lane in self.lanes])
        return Batch(volumes, found.parameters, samples)

    def preview(self, batches: int) -> Iterator[Batch]:
        """Returns the first batches, not turned or shifted."""
        lane = self.lanes.first, self.lanes.count
        found = self.dataset.batches(self.lanes.batch, lane, seed=self.seed, steps=batches)
        return itertools.islice(map(_as_batch, found), batches)

    def simulations(self, step: int) -> int:
        """Returns 0: nothing is simulated."""
        return 0

    def close(self) -> None:
        """Stops reading."""
        self._batches = iter(())


def in_order(dataset: FilesDataset, lanes: Lanes) -> Iterator[Batch]:
    """Yields every sample of a dataset once, in batches; the last is filled from the beginning."""
    steps = -(-len(dataset) // lanes.batch)
    lane = lanes.first, lanes.count
    batches = dataset.batches(lanes.batch, lane, steps=steps, shuffle=False)
    yield from map(_as_batch, batches)


def _as_batch(parts: Sequence[Any]) -> Batch:
    volumes, parameters, index = map(np.asarray, parts)
    return Batch(one_channel(volumes), parameters.astype(np.float64), index)


def one_channel(volumes: np.ndarray) -> np.ndarray:
    """Returns volumes [n, x, y, z, channel] without the last dimension where it is 1."""
    return volumes[..., 0] if volumes.shape[-1] == 1 else volumes
