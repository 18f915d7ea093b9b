"""Maps of the convergence of other runs: read from files, and compared with a light cone.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flowpm_dist.io.light_cone import load_light_cone
from flowpm_dist.io.volume import mapped_array
from flowpm_dist.observables.light_cone.section import ConvergenceOptions
from flowpm_dist.observables.tracers import ObservationError

ATTRIBUTE = "lightcone"
"""The attribute of data sets of maps that holds `cone_table`."""
FIELD_TOLERANCE = 1e-6
"""Relative difference of fields of view that are taken as equal."""


def read_convergence(path: Path, cone: ConvergenceOptions) -> np.ndarray:
    """Reads maps of the convergence.

    Args:
        path: `lightcone.zarr` or the folder that holds it; or a .npy file [source, y, x].
        cone: the light cone that they should be of.

    Returns:
        [source, x, y] [1], float64.

    Raises:
        ObservationError: the maps have another shape or field of view, or values that are not
            finite.
        UserError: the file cannot be read.
    """
    if path.suffix == ".npy":
        try:
            maps = np.asarray(mapped_array(path), np.float64)
        except (OSError, ValueError) as error:
            raise ObservationError(f"{path} cannot be read ({error})") from error
    else:
        file, field = load_light_cone(path), cone.field_of_view
        maps, there = np.asarray(file["kappa"], np.float64), file.attributes.get("field_of_view")
        if there is None:
            raise ObservationError(f"{path} has maps of the whole sky; must have a field of view")
        if abs(there - field) > FIELD_TOLERANCE * field:
            raise ObservationError(
                f"{path} has a field of {there:g} degrees; must be lightcone.field_of_view = "
                f"{field:g}"
            )
    shape = len(cone.sources), *cone.map_shape
    if maps.shape != shape:
        raise ObservationError(
            f"{path} has maps of shape {maps.shape}; must be {shape}, for {shape[0]} "
            f"lightcone.sources and lightcone.pixels = {cone.pixels}"
        )
    if not np.isfinite(maps).all():
        raise ObservationError(f"{path} has values that are not finite")
    return np.ascontiguousarray(np.swapaxes(maps, -1, -2))


def cone_table(cone: ConvergenceOptions) -> dict[str, Any]:
    """Returns the settings that maps depend on, n(z) files by checksum."""
    table = cone.to_table()
    table["sources"] = [
        {k: v for k, v in dumped.items() if k != "file"}
        | ({} if source.file is None else {"table": source.checksum})
        for dumped, source in zip(table["sources"], cone.sources, strict=True)
    ]
    table.get("shape_noise", {}).pop("seed", None)  # each universe has noise of its own
    return table


def differences(here: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Returns the keys in which two results of `cone_table` differ."""
    return [key for key in dict.fromkeys([*here, *other]) if here.get(key) != other.get(key)]


def differences_from_file(cone: ConvergenceOptions, attributes: Mapping[str, Any]) -> list[str]:
    """Returns the keys in which the maps of `lightcone.zarr` differ from a light cone.

    Field of view and pixels are left to `read_convergence`. Files of n(z) are compared by name, as
    the maps do not hold their values.

    Args:
        cone: the light cone.
        attributes: attributes of the maps.
    """
    table = cone.to_table()
    differing = [key for key in ("z_max", "alignment") if table.get(key) != attributes.get(key)]
    named = [
        {**dumped, "name": s.name} for dumped, s in zip(table["sources"], cone.sources, strict=True)
    ]
    here, there = (
        [{k: v for k, v in each.items() if k != "file" and v is not None} for each in sources]
        for sources in (named, attributes.get("sources") or [])
    )
    if here != there:
        differing.append("sources")
    if attributes.get("approximation", "Born") != "Born":
        differing.append("ray_tracing")
    return differing
