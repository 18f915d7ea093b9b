"""Columns of galaxy catalogues in FITS, HDF5 and text files. Nothing here imports TensorFlow.

Each rank reads its part of the rows. The kind of a file follows from its first bytes.
"""

from __future__ import annotations

import csv
import io
import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowpm_dist.io.files import UnreadableError, reading
from flowpm_dist.io.opening import check_stored, number_type, open_hdf5
from flowpm_dist.options.regular_files import check_regular

HEADER = 2**16
"""Size of the beginning of a text file that must hold the names of its columns [bytes]."""
BLOCK = 2**24
"""Size of the part of a text file that is read at once [bytes]."""
COMPRESSION = 1100
"""Values of HDF5 files take at most this many times the room of what is stored; gzip's is 1032."""
PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7z": "xz", b"PK": "zip"}
"""First bytes of compressed files."""
SHOWN = 20
"""The number of columns that a message names at most."""


def read_columns(
    path: Path, names: Sequence[str], part: int = 0, parts: int = 1
) -> dict[str, np.ndarray]:
    """Returns a part of the rows of some columns, float64 [n].

    Args:
        path: a file in FITS (the table that has most of the columns), HDF5 (data sets, such as
            "galaxies/RA", or fields of a table, such as "table/RA") or text, with commas or blanks
            between the columns and their names in the first line. Text in quotation marks is one
            column.
        names: the columns. If there is none of a name, one that differs in its case is taken.
        part, parts: which part of the rows is read, and of how many.

    Raises:
        UnreadableError: the file is missing, damaged or shorter than it says, or lacks a column,
            one does not hold one number for each row, or a line of text has more or fewer columns
            than the first line names.
    """
    with reading(path):
        check_regular(path)
        with path.open("rb") as file:
            first = file.read(9)
        for magic, program in PACKED.items():
            if first.startswith(magic):
                raise UnreadableError(f"{path} is compressed by {program}: unpack it first")
        if first.startswith(b"SIMPLE  ="):
            return _read_fits(path, names, part, parts)
        if first.startswith(b"\x89HDF\r\n"):
            return _read_hdf5(path, names, part, parts)
        return _read_text(path, names, part, parts)


def _found(path: Path, wanted: str, present: Iterable[str]) -> str:
    """Returns the name of a column in a file.

    Raises:
        UnreadableError: there is none, or several differ from it in their case.
    """
    known = list(present)
    if wanted in known:
        return wanted
    similar = [name for name in known if name.lower() == wanted.lower()]
    if len(similar) == 1:
        return similar[0]
    shown = ", ".join(name[:40] for name in known[:SHOWN]) + ", ..." * (len(known) > SHOWN)
    raise UnreadableError(f"{path} has no column {wanted!r}; it has {shown or 'none'}")


