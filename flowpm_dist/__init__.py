"""Differentiable, distributed cosmological simulation on TensorFlow.

::

    import flowpm_dist as fpm

    sim = fpm.Simulation(fpm.Cosmology.planck18(), grid=128, box_size=256.0,
                         steps=fpm.scale_factor_steps(0.1, 1.0, 10))
    state = sim.run(seed=42)
    k, pk = fpm.power_spectrum(state.density())
"""

from meshimpl.imports import lazy_names

_HOMES = {
    "Bins": "statistics",
    "BullFrog": "evolution.integrators",
    "COLA": "evolution.integrators",
    "Cosmology": "cosmology",
    "Growth": "cosmology",
    "LinearPower": "cosmology",
    "Box": "grid.box",
    "FastPM": "evolution.integrators",
    "Field": "grid.field",
    "HaloError": "particle_mesh.cloud_in_cell",
    "PowerSpectrum": "statistics",
    "Simulation": "simulation.simulation",
    "State": "simulation.state",
    "compare": "statistics",
    "correlation_coefficient": "statistics",
    "cross_power": "statistics",
    "density_histogram": "statistics",
    "growth_steps": "cosmology.options",
    "jacobian": "statistics",
    "logarithmic_steps": "cosmology.options",
    "multipoles": "statistics",
    "power_spectrum": "statistics",
    "power_wedges": "statistics",
    "run": "cli.from_python",
    "scale_factor_steps": "cosmology.options",
    "transfer_function": "statistics",
}

__all__ = sorted(_HOMES)
__getattr__ = lazy_names(__name__, _HOMES, without_tensorflow=["run"])
