"""The public CosmoFlow layout: a folder for each split, with TFRecord files of one sample each.

A record is a tf.train.Example with `x`, raw int16 counts of a cube with 1 or 4 channels, and `y`,
the parameters scaled to -1 and 1. Files may be packed with gzip, whatever their names say, as those
of MLPerf HPC (cosmoUniverse_2019_05_4parE_tf_v2) are. There are no other features.

A public split has half a million files. So rank 0 lists their names, and each rank looks up the
sizes of its share. A plain file as large as the first, which has one sample, is not opened. A
rank reads a few bytes at the end of each packed file in its share. The index is kept in the user's
cache, and is valid as long as the names and sizes of the files stay the same.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from flowpm_dist.cosmoflow.volumes.record_files import (
    DATASET,
    FRAME,
    GZIP,
    DatasetHeader,
    RecordError,
    is_packed,
    names_of,
    parsed_record,
    record_bounds,
    wrong_record,
)
from flowpm_dist.io.files import UnreadableError, WriteError, read_arrays, written_whole
from meshimpl.launch import user_cache

if TYPE_CHECKING:
    from meshimpl.process_mesh import ProcessMesh

LEAST_KEPT = 512
"""An index is kept in the cache if at least so many files had to be opened."""
CHANNELS = (1, 4)
READERS, AT_ONCE = 8, 256
_UNREADABLE = -1
T = TypeVar("T")


def cube(values: int) -> tuple[int, int, int, int] | None:
    """Returns the shape [x, y, z, channel] of a cube with this number of values, or None."""
    for channels in CHANNELS:
        side = round((values / channels) ** (1 / 3))
        if values and side**3 * channels == values:
            return (side, side, side, channels)
    return None


def samples_of_names(folder: Path, split: str) -> int | None:
    """Returns the number of files if the first one holds one sample, as all then do; else None."""
    names = names_of(folder, split)
    if not names:
        return None
    path = folder / split / os.fsdecode(names[0])
    try:
        bounds = bounds_of(path, is_packed(path))
    except RecordError:
        return None
    return len(names) if len(bounds) == 2 else None


def bounds_of(path: Path, packed: bool, one: int | None = None) -> np.ndarray:
    """Returns where the records of a file begin, and its end, after unpacking [bytes].

    Args:
        path: the file.
        packed: whether it is packed with gzip.
        one: the size of a file of one record, after unpacking [bytes]. A packed file is not
            unpacked if its last four bytes state this size.

    Raises:
        RecordError: if the file is not packed as `packed` says, or is damaged.
    """
    if not packed:
        return record_bounds(path)
    try:
        with open(path, "rb", buffering=0) as file:
            if file.read(len(GZIP)) != GZIP:
                raise RecordError(f"{path} is not packed with gzip, but the first file is")
            file.seek(-4, os.SEEK_END)
            size = int.from_bytes(file.read(), "little")
        if size == one:
            return np.array([0, size], np.int64)
        bounds = [0]
        with gzip.open(path) as unpacked:
            while head := unpacked.read(8):
                bounds.append(bounds[-1] + FRAME + int.from_bytes(head, "little"))
                if unpacked.seek(bounds[-1]) != bounds[-1]:
                    raise EOFError("it ends within a record")
    except (EOFError, zlib.error, gzip.BadGzipFile, OverflowError, ValueError) as error:
        raise RecordError(f"{path} is damaged: {error}; copy it again") from error
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror or error}") from error
    return np.array(bounds, np.int64)


def public_index(
    folder: Path, split: str, volume_bytes: int, mesh: ProcessMesh | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the samples of a split.

    Args:
        folder: the dataset.
        split: a subfolder of it.
        volume_bytes: the size of a sample's volume.
        mesh: ranks that share the work, all of which must call this together; None for one.

    Returns:
        The paths of the files, sorted by their names, bytes [file]; the number of the file of each
        sample, int64 [sample]; and the byte, after unpacking, where its record begins, int64
        [sample].

    Raises:
        RecordError: on all ranks; if there are no files, or one is damaged or holds other volumes.
            The message names it.
    """
    ranks = _Ranks(mesh)
    text = b"\n".join(names_of(folder, split)) if ranks.first else b""
    names = ranks.of_first(np.frombuffer(text, np.uint8))
    if not len(names):
        raise RecordError(f"{folder / split} holds no record files")
    place = os.fsencode(folder / split) + b"/"
    paths = np.array([place + name for name in names.tobytes().split(b"\n")])
    packed = is_packed(_path(paths[0]))
    bounds = bounds_of(_path(paths[0]), packed)
    one = int(bounds[1]) if len(bounds) == 2 else None
    sizes = ranks.joined(np.array(_in_threads(_size, paths[ranks.share(len(paths))]), np.int64))
    counts = np.ones(len(paths), np.int64)
    unclear = np.flatnonzero(packed | (sizes != one))
    starts = np.zeros(0, np.int64)
    if len(unclear):
        place_hash = hashlib.sha256(os.fsencode((folder / split).resolve())).hexdigest()[:32]
        cache = user_cache() / "indexes" / f"{place_hash}.npz"
        state = hashlib.sha256(names.tobytes() + sizes.tobytes()).hexdigest()
        found = ranks.of_first(_kept(cache, state) if ranks.first else starts)
        if not len(found):
            found = _opened(paths[unclear], packed, one, volume_bytes, ranks)
            if ranks.first and len(unclear) >= LEAST_KEPT:
                _keep(cache, state, found)
        counts[unclear], starts = found[: len(unclear)], found[len(unclear) :]
    file = np.repeat(np.arange(len(paths)), counts)
    start = np.zeros(len(file), np.int64)
    start[np.isin(file, unclear)] = starts
    return paths, file, start


