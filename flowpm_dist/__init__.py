"""Differentiable, distributed cosmological simulation on TensorFlow.

::

    import flowpm_dist as fpm

    sim = fpm.Simulation(fpm.Cosmology.planck18(), grid=128, box_size=256.0,
                         steps=fpm.scale_factor_steps(0.1, 1.0, 10))
    state = sim.run(seed=42)
    k, pk = fpm.power_spectrum(state.density(), box_size=256.0)
"""

from meshimpl.lazy import lazy_names

_HOMES = {
    "Cosmology": "cosmology",
    "Growth": "cosmology",
    "LinearPower": "cosmology",
    "Box": "fields",
    "Field": "fields",
    "HaloError": "nbody",
    "PowerSpectrum": "statistics",
    "Simulation": "simulation",
    "State": "state",
    "growth_steps": "steps",
    "logarithmic_steps": "steps",
    "power_spectrum": "statistics",
    "scale_factor_steps": "steps",
}

__all__ = sorted(_HOMES)
__getattr__ = lazy_names(__name__, _HOMES)
