"""Light cones: the particles of a run where they are when their light is on its way to us."""

from meshimpl.lazy import lazy_names

_HOMES = {
    "ConvergenceMaps": "maps",
    "DensityPlanes": "maps",
    "DensityShells": "maps",
    "FullSkyLightCone": "full_sky",
    "LightCone": "light_cone",
    "SphericalConvergence": "maps",
}

__all__ = sorted(_HOMES)
__getattr__ = lazy_names(__name__, _HOMES)
