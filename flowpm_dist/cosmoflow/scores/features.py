"""Summary statistics of volumes, from which baselines predict the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Features:
    """Summary statistics of n volumes, and their true parameters.

    Attributes:
        names: of the p parameters.
        log_power: log10 of P(k) [(Mpc/h)^3], or of C_l of maps [sr], [n, bins].
        histogram: of the density, or of the convergence, [n, bins].
        truth: [n, p], physical units.
        edges: of the bins of the histogram, where they are known.

    Raises:
        ValueError: shapes that disagree, no samples, or values that are not finite.
    """

    names: tuple[str, ...]
    log_power: np.ndarray
    histogram: np.ndarray
    truth: np.ndarray
    edges: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for field in ("log_power", "histogram", "truth"):
            values = getattr(self, field)
            if values.ndim != 2 or len(values) != len(self.truth) or not len(values):
                raise ValueError(
                    f"{field} has shape {values.shape}; must have two axes, the first of "
                    f"{max(len(self.truth), 1)} samples as truth has"
                )
            if not np.isfinite(values).all():
                raise ValueError(f"{field} has values that are not finite")
        if self.truth.shape[1] != len(self.names):
            raise ValueError(f"truth has shape {self.truth.shape} for {len(self.names)} parameters")

    def first(self, count: int) -> Features:
        """Returns the first `count` samples."""
        return replace(
            self,
            log_power=self.log_power[:count],
            histogram=self.histogram[:count],
            truth=self.truth[:count],
        )


def check_same_bins(sets: Mapping[str, Features]) -> None:
    """Raises ValueError if the histograms of some splits have other bins than those of others."""
    if len({features.edges for features in sets.values()}) > 1:
        told = ", ".join(sets)
        raise ValueError(f"the histograms of {told} differ in their bins, as older versions' do")
