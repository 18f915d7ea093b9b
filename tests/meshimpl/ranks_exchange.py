"""Rows that move between ranks: every copy arrives, returns, and has its adjoint."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from meshimpl.exchange import RowExchange
from meshimpl.process_mesh import ProcessMesh

pytestmark = pytest.mark.ranks(1, 2, 4)

ROWS = (5, 0, 7, 3)
"""Rows of each rank."""


def rows_of(rank: int) -> np.ndarray:
    return 100.0 * rank + np.arange(3.0 * ROWS[rank]).reshape(-1, 3)


def copies_of(rank: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Ranks and rows of a rank's copies: some rows go nowhere, some to several ranks."""
    rng = np.random.default_rng(rank)
    count = 2 * ROWS[rank]
    return rng.integers(0, size, count), rng.integers(0, max(ROWS[rank], 1), count)


def exchange_of(line: ProcessMesh) -> RowExchange:
    return RowExchange(line.world, *copies_of(line.rank, line.size), count=ROWS[line.rank])


def test_copies_arrive_in_the_order_of_their_ranks(line):
    exchange = exchange_of(line)
    found = exchange.send(tf.constant(rows_of(line.rank))).numpy()
    expected = []
    for source in range(line.size):
        ranks, rows = copies_of(source, line.size)
        expected.append(rows_of(source)[rows[ranks == line.rank]])
    np.testing.assert_array_equal(found, np.concatenate(expected))


def test_what_is_returned_belongs_to_each_copy(line):
    exchange = exchange_of(line)
    rows = rows_of(line.rank)
    back = exchange.returned(2 * exchange.send(tf.constant(rows))).numpy()
    np.testing.assert_array_equal(back, 2 * rows[exchange.rows])
    copies = exchange.copies(tf.constant(rows[exchange.rows])).numpy()
    np.testing.assert_array_equal(copies, exchange.send(tf.constant(rows)).numpy())


def test_a_permutation_has_an_inverse(line):
    ranks = np.random.default_rng(line.rank).integers(0, line.size, ROWS[line.rank])
    exchange, rows = RowExchange(line.world, ranks), rows_of(line.rank)
    np.testing.assert_array_equal(exchange.give_back(exchange.send(rows)).numpy(), rows)


def test_adjoint_and_gradients(line):
    exchange, rng = exchange_of(line), np.random.default_rng(10 + line.rank)
    x = tf.constant(rng.normal(size=(ROWS[line.rank], 3)))
    y = tf.constant(rng.normal(size=(exchange.arrived, 3)))
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([x, y])
        there = tf.reduce_sum(exchange.send(x) * y)
        here = tf.reduce_sum(x * exchange.give_back(y))
    sums = line.world.allreduce(tf.stack([there, here])).numpy()
    np.testing.assert_allclose(sums[0], sums[1], rtol=1e-13)
    np.testing.assert_allclose(tape.gradient(there, x), exchange.give_back(y), rtol=1e-13)
    np.testing.assert_allclose(tape.gradient(here, y), exchange.send(x), rtol=1e-13)


def test_a_rank_that_is_not_there(line):
    with pytest.raises(ValueError, match=f"ranks 0 to {line.size}: from 0 to {line.size - 1}"):
        RowExchange(line.world, np.array([0, line.size]))
    with pytest.raises(ValueError, match="rows 3 to 3: from 0 to 1"):
        RowExchange(line.world, np.array([0]), np.array([3]), count=2)
    exchange = RowExchange(line.world, np.array([0]))
    with pytest.raises(ValueError, match="2 rows, but the plan is for 1"):
        exchange.send(np.zeros(2))
