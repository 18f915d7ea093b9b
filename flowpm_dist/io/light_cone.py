"""Files of light cones: `lightcone.zarr` with maps, and HDF5 files with particles.

The zarr group's attribute `complete` is set last, as in a snapshot. Each rank adds to its own file
of particles during the run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import numpy as np
from pydantic import BaseModel, Field

from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.io.errors import UserError
from flowpm_dist.io.files import (
    CONE_PARTICLES,
    GENERATOR,
    LIGHT_CONE,
    WriteError,
    read_json,
    reading,
    write_json,
)
from flowpm_dist.io.fits_maps import Shells, cosmology_header, write_fits_maps
from flowpm_dist.io.labelled import LabelledArray
from flowpm_dist.io.opening import check_numbers, checked, missing_chunks, open_arrays, open_hdf5
from flowpm_dist.io.snapshot import (
    complete_attributes,
    mark_complete,
    new_array,
    new_group,
)

if TYPE_CHECKING:
    import h5py
    import zarr

    from meshimpl import ProcessMesh


MEANINGS = {
    "kappa": "convergence",
    "gamma1": "shear along the axes of the image",
    "gamma2": "shear along its diagonals",
    "rotation": "rotation of images",
    "planes": "overdensity of the matter of slabs",
    "shells": "overdensity of the matter of shells",
}
"""The maps in their order in FITS files, and what they are."""

MOST_OF_CHUNK = 2**24
"""Values along a side of a chunk: compressors take no more than 2^31 bytes."""


@dataclass(frozen=True)
class LightConeMaps:
    """The maps of a light cone, read from a file.

    Attributes:
        arrays: by name: kappa, gamma1, gamma2 [source, y, x] [1], x and y [pixel] [deg]. If they
            were made, also rotation [source, y, x] [rad], planes [plane, y, x] [1] and plane_edges
            [plane + 1] [Mpc/h]. On the whole sky: kappa [source, pixel] [1]. If they were made,
            also shells [shell, pixel] [1] and shell_edges [shell + 1] [Mpc/h].
        attributes: "field_of_view" [deg], "sources", "z_max", "cosmology", "seed", "warnings",
            "conventions", and "config", the run file as TOML. On the whole sky "nside" and
            "ordering" in place of the field of view.
    """

    arrays: Mapping[str, np.ndarray]
    attributes: Mapping[str, Any]

    def __getitem__(self, name: str) -> np.ndarray:
        """Returns the array of a name.

        Raises:
            KeyError: there is none.
        """
        if name not in self.arrays:
            raise KeyError(f"the light cone has no {name!r}; it has {', '.join(self.arrays)}")
        return self.arrays[name]

    def write_fits(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Writes all maps to a FITS file, an extension for each array; KAPPA is the first.

        Any one rank calls it.

        On the full sky an extension is a table that `healpy.read_map` reads, with a column for each
        source or shell. On the flat sky it is an image [source, y, x] with a WCS. Matter of shells
        or planes comes with a table of their redshifts and distances, such as SHELLS_EDGES. The
        primary header has the cosmology and, where all light of a source is from one redshift,
        ZSRC1 and so on. See `fits_maps` for the coordinates.

        Args:
            path: the file; one that ends in .gz is compressed.
            overwrite: whether to replace a file that is there.

        Raises:
            FileExistsError: there is a file, and `overwrite` is False.
            UserError: the attributes lack a cosmology or a sky.
            WriteError: the file cannot be written.
        """
        about = self.attributes
        try:
            cosmology = Cosmology(**about["cosmology"])
            sources = list(about.get("sources") or ())[:9999]  # keywords have 8 letters
            flat = "nside" not in about
            field_of_view = float(about["field_of_view"]) if flat else None
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"the attributes of the maps are damaged: {error}") from error
        maps, shells = {}, {}
        for name, meaning in MEANINGS.items():  # zarr lists arrays in any order
            if name not in self.arrays:
                continue
            values = self.arrays[name]
            if values.ndim != (3 if flat else 2):
                raise UserError(f"{name} of the light cone has shape {values.shape}: no maps")
            kind = {"planes": "plane", "shells": "shell"}.get(name, "source")
            units = "rad" if name == "rotation" else "1"
            axes = (kind, "y", "x") if flat else (kind, "pixel")
            maps[name] = LabelledArray(values, axes, units, meaning)
            if kind != "source":
                shells[name] = Shells(self[f"{kind}_edges"], cosmology)
        facts = cosmology_header(cosmology) | {
            "SEED": about.get("seed"),
            "Z_MAX": about.get("z_max"),
        }
        for number, source in enumerate(sources, 1):
            z = source.get("redshift") if isinstance(source, dict) else None
            if isinstance(z, int | float):
                facts[f"ZSRC{number}"] = z, f"redshift of source {number}"
        write_fits_maps(
            path, maps, field_of_view=field_of_view, shells=shells, about=facts, overwrite=overwrite
        )


