"""Density volumes that a user brings, in .npy, zarr or HDF5. A rank reads only its part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flowpm_dist.io.errors import UserError
from flowpm_dist.io.files import SNAPSHOT, check_regular_files, reading, snapshot_attributes
from flowpm_dist.io.opening import check_stored, hdf5_file
from flowpm_dist.io.snapshot import SnapshotError, load_snapshot
from flowpm_dist.options.regular_files import check_regular

HDF5 = (".h5", ".hdf5", ".hdf", ".he5")
FORMATS = "a .npy file, a zarr array or group, or an HDF5 file"
SPATIAL = (3, 4)


class VolumeError(UserError):
    """A file holds no volume that can be used."""


@dataclass(frozen=True)
class Volume:
    """A volume on disk.

    Attributes:
        array: of shape [x, y, z] or [x, y, z, channel], of which slices are read. A slice that
            cannot be read is a VolumeError.
        where: path of the array, for messages.
        box_size: sides of the box [Mpc/h]; None if the file does not contain them.
        a: scale factor; None if the file does not contain it.
        observation: the attribute "observation", which describes what was observed: a table, or
            its JSON; None if there is none.
    """

    array: Any
    where: str
    box_size: tuple[float, float, float] | None = None
    a: float | None = None
    observation: Any = None


class _ArrayInFile:
    """An array on disk; what cannot be read of it is a VolumeError that names it.

    Attributes:
        shape, dtype: the array's shape and dtype.
        chunks: the shape of its chunks; None if it is not divided.
    """

    def __init__(self, array: Any, where: str) -> None:
        self._array, self._where = array, where
        self.shape, self.dtype = tuple(array.shape), np.dtype(array.dtype)
        self.chunks = getattr(array, "chunks", None)

    def __getitem__(self, place: Any) -> np.ndarray:
        with reading(Path(self._where), raises=VolumeError):
            return np.asarray(self._array[place])


def open_volume(path: str | Path) -> Volume:
    """Opens a volume without reading its values.

    Args:
        path: a .npy file; a zarr array; a zarr group with an array "density", or with a single
            array of three or four axes; a folder that holds a snapshot.zarr; or an HDF5 file. A
            data set of an HDF5 file is named after a colon, as in "file.h5:density".

    Raises:
        VolumeError: there is no such file, or it holds no volume of real numbers.
    """
    file, name = Path(path), ""
    if not file.exists() and ":" in str(path):
        text, _, name = str(path).rpartition(":")
        file = Path(text)
    if not file.exists():
        raise VolumeError(f"{file}: there is no such file")
    with reading(file, raises=VolumeError):
        volume = _volume_in(file, name)
    dtype = np.dtype(volume.array.dtype)
    if dtype.kind not in "fiub":  # True and False of a mask are 1 and 0
        raise VolumeError(f"{volume.where} holds {dtype}; must be real numbers")
    return replace(volume, array=_ArrayInFile(volume.array, volume.where))


def _volume_in(file: Path, name: str) -> Volume:
    if file.suffix in HDF5:
        return _of_hdf5(file, name)
    if name:
        raise VolumeError(f"{file}:{name}: only a data set of an HDF5 file is named after a colon")
    if file.is_dir():
        return _of_zarr(file)
    if file.suffix == ".npy":
        return _of_npy(file)
    raise VolumeError(f"{file} is not a volume: must be {FORMATS}")


def _of_npy(file: Path) -> Volume:
    try:
        array = mapped_array(file)
    except (OSError, ValueError, EOFError) as error:
        raise VolumeError(f"{file} is not a readable .npy file ({error})") from error
    return Volume(array, str(file))


def _of_hdf5(file: Path, name: str) -> Volume:
    import h5py

    opened = hdf5_file(file)  # stays open for slices of the volume
    there: dict[str, Any] = {}

    def note(place: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and item.ndim in SPATIAL:
            there[place] = item

    opened.visititems(note)
    chosen = _chosen(file, there, name, "name one after a colon, as in file.h5:density")
    if there[chosen].is_virtual or there[chosen].external:
        check_stored(there[chosen], f"{file}:{chosen}")
    sizes = {**opened.attrs, **there[chosen].attrs}
    sides, observation = _sides(sizes.get("box_size")), sizes.get("observation")
    return Volume(there[chosen], f"{file}:{chosen}", sides, observation=observation)


def _of_zarr(file: Path) -> Volume:
    if file.name != SNAPSHOT and (file / SNAPSHOT).exists():
        file = file / SNAPSHOT
    if snapshot_attributes(file) is not None:
        try:
            snapshot = load_snapshot(file)
        except SnapshotError as error:
            raise VolumeError(str(error)) from error
        if "density" not in snapshot.arrays:
            raise VolumeError(f"{file} has no density")
        a, sides = snapshot.attributes.get("a"), _sides(snapshot.attributes.get("box_size"))
        scale = None if a is None else float(a)
        observation = snapshot.attributes.get("observation", {})  # nothing but the density itself
        return Volume(snapshot.arrays["density"], f"{file}/density", sides, scale, observation)
    if not any((file / name).is_file() for name in ("zarr.json", ".zarray", ".zgroup")):
        raise VolumeError(f"{file} is not a volume: must be {FORMATS}")
    import zarr

    check_regular_files(file)
    try:
        node = zarr.open(file, mode="r")
        arrays = {} if isinstance(node, zarr.Array) else dict(node.arrays())
    except (OSError, ValueError, KeyError) as error:
        raise VolumeError(f"{file} is not a volume: must be {FORMATS} ({error!s:.200})") from error
    sides = _sides(node.attrs.get("box_size"))
    if isinstance(node, zarr.Array):
        return Volume(node, str(file), sides, observation=node.attrs.get("observation"))
    there = {name: array for name, array in arrays.items() if array.ndim in SPATIAL}
    chosen = _chosen(file, there, "", "give the folder of one of them")
    observation = there[chosen].attrs.get("observation", node.attrs.get("observation"))
    return Volume(there[chosen], f"{file}/{chosen}", sides, observation=observation)


def _chosen(file: Path, there: dict[str, Any], name: str, advice: str) -> str:
    """Returns the name that was asked for, or "density", or the only name."""
    wanted, held = name.strip("/") or "density", ", ".join(there) or "none"
    if wanted in there:
        return wanted
    if name:
        raise VolumeError(f"{file} has no volume {name!r}; those it has: {held}")
    if len(there) != 1:
        raise VolumeError(
            f"{file} must have one volume, or one named density; has {held}: {advice}"
        )
    return next(iter(there))


def _sides(size: Any) -> tuple[float, float, float] | None:
    if size is None:
        return None
    x, y, z = np.broadcast_to(np.asarray(size, dtype=float), 3).tolist()
    return x, y, z


def mapped_array(path: Path) -> Any:
    """Returns the array of a .npy file, memory-mapped, or an archive of several.

    Raises:
        OSError: the file cannot be read, or is no regular file.
        ValueError, EOFError: it is not what `numpy.save` writes, or cut short.
    """
    check_regular(path)
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        raise
    except Exception as error:  # of a negative side, or of text that is no expression of Python
        raise ValueError("its shape is not valid") from error
