"""Files of catalogues of halos and galaxies: HDF5 and bigfile. Nothing here imports TensorFlow."""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field

from flowpm_dist.io.bigfile import write_block, write_universe, write_values
from flowpm_dist.io.bigfile_particles import block_files
from flowpm_dist.io.errors import UserError
from flowpm_dist.io.files import ABOUT, GENERATOR, WriteError, read_json, reading, remove
from flowpm_dist.io.gadget_hdf5 import METADATA, take_room, unfilled
from flowpm_dist.io.labelled import LabelledArray
from flowpm_dist.io.opening import checked, number_type, open_hdf5
from flowpm_dist.io.particles import Header, mark_particles_complete
from flowpm_dist.io.snapshot import check_attributes

if TYPE_CHECKING:
    from meshimpl import ProcessMesh

TABLE, MEMBERS, MEMBER_BLOCK = "data", "members", "Members/ID"
"""The data sets of an HDF5 file, and the block of members of a bigfile."""
HALOTOOLS = {
    "host": "halo_id", "host_mass": "halo_mass",
    "mass_200m": "halo_m200m", "radius_200m": "halo_r200m",
    "mass_200c": "halo_m200c", "radius_200c": "halo_r200c",
}  # fmt: skip
FASTPM = {"id": "MinID", "number": "Length"}
NAME = r"[A-Za-z_][A-Za-z0-9_]*"
"""The form of a column's name, in memory and in files."""
_Size = Annotated[int, Field(ge=0, le=2**40)]


class StoredColumn(BaseModel):
    """How a file stores a column: under which names, its dtype, and the shape of one object's."""

    names: tuple[Annotated[str, Field(pattern=f"^{NAME}$", max_length=200)], ...]
    dtype: str
    shape: tuple[Annotated[int, Field(ge=1, le=1000)], ...]
    units: str
    meaning: str

    @property
    def stored(self) -> np.dtype[Any]:
        """The dtype in the file; truth values are numbers of one byte."""
        return np.dtype("u1") if self.dtype == "|b1" else number_type(self.dtype, "dtype")


class Facts(BaseModel):
    """What a file says about its catalogue."""

    generator: Literal["flowpm-dist"]
    complete: Literal[True]
    kind: Literal["halos", "galaxies"]
    count: _Size
    members: _Size | None
    columns: Annotated[dict[str, StoredColumn], Field(min_length=1)]
    about: dict[str, Any]

    @property
    def group(self) -> str:
        """The folder of the columns in a bigfile."""
        length = float(self.about.get("linking_length", 0))
        return "Galaxies" if self.kind == "galaxies" else f"LL-{length:05.3f}"

    @property
    def record(self) -> np.dtype[Any]:
        """The dtype of a row of the table of an HDF5 file."""
        fields: list[Any] = []
        for column in self.columns.values():
            shape = column.shape if len(column.names) == 1 else column.shape[1:]
            fields += [(name, column.stored, shape) for name in column.names]
        return np.dtype(fields)


def _names(kind: str, name: str, format: str) -> tuple[str, ...]:
    """Returns the names of a column in a file."""
    if format == "bigfile":
        plain = "".join(word[:1].upper() + word[1:] for word in name.split("_"))
        return (FASTPM.get(name, plain),)
    prefix = "halo_" if kind == "halos" else ""
    if name in ("position", "velocity"):
        return tuple(f"{prefix}{'v' * (name == 'velocity')}{axis}" for axis in "xyz")
    return (HALOTOOLS.get(name, prefix + name),)


def write_catalogue(
    path: Path,
    kind: str,
    columns: Mapping[str, LabelledArray],
    members: np.ndarray | None,
    about: Mapping[str, Any],
    mesh: ProcessMesh,
    format: str,
    *,
    overwrite: bool,
) -> None:
    """Writes a catalogue; each rank writes its rows. On all ranks together.

    See `Catalogue.write`, which also says what other codes read.

    Args:
        path: the file, or the folder of a bigfile.
        kind: "halos" or "galaxies".
        columns: this rank's rows by name.
        members: numbers of this rank's member particles, or None.
        about: attributes of the catalogue, which JSON can take.
        mesh: the ranks.
        format: "hdf5" or "bigfile".
        overwrite: whether the catalogue replaces one that is there.
    """
    if format not in WRITERS:
        raise ValueError(f"format = {format!r}: must be one of {', '.join(WRITERS)}")
    rows = len(next(iter(columns.values())).values)
    sizes = np.array([rows, 0 if members is None else len(members)], np.int64)
    gathered = mesh.gather_to_root(sizes)
    whole = np.zeros(0, np.int64) if gathered is None else np.concatenate(gathered)
    counts = mesh.array_from_root(whole).reshape(-1, 2)
    total = counts.sum(axis=0).tolist()
    facts = _facts(kind, columns, about, format, total[0], None if members is None else total[1])
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists: give another path, or overwrite=True")
    if path.exists():
        CatalogueFile.at(path)  # raises an error for anything else
    token = mesh.array_from_root(np.array([secrets.randbits(32)], np.int64))[0]
    aside = path.with_name(f".{path.name}.{token:08x}.partial")
    values = {name: each.values for name, each in columns.items()}
    try:
        WRITERS[format](aside, _Part(facts, values, members, mesh, counts))
        if mesh.rank == 0:
            older = aside.with_suffix(".replaced")
            if path.exists():
                path.rename(older)
            aside.replace(path)
            if older.exists():
                remove(older)
    except BaseException as error:
        if mesh.rank == 0:
            with suppress(OSError):
                remove(aside)
        if isinstance(error, OSError):
            raise WriteError.of(path, error) from error
        raise
    mesh.barrier()


