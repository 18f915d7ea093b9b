"""Rows of tensors that move to other ranks and back, as many as each pair of ranks needs.

Eager: how many rows move is known only when it is known where they go. A plan is made once, and
then moves any number of tensors.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from meshimpl.collectives import Communicator


class RowExchange:
    """A plan by which each rank sends copies of its rows to ranks of a group.

    With each row sent once it is a permutation, and `give_back` its inverse. A row can be sent to
    several ranks, as on the margins of their blocks, or to none.

    Args:
        group: the ranks, which make this together.
        ranks: [m], the place in the group where each copy goes.
        rows: [m], the row that each copy is of; by default copy n is of row n.
        count: the number of rows; by default m.

    Attributes:
        ranks: as given.
        rows: [m], the row of each copy, in the order in which copies are sent: by rank, and for
            each rank as they were given.
        arrived: the number of copies that come here. They are in the order of their ranks.

    Raises:
        ValueError: a rank or a row that there is not. Only this rank raises it.
    """

    def __init__(
        self,
        group: Communicator,
        ranks: np.ndarray,
        rows: np.ndarray | None = None,
        count: int | None = None,
    ) -> None:
        self._group, self.count = group, len(ranks) if count is None else count
        self.ranks = ranks
        if rows is None:
            rows = np.arange(len(ranks))
        for name, numbers, end in (("ranks", ranks, group.size), ("rows", rows, self.count)):
            if len(numbers) and not 0 <= numbers.min() <= numbers.max() < end:
                raise ValueError(f"{name} {numbers.min()} to {numbers.max()}: from 0 to {end - 1}")
        # Nothing moves within a single rank.
        order = np.argsort(ranks, kind="stable") if group.size > 1 else slice(None)
        self.rows = rows[order]
        self._sent = np.bincount(ranks, minlength=group.size).astype(np.int32)
        self._comes = group.alltoall(tf.constant(self._sent)).numpy()
        self.arrived = int(self._comes.sum())

    def send(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the copies of rows that come here, differentiable.

        Args:
            x: [count, ...], this rank's rows.

        Returns:
            [arrived, ...].
        """

        @tf.custom_gradient
        def move(x: tf.Tensor) -> tuple[tf.Tensor, object]:
            return self._send(x), self.give_back

        return move(tf.convert_to_tensor(x))

    def give_back(self, y: tf.Tensor) -> tf.Tensor:
        """Returns the sum over the copies of each row, the adjoint of `send`, differentiable.

        Args:
            y: [arrived, ...], a value for each copy that came here.

        Returns:
            [count, ...]; 0 for a row without copies.
        """

        @tf.custom_gradient
        def move(y: tf.Tensor) -> tuple[tf.Tensor, object]:
            copies = self.returned(y)
            return tf.math.unsorted_segment_sum(copies, self.rows, self.count), self.send

        return move(tf.convert_to_tensor(y))

    def returned(self, y: tf.Tensor) -> tf.Tensor:
        """Returns the values that the copies of this rank's rows were given elsewhere.

        Args:
            y: [arrived, ...], a value for each copy that came here.

        Returns:
            [m, ...], in the order of `rows`.
        """
        return self._move(tf.convert_to_tensor(y), self._comes, len(self.rows))

    def copies(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the values that come here, where each copy has a value of its own.

        Args:
            x: [m, ...], a value for each copy, in the order of `rows`.

        Returns:
            [arrived, ...].
        """
        return self._move(tf.convert_to_tensor(x), self._sent, self.arrived)

    def _send(self, x: tf.Tensor) -> tf.Tensor:
        if x.shape[0] != self.count:
            raise ValueError(f"{x.shape[0]} rows, but the plan is for {self.count}")
        return self._move(tf.gather(x, self.rows), self._sent, self.arrived)

    def _move(self, x: tf.Tensor, counts: np.ndarray, arriving: int) -> tf.Tensor:
        if x.shape[0] != counts.sum():
            raise ValueError(f"{x.shape[0]} rows, but the plan is for {counts.sum()}")
        moved = self._group.alltoallv(x, counts)
        return tf.ensure_shape(moved, [arriving, *x.shape[1:]])
