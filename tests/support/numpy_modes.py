"""Fields of given cells, what numpy finds of their modes, and slopes of statistics."""

import numpy as np
import pytest
import tensorflow as tf
from ranks import SHAPES
from ranks import SIZE as RANKS

from flowpm_dist.grid.box import Box
from flowpm_dist.grid.field import Field

GRID, SIZE = (8, 12, 16), (40.0, 50.0, 64.0)
MESHES = SHAPES[RANKS]
BATCH_MESHES = {
    1: ["replica:1,row:1,col:1"],
    2: ["replica:2,row:1,col:1", "replica:1,row:2,col:1"],
    4: ["replica:2,row:2,col:1", "replica:1,row:2,col:2"],
}[RANKS]


def box_on(mesh, batch=None, grid=GRID, size=SIZE, dtype=tf.float64):
    return Box(grid, size, mesh, dtype, batch)


def field_on(box, whole):
    begin = (box.batch_offset, *box.offset) if box.batch else box.offset
    shape = box.local_batch + box.block
    part = whole[tuple(slice(b, b + n) for b, n in zip(begin, shape, strict=True))]
    return Field(tf.constant(part, box.dtype), box)


def random(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape or GRID)


def replicas(box):
    """Number of ranks that share a universe, and so hold each differentiable result."""
    return box.mesh.size // box.mesh.axis_size("replica")


def painted(positions, cells):
    """Cloud-in-cell density, of mean 1, of particles [cells] on a cube."""
    density = np.zeros((cells, cells, cells))
    lower = np.floor(positions).astype(int)
    for corner in np.ndindex(2, 2, 2):
        weight = np.prod(1 - np.abs(positions - lower - corner), axis=1)
        np.add.at(density, tuple(((lower + corner) % cells).T), weight)
    return density * cells**3 / len(positions)


class Modes:
    """numpy's half spectrum of a grid: k, mu, bins, and how often each mode counts."""

    def __init__(self, grid=GRID, size=SIZE):
        self.grid, self.size = grid, size
        x, y, z = grid
        n = np.meshgrid(
            np.fft.fftfreq(x, 1 / x), np.fft.fftfreq(y, 1 / y), np.arange(z // 2 + 1), indexing="ij"
        )
        self.phase = np.exp(1j * np.pi * sum(m / cells for m, cells in zip(n, grid, strict=True)))
        self.window = np.prod([np.sinc(m / c) ** 2 for m, c in zip(n, grid, strict=True)], axis=0)
        fundamental = 2 * np.pi / max(size)
        along = [m * max(size) / length for m, length in zip(n, size, strict=True)]
        relative = np.sqrt(sum(m**2 for m in along))
        self.k = fundamental * relative
        self.mu = [np.divide(m, relative, out=0 * m, where=relative > 0) for m in along]
        self.bin = np.floor(relative + 0.5)
        self.weight = np.where((n[2] == 0) | (2 * n[2] == z), 1.0, 2.0)
        cell = max(length / c for length, c in zip(size, grid, strict=True))
        self.bins = int(max(size) / (2 * cell))

    def spectrum(self, field, shifted=None, window=None):
        modes = np.fft.rfftn(field)
        if shifted is not None:
            modes = (modes + self.phase * np.fft.rfftn(shifted)) / 2
        # The window of cloud-in-cell is sinc^2.
        powers = {"cic": 1, "tsc": 1.5, "pcs": 2}
        return modes / np.abs(self.window) ** powers[window] if window else modes

    def means(self, values):
        """Mean over each bin; not a number where it has no modes."""
        inside = [self.bin == i for i in range(1, self.bins + 1)]
        means = (
            np.average(values[i], weights=self.weight[i]) if i.any() else np.nan for i in inside
        )
        return np.array(list(means))

    def power(self, a, b=None, order=0, axis=2):
        b = a if b is None else b
        scale = np.prod(self.size) / np.prod(self.grid) ** 2
        legendre = np.polynomial.legendre.Legendre.basis(order)(self.mu[axis])
        return scale * self.means((a * b.conj()).real * (2 * order + 1) * legendre)


def check_slope(loss, blocks, directions, box, step, rtol=1e-7):
    """The gradient along a direction, over all ranks, against a central difference."""
    blocks = [tf.constant(b) for b in blocks]
    with tf.GradientTape() as tape:
        tape.watch(blocks)
        value = loss(*blocks)
    gradients = tape.gradient(value, blocks)
    assert all(np.isfinite(g).all() for g in gradients)

    def total(x):
        return float(box.mesh.world.allreduce(x))

    slope = total(sum(tf.reduce_sum(g * d) for g, d in zip(gradients, directions, strict=True)))
    up, down = (
        total(loss(*[b + s * d for b, d in zip(blocks, directions, strict=True)]))
        for s in (step, -step)
    )
    assert slope == pytest.approx((up - down) / (2 * step), rel=rtol)


def blocks_on(box, *seeds):
    batch = () if box.batch is None else (box.batch,)
    return [field_on(box, random(seed, *batch, *GRID)).block for seed in seeds]


def weighted(values, box, seed=9):
    """A number made of all of a result, divided by how many ranks hold it."""
    weights = 1 + np.random.default_rng(seed).uniform(size=values.shape[len(box.local_batch) :])
    return tf.reduce_sum(values * weights) / replicas(box)