def write_light_cone(
    path: Path,
    arrays: Mapping[str, LabelledArray],
    attributes: Mapping[str, Any],
    conventions: Mapping[str, str],
) -> None:
    """Write maps and mark them as complete. On one rank.

    Args:
        path: path of the new zarr group.
        arrays: by name.
        attributes: attributes of the group; they can be written as JSON.
        conventions: what else a reader must know, by what it is about.

    Raises:
        WriteError: they cannot be written.
    """
    try:
        group = new_group(path, attributes, conventions)
        for name, array in arrays.items():
            add_array(group, name, array)
        mark_complete(path)
    except OSError as error:
        raise WriteError.of(path, error) from error


def add_array(group: zarr.Group, name: str, array: LabelledArray) -> None:
    """Writes an array into a zarr group, in one or more chunks for each map. One rank calls it."""
    shape, values = array.values.shape, array.values
    of_map = 1 if array.dimensions[-1] == "pixel" else 2
    of_one = tuple(min(side, MOST_OF_CHUNK) for side in shape[-of_map:])
    chunks = (1,) * (len(shape) - of_map) + of_one
    about = array.dimensions, array.units, array.meaning
    new_array(group, name, shape, chunks, values.dtype, *about)[...] = values


def load_light_cone(path: str | Path) -> LightConeMaps:
    """Reads the maps of a light cone.

    Args:
        path: `lightcone.zarr`, or the output folder that holds it.

    Raises:
        UserError: there are none, their writing was interrupted, or a chunk is missing.
        UnreadableError: an array does not hold real numbers, or is damaged.
    """
    path = Path(path)
    if path.name != LIGHT_CONE:
        path = path / LIGHT_CONE
    attributes = complete_attributes(path, "holds no maps of a light cone")
    arrays = open_arrays(path)
    if lost := missing_chunks(path, arrays):
        raise UserError(f"{lost}: copy the maps again, or run again")
    with reading(path):
        return LightConeMaps({n: np.asarray(a[...]) for n, a in arrays.items()}, attributes)


STEM = "light_cone"
LIST = f"{STEM}.json"
"""The file with the number of parts and the attributes, which is written last."""
COLUMNS = {"Coordinates": 3, "Velocities": 3, "ScaleFactor": 1}
"""Datasets and the numbers of each particle in them."""
UNITS = {"Coordinates": "Mpc/h, comoving", "Velocities": "km/s, peculiar", "ScaleFactor": "1"}
NUMBERS = sum(COLUMNS.values())
"""Numbers stored for each particle."""
MOST_PARTS = 10**6
"""Largest number of files."""
ROWS = 2**12
"""Particles of a chunk, of which the last in a file may be nearly empty."""
SPARE = 64 * 2**20  # left on the disk [bytes]


