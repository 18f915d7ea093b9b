"""The evolution of particles: integrators, kicks and drifts, and their adjoints."""

from meshimpl.imports import lazy_names

_HOMES = {
    "Clock": "plan",
    "EvolutionPlan": "plan",
    "Evolved": "plan",
    "NBody": "nbody",
    "Observer": "observers",
    "Particles": "plan",
}

__all__ = sorted(_HOMES)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
