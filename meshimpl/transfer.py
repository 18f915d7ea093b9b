"""One redistribution of a block over a line of ranks, as an object whose text says what moves."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from meshimpl.collectives import Communicator


@dataclass(frozen=True)
class Transfer:
    """An exchange after which another dimension is whole on each rank.

    `Transfer("b x y [kz] -> b x kz [y]", col)` takes blocks [b, x, y / col, kz] to
    [b, x, kz / col, y]. On a group of one rank it is the local transposition.

    Attributes:
        moves: the dimensions of a block before and after, in order. Brackets mark the one that is
            whole: the group splits it, and joins the other.
        group: the ranks among which it moves.
    """

    moves: str
    group: Communicator

    @property
    def reverse(self) -> Transfer:
        """The transfer back."""
        before, after = self.moves.split(" -> ")
        return Transfer(f"{after} -> {before}", self.group)

    def __call__(self, block: tf.Tensor) -> tf.Tensor:
        """Returns the block after the transfer.

        Args:
            block: any dtype that an alltoall carries; the whole dimension is a multiple of the
                number of ranks.
        """
        before, after = (side.split() for side in self.moves.split(" -> "))
        (split,) = (i for i, name in enumerate(before) if name.startswith("["))
        (joined,) = (i for i, name in enumerate(after) if name.startswith("["))
        source, target = ([name.strip("[]") for name in side] for side in (before, after))
        ranks, sizes = self.group.size, block.shape.as_list()
        sizes[split] //= ranks
        size_of = dict(zip(source, sizes, strict=True)) | {"rank": ranks}
        apart = [*source[:split], "rank", *source[split:]]
        message = ["rank", *target]
        arrived = [*target[:joined], "rank", *target[joined:]]
        pieces = tf.reshape(block, [size_of[name] for name in apart])
        pieces = self.group.alltoall(_transpose(pieces, apart, message))
        result = [size_of[name] for name in target]
        result[joined] *= ranks
        return tf.reshape(_transpose(pieces, message, arrived), result)


def _transpose(x: tf.Tensor, before: list[str], after: list[str]) -> tf.Tensor:
    """`tf.transpose` by names, without touching the data when only axes of size 1 move."""
    order = [before.index(name) for name in after]
    sizes = x.shape.as_list()
    moved = [axis for axis in order if sizes[axis] != 1]
    if moved == sorted(moved):
        return tf.reshape(x, [sizes[axis] for axis in order])
    return tf.transpose(x, order)
