"""Number, centre, velocity and shape of halos: sums over members, whose parts ranks add up."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np

from flowpm_dist.catalogues.friends import keepers
from flowpm_dist.grid.space import Space

PAIRS = ((0, 0), (1, 1), (2, 2), (0, 1), (0, 2), (1, 2))
"""Components of a symmetric matrix [3, 3] in the order in which they are kept."""


@dataclass(frozen=True)
class Moments:
    """Numbers, means and mean squares of the members of groups, or of parts of groups.

    Attributes:
        label: int64 [n].
        number: of members [n].
        place: mean place, in units of the sides [n, 3].
        velocity: mean velocity [n, 3].
        spread: mean of the products of distances from the mean place [n, 6] [(Mpc/h)^2], see
            `PAIRS`.
        dispersion: mean square of velocities about the mean, sum of three axes [n].
    """

    label: np.ndarray
    number: np.ndarray
    place: np.ndarray
    velocity: np.ndarray
    spread: np.ndarray
    dispersion: np.ndarray

    def joined_with(self, other: Moments) -> Moments:
        """Returns the moments of these and of other groups, in the order of their labels."""
        both = {
            f.name: np.concatenate([getattr(self, f.name), getattr(other, f.name)])
            for f in fields(Moments)
        }
        order = np.argsort(both["label"])
        return Moments(**{name: values[order] for name, values in both.items()})


def moments_of(
    space: Space,
    places: np.ndarray,
    velocities: np.ndarray,
    at: np.ndarray,
    labels: np.ndarray,
) -> Moments:
    """Returns the moments of groups. On all ranks together.

    Args:
        space: space and ranks.
        places: places of members on this rank, in its block [n, 3].
        velocities: their velocities [n, 3].
        at: the piece of a group to which each belongs [n].
        labels: labels of the groups of these pieces.

    Returns:
        The moments of some of the groups in the order of their labels; each is on one rank, its
        keeper.
    """
    size, number = np.array(space.size), np.bincount(at, minlength=len(labels))
    parts = _moments(labels, number, at, places, velocities, size)
    exchange = keepers(space, labels)
    brought = {f.name: exchange.send(getattr(parts, f.name)).numpy() for f in fields(Moments)}
    return _joined(space, Moments(**brought))


def _means(x: np.ndarray, at: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Returns the means [rows, ...] of values [n, ...] by the row to which each belongs."""
    flat = x.reshape(len(x), math.prod(x.shape[1:]))
    sums = [np.bincount(at, column, minlength=len(number)) for column in flat.T]
    return (np.stack(sums, axis=-1) / number[:, np.newaxis]).reshape(len(number), *x.shape[1:])


def _products(x: np.ndarray) -> np.ndarray:
    return np.stack([x[:, i] * x[:, j] for i, j in PAIRS], axis=-1)


def _moments(
    label: np.ndarray,
    number: np.ndarray,
    at: np.ndarray,
    places: np.ndarray,
    velocities: np.ndarray,
    size: np.ndarray,
) -> Moments:
    """Returns the moments of the pieces of which `at` names the one of each point."""
    first = np.zeros(len(number), np.int64)
    first[at[::-1]] = np.arange(len(at))[::-1]
    about = places[first]
    place = about + _means(places - about[at], at, number)
    velocity = _means(velocities.astype(np.float64), at, number)
    spread = _means(_products((places - place[at]) * size), at, number)
    squares = ((velocities - velocity[at]) ** 2).sum(axis=1)
    return Moments(label, number, place, velocity, spread, _means(squares, at, number))


def _joined(space: Space, parts: Moments) -> Moments:
    """Returns the moments of groups whose parts are rows of the same label."""
    label, first, at = np.unique(parts.label, return_index=True, return_inverse=True)
    weight = np.bincount(at, parts.number, minlength=len(label))

    def mean(x: np.ndarray) -> np.ndarray:
        return _means((x.T * parts.number).T, at, weight)

    about = parts.place[first]
    apart = parts.place - about[at]
    if space.periodic:  # from the nearest of all copies
        apart -= np.round(apart)
    offset = mean(apart)
    velocity = mean(parts.velocity)
    distance = (apart - offset[at]) * space.size
    spread = mean(parts.spread + _products(distance))
    other = ((parts.velocity - velocity[at]) ** 2).sum(axis=1)
    place = about + offset
    place -= np.floor(place) if space.periodic else 0
    number = weight.astype(np.int64)
    return Moments(label, number, place, velocity, spread, mean(parts.dispersion + other))


def axes_of(spread: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the axes of ellipsoids.

    Args:
        spread: [n, 6], see `Moments`.

    Returns:
        Root mean square distances along the axes, the longest first [n, 3], and unit vectors along
        them [n, 3, 3], of which the largest component is positive.
    """
    matrix = np.empty((len(spread), 3, 3))
    for n, (i, j) in enumerate(PAIRS):
        matrix[:, i, j] = matrix[:, j, i] = spread[:, n]
    squares, vectors = np.linalg.eigh(matrix)
    directions = np.swapaxes(vectors[..., ::-1], 1, 2)
    largest = np.take_along_axis(
        directions, np.abs(directions).argmax(axis=-1)[..., np.newaxis], axis=-1
    )
    return np.sqrt(np.maximum(squares[:, ::-1], 0)), directions * np.sign(largest)