def _opened(
    paths: np.ndarray, packed: bool, one: int | None, volume_bytes: int, ranks: _Ranks
) -> np.ndarray:
    """Returns the number of records in each file, and where each record begins. On all ranks."""

    def checked(path: Path) -> np.ndarray:
        bounds = bounds_of(path, packed, one)
        if wrong := wrong_record(bounds, volume_bytes):
            raise RecordError(f"{path}: {wrong[1]}")
        return bounds

    def records(path: bytes) -> np.ndarray:
        """Returns where the records of a file begin; a single -1 if the file cannot be used."""
        try:
            bounds = checked(_path(path))
        except RecordError:
            return np.array([_UNREADABLE])
        return bounds[:-1]

    own = paths[ranks.share(len(paths))]
    begins = _in_threads(records, own)
    counts = ranks.joined(np.array([len(b) for b in begins], np.int64))
    starts = ranks.joined(np.concatenate([np.zeros(0, np.int64), *begins]))
    if (bad := np.flatnonzero(starts == _UNREADABLE)).size:
        # Every rank looks for itself: all raise, and say the same.
        path = _path(paths[np.searchsorted(np.cumsum(counts), bad[0], side="right")])
        checked(path)
        raise RecordError(f"{path} could not be read on another rank")
    return np.concatenate([counts, starts])


def _path(path: bytes) -> Path:
    return Path(os.fsdecode(path))


def _size(path: bytes) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0  # the file is opened then, and that says why it cannot be read


def _in_threads(of_file: Callable[[bytes], T], paths: np.ndarray) -> list[T]:
    """Returns the results of a function for each file, computed by several threads."""
    parts = np.array_split(paths, max(1, len(paths) // AT_ONCE))
    with ThreadPoolExecutor(READERS) as pool:
        return [
            found
            for part in pool.map(lambda part: list(map(of_file, part)), parts)
            for found in part
        ]


class _Ranks:
    """The ranks that make an index together; or a single rank."""

    def __init__(self, mesh: ProcessMesh | None) -> None:
        self._mesh = mesh if mesh is not None and mesh.size > 1 else None
        self.first = mesh is None or mesh.rank == 0

    def share(self, count: int) -> slice:
        """Returns this rank's part of so many files."""
        if self._mesh is None:
            return slice(None)
        rank, size = self._mesh.rank, self._mesh.size
        return slice(rank * count // size, (rank + 1) * count // size)

    def joined(self, values: np.ndarray) -> np.ndarray:
        """Returns the values of all ranks, in their order, on each."""
        if self._mesh is None:
            return values
        parts = self._mesh.gather_to_root(values)
        return self.of_first(values if parts is None else np.concatenate(parts))

    def of_first(self, values: np.ndarray) -> np.ndarray:
        """Returns any number of values of rank 0 on all ranks."""
        return values if self._mesh is None else self._mesh.array_from_root(values)


def _kept(path: Path, state: str) -> np.ndarray:
    """Returns the index of the same files from the cache; empty if there is none."""
    try:
        held = read_arrays(path)
        if str(held["state"]) == state:
            return held["found"].astype(np.int64)
    except (UnreadableError, KeyError):
        pass
    return np.zeros(0, np.int64)


def _keep(path: Path, state: str, found: np.ndarray) -> None:
    """Writes the index to the cache, if the cache can be written."""
    with contextlib.suppress(WriteError), written_whole(path) as aside:
        with aside.open("wb") as file:
            np.savez_compressed(file, state=state, found=found)


def public_header(path: Path, parameters: Sequence[str] | None) -> DatasetHeader:
    """Returns a header for the public layout, int16 counts in a cube, from its first record.

    Raises:
        RecordError: if there are no names of parameters, no record, or no such cube.
    """
    if parameters is None:
        raise RecordError(f"{path.parent} has no {DATASET}: give the names of the parameters")
    packed = is_packed(path)
    if len(bounds_of(path, packed)) == 1:
        raise RecordError(f"{path} holds no record")
    feature = parsed_record(str(path), 0, f"{path}: its first record", packed=packed)
    data = b"".join(feature["x"].bytes_list.value)
    shape = cube(len(data) // 2)
    if shape is None or len(data) % 2:
        raise RecordError(
            f"{path}: a volume of {len(data)} bytes is no cube of int16 with "
            f"{' or '.join(map(str, CHANNELS))} channels"
        )
    return DatasetHeader(
        shape[:3], tuple(parameters), shape[3], dtype="int16", scale=1.0, unit="one particle"
    )
