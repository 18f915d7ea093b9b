"""`lightcone.zarr`: maps of the sky, with the angles and the conventions that belong to them.

The attribute `complete` of the group is set last, as that of a snapshot is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flowpm_dist.io.errors import UserError
from flowpm_dist.io.files import GENERATOR, LIGHT_CONE, WriteError, snapshot_attributes
from flowpm_dist.io.snapshot import mark_complete

if TYPE_CHECKING:
    import zarr

FORMAT = 1
MOST_OF_CHUNK = 2**24
"""Values along a side of a chunk: compressors take no more than 2^31 bytes."""

_OF_ALL = {
    "kappa": "convergence against the mean of the universe",
}
CONVENTIONS = {
    **_OF_ALL,
    "axes": "a map is [y, x], as pictures are; maps in Python are [x, y]",
    "angles": "x and y are the centres of the pixels [deg], from a corner of the field",
    "shear": "kappa +- |gamma| along and across a stick at the angle atan2(gamma2, gamma1) / 2 "
    "from x to y; gamma1 > 0 stretches images along x",
    "rotation": "(A21 - A12) / 2 of the Jacobian A = d beta / d theta",
    "planes": "overdensity of the matter between two distances, against the mean of the universe",
}
CONVENTIONS_OF_RAYS = {
    **CONVENTIONS,
    "kappa": "convergence without that of the mean of each plane, which deflects no ray",
}
CONVENTIONS_OF_SPHERE = {
    **_OF_ALL,
    "axes": "a map is [pixel], HEALPix of nside in the order of rings",
    "directions": "colatitude is from the z axis of the box, longitude from x to y",
    "shells": "overdensity of the matter between two distances, against the mean of the universe",
}


@dataclass(frozen=True)
class MapArray:
    """An array of `lightcone.zarr`.

    Attributes:
        values: a map is [..., y, x] or, of the whole sky, [..., pixel].
        dimensions: names of its axes.
        units: of the values.
        meaning: in words.
    """

    values: np.ndarray
    dimensions: tuple[str, ...]
    units: str
    meaning: str


@dataclass(frozen=True)
class LightConeMaps:
    """The maps of a light cone, read from a file.

    Attributes:
        arrays: by name: kappa, gamma1, gamma2 [source, y, x] [1], x and y [pixel] [deg]; where it
            was made, rotation [source, y, x] [rad], planes [plane, y, x] [1] and plane_edges
            [plane + 1] [Mpc/h]. Of the whole sky, kappa [source, pixel] [1], and where they were
            made shells [shell, pixel] [1] and shell_edges [shell + 1] [Mpc/h].
        attributes: "field_of_view" [deg], "sources", "z_max", "cosmology", "seed", "warnings",
            "conventions", and "config", the run file as TOML. Of the whole sky "nside" and
            "ordering" in place of the field of view.
    """

    arrays: Mapping[str, np.ndarray]
    attributes: Mapping[str, Any]

    def __getitem__(self, name: str) -> np.ndarray:
        """Returns the array of a name.

        Raises:
            KeyError: there is none.
        """
        if name not in self.arrays:
            raise KeyError(f"the light cone has no {name!r}; it has {', '.join(self.arrays)}")
        return self.arrays[name]


def write_light_cone(
    path: Path,
    arrays: Mapping[str, MapArray],
    attributes: Mapping[str, Any],
    conventions: Mapping[str, str],
) -> None:
    """Write maps and mark them as complete. On one rank.

    Args:
        path: of the new zarr group.
        arrays: by name.
        attributes: of the group; they can be written as JSON.
        conventions: what else a reader must know, by what it is about.

    Raises:
        WriteError: they cannot be written.
    """
    import zarr

    marks = {"generator": GENERATOR, "format": FORMAT, "complete": False}
    try:
        group = zarr.create_group(
            path, attributes={**attributes, "conventions": dict(conventions), **marks}
        )
        for name, array in arrays.items():
            add_array(group, name, array)
        mark_complete(path)
    except OSError as error:
        raise WriteError.of(path, error) from error


def add_array(group: zarr.Group, name: str, array: MapArray) -> None:
    """Write an array into a zarr group, a chunk or more for each of its maps. On one rank."""
    from zarr.codecs import BloscCodec, Crc32cCodec

    shape = array.values.shape
    of_map = 1 if array.dimensions[-1] == "pixel" else 2
    of_one = tuple(min(side, MOST_OF_CHUNK) for side in shape[-of_map:])
    group.create_array(
        name,
        shape=shape,
        chunks=(1,) * (len(shape) - of_map) + of_one,
        dtype=array.values.dtype,
        fill_value=np.nan,
        compressors=(BloscCodec(cname="zstd", clevel=1, shuffle="shuffle"), Crc32cCodec()),
        dimension_names=array.dimensions,
        attributes={"units": array.units, "meaning": array.meaning},
    )[...] = array.values


def load_light_cone(path: str | Path) -> LightConeMaps:
    """Reads the maps of a light cone.

    Args:
        path: `lightcone.zarr`, or the output folder that holds it.

    Raises:
        UserError: there are none, or their writing was interrupted.
    """
    path = Path(path)
    if path.name != LIGHT_CONE:
        path = path / LIGHT_CONE
    attributes = snapshot_attributes(path)
    if attributes is None:
        raise UserError(f"{path} holds no maps of a light cone of {GENERATOR}")
    if not attributes.get("complete"):
        raise UserError(f"{path} is not complete: the run that wrote it was interrupted")
    import zarr

    group = zarr.open_group(path, mode="r")
    return LightConeMaps({n: np.asarray(a[...]) for n, a in group.arrays()}, attributes)
