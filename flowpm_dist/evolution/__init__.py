"""The evolution of particles: integrators, kicks and drifts, and their adjoints."""

from meshimpl.lazy import lazy_names

_HOMES = {
    "Clock": "clock",
    "EvolutionPlan": "plan",
    "Evolved": "plan",
    "HaloError": "halo",
    "NBody": "nbody",
    "Observer": "observers",
    "Particles": "plan",
}

__all__ = sorted(_HOMES)
__getattr__ = lazy_names(__name__, _HOMES)
