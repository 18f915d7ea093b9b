"""Friends of friends: groups of points that chains of short links join, on any number of ranks.

Davis, Efstathiou, Frenk and White 1985, ApJ 292, 371. Each rank finds the groups of the points in
its block and of those that its neighbours show it. The number of a group, the lowest of its points'
numbers, then goes from rank to rank until no rank has a lower one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.space import Margins, Space
from flowpm_dist.particle_mesh.kernels import kernels
from meshimpl.exchange import RowExchange

MOST_LINKS = 1e17
"""The kernel numbers cubes of a link, and eight cells in each, with 64 bits."""
NOTHING = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Groups:
    """The groups of this rank's points.

    Where other ranks' points, or a face of the box, connect points of this rank, the group has
    several pieces here.

    Attributes:
        piece: the piece of each point, int32 [n]: the number of a row of the others.
        label: the lowest number of a point of the group, of each piece, int64 [rows].
        count: the number of points of the group on all ranks, of each piece, int64 [rows].
    """

    piece: np.ndarray
    label: np.ndarray
    count: np.ndarray

    def within(self, minimum: float, below: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the members of groups of some sizes.

        Args:
            minimum, below: the smallest number of points, and one that is too large.

        Returns:
            The rows of the members [m]; for each the number of its piece among those that are kept;
            and the kept pieces, rows of `label`.
        """
        chosen = (self.count >= minimum) & (self.count < below)
        members = np.flatnonzero(chosen[self.piece])
        held = np.zeros(len(chosen), bool)
        held[self.piece[members]] = True
        pieces = np.flatnonzero(held)
        number = np.zeros(len(chosen), np.int64)
        number[pieces] = np.arange(len(pieces))
        return members, number[self.piece[members]], pieces


def friends_of_friends(
    space: Space, places: np.ndarray, numbers: np.ndarray, link: float
) -> Groups:
    """Returns the groups of points. On all ranks together.

    Two points are friends if they are at most a link apart. There is no gradient: membership
    changes in jumps.

    Args:
        space: space and ranks.
        places: places of the points in this rank's block [n, 3], see `Space.places`.
        numbers: numbers of these points, int64 [n]; no two points of any rank have the same.
        link: [Mpc/h].

    Raises:
        ValueError: a link spans a block.
    """
    space.check_reach(link, "a linking length")
    if math.prod(space.size) / link**3 > MOST_LINKS:
        raise ValueError(
            f"a linking length of {link:.3g} Mpc/h is too short for a box of {space.size} Mpc/h: "
            f"its volume may hold {MOST_LINKS:.0e} cubes of a link"
        )
    margins = space.margins(places, link, once=True)
    links = [side / link for side in space.size]
    with tf.device("CPU:0"):
        points = tf.constant(np.concatenate([places, margins.places]))
        piece = kernels().friends(points, links).numpy()
    mine, theirs = piece[: len(places)], piece[len(places) :]
    label = np.full(len(piece), NOTHING, np.int64)
    np.minimum.at(label, mine, numbers)
    _agree(space, label, mine, theirs, margins.exchange)
    return Groups(mine, label, _count(space, label, mine, theirs, margins))


def _agree(
    space: Space, label: np.ndarray, mine: np.ndarray, theirs: np.ndarray, shown: RowExchange
) -> None:
    """Lowers labels of pieces until those that share a point on two ranks have the same."""
    changed = True
    while changed:
        before = label[mine[shown.rows]], label[theirs]
        np.minimum.at(label, theirs, shown.send(label[mine]).numpy())
        np.minimum.at(label, mine[shown.rows], shown.returned(label[theirs]).numpy())
        after = label[mine[shown.rows]], label[theirs]
        here = any((a != b).any() for a, b in zip(before, after, strict=True))
        changed = bool(space.mesh.world.allreduce(tf.constant(here)))


def _count(
    space: Space, label: np.ndarray, mine: np.ndarray, theirs: np.ndarray, margins: Margins
) -> np.ndarray:
    """Returns the number of points on all ranks of the group of each piece."""
    count = np.bincount(mine, minlength=len(label)).astype(np.int64)
    shared = np.zeros(len(label), bool)
    shared[theirs] = shared[mine[margins.exchange.rows]] = True
    pieces = np.flatnonzero(shared)
    count[pieces] = sums_by_label(space, label[pieces], count[pieces])
    return count


def sums_by_label(space: Space, labels: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Returns the sum over all ranks of the values with the same label, at each of them.

    On all ranks together.

    Args:
        space: the ranks.
        labels: int64 [n].
        values: [n].
    """
    to_keepers = keepers(space, labels)
    keys, values = to_keepers.send(labels).numpy(), to_keepers.send(values).numpy()
    distinct, at = np.unique(keys, return_inverse=True)
    sums = np.zeros(len(distinct), values.dtype)
    np.add.at(sums, at, values)
    result = np.empty_like(values, shape=len(labels))
    result[to_keepers.rows] = to_keepers.returned(sums[at]).numpy()
    return result


def keepers(space: Space, labels: np.ndarray) -> RowExchange:
    """Returns the exchange that brings rows of the same label together on one rank."""
    return RowExchange(space.mesh.world, (labels % space.mesh.size).astype(np.int32))
