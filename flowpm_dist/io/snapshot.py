"""`snapshot.zarr`: the fields of a universe at one time. Each rank writes its own block.

A snapshot is a zarr group (version 3) that any zarr reader can open. No chunk holds cells of two
ranks, so all ranks can write at the same time, without gathering. The attribute `complete` of
the group is set last.
"""

from __future__ import annotations

import itertools
import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import pydantic
from pydantic import AfterValidator, BaseModel, ConfigDict

from flowpm_dist.cosmology.background import A_MAX
from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.io.errors import UserError
from flowpm_dist.io.files import (
    GENERATOR,
    SNAPSHOT,
    UnreadableError,
    WriteError,
    reading,
    snapshot_attributes,
)
from flowpm_dist.io.formats import write_particles
from flowpm_dist.io.opening import checked, missing_chunks, not_finite, open_arrays
from flowpm_dist.io.particle_formats import PARTICLE_FORMATS, checked_format, particle_folders
from flowpm_dist.options.types import EvenSide, Length

if TYPE_CHECKING:
    import zarr

    from flowpm_dist.grid.field import Field

FORMAT = 1
DIMENSIONS = ("x", "y", "z", "component")
CHUNK_BYTES = 2**25

CONVENTIONS = {
    "axes": "x, y, z (, component); the centre of cell i lies at i * box_size / grid",
    "lengths": "comoving [Mpc/h]",
    "particles": "one for each cell; position = cell + displacement, periodic in the box",
    "velocity": "canonical, a^2 dx/dt with the time in 1/H0",
    "a": "scale factor, 1 today",
}
FIELDS = {
    "white_noise": ("1", "unit normal noise in real space that the universe grew from"),
    "linear_delta": (
        "1",
        "linear overdensity of cold matter and baryons, extrapolated to a = 1",
    ),
    "displacement": ("Mpc/h", "displacement of each particle from its cell"),
    "velocity": ("Mpc/h H0", "canonical velocity a^2 dx/dt of each particle"),
    "density": ("mean density", "particle density by cloud-in-cell, with mean 1"),
}
FieldName = Literal["displacement", "velocity", "density", "white_noise", "linear_delta"]
VECTORS: tuple[FieldName, ...] = ("displacement", "velocity")
DEFAULT_FIELDS: tuple[FieldName, ...] = (*VECTORS, "density")
"""The fields that are written by default; a seed reproduces the others."""


class SnapshotError(UserError):
    """A path holds no complete snapshot."""


@dataclass(frozen=True)
class Snapshot:
    """A snapshot on disk. An array is read when it is needed.

    Attributes:
        arrays: zarr arrays by name, [nx, ny, nz] or [nx, ny, nz, 3].
        attributes: scale factor "a", "box_size" [Mpc/h], "grid", "cosmology", "seed", "paired",
            "halo" [particle spacings], "options" of initial conditions and force, and
            "conventions". Snapshots by `flowpm-dist simulate` also have "versions" and "config",
            the run file as TOML.
        path: the folder of the snapshot.
    """

    arrays: Mapping[str, zarr.Array[Any]]
    attributes: Mapping[str, Any]
    path: Path = Path(SNAPSHOT)

    def __getitem__(self, name: str) -> np.ndarray:
        """Returns the whole array of a name, in memory.

        Raises:
            KeyError: the snapshot has no such array.
            UnreadableError: a file of it is damaged, or a value is not finite.
        """
        if name not in self.arrays:
            raise KeyError(f"the snapshot has no {name!r}; it has {', '.join(self.arrays)}")
        return self.values(name, ...)

    def values(self, name: str, place: Any) -> np.ndarray:
        """Returns a part of an array, in memory.

        Args:
            name: name of the array.
            place: slices along its axes, or `...` for all of it.

        Raises:
            SnapshotError: the snapshot has no such array.
            UnreadableError: a file of it is damaged, or a value is not finite.
        """
        array = self.array(name)
        with reading(self.path / name):
            values = np.asarray(array[place])
        if (wrong := not_finite(values)) is not None:
            begins = [] if place is ... else [each.start or 0 for each in place]
            there = [i + b for i, b in itertools.zip_longest(wrong, begins, fillvalue=0)]
            raise UnreadableError(
                f"{self.path / name} has {values[*wrong]} at {there}: all values must be finite"
            )
        return values

    def array(self, name: str) -> zarr.Array[Any]:
        """Returns an array without reading it; its slices can be read.

        Raises:
            SnapshotError: the snapshot has no such array.
        """
        if name not in self.arrays:
            raise SnapshotError(f"the snapshot has no {name!r}; it has {', '.join(self.arrays)}")
        return self.arrays[name]


