"""Files of maps of the convergence that are observed. Nothing here imports TensorFlow."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from flowpm_dist.io.light_cone_maps import load_light_cone
from flowpm_dist.observables.options import ObservationError

CLOSE = 1e-6
"""Relative difference of fields of view that are taken as equal."""


def read_convergence(path: Path, sources: int, pixels: int, field_of_view: float) -> np.ndarray:
    """Reads maps of the convergence.

    Args:
        path: `lightcone.zarr` or the folder that holds it; or a .npy file [source, y, x].
        sources: their number.
        pixels: along each side.
        field_of_view: side of the maps [deg], which a .npy file does not tell.

    Returns:
        [source, x, y] [1], float64.

    Raises:
        ObservationError: maps of another shape or field of view, or with values that are not
            finite.
        UserError: a file that cannot be read.
    """
    if path.suffix == ".npy":
        try:
            maps = np.asarray(np.load(path, allow_pickle=False), np.float64)
        except (OSError, ValueError) as error:
            raise ObservationError(f"{path} cannot be read ({error})") from error
    else:
        cone = load_light_cone(path)
        maps, there = np.asarray(cone["kappa"], np.float64), cone.attributes.get("field_of_view")
        if there is None:
            raise ObservationError(f"{path} is of the whole sky; must be of a field of view")
        if abs(there - field_of_view) > CLOSE * field_of_view:
            raise ObservationError(
                f"{path} has a field of {there:g} degrees; must be lightcone.field_of_view = "
                f"{field_of_view:g}"
            )
    if maps.shape != (sources, pixels, pixels):
        raise ObservationError(
            f"{path} has maps of shape {maps.shape}; must be {(sources, pixels, pixels)}, of "
            f"{sources} lightcone.sources and lightcone.pixels = {pixels}"
        )
    if not np.isfinite(maps).all():
        raise ObservationError(f"{path} has values that are not finite")
    return np.ascontiguousarray(np.swapaxes(maps, -1, -2))
