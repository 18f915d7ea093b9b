"""Particles of Gadget-1 and Gadget-2 in binary files. Nothing here imports TensorFlow.

Quijote, N-GenIC, 2LPTic and MUSIC write such files. A file is a sequence of Fortran records: its
length [bytes], its values, and its length again. The first record is the header. In format 2 each
record follows a record of 8 bytes with its name.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowpm_dist.io.files import UnreadableError
from flowpm_dist.io.particle_files import (
    KINDS,
    SHAPES,
    Attributes,
    Part,
    ParticleFiles,
    box_sides,
    check_number_of_files,
    check_same,
    check_whole,
    gadget_factor,
    missing,
    number_of_files,
    scale_factor,
)
from flowpm_dist.options.regular_files import check_regular, first_bytes

WORDS = "binary files of Gadget-1 or Gadget-2"
HEADER = 256
"""Size of the header [bytes]."""
FIELDS = {
    "NumPart_ThisFile": ("u4", 6), "MassTable": ("f8", 6), "Time": ("f8", 1), "Redshift": ("f8", 1),
    "Flag_Sfr": ("i4", 1), "Flag_Feedback": ("i4", 1), "NumPart_Total": ("u4", 6),
    "Flag_Cooling": ("i4", 1), "NumFilesPerSnapshot": ("i4", 1), "BoxSize": ("f8", 1),
    "Omega0": ("f8", 1), "OmegaLambda": ("f8", 1), "HubbleParam": ("f8", 1),
    "Flag_StellarAge": ("i4", 1), "Flag_Metals": ("i4", 1), "NumPart_Total_HighWord": ("u4", 6),
}  # fmt: skip
"""The fields of the header (Springel 2005, MNRAS 364, 1105, arXiv:astro-ph/0505010)."""
BLOCKS = {b"POS ": "position", b"VEL ": "velocity", b"ID  ": "id", b"MASS": "mass"}
"""The names of the blocks in format 2, and their order in format 1."""


@dataclass(frozen=True)
class _Block:
    """The values of a quantity in a file: where they begin [bytes], and their dtype."""

    offset: int
    dtype: np.dtype[Any]


def recognises(path: Path) -> bool:
    """Returns whether a file begins with the record of a header, or with the name of one."""
    return path.is_file() and _byte_order(first_bytes(path, 8)) is not None


def is_alone(path: Path) -> bool:
    """Returns whether a file says that it is the only one of its snapshot."""
    header, _ = _blocks_of(path)
    return number_of_files(header) == 1


def _byte_order(first: bytes) -> str | None:
    """Returns "<" or ">" from the first 8 bytes of a file; None if it is not of this format."""
    for order in "<>":
        size = int.from_bytes(first[:4], "little" if order == "<" else "big")
        if size == HEADER or (size == 8 and first[4:8] == b"HEAD"):
            return order
    return None


def open_files(path: Path, names: Sequence[Path], units: Mapping[str, Any]) -> ParticleFiles:
    """Returns a snapshot in Gadget's binary format, 1 or 2, of any byte order.

    Lengths are times h, and velocities are divided by sqrt(a).

    Args:
        path: the snapshot, for messages.
        names: its files, in order.
        units: the units of the snapshot. The files have none.

    Raises:
        SnapshotError: a file is missing, or a unit.
        UnreadableError: a file is damaged.
    """
    headers, parts = [], []
    for name in names:
        header, blocks = _blocks_of(name)
        counts = [int(n) for n in header["NumPart_ThisFile"]]
        read = functools.partial(_read, name, header, blocks)
        parts.append(Part({kind: n for kind, n in enumerate(counts) if n}, read))
        headers.append(header)
    first = headers[0]
    check_number_of_files(first, names)
    check_same(headers, names)
    known = Attributes(path, first).with_units(units)
    a = scale_factor(known)
    factor = gadget_factor(known, math.sqrt(a))
    files = ParticleFiles(path, known, parts, factor, a, box_sides(known, factor("position")))
    low, high = (np.asarray(first[f"NumPart_Total{end}"], np.int64) for end in ("", "_HighWord"))
    here = np.array([files.counts.get(kind, 0) for kind in range(len(low))])
    # N-GenIC's header has no high words, and anything in their place.
    return check_whole(files, np.where(here == low, low, low + high * 2**32).tolist())


def _header(raw: bytes, order: str) -> dict[str, Any]:
    header: dict[str, Any] = {}
    offset = 0
    for name, (kind, count) in FIELDS.items():
        values = np.frombuffer(raw, order + kind, count, offset)
        header[name] = values if count > 1 else values[0]
        offset += values.nbytes
    return header


def _blocks_of(path: Path) -> tuple[dict[str, Any], dict[str, _Block]]:
    """Returns the header of a file, and its blocks, whose sizes it checks.

    Raises:
        UnreadableError: the file is cut short, or its records are damaged.
    """
    check_regular(path)
    order = _byte_order(first_bytes(path, 8))
    if order is None:
        raise UnreadableError(f"{path} must begin with a header of Gadget")
    records = _Records(path, order)
    name, offset, size = next(records.walk({}))
    if size != HEADER:
        raise UnreadableError(f"{path} has a header of {size} bytes; must have {HEADER}")
    with path.open("rb") as file:
        file.seek(offset)
        header = _header(file.read(HEADER), order)
    counts = [int(n) for n in header["NumPart_ThisFile"]]
    own_mass = [n for n, mass in zip(counts, header["MassTable"], strict=True) if not mass]
    numbers = {q: math.prod(SHAPES[q]) * sum(counts) for q in BLOCKS.values()}
    numbers["mass"] = sum(own_mass)
    blocks: dict[str, _Block] = {}
    for name, offset, size in records.walk(numbers) if sum(counts) else ():
        if name in numbers and numbers[name]:
            kind = "u" if name == "id" else KINDS[name]
            blocks[name] = _Block(offset, np.dtype(f"{order}{kind}{size // numbers[name]}"))
    if sum(counts) and "position" not in blocks:
        raise UnreadableError(f"{path} has no positions of its {sum(counts)} particles")
    return header, blocks


class _Records:
    """The records of a file.

    Args:
        path: the file.
        order: its byte order, "<" or ">".
    """

    def __init__(self, path: Path, order: str) -> None:
        self._path, self._order = path, order
        self._size = path.stat().st_size
        self._named = first_bytes(path, 8)[4:8] == b"HEAD"

    def walk(self, numbers: Mapping[str, int]) -> Iterator[tuple[str, int, int]]:
        """Yields the name of each record, where its values begin [bytes], and its size [bytes].

        Args:
            numbers: how many values of 4 or 8 bytes the records of quantities must have. Without
                any, records have the size that they give; a record above 4 GiB gives less.

        Raises:
            UnreadableError: a record has another size, is cut short, or ends otherwise than it
                begins.
        """
        offset, unnamed = 0, iter(["header", *(n for n in BLOCKS.values() if numbers.get(n))])
        with self._path.open("rb") as file:
            while offset < self._size:
                name = next(unnamed, None)
                if self._named:
                    if (size := self._size_of(file, offset, "name", 0)) != 8:
                        raise UnreadableError(
                            f"{self._path} is damaged: the name of a record has {size} bytes; must "
                            "have 8"
                        )
                    file.seek(offset + 4)
                    text = file.read(4)
                    name = BLOCKS.get(text, "header" if text == b"HEAD" else "other")
                    offset += 16
                elif name is None:
                    return
                size = self._size_of(file, offset, name, numbers.get(name, 0))
                yield name, offset + 4, size
                offset += size + 8

    def _size_of(self, file: Any, offset: int, name: str, number: int) -> int:
        """Returns the size of the values of a record that begins at an offset [bytes]."""
        begin = self._marker(file, offset)
        sizes = [number * width for width in (4, 8)] if number else [begin]
        possible = [size for size in sizes if size % 2**32 == begin]  # it is written in 32 bits
        if not possible:
            raise UnreadableError(
                f"{self._path} is damaged: the record of its {name} has {begin} bytes; must have "
                f"{' or '.join(map(str, sizes))}, for {number} values"
            )
        inside = [size for size in possible if offset + size + 8 <= self._size]
        if not inside:
            raise UnreadableError(
                f"{self._path} has {self._size} bytes; must have {offset + possible[0] + 8} or "
                f"more, for its {name}: copy it again"
            )
        for size in inside:
            if self._marker(file, offset + 4 + size) == begin:
                return size
        raise UnreadableError(
            f"{self._path} is damaged: the record of its {name} must begin and end with {begin}"
        )

    def _marker(self, file: Any, offset: int) -> int:
        file.seek(offset)
        raw = file.read(4)
        if len(raw) < 4:
            raise UnreadableError(f"{self._path} is cut short: copy it again")
        return int.from_bytes(raw, "little" if self._order == "<" else "big")


def _read(
    path: Path,
    header: Mapping[str, Any],
    blocks: Mapping[str, _Block],
    kind: int,
    names: Sequence[str],
    begin: int,
    end: int,
) -> list[np.ndarray]:
    """Returns quantities of particles in one file, see `Part`."""
    counts, table = header["NumPart_ThisFile"], header["MassTable"]
    arrays = []
    check_regular(path)
    with path.open("rb") as file:
        for name in names:
            if name == "mass" and table[kind]:
                arrays.append(np.full(end - begin, float(table[kind])))
                continue
            if name not in blocks:
                raise missing(str(path), f"block of the {name}", [*blocks])
            before = [int(n) for n in counts[:kind]]
            if name == "mass":
                before = [n for n, mass in zip(before, table, strict=False) if not mass]
            width = math.prod(SHAPES[name])
            block = blocks[name]
            file.seek(block.offset + (sum(before) + begin) * width * block.dtype.itemsize)
            values = np.fromfile(file, block.dtype, (end - begin) * width)
            if len(values) != (end - begin) * width:
                raise UnreadableError(f"{path} is cut short: copy it again")
            arrays.append(values.reshape(end - begin, *SHAPES[name]))
    return arrays
