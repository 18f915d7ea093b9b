"""Files in the layout of the public CosmoFlow data, made without this package's writer."""

from pathlib import Path

import numpy as np
import tensorflow as tf

NAMES = ("Omega_m", "sigma8", "n_s")


def scaled(index) -> np.ndarray:
    """Parameters of samples, from -1 to 1."""
    return np.stack([np.sin(index), np.cos(index), np.sin(2.0 * index)], -1).astype(np.float32)


def record(counts: np.ndarray, index: int) -> bytes:
    x = tf.train.BytesList(value=[counts.astype("<i2").tobytes()])
    features = {
        "x": tf.train.Feature(bytes_list=x),
        "y": tf.train.Feature(float_list=tf.train.FloatList(value=scaled(index))),
    }
    example = tf.train.Example(features=tf.train.Features(feature=features))
    return example.SerializeToString()


def write_public(folder: Path, counts: np.ndarray, packed: bool, last: int = 1) -> None:
    """Made without our writer, as the public files were: one sample a file, `last` in the last."""
    folder.mkdir(parents=True)
    options = tf.io.TFRecordOptions(compression_type="GZIP" if packed else "", compression_level=1)
    files = [[i] for i in range(len(counts) - last)]
    files.append(list(range(len(counts) - last, len(counts))))
    for number, samples in enumerate(files):
        path = folder / f"univ_{number:06}.tfrecord"
        with tf.io.TFRecordWriter(str(path), options) as writer:
            for i in samples:
                writer.write(record(counts[i], i))
