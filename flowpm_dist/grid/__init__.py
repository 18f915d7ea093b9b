"""The box, its fields, their decomposition over ranks, and Fourier filters."""

from meshimpl.imports import lazy_names

_HOMES = {
    "Box": "box",
    "Field": "field",
    "default_mesh": "decomposition",
    "to_field": "fourier",
    "to_spectrum": "fourier",
}

__all__ = sorted(_HOMES)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
