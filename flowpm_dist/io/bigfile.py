"""Snapshots in bigfile, written by all ranks. Nothing here imports TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from flowpm_dist.io.formats import DARK_MATTER, UNITS, header_facts, of_type
from flowpm_dist.io.particles import Header, ParticleBlock

LONG = 128
"""Largest size of an attribute that `attr-v2` holds also as readable text [bytes]."""


def write_part(
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
                sums[at] += write_values(file, value)
    finally:
        for file in files:
            file.close()
    return np.array([block.count, block.dtype.itemsize, *(s % 2**32 for s in sums)], np.int64)


def write_values(file: BinaryIO, values: np.ndarray) -> int:
    """Writes values to a data file; returns the sum of their bytes."""
    written = values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()
    file.write(written)
    return int(np.frombuffer(written, np.uint8).sum(dtype=np.int64))


def finish(folder: Path, parts: Sequence[np.ndarray], header: Header) -> None:
    """Writes the files that describe the blocks, and the attributes of dark matter and universe."""
    real = f"<f{int(parts[0][1])}"
    blocks = [("Position", real, 3), ("Velocity", real, 3), ("ID", "<i8", 1)]
    for at, (name, dtype, members) in enumerate(blocks):
        files = [(int(part[0]), int(part[2 + at])) for part in parts]
        write_block(folder / str(DARK_MATTER) / name, dtype, members, files)
    _, ny, nz = header.grid
    species = {
        "q.strides": np.array([ny * nz, nz, 1], np.int64),
        "q.scale": np.array(header.box_size) / header.grid,
        "q.shift": np.zeros(3),
        "q.size": np.int64(header.count),
        "a.x": header.a,
        "a.v": header.a,
        "M0": header.mass,
    }
    write_block(folder / str(DARK_MATTER), "<i8", 0, [], species)
    write_universe(folder, header)


def write_universe(folder: Path, header: Header) -> None:
    """Writes the attributes of the universe, as those of the block `Header`."""
    nx, ny, nz = header.grid
    universe = {
        "NC": np.array(nx if nx == ny == nz else header.grid, np.int64),
        "ScalingFactor": header.a,
        "OmegaM": header.cosmology["Omega_m"],
        "Omega_cdm": header.Omega_cb,
        "TotNumPart": of_type(header.count, np.int64),
        "MassTable": of_type(header.mass, np.float64),
        "Time": header.a,
        "UsePeculiarVelocity": np.int32(1),
        # MP-Gadget: whether radiation is part of the sum of densities that is 1 in a flat universe
        "class_radiation_convention": np.int32(header.cosmology["radiation"]),
        **header_facts(header),
        **UNITS,
    }
    write_block(folder / "Header", "<i8", 0, [], universe)


def write_block(
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
