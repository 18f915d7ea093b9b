"""The front door: `Simulation` and the `State` it gives."""

from meshimpl.imports import lazy_names

_HOMES = {
    "Profile": "profiling",
    "Simulation": "simulation",
    "SolverOptions": "options",
    "State": "state",
    "profile": "profiling",
}

__all__ = sorted(_HOMES)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
