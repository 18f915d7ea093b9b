"""Particles of SWIFT in HDF5. Nothing here imports TensorFlow."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flowpm_dist.io import hdf5_particles
from flowpm_dist.io.files import UnreadableError
from flowpm_dist.io.hdf5_particles import (
    attributes_of,
    checked_counts,
    counts_here,
    first_of,
    mass_table,
    read_part,
)
from flowpm_dist.io.opening import open_hdf5
from flowpm_dist.io.particle_files import (
    PARAMETER_TOLERANCE,
    Attributes,
    Part,
    ParticleFiles,
    box_sides,
    check_number_of_files,
    check_same,
    check_whole,
    totals,
)
from flowpm_dist.io.snapshot import SnapshotError

if TYPE_CHECKING:
    import h5py

WORDS = "HDF5 of SWIFT"
BLOCKS = {**hdf5_particles.BLOCKS, "mass": ("Masses", "DynamicalMasses")}
"""The data sets of the quantities. Black holes have the second one."""
UNITS = {"L": "Unit length in cgs (U_L)", "M": "Unit mass in cgs (U_M)",
         "t": "Unit time in cgs (U_t)"}  # fmt: skip
MPC, SOLAR_MASS = 3.08567758149e24, 1.98841e33
"""A megaparsec and a solar mass of SWIFT in cgs units."""
GROUPS = ("Cosmology", "Units", "Header")
"""The groups with attributes that are read. Of two values of a name, the later group's counts."""
PARAMETERS = {"Omega_m": "Omega_m", "Omega_b": "Omega_b", "h": "h", "w0": "w_0", "wa": "w_a",
              "T_cmb": "T_CMB_0 [K]", "N_eff": "N_eff"}  # fmt: skip
"""Our names of parameters, and the names in the group Cosmology."""
SAME = ("Scale-factor", "Redshift", "BoxSize", "NumFilesPerSnapshot", "NumPart_Total",
        *UNITS.values(), *PARAMETERS.values())  # fmt: skip
"""Attributes that all files of a snapshot have the same."""
CONVERSIONS = (
    "Conversion factor to CGS (not including cosmological corrections)",
    "Conversion factor to physical CGS (including cosmological corrections)",
)
"""Attributes of a data set: what its values are multiplied by to be in cgs units."""
EXPONENTS = {"position": 1.0, "velocity": 0.0, "mass": 0.0}
"""The power of the scale factor in physical values, where a data set does not give it."""


def recognises(path: Path) -> bool:
    """Returns whether a path is a file in HDF5 with SWIFT's units."""
    if not hdf5_particles.recognises(path):
        return False
    with open_hdf5(path) as file:
        return "Units" in file and UNITS["L"] in file["Units"].attrs


is_alone = hdf5_particles.is_alone


def open_files(path: Path, names: Sequence[Path], units: Mapping[str, Any]) -> ParticleFiles:
    """Returns a snapshot of SWIFT (Schaller and others 2024, arXiv:2305.13380).

    Nothing is times h, and velocities are peculiar. The attributes of each data set have the powers
    of the scale factor and of h that make its values physical.

    Args:
        path: the snapshot, for messages.
        names: its files, in order.
        units: `HubbleParam`, if the files have no h, as initial conditions.

    Raises:
        SnapshotError: a file is missing, or h.
        UnreadableError: a file is damaged.
    """
    headers: list[dict[str, Any]] = []
    parts: list[Part] = []
    powers: dict[str, tuple[float, float]] = {}
    for name in names:
        with open_hdf5(name) as file:
            header = attributes_of(file, GROUPS)
            counts = checked_counts(file, name, counts_here(header), BLOCKS)
            a = _scale_factor(Attributes(name, header))
            for quantity, power in _powers(file, name, counts, a):
                if not np.allclose(powers.setdefault(quantity, power), power):
                    raise UnreadableError(
                        f"{name}: types of particles have their {quantity} times different powers "
                        "of the scale factor or of h; must be the same for all"
                    )
        read = functools.partial(read_part, name, BLOCKS, mass_table(header))
        parts.append(Part(counts, read))
        headers.append(header)
    header = headers[0]
    check_number_of_files(header, names)
    check_same(headers, names, SAME)
    if "h" in header:
        header["HubbleParam"] = header["h"]
    known = Attributes(path, header).with_units(units, ["HubbleParam"])
    a = _scale_factor(known)
    factor = _factor(known, a, powers)
    length = known.positive(UNITS["L"]) / MPC * known.positive("HubbleParam")
    sides, facts = box_sides(known, length), _parameters(known)
    files = ParticleFiles(path, known, parts, factor, a, sides, facts)
    # Types that the user of SWIFT left out of the output are among all particles.
    expected = [n if kind in files.counts else 0 for kind, n in enumerate(totals(header))]
    return check_whole(files, expected)


