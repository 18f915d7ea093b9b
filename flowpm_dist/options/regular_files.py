"""The one opener of files that users name: regular, of bounded size. Sizes as text."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import numpy as np

_ONLY_IN: ContextVar[Path | None] = ContextVar("_ONLY_IN", default=None)


def is_inside(folder: Path, path: Path) -> bool:
    """Returns whether a path is in a folder, and no symbolic link leads out of the folder."""
    # Unlike Path.resolve, it takes links that lead in a circle.
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


@contextmanager
def only_in(folder: Path | None) -> Iterator[None]:
    """Inside, all files that lie elsewhere are missing to `check_regular` and those that call it.

    So what is read of a folder can be published: a link in it may lead to any file of the user's.

    Args:
        folder: the folder; None for all files, within such a context.
    """
    before = _ONLY_IN.set(folder)
    try:
        yield
    finally:
        _ONLY_IN.reset(before)


def check_regular(path: Path) -> None:
    """Checks that a path, if it exists, is a regular file: a device has no end, and a pipe waits.

    Raises:
        FileNotFoundError: it lies elsewhere, see `only_in`.
        OSError: it is a folder, a device or a pipe.
    """
    if (folder := _ONLY_IN.get()) is not None and not is_inside(folder, path):
        raise FileNotFoundError(errno.ENOENT, f"it is not in {folder}", str(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "must be a regular file", str(path))


def read_bytes(path: Path, most: int = 2**24) -> bytes:
    """Returns the contents of a regular file.

    Args:
        path: the file.
        most: the largest size that is read [bytes].

    Raises:
        OSError: it cannot be read, or is no regular file, or larger.
    """
    check_regular(path)
    with path.open("rb") as file:
        large = os.fstat(file.fileno()).st_size > most
        data = b"" if large else file.read(most + 1)
    if large or len(data) > most:
        raise OSError(errno.EFBIG, f"must have at most {human_size(most)}", str(path))
    return data


def first_bytes(path: Path, count: int) -> bytes:
    """Returns the first bytes of a regular file, fewer if it is shorter.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    check_regular(path)
    with path.open("rb") as file:
        return file.read(count)


def read_text(path: Path, most: int = 2**24, *, encoding: str = "utf-8") -> str:
    """Returns the text of a regular file.

    Args:
        path, most: see `read_bytes`.
        encoding: encoding of the file.

    Raises:
        OSError: see `read_bytes`.
        UnicodeDecodeError: it is not text of this encoding.
    """
    return read_bytes(path, most).decode(encoding)


def read_numbers(path: Path) -> np.ndarray:
    """Returns the numbers of a text file [row, column]; blanks or commas separate its columns.

    Args:
        path: the file, in which `#` begins a comment.

    Raises:
        OSError: see `read_bytes`.
        ValueError: it has anything but numbers, none at all, or rows of different lengths.
    """
    text = read_text(path).replace(",", " ")
    with warnings.catch_warnings(action="ignore"):  # of an empty file, refused below
        table = np.loadtxt(text.splitlines(), ndmin=2)
    if not table.size:
        raise ValueError("it has no rows of numbers")
    return table


def human_size(count: int) -> str:
    """Returns a number of bytes as readable text, such as "1.5 GiB"."""
    if count < 1024:
        return f"{count} bytes"
    power = min(4, (count.bit_length() - 1) // 10)
    return f"{count / 1024**power:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"
