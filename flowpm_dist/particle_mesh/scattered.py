"""Cloud-in-cell density of points that are anywhere in the box: halos, galaxies, particles."""

from __future__ import annotations

import itertools

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box
from flowpm_dist.grid.space import Space


def paint_points(
    box: Box, positions: np.ndarray, weights: np.ndarray | None = None, *, shift: float = 0.0
) -> np.ndarray:
    """Returns the cloud-in-cell sum of the weights of points, without a gradient.

    On all ranks together. Each point goes to the rank in whose block its lowest cell lies; what its
    cloud puts beyond the block, the next rank adds to its own.

    Args:
        box: the mesh and the ranks; a single box.
        positions: comoving, of this rank's points, anywhere [n, 3] [Mpc/h].
        weights: of the points [n]; 1 if None.
        shift: how far points are moved along each axis [cells], see `State.density`.

    Returns:
        This rank's block [x, y, z], float64.

    Raises:
        ValueError: a batch of boxes, or a position that is not finite.
    """
    if box.batch is not None:
        raise ValueError("points of one universe are painted on a single box, not on a batch")
    space = Space(box.size, box.mesh)
    places = space.places(positions + shift * np.array(box.cell))
    weights = np.ones(len(places)) if weights is None else np.asarray(weights, np.float64)
    owner = space.to_owners(places)
    places, weights = owner.send(places).numpy(), owner.send(weights).numpy()
    at = places * box.grid - box.offset
    low = np.clip(np.floor(at).astype(np.int64), 0, np.array(box.block) - 1)
    beyond = at - low
    padded = [n + 1 for n in box.block]
    sums = np.zeros(np.prod(padded))
    for corner in itertools.product((0, 1), repeat=3):
        shares = np.prod(np.where(corner, beyond, 1 - beyond), axis=1) * weights
        cells = np.ravel_multi_index((low + corner).T, padded)
        sums += np.bincount(cells, shares, minlength=len(sums))
    return _folded(box, sums.reshape(padded))


def _folded(box: Box, padded: np.ndarray) -> np.ndarray:
    """Returns a block to which the planes beyond the ends of its neighbours are added."""
    names = [name if name in box.mesh.names else None for name in ("row", "col", None)]
    for axis, name in enumerate(names):
        block, beyond = np.split(padded, [padded.shape[axis] - 1], axis=axis)
        if name is not None:
            beyond = box.mesh.communicator(name).shift(tf.constant(beyond), 1).numpy()
        first = [slice(None)] * 3
        first[axis] = slice(0, 1)
        block[tuple(first)] += beyond
        padded = block
    return padded
