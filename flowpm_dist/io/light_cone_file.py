"""Files of the particles on a light cone: each rank adds to its own as the run goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from flowpm_dist.io.errors import UserError
from flowpm_dist.io.files import CONE_PARTICLES, GENERATOR, WriteError

STEM = "light_cone"
COLUMNS = {"Coordinates": 3, "Velocities": 3, "ScaleFactor": 1}
"""Datasets and the numbers of each particle in them."""
UNITS = {"Coordinates": "Mpc/h, comoving", "Velocities": "km/s, peculiar", "ScaleFactor": "1"}
NUMBERS = sum(COLUMNS.values())
"""Of each particle."""
ROWS = 2**16  # of a chunk
SPARE = 64 * 2**20  # left on the disk [bytes]


class LightConeFiles:
    """The HDF5 files of particles that a rank writes, one after the other.

    Each has its name once it is complete. They are numbered over all ranks, and over all sessions
    of a run that goes on.

    Args:
        folder: of the files of all ranks; it must exist.
        rank, ranks: this rank, and their number.
        sealed: the number of files that there are of earlier sessions.

    Attributes:
        sealed: the number of complete files of all ranks, before those that are open.
        rows: particles in the open file.

    Raises:
        WriteError: a file cannot be written.
    """

    def __init__(self, folder: Path, rank: int, ranks: int, sealed: int = 0) -> None:
        self._folder, self._rank, self._ranks = folder, rank, ranks
        self._about: Mapping[str, Any] = {}
        self.sealed = sealed
        self._open()

    def _open(self) -> None:
        import h5py

        self._path = self._folder / _name(self.sealed + self._rank)
        self._aside = self._path.with_name(f".{self._path.name}.partial")
        self.rows = 0
        try:
            self._file = h5py.File(self._aside, "w")
        except OSError as error:
            raise WriteError.of(self._path, error) from error
        self.describe(self._about)

    @property
    def closed(self) -> bool:
        """Whether all is complete, or given up."""
        return not self._file

    def describe(self, attributes: Mapping[str, Any]) -> None:
        """Writes attributes of the light cone, which JSON can take."""
        self._about = attributes
        self._file.attrs["generator"] = GENERATOR
        part = {"part": self.sealed + self._rank, "parts": None, "units": UNITS}
        self._file.attrs["light_cone"] = json.dumps({**attributes, **part})

    def append(self, positions: np.ndarray, velocities: np.ndarray, a: np.ndarray) -> None:
        """Adds particles.

        Args:
            positions: [n, 3]: x, y and the distance along the line of sight, or x, y and z from
                the observer [Mpc/h].
            velocities: [n, 3], along these, peculiar [km/s].
            a: scale factors at which they cross [n].

        Raises:
            WriteError: the file cannot be written.
        """
        given = dict(zip(COLUMNS, (positions, velocities, a), strict=True))
        # On a full disk HDF5 may end the process without a message.
        if shutil.disk_usage(self._path.parent).free < SPARE + sum(
            v.nbytes for v in given.values()
        ):
            raise WriteError(f"cannot write {self._path}: the disk is full")
        try:
            for name, values in given.items():
                if name not in self._file:
                    self._file.create_dataset(
                        name,
                        data=values,
                        maxshape=(None, *values.shape[1:]),
                        chunks=(ROWS, *values.shape[1:]),
                    )
                    continue
                dataset = self._file[name]
                before = len(dataset)
                dataset.resize(before + len(values), axis=0)
                dataset[before:] = values
        except OSError as error:
            raise WriteError.of(self._path, error) from error
        self.rows += len(a)

    def seal(self, *, last: bool = False) -> None:
        """Completes the files that are open, and begins others. On every rank.

        Args:
            last: begin no others.

        Raises:
            WriteError: a file cannot be written.
        """
        self._close(complete=True)
        self.sealed += self._ranks
        if not last:
            self._open()

    def _close(self, *, complete: bool) -> None:
        try:
            self._file.close()
            if complete:
                self._aside.replace(self._path)
            else:
                self._aside.unlink(missing_ok=True)
        except OSError as failed:
            raise WriteError.of(self._path, failed) from failed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.closed:
            return
        if error is None:
            self.seal(last=True)
        else:
            self._close(complete=False)


def number_of_parts(folder: Path, parts: int) -> None:
    """Writes how many files there are into each, after which they can be read. On one rank.

    Args:
        folder: of the files, all of them complete.
        parts: their number.

    Raises:
        WriteError: one cannot be written.
    """
    import h5py

    for path in (folder / _name(number) for number in range(parts)):
        try:
            with h5py.File(path, "r+") as file:
                about = json.loads(file.attrs["light_cone"])
                file.attrs["light_cone"] = json.dumps({**about, "parts": parts})
        except OSError as error:
            raise WriteError.of(path, error) from error


def remove_after(folder: Path, sealed: int) -> None:
    """Removes all files of a light cone but the first ones. On one rank.

    Args:
        folder: of the files.
        sealed: number of those that stay.
    """
    kept = {_name(number) for number in range(sealed)}
    for path in [*folder.glob(f"{STEM}*.hdf5"), *folder.glob(f".{STEM}*.partial")]:
        if path.name not in kept:
            path.unlink(missing_ok=True)


def holds_light_cone(folder: Path) -> bool:
    """Returns whether a folder has files of a light cone."""
    return any(folder.glob(f"{STEM}*.hdf5"))


def _name(number: int) -> str:
    return f"{STEM}.{number}.hdf5"


def read_light_cone(folder: str | Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Returns the particles of a light cone, and its attributes.

    Args:
        folder: of its files, or the output folder of a run that holds them.

    Returns:
        "Coordinates" [n, 3] [Mpc/h], "Velocities" [n, 3] [km/s] and "ScaleFactor" [n]; the
        attributes.

    Raises:
        UserError: there is no light cone, or a part is missing.
    """
    import h5py

    folder = Path(folder)
    if not holds_light_cone(folder) and (folder / CONE_PARTICLES).is_dir():
        folder = folder / CONE_PARTICLES
    found: dict[str, list[np.ndarray]] = {name: [] for name in COLUMNS}
    attributes: dict[str, Any] = {}
    files = _in_order(folder.glob(f"{STEM}*.hdf5"))
    for path in files:
        with h5py.File(path, "r") as file:
            attributes = json.loads(file.attrs["light_cone"])
            for name in COLUMNS:
                if name in file:
                    found[name].append(file[name][:])
    if not files or len(files) != attributes["parts"]:
        wanted = attributes.get("parts") or "all"
        raise UserError(f"{folder}: {len(files)} of {wanted} files {STEM}*.hdf5 of a light cone")
    shapes = {name: (0,) if n == 1 else (0, n) for name, n in COLUMNS.items()}
    whole = {
        name: np.concatenate(found[name] or [np.zeros(shape)]) for name, shape in shapes.items()
    }
    return whole, {k: v for k, v in attributes.items() if k not in ("part", "parts")}


def _in_order(files: Iterable[Path]) -> list[Path]:
    return sorted(files, key=lambda path: (len(path.name), path.name))
