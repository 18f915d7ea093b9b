"""Particles of snapshots of other codes: Gadget-4's HDF5 and bigfile, read back to a lattice.

Nothing here imports TensorFlow, except `ParticleFiles.blocks`.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flowpm_dist.cosmology.background import Background
from flowpm_dist.cosmology.parameters import HEADERS, Cosmology
from flowpm_dist.io.files import SNAPSHOT, UnreadableError, reading, snapshot_attributes
from flowpm_dist.io.formats import DARK_MATTER, NAMES, UNITS
from flowpm_dist.io.opening import check_numbers, number_type, open_hdf5
from flowpm_dist.io.particle_formats import particle_folders
from flowpm_dist.io.particles import HUBBLE, SLAB, ParticleSlab
from flowpm_dist.io.snapshot import SnapshotError, check_attributes
from flowpm_dist.options import in_unit
from flowpm_dist.options.regular_files import check_regular, read_text

if TYPE_CHECKING:
    from flowpm_dist.grid.box import Box

PARAMETER_TOLERANCE = 1e-4
"""Relative difference up to which parameters of a file and of a cosmology are the same."""
LAMBDA_TOLERANCE = 0.005
"""Difference of OmegaLambda that radiation and neutrinos, which are left out, may explain."""
UNORDERED = 0.2
"""If the root mean square displacement is above this part of the box, the ids do not number the
lattice in the expected order. A random order gives 0.29."""
UNITS_GIVEN = ("UnitLength_in_cm", "UnitVelocity_in_cm_per_s")
"""Units that files of some codes leave out."""
BLOCKS = ("ID", "Position", "Velocity")
"""The blocks of bigfile, in the order of `NAMES`."""
TYPES = (("iu", 1), ("f", 3), ("f", 3))
"""Kinds of the values in these blocks, and the number of values of a particle."""


@dataclass(frozen=True)
class ParticleFiles:
    """A snapshot of particles, which are read piece by piece.

    Attributes:
        path: its folder or file.
        header: attributes by the names of Gadget-4 and MP-Gadget.
        parts: for each file, the number of its particles, and a function that reads the ids, the
            comoving positions and the velocities of some of them, by begin and end, in the file's
            units.
        to_peculiar: what velocities are multiplied by to be peculiar, in the units of the files.
        written: the attributes that flowpm-dist wrote; None if the files are another code's.
    """

    path: Path
    header: Mapping[str, Any]
    parts: Sequence[tuple[int, Callable[[int, int], ParticleSlab]]]
    to_peculiar: float
    written: Mapping[str, Any] | None

    @functools.cached_property
    def count(self) -> int:
        """The number of particles."""
        return sum(count for count, _ in self.parts)

    def _number(self, name: str) -> float:
        """Returns a number of the header.

        Raises:
            SnapshotError: it has none of this name.
        """
        if name not in self.header:
            remedy = f'; State.from_snapshot takes units={{"{name}": ...}}' * (name in UNITS_GIVEN)
            raise SnapshotError(
                f"{self.path} has no attribute {name}, which is needed here{remedy}"
            )
        return float(self._numbers(name)[0])

    def _numbers(self, name: str, default: float = 0.0) -> np.ndarray:
        """Returns the numbers of an attribute of the header, [n], float64.

        Raises:
            SnapshotError: it has other values, or none.
        """
        try:
            numbers = np.ravel(np.asarray(self.header.get(name, default), float))
        except (TypeError, ValueError):
            numbers = np.zeros(0)
        if not (numbers.size and np.isfinite(numbers).all()):
            raise SnapshotError(f"{self.path}: attribute {name} must be finite numbers")
        return numbers

    def with_units(self, units: Mapping[str, Any]) -> ParticleFiles:
        """Returns the same files, with the units that they do not name.

        Raises:
            SnapshotError: there is no such unit, or the files name another one.
        """
        for name, value in units.items():
            if name not in UNITS_GIVEN:
                raise SnapshotError(f"units: {name!r} must be one of {', '.join(UNITS_GIVEN)}")
            if not 0 < float(in_unit(name, value)) < math.inf:
                raise SnapshotError(f"units: {name} = {value!r}: must be a number above 0")
            there = self._numbers(name, value)[0]
            if not math.isclose(there, value, rel_tol=PARAMETER_TOLERANCE):
                raise SnapshotError(f"{self.path} has {name} = {there:g}, not {value:g}")
        return replace(self, header={**units, **self.header})

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
        numbers = cosmology.numbers()
        for ours, theirs in HEADERS.items():
            there, here = float(self._numbers(theirs)[0]), numbers.get(ours, 0.0)
            if theirs not in self.header or (ours == "Omega_b" and there == 0):  # all is cold
                continue
            if abs(there - here) > PARAMETER_TOLERANCE * max(abs(there), abs(here)):
                raise SnapshotError(
                    f"{self.path} has {theirs} = {there:g}, and the cosmology has {ours} = "
                    f"{here:g}: they must be equal"
                )
        rest = float(Background(numbers).Omega_de)
        if (
            "OmegaLambda" in self.header
            and abs(self._number("OmegaLambda") - rest) > LAMBDA_TOLERANCE
        ):
            raise SnapshotError(
                f"{self.path} has OmegaLambda = {self._number('OmegaLambda'):g}, and the cosmology "
                f"{rest:g}: give its Omega_k"
            )
        scale = self._number("UnitLength_in_cm") / UNITS["UnitLength_in_cm"]
        self._number("BoxSize")  # or three
        sides = self._numbers("BoxSize") * scale
        if len(sides) not in (1, 3):
            raise SnapshotError(f"{self.path}: BoxSize has {len(sides)} numbers; must have 1 or 3")
        sides = np.broadcast_to(sides, 3)
        grid = np.rint(sides * (self.count / np.prod(sides)) ** (1 / 3)).astype(int)
        if np.prod(grid) != self.count or (grid % 2).any() or (grid < 4).any():
            raise SnapshotError(
                f"{self.path}: {self.count} particles do not fill a lattice of cubic cells with an "
                f"even number along each side of a box of {' x '.join(f'{s:g}' for s in sides)} "
                "Mpc/h"
            )
        lattice = {"grid": grid.tolist(), "box_size": sides.tolist()}
        return {"a": self._number("Time"), **lattice, "cosmology": numbers}

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of positions, float32 or float64."""
        return np.dtype(self._read(0, 1)[1].dtype.newbyteorder("="))

    def _read(self, begin: int, end: int) -> ParticleSlab:
        """Returns ids, positions and velocities of some of the particles, as `parts` do."""
        slabs, first = [self.parts[0][1](0, 0)], 0
        for count, read in self.parts:
            low, high = max(begin - first, 0), min(end - first, count)
            if low < high:
                slabs.append(read(low, high))
            first += count
        ids, x, v = (np.concatenate(each) for each in zip(*slabs, strict=True))
        return ids, x, v

    def _ids(self, begin: int, end: int) -> np.ndarray:
        pieces = [self._read(b, min(end, b + SLAB))[0] for b in range(begin, end, SLAB)]
        return np.concatenate(pieces) if pieces else np.zeros(0, np.uint64)

    def _first_id(self, ids: np.ndarray, box: Box) -> int:
        """Returns the lowest id, from the ids that each rank has read. On all ranks.

        Raises:
            SnapshotError: on every rank; the ids do not number the sites of a lattice.
        """
        import tensorflow as tf

        extremes = tf.constant([-ids.min(initial=2**62), ids.max(initial=-1)])
        first, last = (int(i) for i in box.mesh.world.allreduce(extremes, "max").numpy() * (-1, 1))
        if first not in (0, 1) or last - first != box.cells - 1 or self.count != box.cells:
            raise SnapshotError(
                f"{self.path}: ids from {first} to {last} of {self.count} particles; ids must "
                f"number the {box.cells} sites of the lattice, from 0 or 1"
            )
        return first

    def blocks(self, box: Box) -> tuple[np.ndarray, np.ndarray]:
        """Returns displacement [Mpc/h] and canonical velocity [Mpc/h H0] of this rank's sites.

        Each rank reads its part of the files, and sends each particle to the rank that has its
        lattice site. All ranks call this together.

        Args:
            box: the box, with the grid of the snapshot.

        Raises:
            SnapshotError: on every rank; the ids do not number the sites of a lattice.
        """
        import tensorflow as tf

        mesh, world = box.mesh, box.mesh.world
        begin, end = (self.count * r // mesh.size for r in (mesh.rank, mesh.rank + 1))
        ids = self._ids(begin, end).astype(np.int64)
        first = self._first_id(ids, box)
        length = self._number("UnitLength_in_cm") / UNITS["UnitLength_in_cm"]
        speed = self._number("UnitVelocity_in_cm_per_s") / UNITS["UnitVelocity_in_cm_per_s"]
        to_canonical = speed * self.to_peculiar * self._number("Time") / HUBBLE
        places, side = [box.place_of(r) for r in range(mesh.size)], np.array(box.size)
        owners = np.empty(box.grid, np.int32)
        for rank, place in enumerate(places):
            owners[place] = rank
        values, filled = np.zeros([*box.block, 6]), np.zeros(box.block, bool)
        origin, squares = np.array(box.offset), np.zeros(3)
        rounds = math.ceil(max(1, math.ceil(self.count / mesh.size)) / SLAB)
        for low in (begin + number * SLAB for number in range(rounds)):
            _, x, v = self._read(min(low, end), min(low + SLAB, end))
            numbers = ids[low - begin : low - begin + SLAB] - first
            sites = np.stack(np.unravel_index(numbers, box.grid), axis=-1)
            moved = x * length - sites * (side / box.grid)
            with np.errstate(invalid="ignore"):  # values that are not finite are refused below
                moved -= side * np.rint(moved / side)  # to the nearest image
            squares += np.sum(moved**2, axis=0)
            owner = owners.ravel()[numbers]
            order = np.argsort(owner, kind="stable")
            rows = np.concatenate([sites, moved, v * to_canonical], axis=1)[order]
            sent = np.bincount(owner, minlength=mesh.size) * rows.shape[1]
            arrived = world.alltoallv(tf.constant(rows.ravel()), tf.constant(sent, tf.int32))
            arrived = arrived.numpy().reshape(-1, rows.shape[1])
            place = tuple((arrived[:, :3].astype(int) - origin).T)
            values[place], filled[place] = arrived[:, 3:], True
        if not bool(world.allreduce(tf.constant(bool(filled.all())), "min")):
            raise SnapshotError(f"{self.path}: some ids are missing and others occur twice")
        self._check_finite(values, box, first)
        self._check_order(world.allreduce(tf.constant(squares)).numpy(), box)
        return values[..., :3], values[..., 3:]

    def _check_finite(self, values: np.ndarray, box: Box, first: int) -> None:
        """Checks positions and velocities of this rank's sites. On all ranks together.

        Args:
            values: the numbers of each site, [x, y, z, 6].
            box: the box.
            first: the id of the first site.

        Raises:
            SnapshotError: on every rank; one is not finite on some rank.
        """
        import tensorflow as tf

        wrong = np.argwhere(~np.isfinite(values).all(axis=-1)) + np.array(box.offset)
        numbers = np.ravel_multi_index(tuple(wrong.T), box.grid).astype(np.int64)
        least = box.mesh.world.allreduce(tf.constant(numbers.min(initial=2**62)), "min").numpy()
        if least < 2**62:
            raise SnapshotError(
                f"{self.path}: position or velocity of the particle with id {least + first} is not "
                "finite"
            )

    def _check_order(self, squares: np.ndarray, box: Box) -> None:
        """Checks by the displacements that ids number the sites of the lattice in their order.

        Args:
            squares: the sum of the squares of all displacements along each axis [(Mpc/h)^2].
            box: the box.

        Raises:
            SnapshotError: the displacements are too large.
        """
        side, spread = np.array(box.size), np.sqrt(squares / self.count)
        if (spread > UNORDERED * side).any():
            raise SnapshotError(
                f"{self.path}: displacements of {spread.max():.3g} Mpc/h (root mean square) in a "
                f"box of {side.max():g} Mpc/h; ids must number the sites of a lattice in the order "
                "(ix ny + iy) nz + iz"
            )


def particle_files(
    path: str | Path, units: Mapping[str, Any] | None = None
) -> ParticleFiles | None:
    """Returns the snapshot of particles at a path; None if there is none, or a `snapshot.zarr`.

    Args:
        path: a folder of HDF5 files, one of these files, or a folder of bigfile; or the folder of a
            run that holds one of them.
        units: the units of files that do not name theirs: `UnitLength_in_cm` of a length times h
            and `UnitVelocity_in_cm_per_s`.

    Raises:
        SnapshotError: a file is missing, damaged, or holds other than particles of dark matter.
    """
    path = Path(path)
    if path.name == SNAPSHOT or (path / SNAPSHOT).exists():
        return None
    snapshots = []
    for folder in (path, *(path / name for name in particle_folders())):
        if folder.suffix == ".hdf5" or any(folder.glob("*.hdf5")):
            snapshots.append((_gadget, folder))
        elif (folder / "Header" / "attr-v2").is_file():
            snapshots.append((_bigfile, folder))
    if len(snapshots) > 1:
        names = " and ".join(folder.name for _, folder in snapshots)
        raise SnapshotError(f"{path} holds {names}: give the path of one of them")
    if not snapshots:
        return None
    ((read, folder),) = snapshots
    with reading(folder, raises=SnapshotError):
        files = read(folder)
        totals = _totals(files.header)
    files = files.with_units(units or {})
    others = [n for n, total in enumerate(totals) if total and n != DARK_MATTER]
    if others:
        raise SnapshotError(f"{folder} has particles of type {others[0]}; all must be type 1")
    if totals[DARK_MATTER] != files.count:
        raise SnapshotError(
            f"{folder} holds {files.count} of {totals[DARK_MATTER]} particles: files are missing"
        )
    return files


def _totals(header: Mapping[str, Any]) -> np.ndarray:
    """Returns the number of particles of each type."""
    low = header["NumPart_Total"] if "NumPart_Total" in header else header["TotNumPart"]
    high = np.asarray(header.get("NumPart_Total_HighWord", 0), np.int64)
    totals = np.asarray(low).astype(np.int64) + high * 2**32
    if totals.ndim != 1 or len(totals) <= DARK_MATTER:
        raise ValueError("the numbers of particles must be numbers by type")
    return totals


def _gadget(path: Path) -> ParticleFiles:
    """Returns a snapshot in Gadget-4's HDF5, whose velocities are over sqrt(a)."""
    if path.is_dir():
        folder, names = path, sorted(path.glob("*.hdf5"))
    else:  # one of the files, all of which differ in a number before the ending
        stem = re.sub(r"\.\d+$", "", path.stem)
        folder = path.parent
        names = sorted(p for p in folder.glob("*.hdf5") if re.sub(r"\.\d+$", "", p.stem) == stem)
    header: dict[str, Any] = {}
    parts = []
    for name in names:
        with open_hdf5(name) as file:
            groups = [file[group] for group in ("Parameters", "Header") if group in file]
            header |= {key: value for group in groups for key, value in group.attrs.items()}
            ids = file.get(f"PartType{DARK_MATTER}/{NAMES[0]}")
            count = int(header["NumPart_ThisFile"][DARK_MATTER])
            if count and (ids is None or len(ids) != count):
                raise KeyError(f"{name.name} has no {NAMES[0]} of {count} particles of type 1")
            for data, (kinds, members) in zip(NAMES, TYPES, strict=True) if count else ():
                where = f"PartType{DARK_MATTER}/{data}"
                shape = (count,) if members == 1 else (count, members)
                check_numbers(file.get(where), f"{name}:{where}", kinds, shape)
        if count:
            parts.append((count, functools.partial(_read_gadget, name)))
    if len(names) != header["NumFilesPerSnapshot"]:
        expected = header["NumFilesPerSnapshot"]
        raise ValueError(f"{len(names)} files, and the snapshot has {expected}")
    return ParticleFiles(
        path, header, parts, math.sqrt(float(header["Time"])), snapshot_attributes(folder)
    )


def _read_gadget(path: Path, begin: int, end: int) -> ParticleSlab:
    with open_hdf5(path) as file:
        ids, x, v = (file[f"PartType{DARK_MATTER}/{name}"][begin:end] for name in NAMES)
    return ids, x, v


def _bigfile(path: Path) -> ParticleFiles:
    """Returns a snapshot in bigfile, whose velocities are peculiar."""
    header: dict[str, Any] = {}
    attributes = path / "Header" / "attr-v2"
    for line in read_text(attributes).splitlines():
        name, dtype, _, raw = line.split(" #HUMANE ")[0].split()
        kind = number_type(dtype, f"{attributes}: {name}", "fiuSb")
        values = np.frombuffer(bytes.fromhex(raw), kind)
        header[name] = values if len(values) > 1 else values[0]
    if not header.get("UsePeculiarVelocity", 1):
        raise ValueError("UsePeculiarVelocity is 0; must be 1")
    if "ScalingFactor" in header:
        header.setdefault("Time", header["ScalingFactor"])
    folders = [path / str(DARK_MATTER) / name for name in BLOCKS]
    described = [
        list(block_files(folder, kinds, members))
        for folder, (kinds, members) in zip(folders, TYPES, strict=True)
    ]
    counts = [[count for _, count in files] for files in described]
    if counts[1:] != counts[:-1]:
        raise ValueError(f"the files of {', '.join(BLOCKS)} hold different numbers of particles")

    def read(number: int, begin: int, end: int) -> ParticleSlab:
        ids, x, v = (np.asarray(files[number][0]()[begin:end]) for files in described)
        return ids[:, 0], x, v

    parts = [(n, functools.partial(read, i)) for i, n in enumerate(counts[0]) if n]
    return ParticleFiles(path, header, parts, 1.0, snapshot_attributes(path))


def block_files(
    folder: Path, kinds: str, members: int
) -> Iterator[tuple[Callable[[], np.ndarray], int]]:
    """Yields for each data file of a block what maps its values [items, members], and the items.

    Args:
        folder: the folder of the block.
        kinds: the kinds of NumPy's dtypes that its values may have.
        members: the number of values of an item.

    Raises:
        UnreadableError: the block has other values, or a data file has another size.
    """
    header = folder / "header"
    lines = read_text(header).splitlines()
    text, count, _ = (line.split(":")[1].strip() for line in lines[:3])
    dtype = number_type(text, f"{header}: DTYPE", kinds)
    if count != str(members):
        raise UnreadableError(f"{header}: NMEMB is {count:.40}; must be {members}")
    for line in lines[3:]:
        name, items = (part.strip() for part in line.split(":")[:2])
        if not (re.fullmatch("[0-9A-F]{6}", name) and items.isdecimal()):
            raise UnreadableError(
                f"{header}: {line!r}; must be the name of a data file, such as 000000, and the "
                "number of its items"
            )
        check_regular(folder / name)
        shape, size = (int(items), members), (folder / name).stat().st_size
        if size != (wanted := int(items) * members * dtype.itemsize):
            raise UnreadableError(
                f"{folder / name} has {size} bytes; must have {wanted}, for {items} items of "
                f"{members} values of {dtype.str}: copy it again"
            )
        yield functools.partial(np.memmap, folder / name, dtype, "r", 0, shape), int(items)
