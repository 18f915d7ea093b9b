"""Sums of B-splines around the cells of a coarse mesh, on a finer one, and their adjoint."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.decomposition import ORDER, Pyramid

Block = Callable[[tf.Tensor], tf.Tensor]
"""A linear function of blocks [batch, x, y, z]."""


@dataclass(frozen=True)
class Spread:
    """The sum of B-splines around coarse cells along one axis of blocks [batch, x, y, z].

    Attributes:
        cells: coarse cells of a block along the axis, without a halo.
        halos: planes of halo of the coarse and of the fine block, beyond which there is nothing;
            None where the axis is whole and periodic.
        axis: the axis.
        pyramid: the coarse mesh.
    """

    cells: int
    halos: tuple[int, int] | None
    axis: int
    pyramid: Pyramid

    @property
    def _near(self) -> range:
        """The u for which the coarse cells i + u reach a fine cell factor * i + phase."""
        factor, stencil = self.pyramid.factor, self.pyramid.stencil
        return range(-(stencil // factor), (factor - 1 + stencil) // factor + 1)

    @property
    def _length(self) -> int:
        """The number of coarse cells from which fine cells are interpolated."""
        return self.cells + 2 * self._beyond

    @property
    def _beyond(self) -> int:
        return -(-(self.halos or (0, 0))[1] // self.pyramid.factor)

    @property
    def _start(self) -> int:
        return (self.halos or (0, 0))[0] - self._beyond + self._near[0]

    def _weights(self, u: int, dtype: tf.DType) -> tf.Tensor:
        """Returns the B-spline of a coarse cell i + u at each phase, [phase] before later axes."""
        factor = self.pyramid.factor
        spline = functools.reduce(np.convolve, [np.ones(factor)] * ORDER) / factor ** (ORDER - 1)
        at = np.arange(factor) - factor * u + self.pyramid.stencil
        weights = np.where(
            (at >= 0) & (at < len(spline)), spline[np.clip(at, 0, len(spline) - 1)], 0
        )
        return tf.constant(weights.reshape([factor] + [1] * (3 - self.axis)), dtype)

    def forward(self, block: tf.Tensor) -> tf.Tensor:
        """Returns the fine block of a coarse one."""
        axis, factor, length, near = self.axis, self.pyramid.factor, self._length, self._near
        needed = length + len(near) - 1
        block = _range(block, axis, self._start, self._start + needed, periodic=self.halos is None)
        phases = sum(
            tf.expand_dims(_range(block, axis, n, n + length), axis + 1)
            * self._weights(u, block.dtype)
            for n, u in enumerate(near)
        )
        shape = [-1, *block.shape[1:]]
        shape[axis] = factor * length
        fine = (self.halos or (0, 0))[1]
        start = factor * self._beyond - fine
        return _range(tf.reshape(phases, shape), axis, start, factor * length - start)

    def backward(self, block: tf.Tensor) -> tf.Tensor:
        """Returns the coarse block of a fine one, by the adjoint."""
        axis, factor, length, near = self.axis, self.pyramid.factor, self._length, self._near
        coarse, fine = self.halos or (0, 0)
        needed, start = length + len(near) - 1, factor * self._beyond - fine
        block = _range(block, axis, -start, factor * length - start)
        shape = [-1, *block.shape[1:]]
        shape[axis : axis + 1] = length, factor
        phases = tf.reshape(block, shape)
        sums = [tf.reduce_sum(phases * self._weights(u, block.dtype), axis + 1) for u in near]
        total = sum(_range(x, axis, -n, needed - n) for n, x in enumerate(sums))
        size, begin = self.cells + 2 * coarse, -self._start
        images = (0,) if self.halos else (-size, 0, size)
        return sum(_range(total, axis, begin + x, begin + size + x) for x in images)


@functools.lru_cache(64)
def spread_function(spread: Spread, *, adjoint: bool = False) -> Block:
    """Returns the function of a spread or its adjoint, compiled; the same for an equal spread."""
    function = spread.backward if adjoint else spread.forward
    return tf.function(function, jit_compile=True, autograph=False)


def _range(x: tf.Tensor, axis: int, begin: int, end: int, *, periodic: bool = False) -> tf.Tensor:
    """Returns planes [begin, end) along an axis; beyond the block its periodic images, or zeros."""
    size = x.shape[axis]
    if periodic:
        parts = [(size + begin, size), (0, size), (0, end - size)]
        return tf.concat([_range(x, axis, *part) for part in parts], axis)
    first, last = min(max(begin, 0), size), max(min(end, size), 0)
    start = [0] * x.shape.rank
    shape = [-1 if i == 0 else n for i, n in enumerate(x.shape)]
    start[axis], shape[axis] = first, max(last - first, 0)
    inside = tf.slice(x, start, shape)
    missing = [[0, 0] for _ in x.shape]
    missing[axis] = [first - begin, end - max(last, first)]
    return tf.pad(inside, missing) if any(missing[axis]) else inside