class LightConeFiles:
    """The HDF5 files of particles that the ranks write, one after the other.

    A file has its name once it is complete. They are numbered over all ranks, and over all sessions
    of a resumed run. A rank without particles makes none.

    Args:
        folder: folder for the files of all ranks; rank 0 makes it, and removes there what a
            session wrote after the files that are to stay.
        mesh: the ranks, all of which make this together.
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
                stay = {_name(number) for number in range(sealed)}
                for pattern in (f"{STEM}.*.hdf5", f".{STEM}.*.partial", LIST):
                    for path in folder.glob(pattern):
                        if path.name not in stay:
                            path.unlink(missing_ok=True)
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
        columns = dict(zip(COLUMNS, (positions, velocities, a), strict=True))
        # On a full disk HDF5 may end the process without a message.
        if shutil.disk_usage(self._folder).free < SPARE + sum(v.nbytes for v in columns.values()):
            raise WriteError(f"cannot write particles to {self._folder}: the disk is full")
        try:
            if self._file is None:
                import h5py

                self._file = h5py.File(self._aside, "w")
                self._file.attrs["generator"] = GENERATOR
                self._file.attrs["light_cone"] = json.dumps(self._about)
            file = self._file
            for name, values in columns.items():
                if name not in file:
                    most, chunks = ((n, *values.shape[1:]) for n in (None, ROWS))
                    file.create_dataset(name, data=values, maxshape=most, chunks=chunks)
                else:
                    file[name].resize(self._rows + len(values), axis=0)
                    file[name][self._rows :] = values
        except OSError as error:
            raise WriteError.of(self._aside, error) from error
        self._rows += len(a)

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
            write_json(self._folder / LIST, about)
        self._mesh.barrier()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
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


def holds_light_cone(folder: Path) -> bool:
    """Returns whether a folder has files of a light cone."""
    return any(folder.glob(f"{STEM}.*.hdf5")) or (folder / LIST).exists()


def _name(number: int) -> str:
    return f"{STEM}.{number}.hdf5"


class _List(BaseModel):
    """The contents of the file `LIST`."""

    parts: Annotated[int, Field(ge=0, le=MOST_PARTS)]
    light_cone: dict[str, Any]


def read_light_cone(
    folder: str | Path, *, part: tuple[int, int] = (0, 1)
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Returns the particles of a light cone, and its attributes.

    Args:
        folder: of its files, or the output folder of a run that holds them.
        part: (n, of): only the n-th of as many parts of the files, in their order, so that ranks
            can share them.

    Returns:
        "Coordinates" [n, 3] [Mpc/h], "Velocities" [n, 3] [km/s] and "ScaleFactor" [n]; the
        attributes.

    Raises:
        UserError: there is no complete light cone, or a part is missing.
        UnreadableError: a part does not hold particles.
    """
    folder = Path(folder)
    if not holds_light_cone(folder) and (folder / CONE_PARTICLES).is_dir():
        folder = folder / CONE_PARTICLES
    if not (folder / LIST).exists():
        state = "its particles are not complete" if holds_light_cone(folder) else "there is none"
        raise UserError(f"{folder}: no {LIST} of a light cone: {state}")
    with reading(folder / LIST, raises=UserError):
        about = checked(_List, read_json(folder / LIST), f"{folder / LIST} is damaged: key")
    files = [folder / _name(number) for number in range(about.parts)]
    missing = [path.name for path in files if not path.exists()]
    if missing:
        raise UserError(f"{folder}: of {len(files)} files of a light cone, {missing[0]} is missing")
    columns: dict[str, list[np.ndarray]] = {name: [] for name in COLUMNS}
    begin, end = (len(files) * n // part[1] for n in (part[0], part[0] + 1))
    for path in files[begin:end]:
        with open_hdf5(path) as file:
            count = len(file["ScaleFactor"]) if "ScaleFactor" in file else 0
            for name, values in columns.items():
                shape = (count,) if COLUMNS[name] == 1 else (count, COLUMNS[name])
                check_numbers(file.get(name), f"{path}:{name}", "f", shape)
                values.append(file[name][:])
    nothing = {name: np.zeros((0,) if n == 1 else (0, n)) for name, n in COLUMNS.items()}
    particles = {name: np.concatenate(columns[name] or [nothing[name]]) for name in COLUMNS}
    return particles, about.light_cone
