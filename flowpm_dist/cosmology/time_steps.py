"""Where the steps of a run begin and end: equal in a, in log a, or in the growth factor D1.

Nothing here imports TensorFlow before it must. Any increasing list of scale factors will do as
well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from flowpm_dist.cosmology import Cosmology

SPACINGS = ("a", "log a", "D")


def _check(a_start: float, a_stop: float, steps: int, *, zero: bool) -> None:
    if not (0 <= a_start if zero else 0 < a_start) or not a_start < a_stop:
        least = "0 <= a_start" if zero else "0 < a_start"
        raise ValueError(f"a_start {a_start} and a_stop {a_stop}: {least} < a_stop is needed")
    if steps < 1:
        raise ValueError(f"steps {steps}: at least 1 is needed")


def scale_factor_steps(a_start: float, a_stop: float, steps: int) -> np.ndarray:
    """Edges of `steps` steps, equal in the scale factor [1], float64 of shape [steps + 1].

    Raises:
        ValueError: unless 0 <= a_start < a_stop and steps >= 1.
    """
    _check(a_start, a_stop, steps, zero=True)
    return np.linspace(a_start, a_stop, steps + 1)


def logarithmic_steps(a_start: float, a_stop: float, steps: int) -> np.ndarray:
    """Edges of `steps` steps, equal in log a [1], float64 of shape [steps + 1].

    Raises:
        ValueError: unless 0 < a_start < a_stop and steps >= 1.
    """
    _check(a_start, a_stop, steps, zero=False)
    edges = np.geomspace(a_start, a_stop, steps + 1)
    edges[[0, -1]] = a_start, a_stop
    return edges


def growth_steps(cosmology: Cosmology, a_start: float, a_stop: float, steps: int) -> np.ndarray:
    """Edges of `steps` steps, equal in D1(a) of a cosmology [1], float64 of shape [steps + 1].

    The edges are scale factors: they do not follow when a gradient varies the cosmology.

    Raises:
        ValueError: unless 0 <= a_start < a_stop and steps >= 1.
    """
    from flowpm_dist.cosmology import Growth

    _check(a_start, a_stop, steps, zero=True)
    growth = Growth(cosmology)
    first, last = (float(growth.d1(a)) for a in (a_start, a_stop))
    wanted = np.linspace(first, last, steps + 1)[1:-1]
    low, high = np.full(steps - 1, a_start), np.full(steps - 1, a_stop)
    for _ in range(60 if steps > 1 else 0):
        middle = 0.5 * (low + high)
        below = growth.d1(middle).numpy() < wanted
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return np.concatenate([[a_start], 0.5 * (low + high), [a_stop]])
