"""Fields that live on a box: each rank holds its block."""

from __future__ import annotations

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

    def numpy(self) -> np.ndarray:
        """The whole array on every rank. Gathers: for grids that fit one rank's memory."""
        shape = self.box.vector_shape if self._trailing else self.box.shape
        return self.box.whole(self.block, shape)