def _rows(count: int, part: int, parts: int) -> slice:
    return slice(count * part // parts, count * (part + 1) // parts)


def _read_fits(path: Path, names: Sequence[str], part: int, parts: int) -> dict[str, np.ndarray]:
    from astropy.io import fits

    with warnings.catch_warnings(action="ignore"), fits.open(path, memmap=True) as file:
        tables = [hdu for hdu in file if isinstance(hdu, fits.BinTableHDU)]
        if not tables:
            raise UnreadableError(f"{path} has no table")
        wanted = {name.lower() for name in names}
        table = max(tables, key=lambda hdu: len(wanted & {n.lower() for n in hdu.columns.names}))
        chosen = {name: _found(path, name, table.columns.names) for name in names}
        for name in chosen.values():
            form = str(table.columns[name].format)
            if not re.fullmatch("1?[BIJKED]", form):
                raise UnreadableError(
                    f"{path}: column {name} has the format {form:.40}; must be one number a row"
                )
        width, count = int(table.header["NAXIS1"]), int(table.header["NAXIS2"])
        end = int(table.fileinfo()["datLoc"]) + width * count
        if count < 0 or end > (size := path.stat().st_size):
            raise UnreadableError(
                f"{path} is truncated: its table of {count} rows ends at byte {end}, the file at "
                f"byte {size}"
            )
        here = _rows(count, part, parts)
        rows = table.data[here]
        stored = rows.view(np.ndarray)
        for column in chosen.values():
            null = table.columns[column].null
            empty = np.flatnonzero(stored[column] == null if isinstance(null, int) else False)
            if empty.size:
                raise UnreadableError(
                    f"{path}: column {column} has no value (TNULL = {null}) in row "
                    f"{here.start + empty[0]}"
                )
        return {name: np.array(rows[column], np.float64) for name, column in chosen.items()}


def _read_hdf5(path: Path, names: Sequence[str], part: int, parts: int) -> dict[str, np.ndarray]:
    with open_hdf5(path) as file:
        columns = {name: _hdf5_column(path, file, name) for name in names}
        counts = {name: column.shape[0] for name, (column, _) in columns.items()}
        if len(set(counts.values())) > 1:
            each = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise UnreadableError(f"{path}: columns have different numbers of rows: {each}")
        values = {}
        for name, (column, field) in columns.items():
            rows = _rows(counts[name], part, parts)
            read = column[rows] if field is None else column.fields(field)[rows]
            values[name] = np.array(read, np.float64)
        return values


def _hdf5_column(path: Path, file: Any, name: str) -> tuple[Any, str | None]:
    """Returns a data set, and the field of a table in it; None for a column of its own."""
    import h5py

    place, _, leaf = name.strip("/").rpartition("/")
    parent = file.get(place) if place else file
    if isinstance(parent, h5py.Dataset):
        kinds = parent.dtype.fields or {}
        field = _found(path, leaf, kinds)
        column, kind = parent, parent.dtype.fields[field][0]
    elif isinstance(parent, h5py.Group):
        field = None
        members = [n for n in parent if isinstance(parent.get(n), h5py.Dataset)]
        column = parent[_found(path, leaf, members)]
        kind = column.dtype
    else:
        raise UnreadableError(f"{path} has no group or table {place!r}")
    number_type(kind, f"{path}: column {name}: dtype")
    if column.ndim != 1 or kind.shape:
        shape = [*column.shape, *kind.shape]
        raise UnreadableError(f"{path}: column {name} has the shape {shape}; must be [rows]")
    stored = column.id.get_storage_size()
    size = math.prod(column.shape) * column.dtype.itemsize
    if not column.is_virtual and size > COMPRESSION * stored:
        raise UnreadableError(
            f"{path}: column {name} has {column.shape[0]} rows, but only {stored} bytes of values"
        )
    check_stored(column, f"{path}: column {name}")
    return column, field


def _read_text(path: Path, names: Sequence[str], part: int, parts: int) -> dict[str, np.ndarray]:
    size = path.stat().st_size
    with path.open("rb") as file:
        present, comma, begin = _text_header(path, file.read(HEADER))
        chosen = {name: present.index(_found(path, name, present)) for name in names}
        low, high = (begin + (size - begin) * n // parts for n in (part, part + 1))
        blocks = []
        for first in range(low, high, BLOCK):
            text = _lines(file, begin, first, min(first + BLOCK, high))
            blocks.append(_parsed(text, comma, chosen, path))
            _check_fields(text, comma, len(present), path)
    whole = np.concatenate([np.zeros((0, len(chosen))), *blocks])
    return dict(zip(chosen, whole.T, strict=True))


def _text_header(path: Path, beginning: bytes) -> tuple[list[str], bool, int]:
    """Returns the names of the columns, whether commas separate them, and where the rows begin."""
    position, comment = 0, ""
    for raw in beginning.splitlines(keepends=True):
        line = raw.decode("utf-8", errors="replace").strip().removeprefix("\ufeff")
        is_comment = line.startswith("#")
        if line and not is_comment and not _is_number(re.split(r"[,\s]+", line)[0]):
            comment, position = line, position + len(raw)
            break
        if line and not is_comment:
            break
        comment, position = line if line else comment, position + len(raw)
    comma = "," in comment
    words = _fields(comment.lstrip("# "), comma)
    present = [re.sub(r"\s*\[.*\]$", "", word.strip()).strip("\"'") for word in words]
    if not any(present) or not comment.replace("\t", " ").isprintable():
        raise UnreadableError(
            f"{path} is neither FITS nor HDF5, and its first line does not name columns"
        )
    return present, comma, position


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _fields(line: str, comma: bool) -> list[str]:
    """Returns the fields of a line, between commas or blanks that are not in quotation marks."""
    if comma:
        return next(csv.reader([line]), [])
    return re.findall(r'"[^"]*"\S*|\S+', line)


def _without_comment(line: str) -> str:
    """Returns a line up to the first # that is not in quotation marks."""
    if "#" not in line:
        return line
    return "".join(re.findall(r'\A(?:"[^"]*"|[^#])*', line))


def _check_fields(text: bytes, comma: bool, count: int, path: Path) -> None:
    """Checks that each line has a field for each name of a column, so that none is another's.

    Raises:
        UnreadableError: one has more or fewer.
    """
    data = np.frombuffer(text + b"\n", np.uint8)
    ends = np.flatnonzero(data == ord("\n"))
    blank = np.isin(data, np.frombuffer(b" \t\r\n\v\f", np.uint8))
    starts = ~blank & np.concatenate([[True], blank[:-1]])  # of words
    marks = (np.flatnonzero(each) for each in (starts, data == ord(",")))
    words, commas = (np.diff(np.searchsorted(each, ends), prepend=0) for each in marks)
    fields = np.where(words > 0, commas + 1, 0) if comma else words
    # Lines with comments and quotation marks are looked at one by one.
    if b"#" not in text and b'"' not in text and np.isin(fields, (0, count)).all():
        return
    for line in text.decode("utf-8", errors="replace").split("\n"):
        held = _without_comment(line)
        if held.strip() and (here := len(_fields(held, comma))) != count:
            raise UnreadableError(
                f"{path}: the line {line[:80]!r} has {here} columns, and the first line names "
                f"{count}"
            )


def _lines(file: Any, begin: int, low: int, high: int) -> bytes:
    """Returns the lines that begin from byte `low` to before byte `high`; `begin` begins one."""
    if low > begin:
        file.seek(low - 1)
        low = low - 1 + len(file.readline())
    if low >= high:
        return b""
    file.seek(low)
    text: bytes = file.read(high - low)
    return text if text.endswith(b"\n") else text + file.readline()


def _parsed(text: bytes, comma: bool, chosen: Mapping[str, int], path: Path) -> np.ndarray:
    """Returns the numbers of lines [row, column].

    Raises:
        UnreadableError: a line has a column without a number; the message quotes it.
    """
    if not text.strip():
        return np.zeros((0, len(chosen)))
    separator, columns = "," if comma else None, [*chosen.values()]
    try:
        with warnings.catch_warnings(action="ignore"):  # of nothing but comments
            table = np.loadtxt(
                io.BytesIO(text),
                delimiter=separator,
                usecols=columns,
                ndmin=2,
                encoding="utf-8",
                quotechar='"',
            )
        return table.reshape(-1, len(chosen))
    except ValueError as error:
        for line in text.decode("utf-8", errors="replace").split("\n"):
            held = _without_comment(line)
            words = _fields(held, comma)
            for name, column in chosen.items() if held.strip() else ():
                if column >= len(words) or not _is_number(words[column]):
                    raise UnreadableError(
                        f"{path}: the line {line[:80]!r} has no number in column {name}"
                    ) from error
        raise UnreadableError(f"{path}: {str(error)[:200]}") from error
