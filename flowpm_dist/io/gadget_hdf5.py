"""Snapshots in Gadget-4's HDF5, written by all ranks. Nothing here imports TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flowpm_dist.io.formats import DARK_MATTER, NAMES, TYPES, UNITS, header_facts, of_type
from flowpm_dist.io.particles import ID_BYTES, Header, ParticleBlock

if TYPE_CHECKING:
    import h5py

METADATA = 2**16
"""Size of all but the values of a file, at most [bytes]."""
POSITION = {"a_scaling": 1.0, "h_scaling": -1.0, "length_scaling": 1.0, "mass_scaling": 0.0,
            "velocity_scaling": 0.0, "to_cgs": UNITS["UnitLength_in_cm"]}  # fmt: skip
VELOCITY = {"a_scaling": 0.5, "h_scaling": 0.0, "length_scaling": 0.0, "mass_scaling": 0.0,
            "velocity_scaling": 1.0, "to_cgs": UNITS["UnitVelocity_in_cm_per_s"]}  # fmt: skip


def write_part(
    folder: Path, number: int, parts: int, block: ParticleBlock, header: Header
) -> np.ndarray:
    """Writes `snapshot.hdf5`, or `snapshot.0.hdf5` and so on, with the particles as type 1.

    As Gadget-4 writes them (Springel, Pakmor, Zier and Reinecke 2021, MNRAS 506, 2871,
    arXiv:2010.03567), a file for each part; the header also has the numbers that readers of
    Gadget-2's format look for.

    Coordinates in comoving Mpc/h, velocities in km/s sqrt(a) (peculiar velocity over sqrt(a)),
    masses in 1e10 Msun/h.
    """
    path = folder / ("snapshot.hdf5" if parts == 1 else f"snapshot.{number}.hdf5")
    offsets = _allocated(path, parts, block, header)
    # Without HDF5, which ends the process if the disk is full when the file is closed.
    with path.open("r+b") as file:
        for ids, positions, velocities in block.particles(header):
            slow = (velocities / np.sqrt(header.a)).astype(block.dtype, copy=False)
            for name, values in zip(NAMES, (ids, positions, slow), strict=True):
                file.seek(offsets[name])
                offsets[name] += file.write(values.tobytes())
    return np.array([block.count], np.int64)


def _allocated(path: Path, parts: int, block: ParticleBlock, header: Header) -> dict[str, int]:
    """Writes a file without its values; returns where the values of each name begin in it."""
    import h5py

    reals = 2 * block.dtype.itemsize * 3
    take_room(path, block.count * (reals + ID_BYTES))
    types = [(np.dtype(np.uint64), ()), (block.dtype, (3,)), (block.dtype, (3,))]
    offsets = {}
    flags = ("Sfr", "Cooling", "StellarAge", "Metals", "Feedback")
    facts = {
        "NumPart_ThisFile": of_type(block.count, np.uint64),
        # The whole number: a reader that adds the high word finds nothing to add.
        "NumPart_Total": of_type(header.count, np.uint64),
        "NumPart_Total_HighWord": np.zeros(TYPES, np.uint32),
        "MassTable": of_type(header.mass, np.float64),
        "Time": header.a,
        "Redshift": 1.0 / header.a - 1.0,
        "NumFilesPerSnapshot": np.int32(parts),
        **header_facts(header),
        **{f"Flag_{flag}": np.int32(0) for flag in flags},
    }
    with h5py.File(path, "w") as file:
        file.create_group("Header").attrs.update(facts)
        integration = {"Hubble": 100.0, "ComovingIntegrationOn": np.int32(1)}
        parameters = {**UNITS, **header_facts(header), **integration}
        file.create_group("Parameters").attrs.update(parameters)
        group = file.create_group(f"PartType{DARK_MATTER}")
        for name, (dtype, shape) in zip(NAMES, types, strict=True):
            offsets[name] = unfilled(group, name, dtype, (block.count, *shape))
        group["Coordinates"].attrs.update(POSITION)
        group["Velocities"].attrs.update(VELOCITY)
    return offsets


def take_room(path: Path, size: int, metadata: int = METADATA) -> None:
    """Makes a file, to fail early where there is no room for so large a one.

    Args:
        path: the file.
        size: of its values [bytes].
        metadata: size of all else, at most [bytes].
    """
    with path.open("wb") as file:
        file.write(bytes(metadata))
        file.truncate(metadata + size)


def unfilled(group: h5py.Group, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """Adds a data set without its values; returns where they begin in the file, 0 without any."""
    import h5py

    early = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    early.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    early.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    kind, space = h5py.h5t.py_create(dtype), h5py.h5s.create_simple(shape)
    made = h5py.h5d.create(group.id, name.encode(), kind, space, early)
    return int(made.get_offset() or 0)


def finish(folder: Path, parts: Sequence[np.ndarray], header: Header) -> None:
    """Writes nothing: each file is whole."""
