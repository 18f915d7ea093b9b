"""Snapshots of other codes whose particles number a lattice, read as displacements.

Nothing here imports TensorFlow, except `LatticeFiles.blocks`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flowpm_dist.cosmology.background import Background
from flowpm_dist.cosmology.parameters import HEADERS, Cosmology
from flowpm_dist.io.files import snapshot_attributes
from flowpm_dist.io.formats import DARK_MATTER
from flowpm_dist.io.numbering import Numbering, best_numbering, spreads
from flowpm_dist.io.particle_files import LAMBDA_TOLERANCE, PARAMETER_TOLERANCE, ParticleFiles
from flowpm_dist.io.particle_readers import find_particles
from flowpm_dist.io.particles import HUBBLE, SLAB
from flowpm_dist.io.snapshot import SnapshotError, check_attributes

if TYPE_CHECKING:
    from flowpm_dist.grid.box import Box

SAMPLE = 2**16
"""How many particles of each rank find the order."""


@dataclass(frozen=True)
class LatticeFiles:
    """A snapshot whose particles are of type 1 and number the sites of a lattice.

    Attributes:
        files: its particles.
        written: the attributes that flowpm-dist wrote; None if the files are another code's.
    """

    files: ParticleFiles
    written: Mapping[str, Any] | None

    @property
    def path(self) -> Path:
        """The folder or file of the snapshot."""
        return self.files.path

    @property
    def count(self) -> int:
        """The number of particles."""
        return self.files.counts[DARK_MATTER]

    def attributes(self, cosmology: Cosmology | None) -> dict[str, Any]:
        """Returns the attributes of a snapshot, see `Snapshot`.

        Args:
            cosmology: the cosmology of another code's files, which lack some of its parameters.

        Raises:
            SnapshotError: no cosmology is given where it is needed, it differs from the files', or
                the particles do not fill a lattice.
        """
        if self.written is not None:
            if cosmology is not None:
                raise SnapshotError(f"{self.path} holds its cosmology: leave cosmology out")
            check_attributes(self.path, self.written)
            return dict(self.written)
        if cosmology is None:
            raise SnapshotError(
                f"{self.path} lacks n_s and the amplitude of the power: give cosmology=..."
            )
        numbers, header = cosmology.numbers(), self.files.header
        for ours, there in self.files.cosmology_facts.items():
            theirs, here = HEADERS[ours], numbers.get(ours, 0.0)
            if ours == "Omega_b" and there == 0:  # all is cold
                continue
            if abs(there - here) > PARAMETER_TOLERANCE * max(abs(there), abs(here)):
                raise SnapshotError(
                    f"{self.path} has {theirs} = {there:g}, and the cosmology has {ours} = "
                    f"{here:g}: they must be equal"
                )
        rest = float(Background(numbers).Omega_de)
        if "OmegaLambda" in header and abs(header.number("OmegaLambda") - rest) > LAMBDA_TOLERANCE:
            raise SnapshotError(
                f"{self.path} has OmegaLambda = {header.number('OmegaLambda'):g}, and the "
                f"cosmology {rest:g}: give its Omega_k"
            )
        sides = np.array(self.files.box_size)
        grid = np.rint(sides * (self.count / np.prod(sides)) ** (1 / 3)).astype(int)
        if np.prod(grid) != self.count or (grid % 2).any() or (grid < 4).any():
            raise SnapshotError(
                f"{self.path}: {self.count} particles do not fill a lattice of cubic cells with an "
                f"even number along each side of a box of {' x '.join(f'{s:g}' for s in sides)} "
                "Mpc/h; fpm.read_particles reads particles that number none"
            )
        lattice = {"grid": grid.tolist(), "box_size": sides.tolist()}
        return {"a": self.files.a, **lattice, "cosmology": numbers}

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of positions, float32 or float64."""
        return self.files.dtype

    def _read(self, name: str, begin: int, end: int) -> np.ndarray:
        return self.files.read(DARK_MATTER, begin, end, [name])[name]

    def _ids(self, begin: int, end: int) -> np.ndarray | None:
        """Returns the ids of a range of particles, int64 [n]; None if the files have none."""
        try:
            pieces = [self._read("id", 0, 0)]
        except SnapshotError:
            return None
        pieces += [self._read("id", b, min(end, b + SLAB)) for b in range(begin, end, SLAB)]
        return np.concatenate(pieces).astype(np.int64)

    def _numbers(self, begin: int, end: int, box: Box) -> tuple[np.ndarray, Numbering]:
        """Returns numbers of a range of particles, [n], and whose sites these are. On all ranks.

        Ids number the sites; if they do not, the order in the files does. By the right one of
        `numberings` the displacements are the smallest.

        Raises:
            SnapshotError: on every rank; neither numbers the sites of a lattice.
        """
        import tensorflow as tf

        ids, world, words = self._ids(begin, end), box.mesh.world, "no ids"
        order = functools.partial(np.arange, begin, end)
        choices: dict[str, Callable[[], np.ndarray]] = {"the order of the files": order}
        if ids is not None:
            extremes = tf.constant([-ids.min(initial=2**62), ids.max(initial=-1)])
            first, last = (int(i) for i in world.allreduce(extremes, "max").numpy() * (-1, 1))
            words = f"ids from {first} to {last}"
            if first in (0, 1) and last - first == box.cells - 1:
                choices = {"ids": functools.partial(np.subtract, ids, first), **choices}
        if self.count != box.cells:
            raise SnapshotError(f"{self.path} has {self.count} particles; must have {box.cells}")
        x = self._read("position", begin, min(end, begin + SAMPLE))
        least = np.inf
        for numbers in (choice() for choice in choices.values()):
            sums = spreads(numbers[: len(x)], x, box.size, box.grid)
            total = world.allreduce(tf.constant(sums)).numpy()
            numbering, deviation = best_numbering(total, box.size, box.grid)
            if numbering is not None:
                return numbers, numbering
            least = min(least, deviation)
        raise SnapshotError(
            f"{self.path}: its particles number no lattice: it has {words} of {self.count} "
            f"particles, and by {' or '.join(choices)} displacements are {least:.3g} Mpc/h or more "
            f"(root mean square) in a box of {max(box.size):g} Mpc/h; fpm.read_particles reads "
            "particles that number none"
        )

    def blocks(self, box: Box) -> tuple[np.ndarray, np.ndarray]:
        """Returns displacement [Mpc/h] and canonical velocity [Mpc/h H0] of this rank's sites.

        Each rank reads its part of the files, and sends each particle to the rank that has its
        lattice site. All ranks call this together.

        Args:
            box: the box, with the grid of the snapshot.

        Raises:
            SnapshotError: on every rank; the particles do not number the sites of a lattice.
        """
        import tensorflow as tf

        mesh, world = box.mesh, box.mesh.world
        begin, end = (self.count * r // mesh.size for r in (mesh.rank, mesh.rank + 1))
        numbers, numbering = self._numbers(begin, end, box)
        places, side = [box.place_of(r) for r in range(mesh.size)], np.array(box.size)
        owners = np.empty(box.grid, np.int32)
        for rank, place in enumerate(places):
            owners[place] = rank
        values, filled = np.zeros([*box.block, 6]), np.zeros(box.block, bool)
        origin = np.array(box.offset)
        rounds = math.ceil(max(1, math.ceil(self.count / mesh.size)) / SLAB)
        for low in (begin + number * SLAB for number in range(rounds)):
            read = self.files.read(
                DARK_MATTER, min(low, end), min(low + SLAB, end), ["position", "velocity"]
            )
            sites = numbering.sites(numbers[low - begin : low - begin + SLAB])
            moved = read["position"] - sites * (side / box.grid)
            with np.errstate(invalid="ignore"):  # values that are not finite are refused below
                moved -= side * np.rint(moved / side)  # to the nearest image
            owner = owners[tuple(sites.T)]
            order = np.argsort(owner, kind="stable")
            canonical = read["velocity"].astype(float) * (self.files.a / HUBBLE)
            rows = np.concatenate([sites, moved, canonical], axis=1)[order]
            sent = np.bincount(owner, minlength=mesh.size) * rows.shape[1]
            arrived = world.alltoallv(tf.constant(rows.ravel()), tf.constant(sent, tf.int32))
            arrived = arrived.numpy().reshape(-1, rows.shape[1])
            place = tuple((arrived[:, :3].astype(int) - origin).T)
            values[place], filled[place] = arrived[:, 3:], True
        if not bool(world.allreduce(tf.constant(bool(filled.all())), "min")):
            raise SnapshotError(f"{self.path}: some ids are missing and others occur twice")
        self._check_finite(values, box)
        return values[..., :3], values[..., 3:]

    def _check_finite(self, values: np.ndarray, box: Box) -> None:
        """Checks positions and velocities of this rank's sites. On all ranks together.

        Args:
            values: the numbers of each site, [x, y, z, 6].
            box: the box.

        Raises:
            SnapshotError: on every rank; one is not finite on some rank.
        """
        import tensorflow as tf

        wrong = np.argwhere(~np.isfinite(values).all(axis=-1)) + np.array(box.offset)
        numbers = np.ravel_multi_index(tuple(wrong.T), box.grid).astype(np.int64)
        least = box.mesh.world.allreduce(tf.constant(numbers.min(initial=2**62)), "min").numpy()
        if least < 2**62:
            site = [int(i) for i in np.unravel_index(least, box.grid)]
            raise SnapshotError(
                f"{self.path}: position or velocity of the particle of lattice site {site} is not "
                "finite"
            )


def particle_files(path: str | Path, units: Mapping[str, Any] | None = None) -> LatticeFiles | None:
    """Returns the snapshot of particles at a path; None if there is none, or a `snapshot.zarr`.

    Args:
        path, units: see `open_particles`.

    Raises:
        SnapshotError: a file is missing, damaged, or holds other than particles of dark matter.
    """
    files = find_particles(Path(path), units)
    if files is None:
        return None
    others = [kind for kind in files.counts if kind != DARK_MATTER]
    if others:
        raise SnapshotError(
            f"{files.path} has particles of type {others[0]}; all must be type 1: "
            "fpm.read_particles reads particles of all types"
        )
    folder = files.path if files.path.is_dir() else files.path.parent
    return LatticeFiles(files, snapshot_attributes(folder))
