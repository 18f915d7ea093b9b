"""Snapshots for other codes: Gadget-4's HDF5 and bigfile.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flowpm_dist.cosmology.parameters import HEADERS
from flowpm_dist.io.particles import (
    ID_BYTES,
    Header,
    ParticleBlock,
    mark_particles_complete,
    write_error,
)

if TYPE_CHECKING:
    from flowpm_dist.grid.field import Field

UNITS = {
    "UnitLength_in_cm": 3.085678e24,
    "UnitMass_in_g": 1.989e43,
    "UnitVelocity_in_cm_per_s": 1.0e5,
}
"""Mpc, 1e10 solar masses and km/s in cgs units."""
TYPES, DARK_MATTER = 6, 1
"""The number of types of particles, and the type of ours."""
NAMES = ("ParticleIDs", "Coordinates", "Velocities")
"""The data sets of a Gadget-4 file."""
METADATA = 2**16
"""Size of all but the values of a file, at most [bytes]."""
POSITION = {"a_scaling": 1.0, "h_scaling": -1.0, "length_scaling": 1.0, "mass_scaling": 0.0,
            "velocity_scaling": 0.0, "to_cgs": UNITS["UnitLength_in_cm"]}  # fmt: skip
VELOCITY = {"a_scaling": 0.5, "h_scaling": 0.0, "length_scaling": 0.0, "mass_scaling": 0.0,
            "velocity_scaling": 1.0, "to_cgs": UNITS["UnitVelocity_in_cm_per_s"]}  # fmt: skip
LONG = 128
"""Largest size of an attribute of bigfile that `attr-v2` holds also as readable text [bytes]."""


Part = Callable[[Path, int, int, ParticleBlock, Header], np.ndarray]
"""Writes one part of a snapshot: its folder, which exists, the number of the part from 0, the
number of parts, the particles of the part and facts about the universe. Returns numbers about the
part that `Finish` needs, int64 [n]. Raises OSError if the part cannot be written."""

Finish = Callable[[Path, Sequence[np.ndarray], Header], None]
"""Writes what needs all parts: the folder, what `Part` returned for each part, and facts about the
universe. Raises OSError if it cannot be written."""


def write_gadget_part(
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
    with path.open("wb") as file:  # fails here if there is no room for so large a file
        file.write(bytes(METADATA))
        file.truncate(METADATA + block.count * (reals + ID_BYTES))
    types = [(np.dtype(np.uint64), ()), (block.dtype, (3,)), (block.dtype, (3,))]
    offsets = {}
    flags = ("Sfr", "Cooling", "StellarAge", "Metals", "Feedback")
    facts = {
        "NumPart_ThisFile": _of_type(block.count, np.uint64),
        # The whole number: a reader that adds the high word finds nothing to add.
        "NumPart_Total": _of_type(header.count, np.uint64),
        "NumPart_Total_HighWord": np.zeros(TYPES, np.uint32),
        "MassTable": _of_type(header.mass, np.float64),
        "Time": header.a,
        "Redshift": 1.0 / header.a - 1.0,
        "NumFilesPerSnapshot": np.int32(parts),
        **_cosmology(header),
        **{f"Flag_{flag}": np.int32(0) for flag in flags},
    }
    with h5py.File(path, "w") as file:
        file.create_group("Header").attrs.update(facts)
        integration = {"Hubble": 100.0, "ComovingIntegrationOn": np.int32(1)}
        parameters = {**UNITS, **_cosmology(header), **integration}
        file.create_group("Parameters").attrs.update(parameters)
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


def _cosmology(header: Header) -> dict[str, Any]:
    """Returns box size, parameters and dark energy by their names in Gadget and MP-Gadget."""
    return {
        "BoxSize": header.length,
        "OmegaLambda": header.Omega_de,
        **{theirs: header.cosmology[ours] for ours, theirs in HEADERS.items()},
    }


def write_bigfile_part(
    folder: Path, number: int, parts: int, block: ParticleBlock, header: Header
) -> np.ndarray:
    """Writes blocks `1/Position`, `1/Velocity` and `1/ID`, and attributes of `Header` and of `1`.

    As FastPM writes them, and nbodykit and MP-Gadget read them (Feng and others 2016, MNRAS 463,
    2273, arXiv:1603.00476). A block is a folder: `header` has the dtype and the size of each data
    file, `attr-v2` attributes, `000000` and so on the values. The package `bigfile` is not used: it
    lets several processes write one block under MPI alone, and is compiled at each installation.

    Positions in comoving Mpc/h, velocities peculiar in km/s, masses in 1e10 Msun/h.
    """
    paths = [folder / str(DARK_MATTER) / name for name in ("Position", "Velocity", "ID")]
    sums = [0] * len(paths)
    for path in paths:
        path.mkdir(parents=True, exist_ok=True)
    files = [(path / f"{number:06X}").open("wb") for path in paths]
    try:
        for ids, positions, velocities in block.particles(header):
            values = positions, velocities, ids.astype("<i8")
            for at, (file, value) in enumerate(zip(files, values, strict=True)):
                written = value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()
                file.write(written)
                sums[at] += int(np.frombuffer(written, np.uint8).sum(dtype=np.int64))
    finally:
        for file in files:
            file.close()
    return np.array([block.count, block.dtype.itemsize, *(s % 2**32 for s in sums)], np.int64)


def finish_bigfile(folder: Path, parts: Sequence[np.ndarray], header: Header) -> None:
    """Writes the files that describe the blocks, and the attributes of dark matter and universe."""
    real = f"<f{int(parts[0][1])}"
    blocks = [("Position", real, 3), ("Velocity", real, 3), ("ID", "<i8", 1)]
    for at, (name, dtype, members) in enumerate(blocks):
        files = [(int(part[0]), int(part[2 + at])) for part in parts]
        _write_block(folder / str(DARK_MATTER) / name, dtype, members, files)
    nx, ny, nz = header.grid
    species = {
        "q.strides": np.array([ny * nz, nz, 1], np.int64),
        "q.scale": np.array(header.box_size) / header.grid,
        "q.shift": np.zeros(3),
        "q.size": np.int64(header.count),
        "a.x": header.a,
        "a.v": header.a,
        "M0": header.mass,
    }
    universe = {
        "NC": np.array(nx if nx == ny == nz else header.grid, np.int64),
        "ScalingFactor": header.a,
        "OmegaM": header.cosmology["Omega_m"],
        "Omega_cdm": header.cosmology["Omega_m"],
        "TotNumPart": _of_type(header.count, np.int64),
        "MassTable": _of_type(header.mass, np.float64),
        "Time": header.a,
        "UsePeculiarVelocity": np.int32(1),
        **_cosmology(header),
        **UNITS,
    }
    _write_block(folder / str(DARK_MATTER), "<i8", 0, [], species)
    _write_block(folder / "Header", "<i8", 0, [], universe)


def _write_block(
    path: Path,
    dtype: str,
    members: int,
    files: Sequence[tuple[int, int]],
    attributes: Mapping[str, Any] | None = None,
) -> None:
    """Writes the files of a block's folder that describe its data files.

    Args:
        path: the folder.
        dtype: the values' dtype.
        members: number of values of an item.
        files: number of items of each data file, and the sum of its bytes.
        attributes: the block's attributes by name.
    """
    path.mkdir(parents=True, exist_ok=True)
    lines = [f"DTYPE: {dtype}", f"NMEMB: {members}", f"NFILE: {len(files)}"]
    for number, (count, total) in enumerate(files):
        folded = (total & 0xFFFF) + (total >> 16)
        folded = (folded & 0xFFFF) + (folded >> 16)  # the checksum of System V's `sum`
        lines.append(f"{number:06X}: {count} : {total} : {folded}")
    (path / "header").write_text("\n".join(lines) + "\n")
    texts = [_attribute(name, value) for name, value in (attributes or {}).items()]
    (path / "attr-v2").write_text("".join(f"{text}\n" for text in sorted(texts)))


def _attribute(name: str, value: Any) -> str:
    """Returns the line of an attribute: name, dtype, number of values, their bytes, their text."""
    values = np.atleast_1d(np.asarray(value))
    values = values.astype(values.dtype.newbyteorder("<"))
    text = " ".join(f"{x:g}" if values.dtype.kind == "f" else str(x) for x in values)
    text = text if values.nbytes <= LONG else "... (Too Long) "
    hexadecimal = values.tobytes().hex().upper()
    return f"{name} {values.dtype.str} {len(values)} {hexadecimal} #HUMANE [ {text} ]"


def _of_type(value: float, dtype: type) -> np.ndarray:
    """Returns an array over the types of particles: `value` for ours, 0 for the others."""
    return np.where(np.arange(TYPES) == DARK_MATTER, value, 0).astype(dtype)


PARTICLE_FORMATS: dict[str, tuple[Part, Finish | None]] = {
    "gadget-hdf5": (write_gadget_part, None),
    "bigfile": (write_bigfile_part, finish_bigfile),
}
"""Formats that hold particles only, by name."""


def write_particles(
    path: Path, fields: Mapping[str, Field], attributes: Mapping[str, Any], format: str
) -> None:
    """Writes a snapshot of particles: each rank writes a part, and all ranks call it together.

    Args:
        path: the folder to make.
        fields: displacement and velocity.
        attributes: the snapshot's attributes.
        format: see `PARTICLE_FORMATS`.

    Raises:
        WriteError: this rank cannot write. Only this rank raises it, and the job must end.
    """
    displacement, velocity = fields["displacement"], fields["velocity"]
    box, (write_part, finish) = displacement.box, PARTICLE_FORMATS[format]
    header = Header.of(attributes)
    mesh, x, v = box.mesh, np.asarray(displacement.block), np.asarray(velocity.block)
    block = ParticleBlock(x, v, box.offset, 0, box.block[0], path)
    try:
        if mesh.rank == 0:
            path.mkdir(parents=True)
        mesh.barrier()
        parts = mesh.gather_to_root(write_part(path, mesh.rank, mesh.size, block, header))
        if parts is not None:
            if finish is not None:
                finish(path, parts, header)
            mark_particles_complete(path, attributes)
    except OSError as error:
        raise write_error(path, error) from error
