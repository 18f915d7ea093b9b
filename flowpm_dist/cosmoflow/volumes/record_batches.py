"""The global order of samples, and the batches taken from it."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import count as count_from
from typing import TYPE_CHECKING, Any

import numpy as np

from flowpm_dist.cosmoflow.volumes.record_files import WHOLE, Block, DatasetHeader, RecordError

if TYPE_CHECKING:
    import tensorflow as tf


@lru_cache(maxsize=4)
def global_order(samples: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the permutation of all samples of a split in an epoch, int64 [samples], read-only."""
    order = np.random.default_rng([seed, epoch]).permutation(samples)
    order.flags.writeable = False
    return order


class GloballyOrdered(abc.ABC):
    """The samples of a split, which every rank takes in the same order."""

    header: DatasetHeader

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters, in the order of y."""
        return self.header.parameters

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """Returns the global order of the samples in an epoch, int64 [samples]."""
        return global_order(len(self), seed, epoch)


def batch_positions(
    samples: int, first: int, count: int, *, seed: int = 0, shuffle: bool = True
) -> np.ndarray:
    """Returns the samples at places first to first + count of the concatenated epochs' orders.

    Returns:
        The positions of the samples in the split, int64 [count].
    """
    epochs, places = np.divmod(np.arange(first, first + count), samples)
    if not shuffle:
        return places
    return np.array(
        [global_order(samples, seed, int(e))[p] for e, p in zip(epochs, places, strict=True)]
    )


class Batches:
    """An iterable of the batches (volume, y, index) of one replica.

    volume is float32 [sample, x, y, z, channel], y float32 [sample, parameter], index int64
    [sample]. Each iteration begins at the first batch.

    Args:
        dataset: a dataset of such batches.
        explain: returns the error for a batch that TensorFlow could not read, given its number.
    """

    def __init__(
        self, dataset: tf.data.Dataset, explain: Callable[[int], RecordError | None]
    ) -> None:
        self.dataset = dataset
        self._explain = explain

    def __iter__(self) -> Iterator[tuple[tf.Tensor, tf.Tensor, tf.Tensor]]:
        """Yields the batches.

        Raises:
            RecordError: if a record is damaged. The message names the file.
        """
        import tensorflow as tf

        batches = iter(self.dataset)
        for number in count_from():
            try:
                batch = next(batches)
            except StopIteration:
                return
            except tf.errors.OpError as error:
                raise self._explain(number) or error from error
            yield batch


def check_lane(samples: int, batch_size: int, lane: tuple[int, int] | None) -> tuple[int, int]:
    """Returns this replica's part of a global batch as (first, count), by default all of it.

    Raises:
        RecordError: if it is no part of the batch, or there are fewer samples than a batch holds.
    """
    first, count = (0, batch_size) if lane is None else lane
    if not (0 <= first < first + count <= batch_size):
        raise RecordError(f"samples {first} to {first + count} of a batch of {batch_size}")
    if samples < batch_size:
        raise RecordError(
            f"{samples} samples are fewer than the global batch of {batch_size}: make the batch "
            "smaller, take fewer replicas, or add samples"
        )
    return first, count


class DummyDataset:
    """A source of one random batch from memory, repeated: it measures a training without reading.

    Args:
        grid: the cells of a whole volume.
        parameters: the names of the parameters.
        block: this rank's part.
        channels: the number of values per cell.
        samples: the number of samples that the dataset reports.
        seed: the seed of the batch.
    """

    def __init__(
        self,
        grid: tuple[int, int, int],
        parameters: Sequence[str],
        *,
        block: Sequence[int] = WHOLE,
        channels: int = 1,
        samples: int = 64,
        seed: int = 0,
    ) -> None:
        self.header = DatasetHeader(grid, tuple(parameters), channels)
        self.block_shape = self.header.block_shape(Block(*block))
        self.parameters = self.header.parameters
        self._samples, self._seed = samples, seed

    def __len__(self) -> int:
        return self._samples

    def batches(
        self,
        batch_size: int,
        lane: tuple[int, int] | None = None,
        *,
        steps: int | None = None,
        **_: Any,
    ) -> Batches:
        """Returns batches as `RecordDataset.batches` does; its other arguments have no effect."""
        import tensorflow as tf

        first, count = check_lane(len(self), batch_size, lane)
        rng = np.random.default_rng([self._seed, first])
        volume = rng.standard_exponential((count, *self.block_shape), np.float32)
        y = rng.random((count, len(self.parameters)), np.float32)
        index = np.arange(first, first + count)
        dataset = tf.data.Dataset.from_tensors((volume, y, index)).repeat(steps)
        return Batches(dataset, lambda number: None)
