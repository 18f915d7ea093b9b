"""How far a particle may be displaced to have a place on maps of the sky."""

from __future__ import annotations

from collections.abc import Sequence

BOXES = 10.0
"""The waves of a box displace by no more: the longest, with an overdensity d, by d / 2 pi of it."""


def farthest_move(lengths: Sequence[float]) -> float:
    """Returns the largest displacement along an axis with which a particle is seen [Mpc/h].

    One that is larger, or not finite, has no place: it makes the values of maps not finite.

    Args:
        lengths: of the box along its axes [Mpc/h].
    """
    return BOXES * max(lengths)
