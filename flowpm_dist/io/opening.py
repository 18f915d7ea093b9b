"""Files that users name: opened if they are whole and regular, and checked by what they must hold.

Whoever wrote such a file chose what is in it. Each function here either returns what it promises or
names the file in one sentence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from pydantic import TypeAdapter, ValidationError

from flowpm_dist.io.files import UnreadableError, check_regular_files, reading
from flowpm_dist.options.regular_files import check_regular

if TYPE_CHECKING:
    import h5py
    import zarr

T = TypeVar("T")
NESTED = 4
"""How often a data set may be made of others that are made of others; HDF5 follows circles."""


def hdf5_file(path: Path, *, again: bool = False) -> h5py.File:
    """Returns a regular HDF5 file, open for reading.

    Args:
        path, again: see `open_hdf5`.

    Raises:
        OSError, RuntimeError: it cannot be read, or it names another file that is no regular one.
    """
    import h5py

    if again:
        check_regular(path)
    else:
        _check_named(path, set())
    return h5py.File(path, "r")


def _check_named(path: Path, seen: set[Path]) -> None:
    """Checks that a file, and all files that it names if it is HDF5, are regular ones.

    Raises:
        OSError: one is not.
    """
    import h5py

    check_regular(path)
    if path.resolve() in seen or not (path.exists() and h5py.is_hdf5(path)):
        return
    seen.add(path.resolve())
    others: set[str] = set()

    def note_link(name: str, link: object) -> None:
        if isinstance(link, h5py.ExternalLink):
            others.add(link.filename)

    def note_item(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset):
            others.update(other for other, *_ in item.external or ())
            if item.is_virtual:
                others.update(source.file_name for source in item.virtual_sources())

    with h5py.File(path, "r") as file:
        file.visititems_links(note_link)
        file.visititems(note_item)  # by hard links alone
    for other in others - {"."}:  # the file itself
        for place in _places(path, other):
            _check_named(place, seen)


def _places(path: Path, other: str) -> list[Path]:
    """Returns where HDF5 looks for a file that the file at a path names, in this order."""
    named = Path(other)
    name = named.name if named.is_absolute() else other
    places = [path.parent / name, Path(name), path.resolve().parent / name]
    return [named, *places] if named.is_absolute() else places


@contextmanager
def open_hdf5(path: Path, *, again: bool = False) -> Iterator[h5py.File]:
    """Yields a regular HDF5 file, open for reading; see `reading` for what is raised inside.

    Args:
        path: the file.
        again: whether it was opened before. Then all files that it names are known to be regular,
            and are not looked for again, which takes longer than reading some particles.

    Raises:
        UnreadableError: the file cannot be read.
    """
    with reading(path), hdf5_file(path, again=again) as file:
        yield file


def check_stored(data: h5py.Dataset, where: str, depth: int = 0) -> None:
    """Checks that a data set has all its values: HDF5 reads zeros in place of the others.

    Args:
        data: the data set. If it is virtual, its parts are checked as well.
        where: file and name, for the message.
        depth: how many data sets are made of it, one of another.

    Raises:
        UnreadableError: values are missing, or a file that holds them.
    """
    if data.is_virtual or data.external:
        files = files_of(data, where)
        check = _check_parts if data.is_virtual else _check_raw
        check(data, where, files, depth)
        return
    if data.chunks is None:
        here, wanted, unit = data.id.get_storage_size(), data.nbytes, "bytes"
    else:
        sides = [-(-n // c) for n, c in zip(data.shape, data.chunks, strict=True)]
        here, wanted, unit = data.id.get_num_chunks(), math.prod(sides), "chunks"
    if here < wanted:
        raise UnreadableError(f"{where} has {here} of {wanted} {unit}: copy it again")


def files_of(data: h5py.Dataset, where: str) -> dict[str, Path]:
    """Returns the other files that hold the values of a data set, by their names in it.

    Raises:
        UnreadableError: one is missing.
    """
    itself = Path(data.file.filename)
    named = {name: [Path(name)] for name, *_ in data.external or ()}  # of the current folder
    for source in _sources(data):
        name = source.file_name
        named[name] = [itself] if name == "." else _places(itself, name)
    files = {}
    for name, places in named.items():
        there = next((place for place in places if place.is_file()), None)
        if there is None:
            raise UnreadableError(
                f"{where} has values in the file {name}, which is missing: copy it as well"
            )
        files[name] = there
    return files


def _sources(data: h5py.Dataset) -> list[Any]:
    """Returns the sources of a virtual data set that have any values; none if it is not virtual."""
    sources = data.virtual_sources() if data.is_virtual else ()
    return [source for source in sources if source.vspace.get_select_npoints()]


def _check_parts(data: h5py.Dataset, where: str, files: Mapping[str, Path], depth: int) -> None:
    """Checks the parts of a virtual data set; see `check_stored`."""
    import h5py

    if depth == NESTED:
        raise UnreadableError(f"{where} is virtual as all it is made of, {NESTED} times or more")
    mapped = 0
    for source in _sources(data):
        count, chosen = source.vspace.get_select_npoints(), source.src_space
        mapped += count
        place = f"{files[source.file_name]}:{source.dset_name}"
        with open_hdf5(files[source.file_name], again=True) as file:
            part = file.get(source.dset_name)
            if not isinstance(part, h5py.Dataset):
                raise UnreadableError(f"{where} has values in {place}, which is missing")
            if chosen.get_select_type() == h5py.h5s.SEL_ALL:
                inside = part.size == count
            else:
                ends = chosen.get_select_bounds()[1]
                inside = len(ends) == part.ndim and all(np.less(ends, part.shape))
            if not inside:
                raise UnreadableError(
                    f"{where} has values in {place}, whose shape {list(part.shape)} does not have "
                    "them all: copy it again"
                )
            check_stored(part, place, depth + 1)
    if mapped < data.size:
        raise UnreadableError(f"{where} is virtual and has {mapped} of {data.size} values")


def _check_raw(data: h5py.Dataset, where: str, files: Mapping[str, Path], depth: int) -> None:
    """Checks the sizes of files with raw values; see `check_stored`."""
    left = data.nbytes
    for name, offset, size in data.external:
        wanted = offset + min(size, left)
        left = max(left - size, 0)
        if (here := files[name].stat().st_size) < wanted:
            raise UnreadableError(
                f"{where} has values in the file {name} of {here} bytes; it must have {wanted}: "
                "copy it again"
            )


def open_arrays(path: Path) -> dict[str, zarr.Array[Any]]:
    """Returns the arrays of a zarr group by name. Their values are not read, see `missing_chunks`.

    Raises:
        UnreadableError: the group cannot be read, or an array does not hold real numbers.
    """
    import zarr

    with reading(path):
        check_regular_files(path)
        arrays = dict(zarr.open_group(path, mode="r", zarr_format=3).arrays())
    for name, array in arrays.items():
        check_numbers(array, f"{path}/{name}", "fiu")
    return arrays


def missing_chunks(path: Path, arrays: Mapping[str, zarr.Array[Any]]) -> str:
    """Returns a text that names an array without all its chunks, or an empty text.

    zarr reads NaN in place of a chunk whose file is missing.
    """
    for name, array in arrays.items():
        files = sum(file.is_file() for file in (path / name).rglob("*"))
        # zarr goes through the names of all chunks, of which a damaged shape may have 10^27.
        missing = array.nchunks - files
        if missing > 0 or (missing := array.nchunks - array.nchunks_initialized):
            return f"{path / name} lacks {missing} of {array.nchunks} chunks"
    return ""


def number_type(name: Any, where: str, kinds: str = "fiu") -> np.dtype[Any]:
    """Returns the dtype that a file names, if its values can be read as they lie in the file.

    Values of other kinds can be addresses, which whoever wrote the file has chosen.

    Args:
        name: the dtype, or its name in the file.
        where: file and key, for the message.
        kinds: kinds of NumPy's dtypes: f, i and u are numbers, S is text.

    Raises:
        UnreadableError: it is of another kind.
    """
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError, SyntaxError):
        dtype = None
    if dtype is None or dtype.kind not in kinds:
        words = {"f": "floating-point", "iu": "whole", "fiu": "real"}.get(kinds, "real")
        raise UnreadableError(f"{where} is {name}; must be the dtype of {words} numbers")
    return dtype


def check_numbers(array: Any, where: str, kinds: str, shape: tuple[int, ...] | None = None) -> None:
    """Checks the dtype and the shape of an array in a file before its values are read.

    Args:
        array: the array; None if the file lacks it.
        where: file and name, for the message.
        kinds: see `number_type`.
        shape: the shape that it must have.

    Raises:
        UnreadableError: it is missing, or has another dtype or shape.
    """
    if not hasattr(array, "dtype"):
        raise UnreadableError(f"{where} is missing")
    number_type(array.dtype, f"{where}: dtype", kinds)
    if shape is not None and tuple(array.shape) != shape:
        raise UnreadableError(f"{where}: shape {list(array.shape)}; must be {list(shape)}")


def checked(schema: type[T], value: Any, where: str) -> T:
    """Returns a value from a file as the type that it must have.

    Args:
        schema: a model of pydantic, or any type that pydantic can check.
        value: the value, such as a dictionary that was read as JSON.
        where: file and what it has, such as "FILE: attribute"; the name of the wrong value follows.

    Raises:
        UnreadableError: the value, or one in it, is missing or wrong. The message names it.
    """
    try:
        made: T = TypeAdapter(schema).validate_python(value)
    except ValidationError as error:
        places, message = first_problem(error)
        place = ".".join(places)
        raise UnreadableError(f"{where}{' ' * bool(place)}{place}: {message}") from error
    return made


def first_problem(error: ValidationError) -> tuple[list[str], str]:
    """Returns the place of the first wrong value, and what is wrong with it, neither too long."""
    first = error.errors(include_url=False)[0]
    return [str(part)[:40] for part in first["loc"]], f"{first['msg']:.200}"


def not_finite(values: np.ndarray) -> list[int] | None:
    """Returns the place of the first value that is not finite; None if all are."""
    finite = np.isfinite(values)
    return None if finite.all() else np.argwhere(~finite)[0].tolist()
