"""The distance of a light cone in segments, in which what depends on time is a polynomial."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.distances import Distances
from flowpm_dist.cosmology.growth import Growth
from flowpm_dist.evolution.integrators import Integrator
from flowpm_dist.observables.light_cone.geometry import reaching
from flowpm_dist.particle_mesh.kernels.base import DEGREE
from meshimpl.graph_guards import not_recorded

WIDEST = 32.0
"""Width of a segment in which factors are one polynomial [Mpc/h]."""
SAME_EDGE = 1e-6
"""Distance within which two edges are one [Mpc/h]."""

_POINTS = np.cos(np.pi * (np.arange(DEGREE + 1) + 0.5) / (DEGREE + 1))  # of Chebyshev
_PARTS = np.arange(64) / 64
_TO_COEFFICIENTS = np.linalg.inv(np.vander(_POINTS, increasing=True))

OfTimes = Callable[[tf.Tensor], tuple[np.ndarray, tf.Tensor]]
"""From scale factors [n] to numbers [n] that grow with them, and values [n, functions]."""


def place_segments(
    integrator: Integrator,
    growth: Growth,
    steps: Sequence[float],
    shells: np.ndarray,
    earliest: float,
) -> tuple[np.ndarray, np.ndarray, tf.Tensor]:
    """Returns the distance in segments, in each of which light leaves after one kick.

    Args:
        integrator: the run's integrator.
        growth: growth of its cosmology.
        steps: scale factors at which its steps begin and end.
        shells: edges of shells, which are edges of segments, too [Mpc/h].
        earliest: scale factor before which nothing is seen.

    Returns:
        Edges of the segments, float64 [segments + 1] [Mpc/h]; the number of the kick before, of
        each segment; and polynomials of the places' factors, see `Kernels.paint_ball`, of
        displacement, velocity and LPT fields, float64 [segments, 4, 4].

    Raises:
        ValueError: light leaves before the first kick, or the integrator has no places then.
    """

    def since_kick(a: tf.Tensor) -> tuple[np.ndarray, tf.Tensor]:
        with reaching(tf.reduce_min(a)):
            kicks, factors = integrator.since_kick(growth, steps, a)
        return np.array(kicks), factors

    distances = Distances(growth.background.cosmology)
    edges, kicks, found = polynomials(since_kick, distances, shells, earliest)
    own = tf.constant(np.eye(1, DEGREE + 1)[np.newaxis].repeat(len(kicks), 0))
    return edges, kicks, tf.concat([own, found[:, 1:]], 1)


def polynomials(
    of_times: OfTimes, distances: Distances, shells: np.ndarray, earliest: float
) -> tuple[np.ndarray, np.ndarray, tf.Tensor]:
    """Returns functions of the time at which light leaves as polynomials in the distance.

    Args:
        of_times: the functions, which are smooth where their number is the same.
        distances: distances of the cosmology.
        shells: edges of shells [Mpc/h].
        earliest: scale factor before which nothing is seen.

    Returns:
        Edges of segments [segments + 1], which include the shells'; the number in each
        [segments]; and coefficients [segments, functions, 4] of u^0 to u^3, with u from -1 to 1 in
        each.
    """

    def times(chi: np.ndarray) -> tf.Tensor:
        return tf.maximum(distances.scale_factor(chi), earliest)

    with not_recorded():
        late, early = times(shells[[0, -1]]).numpy()
        borders = _borders(lambda a: of_times(tf.constant(a))[0], early, late)
        borders = distances.comoving(borders).numpy()
    edges = _refined(np.concatenate([shells, borders]), shells)
    middle, half = 0.5 * (edges[1:] + edges[:-1]), 0.5 * np.diff(edges)
    points = middle[:, np.newaxis] + half[:, np.newaxis] * _POINTS
    numbers, found = of_times(times(points.ravel()))
    values = tf.reshape(found, [len(middle), DEGREE + 1, -1])
    coefficients = tf.einsum("pq,nqf->nfp", _TO_COEFFICIENTS, values)
    return edges, numbers.reshape(len(middle), -1)[:, 0], coefficients


def _borders(kicks_of: Callable[[np.ndarray], np.ndarray], early: float, late: float) -> np.ndarray:
    """Returns the scale factors from which on light leaves after another kick, by bisection.

    Args:
        kicks_of: from scale factors to the numbers of the last kicks before.
        early, late: the first and the last scale factor.
    """
    first, last = kicks_of(np.array([early, late]))
    numbers = np.arange(first + 1, last + 1)[:, np.newaxis]
    lower, upper = np.full(numbers.shape, early), np.full(numbers.shape, late)
    row = np.arange(len(numbers))[:, np.newaxis]
    while len(numbers) and (upper - lower).max() > 1e-13:
        grid = np.concatenate([lower + (upper - lower) * _PARTS, upper], axis=1)
        made = kicks_of(grid.ravel()).reshape(grid.shape) >= numbers
        at = np.argmax(made, axis=1)[:, np.newaxis]
        lower, upper = grid[row, np.maximum(at - 1, 0)], grid[row, at]
    return upper[:, 0]


def _refined(edges: np.ndarray, shells: np.ndarray) -> np.ndarray:
    """Returns edges of segments that are not too wide; they include all edges of shells."""
    kept = list(np.sort(shells))
    for edge in edges:
        if np.abs(np.array(kept) - edge).min() > SAME_EDGE:
            kept.append(edge)
    kept.sort()
    parts = [
        np.linspace(low, high, max(1, int(np.ceil((high - low) / WIDEST))), endpoint=False)
        for low, high in itertools.pairwise(kept)
    ]
    return np.concatenate([*parts, kept[-1:]])
