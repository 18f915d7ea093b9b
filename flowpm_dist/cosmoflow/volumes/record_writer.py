"""Density volumes written into TFRecord files, and copied to fast local storage.

`record_files` describes the format.
"""

from __future__ import annotations

import functools
import gzip
import re
import shutil
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flowpm_dist.cosmoflow.volumes.record_files import (
    DATASET,
    DTYPES,
    WHOLE,
    Block,
    DatasetHeader,
    RecordError,
    dataset_files,
    file_name,
    read_header,
    split_files,
)
from flowpm_dist.cosmoflow.volumes.tfrecords import MESSAGE_LIMIT, is_packed, packed_size
from flowpm_dist.io.files import WriteError, written_whole
from flowpm_dist.jobs.folder import existing_part
from flowpm_dist.options import in_unit
from flowpm_dist.options.regular_files import human_size
from meshimpl import launch

if TYPE_CHECKING:
    from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
    from flowpm_dist.jobs.progress import Progress
    from meshimpl.process_mesh import ProcessMesh


class RecordWriter:
    """A writer of one rank's blocks of a split.

    Each file appears under its name when it is complete. Replica r of R writes the files r, r + R,
    r + 2R, ... with `first_file` r and `file_stride` R.

    Args:
        folder: the folder of the dataset; created if it does not exist.
        split: "train", "validation", "test", or any name.
        header: the properties that all records share.
        block: this rank's part of each volume.
        first_file, file_stride: the number of this writer's first file, and the step to the next.

    Raises:
        RecordError: the first file exists, the block is none of the header's, or other splits in
            the folder have another header.
        WriteError: if a file cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        header: DatasetHeader,
        block: Sequence[int] = WHOLE,
        first_file: int = 0,
        file_stride: int = 1,
    ) -> None:
        self.folder, self.split, self.header = Path(folder), split, header
        self.block = Block(*block)
        self._number, self._stride = first_file, file_stride
        self._open = ExitStack()
        self._file: Any = None
        self._count = 0
        if (self.block.rows, self.block.cols) != header.blocks:
            raise RecordError(f"block {tuple(self.block)} is not one of {header.blocks} blocks")
        self._shape = header.block_shape(self.block)
        if header.block_bytes > MESSAGE_LIMIT:
            raise RecordError(
                f"a block of shape {self._shape} in {header.dtype} has {header.block_bytes} bytes, "
                f"a record holds {MESSAGE_LIMIT}: split the volume into more blocks"
            )
        if not re.fullmatch(r"[\w-]+", split):
            raise RecordError(f"split {split!r}; must be letters, digits, - and _")
        if (self.folder / DATASET).exists():
            written, splits = read_header(self.folder)
            if set(splits) - {split} and (names := written.differences(header)):
                pairs = (f"{n} {getattr(written, n)}, not {getattr(header, n)}" for n in names)
                raise RecordError(
                    f"{self.folder} holds the splits {', '.join(splits)} with {', '.join(pairs)}: "
                    "give another folder"
                )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WriteError.of(self.folder, error) from error
        if self.path.exists():
            raise RecordError(f"{self.path} exists: remove it, or give another folder")

    @property
    def path(self) -> Path:
        """The file that the next sample goes to."""
        return self.folder / file_name(self.split, self._number, self.block)

    def write(self, volume: Any, y: Sequence[float], *, seed: int, index: int) -> None:
        """Appends one sample.

        Args:
            volume: this rank's block, [x, y, z, channel], or [x, y, z] with one channel.
            y: the parameters [physical units].
            seed, index: the seed and the number of the simulation.

        Raises:
            RecordError: a shape differs from the header, a value is not finite, or a value is too
                large for int16.
            WriteError: if the file cannot be written.
        """
        import tensorflow as tf

        volume, y = np.asarray(in_unit("volume", volume)), in_unit("y", y)
        example = self._example(volume, np.asarray(y, np.float32), seed, index)
        try:
            if self._file is None:
                aside = self._open.enter_context(written_whole(self.path))
                self._file = self._open.enter_context(tf.io.TFRecordWriter(str(aside)))
            self._file.write(example)
        except (OSError, tf.errors.OpError) as error:
            raise WriteError.of(self.path, error) from error
        self._count += 1
        if self._count == self.header.samples_per_file:
            self.close()

    def _example(self, volume: np.ndarray, y: np.ndarray, seed: int, index: int) -> bytes:
        from tensorflow.train import BytesList, Example, Feature, Features, FloatList, Int64List

        def text(*values: bytes) -> Feature:
            return Feature(bytes_list=BytesList(value=values))

        def integers(*values: int) -> Feature:
            return Feature(int64_list=Int64List(value=values))

        header = self.header
        if volume.shape != self._shape and (*volume.shape, 1) != self._shape:
            raise RecordError(f"a volume of shape {volume.shape}; must be {self._shape}")
        if y.shape != (len(header.parameters),) or not np.isfinite(y).all():
            raise RecordError(f"y = {y.tolist()}; must be finite values of {header.parameters}")
        data = encode(volume, header)
        example = {
            "x": text(zlib.compress(data) if header.compressed else data),
            "y": Feature(float_list=FloatList(value=y)),
            "shape": integers(*self._shape),
            "parameters": text(*(name.encode() for name in header.parameters)),
            "unit": text(header.unit.encode()),
            "compression": text(b"zlib" if header.compressed else b""),
            "seed": integers(seed),
            "index": integers(index),
        }
        return Example(features=Features(feature=example)).SerializeToString(deterministic=True)

    def close(self) -> None:
        """Completes the present file, if there is one."""
        import tensorflow as tf

        if self._file is None:
            return
        self._file, self._count = None, 0
        try:
            self._open.close()
        except (OSError, tf.errors.OpError) as error:
            raise WriteError.of(self.path, error) from error
        self._number += self._stride

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: Any) -> None:
        if kind is None:
            self.close()
        else:
            with suppress(WriteError):  # the error of the block is raised
                self._open.__exit__(kind, *details)


def clear_split(folder: Path, split: str) -> None:
    """Removes the files of a split, also unfinished files of an interrupted session.

    Raises:
        WriteError: if a file cannot be removed.
    """
    unfinished = folder.glob(f".{split}-*.tfrecord*.partial")
    for path in [*unfinished, *(file.path for file in split_files(folder).get(split, ()))]:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise WriteError.of(path, error) from error


def encode(volume: np.ndarray, header: DatasetHeader) -> bytes:
    """Returns a block's values as bytes in the header's dtype.

    Raises:
        RecordError: if a value is not finite, or beyond the range of int16 with the header's scale.
    """
    if not np.isfinite(volume).all():
        raise RecordError("a volume with values that are not finite")
    if header.dtype == "int16":
        volume = np.rint(volume * np.float64(header.scale))
        largest = float(np.abs(volume).max())
        if largest > 32767:
            fits = 2.0 ** np.floor(np.log2(32767 * header.scale / largest))
            raise RecordError(
                f"a density of {largest / header.scale:.6g} does not fit in int16 with scale "
                f"{header.scale:g}: take a scale of {fits:g}, or float32"
            )
    return volume.astype(DTYPES[header.dtype]).tobytes()


def stage(
    folder: Path,
    into: Path,
    split: str,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Copies a split into a fast local folder and unpacks gzip. One process of each node calls it.

    Existing files of the same size and time are kept. Other files appear when they are complete.

    Args:
        folder: the dataset, in this package's layout or the public one.
        into: the local folder; created if it does not exist.
        split: the split to copy.
        progress: called with the number of files done and the number of all files.

    Returns:
        The folder to read from: `into`.

    Raises:
        RecordError: there is no such split, there is not enough room, a gzip file is damaged, or
            `into` has files of the split that are not in the dataset.
        WriteError: if a file cannot be copied.
    """
    folder, into = Path(folder), Path(into)
    sources = dataset_files(folder, split)
    targets = {
        into / path.relative_to(folder).with_name(path.name.removesuffix(".gz")): path
        for path in sources
    }
    if (folder / DATASET).exists():
        targets[into / DATASET] = folder / DATASET
    try:
        there = set(dataset_files(into, split))
    except RecordError:
        there = set()
    if foreign := sorted(there - set(targets)):
        raise RecordError(f"{foreign[0]} is of another dataset: stage into another folder")
    missing = {t: source for t, source in targets.items() if not _is_staged(source, t)}
    needed = sum(map(_unpacked_size, missing.values()))
    ground = existing_part(into)
    free = shutil.disk_usage(ground).free
    if needed > free:
        raise RecordError(
            f"{ground} has {human_size(free)} free, but the {len(missing)} files of split "
            f"{split!r} still to be staged need {human_size(needed)}"
        )
    report = progress or (lambda done, count: None)
    for done, target in enumerate(targets):
        report(done, len(targets))
        if target in missing and not _is_staged(missing[target], target):  # by another host
            _copy(missing[target], target)
    report(len(targets), len(targets))
    return into


