"""Particles of Gadget-2, Gadget-4 and AREPO in HDF5. Nothing here imports TensorFlow."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flowpm_dist.io.files import UnreadableError
from flowpm_dist.io.opening import check_numbers, check_stored, files_of, open_hdf5
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
    totals,
)
from flowpm_dist.options.regular_files import first_bytes

if TYPE_CHECKING:
    import h5py

BLOCKS = {"position": ("Coordinates",), "velocity": ("Velocities",), "mass": ("Masses",),
          "id": ("ParticleIDs",)}  # fmt: skip
"""The data sets of the quantities, by the names that they may have."""
HEADERS = ("Units", "Parameters", "Header")
"""The groups with attributes that are read. Of two values of a name, the later group's counts."""
WORDS = "HDF5 of Gadget or AREPO"
SIGNATURE = b"\x89HDF\r\n\x1a\n"
"""The first bytes of a file in HDF5."""


def recognises(path: Path) -> bool:
    """Returns whether a path is a file in HDF5; also if its name alone says so."""
    return path.is_file() and (path.suffix in (".hdf5", ".h5") or first_bytes(path, 8) == SIGNATURE)


def is_alone(path: Path) -> bool:
    """Returns whether a file says that it is the only one of its snapshot."""
    with open_hdf5(path) as file:
        header = attributes_of(file, HEADERS)
    return "NumFilesPerSnapshot" in header and number_of_files(header) == 1


def open_files(path: Path, names: Sequence[Path], units: Mapping[str, Any]) -> ParticleFiles:
    """Returns a snapshot in Gadget's HDF5 (Springel and others 2021, arXiv:2010.03567).

    Lengths are times h, and velocities are divided by sqrt(a).

    Args:
        path: the snapshot, for messages.
        names: its files, in order.
        units: the units that its files may lack.

    Raises:
        SnapshotError: a file is missing, or a unit.
        UnreadableError: a file is damaged.
    """
    headers, parts, tracers = [], [], set[int]()
    for name in names:
        with open_hdf5(name) as file:
            header = attributes_of(file, HEADERS)
            here = counts_here(header)
            counts = checked_counts(file, name, here, BLOCKS)
        tracers |= {*here} - {*counts}
        read = functools.partial(read_part, name, BLOCKS, mass_table(header))
        parts.append(Part(counts, read))
        headers.append(header)
    header = headers[0]
    check_number_of_files(header, names)
    check_same(headers, names)
    known = Attributes(path, header).with_units(units)
    a = scale_factor(known)
    factor = gadget_factor(known, math.sqrt(a))
    files = ParticleFiles(path, known, parts, factor, a, box_sides(known, factor("position")))
    expected = [0 if kind in tracers else n for kind, n in enumerate(totals(header))]
    return check_whole(files, expected)


def attributes_of(file: h5py.File, groups: Sequence[str]) -> dict[str, Any]:
    """Returns the attributes of groups of a file, those that it has."""
    there = [file[group] for group in groups if group in file]
    return {key: value for group in there for key, value in group.attrs.items()}


def counts_here(header: Mapping[str, Any]) -> dict[int, int]:
    """Returns the number of particles in a file by type, where there are any.

    Raises:
        KeyError, TypeError, ValueError: the header lacks it, or has other values.
    """
    numbers = header["NumPart_ThisFile"]
    return {kind: int(n) for kind, n in enumerate(numbers) if int(n)}


def mass_table(header: Mapping[str, Any]) -> list[float]:
    """Returns the mass of each particle by type [unit of the file]; 0 where it is not the same."""
    return [float(mass) for mass in np.ravel(np.asarray(header.get("MassTable", 0.0), float))]


def first_of(group: h5py.Group, names: Sequence[str]) -> h5py.Dataset | None:
    """Returns the first data set of a group that has one of these names."""
    return next((group[name] for name in names if name in group), None)


def checked_counts(
    file: h5py.File,
    name: Path,
    counts: Mapping[int, int],
    blocks: Mapping[str, Sequence[str]],
) -> dict[int, int]:
    """Checks dtypes, shapes and sizes of all data sets before their values are read.

    Returns:
        The number of particles by type; types without positions, such as tracers, are left out.

    Raises:
        UnreadableError: one is wrong, or particles of a type are not there at all.
    """
    whole: dict[str, h5py.Dataset] = {}
    placed: dict[int, int] = {}
    for kind, count in counts.items():
        group = file.get(f"PartType{kind}", {})
        if not len(group):
            raise UnreadableError(f"{name}:PartType{kind} is missing; must hold {count} particles")
        if first_of(group, blocks["position"]) is None:
            continue
        placed[kind] = count
        for quantity, names in blocks.items():
            data = first_of(group, names)
            where = f"{name}:PartType{kind}/{names[0]}"
            if data is not None:
                check_numbers(data, where, KINDS[quantity], (count, *SHAPES[quantity]))
                whole[where] = data
    for where, data in whole.items():
        check_stored(data, where)
    return placed


def read_part(
    path: Path,
    blocks: Mapping[str, Sequence[str]],
    masses: Sequence[float],
    kind: int,
    names: Sequence[str],
    begin: int,
    end: int,
) -> list[np.ndarray]:
    """Returns quantities of particles in one file, see `Part`.

    Args:
        path: the file.
        blocks: names of the data sets.
        masses: see `mass_table`.
        kind, names, begin, end: see `Part`.

    Raises:
        SnapshotError: the file lacks a quantity.
        UnreadableError: a file that holds values of it is missing.
    """
    arrays = []
    with open_hdf5(path, again=True) as file:
        group = file[f"PartType{kind}"]
        for name in names:
            data = first_of(group, blocks[name])
            if data is not None:
                arrays.append(data[begin:end])
                files_of(data, f"{path}:{data.name}")  # since it was opened, one may have gone
            elif name == "mass" and any(masses[kind : kind + 1]):
                arrays.append(np.full(end - begin, masses[kind]))
            else:
                raise missing(f"{path}:PartType{kind}", blocks[name][0], [*group])
    return arrays
