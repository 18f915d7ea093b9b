"""Particles of MP-Gadget and FastPM in bigfile. Nothing here imports TensorFlow."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowpm_dist.io.files import UnreadableError
from flowpm_dist.io.opening import number_type
from flowpm_dist.io.particle_files import (
    KINDS,
    SHAPES,
    Attributes,
    Part,
    ParticleFiles,
    box_sides,
    check_whole,
    gadget_factor,
    missing,
    scale_factor,
    totals,
)
from flowpm_dist.options.regular_files import check_regular, read_text

BLOCKS = {"position": "Position", "velocity": "Velocity", "mass": "Mass", "id": "ID"}
"""The blocks of the quantities."""
WORDS = "bigfile"
Mapped = tuple[Callable[[], np.ndarray], int]
"""What maps the values of a data file [items, members], and the number of its items."""


def recognises(path: Path) -> bool:
    """Returns whether a path is a folder in bigfile."""
    return (path / "Header" / "attr-v2").is_file()


def is_alone(path: Path) -> bool:
    """Returns whether a folder holds a whole snapshot, as it must."""
    return True


def open_files(path: Path, names: Sequence[Path], units: Mapping[str, Any]) -> ParticleFiles:
    """Returns a snapshot in bigfile (Feng and others 2016, arXiv:1603.00476).

    Lengths are times h, and velocities are peculiar.

    Args:
        path: the folder, for messages.
        names: the folder alone. It holds a folder of each type of particles, named by its number.
        units: the units that its attributes may lack.

    Raises:
        SnapshotError: a file is missing, or a unit.
        UnreadableError: a file is damaged.
    """
    (snapshot,) = names
    header = _attributes(snapshot / "Header" / "attr-v2")
    if not header.get("UsePeculiarVelocity", 1):
        raise ValueError("UsePeculiarVelocity is 0; must be 1")
    if "ScalingFactor" in header:
        header.setdefault("Time", header["ScalingFactor"])
    masses = np.ravel(np.asarray(header.get("MassTable", 0.0), float))
    parts = []
    folders = sorted(each for each in snapshot.iterdir() if re.fullmatch("[0-9]+", each.name))
    kinds: dict[int, Path] = {}
    for folder in folders:
        kind = int(folder.name)
        if (same := kinds.setdefault(kind, folder)) != folder:
            raise ValueError(f"folders {same.name} and {folder.name} are both of type {kind}")
        blocks = {
            q: folder / b for q, b in BLOCKS.items() if q == "position" or (folder / b).is_dir()
        }
        mapped = {
            quantity: list(block_files(block, KINDS[quantity], *(SHAPES[quantity] or (1,))))
            for quantity, block in blocks.items()
        }
        counts = {q: sum(count for _, count in files) for q, files in mapped.items()}
        if len({*counts.values()}) != 1:
            sizes = ", ".join(f"{BLOCKS[q]} {n}" for q, n in counts.items())
            raise ValueError(
                f"blocks of {folder.name} hold different numbers of particles: {sizes}"
            )
        mass = float(masses[kind]) if kind < len(masses) else 0.0
        read = functools.partial(_read, folder, mapped, mass)
        parts.append(Part({kind: counts["position"]} if counts["position"] else {}, read))
    known = Attributes(path, header).with_units(units)
    factor = gadget_factor(known, 1.0)
    sides = box_sides(known, factor("position"))
    facts = (
        {} if "Omega0" in known or "OmegaM" not in known else {"Omega_m": known.number("OmegaM")}
    )
    files = ParticleFiles(path, known, parts, factor, scale_factor(known), sides, facts)
    return check_whole(files, totals(header))


def _attributes(path: Path) -> dict[str, Any]:
    """Returns the attributes of a block.

    Raises:
        UnreadableError, ValueError: the file has anything else.
    """
    header: dict[str, Any] = {}
    for line in read_text(path).splitlines():
        name, dtype, _, raw = line.split(" #HUMANE ")[0].split()
        kind = number_type(dtype, f"{path}: {name}", "fiuSb")
        values = np.frombuffer(bytes.fromhex(raw), kind)
        header[name] = values if len(values) > 1 else values[0]
    return header


def _read(
    folder: Path,
    mapped: Mapping[str, Sequence[Mapped]],
    mass: float,
    kind: int,
    names: Sequence[str],
    begin: int,
    end: int,
) -> list[np.ndarray]:
    """Returns quantities of particles of one type, see `Part`."""
    arrays = []
    for name in names:
        if name in mapped:
            values = block_values(mapped[name], begin, end)
            arrays.append(values if SHAPES[name] else values[:, 0])
        elif name == "mass" and mass:
            arrays.append(np.full(end - begin, mass))
        else:
            raise missing(str(folder), BLOCKS[name], [BLOCKS[each] for each in mapped])
    return arrays


def block_values(files: Sequence[Mapped], begin: int, end: int) -> np.ndarray:
    """Returns the values of a range of items [n, members] from the data files of a block."""
    pieces: list[np.ndarray] = []
    first = 0
    for mapped, count in files:
        low, high = max(begin - first, 0), min(end - first, count)
        first += count
        if low < high or (begin == end and count and not pieces):
            pieces.append(np.asarray(mapped()[low : max(low, high)]))
    return np.concatenate(pieces)


def block_files(folder: Path, kinds: str, members: int) -> Iterator[Mapped]:
    """Yields for each data file of a block what maps its values [items, members], and the items.

    Args:
        folder: the folder of the block.
        kinds: the kinds of NumPy's dtypes that its values may have.
        members: the number of values of an item.

    Raises:
        UnreadableError: the block has other values, or a data file has another size.
    """
    header = folder / "header"
    lines, taken = read_text(header).splitlines(), set[str]()
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
        if name in taken:
            raise UnreadableError(f"{header} names the data file {name} twice")
        taken.add(name)
        check_regular(folder / name)
        shape, size = (int(items), members), (folder / name).stat().st_size
        if size != (wanted := int(items) * members * dtype.itemsize):
            raise UnreadableError(
                f"{folder / name} has {size} bytes; must have {wanted}, for {items} items of "
                f"{members} values of {dtype.str}: copy it again"
            )
        yield functools.partial(np.memmap, folder / name, dtype, "r", 0, shape), int(items)
