"""The particles of a snapshot of any code, read range by range. Nothing here imports TensorFlow.

A format is a module with one function, and an entry in `particle_readers.READERS`:

    def open_files(path, names, units) -> ParticleFiles: ...
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flowpm_dist.cosmology.parameters import HEADERS
from flowpm_dist.io.files import UnreadableError, reading
from flowpm_dist.io.formats import UNITS
from flowpm_dist.io.snapshot import SnapshotError
from flowpm_dist.options import in_unit

SHAPES = {"position": (3,), "velocity": (3,), "mass": (), "id": ()}
"""The quantities of a particle, and the shape of each."""
KINDS = {"position": "f", "velocity": "f", "mass": "f", "id": "iu"}
"""The kinds of NumPy's dtypes that their values in files may have."""
EXAMPLES = {
    "UnitLength_in_cm": "which is 3.085678e21 for kpc/h and 3.085678e24 for Mpc/h",
    "UnitVelocity_in_cm_per_s": "which is 1e5 for km/s",
    "UnitMass_in_g": "which is 1.989e43 for 1e10 solar masses/h",
    "HubbleParam": "which is h",
}
"""What files may lack, and what it is, for messages."""
PARAMETER_TOLERANCE = 1e-4
"""Relative difference up to which numbers of a file and numbers that are given are the same."""

LAMBDA_TOLERANCE = 0.005
"""Difference of OmegaLambda that radiation and neutrinos, which are left out, may explain."""
SAME = ("Time", "Redshift", "BoxSize", "NumFilesPerSnapshot", "NumPart_Total", *UNITS,
        *HEADERS.values())  # fmt: skip
"""Attributes that all files of a snapshot have the same, by Gadget's names."""
TIME_TOLERANCE = 1e-3
"""Relative difference up to which a scale factor and a redshift are the same time."""


class Attributes(Mapping[str, Any]):
    """Attributes of a snapshot, by the names of Gadget-4 and MP-Gadget where there are such names.

    Attributes:
        path: the snapshot, for messages.
    """

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path, self._values = path, dict(values)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def number(self, name: str) -> float:
        """Returns the number of an attribute, the first one if it has several.

        Raises:
            SnapshotError: there is no such attribute, or it is no number.
        """
        if name not in self:
            remedy = ""
            if name in EXAMPLES:
                both = f'units={{"{name}": ...}}, in a shell --unit {name}=...'
                remedy = f"; give {both}, {EXAMPLES[name]}"
            raise SnapshotError(
                f"{self.path} has no attribute {name}, which is needed here{remedy}"
            )
        return float(self.numbers(name)[0])

    def positive(self, name: str) -> float:
        """Returns the number of an attribute as `number` does, which must be above 0.

        Raises:
            SnapshotError: see `number`; or it is not.
        """
        number = self.number(name)
        if not number > 0:
            raise SnapshotError(f"{self.path} has {name} = {number:g}; must be above 0")
        return number

    def numbers(self, name: str, default: Any = 0.0) -> np.ndarray:
        """Returns the numbers of an attribute, [n], float64; or a default if it is missing.

        Raises:
            SnapshotError: it has other values, or none.
        """
        try:
            numbers = np.ravel(np.asarray(self._values.get(name, default), float))
        except (TypeError, ValueError):
            numbers = np.zeros(0)
        if not (numbers.size and np.isfinite(numbers).all()):
            raise SnapshotError(f"{self.path}: attribute {name} must be finite numbers")
        return numbers

    def with_units(
        self, units: Mapping[str, Any], names: Sequence[str] = tuple(UNITS)
    ) -> Attributes:
        """Returns the same attributes, with the units that they lack.

        Args:
            units: the units, by name.
            names: the units that files of this format may lack.

        Raises:
            SnapshotError: there is no such unit, or the attributes have another one.
        """
        for name, value in units.items():
            if name not in names:
                raise SnapshotError(
                    f"units: {name!r} must be one of {', '.join(names)}, which {self.path} may lack"
                )
            if not 0 < float(in_unit(name, value)) < math.inf:
                raise SnapshotError(f"units: {name} = {value!r}: must be a number above 0")
            there = self.numbers(name, value)[0]
            if not math.isclose(there, value, rel_tol=PARAMETER_TOLERANCE):
                raise SnapshotError(f"{self.path} has {name} = {there:g}, not {value:g}")
        return Attributes(self.path, {**units, **self})


@dataclass(frozen=True)
class Part:
    """Some of the particles of a snapshot, such as the particles in one of its files.

    Attributes:
        counts: the number of particles by type.
        read: `f(kind, names, begin, end)` returns quantities of particles of one type, as the file
            has them, by a range of their number in this part. The file was opened and its sizes
            checked before.
    """

    counts: Mapping[int, int]
    read: Callable[[int, Sequence[str], int, int], list[np.ndarray]]


