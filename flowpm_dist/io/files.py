"""Names of the files of a run, files that are replaced as a whole, checksums, and versions."""

from __future__ import annotations

import errno
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from flowpm_dist.io.errors import UserError, WorkError
from flowpm_dist.io.particle_formats import particle_folders
from flowpm_dist.options.regular_files import check_regular, read_text

GENERATOR = "flowpm-dist"
PACKAGES = (
    "flowpm-dist", "tensorflow", "tensorflow-cpu", "mesh-tensorflow", "horovod", "mpi4py",
    "numpy", "zarr", "camb",
)  # fmt: skip
SNAPSHOT = "snapshot.zarr"
"""The snapshot that a `State` can be read from."""
SNAPSHOTS = (SNAPSHOT, *particle_folders())
"""Names of all snapshots, each a folder."""
LIGHT_CONE = "lightcone.zarr"
"""The maps of a light cone."""
CONE_PARTICLES = "light_cone_particles"
"""The folder of the particles of a light cone."""
ABOUT = "flowpm-dist.json"
"""The file with the attributes of a snapshot in a format of particles; it is written last."""
_ASIDE = re.compile(r"\..+\.[0-9a-f]{8}\.partial")
"""Names of the temporary files of `written_whole`."""


class UnreadableError(WorkError, ValueError):
    """A file is missing, damaged or of another kind. The message names the file."""


class WriteError(WorkError):
    """Results could not be written. The message names the file and the cause."""

    @classmethod
    def of(cls, path: Path, error: Exception) -> WriteError:
        """Returns an error that names the file, and the cause in one line.

        Args:
            path: the file.
            error: an error of the system; or of TensorFlow, whose messages begin with the file and
                end with the cause.
        """
        cause = getattr(error, "strerror", None) or getattr(error, "message", None) or str(error)
        lines = str(cause).splitlines() or [type(error).__name__]
        line = re.sub(r"\{\{.*?\}\} *| *\[Op:.*", "", lines[0])  # the names of TensorFlow's nodes
        return cls(f"cannot write {path}: {line.rpartition('; ')[2]}")


def snapshot_attributes(path: Path) -> dict[str, object] | None:
    """Returns the attributes of a snapshot, complete or not; None for any other folder or file."""
    particles = path.name in particle_folders()
    attributes = (
        read_json(path / ABOUT) if particles else read_json(path / "zarr.json").get("attributes")
    )
    ours = isinstance(attributes, dict) and attributes.get("generator") == GENERATOR
    return attributes if ours else None


def check_regular_files(folder: Path) -> None:
    """Checks that a folder, and the folders in it, hold nothing but regular files and folders.

    Raises:
        OSError: there is a device, a pipe, or a link to one or to nothing; or a folder cannot be
            read.
    """
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:  # by a link
            folders.clear()
            continue
        seen.add(real)
        for name in names:
            if not os.path.isfile(path := os.path.join(place, name)):
                raise OSError(errno.EINVAL, "must be a regular file", path)


def read_json(path: Path) -> dict[str, Any]:
    """Returns the dictionary in a JSON file; an empty one if it is missing or damaged."""
    try:
        table = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return table if isinstance(table, dict) else {}


@contextmanager
def reading(
    path: Path, advice: str = "", raises: type[Exception] = UnreadableError
) -> Iterator[None]:
    """Inside, whatever a damaged file makes a library raise becomes an error that names the file.

    Args:
        path: the file or folder.
        advice: the end of the message.
        raises: the class of the error, in place of UnreadableError.

    Raises:
        UnreadableError: anything but another error of this package was raised inside.
    """
    try:
        yield
    except raises:
        raise
    except UnreadableError as error:
        raise raises(str(error)) from error
    except (UserError, WorkError):
        raise
    except Exception as error:
        text = str(error)
        if isinstance(error, OSError) and error.strerror:
            elsewhere = error.filename and Path(error.filename) != path
            text = error.strerror + f": {error.filename}" * bool(elsewhere)
        lines = text.strip().splitlines()
        reason = lines[0][:200] if lines else type(error).__name__
        message = f" ({reason}): {advice}" if advice else f": {reason}"
        raise raises(f"{path} cannot be read{message}") from error


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to; it replaces `path` at the end if nothing was raised.

    So nobody ever reads a half written file, and an older file stays until the new one is complete.
    A symbolic link at `path` is replaced, and what it points to stays as it is.

    Args:
        path: the file; its folder is made if it is missing.

    Raises:
        WriteError: an OSError was raised inside, or by the replacing.
    """
    # A name that nobody can foresee: a link that lies there is not written through.
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.open("x").close()
        try:
            yield aside
            aside.replace(path)
        except BaseException:
            with suppress(OSError):
                aside.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise WriteError.of(path, error) from error


def no_link(path: str, flags: int) -> int:
    """Opens a file for `open(..., opener=no_link)`, but not through a symbolic link.

    It is for files that are written in place: logs, locks, and tables that grow.

    Raises:
        OSError: the file is a symbolic link, or cannot be opened.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "it is a symbolic link: remove it", str(path)) from error


