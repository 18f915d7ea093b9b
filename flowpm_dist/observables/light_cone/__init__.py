"""Light cones: the particles of a run where they are when their light is on its way to us."""

from meshimpl.imports import lazy_names

_HOMES = {
    "ConvergenceMaps": "observers",
    "DensityPlanes": "observers",
    "FlatField": "options",
    "FullSky": "options",
    "LightCone": "light_cone",
}

__all__ = sorted(_HOMES)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
