"""A box of space, cut into blocks of ranks, and points that move to the rank of their place."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.decomposition import reach_problem
from meshimpl.exchange import RowExchange
from meshimpl.process_mesh import ProcessMesh

MARGIN = 1 + 1e-6
"""A margin is wider than a length by this factor, so that rounding loses no point."""


@dataclass(frozen=True)
class Space:
    """A box of space: `row` cuts x and `col` cuts y into blocks of equal width.

    Places are in units of its sides, from its origin: float64 multiples of 2^-52, 0 <= u < 1. Sums
    of these and whole numbers are exact, so distances are the same on any mesh.

    Attributes:
        size: its sides [Mpc/h].
        mesh: the ranks; axes other than row and col have size 1.
        periodic: whether its opposite faces are the same.
        origin: its lowest corner [Mpc/h].
    """

    size: tuple[float, float, float]
    mesh: ProcessMesh
    periodic: bool = True
    origin: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def places(self, positions: np.ndarray) -> np.ndarray:
        """Returns the places of points, float64 [n, 3].

        Args:
            positions: [n, 3] [Mpc/h]; in a periodic space anywhere, otherwise within it.

        Raises:
            ValueError: a position is not finite.
        """
        places = np.asarray(positions, np.float64) - np.array(self.origin)
        places /= self.size
        if not np.isfinite(places.sum()):
            row = int(np.flatnonzero(~np.isfinite(places).all(axis=1))[0])
            raise ValueError(f"the position of point {row} is {positions[row]}: must be finite")
        if self.periodic:
            places -= np.floor(places)
        places += 1
        places -= 1
        if self.periodic:
            places[places == 1] = 0
        return np.minimum(places, 1 - 2.0**-52, out=places)

    def positions(self, places: np.ndarray) -> np.ndarray:
        """Returns the positions of places, within the space [Mpc/h]."""
        positions = places * self.size
        # Rounded up to the side, from just below it.
        inside = np.where(positions < self.size, positions, np.nextafter(self.size, 0))
        return inside + np.array(self.origin)

    @property
    def parts(self) -> tuple[int, int, int]:
        """The number of blocks along each axis."""
        return self.mesh.axis_size("row"), self.mesh.axis_size("col"), 1

    @property
    def block(self) -> tuple[int, int, int]:
        """This rank's place along each axis."""
        return self.mesh.coordinate("row"), self.mesh.coordinate("col"), 0

    @property
    def reach(self) -> float:
        """The longest length that spans no block [Mpc/h]; see `check_reach`."""
        widths = [side / parts for side, parts in zip(self.size, self.parts, strict=True)]
        return min(widths) / MARGIN**2

    def check_reach(self, length: float, what: str) -> None:
        """Checks that a length spans no block, so that only neighbours share what lies within it.

        Raises:
            ValueError: it does.
        """
        if problem := reach_problem(self.size, self.parts, length * MARGIN):
            raise ValueError(f"{what} of {problem}")

    def _rank_of(self, blocks: Sequence[np.ndarray | int]) -> np.ndarray | int:
        """Returns the ranks of blocks, given by their places along x and y."""
        along = {"row": blocks[0], "col": blocks[1]}
        rank: np.ndarray | int = 0
        for name, size in self.mesh.axes:
            rank = rank * size + along.get(name, 0)
        return rank

    def to_owners(self, places: np.ndarray) -> RowExchange:
        """Returns the exchange that brings points to the ranks whose blocks hold their places.

        On all ranks together.

        Args:
            places: places of this rank's points [n, 3].
        """
        return RowExchange(self.mesh.world, self.owners(places))

    def owners(self, places: np.ndarray) -> np.ndarray:
        """Returns the ranks in whose blocks places lie, int32 [n]."""
        if self.mesh.size == 1:
            return np.zeros(len(places), np.int32)
        blocks = [
            np.minimum((places[:, axis] * parts).astype(np.int32), parts - 1)
            for axis, parts in enumerate(self.parts[:2])
        ]
        return self._rank_of(blocks) + np.zeros(len(places), np.int32)

    def margins(self, places: np.ndarray, length: float, *, once: bool = False) -> Margins:
        """Returns the exchange that shows each rank the points about its block.

        On all ranks together.

        Args:
            places: places of the points in this rank's block [n, 3].
            length: how far from a block points are seen [Mpc/h]; see `check_reach`.
            once: only one of two neighbours sees the points of the other.
        """
        rows, ranks, shifts = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros((0, 3))]
        near = self._near_faces(places, length * MARGIN)
        for step in itertools.product((-1, 0, 1), repeat=3):
            if not any(step) or (once and step > (0, 0, 0)):
                continue
            if (target := self._neighbour(step)) is None:
                continue
            rank, shift = target
            chosen = self._in_all([near[axis][way] for axis, way in enumerate(step) if way])
            rows.append(chosen)
            ranks.append(np.full(len(chosen), rank))
            shifts.append(np.broadcast_to(shift, (len(chosen), 3)))
        exchange = RowExchange(
            self.mesh.world, np.concatenate(ranks), np.concatenate(rows), len(places)
        )
        order = np.argsort(np.concatenate(ranks), kind="stable")
        seen_at = places[exchange.rows] + np.concatenate(shifts)[order]
        return Margins(exchange, exchange.copies(tf.constant(seen_at)).numpy())

    def _near_faces(self, places: np.ndarray, length: float) -> list[dict[int, np.ndarray]]:
        """Returns the points near the lower and the upper face of the block, for each axis."""
        near = []
        for axis, (here, parts) in enumerate(zip(self.block, self.parts, strict=True)):
            x, width = places[:, axis], length / self.size[axis]
            low, high = here / parts + width, (here + 1) / parts - width
            near.append({-1: np.flatnonzero(x <= low), 1: np.flatnonzero(x >= high)})
        return near

    @staticmethod
    def _in_all(chosen: list[np.ndarray]) -> np.ndarray:
        """Returns the numbers that are in all arrays, each sorted."""
        common = chosen[0]
        for other in chosen[1:]:
            common = np.intersect1d(common, other, assume_unique=True)
        return common

    def _neighbour(self, step: Sequence[int]) -> tuple[int, np.ndarray] | None:
        """Returns the rank some blocks away, and by how much places shift; None beyond an edge."""
        blocks, shift = [], np.zeros(3)
        for axis, (here, way, parts) in enumerate(zip(self.block, step, self.parts, strict=True)):
            crossed, block = divmod(here + way, parts)
            if crossed and not self.periodic:
                return None
            blocks.append(block)
            shift[axis] = -crossed
        return int(self._rank_of(blocks)), shift


@dataclass(frozen=True)
class Margins:
    """The points that ranks show to their neighbours.

    Attributes:
        exchange: moves what belongs to the points; `exchange.rows` are the rows of this rank's
            points that it shows.
        places: places of the points seen here, next to this rank's block [m, 3].
    """

    exchange: RowExchange
    places: np.ndarray
