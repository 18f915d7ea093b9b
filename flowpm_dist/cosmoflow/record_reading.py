"""One record of a TFRecord file, found by its place."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tensorflow as tf


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
