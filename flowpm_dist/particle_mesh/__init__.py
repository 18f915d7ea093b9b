"""Particles on a mesh: paint, read, gravity, and the kernels that do it."""

from meshimpl.imports import lazy_names

_HOMES = {
    "Gravity": "gravity",
    "MaxDisplacement": "cloud_in_cell",
    "ParticleMesh": "cloud_in_cell",
    "paint": "cloud_in_cell",
}

__all__ = sorted(_HOMES)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
