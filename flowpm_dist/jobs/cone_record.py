"""What the maps of a light cone are of, to be kept with them and compared; without TensorFlow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flowpm_dist.jobs.light_cone import ConvergenceOptions

ATTRIBUTE = "lightcone"
"""Of data sets of maps: their `cone_table`."""


def cone_table(cone: ConvergenceOptions) -> dict[str, Any]:
    """Returns all that maps depend on, as JSON holds it: n(z) of files by their checksums."""
    table: dict[str, Any] = json.loads(cone.model_dump_json(exclude_none=True))
    table["sources"] = [
        {k: v for k, v in dumped.items() if k != "file"}
        | ({} if source.file is None else {"table": source.checksum})
        for dumped, source in zip(table["sources"], cone.sources, strict=True)
    ]
    table.get("shape_noise", {}).pop("seed", None)  # each universe has noise of its own
    return table


def differences(own: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Returns the keys of two of `cone_table` that differ."""
    return [key for key in dict.fromkeys([*own, *other]) if own.get(key) != other.get(key)]


def differences_from_file(cone: ConvergenceOptions, attributes: Mapping[str, Any]) -> list[str]:
    """Returns in what the maps of `lightcone.zarr` are not of a light cone, by key.

    Args:
        cone: that they should be of.
        attributes: of the maps. They tell the files of n(z), which are not read: their names are
            compared. Field of view and pixels are left to `read_convergence`.
    """
    own = json.loads(cone.model_dump_json(exclude_none=True))
    found = [key for key in ("z_max", "alignment") if own.get(key) != attributes.get(key)]
    named = [
        {**dumped, "name": s.name} for dumped, s in zip(own["sources"], cone.sources, strict=True)
    ]
    here, there = (
        [{k: v for k, v in each.items() if k != "file" and v is not None} for each in sources]
        for sources in (named, attributes.get("sources") or [])
    )
    if here != there:
        found.append("sources")
    if attributes.get("approximation", "Born") != "Born":
        found.append("ray_tracing")
    return found