def _powers(
    file: h5py.File, name: Path, counts: Mapping[int, int], a: float
) -> list[tuple[str, tuple[float, float]]]:
    """Returns the powers of a and h that make values physical, for each data set of a quantity.

    Of two attributes that disagree the conversion factor counts: swiftsimio 12.4 writes it right,
    and the power of masses and velocities wrong.

    Args:
        file, name: the file.
        counts: its particles by type.
        a: scale factor.
    """
    powers = []
    for kind in counts:
        group = file[f"PartType{kind}"]
        for quantity, power in EXPONENTS.items():
            data = first_of(group, BLOCKS[quantity])
            if data is None:
                continue
            where = f"{name}:{data.name}"
            about = Attributes(Path(where), dict(data.attrs))
            of_a = float(about.numbers("a-scale exponent", power)[0])
            of_h = float(about.numbers("h-scale exponent", 0.0)[0])
            if about.numbers("Value stored as physical", 0.0)[0]:
                of_a = 0.0
            elif all(each in about for each in CONVERSIONS) and a != 1:
                comoving, physical = (about.number(each) for each in CONVERSIONS)
                if not comoving * physical > 0:
                    raise UnreadableError(f"{where}: conversion factors must be above 0")
                if not math.isclose(physical, comoving * a**of_a, rel_tol=PARAMETER_TOLERANCE):
                    of_a = math.log(physical / comoving) / math.log(a)
            powers.append((quantity, (of_a, of_h)))
    return powers


def _parameters(header: Attributes) -> dict[str, float]:
    """Returns parameters by our names; SWIFT's Omega_m is without neutrinos."""
    facts = {ours: header.number(name) for ours, name in PARAMETERS.items() if name in header}
    if "Omega_m" in facts:
        facts["Omega_m"] += float(header.numbers("Omega_nu_0")[0])
    if "M_nu_eV" in header:
        facts["m_nu"] = float(np.sum(header.numbers("M_nu_eV") * header.numbers("deg_nu", 1.0)))
    return facts


def _scale_factor(header: Attributes) -> float:
    """Returns the scale factor: SWIFT's `Time` is a time.

    Raises:
        SnapshotError: the header has none, or the run was not a cosmological one.
    """
    if "Cosmological run" in header and not header.number("Cosmological run"):
        raise SnapshotError(f"{header.path} is not of a cosmological run")
    if "Scale-factor" in header:
        return header.positive("Scale-factor")
    z = header.number("Redshift")
    if not z > -1:
        raise SnapshotError(f"{header.path} has Redshift = {z:g}; must be above -1")
    return 1 / (1 + z)


def _factor(
    header: Attributes, a: float, powers: Mapping[str, tuple[float, float]]
) -> Callable[[str], float]:
    """Returns `ParticleFiles.factor`.

    Args:
        header: the attributes, with `HubbleParam`.
        a: scale factor.
        powers: the powers of a and h that make values physical, by quantity.
    """
    h = header.positive("HubbleParam")

    def factor(name: str) -> float:
        length, mass, time = (header.positive(UNITS[unit]) for unit in "LMt")
        unit = {
            "position": length / MPC * h / a,  # comoving
            "velocity": length / time / 1e5,
            "mass": mass / SOLAR_MASS / 1e10 * h,
        }[name]
        power_of_a, power_of_h = powers.get(name, (EXPONENTS[name], 0.0))
        return float(unit * a**power_of_a * h**power_of_h)

    return factor