def snapshot_name(format: str) -> str:
    """Returns the name of the folder of a snapshot in a format.

    Raises:
        ValueError: there is no such format.
    """
    return SNAPSHOT if checked_format(format) == "zarr" else PARTICLE_FORMATS[format].folder


def load_snapshot(path: str | Path) -> Snapshot:
    """Opens a complete snapshot.

    Args:
        path: `snapshot.zarr`, or the output folder that holds it.

    Raises:
        SnapshotError: there is no snapshot, its writing was interrupted, it has the format of
            another version, an array does not hold numbers, or a chunk is missing.
    """
    path = Path(path)
    if path.name != SNAPSHOT and (path / SNAPSHOT).exists():
        path = path / SNAPSHOT
    attributes = snapshot_attributes(path)
    for other in particle_folders():
        if attributes is None and (path.name == other or (path / other).exists()):
            raise SnapshotError(
                f"{path} holds {other}, which is for other codes; flowpm-dist reads {SNAPSHOT}"
            )
    attributes = complete_attributes(path, "is not a snapshot")
    if attributes.get("format") != FORMAT:
        version = reprlib.repr(attributes.get("format"))
        raise SnapshotError(f"{path} has format {version}; this version reads format {FORMAT}")
    with reading(path, raises=SnapshotError):
        arrays = open_arrays(path)
    if lost := missing_chunks(path, arrays):
        raise SnapshotError(f"{lost}: copy the snapshot again, or run again")
    return Snapshot(arrays, attributes, path)


def is_whole(path: Path) -> bool:
    """Returns whether `load_snapshot` opens a snapshot: it is complete, and no chunk is missing."""
    try:
        load_snapshot(path)
    except SnapshotError:
        return False
    return True


def _cosmology_of(numbers: Any) -> Cosmology:
    try:
        return Cosmology(**numbers)
    except TypeError as error:
        raise ValueError(str(error)) from error


class _Attributes(BaseModel):
    """The attributes of a snapshot that say what its particles are."""

    model_config = ConfigDict(allow_inf_nan=False)

    a: Annotated[float, pydantic.Field(ge=0, le=A_MAX)]
    grid: tuple[EvenSide, EvenSide, EvenSide]
    box_size: tuple[Length, Length, Length]
    cosmology: Annotated[Any, AfterValidator(_cosmology_of)]
    options: dict[str, Any] = {}
    halo: int = 1
    seed: int | None = None
    paired: bool = False
    Omega_de: float | None = None


def check_attributes(source: str | Path, attributes: Mapping[str, Any]) -> tuple[int, int, int]:
    """Checks the attributes that say what the particles of a snapshot are; returns the grid.

    Raises:
        SnapshotError: an attribute is missing or wrong.
    """
    with reading(Path(source), raises=SnapshotError):
        return checked(_Attributes, dict(attributes), f"{source} is damaged: attribute").grid


