"""Weak gravitational lensing by planes of matter: convergence, shear, and light rays."""

from meshimpl.imports import lazy_names

_HOMES = {
    "IntrinsicAlignment": "sources",
    "LensPlanes": "planes",
    "RayTracing": "ray_tracing",
    "SmailDistribution": "sources",
    "SourceDistribution": "sources",
    "SourcePlane": "sources",
    "Sources": "sources",
    "TabulatedDistribution": "sources",
    "born": "planes",
    "convergence": "shapes",
    "convergence_power": "planes",
    "lensing_efficiency": "planes",
    "plane_weights": "planes",
    "ray_trace": "ray_tracing",
    "shape_noise": "shapes",
    "shear": "shapes",
}

__all__ = sorted(_HOMES)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
