"""Density volumes with their parameters, read from TFRecord files in one global random order.

The order of the samples in an epoch is a permutation of the whole split that depends on the seed
and the epoch only. Step s takes its samples s B to (s + 1) B, where B is the size of the global
batch, for any number of replicas. Each replica reads its part of every batch. So a run can stop and
resume on other ranks. Records are found by their position in the file; there is no shuffle buffer.
"""

from __future__ import annotations

import abc
import itertools
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flowpm_dist.cosmoflow.volumes.public_files import cube, public_header, public_index
from flowpm_dist.cosmoflow.volumes.record_files import (
    DATASET,
    DTYPES,
    NOTHING,
    WHOLE,
    Block,
    DatasetHeader,
    RecordError,
    SplitFile,
    dataset_files,
    read_header,
    split_files,
)
from flowpm_dist.cosmoflow.volumes.tfrecords import (
    is_packed,
    parsed_record,
    record_bounds,
    wrong_record,
)
from flowpm_dist.io.opening import not_finite

if TYPE_CHECKING:
    from meshimpl.process_mesh import ProcessMesh

READERS = 4
"""Number of samples that a rank reads at once."""

Sample = tuple[np.ndarray, np.ndarray, int]
"""A sample: its volume, float32 [x, y, z, channel], its parameters and its index."""

BatchOfSamples = tuple[np.ndarray, np.ndarray, np.ndarray]
"""The same for several samples, which are the first axis."""


