"""The noise of what a survey sees: drawn, the same on any number of ranks."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from scipy.special import ndtr
from scipy.stats import poisson

LEAST_DENSITY = 0.02
"""A density below about this [mean density] counts as this: rates of counts are positive."""


def positive_density(density: tf.Tensor) -> tf.Tensor:
    """Returns the density bent smoothly to stay above 0: softplus of scale `LEAST_DENSITY`."""
    return LEAST_DENSITY * tf.math.softplus(density / LEAST_DENSITY)


def noisy_density(
    density: np.ndarray, sigma: np.ndarray, mask: np.ndarray, normal: np.ndarray
) -> np.ndarray:
    """Returns a density with Gaussian noise, in the dtype of the density.

    Args:
        density: block [..., x, y, z].
        sigma: the standard deviation where all of a cell is observed, block [..., x, y, z].
        mask: the share of each cell that is observed, block [x, y, z]; the variance is divided by
            it.
        normal: unit normal noise, block [..., x, y, z].

    Returns:
        A block; 1 where nothing is observed.
    """
    seen = mask > 0
    spread = np.where(seen, sigma / np.sqrt(np.where(seen, mask, 1.0)), 0.0)
    return np.where(seen, density + spread * normal, 1.0).astype(density.dtype)


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
    drawn = poisson.ppf(ndtr(np.asarray(normal, np.float64)), np.where(rate > 0, rate, 1.0))
    return np.where(rate > 0, drawn, 0.0)
