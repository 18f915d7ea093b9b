"""The columns of catalogues. Nothing here imports TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np

Kind = Literal["halos", "galaxies"]


class Column(NamedTuple):
    """What a column of a catalogue holds.

    Attributes:
        units: of its numbers; "1" for pure numbers.
        meaning: in words.
        axes: the names of the axes after the first, which is the number of the object.
    """

    units: str
    meaning: str
    axes: tuple[str, ...] = ()


AXIS = ("axis",)
COLUMNS = {
    "id": Column("1", "number of the halo: the lowest number of a member particle"),
    "number": Column("1", "number of member particles"),
    "mass": Column("Msun/h", "mass of the members"),
    "position": Column("Mpc/h", "comoving centre of mass, 0 <= x < side", AXIS),
    "velocity": Column("km/s", "peculiar velocity", AXIS),
    "velocity_dispersion": Column("km/s", "rms of the members along one axis, mean of three"),
    "axis_lengths": Column(
        "Mpc/h",
        "root mean square distances of the members along the three axes of inertia",
        ("principal",),
    ),
    "axis_directions": Column(
        "1", "unit vectors along the axes of inertia, the longest first", ("principal", "axis")
    ),
    "centre": Column("Mpc/h", "position of the densest member, 0 <= x < side", AXIS),
    "mass_200m": Column("Msun/h", "mass within radius_200m"),
    "radius_200m": Column("Mpc/h", "comoving, of 200 times the mean density of matter"),
    "mass_200c": Column("Msun/h", "mass within radius_200c"),
    "radius_200c": Column("Mpc/h", "comoving, of 200 times the critical density"),
    "host": Column("1", "id of the galaxy's halo"),
    "host_mass": Column("Msun/h", "mass of the galaxy's halo"),
    "central": Column("1", "whether the galaxy is the central one of its halo"),
    "satellite": Column("1", "number of the satellite in its halo, from 1; 0 for the central"),
    "scale_factor": Column("1", "when the halo crosses the light cone"),
    "redshift": Column("1", "as it is observed, peculiar velocity included"),
    "direction": Column("1", "unit vector from the observer", AXIS),
    "angle": Column("deg", "from the centre of the field, along x and y", AXIS),
    "edge": Column("1", "whether it touches an edge or a seam, where particles may be missing"),
}
"""The columns that a catalogue can have, by name. An object of a user may have others."""


def by_mass(columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns the order of objects by falling mass, and by id where masses are equal.

    Galaxies are in the order of their halos, and of `satellite` in each.
    """
    if "host" in columns:
        return np.lexsort((columns["satellite"], columns["host"], -columns["host_mass"]))
    return np.lexsort((columns["id"], -columns["mass"]))
