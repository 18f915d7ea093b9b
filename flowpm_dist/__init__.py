"""Differentiable, distributed cosmological simulation on TensorFlow.

::

    import flowpm_dist as fpm

    sim = fpm.Simulation(fpm.Cosmology.planck18(), grid=128, box_size=256.0,
                         steps=fpm.scale_factor_steps(0.1, 1.0, 10))
    state = sim.run(seed=42)
    k, pk = fpm.power_spectrum(state.density(), box_size=256.0)
"""

from __future__ import annotations

import importlib
from typing import Any

from meshimpl import prepare_tensorflow

_HOMES = {
    "Cosmology": "cosmology",
    "Growth": "cosmology",
    "LinearPower": "cosmology",
    "Box": "fields",
    "Field": "fields",
    "HaloError": "nbody",
    "PowerSpectrum": "statistics",
    "Simulation": "simulation",
    "State": "simulation",
    "power_spectrum": "statistics",
    "scale_factor_steps": "simulation",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import on first use: the command line answers before TensorFlow is loaded."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    prepare_tensorflow()
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
