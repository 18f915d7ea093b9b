"""Particles as other codes read them: wrapped positions, peculiar velocities and numbers.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowpm_dist.cosmology.background import Background
from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.io.files import ABOUT, GENERATOR, UnreadableError, WriteError, reading, write_json
from flowpm_dist.io.opening import not_finite

HUBBLE = 100.0
"""H0 [km/s / (Mpc/h)]; times a velocity in Mpc/h H0 it is one in km/s."""
CRITICAL_DENSITY = 27.7549975
"""Critical density today [1e10 Msun/h / (Mpc/h)^3], from the units that exported files declare and
the constant of gravity of Gadget-4, 6.672e-8 in cgs units."""
ID_BYTES = 8
"""Size of the number of a particle [bytes]."""
SLAB = 2**19
"""Approximate number of particles that are converted at once."""


ParticleSlab = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Ids, uint64 [n], (ix ny + iy) nz + iz of the lattice site; comoving positions, from 0 to below
the box size [Mpc/h], [n, 3]; peculiar velocities a dx/dt [km/s], [n, 3]."""


@dataclass(frozen=True)
class Header:
    """Facts about the universe that files of particles contain.

    Attributes:
        a: scale factor.
        grid: particles along each side.
        box_size: [Mpc/h].
        cosmology: parameters by name.
        Omega_de: dark energy today over the critical density.
    """

    a: float
    grid: tuple[int, int, int]
    box_size: tuple[float, float, float]
    cosmology: Mapping[str, float]
    Omega_de: float

    @classmethod
    def of(cls, attributes: Mapping[str, Any]) -> Header:
        """Returns the header from the attributes of a snapshot."""
        (nx, ny, nz), (lx, ly, lz) = attributes["grid"], attributes["box_size"]
        a, numbers = float(attributes["a"]), Cosmology(**attributes["cosmology"]).numbers()
        rest = attributes.get("Omega_de", Background(numbers).Omega_de)  # of a theory of its own
        return cls(a, (nx, ny, nz), (lx, ly, lz), numbers, float(rest))

    @property
    def count(self) -> int:
        """The number of particles."""
        return math.prod(self.grid)

    @property
    def Omega_cb(self) -> float:
        """Cold dark matter and baryons today over the critical density [1]."""
        return float(Background(self.cosmology).Omega_cb)

    @property
    def mass(self) -> float:
        """The mass of a particle of cold dark matter and baryons [1e10 Msun/h]."""
        density = self.Omega_cb * CRITICAL_DENSITY
        return density * math.prod(self.box_size) / self.count

    @property
    def spacing(self) -> float:
        """The mean distance of particles, (V / N)^(1/3) [Mpc/h]."""
        return float(math.prod(self.box_size) / self.count) ** (1 / 3)

    @property
    def matter_density(self) -> float:
        """The comoving density of all matter [Msun/h / (Mpc/h)^3]."""
        return float(self.cosmology["Omega_m"]) * CRITICAL_DENSITY * 1e10

    @property
    def length(self) -> Any:
        """The box size [Mpc/h]: one number for a cube, otherwise three."""
        return self.box_size[0] if len(set(self.box_size)) == 1 else np.array(self.box_size)


@dataclass(frozen=True)
class ParticleBlock:
    """The particles of a block of the lattice, which are read slab by slab.

    Attributes:
        displacement: array [nx, ny, nz, 3] of numpy or zarr [Mpc/h].
        velocity: likewise, canonical [Mpc/h H0].
        origin: lattice site of the first value of the arrays.
        begin, end: the rows of the arrays along x that belong to the block.
        path: the snapshot, for messages.
    """

    displacement: Any
    velocity: Any
    origin: tuple[int, int, int]
    begin: int
    end: int
    path: Path = Path()

    @property
    def count(self) -> int:
        """The number of particles."""
        return (self.end - self.begin) * math.prod(self.displacement.shape[1:3])

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of positions and velocities."""
        return np.dtype(self.displacement.dtype)

    def particles(self, header: Header) -> Iterator[ParticleSlab]:
        """Yields all particles of the block, in the order of their ids within a slab.

        Raises:
            UnreadableError: the arrays cannot be read, or a value is not finite.
        """
        rows = max(1, SLAB // math.prod(self.displacement.shape[1:3]))
        chunks = getattr(self.displacement, "chunks", None)
        if chunks:  # zarr's; each is decompressed once
            rows = max(chunks[0], rows // chunks[0] * chunks[0])
        first = self.begin
        while first < self.end:
            last = min(self.end, (first // rows + 1) * rows)
            with reading(self.path, "the snapshot is damaged"):
                displacement = np.asarray(self.displacement[first:last])
                velocity = np.asarray(self.velocity[first:last], dtype=np.float64)
            begins = (self.origin[0] + first, *self.origin[1:])
            for name, values in (("displacement", displacement), ("velocity", velocity)):
                if (wrong := not_finite(values)) is not None:
                    *site, axis = wrong
                    place = [b + i for b, i in zip(begins, site, strict=True)]
                    raise UnreadableError(
                        f"{self.path}: {name} of the particle of site {place} is "
                        f"{values[*wrong]} along {'xyz'[axis]}: all values must be finite"
                    )
            sites = np.meshgrid(
                *(np.arange(b, b + n) for b, n in zip(begins, displacement.shape, strict=False)),
                indexing="ij",
            )
            size = np.array(header.box_size)
            lattice = np.stack(sites, axis=-1) * (size / header.grid)
            positions = np.mod(lattice + displacement, size).astype(self.dtype).reshape(-1, 3)
            positions[positions >= size] = 0.0  # rounded to the far face
            peculiar = (HUBBLE / header.a * velocity).astype(self.dtype)
            ids = np.ravel_multi_index(tuple(s.ravel() for s in sites), header.grid)
            yield ids.astype(np.uint64), positions, peculiar.reshape(-1, 3)
            first = last


def mark_particles_complete(folder: Path, attributes: Mapping[str, Any]) -> None:
    """Writes the attributes of a snapshot into its folder, which marks it as complete.

    Raises:
        WriteError: they cannot be written.
    """
    about = {**attributes, "generator": GENERATOR, "complete": True}
    write_json(folder / ABOUT, about)


def write_error(path: Path, error: OSError) -> WriteError:
    """Returns the error of a file of particles, with the system's words for its cause."""
    if error.errno:
        return WriteError.of(path, OSError(error.errno, os.strerror(error.errno)))
    return WriteError.of(path, error)
