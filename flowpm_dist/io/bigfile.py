"""Snapshots in bigfile's format, as FastPM writes them and nbodykit and MP-Gadget read them.

A block is a folder: `header` has the dtype and the size of each data file, `attr-v2` attributes,
`000000` and so on the values. Written by that definition, since the package `bigfile` can let
several processes write one block under MPI alone, and is compiled at each installation.
Feng and others 2016, MNRAS 463, 2273 (arXiv:1603.00476).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from flowpm_dist.io.particles import KM, MPC, SOLAR_MASSES, Header, ParticleBlock, ParticleFormat

SPECIES = "1"
"""Dark matter among the types of particles."""
LONG = 128
"""Bytes of an attribute up to which it stands in `attr-v2` also as people read it."""


class BigFile(ParticleFormat):
    """Blocks `1/Position`, `1/Velocity` and `1/ID`, and attributes of `Header` and of `1`.

    Positions in comoving Mpc/h, velocities peculiar in km/s, masses in 1e10 Msun/h.
    """

    name: ClassVar[str] = "bigfile"

    def write_part(
        self, folder: Path, number: int, parts: int, block: ParticleBlock, header: Header
    ) -> np.ndarray:
        """See `ParticleFormat.write_part`."""
        paths = [folder / SPECIES / name for name in ("Position", "Velocity", "ID")]
        sums = [0] * len(paths)
        for path in paths:
            path.mkdir(parents=True, exist_ok=True)
        files = [(path / f"{number:06X}").open("wb") for path in paths]
        try:
            for some in block.particles(header):
                values = some.positions, some.velocities, some.ids.astype("<i8")
                for at, (file, value) in enumerate(zip(files, values, strict=True)):
                    written = value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()
                    file.write(written)
                    sums[at] += int(np.frombuffer(written, np.uint8).sum(dtype=np.int64))
        finally:
            for file in files:
                file.close()
        return np.array([block.count, block.dtype.itemsize, *(s % 2**32 for s in sums)], np.int64)

    def finish(self, folder: Path, found: Sequence[np.ndarray], header: Header) -> None:
        """See `ParticleFormat.finish`."""
        real = f"<f{int(found[0][1])}"
        for at, (name, dtype, members) in enumerate(
            [("Position", real, 3), ("Velocity", real, 3), ("ID", "<i8", 1)]
        ):
            files = [(int(part[0]), int(part[2 + at])) for part in found]
            _write_block(folder / SPECIES / name, dtype, members, files)
        _write_block(folder / SPECIES, "<i8", 0, [], _of_species(header))
        _write_block(folder / "Header", "<i8", 0, [], _of_universe(header))


def _write_block(
    path: Path,
    dtype: str,
    members: int,
    files: Sequence[tuple[int, int]],
    attributes: Mapping[str, Any] | None = None,
) -> None:
    """Write what a block's folder has beside its data files.

    Args:
        path: of the folder.
        dtype: of the values.
        members: values of an item.
        files: items of each data file, and the sum of its bytes.
        attributes: by name.
    """
    path.mkdir(parents=True, exist_ok=True)
    lines = [f"DTYPE: {dtype}", f"NMEMB: {members}", f"NFILE: {len(files)}"]
    for number, (count, total) in enumerate(files):
        lines.append(f"{number:06X}: {count} : {total} : {_folded(total)}")
    (path / "header").write_text("\n".join(lines) + "\n")
    texts = [_attribute(name, value) for name, value in (attributes or {}).items()]
    (path / "attr-v2").write_text("".join(f"{text}\n" for text in sorted(texts)))


def _folded(total: int) -> int:
    """Returns the checksum of System V's `sum` from the sum of all bytes."""
    folded = (total & 0xFFFF) + (total >> 16)
    return (folded & 0xFFFF) + (folded >> 16)


def _attribute(name: str, value: Any) -> str:
    """Returns the line of an attribute: name, dtype, number of values, their bytes, their text."""
    values = np.atleast_1d(np.asarray(value))
    values = values.astype(values.dtype.newbyteorder("<"))
    told = " ".join(f"{x:g}" if values.dtype.kind == "f" else str(x) for x in values)
    told = told if values.nbytes <= LONG else "... (Too Long) "
    hexadecimal = values.tobytes().hex().upper()
    return f"{name} {values.dtype.str} {len(values)} {hexadecimal} #HUMANE [ {told} ]"


def _of_species(header: Header) -> dict[str, Any]:
    """Returns the attributes of dark matter: how ids count the lattice, times, mass."""
    _, ny, nz = header.grid
    return {
        "q.strides": np.array([ny * nz, nz, 1], np.int64),
        "q.scale": np.array(header.box_size) / header.grid,
        "q.shift": np.zeros(3),
        "q.size": np.int64(header.count),
        "a.x": header.a,
        "a.v": header.a,
        "M0": header.mass,
    }


def _of_universe(header: Header) -> dict[str, Any]:
    def of_type(value: float, dtype: type) -> np.ndarray:
        return np.where(np.arange(6) == int(SPECIES), value, 0).astype(dtype)

    cosmology, cube = header.cosmology, len(set(header.grid)) == 1
    return {
        "NC": np.array(header.grid[0] if cube else header.grid, np.int64),
        "BoxSize": header.length,
        "ScalingFactor": header.a,
        "OmegaM": cosmology["Omega_m"],
        "Omega_cdm": cosmology["Omega_m"],
        "OmegaLambda": 1.0 - cosmology["Omega_m"],
        "HubbleParam": cosmology["h"],
        # Names of MP-Gadget.
        "Omega0": cosmology["Omega_m"],
        "OmegaBaryon": cosmology["Omega_b"],
        "TotNumPart": of_type(header.count, np.int64),
        "MassTable": of_type(header.mass, np.float64),
        "Time": header.a,
        "UsePeculiarVelocity": np.int32(1),
        "UnitLength_in_cm": MPC,
        "UnitMass_in_g": SOLAR_MASSES,
        "UnitVelocity_in_cm_per_s": KM,
    }