def remove(path: Path, *, ignore_errors: bool = False) -> None:
    """Removes a file, or a folder and all in it, or a symbolic link alone; a missing path is fine.

    Args:
        path: what to remove.
        ignore_errors: whether a folder that cannot be removed as a whole is no error.

    Raises:
        OSError: it cannot be removed.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=ignore_errors)
    else:
        path.unlink(missing_ok=True)


def links_in(folder: Path, apart: str = "") -> Iterator[Path]:
    """Yields all symbolic links in a folder, and in the folders in it.

    Args:
        folder: the folder; a file, or what is not there, has no links in it.
        apart: name of the folders in it that are not looked into.
    """
    return (Path(entry) for entry in _entries(folder, apart) if entry.is_symlink())


def remove_unfinished(folder: Path, inner: Iterable[str] = (), apart: str = "") -> None:
    """Removes the temporary files that killed processes have left of `written_whole`.

    Nobody may be writing there.

    Args:
        folder: the folder.
        inner: names of the folders in it that are looked into, with all folders in them.
        apart: see `links_in`.

    Raises:
        OSError: one cannot be removed.
    """
    deeper = (_entries(folder / name, apart) for name in inner if not (folder / name).is_symlink())
    for entry in chain(_listed(folder), *deeper):
        if _ASIDE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
            os.unlink(entry)


def _listed(folder: Path) -> list[os.DirEntry[str]]:
    """Returns what is in a folder; nothing for a file, or for what is not there."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _entries(folder: Path, apart: str = "") -> Iterator[os.DirEntry[str]]:
    """Yields all in a folder and in the folders in it; no symbolic link is followed below it."""
    for entry in _listed(folder):
        yield entry
        if entry.is_dir(follow_symlinks=False) and entry.name != apart:
            yield from _entries(Path(entry), apart)


def write_text(path: Path, text: str) -> None:
    """Writes a text file by `written_whole`.

    Raises:
        WriteError: the file cannot be written.
    """
    with written_whole(path) as aside:
        aside.write_text(text)


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file by `written_whole`; numbers of NumPy are written as numbers.

    Raises:
        WriteError: the file cannot be written.
    """
    write_text(path, json.dumps(value, indent=1, default=_plain) + "\n")


def _plain(value: Any) -> Any:
    """Returns a number of NumPy, or a scalar tensor, as Python's number of its kind."""
    return np.asarray(value).item()


def save_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Writes arrays to a .npz file by `written_whole`.

    Raises:
        WriteError: the file cannot be written.
    """
    with written_whole(path) as aside, aside.open("wb") as file:
        np.savez(file, **arrays)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Returns all arrays of a .npz file, by their names.

    Raises:
        UnreadableError: the file is missing, damaged, or no .npz file.
    """
    with reading(path, "it is missing or damaged"):
        check_regular(path)
        with np.load(path) as archive:
            return {name: archive[name] for name in archive.files}


def checksum(array: Any) -> str:
    """Returns a checksum of the values and the first three sides of an array.

    It does not depend on the values' type.

    Args:
        array: an array of at least one axis, or an object that is read like one, plane by plane.
    """
    digest = hashlib.blake2b(repr(tuple(array.shape[:3])).encode(), digest_size=16)
    for plane in range(array.shape[0]):
        digest.update(np.array(array[plane], dtype="<f8").tobytes())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the installed packages that results depend on."""
    return dict(_installed())


@functools.cache
def _installed() -> dict[str, str]:
    known = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            known[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return known
