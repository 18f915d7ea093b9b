"""The non-linear matter power, from CAMB."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.camb_spline import SHAPE, camb_power_table
from flowpm_dist.cosmology.camb_table import known_number, without_gradient
from flowpm_dist.cosmology.parameters import AMPLITUDES, Cosmology
from flowpm_dist.cosmology.power import LinearPower
from flowpm_dist.cosmology.tabulated import TabulatedPower

MODELS = ("takahashi", "mead2020", "mead2016", "linear")
"""Halofit of Takahashi and others (2012, arXiv:1208.2701), HMcode, and CAMB's own linear power."""


class NonlinearPower:
    """The non-linear power P(k, a) of CAMB as a table: `power(k, a)`, for 0 <= z <= z_max.

    Neutrinos are massless, as everywhere here. CAMB has radiation, which slows the growth by some
    1e-3. There are no gradients by the cosmology: asking for one raises LookupError. `Halofit` has
    them.

    Args:
        cosmology: the parameters; its transfer need not be "camb", only its sigma8 or A_s counts.
        model: one of `MODELS`.
        z_max: the largest redshift [1].

    Raises:
        ValueError: an unknown model; parameters that only a graph knows (inside a tf.function).
        ImportError: the package camb is missing.
    """

    def __init__(self, cosmology: Cosmology, model: str = "takahashi", z_max: float = 4.0) -> None:
        if model not in MODELS:
            raise ValueError(f"model {model!r}: one of {', '.join(map(repr, MODELS))}")
        numbers = {name: known_number(name, getattr(cosmology, name)) for name in SHAPE}
        amplitude = LinearPower(cosmology.replace(transfer="camb")).A_s
        redshifts = np.expm1(np.linspace(0.0, np.log1p(z_max), 33))
        k, power = camb_power_table(
            tuple(redshifts), model, known_number("A_s", amplitude), **numbers
        )
        self._table = TabulatedPower(k, 1.0 / (1.0 + redshifts[::-1]), power[::-1])
        self._guard = without_gradient(
            {name: getattr(cosmology, name) for name in (*SHAPE, *AMPLITUDES)},
            power="non-linear power",
            instead="Halofit",
        )

    def __call__(self, k: Any, a: Any = 1.0) -> tf.Tensor:
        """Returns P [(Mpc/h)^3] for k > 0 [h/Mpc] and a [1], which broadcast; float64."""
        return self._table(k, a) * self._guard
