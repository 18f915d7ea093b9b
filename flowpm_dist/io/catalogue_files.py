"""Files of catalogues, in HDF5 and bigfile, written by all ranks. Nothing here imports TensorFlow.

Columns have the names of nbodykit where it has one, see `NAMES`. Attributes are JSON.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, Field

from flowpm_dist.io.bigfile import write_block
from flowpm_dist.io.errors import UserError
from flowpm_dist.io.files import (
    GENERATOR,
    WriteError,
    read_json,
    reading,
    write_json,
    written_whole,
)
from flowpm_dist.io.opening import check_numbers, checked, open_hdf5
from flowpm_dist.io.other_codes import block_files

if TYPE_CHECKING:
    import h5py

    from meshimpl.process_mesh import ProcessMesh

NAMES = {
    "id": "ID",
    "number": "Length",
    "mass": "Mass",
    "position": "Position",
    "velocity": "Velocity",
}
"""Names in files of some columns; the others keep theirs."""
SPARE = 2**20
"""Room that is left on a disk [bytes]."""
MEMBERS = "Members"
"""The column of the members of all halos, which has rows of its own."""
ABOUT = "catalogue.json"
"""The file with the attributes of a catalogue in bigfile, which is written last."""


class Description(BaseModel):
    """What a file says of a catalogue.

    Attributes:
        kind: "halos" or "galaxies".
        rows: the number of objects.
        columns: for each column the shape of a row.
        about: the catalogue's attributes.
    """

    kind: str = Field(pattern="^(halos|galaxies)$")
    rows: int = Field(ge=0)
    columns: dict[str, tuple[int, ...]] = Field(min_length=1)
    about: dict[str, Any]


def write_catalogue(
    path: Path,
    columns: Mapping[str, np.ndarray],
    description: Mapping[str, Any],
    mesh: ProcessMesh,
    format: str,
) -> None:
    """Writes a catalogue. On all ranks together.

    Args:
        path: an HDF5 file, which rank 0 writes column by column; or a folder in bigfile, where each
            rank writes its own data files.
        columns: this rank's rows by name [n, ...].
        description: see `Description`.
        mesh: the ranks.
        format: "hdf5" or "bigfile".

    Raises:
        WriteError: this rank cannot write. Only this rank raises it, and the job must end.
    """
    try:
        (_write_hdf5 if format == "hdf5" else _write_bigfile)(path, columns, description, mesh)
    except OSError as error:
        raise WriteError.of(path, error) from error


def _write_hdf5(
    path: Path,
    columns: Mapping[str, np.ndarray],
    description: Mapping[str, Any],
    mesh: ProcessMesh,
) -> None:
    size = sum(x.itemsize * math.prod(x.shape[1:]) for x in columns.values()) * description["rows"]
    with _new_hdf5(path, size, description) if mesh.rank == 0 else nullcontext() as file:
        for name, values in columns.items():
            parts = mesh.gather_to_root(values)
            if file is not None and parts is not None:
                file.create_dataset(NAMES.get(name, name), data=np.concatenate(parts))


@contextmanager
def _new_hdf5(path: Path, size: int, description: Mapping[str, Any]) -> Iterator[h5py.File]:
    """Yields a new file with the attributes of a catalogue of some size [bytes]."""
    import h5py

    path.parent.mkdir(parents=True, exist_ok=True)
    # On a full disk HDF5 may end the process without a message.
    if shutil.disk_usage(path.parent).free < SPARE + size:
        raise WriteError(f"cannot write {path}: the disk is full")
    with written_whole(path) as aside, h5py.File(aside, "w") as file:
        file.attrs["generator"] = GENERATOR
        file.attrs["catalogue"] = json.dumps(dict(description))
        yield file


def _write_bigfile(
    path: Path,
    columns: Mapping[str, np.ndarray],
    description: Mapping[str, Any],
    mesh: ProcessMesh,
) -> None:
    if mesh.rank == 0:
        path.mkdir(parents=True)
    mesh.barrier()
    for name, values in columns.items():
        plain = values.astype(np.uint8) if values.dtype == bool else values
        little = plain.astype(plain.dtype.newbyteorder("<"), copy=False)
        block, written = path / NAMES.get(name, name), little.tobytes()
        block.mkdir(exist_ok=True)
        (block / f"{mesh.rank:06X}").write_bytes(written)
        total = int(np.frombuffer(written, np.uint8).sum(dtype=np.int64)) % 2**32
        parts = mesh.gather_to_root(np.array([len(values), total], np.int64))
        if parts is not None:
            members = int(np.prod(values.shape[1:]))
            files = [(int(rows), int(checksum)) for rows, checksum in parts]
            write_block(block, little.dtype.str.replace("|", "<"), members, files)
    if mesh.rank == 0:
        header = description["about"]
        attributes = {"BoxSize": np.array(header["box_size"]), "Time": header["a"]}
        write_block(path / "Header", "<i8", 0, [], attributes)
        write_json(path / ABOUT, description)
    mesh.barrier()


def read_catalogue(path: Path) -> tuple[dict[str, np.ndarray], Description]:
    """Returns all rows of a catalogue.

    Args:
        path: the HDF5 file, or the folder in bigfile.

    Raises:
        UserError: there is no catalogue, or one that this package did not write.
        UnreadableError: it is damaged.
    """
    if not path.exists():
        raise UserError(f"{path}: there is no such catalogue")
    return _read_bigfile(path) if path.is_dir() else _read_hdf5(path)


def _read_hdf5(path: Path) -> tuple[dict[str, np.ndarray], Description]:
    with open_hdf5(path) as file:
        if "catalogue" not in file.attrs:
            raise UserError(f"{path} is not a catalogue of this package: it has no such attribute")
        about = _description(path, json.loads(str(file.attrs["catalogue"])))
        columns = {}
        for name, shape in about.columns.items():
            place = NAMES.get(name, name)
            check_numbers(file.get(place), f"{path}:{place}", "fiub", (about.rows, *shape))
            columns[name] = file[place][:]
        if MEMBERS in file:
            check_numbers(file[MEMBERS], f"{path}:{MEMBERS}", "iu", (int(columns["number"].sum()),))
            columns[MEMBERS] = file[MEMBERS][:]
    return columns, about


def _read_bigfile(path: Path) -> tuple[dict[str, np.ndarray], Description]:
    if not (path / ABOUT).exists():
        raise UserError(f"{path} is not a complete catalogue of this package: it has no {ABOUT}")
    about = _description(path / ABOUT, read_json(path / ABOUT))
    columns = {}
    with reading(path):
        for name, shape in about.columns.items():
            place = path / NAMES.get(name, name)
            parts = [read() for read, _ in block_files(place, "fiu", int(np.prod(shape)))]
            rows = np.concatenate(parts) if parts else np.zeros((0, *shape))
            if len(rows) != about.rows:
                raise UserError(f"{place} has {len(rows)} rows; must have {about.rows}")
            columns[name] = rows.reshape(about.rows, *shape)
        if (path / MEMBERS).is_dir():
            parts = [read()[:, 0] for read, _ in block_files(path / MEMBERS, "iu", 1)]
            columns[MEMBERS] = np.concatenate(parts)
    return columns, about


def _description(path: Path, table: Any) -> Description:
    return checked(Description, table, f"{path}: the attributes are damaged: key")
