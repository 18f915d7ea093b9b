"""Records of a TFRecord file: one that is found by its place, and whether all hold a volume."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from flowpm_dist.cosmoflow.volumes.record_files import FRAME

if TYPE_CHECKING:
    import tensorflow as tf

SMALL_FEATURES = 2**12
"""What a record may have beside its volume [bytes]."""


def wrong_record(bounds: np.ndarray, volume_bytes: int) -> tuple[int, str] | None:
    """Returns the first record whose length shows a volume of another shape, and what is wrong.

    Args:
        bounds: where the records of a file begin, and where the last one ends [byte].
        volume_bytes: size of a volume [byte].
    """
    beside = np.diff(bounds) - FRAME - volume_bytes
    wrong = np.flatnonzero((beside < 0) | (beside > SMALL_FEATURES))
    if not wrong.size:
        return None
    record = int(wrong[0])
    found = f"record {record} has {beside[record] + volume_bytes} bytes"
    return record, f"{found}, its volume must have {volume_bytes}"


def read_record(path: Any, start: Any, *, packed: bool = False) -> tf.Tensor:
    """Returns the data of the record that begins at a byte of a file, after unpacking.

    TensorFlow verifies its checksum.
    """
    import tensorflow as tf

    # Without a buffer, nothing but the record is read.
    records = tf.raw_ops.TFRecordDatasetV2(
        filenames=tf.reshape(path, [1]),
        compression_type="GZIP" if packed else "",
        buffer_size=0,
        byte_offsets=tf.reshape(tf.cast(start, tf.int64), [1]),
    )
    kind = {"output_types": [tf.string], "output_shapes": [[]]}
    one = tf.raw_ops.TakeDataset(input_dataset=records, count=1, **kind)
    return tf.raw_ops.DatasetToSingleElement(dataset=one, **kind)[0]


def reason_of(error: Exception) -> str:
    """Returns the first line of an error's message, without the names of TensorFlow's nodes."""
    line = str(getattr(error, "message", error)).partition("\n")[0]
    return re.sub(r"\{\{.*?\}\} *| *\[Op:.*", "", line)