@dataclass(frozen=True)
class ParticleFiles:
    """A snapshot of particles, read range by range.

    Attributes:
        path: its folder or file.
        header: the attributes of the files.
        parts: its files.
        factor: `f(name)` returns what a quantity is multiplied by to be in our units. It raises
            SnapshotError if the files lack the unit.
        a: scale factor.
        box_size: comoving sides of the box [Mpc/h].
        facts: parameters of the cosmology by our names, those that `HEADERS` does not find.
    """

    path: Path
    header: Attributes
    parts: Sequence[Part]
    factor: Callable[[str], float]
    a: float
    box_size: tuple[float, float, float]
    facts: Mapping[str, float] = field(default_factory=dict)

    @functools.cached_property
    def counts(self) -> dict[int, int]:
        """The number of particles by type, such as 0 gas and 1 dark matter, where there are any."""
        total: Counter[int] = Counter()
        for part in self.parts:
            total.update(part.counts)
        return {kind: total[kind] for kind in sorted(total) if total[kind]}

    def check_types(self, types: Sequence[int]) -> None:
        """Checks that there are particles of some types.

        Raises:
            SnapshotError: there are none of one of them.
        """
        if missing := [kind for kind in types if kind not in self.counts]:
            there = ", ".join(f"{n:,} of type {kind}" for kind, n in self.counts.items())
            raise SnapshotError(
                f"{self.path} has no particles of type {missing[0]}; it has {there}"
            )

    @functools.cached_property
    def cosmology_facts(self) -> dict[str, float]:
        """The parameters of the cosmology that the files have, by the names of `Cosmology`."""
        there = {
            n: float(self.header.numbers(s)[0]) for n, s in HEADERS.items() if s in self.header
        }
        return {**there, **self.facts}

    @functools.cached_property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of positions, float32 or float64."""
        kind = next(iter(self.counts))
        return self.read(kind, 0, 0, ["position"])["position"].dtype

    def read(
        self, kind: int, begin: int, end: int, names: Sequence[str] = tuple(SHAPES)
    ) -> dict[str, np.ndarray]:
        """Returns quantities of particles of one type, by a range of their numbers in the files.

        Only this range is read. Values that are not finite are returned unchanged:
        all ranks must check them together.

        Args:
            kind: the type, see `counts`.
            begin, end: the range, of n particles.
            names: any of these:
                "position": comoving [Mpc/h], [n, 3];
                "velocity": peculiar, a dx/dt [km/s], [n, 3];
                "mass": [1e10 Msun/h], [n];
                "id": [n], uint64.

        Returns:
            Arrays by name; float32 or float64 as in the files, but for ids. A mass that is the same
            for all particles of a type is float64.

        Raises:
            SnapshotError: there are no such particles, the files lack such a quantity or its unit,
                or cannot be read.
        """
        count = self.counts.get(kind, 0)
        if not (count and 0 <= begin <= end <= count):
            raise SnapshotError(
                f"{self.path}: has {count} particles of type {kind}, none from {begin} to {end}"
            )
        if not names:
            return {}
        if wrong := [name for name in names if name not in SHAPES]:
            raise ValueError(f"{wrong[0]!r} is not one of {', '.join(map(repr, SHAPES))}")
        factors = {name: self.factor(name) for name in names if name != "id"}
        pieces: list[list[np.ndarray]] = [[] for _ in names]
        with reading(self.path, raises=SnapshotError):
            first = 0
            for part in self.parts:
                there = part.counts.get(kind, 0)
                low, high = max(begin - first, 0), min(end - first, there)
                first += there
                # A range of no particles has the dtypes of the first file that has any.
                if low < high or (begin == end and there and not pieces[0]):
                    values = part.read(kind, names, low, max(low, high))
                    for piece, value in zip(pieces, values, strict=True):
                        piece.append(value)
        joined = {n: np.concatenate(p) for n, p in zip(names, pieces, strict=True)}
        return {name: _converted(joined[name], factors.get(name)) for name in names}


def _converted(values: np.ndarray, factor: float | None) -> np.ndarray:
    """Returns values in our units, in this machine's byte order, rounded once; ids have no unit."""
    if factor is None:
        return values.astype(np.uint64, copy=False)
    dtype = np.float32 if values.dtype.itemsize <= 4 else np.float64
    if factor == 1:
        return values.astype(dtype, copy=False)
    return (values.astype(np.float64) * factor).astype(dtype)


class NoQuantityError(SnapshotError):
    """Particles of a type do not have a quantity."""


def parameters_of(files: ParticleFiles) -> dict[str, float]:
    """Returns the parameters of the cosmology that files have, with their curvature."""
    numbers = dict(files.cosmology_facts)
    if "Omega_m" in numbers and "OmegaLambda" in files.header and "Omega_k" not in numbers:
        rest = 1 - numbers["Omega_m"] - files.header.number("OmegaLambda")
        if abs(rest) > LAMBDA_TOLERANCE:
            numbers["Omega_k"] = rest
    return numbers


def missing(where: str, name: str, present: Sequence[str]) -> NoQuantityError:
    """Returns the error of a quantity that the particles of a type do not have."""
    return NoQuantityError(f"{where} has no {name}; it has {', '.join(present) or 'nothing'}")


