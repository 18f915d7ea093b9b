"""What the numbers of a volume are, and the bins of their histograms that go with it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flowpm_dist.grid.field import Field
from flowpm_dist.statistics.histogram import Histogram, density_histogram


@dataclass(frozen=True)
class CellValues:
    """What the numbers of a volume are: densities, densities that may be below 0, or counts.

    Attributes:
        positive: whether they are never below 0, as without noise.
        mean_count: the mean count of a cell of mean density; None for densities.
    """

    positive: bool = True
    mean_count: float | None = None

    def histogram(self, field: Field, edges: np.ndarray) -> Histogram:
        """Returns the histogram of a field in `bins`.

        Args:
            field: the values, of one universe or of a batch. On all its ranks together.
            edges: see `bins`.
        """
        return density_histogram(field, self.bins(edges), log=self._log)

    def bins(self, edges: np.ndarray) -> np.ndarray:
        """Returns the edges of bins that suit the values [bin + 1].

        Densities that are never below 0 have bins of their logarithm: cells of 0, and those beyond
        the edges, are in none. Others have bins of asinh(density - 1), which is about the logarithm
        near the mean density, and counts are divided by their mean for them. The first and the last
        of these bins have no end, so that every cell is in one.

        Args:
            edges: of ln(density) or asinh(density - 1), increasing, [bin + 1].

        Returns:
            Edges of ln(density), or of the values.
        """
        if self._log:
            return edges
        inner = (self.mean_count or 1.0) * (1.0 + np.sinh(edges[1:-1]))
        return np.array([-np.inf, *inner, np.inf])

    @property
    def _log(self) -> bool:
        return self.positive and self.mean_count is None


DENSITIES = CellValues()
"""Densities that are never below 0."""
