"""Files of the particles on a light cone: each rank adds to its own as the run goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from flowpm_dist.io.errors import UserError
from flowpm_dist.io.files import GENERATOR, WriteError

STEM = "light_cone"
COLUMNS = {"Coordinates": 3, "Velocities": 3, "ScaleFactor": 1}
"""Datasets and the numbers of each particle in them."""
UNITS = {"Coordinates": "Mpc/h, comoving", "Velocities": "km/s, peculiar", "ScaleFactor": "1"}
ROWS = 2**16  # of a chunk
SPARE = 64 * 2**20  # left on the disk [bytes]


class LightConeFile:
    """An HDF5 file of particles, which has its name once it is complete.

    Args:
        folder: of the files of all parts; it must exist.
        part, parts: number of this file, and of all.

    Raises:
        WriteError: it cannot be written.
    """

    def __init__(self, folder: Path, part: int, parts: int) -> None:
        import h5py

        self._path = folder / (f"{STEM}.{part}.hdf5" if parts > 1 else f"{STEM}.hdf5")
        self._aside = self._path.with_name(f".{self._path.name}.partial")
        try:
            self._file = h5py.File(self._aside, "w")
        except OSError as error:
            raise WriteError.of(self._path, error) from error
        self._about: dict[str, Any] = {"part": part, "parts": parts, "units": UNITS}
        self.describe({})

    @property
    def closed(self) -> bool:
        """Whether it is complete, or given up."""
        return not self._file

    def describe(self, attributes: Mapping[str, Any]) -> None:
        """Writes attributes of the light cone, which JSON can take."""
        self._file.attrs["generator"] = GENERATOR
        self._file.attrs["light_cone"] = json.dumps({**attributes, **self._about})

    def append(self, positions: np.ndarray, velocities: np.ndarray, a: np.ndarray) -> None:
        """Adds particles.

        Args:
            positions: [n, 3]: x, y and the distance along the line of sight [Mpc/h].
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._file.close()
            if error is None:
                self._aside.replace(self._path)
            else:
                self._aside.unlink(missing_ok=True)
        except OSError as failed:
            raise WriteError.of(self._path, failed) from failed


def read_light_cone(folder: str | Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Returns the particles of a light cone, and its attributes.

    Args:
        folder: of its files.

    Returns:
        "Coordinates" [n, 3] [Mpc/h], "Velocities" [n, 3] [km/s] and "ScaleFactor" [n]; the
        attributes.

    Raises:
        UserError: there is no light cone, or a part is missing.
    """
    import h5py

    found: dict[str, list[np.ndarray]] = {name: [] for name in COLUMNS}
    attributes: dict[str, Any] = {}
    files = sorted(Path(folder).glob(f"{STEM}*.hdf5"))
    for path in files:
        with h5py.File(path, "r") as file:
            attributes = json.loads(file.attrs["light_cone"])
            for name in COLUMNS:
                if name in file:
                    found[name].append(file[name][:])
    if not files or len(files) != attributes["parts"]:
        wanted = attributes.get("parts", 1)
        raise UserError(f"{folder}: {len(files)} of {wanted} files {STEM}*.hdf5 of a light cone")
    shapes = {name: (0,) if n == 1 else (0, n) for name, n in COLUMNS.items()}
    whole = {name: np.concatenate([np.zeros(shapes[name]), *found[name]]) for name in COLUMNS}
    return whole, {k: v for k, v in attributes.items() if k not in ("part", "parts")}
