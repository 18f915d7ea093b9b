"""The counter-based generator against its published answers and against TensorFlow's own."""

import numpy as np
import tensorflow as tf
from scipy import stats

from meshimpl import philox


def words(*values):
    return [tf.constant([v], tf.uint64) for v in values]


def test_known_answers():
    """Known-answer vectors of Philox4x32-10 (Salmon and others 2011; Random123 kat_vectors)."""
    ones = 0xFFFFFFFF
    cases = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, (ones,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ]
    for counter, key, expected in cases:
        result = philox.philox4x32(words(*counter), words(*key))
        assert [int(r[0]) for r in result] == list(expected)


def test_agrees_with_tensorflow():
    counter, key = [5, 9], 0x1234567890ABCDEF
    theirs = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[4],
        key=tf.constant([key], tf.uint64),
        counter=tf.constant(counter, tf.uint64),
        alg=1,
        dtype=tf.uint32,
    ).numpy()
    halves = [counter[0], 0, counter[1], 0]
    ours = philox.philox4x32(words(*halves), words(key & 0xFFFFFFFF, key >> 32))
    assert [int(r[0]) for r in ours] == [int(t) for t in theirs]


def test_distributions():
    index = tf.range(200_000, dtype=tf.int64)
    assert stats.kstest(philox.uniform(index, 0, 1), "uniform").pvalue > 1e-3
    assert stats.kstest(philox.normal(index, 0, 1), "norm").pvalue > 1e-3


def test_values_depend_on_the_place_alone():
    index = philox.global_index([6, 5, 7], [0, 0, 0], [6, 5, 7])
    whole = philox.normal(index, 3, 11).numpy()
    part = philox.global_index([6, 5, 7], [2, 1, 3], [3, 4, 2])
    np.testing.assert_array_equal(philox.normal(part, 3, 11), whole[2:5, 1:5, 3:5])
    assert (philox.normal(index, 4, 11).numpy() != whole).all(), "another stream"


def test_a_block_is_its_places_to_the_bit():
    """Also where rows of 64 do not end with the block, and at the end of a large array."""
    for shape, begin, size in [
        ([6, 5, 7], [2, 1, 3], [3, 4, 2]),
        ([64, 64, 64], [32, 0, 0], [32, 64, 64]),
        ([2**20, 2**20, 2**10], [2**20 - 3, 2**20 - 5, 1], [3, 5, 33]),
    ]:
        expected = philox.normal(philox.global_index(shape, begin, size), 3, 11)
        begin = tf.constant(begin, tf.int64)
        np.testing.assert_array_equal(philox.normal_block(shape, begin, size, 3, 11), expected)
        single = philox.normal_block(shape, begin, size, 3, 11, tf.float32)
        np.testing.assert_array_equal(single, tf.cast(expected, tf.float32))


def test_pairs_are_independent_normals():
    first, second = philox.normal_pair(tf.range(200_000, dtype=tf.int64), 0, 1)
    np.testing.assert_allclose(first, philox.normal(tf.range(200_000, dtype=tf.int64), 0, 1))
    assert stats.kstest(second, "norm").pvalue > 1e-3
    assert abs(np.mean(first * second)) < 5 / np.sqrt(200_000)
    assert abs(np.mean(first**2 * second**2) - 1) < 5 * np.sqrt(8 / 200_000)
