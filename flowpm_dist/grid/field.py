"""Fields that live on a box: each rank holds its block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box
from meshimpl.process_mesh import ProcessMesh


@dataclass(frozen=True)
class Field:
    """A scalar or vector field: this rank's block of it, and the box it lives in.

    Attributes:
        block: tensor of shape [..., nx/row, ny/col, nz] or, for a vector, [..., 3].
        box: grid, size and ranks.
    """

    block: tf.Tensor
    box: Box

    def __post_init__(self) -> None:
        space = self.box.local_batch + self.box.block
        given = tuple(self.block.shape)
        if given[: len(space)] != space or len(given) > len(space) + 1:
            raise ValueError(
                f"a block of shape {given} does not fit the box, whose blocks are {space}"
            )

    @property
    def _trailing(self) -> tuple[int, ...]:
        return tuple(self.block.shape[len(self.box.local_batch) + 3 :])

    @property
    def grid(self) -> tuple[int, ...]:
        """Shape of the whole array."""
        batch = () if self.box.batch is None else (self.box.batch,)
        return batch + self.box.grid + self._trailing

    @property
    def offset(self) -> tuple[int, ...]:
        """The first index of the block in the whole array, along each axis."""
        batch = () if self.box.batch is None else (self.box.batch_offset,)
        return batch + self.box.offset + (0,) * len(self._trailing)

    @property
    def mesh(self) -> ProcessMesh:
        """The ranks."""
        return self.box.mesh

    @property
    def dtype(self) -> tf.DType:
        """The dtype of the values."""
        return self.block.dtype

    def on(self, box: Box) -> Field:
        """Returns this field with each cell on the rank that holds it in another box.

        Where the layouts differ, cells move between ranks; on all ranks together. Differentiable.

        Args:
            box: of the same grid and batch, on a mesh of the same ranks; its size does not matter.

        Raises:
            ValueError: it is of another grid, batch or set of ranks.
        """
        own = self.box
        kinds = [(b.grid, b.batch, b.mesh.world.ranks) for b in (own, box)]
        if kinds[0] != kinds[1]:
            described = (
                f"grid {b.grid}, {'one universe' if b.batch is None else f'a batch of {b.batch}'}, "
                f"mesh {b.mesh} of the ranks {', '.join(map(str, b.mesh.world.ranks))}"
                for b in (own, box)
            )
            raise ValueError("a field of {} cannot be laid out as {}".format(*described))
        return Field(_moved(self.block, own, box), box)

    def numpy(self) -> np.ndarray:
        """The whole array on every rank. Gathers: for grids that fit one rank's memory."""
        shape = self.box.vector_shape if self._trailing else self.box.shape
        return self.box.whole(self.block, shape)


def _moved(block: tf.Tensor, source: Box, target: Box) -> tf.Tensor:
    """Returns this rank's block in the target's layout, from all ranks' blocks in the source's."""
    ranks = range(source.mesh.size)
    before, after = ([box.place_of(r) for r in ranks] for box in (source, target))
    if before == after:
        return tf.convert_to_tensor(block)
    me = source.mesh.rank

    @tf.custom_gradient
    def move(block: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        values = block.numpy()
        sent = [values[_common(before[me], place, before[me])].ravel() for place in after]
        counts = tf.constant([piece.size for piece in sent], tf.int32)
        arrived = source.mesh.world.alltoallv(tf.constant(np.concatenate(sent)), counts).numpy()
        trailing = values.shape[len(before[me]) :]
        moved = np.empty([*(s.stop - s.start for s in after[me]), *trailing], values.dtype)
        for place in before:
            cells = _common(place, after[me], after[me])
            piece = moved[cells]
            moved[cells] = arrived[: piece.size].reshape(piece.shape)
            arrived = arrived[piece.size :]
        return tf.constant(moved), lambda dy: _moved(dy, target, source)

    return move(block)


def _common(
    one: tuple[slice, ...], other: tuple[slice, ...], origin: tuple[slice, ...]
) -> tuple[slice, ...]:
    """Returns the cells that two places share, counted from the first cell of `origin`."""
    begins = [max(a.start, b.start) for a, b in zip(one, other, strict=True)]
    ends = [min(a.stop, b.stop) for a, b in zip(one, other, strict=True)]
    return tuple(
        slice(b - o.start, max(b, e) - o.start)
        for b, e, o in zip(begins, ends, origin, strict=True)
    )