def _unpacked_size(path: Path) -> int:
    """Returns the size of a file after unpacking [bytes]."""
    size = packed_size(path)
    return path.stat().st_size if size is None else size


def _is_staged(source: Path, target: Path) -> bool:
    if not target.exists():
        return False
    copy, mtime = target.stat(), int(source.stat().st_mtime)
    return int(copy.st_mtime) == mtime and copy.st_size == _unpacked_size(source)


def _copy(source: Path, target: Path) -> None:
    with written_whole(target) as partial:
        try:
            if is_packed(source):
                with gzip.open(source) as packed, open(partial, "wb") as file:
                    shutil.copyfileobj(packed, file, 2**20)
            else:
                shutil.copyfile(source, partial)
            shutil.copystat(source, partial)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise RecordError(f"{source} is damaged: {error}") from error


def stage_files(plan: TrainingPlan, mesh: ProcessMesh, progress: Progress) -> None:
    """Copies the files of a training to the fast folder that it names, if any, once on each node.

    All ranks call it together; afterwards each rank finds the files there.

    Raises:
        RecordError, WriteError: on the first rank of a node; see `stage`.
    """
    data = plan.data
    if data.source != "files" or data.staging is None:
        return
    if not launch.detect().local_rank:
        for split in ("train", "validation"):
            report = functools.partial(progress, f"staging {split}")
            stage(data.folder, data.staging, split, progress=report)
    mesh.barrier("files are staged")
