"""Density volumes with their parameters, read from TFRecord files in one global random order.

The order of the samples in an epoch is a permutation of the whole split that depends on the seed
and the epoch only. Step s takes its samples s B to (s + 1) B, where B is the size of the global
batch, for any number of replicas. Each replica reads its part of every batch. So a run can stop and
resume on other ranks. Records are found by their position in the file; there is no shuffle buffer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count as count_from
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flowpm_dist.cosmoflow.volumes.public_files import (
    cube,
    is_packed,
    public_header,
    public_index,
)
from flowpm_dist.cosmoflow.volumes.record_batches import (
    Batches,
    DummyDataset,
    GloballyOrdered,
    batch_positions,
    check_lane,
)
from flowpm_dist.cosmoflow.volumes.record_files import (
    DATASET,
    DTYPES,
    GZIP_ERROR,
    WHOLE,
    Block,
    DatasetHeader,
    RecordError,
    SplitFile,
    finish_dataset,
    first_file,
    read_header,
    record_bounds,
    split_files,
)
from flowpm_dist.cosmoflow.volumes.record_reading import read_record, reason_of, wrong_record
from flowpm_dist.cosmoflow.volumes.record_staging import stage
from flowpm_dist.cosmoflow.volumes.record_writer import RecordWriter

if TYPE_CHECKING:
    import tensorflow as tf

    from meshimpl.process_mesh import ProcessMesh

__all__ = [
    "Batches",
    "Block",
    "DatasetHeader",
    "DummyDataset",
    "RecordDataset",
    "RecordError",
    "RecordWriter",
    "finish_dataset",
    "read_header",
    "stage",
]


class RecordDataset(GloballyOrdered):
    """A split of a dataset, of which this rank reads one block of each volume.

    The constructor checks everything that can be checked without reading the volumes.

    Args:
        folder: the dataset. Without a dataset.json it is taken to have the public CosmoFlow
            layout, see `flowpm_dist.cosmoflow.volumes.public_files`.
        split: "train", "validation", "test", or any name.
        grid: the grid that the volumes must have; None accepts any.
        block: this rank's part. It need not be one of the blocks that the volumes were written in.
        parameters: the names that y must have; needed with the public layout, which has none.
        mesh: ranks that index public files together; each of them must make this dataset. None:
            this rank does so alone.

    Attributes:
        header: the properties that all records share.
        block_shape: the shape of one sample, (x, y, z, channels).

    Raises:
        RecordError: if there is no such split, a file is missing or truncated, one that is not of
            the public layout is packed with gzip, or the volumes are not as asked. The message
            names the file.
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
        first = first_file(self.folder, split)
        public = not (self.folder / DATASET).exists()
        self._packed = public and is_packed(first)
        if public:
            self.header = public_header(first, self._packed, parameters)
        else:
            self.header, self._splits = read_header(self.folder)
        self._check_wanted(grid, parameters, first if public else self.folder / DATASET)
        self.block_shape = self.header.block_shape(Block(*block))
        self._crops = _overlaps(Block(*block), self.header)
        if public:
            index = public_index(self.folder, split, self.header.block_bytes, mesh)
            self._paths, self._starts = index.paths[:, np.newaxis], index.start[:, np.newaxis]
            self._file = index.file
        else:
            self._paths = np.array([[os.fsencode(p) for p in row] for row in self._piece_files()])
            self._index_records()

    def _check_wanted(
        self, grid: Sequence[int] | None, parameters: Sequence[str] | None, where: Path
    ) -> None:
        header = self.header
        if grid is not None and tuple(grid) != header.grid:
            raise RecordError(f"{where}: volumes of {header.grid} cells; must be {tuple(grid)}")
        if parameters is not None and tuple(parameters) != header.parameters:
            raise RecordError(
                f"{where}: parameters {header.parameters}; must be {tuple(parameters)}"
            )

    def _piece_files(self) -> list[list[Path]]:
        """Returns, for each file number, the files with the blocks that overlap this rank's."""
        files: list[SplitFile] = split_files(self.folder)[self.split]
        by_name = {(f.number, f.block): f.path for f in files}
        numbers = sorted({f.number for f in files})
        expected = self._splits.get(self.split, {"files": 0, "samples": 0})["files"]
        if len(numbers) != expected:
            raise RecordError(
                f"{self.folder} has {len(numbers)} files of split {self.split!r}, {DATASET} tells "
                f"of {expected}: copy or write the missing ones again, or remove the others"
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

    def _index_records(self) -> None:
        paths = [Path(os.fsdecode(path)) for path in self._paths.ravel()]
        if packed := [path for path in paths if path.suffix == ".gz"]:
            raise RecordError(GZIP_ERROR.format(packed[0]))
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(record_bounds, paths))
        for path, bounds in zip(paths, found, strict=True):
            self._check_lengths(path, bounds)
        pieces = self._paths.shape[1]
        counts = np.array([len(bounds) - 1 for bounds in found]).reshape(-1, pieces)
        if bad := np.flatnonzero(counts.min(1) != counts.max(1)).tolist():
            first = bad[0] * pieces
            names = map(str, paths[first : first + pieces])
            numbers = dict(zip(names, counts[bad[0]].tolist(), strict=True))
            raise RecordError(f"blocks of the same samples with unequal numbers of them: {numbers}")
        starts = [
            np.stack([bounds[:-1] for bounds in found[at : at + pieces]], axis=1)
            for at in range(0, len(found), pieces)
        ]
        self._starts = np.concatenate(starts)
        self._file = np.repeat(np.arange(len(counts)), counts[:, 0])
        expected = self._splits[self.split]["samples"]
        if len(self) != expected or not len(self):
            short = np.flatnonzero(counts[:, 0] < self.header.samples_per_file) * pieces
            raise RecordError(
                f"{self.folder}: the files of split {self.split!r} hold {len(self)} samples, must "
                f"be {expected or 'some'}; not full are {', '.join(paths[n].name for n in short)}"
            )

    def _check_lengths(self, path: Path, bounds: np.ndarray) -> None:
        """Raises RecordError if the length of a record shows a volume of another shape.

        Compressed records are not checked.
        """
        if self.header.compressed:
            return
        if wrong := wrong_record(bounds, self.header.block_bytes):
            record, told = wrong
            raise self._damage(path, int(bounds[record])) or RecordError(f"{path}: {told}")

    def __len__(self) -> int:
        return len(self._file)

    def batches(
        self,
        batch_size: int,
        lane: tuple[int, int] | None = None,
        *,
        seed: int = 0,
        start_step: int = 0,
        steps: int | None = None,
        shuffle: bool = True,
        readers: int = 4,
        prefetch: int = 2,
    ) -> Batches:
        """Returns this replica's part of each global batch, in the global order.

        Epochs follow each other without a gap: a batch at the end of one is filled from the next.

        Args:
            batch_size: the number of samples in a global batch.
            lane: the first and the number of this replica's samples in it; None for all.
            seed: the seed of the order.
            start_step: the global step to start at, counted from the start of the training.
            steps: the number of batches; None for no end.
            shuffle: False reads the samples in the order of the files, repeatedly.
            readers: the number of records read at once.
            prefetch: the number of batches read ahead.

        Raises:
            RecordError: if there are fewer samples than a batch holds, or there is no such lane.
        """
        import tensorflow as tf

        first, count = check_lane(len(self), batch_size, lane)

        def positions(number: int) -> np.ndarray:
            place = (start_step + number) * batch_size + first
            return batch_positions(len(self), place, count, seed=seed, shuffle=shuffle)

        def all_positions() -> Iterator[np.ndarray]:
            return map(positions, count_from() if steps is None else range(steps))

        paths = tf.constant(self._paths)
        starts, file = tf.constant(self._starts), tf.constant(self._file)

        @tf.autograph.experimental.do_not_convert  # has no control flow, and reading it takes time
        def sample(position: tf.Tensor) -> tuple[tf.Tensor, ...]:
            return self._sample(paths[file[position]], starts[position], position)

        signature = tf.TensorSpec([count], tf.int64)
        dataset = tf.data.Dataset.from_generator(all_positions, output_signature=signature)
        dataset = dataset.unbatch().map(sample, num_parallel_calls=readers, deterministic=True)
        dataset = dataset.batch(count, drop_remainder=True).prefetch(prefetch)
        return Batches(dataset, lambda number: self._find_damage(positions(number)))

    def _sample(
        self, paths: tf.Tensor, starts: tf.Tensor, position: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
        """Reads one sample: reads, crops and joins its pieces.

        Returns:
            The volume, the parameters and the index of the sample.
        """
        import tensorflow as tf

        joined, indices, piece = [], [], 0
        for line in self._crops:
            row = []
            for *_, x, y in line:
                values, parameters, index = self._piece(paths[piece], starts[piece])
                row.append(values[x, y])
                indices.append(index)
                piece += 1
            joined.append(tf.concat(row, axis=1))
        tf.debugging.assert_equal(tf.stack(indices), index, "blocks of different simulations")
        volume = tf.cast(tf.concat(joined, axis=0), tf.float32)
        if self.header.dtype == "int16":
            volume /= self.header.scale
        volume = tf.ensure_shape(volume, self.block_shape)
        return volume, parameters, tf.where(index < 0, position, index)

    def _piece(self, path: tf.Tensor, start: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns a stored block in its stored dtype, the parameters, and the index or -1."""
        import tensorflow as tf

        header = self.header
        features = {
            "x": tf.io.FixedLenFeature([], tf.string),
            "y": tf.io.FixedLenFeature([len(header.parameters)], tf.float32),
            "index": tf.io.FixedLenFeature([], tf.int64, -1),
        }
        record = read_record(path, start, packed=self._packed)
        found = tf.io.parse_single_example(record, features)
        data = tf.io.decode_compressed(found["x"], "ZLIB") if header.compressed else found["x"]
        values = tf.io.decode_raw(data, tf.as_dtype(header.dtype))
        return tf.reshape(values, header.block_shape()), found["y"], found["index"]

    def _find_damage(self, positions: np.ndarray) -> RecordError | None:
        """Returns an error that names the damage in the records of a batch, or None."""
        for position in positions:
            paths = [Path(os.fsdecode(path)) for path in self._paths[self._file[position]]]
            starts = self._starts[position]
            for path, start in zip(paths, starts, strict=True):
                if error := self._damage(path, int(start)):
                    return error
            indices = [int(self._piece(str(p), s)[2]) for p, s in zip(paths, starts, strict=True)]
            if len(set(indices)) > 1:
                found = dict(zip(map(str, paths), indices, strict=True))
                return RecordError(f"blocks of different simulations at the same place: {found}")
        return None

    def _damage(self, path: Path, start: int) -> RecordError | None:
        """Returns an error that names the damage in one record, or None."""
        import tensorflow as tf
        from google.protobuf.message import DecodeError

        where = f"{path}, the record at byte {start}"
        try:
            record = read_record(str(path), start, packed=self._packed)
            example = tf.train.Example.FromString(record.numpy())
        except (tf.errors.DataLossError, DecodeError) as error:
            return RecordError(f"{where} is corrupt; copy or write it again ({reason_of(error)})")
        except tf.errors.OpError as error:
            return RecordError(f"{where} cannot be read ({reason_of(error)})")
        wanted, found = self.header.block_shape(), _stored_shape(example, self.header)
        if found is not None and found != wanted:
            return RecordError(f"{where}: a volume of shape {found}; must be {wanted}")
        try:
            self._piece(str(path), start)
        except tf.errors.OpError as error:
            return RecordError(
                f"{where} holds no volume of shape {wanted} in {self.header.dtype} with "
                f"{len(self.parameters)} parameters ({reason_of(error)})"
            )
        return None


def _stored_shape(example: Any, header: DatasetHeader) -> tuple[int, ...] | None:
    """Returns the shape that a record states, or that of a cube in the public layout.

    Returns None if it is neither.
    """
    if shape := tuple(example.features.feature["shape"].int64_list.value):
        return shape
    data = example.features.feature["x"].bytes_list.value
    return cube(len(data[0]) // DTYPES[header.dtype].itemsize) if data else None


def _overlaps(block: Block, header: DatasetHeader) -> list[list[tuple[int, int, slice, slice]]]:
    """Returns the stored blocks that a block overlaps: row, column, and the cells to take of it."""
    wanted_x, wanted_y = block.cut(header.grid)
    x_cuts = _cuts(wanted_x, header.grid[0] // header.blocks[0])
    y_cuts = _cuts(wanted_y, header.grid[1] // header.blocks[1])
    return [[(row, col, x, y) for col, y in y_cuts] for row, x in x_cuts]


def _cuts(wanted: slice, width: int) -> list[tuple[int, slice]]:
    """Returns the blocks of a given width that a range overlaps, and the cells in each."""
    return [
        (n, slice(max(wanted.start - n * width, 0), min(wanted.stop - n * width, width)))
        for n in range(wanted.start // width, -(-wanted.stop // width))
    ]
