"""Features that parameters are inferred from: statistics of densities and of maps, as vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flowpm_dist.grid.field import Field
from flowpm_dist.io.errors import UserError
from flowpm_dist.statistics.histogram import DENSITIES, CellValues
from flowpm_dist.statistics.noisy_maps import NoisyMaps
from flowpm_dist.statistics.register import Statistic, statistic_named


class StatisticError(UserError, ValueError):
    """A user's own statistic returned something other than finite vectors."""


def measured(
    names: Sequence[str],
    data: Field | NoisyMaps,
    values: CellValues = DENSITIES,
    **known: object,
) -> dict[str, np.ndarray]:
    """Returns features of a density or of maps, float64 [universe, value] for each statistic.

    All ranks that have a part of a density must call this together.

    Args:
        names: names of `STATISTICS`, for maps of `MAP_STATISTICS`, or "package.module:object".
        data: a density or counts, of a batch of universes or of one; or maps of universes.
        values: what the numbers of a density are.
        known: what else is known of the data, see `Statistic.measure`.

    Raises:
        ValueError: there is no such statistic.
        StatisticError: a statistic did not return a vector of finite numbers for each universe.
    """
    of_maps = isinstance(data, NoisyMaps)
    universes = len(data.kappa) if isinstance(data, NoisyMaps) else data.box.batch or 1
    features = {}
    for name in names:
        statistic = statistic_named(name, of_maps=of_maps)
        result = statistic.measured(data, values=values, **known)
        features[name] = features_of(name, statistic, result, universes)
    return features


def features_of(name: str, statistic: Statistic, result: Any, universes: int = 1) -> np.ndarray:
    """Returns the features of a statistic's result, float64 [universe, value].

    Raises:
        StatisticError: they are not a vector of finite numbers for each universe.
    """
    vectors = np.asarray(statistic.vectors(result), np.float64)
    if vectors.size == 0 or vectors.size % universes or vectors.ndim > 2:
        raise StatisticError(
            f"the statistic {name} returned an array of shape {vectors.shape}; must be a "
            f"vector for each of {universes} universes"
        )
    if not np.isfinite(vectors).all():
        raise StatisticError(f"the statistic {name} has values that are not finite")
    return vectors.reshape(universes, -1)
