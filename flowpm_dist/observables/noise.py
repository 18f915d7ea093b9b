"""The noise of observations, drawn the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from scipy.special import ndtr
from scipy.stats import poisson

from flowpm_dist.grid.box import Box
from flowpm_dist.initial.conditions import noise_function
from flowpm_dist.observables.observations import Observations, ObservedBlock, spread_of
from flowpm_dist.observables.options import ObservationOptions

LEAST_DENSITY = 0.02
"""A density below about this [mean density] counts as this: rates of counts are positive."""

FEW, MOST = 50.0, 200
"""Rates up to FEW are inverted by summation; no count reaches MOST (probability 1e-50)."""


def positive_density(density: tf.Tensor) -> tf.Tensor:
    """Returns the density bent smoothly to stay above 0: softplus of scale `LEAST_DENSITY`."""
    return LEAST_DENSITY * tf.math.softplus(density / LEAST_DENSITY)


def counts_of(
    density: tf.Tensor, mean_count: float, mask: np.ndarray, normal: np.ndarray
) -> np.ndarray:
    """Returns Poisson counts of mean mean_count x mask x density, by their inverse distribution.

    They are the same on any number of ranks, up to the rounding of the density.

    Args:
        density: block [..., x, y, z], see `positive_density`.
        mean_count: the mean count of a cell of mean density.
        mask: the share of each cell that is observed, block [x, y, z].
        normal: unit normal noise, block [..., x, y, z].

    Returns:
        A block of whole numbers, float64.
    """
    rate = mean_count * mask * np.asarray(positive_density(density), np.float64)
    share = ndtr(np.asarray(normal, np.float64))
    few = rate <= FEW
    drawn = np.zeros(rate.shape)
    drawn[few] = _few_counts(share[few], rate[few])
    drawn[~few] = poisson.ppf(share[~few], rate[~few])
    return drawn


def _few_counts(share: np.ndarray, rate: np.ndarray) -> np.ndarray:
    """Returns the least counts whose distribution functions reach the shares, one after another.

    So the counts of 64^3 cells of mean count 3 take 0.1 s, not the 0.5 s of scipy's inverse.

    Args:
        share: from 0 to 1, [n].
        rate: from 0 on, [n].
    """
    counts, left = np.zeros(rate.shape), np.arange(rate.size)
    each = np.exp(-rate)
    reached = each.copy()
    for count in range(1, MOST):
        below = reached < share
        left, share, rate, each, reached = (x[below] for x in (left, share, rate, each, reached))
        if not left.size:
            break
        each = each * rate / count
        reached = reached + each
        counts[left] = count
    return counts


def with_noise(
    density: tf.Tensor,
    block: ObservedBlock,
    normal: np.ndarray,
    amplitude: np.ndarray | float = 1.0,
) -> np.ndarray:
    """Returns observations of densities with noise, the same on any number of ranks.

    Args:
        density: block [..., x, y, z].
        block: the mask and the noise of this rank's cells.
        normal: unit normal noise, block [..., x, y, z].
        amplitude: multiplies the standard deviation of the noise of a density.

    Returns:
        float64 block [..., x, y, z]; where nothing is observed, 1 of a density and 0 of counts.
    """
    if block.mean_count is not None:
        return counts_of(density, block.mean_count, block.mask, normal)
    observed = np.asarray(density, np.float64)
    if block.sigma is not None:
        observed = observed + spread_of(block.sigma * amplitude, block.mask) * normal
    return np.where(block.mask > 0, observed, 1.0)


class SurveyNoise:
    """The noise and the mask of an observation, on this rank's block of a box.

    Args:
        options: what is observed; its files are read here.
        box: the box of the densities.

    Raises:
        VolumeError: a file cannot be read.
    """

    def __init__(self, options: ObservationOptions, box: Box) -> None:
        self._block = Observations(options, box.grid).block(box.offset, box.block)
        self._is_noisy = options.is_noisy

    def observe(
        self, density: tf.Tensor, box: Box, seeds: Sequence[int], amplitude: np.ndarray | None
    ) -> np.ndarray:
        """Returns the observations of a batch of densities. On all ranks of the box together.

        Args:
            density: block [batch, x, y, z].
            box: the box of the batch.
            seeds: the seed of the noise of each universe, [batch].
            amplitude: multiplies sigma in each universe, [batch]; None for 1.

        Returns:
            A block in the density's dtype; see `with_noise`.
        """
        normal = np.zeros(())
        if self._is_noisy:
            normal = noise_function(box)(np.asarray(seeds, np.int64)).numpy()
        louder = 1.0 if amplitude is None else amplitude[:, np.newaxis, np.newaxis, np.newaxis]
        observed = with_noise(density, self._block, normal, louder)
        return observed.astype(density.dtype.as_numpy_dtype)