def gadget_factor(header: Attributes, to_peculiar: float) -> Callable[[str], float]:
    """Returns `ParticleFiles.factor` of files whose units are attributes by Gadget's names.

    Args:
        header: the attributes.
        to_peculiar: what velocities are multiplied by to be peculiar, in the units of the files.
    """
    units = {"position": "UnitLength_in_cm", "velocity": "UnitVelocity_in_cm_per_s",
             "mass": "UnitMass_in_g"}  # fmt: skip

    def factor(name: str) -> float:
        ratio = header.positive(units[name]) / UNITS[units[name]]
        return ratio * (to_peculiar if name == "velocity" else 1.0)

    return factor


def scale_factor(header: Attributes) -> float:
    """Returns the scale factor of Gadget's `Time`.

    Raises:
        SnapshotError: it is not above 0, or the run was not a cosmological one.
    """
    a = header.positive("Time")
    if "ComovingIntegrationOn" in header and not header.number("ComovingIntegrationOn"):
        raise SnapshotError(f"{header.path} has ComovingIntegrationOn = 0; must be comoving")
    z = float(header.numbers("Redshift", 1 / a - 1)[0])
    if z and abs((1 + z) * a - 1) > TIME_TOLERANCE:  # files of runs that are not comoving have 0
        raise SnapshotError(
            f"{header.path} has Time = {a:g} and Redshift = {z:g}; must have Time = 1 / (1 + z)"
        )
    return a


def box_sides(header: Attributes, length: float) -> tuple[float, float, float]:
    """Returns the sides of the box [Mpc/h].

    Args:
        header: the attributes, with `BoxSize`.
        length: the unit of the files' lengths [Mpc/h].

    Raises:
        SnapshotError: `BoxSize` is neither one number nor three, or not above 0.
    """
    header.number("BoxSize")  # it is there
    sides = header.numbers("BoxSize") * length
    if len(sides) not in (1, 3):
        raise SnapshotError(f"{header.path}: BoxSize has {len(sides)} numbers; must have 1 or 3")
    if not (sides > 0).all():
        raise SnapshotError(f"{header.path}: BoxSize must be above 0")
    x, y, z = np.broadcast_to(sides, 3).tolist()
    return x, y, z


def totals(header: Mapping[str, Any]) -> list[int]:
    """Returns the number of particles of each type in all files, by Gadget's names.

    Raises:
        KeyError, TypeError, ValueError: the header lacks it, or has other values.
    """
    low = header["NumPart_Total"] if "NumPart_Total" in header else header["TotNumPart"]
    numbers = [int(number) for number in low]
    if len(numbers) < 2:
        raise ValueError("the numbers of particles must be numbers by type")
    high = np.ravel(header.get("NumPart_Total_HighWord", 0))  # swiftsimio writes fewer of them
    for kind, number in enumerate(high[: len(numbers)]):
        numbers[kind] += int(number) * 2**32
    return numbers


def number_of_files(header: Mapping[str, Any]) -> int:
    """Returns the number of files of a snapshot, at least 1.

    Raises:
        KeyError, TypeError, ValueError: the header lacks it, or has other values.
    """
    (number,) = np.ravel(header["NumFilesPerSnapshot"])  # some codes write it as an array
    return max(1, int(number))


def check_number_of_files(header: Mapping[str, Any], names: Sequence[Path]) -> None:
    """Checks that there are as many files as the header says.

    Raises:
        ValueError: there are more or fewer.
    """
    expected = number_of_files(header)
    if len(names) != expected:
        raise ValueError(f"{len(names)} files, and the snapshot has {expected}")


def check_same(
    headers: Sequence[Mapping[str, Any]], names: Sequence[Path], attributes: Sequence[str] = SAME
) -> None:
    """Checks that files belong to one snapshot.

    Args:
        headers: the attributes of each file.
        names: the files.
        attributes: the attributes that must be the same.

    Raises:
        UnreadableError: one is another in some file, or is missing there alone.
    """
    for name, header in zip(names[1:], headers[1:], strict=True):
        for key in attributes:
            here, there = (np.ravel(each.get(key, "no value")) for each in (header, headers[0]))
            real = here.dtype.kind == there.dtype.kind == "f"
            if not np.array_equal(here, there, equal_nan=real):  # what is wrong is found later
                shown = [", ".join(map(str, values[:9])) for values in (here, there)]
                raise UnreadableError(
                    f"{name} has {key} = {shown[0]}, and {names[0]} {shown[1]}: must be files of "
                    "one snapshot"
                )


def check_whole(files: ParticleFiles, expected: Sequence[int]) -> ParticleFiles:
    """Returns files that hold all their particles.

    Args:
        files: the files.
        expected: the number of particles of each type in the snapshot.

    Raises:
        SnapshotError: they hold none, or other numbers of particles.
    """
    if not files.counts:
        raise SnapshotError(f"{files.path} holds no particles")
    for kind in {*files.counts, *range(len(expected))}:
        here = files.counts.get(kind, 0)
        there = expected[kind] if kind < len(expected) else 0
        if here != there:
            raise SnapshotError(
                f"{files.path} holds {here} of {there} particles of type {kind}: files are missing"
            )
    return files
