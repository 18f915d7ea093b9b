"""Snapshots as Gadget-4 writes them in HDF5, a file for each part.

Springel, Pakmor, Zier and Reinecke 2021, MNRAS 506, 2871 (arXiv:2010.03567); the header also has
the numbers that readers of Gadget-2's format look for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from flowpm_dist.io.particles import KM, MPC, SOLAR_MASSES, Block, Header, ParticleFormat

TYPES = 6
DARK_MATTER = 1
"""Of the types of particles, ours."""
POSITION = {"a_scaling": 1.0, "h_scaling": -1.0, "length_scaling": 1.0, "mass_scaling": 0.0,
            "velocity_scaling": 0.0, "to_cgs": MPC}  # fmt: skip
VELOCITY = {"a_scaling": 0.5, "h_scaling": 0.0, "length_scaling": 0.0, "mass_scaling": 0.0,
            "velocity_scaling": 1.0, "to_cgs": KM}  # fmt: skip


class GadgetHDF5(ParticleFormat):
    """`snapshot.hdf5`, or `snapshot.0.hdf5` and so on, with the particles as type 1.

    Coordinates in comoving Mpc/h, velocities in km/s sqrt(a) (peculiar velocity over sqrt(a)),
    masses in 1e10 Msun/h.
    """

    name: ClassVar[str] = "gadget-hdf5"

    def write_part(
        self, folder: Path, number: int, parts: int, block: Block, header: Header
    ) -> np.ndarray:
        """See `ParticleFormat.write_part`."""
        import h5py

        with h5py.File(folder / file_name(number, parts), "w") as file:
            file.create_group("Header").attrs.update(_header(block.count, parts, header))
            file.create_group("Parameters").attrs.update(_parameters(header))
            group = file.create_group(f"PartType{DARK_MATTER}")
            shape = (block.count, 3)
            positions = group.create_dataset("Coordinates", shape, block.dtype)
            velocities = group.create_dataset("Velocities", shape, block.dtype)
            ids = group.create_dataset("ParticleIDs", shape[:1], np.uint64)
            positions.attrs.update(POSITION)
            velocities.attrs.update(VELOCITY)
            first = 0
            for some in block.particles(header):
                there = slice(first, first := first + len(some.ids))
                ids[there] = some.ids
                positions[there] = some.positions
                velocities[there] = some.velocities / np.sqrt(header.a)
        return np.array([block.count], np.int64)

    def finish(self, folder: Path, found: Sequence[np.ndarray], header: Header) -> None:
        """See `ParticleFormat.finish`: nothing is left to write."""


def file_name(number: int, parts: int) -> str:
    """Returns the name of one of the files of a snapshot."""
    return "snapshot.hdf5" if parts == 1 else f"snapshot.{number}.hdf5"


def _header(count: int, parts: int, header: Header) -> dict[str, Any]:
    def of_type(value: float, dtype: type) -> np.ndarray:
        return np.where(np.arange(TYPES) == DARK_MATTER, value, 0).astype(dtype)

    cosmology = header.cosmology
    flags = ("Sfr", "Cooling", "StellarAge", "Metals", "Feedback")
    return {
        "NumPart_ThisFile": of_type(count, np.uint64),
        # All of it: a reader that adds the high word finds nothing to add.
        "NumPart_Total": of_type(header.count, np.uint64),
        "NumPart_Total_HighWord": np.zeros(TYPES, np.uint32),
        "MassTable": of_type(header.mass, np.float64),
        "Time": header.a,
        "Redshift": 1.0 / header.a - 1.0,
        "BoxSize": header.length,
        "NumFilesPerSnapshot": np.int32(parts),
        "Omega0": cosmology["Omega_m"],
        "OmegaLambda": 1.0 - cosmology["Omega_m"],
        "OmegaBaryon": cosmology["Omega_b"],
        "HubbleParam": cosmology["h"],
        **{f"Flag_{flag}": np.int32(0) for flag in flags},
    }


def _parameters(header: Header) -> dict[str, Any]:
    cosmology = header.cosmology
    return {
        "UnitLength_in_cm": MPC,
        "UnitMass_in_g": SOLAR_MASSES,
        "UnitVelocity_in_cm_per_s": KM,
        "BoxSize": header.length,
        "Omega0": cosmology["Omega_m"],
        "OmegaLambda": 1.0 - cosmology["Omega_m"],
        "OmegaBaryon": cosmology["Omega_b"],
        "HubbleParam": cosmology["h"],
        "Hubble": 100.0,
        "ComovingIntegrationOn": np.int32(1),
    }