@lru_cache(maxsize=4)
def global_order(samples: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the permutation of all samples of a split in an epoch, int64 [samples], read-only."""
    order = np.random.default_rng([seed, epoch]).permutation(samples)
    order.flags.writeable = False
    return order


def batch_positions(
    samples: int, first: int, count: int, *, seed: int = 0, shuffle: bool = True
) -> np.ndarray:
    """Returns `count` samples from the joined orders of all epochs, starting at place `first`.

    Returns:
        The positions of the samples in the split, int64 [count].
    """
    epochs, places = np.divmod(np.arange(first, first + count), samples)
    if not shuffle:
        return places
    return np.array(
        [global_order(samples, seed, int(e))[p] for e, p in zip(epochs, places, strict=True)]
    )


def check_lane(samples: int, batch_size: int, lane: tuple[int, int] | None) -> tuple[int, int]:
    """Returns this replica's part of a global batch as (first, count); all of it by default.

    Raises:
        RecordError: the lane is not a part of the batch, or the split is smaller than the batch.
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


def read_ahead(
    read: Callable[[int], Sample], batches: Iterator[np.ndarray]
) -> Iterator[BatchOfSamples]:
    """Yields batches of samples, two of which threads read ahead.

    Args:
        read: returns the sample at a position of the split.
        batches: the positions of the samples of each batch.
    """
    pool = ThreadPoolExecutor(READERS)
    begun = (pool.map(read, positions.tolist()) for positions in batches)
    try:
        waiting = deque(itertools.islice(begun, 2))
        while waiting:
            samples = list(waiting.popleft())
            waiting.extend(itertools.islice(begun, 1))
            volumes, parameters, index = zip(*samples, strict=True)
            yield np.stack(volumes), np.stack(parameters), np.array(index, np.int64)
    finally:
        pool.shutdown(cancel_futures=True)


class Dataset(abc.ABC):
    """The samples of a split, of which this rank reads one block of each volume.

    A subclass implements `__len__` and `read`.

    Attributes:
        header: the properties that all samples share.
        block_shape: the shape of this rank's block of a sample, (x, y, z, channels).
    """

    header: DatasetHeader
    block_shape: tuple[int, int, int, int]

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def read(self, position: int) -> Sample:
        """Returns the sample at a position of the split.

        Raises:
            RecordError: its file is damaged. The message names the file.
        """

    def batches(
        self,
        batch_size: int,
        lane: tuple[int, int] | None = None,
        *,
        seed: int = 0,
        start_step: int = 0,
        steps: int | None = None,
        shuffle: bool = True,
    ) -> Iterator[BatchOfSamples]:
        """Returns this replica's part of each global batch, in the global order.

        A batch at the end of an epoch is filled with the first samples of the next epoch.

        Args:
            batch_size: the number of samples in a global batch.
            lane: the first place and the number of this replica's samples in it; None for all.
            seed: the seed of the order.
            start_step: the global step to start at, counted from the start of the training.
            steps: the number of batches; None for no end.
            shuffle: False reads the samples in the order of the files, repeatedly.

        Raises:
            RecordError: if there are fewer samples than a batch holds, or there is no such lane.
        """
        first, count = check_lane(len(self), batch_size, lane)
        numbers = itertools.islice(itertools.count(start_step), steps)
        places = (number * batch_size + first for number in numbers)
        positions = (
            batch_positions(len(self), place, count, seed=seed, shuffle=shuffle) for place in places
        )
        return read_ahead(self.read, positions)


class RecordDataset(Dataset):
    """A split in TFRecord files, of which this rank reads one block of each volume.

    The constructor checks everything that can be checked without reading the volumes.

    Args:
        folder: the dataset. Without a dataset.json it is taken to have the public CosmoFlow
            layout, see `flowpm_dist.cosmoflow.volumes.public_files`.
        split: "train", "validation", "test", or any name.
        grid: the grid that the volumes must have; None accepts any.
        block: this rank's part. It need not be one of the blocks that the volumes were written in.
        parameters: the names that y must have; needed for the public layout, which has no names.
        mesh: ranks that index public files together; each of them must make this dataset. With
            None, this rank indexes them alone.

    Raises:
        RecordError: there is no such split, a file is missing or truncated, a file of another
            layout than the public one is packed with gzip, or the volumes have another grid or
            other parameters. The message names the file.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        *,
        grid: Sequence[int] | None = None,
        block: Sequence[int] = WHOLE,
        parameters: Sequence[str] | None = None,
        mesh: ProcessMesh | None = None,
    ) -> None:
        self.folder, self.split = Path(folder), split
        first = dataset_files(self.folder, split, 1)[0]
        public = not (self.folder / DATASET).exists()
        self._packed = public and is_packed(first)
        if public:
            self.header = public_header(first, parameters)
        else:
            self.header, self._splits = read_header(self.folder)
        header, where = self.header, first if public else self.folder / DATASET
        if grid is not None and tuple(grid) != header.grid:
            raise RecordError(f"{where}: volumes of {header.grid} cells; must be {tuple(grid)}")
        if parameters is not None and tuple(parameters) != header.parameters:
            raise RecordError(
                f"{where}: parameters {header.parameters}; must be {tuple(parameters)}"
            )
        self.block_shape = header.block_shape(Block(*block))
        wanted_x, wanted_y = Block(*block).cut(header.grid)
        # The stored blocks that this block overlaps: row, column, and the cells to read from them.
        self._crops = [
            [(row, col, x, y) for col, y in _cuts(wanted_y, header.grid[1] // header.blocks[1])]
            for row, x in _cuts(wanted_x, header.grid[0] // header.blocks[0])
        ]
        if public:
            size = self.header.block_bytes
            paths, self._file, starts = public_index(self.folder, split, size, mesh)
            self._paths, self._starts = paths[:, np.newaxis], starts[:, np.newaxis]
        else:
            self._index_blocks(self._block_files())

    def _block_files(self) -> list[list[Path]]:
        """Returns, for each file number, the files with the blocks that overlap this rank's."""
        files: list[SplitFile] = split_files(self.folder)[self.split]
        by_name = {(f.number, f.block): f.path for f in files}
        numbers = sorted({f.number for f in files})
        expected = self._splits.get(self.split, NOTHING)["files"]
        if len(numbers) != expected:
            raise RecordError(
                f"{self.folder} has {len(numbers)} files of split {self.split!r}, {DATASET} "
                f"lists {expected}: copy or write the missing ones again, or remove the others"
            )
        rows, cols = self.header.blocks
        blocks = [Block(row, rows, col, cols) for line in self._crops for row, col, *_ in line]
        try:
            return [[by_name[number, block] for block in blocks] for number in numbers]
        except KeyError as error:
            number, block = error.args[0]
            raise RecordError(
                f"{self.folder}: file {number} of split {self.split!r} has no block {tuple(block)} "
                "(row, rows, column, columns)"
            ) from None

    def _index_blocks(self, files: list[list[Path]]) -> None:
        """Finds the records of each file, whose blocks lie in several.

        Raises:
            RecordError: a file is damaged, or their records do not make the listed samples.
        """
        with ThreadPoolExecutor(8) as pool:
            starts = list(pool.map(self._starts_of, files))
        counts = [len(of_file) for of_file in starts]
        listed = self._splits[self.split]["samples"]
        if sum(counts) != listed or not listed:
            most, numbered = self.header.samples_per_file, zip(files, counts, strict=True)
            short = ", ".join(blocks[0].name for blocks, count in numbered if count < most)
            raise RecordError(
                f"{self.folder}: the files of split {self.split!r} hold {sum(counts)} samples, "
                f"must be {listed or 'at least one'}; incomplete files: {short}"
            )
        self._paths = np.array([[os.fsencode(path) for path in blocks] for blocks in files])
        self._file, self._starts = np.repeat(np.arange(len(files)), counts), np.concatenate(starts)

    def _starts_of(self, paths: list[Path]) -> np.ndarray:
        """Returns where the records of a file begin in its blocks, int64 [record, block]."""
        bounds = {str(path): record_bounds(path) for path in paths}
        for path, of_block in bounds.items():
            # Of compressed records only reading shows the shape.
            size = self.header.block_bytes
            if not self.header.compressed and (wrong := wrong_record(of_block, size)):
                self._piece(path, int(of_block[wrong[0]]))  # which says what it holds
                raise RecordError(f"{path}: {wrong[1]}")
        counts = {path: len(of_block) - 1 for path, of_block in bounds.items()}
        if len(set(counts.values())) > 1:
            raise RecordError(f"the blocks of one file hold unequal numbers of samples: {counts}")
        return np.stack([of_block[:-1] for of_block in bounds.values()], axis=1)

    def __len__(self) -> int:
        return len(self._file)

    def read(self, position: int) -> Sample:
        """Reads, crops and joins the pieces of the sample at a position of the split."""
        paths = [os.fsdecode(path) for path in self._paths[self._file[position]]]
        pieces = [
            self._piece(path, int(start))
            for path, start in zip(paths, self._starts[position], strict=True)
        ]
        indices = [index for *_, index in pieces]
        if len(set(indices)) > 1:
            pairs = dict(zip(paths, indices, strict=True))
            raise RecordError(f"the blocks of one sample come from different simulations: {pairs}")
        values = iter(values for values, *_ in pieces)
        rows = [[next(values)[x, y] for *_, x, y in line] for line in self._crops]
        volume = np.concatenate([np.concatenate(row, axis=1) for row in rows]).astype(np.float32)
        if self.header.dtype == "int16":
            volume /= np.float32(self.header.scale)
        return volume, pieces[0][1], position if indices[0] < 0 else indices[0]

    def _piece(self, path: str, start: int) -> Sample:
        """Returns a stored block in its stored dtype, the parameters, and the index or -1.

        Raises:
            RecordError: the record is damaged, or holds another volume.
        """
        header, where = self.header, f"{path}, the record at byte {start}"
        feature = parsed_record(path, start, where, packed=self._packed)
        wanted = header.block_shape()
        data = b"".join(feature["x"].bytes_list.value)
        shape = tuple(feature["shape"].int64_list.value) or cube(
            len(data) // DTYPES[header.dtype].itemsize
        )
        if shape not in (wanted, None):
            raise RecordError(f"{where}: a volume of shape {shape}; must be {wanted}")
        y = np.array(feature["y"].float_list.value, np.float32)
        try:
            raw = _unpacked(data, header.block_bytes) if header.compressed else data
            values = np.frombuffer(raw, DTYPES[header.dtype]).reshape(wanted)
            if len(y) != len(header.parameters):
                raise ValueError(f"it has {len(y)}")
        except (ValueError, zlib.error) as error:
            raise RecordError(
                f"{where} holds no volume of shape {wanted} in {header.dtype} with "
                f"{len(header.parameters)} parameters ({error})"
            ) from error
        if (cell := not_finite(values)) is not None:
            raise RecordError(f"{where}: the cell {cell} is {values[tuple(cell)]}: not finite")
        if (place := not_finite(y)) is not None:
            name, value = header.parameters[place[0]], y[place[0]]
            raise RecordError(f"{where}: {name} = {value}: not finite")
        return values, y, next(iter(feature["index"].int64_list.value), -1)


def _unpacked(data: bytes, size: int) -> bytes:
    """Returns data after unpacking with zlib, cut off after `size` + 1 bytes."""
    unpacker = zlib.decompressobj()
    raw = unpacker.decompress(data, size + 1)
    if len(raw) <= size and not unpacker.eof:
        raise zlib.error("incomplete data")
    return raw


def _cuts(wanted: slice, width: int) -> list[tuple[int, slice]]:
    """Returns the blocks of a given width that a range overlaps, and the cells in each."""
    return [
        (n, slice(max(wanted.start - n * width, 0), min(wanted.stop - n * width, width)))
        for n in range(wanted.start // width, -(-wanted.stop // width))
    ]