def check_particles(source: str | Path, snapshot: Snapshot) -> None:
    """Checks that a snapshot has the particles, and attributes that fit them.

    Raises:
        SnapshotError: it lacks their displacement or velocity, or an attribute is missing or wrong.
    """
    missing = [name for name in VECTORS if name not in snapshot.arrays]
    if missing:
        raise SnapshotError(
            f"{source} has no {' and no '.join(missing)}, which is needed here; it has "
            f"{', '.join(snapshot.arrays)} (a run writes what [output] fields names)"
        )
    grid = check_attributes(source, snapshot.attributes)
    for name in VECTORS:
        array = snapshot.array(name)
        if array.shape != (*grid, 3) or array.dtype.name not in ("float32", "float64"):
            raise SnapshotError(
                f"{source} is damaged: {name} has {array.dtype} {list(array.shape)}, its "
                "attributes do not match its particles; must have float32 or float64 "
                f"{[*grid, 3]}"
            )


def complete_attributes(path: Path, otherwise: str) -> dict[str, object]:
    """Returns the attributes of a complete zarr group.

    Args:
        path: the group.
        otherwise: the message if the path is no group written by flowpm-dist.

    Raises:
        SnapshotError: it is no such group, or its writing was interrupted.
    """
    attributes = snapshot_attributes(path)
    if attributes is None:
        raise SnapshotError(f"{path} {otherwise} of {GENERATOR}")
    if not attributes.get("complete"):
        raise SnapshotError(f"{path} is not complete: the run that wrote it was interrupted")
    return attributes


def chunk_shape(block: tuple[int, ...], itemsize: int, limit: int = CHUNK_BYTES) -> tuple[int, ...]:
    """Returns the shape of chunks of at most `limit` bytes that tile a rank's block exactly.

    Args:
        block: shape of the block, [nx, ny, nz] or [nx, ny, nz, 3], the same on every rank.
        itemsize: size of one value [bytes].
        limit: greatest size of a chunk, before compression [bytes].
    """
    chunk = list(block)
    for axis in range(min(3, len(block))):
        rest = itemsize * math.prod(chunk) // chunk[axis]
        lengths = [n for n in range(1, block[axis] + 1) if block[axis] % n == 0]
        chunk[axis] = max((n for n in lengths if n * rest <= limit), default=1)
    return tuple(chunk)


def snapshot_bytes(
    grid: tuple[int, int, int], itemsize: int, fields: Iterable[str] = DEFAULT_FIELDS
) -> int:
    """Returns the size of all values of a snapshot, before compression [bytes].

    Args:
        grid: number of cells along each side.
        itemsize: size of one value [bytes].
        fields: names of the fields in the snapshot.
    """
    values = sum(3 if name in VECTORS else 1 for name in fields)
    return values * math.prod(grid) * itemsize


def save_fields(
    folder: Path, fields: Mapping[str, Field], attributes: Mapping[str, Any], format: str = "zarr"
) -> Path:
    """Writes a whole snapshot: each rank writes its part, and all ranks call it together.

    Args:
        folder: the folder to make the snapshot in, on a file system that all ranks see.
        fields: the fields by name; for a format of particles, displacement and velocity.
        attributes: the snapshot's attributes; JSON can hold them.
        format: see `checked_format`.

    Returns:
        The path of the snapshot, a folder itself.

    Raises:
        FileExistsError: the folder has such a snapshot. Raised on every rank.
        ValueError: there is no such format.
        WriteError: this rank cannot write. Only this rank raises it, and the job must end.
    """
    import tensorflow as tf

    path = folder / snapshot_name(format)
    mesh = next(iter(fields.values())).mesh
    if int(mesh.world.allreduce(tf.constant(int(path.exists())), "max")):
        raise FileExistsError(f"{path} exists: give another folder, or remove it")
    if format == "zarr":
        write_snapshot(path, fields, attributes)
        if mesh.rank == 0:
            mark_complete(path)
    else:
        write_particles(path, fields, attributes, format)
    mesh.barrier()
    return path


