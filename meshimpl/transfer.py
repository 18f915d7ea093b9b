"""One redistribution of a block over a line of ranks, as an object whose text says what moves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
        half: whether messages are float16, see `Communicator.alltoall`.
    """

    moves: str
    group: Communicator
    half: bool = False

    @property
    def reverse(self) -> Transfer:
        """The transfer back."""
        before, after = self.moves.split(" -> ")
        return Transfer(f"{after} -> {before}", self.group, self.half)

    def __call__(
        self, block: tf.Tensor, *, pad_to: int | None = None, crop_to: int | None = None
    ) -> tf.Tensor:
        """Returns the block after the transfer.

        Args:
            block: any dtype that an alltoall carries.
            pad_to: length to which the dimension that is whole before is padded with zeros; a
                multiple of the number of ranks, as that dimension must be if this is None.
            crop_to: length of what is kept of the dimension that is whole afterwards.
        """
        message = _compiled(_pack, self.moves, self.group.size, pad_to)(block)
        arrived = self.group.alltoall(message, half=self.half)
        return _compiled(_unpack, self.moves, crop_to)(arrived)


@functools.cache
def _compiled(function: Callable[..., tf.Tensor], *static: Any) -> Callable[..., tf.Tensor]:
    """Returns `function` with its first arguments fixed, compiled by XLA where there is a GPU.

    TensorFlow has tiled transpositions there for at most three axes, neighbours that stay together
    being one; most of those here have four (its transpose_functor_gpu.cu.cc).
    """
    fixed = functools.partial(function, *static)
    if not _has_gpu():
        return fixed
    return tf.function(fixed, jit_compile=True, autograph=False)


def _has_gpu() -> bool:
    return bool(tf.config.get_visible_devices("GPU"))


def _whole(side: str) -> tuple[list[str], int]:
    """Returns the names of one side of `Transfer.moves`, and the place of the whole dimension."""
    names = side.split()
    (place,) = (i for i, name in enumerate(names) if name.startswith("["))
    return [name.strip("[]") for name in names], place


def _pack(moves: str, ranks: int, pad_to: int | None, block: tf.Tensor) -> tf.Tensor:
    """Returns the message to each rank, [rank, *the dimensions afterwards]."""
    before, after = moves.split(" -> ")
    (source, split), (target, _) = _whole(before), _whole(after)
    sizes = block.shape.as_list()
    if pad_to is not None and pad_to != sizes[split]:
        missing = pad_to - sizes[split]
        block = tf.pad(block, [[0, missing * (i == split)] for i in range(len(sizes))])
        sizes[split] = pad_to
    sizes[split : split + 1] = ranks, sizes[split] // ranks
    apart = [*source[:split], "rank", *source[split:]]
    return _transpose(tf.reshape(block, sizes), apart, ["rank", *target])


def _unpack(moves: str, crop_to: int | None, message: tf.Tensor) -> tf.Tensor:
    """Returns the block from the messages of all ranks, [rank, *the dimensions afterwards]."""
    target, joined = _whole(moves.split(" -> ")[1])
    ranks, *result = message.shape.as_list()
    result[joined] *= ranks
    arrived = [*target[:joined], "rank", *target[joined:]]
    block = tf.reshape(_transpose(message, ["rank", *target], arrived), result)
    if crop_to is None or crop_to == result[joined]:
        return block
    result[joined] = crop_to
    return tf.slice(block, [0] * len(result), result)


def _transpose(x: tf.Tensor, before: list[str], after: list[str]) -> tf.Tensor:
    """`tf.transpose` by names, without touching the data when only axes of size 1 move."""
    order = [before.index(name) for name in after]
    sizes = x.shape.as_list()
    moved = [axis for axis in order if sizes[axis] != 1]
    if moved == sorted(moved):
        return tf.reshape(x, [sizes[axis] for axis in order])
    return tf.transpose(x, order)
