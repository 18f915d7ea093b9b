"""Files that users name: opened if they are whole and regular, and checked by what they must hold.

Whoever wrote such a file chose what is in it. Each function here either returns what it promises or
names the file in one sentence.
"""

from __future__ import annotations

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
        # HDF5 looks for it in the folder of the file, and in the current one.
        for place in {path.parent / other, Path(other)}:
            _check_named(place, seen)


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
