"""TFRecord files, packed with gzip or not: where their records begin, and what a record holds."""

from __future__ import annotations

import gzip
import os
import re
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from flowpm_dist.io.errors import WorkError
from flowpm_dist.options.regular_files import check_regular

FRAME = 16
"""Bytes around the data of a record: its length, the length's checksum and the data's checksum."""
LARGEST = 2**31
"""Largest size of a protocol buffer [bytes]."""
SMALL_FEATURES = 2**12
"""Largest size of a record's features other than its volume [bytes]."""
MESSAGE_LIMIT = LARGEST - SMALL_FEATURES
"""Largest size of a volume in a record [bytes]."""
GZIP = b"\x1f\x8b\x08"
"""The first bytes of a file that is packed with gzip."""


class RecordError(WorkError):
    """A dataset cannot be written or read as requested. The message names the file."""


def _opened(path: Path) -> BinaryIO:
    """Opens a regular file without a buffer. Raises OSError."""
    check_regular(path)
    return open(path, "rb", buffering=0)


def record_bounds(path: Path, packed: bool = False, one: int | None = None) -> np.ndarray:
    """Returns where the records of a file begin, and its end, after unpacking [bytes].

    Only the length fields are read. Checksums are verified when a record is read.

    Args:
        path: the file.
        packed: whether it is packed with gzip.
        one: the size of a file of one record, after unpacking [bytes]. A packed file is not
            unpacked if its last four bytes state this size.

    Returns:
        The offsets, int64 [records + 1].

    Raises:
        RecordError: the file is not packed as `packed` says, does not end where a record ends, or
            cannot be read.
    """
    bounds = [0]
    if packed:
        stated = packed_size(path)
        if stated is None:
            raise RecordError(f"{path} is not packed with gzip, but the first file is")
        if stated == one:
            return np.array([0, stated], np.int64)
    try:
        with gzip.open(path) if packed else _opened(path) as file:
            size = None if packed else os.fstat(file.fileno()).st_size
            while head := file.read(8):
                bounds.append(bounds[-1] + FRAME + int.from_bytes(head, "little"))
                if size is not None and bounds[-1] > size:
                    raise _damage(path, bounds, size)
                if file.seek(bounds[-1]) != bounds[-1]:
                    raise EOFError("it ends within a record")
    except (EOFError, zlib.error, gzip.BadGzipFile, OverflowError, ValueError) as error:
        raise RecordError(f"{path} is damaged: {error}; copy it again") from error
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror or error}") from error
    return np.array(bounds, np.int64)


def _damage(path: Path, bounds: list[int], size: int) -> RecordError:
    """Returns the error about a file of `size` bytes that ends before the last of its bounds."""
    if is_packed(path):
        return RecordError(
            f"{path} is packed with gzip, where no record can be found without those before "
            "it: unpack it with stage(folder, into, split), and read from there"
        )
    if len(bounds) == 2 and bounds[1] > FRAME + LARGEST:
        begins = "it does not begin with the length of a record"
        return RecordError(f"{path} is no TFRecord file: {begins}")
    return RecordError(
        f"{path} ends within a record: it is truncated (or a length in it is damaged) and "
        f"holds {len(bounds) - 2} whole records in {size} bytes; copy or write it again"
    )


def wrong_record(bounds: np.ndarray, volume_bytes: int) -> tuple[int, str] | None:
    """Returns the first record whose length does not fit the volume, and what is wrong with it.

    Args:
        bounds: where the records of a file begin, and where the last one ends [byte].
        volume_bytes: size of a volume [byte].
    """
    extra = np.diff(bounds) - FRAME - volume_bytes
    wrong = np.flatnonzero((extra < 0) | (extra > SMALL_FEATURES))
    if not wrong.size:
        return None
    record = int(wrong[0])
    held = f"record {record} has {extra[record] + volume_bytes} bytes"
    return record, f"{held}, its volume must have {volume_bytes}"


def parsed_record(path: str, start: int, where: str, *, packed: bool = False) -> Any:
    """Returns the features of the record that begins at a byte of a file, after unpacking.

    TensorFlow verifies its checksum.

    Args:
        path: the file.
        start: the byte at which the record begins.
        where: the name of the record in messages.
        packed: whether the file is packed with gzip.

    Raises:
        RecordError: the record is damaged, or cannot be read.
    """
    import tensorflow as tf
    from google.protobuf.message import DecodeError

    kind = {"output_types": [tf.string], "output_shapes": [[]]}
    try:
        with tf.device("CPU:0"):
            # Without a buffer, so that only the record is read.
            records = tf.raw_ops.TFRecordDatasetV2(
                filenames=[path],
                compression_type="GZIP" if packed else "",
                buffer_size=0,
                byte_offsets=tf.constant([start], tf.int64),
            )
            one = tf.raw_ops.TakeDataset(input_dataset=records, count=1, **kind)
            [record] = tf.raw_ops.DatasetToSingleElement(dataset=one, **kind)
        return tf.train.Example.FromString(record.numpy()).features.feature
    except (tf.errors.OpError, DecodeError) as error:
        # The first line of the message, without the names of TensorFlow's nodes.
        line = str(getattr(error, "message", error)).partition("\n")[0]
        reason = re.sub(r"\{\{.*?\}\} *| *\[Op:.*", "", line)
        damaged = isinstance(error, tf.errors.DataLossError | DecodeError)
        state = "is corrupt; copy or write it again" if damaged else "cannot be read"
        raise RecordError(f"{where} {state} ({reason})") from error


def packed_size(path: Path) -> int | None:
    """Returns the size of a file packed with gzip after unpacking [bytes]; None if it is not.

    The file states it in its last four bytes, modulo 4 GiB.

    Raises:
        RecordError: the file cannot be read.
    """
    try:
        with _opened(path) as file:
            if file.read(len(GZIP)) != GZIP:
                return None
            file.seek(-4, os.SEEK_END)
            return int.from_bytes(file.read(), "little")
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from error


def is_packed(path: Path) -> bool:
    """Returns whether a file is packed with gzip. Raises RecordError if it cannot be read."""
    return packed_size(path) is not None
