"""Whether data resemble the training set, judged by the density of their features."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from flowpm_dist.io.files import read_arrays, save_arrays
from flowpm_dist.options import in_unit

MOST_COMPONENTS = 32
SHARE = 0.1
"""Largest number of components, divided by the number of samples."""
KEPT = 0.99
"""Share of the variance that the components hold, unless more would be needed than are allowed."""
UNUSUAL = 0.99
"""Quantile of the held-out samples beyond which data are called unusual."""


def shift_and_scale(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns means and standard deviations [features]; 1 in place of a deviation of about 0.

    Args:
        features: [n, features].
    """
    shift, spread = features.mean(axis=0), features.std(axis=0)
    return shift, np.where(spread > 1e-9 * np.abs(shift), spread, 1.0)


@dataclass(frozen=True)
class FeatureDensity:
    """A Gaussian of features along their principal components, and their scatter off these.

    Data are judged by two distances: the Mahalanobis distance along the components (Hotelling's
    T^2), and the squared distance from their plane (Q; Jackson and Mudholkar 1979).

    Attributes:
        shift, scale: means and standard deviations of the features, [features].
        axes: components of the scaled features, divided by the standard deviation along each,
            [component, features].
        plane: the same components with length 1.
        known: both distances of samples that neither the components nor the network were fitted
            to, [n, 2].
    """

    shift: np.ndarray
    scale: np.ndarray
    axes: np.ndarray
    plane: np.ndarray
    known: np.ndarray

    @classmethod
    def of(cls, train: np.ndarray, held_out: np.ndarray) -> FeatureDensity:
        """Returns the density of the features of a training set.

        Args:
            train: [n, features].
            held_out: features of the samples that new data are compared with, [n, features]. The
                training set's own distances are too small, because network and components were
                fitted to it.
        """
        train = np.asarray(in_unit("train", train), np.float64)
        held_out = in_unit("held_out", held_out)
        shift, scale = shift_and_scale(train)
        _, singular, rows = np.linalg.svd((train - shift) / scale, full_matrices=False)
        variance = singular**2 / len(train)
        share = np.cumsum(variance) / max(variance.sum(), np.finfo(float).tiny)
        most = max(1, min(MOST_COMPONENTS, int(SHARE * len(train))))
        count = min(most, int(np.searchsorted(share, KEPT)) + 1)
        plane, along = rows[:count], np.sqrt(np.maximum(variance[:count], 1e-12))
        density = cls(shift, scale, plane / along[:, np.newaxis], plane, np.empty((0, 2)))
        return replace(density, known=density.distances(held_out))

    def save(self, path: Path) -> None:
        """Writes the density to a .npz file. Raises WriteError."""
        save_arrays(path, {one.name: getattr(self, one.name) for one in fields(self)})

    @classmethod
    def load(cls, path: Path) -> FeatureDensity:
        """Reads what `save` wrote. Raises KeyError or UnreadableError for any other file."""
        held = read_arrays(path)
        return cls(**{one.name: held[one.name] for one in fields(cls)})

    @property
    def whole(self) -> bool:
        """Whether there are as many components as features, hence none off their plane."""
        return len(self.plane) == len(self.shift)

    def distances(self, features: np.ndarray) -> np.ndarray:
        """Returns both squared distances of features [n, features], float64 [n, 2].

        The second is 0 where there are as many components as features.
        """
        values = np.asarray(in_unit("features", features), np.float64)
        offset = (values - self.shift) / self.scale
        along = offset @ self.plane.T
        within = np.sum((offset @ self.axes.T) ** 2, axis=1)
        beyond = np.sum((offset - along @ self.plane) ** 2, axis=1)
        beyond = np.zeros_like(beyond) if self.whole else beyond
        return np.stack([within, beyond], axis=1)

    def quantiles(self, features: np.ndarray) -> np.ndarray:
        """Returns the share of the held-out samples that lie nearer, [n, 2], for both distances."""
        distances = self.distances(features)
        return np.mean(self.known[np.newaxis] < distances[:, np.newaxis], axis=1)

    def warning(self, features: np.ndarray) -> str:
        """Returns a warning if the features of one data set [features] are unusual, else "".

        The warning gives the rate of false alarms: each of the two distances is a test.
        """
        distances, quantiles = (
            f(features[np.newaxis])[0] for f in (self.distances, self.quantiles)
        )
        if quantiles.max() <= UNUSUAL:
            return ""
        worst = int(
            np.argmax(distances / np.maximum(np.quantile(self.known, UNUSUAL, axis=0), 1e-300))
        )
        limit = np.quantile(self.known[:, worst], UNUSUAL)
        times = np.sqrt(distances[worst] / max(limit, 1e-300))
        count = len(self.known)
        beyond = count - int(UNUSUAL * count + 1e-9)
        rate = (1 if self.whole else 2) * beyond / (count + 1)
        return (
            "It does not resemble the training set: its features are "
            f"{times:.3g} times as far away as the {UNUSUAL:.0%} quantile of {count} held-out "
            f"samples. Do not rely on the posterior. About {rate:.0%} of ordinary samples get this "
            "warning."
        )
