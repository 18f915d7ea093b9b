"""The samples of a control, in memory or in files."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from workers import Ranks

from flowpm_dist.io.errors import UserError


class Samples(NamedTuple):
    """Inputs and labels of samples.

    Attributes:
        x: inputs, [samples, ...]; an array, or rows that are read when they are asked for.
        y: int32 labels, [samples].
    """

    x: np.ndarray | StoredRows
    y: np.ndarray


class Data(NamedTuple):
    """The samples of a control."""

    training: Samples
    held_out: Samples


class StoredRows:
    """Rows of an array in an .npy file, each read from storage whenever it is asked for.

    After each reading the system is asked to drop its copies in memory, so that the next one
    reaches the storage again. A file server may still have copies of its own.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        rows = np.load(path, mmap_mode="r")
        self.shape, self.dtype, self._begin = rows.shape, rows.dtype, rows.offset
        self._path, self._file = path, path.open("rb", buffering=0)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, numbers: np.ndarray) -> np.ndarray:
        rows = np.empty((len(numbers), *self.shape[1:]), self.dtype)
        file = self._file.fileno()
        for row, number in zip(rows, numbers, strict=True):
            place = self._begin + int(number) * row.nbytes
            if os.preadv(file, [row], place) != row.nbytes:
                raise OSError(f"{self._path} ends early: remove it, and it is written again")
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        return rows


def staged(folder: Path, name: str, load: Callable[[], Data], workers: Ranks) -> Data:
    """Returns samples that are read from files, which the first rank of each host writes.

    Args:
        folder: folder of the files. Files of an earlier run are used again.
        name: first part of the files' names; it identifies their contents.
        load: makes the samples.
        workers: all workers.

    Raises:
        UserError: the files cannot be written.
    """
    paths = {(s, f): folder / f"{name}-{s}-{f}.npy" for s in Data._fields for f in Samples._fields}
    if workers.is_first_on_host and not all(path.exists() for path in paths.values()):
        data = load()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for (split, field), path in paths.items():
                _write(path, getattr(getattr(data, split), field))
        except OSError as error:
            raise UserError(f"--staging {folder}: cannot be written: {error}") from error
    workers.total(np.zeros(1, np.float32))  # nobody reads before all have written
    return Data(*(Samples(StoredRows(paths[s, "x"]), np.load(paths[s, "y"])) for s in Data._fields))


def _write(path: Path, values: np.ndarray) -> None:
    """Writes a file as a whole. In a folder that hosts share, all write it; the last one stays."""
    aside = path.with_name(f".{path.name}.{socket.gethostname()}")
    with aside.open("wb") as file:
        np.save(file, values)
        file.flush()
        os.fsync(file.fileno())  # only what is on the disk can leave the memory
    aside.replace(path)
