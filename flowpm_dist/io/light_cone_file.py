"""Files of the particles on a light cone: each rank adds to its own as the run goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from flowpm_dist.io.errors import UserError
from flowpm_dist.io.files import CONE_PARTICLES, GENERATOR, WriteError, write_text

if TYPE_CHECKING:
    import h5py

    from meshimpl import ProcessMesh

STEM = "light_cone"
LIST = f"{STEM}.json"
"""The file with the number of parts and the attributes, which is written last."""
COLUMNS = {"Coordinates": 3, "Velocities": 3, "ScaleFactor": 1}
"""Datasets and the numbers of each particle in them."""
UNITS = {"Coordinates": "Mpc/h, comoving", "Velocities": "km/s, peculiar", "ScaleFactor": "1"}
NUMBERS = sum(COLUMNS.values())
"""Of each particle."""
ROWS = 2**12
"""Particles of a chunk, of which the last in a file may be nearly empty."""
SPARE = 64 * 2**20  # left on the disk [bytes]


class LightConeFiles:
    """The HDF5 files of particles that the ranks write, one after the other.

    A file has its name once it is complete. They are numbered over all ranks, and over all sessions
    of a run that goes on. A rank without particles makes none.

    Args:
        folder: of the files of all ranks; rank 0 makes it, and removes there what a session wrote
            after the files that are to stay.
        mesh: of the ranks, all of which make this together.
        sealed: the number of files of earlier sessions, which stay.

    Attributes:
        sealed: the number of complete files of all ranks.
        closed: whether all is complete, or given up.

    Raises:
        WriteError: the folder cannot be written.
    """

    def __init__(self, folder: Path, mesh: ProcessMesh, sealed: int = 0) -> None:
        self._folder, self._mesh = folder, mesh
        self._about: Mapping[str, Any] = {}
        self._aside = folder / f".{STEM}.{mesh.rank}.partial"
        self._file: h5py.File | None = None
        self._rows = 0
        self.sealed, self.closed = sealed, False
        if mesh.rank == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                _remove_after(folder, sealed)
            except OSError as error:
                raise WriteError.of(folder, error) from error
        mesh.barrier()

    def describe(self, attributes: Mapping[str, Any]) -> None:
        """Gives the attributes of the light cone, which JSON can take."""
        self._about = {**attributes, "units": UNITS}

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
        if shutil.disk_usage(self._folder).free < SPARE + sum(v.nbytes for v in given.values()):
            raise WriteError(f"cannot write particles to {self._folder}: the disk is full")
        try:
            file = self._opened()
            for name, values in given.items():
                if name not in file:
                    file.create_dataset(
                        name,
                        data=values,
                        maxshape=(None, *values.shape[1:]),
                        chunks=(ROWS, *values.shape[1:]),
                    )
                    continue
                dataset = file[name]
                dataset.resize(self._rows + len(values), axis=0)
                dataset[self._rows :] = values
        except OSError as error:
            raise WriteError.of(self._aside, error) from error
        self._rows += len(a)

    def _opened(self) -> h5py.File:
        import h5py

        if self._file is None:
            self._file = h5py.File(self._aside, "w")
            self._file.attrs["generator"] = GENERATOR
            self._file.attrs["light_cone"] = json.dumps(self._about)
        return self._file

    def seal(self) -> None:
        """Completes the files that are open. On every rank.

        Raises:
            WriteError: a file cannot be written.
        """
        rows = np.zeros(self._mesh.size, np.int64)
        rows[self._mesh.rank] = self._rows
        held = self._mesh.world.allreduce(rows).numpy() > 0
        if self._file is not None:
            path = self._folder / _name(self.sealed + int(held[: self._mesh.rank].sum()))
            try:
                self._file.close()
                self._aside.replace(path)
            except OSError as error:
                raise WriteError.of(path, error) from error
        self._file, self._rows = None, 0
        self.sealed += int(held.sum())

    def complete(self) -> None:
        """Completes the light cone, which can be read then. On every rank.

        Raises:
            WriteError: a file cannot be written.
        """
        self.seal()
        self.closed = True
        self._mesh.barrier()  # the files of all ranks have their names
        if self._mesh.rank == 0:
            about = {"generator": GENERATOR, "parts": self.sealed, "light_cone": self._about}
            write_text(self._folder / LIST, json.dumps(about, indent=1))
        self._mesh.barrier()

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
            self.complete()
            return
        self.closed = True
        try:
            if self._file is not None:
                self._file.close()
                self._aside.unlink(missing_ok=True)
        except OSError as failed:
            raise WriteError.of(self._aside, failed) from failed


def _remove_after(folder: Path, sealed: int) -> None:
    """Removes all files of a light cone but the first ones."""
    kept = {_name(number) for number in range(sealed)}
    for pattern in (f"{STEM}.*.hdf5", f".{STEM}.*.partial", LIST):
        for path in folder.glob(pattern):
            if path.name not in kept:
                path.unlink(missing_ok=True)


def holds_light_cone(folder: Path) -> bool:
    """Returns whether a folder has files of a light cone."""
    return any(folder.glob(f"{STEM}.*.hdf5")) or (folder / LIST).exists()


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
        UserError: there is no complete light cone, or a part is missing.
    """
    import h5py

    folder = Path(folder)
    if not holds_light_cone(folder) and (folder / CONE_PARTICLES).is_dir():
        folder = folder / CONE_PARTICLES
    try:
        about = json.loads((folder / LIST).read_text())
        parts, attributes = int(about["parts"]), about["light_cone"]
    except FileNotFoundError:
        found = "its particles are not complete" if holds_light_cone(folder) else "there is none"
        raise UserError(f"{folder}: no {LIST} of a light cone: {found}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / LIST} is damaged: {error}") from error
    files = [folder / _name(number) for number in range(parts)]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise UserError(f"{folder}: of {parts} files of a light cone, {missing[0]} is missing")
    columns: dict[str, list[np.ndarray]] = {name: [] for name in COLUMNS}
    for path in files:
        with h5py.File(path, "r") as file:
            for name, values in columns.items():
                values.append(file[name][:])
    shapes = {name: (0,) if n == 1 else (0, n) for name, n in COLUMNS.items()}
    whole = {
        name: np.concatenate(columns[name] or [np.zeros(shape)]) for name, shape in shapes.items()
    }
    return whole, attributes