def _facts(
    kind: str,
    columns: Mapping[str, LabelledArray],
    about: Mapping[str, Any],
    format: str,
    count: int,
    members: int | None,
) -> Facts:
    """Returns what a file says about its catalogue.

    Raises:
        ValueError: a column has a name that a file cannot have, or no real numbers.
    """
    stored, taken = {}, set[str]()
    for name, each in columns.items():
        names, dtype = _names(kind, name, format), each.values.dtype
        if dtype.kind not in "fiub" or not re.fullmatch(NAME, name) or taken & {*names}:
            raise ValueError(
                f"column {name!r} of {dtype} cannot be written: columns must hold real numbers, "
                f"and have different names of letters, digits and _, in the file too ({names[0]})"
            )
        taken |= {*names}
        rest = {"units": each.units, "meaning": each.meaning}
        little = dtype.newbyteorder("<").str
        stored[name] = StoredColumn(names=names, dtype=little, shape=each.values.shape[1:], **rest)
    plain = {"generator": GENERATOR, "complete": True, "kind": kind}
    sizes = {"count": count, "members": members, "columns": stored, "about": dict(about)}
    return Facts.model_validate({**plain, **sizes})


@dataclass(frozen=True)
class _Part:
    """What a rank writes of a catalogue, and how many rows and members each rank has."""

    facts: Facts
    columns: Mapping[str, np.ndarray]
    members: np.ndarray | None
    mesh: ProcessMesh
    counts: np.ndarray


def _write_hdf5(path: Path, part: _Part) -> None:
    """Writes an HDF5 file: rank 0 lays it out, then each rank writes its rows in their place."""
    facts, mesh, counts = part.facts, part.mesh, part.counts
    records = np.empty(counts[mesh.rank, 0], facts.record)
    for name, column in facts.columns.items():
        for at, field in enumerate(column.names):
            values = part.columns[name]
            records[field] = values if len(column.names) == 1 else values[:, at]
    data_sets = [(TABLE, records)]
    if part.members is not None:
        data_sets.append((MEMBERS, part.members.astype("<i8")))
    begins = np.zeros(len(data_sets), np.int64)
    if mesh.rank == 0:
        dtypes = {name: values.dtype for name, values in data_sets}
        begins[:] = _laid_out(path, facts, dtypes, counts.sum(axis=0))
    begins = mesh.array_from_root(begins)
    with path.open("r+b") as file:
        for n, (_, values) in enumerate(data_sets):
            before = int(counts[: mesh.rank, n].sum()) * values.dtype.itemsize
            file.seek(int(begins[n]) + before)
            file.write(values.tobytes())
    mesh.barrier()


def _laid_out(
    path: Path, facts: Facts, dtypes: Mapping[str, np.dtype[Any]], counts: np.ndarray
) -> list[int]:
    """Writes a file without its values; returns where each data set begins."""
    import h5py

    path.parent.mkdir(parents=True, exist_ok=True)
    text, header = facts.model_dump_json(), Header.of(facts.about)
    sizes = [int(n) * dtype.itemsize for n, dtype in zip(counts, dtypes.values(), strict=False)]
    take_room(path, sum(sizes), METADATA + len(text))
    with h5py.File(path, "w") as file:
        file.attrs[GENERATOR] = text
        file.attrs["Lbox"] = header.length
        file.attrs["particle_mass"] = header.mass * 1e10
        file.attrs["redshift"] = 1 / header.a - 1
        return [
            unfilled(file, name, dtype, (int(n),))
            for n, (name, dtype) in zip(counts, dtypes.items(), strict=False)
        ]


def _write_bigfile(path: Path, part: _Part) -> None:
    """Writes a bigfile: each rank a data file of each block, then rank 0 what describes them."""
    facts, mesh, counts = part.facts, part.mesh, part.counts
    blocks = dict(_blocks(facts))
    values = [*part.columns.values(), *([] if part.members is None else [part.members])]
    sums = []
    for (name, (dtype, _)), rows in zip(blocks.items(), values, strict=True):
        (path / name).mkdir(parents=True, exist_ok=True)
        with (path / name / f"{mesh.rank:06X}").open("wb") as file:
            sums.append(write_values(file, rows.astype(dtype)) % 2**32)
    gathered = mesh.gather_to_root(np.array(sums, np.int64))
    if gathered is None:
        return
    totals = np.stack(gathered)
    for n, (name, (dtype, width)) in enumerate(blocks.items()):
        of_ranks = counts[:, int(name == MEMBER_BLOCK)]
        files = list(zip(of_ranks.tolist(), totals[:, n].tolist(), strict=True))
        write_block(path / name, dtype.str, width, files)
    for group in {name.split("/")[0] for name in blocks}:
        write_block(path / group, "<i8", 0, [])
    write_universe(path, Header.of(facts.about))
    mark_particles_complete(path, facts.model_dump())


