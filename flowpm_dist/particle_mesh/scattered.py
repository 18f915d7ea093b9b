"""Density of points that are anywhere in the box: particles of any code, halos, galaxies."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box
from flowpm_dist.grid.field import Field
from flowpm_dist.grid.options import SCHEMES, Scheme
from flowpm_dist.grid.space import Space
from flowpm_dist.options import in_unit
from flowpm_dist.particle_mesh.kernels import kernels

BEYOND = {2: (0, 1), 3: (1, 2), 4: (1, 2)}
"""Cells that a point of a block reaches below and above the block, by the order of the scheme."""
ROUND, LEAST = 2**19, 2**12
"""So many points of all ranks move at once, or so many of each."""
PIECE = 2**20
"""Points are added to the mesh when there are this many, or one for every `CELLS` cells."""
CELLS = 8


def paint(
    positions: np.ndarray,
    box: Box,
    weights: np.ndarray | None = None,
    *,
    scheme: Scheme = "cic",
    shift: float = 0.0,
) -> Field:
    """Returns the density of points, mean 1, without a gradient. On all ranks together.

    Each point goes to the rank in whose block it lies. The field knows its window, which spectra
    divide out.

    Args:
        positions: comoving, of this rank's points, anywhere in the periodic box [n, 3] [Mpc/h]. A
            point at 0 is at the centre of the first cell.
        box: the mesh and the ranks; a single box.
        weights: the weight of each point, such as its mass [n]; 1 if None.
        scheme: "cic", cloud in cell, "tsc", triangular-shaped cloud, or "pcs", piecewise cubic
            spline; they reach 2, 3 and 4 cells along each axis.
        shift: how far points are moved along each axis [cells]; 0.5 for the second density of an
            interlaced spectrum.

    Raises:
        ValueError: a batch of boxes, a position that is not finite, an unknown scheme, weights of
            another number, or weights whose sum is not above 0.
    """
    painting = Painting(box, in_unit("scheme", scheme), in_unit("shift", shift))
    painting.add(in_unit("positions", positions, "Mpc/h"), in_unit("weights", weights))
    return painting.density()


def paint_points(
    box: Box,
    positions: np.ndarray,
    weights: np.ndarray | None = None,
    *,
    scheme: Scheme = "cic",
    shift: float = 0.0,
) -> np.ndarray:
    """Returns the sums of the weights of points in this rank's cells [x, y, z], float64.

    On all ranks together; see `paint`.
    """
    painting = Painting(box, scheme, shift)
    painting.add(positions, weights)
    return painting.sums()


def _problem(positions: np.ndarray, weights: np.ndarray | None) -> str:
    """Returns what is wrong with points, or an empty text."""
    if positions.ndim != 2 or positions.shape[1] != 3:
        return f"positions of shape {list(positions.shape)}: must be [n, 3]"
    if not np.isfinite(np.sum(positions, dtype=np.float64)):
        row = int(np.flatnonzero(~np.isfinite(positions).all(axis=1))[0])
        return f"the position of point {row} is {positions[row]}: must be finite"
    if weights is None:
        return ""
    if np.shape(weights) != (len(positions),):
        shape = list(np.shape(weights))
        return f"weights of shape {shape} for {len(positions)} points: must be one for each"
    if not np.isfinite(weights).all():
        row = int(np.flatnonzero(~np.isfinite(weights))[0])
        return f"the weight of point {row} is {weights[row]}: must be finite"
    return ""


class Painting:
    """Sums of the weights of points on a mesh, to which points are added piece by piece.

    Args:
        box, scheme, shift: see `paint`.
    """

    def __init__(self, box: Box, scheme: Scheme = "cic", shift: float = 0.0) -> None:
        if box.batch is not None:
            raise ValueError("points of one universe are painted on a single box, not on a batch")
        if scheme not in SCHEMES:
            raise ValueError(f"scheme {scheme!r}: must be one of {', '.join(map(repr, SCHEMES))}")
        box.check_equal("paint", scheme=scheme, shift=shift)
        self._box, self._scheme, self._shift = box, scheme, shift
        self._space = Space(box.size, box.mesh)
        self._order = SCHEMES[scheme]
        self._beyond = BEYOND[self._order]
        parts = self._space.parts
        if any(n < self._beyond[1] for n, p in zip(box.block, parts, strict=True) if p > 1):
            shown = " x ".join(map(str, box.block))
            raise ValueError(
                f"blocks of {shown} cells are too thin for {scheme!r}: give a finer mesh, or fewer "
                "ranks"
            )
        self._sums = tf.zeros([n + sum(self._beyond) for n in box.block], tf.float64)
        self._waiting: list[tuple[np.ndarray, np.ndarray | None]] = []

    def add(self, positions: np.ndarray, weights: np.ndarray | None = None) -> None:
        """Adds points of this rank; see `paint`. On all ranks together, as often on each."""
        positions = np.asarray(positions)
        self._box.mesh.raise_together(_problem(positions, weights), ValueError)
        weighted, each = int(weights is not None), self._each
        here = tf.constant([-(-len(positions) // each), weighted, -weighted])
        rounds, some_have, all_have = self._box.mesh.world.allreduce(here, "max").numpy()
        if some_have != -all_have:
            raise ValueError("weights are given on some ranks alone: give them on all, or on none")
        for number in range(rounds):
            some = slice(number * each, (number + 1) * each)
            self._send(positions[some], None if weights is None else np.asarray(weights)[some])

    @property
    def _each(self) -> int:
        """The points that a rank sends in a round: all together are no more than one can take."""
        return max(LEAST, ROUND // self._box.mesh.size)

    def _send(self, positions: np.ndarray, weights: np.ndarray | None) -> None:
        """Brings some points to their ranks, and paints when there are enough of them."""
        if self._shift:
            positions = positions + self._shift * np.array(self._box.cell)
        places = self._space.places(positions)
        if weights is not None:
            weights = weights.astype(np.float64)
        if self._box.mesh.size > 1:
            owner = self._space.to_owners(places)
            places = owner.send(places).numpy()
            weights = None if weights is None else owner.send(weights).numpy()
        self._waiting.append((places, weights))
        enough = max(PIECE, self._sums.shape.num_elements() // CELLS)
        if sum(len(each) for each, _ in self._waiting) >= enough:
            self._paint()

    def _paint(self) -> None:
        """Adds the points that wait to the sums."""
        below, waiting = self._beyond[0], self._waiting
        self._waiting = []
        for weighted in (False, True):
            chosen = [(x, w) for x, w in waiting if (w is not None) == weighted and len(x)]
            if not chosen:
                continue
            at = np.concatenate([x for x, _ in chosen])
            at *= self._box.grid
            at -= self._box.offset
            np.clip(at, 0, np.nextafter(np.array(self._box.block, float), 0), out=at)
            at += below
            weights = np.concatenate([w for _, w in chosen]) if weighted else None
            self._sums = kernels().paint_points(
                self._sums, tf.constant(at), None if weights is None else tf.constant(weights),
                self._order,
            )  # fmt: skip

    def sums(self) -> np.ndarray:
        """Returns this rank's block of the sums [x, y, z], float64. On all ranks together."""
        self._paint()
        return self._folded(self._sums.numpy())

    def density(self) -> Field:
        """Returns the sums over their mean, with their window. On all ranks together.

        Raises:
            ValueError: the sum of all weights is not above 0.
        """
        box, sums = self._box, self.sums()
        total = float(box.mesh.world.allreduce(tf.constant(sums.sum())))
        if not total > 0:
            raise ValueError(f"the weights of all points sum to {total:g}: there is no density")
        return Field(tf.constant(sums * (box.cells / total), box.dtype), box, self._scheme)

    def _folded(self, padded: np.ndarray) -> np.ndarray:
        """Returns a block to which the planes beyond the ends of its neighbours are added."""
        mesh, (below, above) = self._box.mesh, self._beyond
        for axis, name in enumerate(("row", "col", None)):
            first, block, last = np.split(padded, [below, padded.shape[axis] - above], axis=axis)
            for planes, step in ((first, -1), (last, 1)):
                if name in mesh.names and planes.size:
                    planes = mesh.communicator(name).shift(tf.constant(planes), step).numpy()
                rows, added = np.moveaxis(block, axis, 0), np.moveaxis(planes, axis, 0)
                first_row = -len(added) if step < 0 else 0
                for number, plane in enumerate(added):
                    rows[(first_row + number) % len(rows)] += plane
            padded = block
        return padded