def save_attributes(folder: Path, attributes: Mapping[str, Any]) -> None:
    """Writes a snapshot without fields, whose attributes say that a run is complete. On one rank.

    Raises:
        WriteError: it cannot be written.
    """
    path = folder / snapshot_name("zarr")
    try:
        new_group(path, attributes, {}, complete=True)
    except OSError as error:
        raise WriteError.of(path, error) from error


def write_snapshot(
    path: Path,
    fields: Mapping[str, Field],
    attributes: Mapping[str, Any],
    meanings: Mapping[str, tuple[str, str]] = FIELDS,
    dimensions: tuple[str, ...] = DIMENSIONS,
) -> None:
    """Writes fields: all ranks call it, each writes its block, then rank 0 calls `mark_complete`.

    Args:
        path: the new zarr group, on a file system that all ranks see.
        fields: the fields by name, all on one mesh.
        attributes: the group's attributes; JSON can hold them.
        meanings: units and meaning of each field by name, which become attributes of its array.
        dimensions: names of the axes; a field with fewer axes has the first of them.

    Raises:
        WriteError: this rank cannot write. Only this rank raises it, and the job must end.
    """
    mesh = next(iter(fields.values())).mesh
    try:
        if mesh.rank == 0:
            group = new_group(path, attributes, CONVENTIONS)
            for name, field in fields.items():
                dtype = np.dtype(field.dtype.as_numpy_dtype)
                chunks = chunk_shape(tuple(field.block.shape), dtype.itemsize)
                about = dimensions[: len(field.grid)], *meanings.get(name, ("1", name))
                new_array(group, name, field.grid, chunks, dtype, *about)
        mesh.barrier()
        for name, field in fields.items():
            _write_block(path / name, field)
    except OSError as error:
        raise WriteError.of(Path(error.filename or path), error) from error
    mesh.barrier()


def new_group(
    path: Path,
    attributes: Mapping[str, Any],
    conventions: Mapping[str, str],
    *,
    complete: bool = False,
) -> zarr.Group:
    """Creates a zarr group; one that gets arrays is not yet complete, see `mark_complete`."""
    import zarr

    marks = {"generator": GENERATOR, "format": FORMAT, "complete": complete}
    about = {**attributes, "conventions": dict(conventions), **marks}
    return zarr.create_group(path, attributes=about)


def new_array(
    group: zarr.Group,
    name: str,
    shape: Sequence[int],
    chunks: tuple[int, ...],
    dtype: np.dtype[Any],
    dimensions: tuple[str, ...],
    units: str,
    meaning: str,
) -> zarr.Array[Any]:
    """Creates an array of NaN in a zarr group; units and meaning become its attributes."""
    from zarr.codecs import BloscCodec, Crc32cCodec

    return group.create_array(
        name,
        shape=tuple(shape),
        chunks=chunks,
        dtype=dtype,
        fill_value=np.nan,
        # With a checksum, because blosc alone unpacks a damaged chunk to wrong values.
        compressors=(BloscCodec(cname="zstd", clevel=1, shuffle="shuffle"), Crc32cCodec()),
        dimension_names=dimensions,
        attributes={"units": units, "meaning": meaning},
    )


def _write_block(path: Path, field: Field) -> None:
    import zarr

    block = np.asarray(field.block)
    place = tuple(slice(o, o + n) for o, n in zip(field.offset, block.shape, strict=False))
    try:
        zarr.open_array(path, mode="r+")[place] = block
    except OSError as error:
        raise WriteError.of(path, error) from error


def mark_complete(path: Path) -> None:
    """Marks a snapshot as complete. Rank 0 calls it after every rank has written.

    Args:
        path: the zarr group.

    Raises:
        WriteError: chunks are missing, or the attribute cannot be written.
    """
    import zarr

    try:
        group = zarr.open_group(path, mode="r+")
        if lost := missing_chunks(path, dict(group.arrays())):
            raise WriteError(lost)
        group.attrs["complete"] = True
    except OSError as error:
        raise WriteError.of(path, error) from error