def _blocks(facts: Facts) -> Iterator[tuple[str, tuple[np.dtype[Any], int]]]:
    """Yields the names of blocks, with the dtype and the number of the values of one object."""
    for column in facts.columns.values():
        yield f"{facts.group}/{column.names[0]}", (column.stored, math.prod(column.shape))
    if facts.members is not None:
        yield MEMBER_BLOCK, (np.dtype("<i8"), 1)


WRITERS = {"hdf5": _write_hdf5, "bigfile": _write_bigfile}


@dataclass(frozen=True)
class CatalogueFile:
    """A catalogue that was written, whose rows are read as they are needed.

    Attributes:
        path: its file or folder.
        facts: what the file says about it.
    """

    path: Path
    facts: Facts

    @classmethod
    def at(cls, path: Path) -> CatalogueFile:
        """Returns the catalogue at a path.

        Raises:
            UserError: there is none, it is another code's, or it is damaged.
        """
        with reading(path, raises=UserError):
            if path.is_dir():
                stored: Any = read_json(path / ABOUT)
            else:
                with open_hdf5(path) as file:
                    stored = json.loads(file.attrs.get(GENERATOR, "{}"))
        if not isinstance(stored, dict) or stored.get("generator") != GENERATOR:
            raise UserError(
                f"{path} is no catalogue of {GENERATOR}: give one that Catalogue.write has written"
            )
        with reading(path, raises=UserError):
            facts = checked(Facts, stored, f"{path} is damaged: attribute")
            check_attributes(path, facts.about)
            for column in facts.columns.values():
                if not (column.stored.itemsize and len(column.names) in (1, *column.shape[:1])):
                    raise ValueError(f"its columns are damaged: {column.names}")
        return cls(path, facts)

    def read(self, begin: int, end: int) -> dict[str, np.ndarray]:
        """Returns columns of some of the objects.

        Raises:
            UserError: the file is damaged.
        """
        with reading(self.path, raises=UserError):
            stored, values = self.facts.columns, {}
            if self.path.is_dir():
                for name, (block, (dtype, width)) in zip(stored, _blocks(self.facts), strict=False):
                    rows = self._block(block, dtype, width, self.facts.count, begin, end)
                    values[name] = rows.reshape(-1, *stored[name].shape)
            else:
                records = self._data_set(TABLE, self.facts.record, self.facts.count, begin, end)
                for name, column in stored.items():
                    fields = [records[field] for field in column.names]
                    values[name] = fields[0] if len(fields) == 1 else np.stack(fields, axis=1)
            return {
                name: np.ascontiguousarray(x).astype(np.dtype(stored[name].dtype).newbyteorder("="))
                for name, x in values.items()
            }

    def read_members(self, begin: int, end: int) -> np.ndarray:
        """Returns some of the numbers of member particles.

        Raises:
            UserError: the file is damaged.
        """
        count, dtype = self.facts.members or 0, np.dtype("<i8")
        with reading(self.path, raises=UserError):
            if not 0 <= begin <= end <= count:
                raise ValueError(f"it has {count} members, not those up to {end}")
            if self.path.is_dir():
                rows = self._block(MEMBER_BLOCK, dtype, 1, count, begin, end).ravel()
            else:
                rows = self._data_set(MEMBERS, dtype, count, begin, end)
            return rows.astype(np.int64)

    def _data_set(
        self, name: str, dtype: np.dtype[Any], count: int, begin: int, end: int
    ) -> np.ndarray:
        with open_hdf5(self.path) as file:
            data = file.get(name)
            room = count * dtype.itemsize <= self.path.stat().st_size
            if getattr(data, "dtype", None) != dtype or data.shape != (count,) or not room:
                raise ValueError(f"its data set {name} is damaged: must have {count} rows")
            rows: np.ndarray = data[begin:end]
        return rows

    def _block(
        self, name: str, dtype: np.dtype[Any], width: int, count: int, begin: int, end: int
    ) -> np.ndarray:
        pieces, first = [np.zeros((0, width), dtype)], 0
        for mapped, rows in block_files(self.path / name, dtype.kind, width):
            low, high = max(begin - first, 0), min(end - first, rows)
            if low < high:
                pieces.append(np.asarray(mapped()[low:high]))
            first += rows
        if first != count or any(piece.dtype != dtype for piece in pieces):
            raise ValueError(f"its block {name} is damaged: must have {count} rows of {dtype}")
        return np.concatenate(pieces)
