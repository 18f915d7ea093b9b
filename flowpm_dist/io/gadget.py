"""Snapshots as Gadget-4 writes them in HDF5, a file for each part.

Springel, Pakmor, Zier and Reinecke 2021, MNRAS 506, 2871 (arXiv:2010.03567); the header also has
the numbers that readers of Gadget-2's format look for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from flowpm_dist.io.particles import (
    ID_BYTES,
    KM,
    MPC,
    SOLAR_MASSES,
    Header,
    ParticleBlock,
    ParticleFormat,
)

TYPES = 6
DARK_MATTER = 1
"""Of the types of particles, ours."""
NAMES = ("ParticleIDs", "Coordinates", "Velocities")
METADATA = 2**16
"""Size of all but the values of a file, at most [bytes]."""
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
        self, folder: Path, number: int, parts: int, block: ParticleBlock, header: Header
    ) -> np.ndarray:
        """See `ParticleFormat.write_part`."""
        path = folder / file_name(number, parts)
        offsets = _allocated(path, parts, block, header)
        # Not by HDF5: where a disk is full it ends the process when the file is closed.
        with path.open("r+b") as file:
            for some in block.particles(header):
                slow = (some.velocities / np.sqrt(header.a)).astype(block.dtype, copy=False)
                for name, values in zip(NAMES, (some.ids, some.positions, slow), strict=True):
                    file.seek(offsets[name])
                    offsets[name] += file.write(values.tobytes())
        return np.array([block.count], np.int64)

    def finish(self, folder: Path, found: Sequence[np.ndarray], header: Header) -> None:
        """See `ParticleFormat.finish`: nothing is left to write."""


def _allocated(path: Path, parts: int, block: ParticleBlock, header: Header) -> dict[str, int]:
    """Write a file whose values are still to come; returns where in it those of each name begin."""
    import h5py

    reals = 2 * block.dtype.itemsize * 3
    with path.open("wb") as file:  # is there room, and may a file be as large?
        file.write(bytes(METADATA))
        file.truncate(METADATA + block.count * (reals + ID_BYTES))
    types = [(np.dtype(np.uint64), ()), (block.dtype, (3,)), (block.dtype, (3,))]
    offsets = {}
    with h5py.File(path, "w") as file:
        file.create_group("Header").attrs.update(_header(block.count, parts, header))
        file.create_group("Parameters").attrs.update(_parameters(header))
        group = file.create_group(f"PartType{DARK_MATTER}")
        early = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        early.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        early.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        for name, (dtype, shape) in zip(NAMES, types, strict=True):
            kind, space = h5py.h5t.py_create(dtype), h5py.h5s.create_simple((block.count, *shape))
            made = h5py.h5d.create(group.id, name.encode(), kind, space, early)
            offsets[name] = made.get_offset()
        group["Coordinates"].attrs.update(POSITION)
        group["Velocities"].attrs.update(VELOCITY)
    return offsets


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
