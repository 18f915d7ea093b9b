"""Particles of snapshots of any code, anywhere in the box: read in pieces, and their density."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.background import Background
from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.grid.box import Box
from flowpm_dist.grid.field import Field
from flowpm_dist.grid.options import Scheme
from flowpm_dist.io.particle_files import NoQuantityError, ParticleFiles, parameters_of
from flowpm_dist.io.particle_readers import open_particles
from flowpm_dist.io.particles import HUBBLE, SLAB
from flowpm_dist.io.snapshot import SnapshotError
from flowpm_dist.options import in_unit
from flowpm_dist.particle_mesh.positions import axis_number
from flowpm_dist.particle_mesh.scattered import Painting
from meshimpl.process_mesh import MeshShape, ProcessMesh

Quantity = Literal["position", "velocity", "mass", "id"]
Axis = Literal["x", "y", "z"]
LARGEST = 15000.0
"""A longer side [Mpc/h] is a mistake of units."""
FAR = 1e3
"""Positions further away than this, in sides of the box, are no positions in it."""


def read_particles(
    path: str | Path,
    *,
    mesh: MeshShape | ProcessMesh = "",
    types: int | Sequence[int] | None = None,
    units: Mapping[str, Any] | None = None,
    cosmology: Cosmology | None = None,
) -> ParticleSnapshot:
    """Returns the particles of a snapshot of Gadget, AREPO, SWIFT, MP-Gadget, FastPM and the like.

    Files are opened and checked; positions are read when they are asked for. Particles need not
    number a lattice: for those that do, `State.from_snapshot` makes a state.

    Args:
        path: a file, or the folder of several files; see `docs/howto/snapshots.md` for formats.
        mesh: the ranks, such as "row:2,col:2". Each reads its part of each type of particles.
        types: numbers of the types of particles: 0 gas, 1 dark matter, 4 stars, 5 black holes; all
            if None.
        units: units of files that lack them, such as {"UnitLength_in_cm": 3.085678e21} for kpc/h.
        cosmology: for redshift space, where the files do not have Omega_m.

    Raises:
        SnapshotError: there is no such snapshot, it lacks particles of a type or a unit, or is
            damaged.
    """
    ranks = mesh if isinstance(mesh, ProcessMesh) else ProcessMesh(mesh)
    files = open_particles(path, units)
    chosen = tuple(files.counts) if types is None else _whole_numbers(types)
    files.check_types(chosen)
    ranks.check_equal("particles", path=files.path, counts=files.counts, types=chosen)
    numbers = parameters_of(files) if cosmology is None else cosmology.numbers()
    return ParticleSnapshot(files, ranks, chosen, numbers)


def _whole_numbers(types: int | Sequence[int]) -> tuple[int, ...]:
    """Returns the numbers of types.

    Raises:
        ValueError: there are none, one is no whole number, or is given twice.
    """
    chosen = np.atleast_1d(types)
    if not chosen.size or chosen.dtype.kind not in "iu" or len({*chosen.tolist()}) < chosen.size:
        raise ValueError(f"types {types!r}: must be different whole numbers")
    return tuple(chosen.tolist())


@dataclass(frozen=True, eq=False, repr=False)
class ParticleSnapshot:
    """Particles in the files of a snapshot, which each rank reads a part of.

    Attributes:
        files: the files.
        mesh: the ranks.
        types: numbers of the types of particles.
        numbers: parameters of the cosmology by name, those that are known.
    """

    files: ParticleFiles
    mesh: ProcessMesh
    types: tuple[int, ...]
    numbers: Mapping[str, Any]

    def __post_init__(self) -> None:
        longest = max(self.box_size)
        if longest > LARGEST and self.mesh.rank == 0:
            warnings.warn(
                f"{self.files.path} has a box of {longest:g} Mpc/h, which is larger than what can "
                "be observed: are its lengths in kpc/h?",
                stacklevel=3,
            )

    def __repr__(self) -> str:
        kinds = ", ".join(f"{self.files.counts[kind]:,} of type {kind}" for kind in self.types)
        sides = " x ".join(f"{side:g}" for side in self.box_size)
        return f"<particles at a = {self.a:.6g} in {sides} Mpc/h: {kinds}>"

    def __len__(self) -> int:
        """The number of particles on all ranks."""
        return sum(self.files.counts[kind] for kind in self.types)

    @property
    def a(self) -> float:
        """Scale factor."""
        return self.files.a

    @property
    def box_size(self) -> tuple[float, float, float]:
        """The sides of the box [Mpc/h]."""
        return self.files.box_size

    def _ours(self, kind: int) -> tuple[int, int]:
        """Returns where this rank's particles of a type begin and end."""
        count, rank, ranks = self.files.counts[kind], self.mesh.rank, self.mesh.size
        return count * rank // ranks, count * (rank + 1) // ranks

    def pieces(self, *names: Quantity) -> Iterator[dict[str, np.ndarray]]:
        """Yields this rank's particles in pieces of at most 2^19, as many pieces on each rank.

        On all ranks together: a file that one rank cannot read ends the loop on all.

        Args:
            names: "position" comoving [Mpc/h] [n, 3], "velocity" peculiar [km/s] [n, 3], "mass"
                [1e10 Msun/h] [n], "id" uint64 [n]. A piece can be empty.

        Raises:
            SnapshotError: on every rank; the files lack a quantity, or a part of them cannot be
                read.
        """
        for kind in self.types:
            begin, end = self._ours(kind)
            largest = math.ceil(self.files.counts[kind] / self.mesh.size)
            for number in range(math.ceil(largest / SLAB)):
                low, high = (min(begin + (number + n) * SLAB, end) for n in (0, 1))
                yield self._read(kind, low, high, names)

    def _read(self, kind: int, low: int, high: int, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Returns a piece; an error of one rank is raised on all of them."""
        piece: dict[str, np.ndarray] = {}
        problem = ""
        try:
            piece = self.files.read(kind, low, high, names)
            for name, values in piece.items():
                if name != "id" and (problem := self._wrong(name, values, kind, low)):
                    break
        except SnapshotError as error:
            problem = str(error)
        self.mesh.raise_together(problem, SnapshotError)
        return piece

    def _wrong(self, name: str, values: np.ndarray, kind: int, low: int) -> str:
        """Returns what is wrong with values that were read, or an empty text."""
        right = np.isfinite(values)
        if name == "position":
            right &= np.abs(values) < FAR * max(self.box_size)
        if right.all():
            return ""
        place = np.argwhere(~right)[0]
        return (
            f"{self.files.path}: {name} of particle {low + int(place[0])} of type {kind} is "
            f"{values[*place]}: must be finite, and in the box"
        )

    def read(self, *names: Quantity) -> dict[str, np.ndarray]:
        """Returns quantities of all of this rank's particles, see `pieces`. On all ranks together.

        All of them must fit into memory; `density` needs no more than a piece at a time.
        """
        pieces = list(self.pieces(*names))
        return {name: np.concatenate([piece[name] for piece in pieces]) for name in names}

    def density(
        self,
        grid: int | tuple[int, int, int] | Box,
        *,
        weights: Literal["mass", "number"] = "mass",
        redshift_space: Axis | None = None,
        scheme: Scheme = "cic",
        shift: float = 0.0,
    ) -> Field:
        """Returns the density of the particles, mean 1. On all ranks together.

        The field knows its window, which spectra divide out. There is no gradient.

        Args:
            grid: cells along each side, or along x, y and z; or the box with the mesh.
            weights: whether particles count by their mass or by their number.
            redshift_space: the line of sight, along which peculiar velocities move the particles.
            scheme, shift: see `flowpm_dist.paint`.

        Raises:
            SnapshotError: the files lack velocities or Omega_m for redshift space, or cannot be
                read.
            ValueError: an unknown scheme or axis, or a grid that the ranks do not divide.
        """
        (field,) = self.densities(
            grid, [in_unit("shift", shift)], weights=weights, redshift_space=redshift_space,
            scheme=scheme,
        )  # fmt: skip
        return field

    def densities(
        self,
        grid: int | tuple[int, int, int] | Box,
        shifts: Sequence[float] = (0.0, 0.5),
        *,
        weights: Literal["mass", "number"] = "mass",
        redshift_space: Axis | None = None,
        scheme: Scheme = "cic",
    ) -> list[Field]:
        """Returns a density for each shift, for which the files are read once; see `density`."""
        if weights not in ("mass", "number"):
            raise ValueError(f"weights {weights!r}: must be 'mass' or 'number'")
        grid, shifts = in_unit("grid", grid), in_unit("shifts", shifts)
        if not isinstance(grid, Box):
            x, y, z = np.broadcast_to(grid, 3).tolist()
            grid = Box((x, y, z), self.box_size, self.mesh, tf.float64)
        paintings = [Painting(grid, scheme, shift) for shift in shifts]
        along = None if redshift_space is None else axis_number(redshift_space)
        names: list[Quantity] = ["position"]
        names += ["velocity"] if along is not None else []
        names += ["mass"] if weights == "mass" and self._has_masses else []
        for piece in self._weighed.pieces(*names):
            positions = piece["position"].astype(np.float64)
            if along is not None:
                positions[:, along] += piece["velocity"][:, along] / self._rate
            for painting in paintings:
                painting.add(positions, piece.get("mass"))
        return [painting.density() for painting in paintings]

    @functools.cached_property
    def _weighed(self) -> ParticleSnapshot:
        """The same particles with masses in any unit, where the files lack it."""
        try:
            self.files.factor("mass")
        except SnapshotError:
            factor = self.files.factor
            plain = replace(self.files, factor=lambda x: 1.0 if x == "mass" else factor(x))
            return replace(self, files=plain)
        return self

    @functools.cached_property
    def _has_masses(self) -> bool:
        """Whether masses are needed, and there: particles of one type without any count as one."""
        if len(self.types) > 1:
            return True
        try:
            self._weighed.files.read(self.types[0], 0, 1, ["mass"])
        except NoQuantityError:
            return False
        return True

    def check_redshift_space(self) -> None:
        """Checks that there is what redshift space needs, before positions are read.

        Raises:
            SnapshotError: Omega_m or the unit of velocities is missing.
        """
        self.files.factor("velocity")
        assert self._rate > 0

    @functools.cached_property
    def _rate(self) -> float:
        """a H: the peculiar velocity over the comoving distance that it seems to be [km/s h/Mpc].

        Raises:
            SnapshotError: Omega_m is not known.
        """
        if not self.numbers.get("Omega_m"):
            raise SnapshotError(
                f"{self.files.path} has no Omega_m, which redshift space needs: give "
                "read_particles(..., cosmology=...)"
            )
        return HUBBLE * self.a * float(Background(self.numbers).e(self.a))

    def shot_noise(self, weights: Literal["mass", "number"] = "mass") -> float:
        """Returns the power of particles that are placed at random [(Mpc/h)^3].

        V sum m^2 / (sum m)^2, which is V / N for equal masses. On all ranks together.
        """
        if weights == "number" or not self._has_masses:
            return math.prod(self.box_size) / len(self)
        sums = np.zeros(2)
        for piece in self._weighed.pieces("mass"):
            mass = piece["mass"].astype(np.float64)
            sums += mass.sum(), (mass**2).sum()
        first, second = self.mesh.world.allreduce(tf.constant(sums)).numpy()
        return float(math.prod(self.box_size) * second / first**2)
