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
import hashlib
import itertools
import os
from collections.abc import Callable, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flowpm_dist.cosmoflow.volumes.record_files import DATASET, DatasetHeader, names_of
from flowpm_dist.cosmoflow.volumes.tfrecords import (
    RecordError,
    is_packed,
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
READERS = 8
_UNREADABLE = -1


def cube(values: int) -> tuple[int, int, int, int] | None:
    """Returns the shape [x, y, z, channel] of a cube with this number of values, or None."""
    for channels in CHANNELS:
        side = round((values / channels) ** (1 / 3))
        if values and side**3 * channels == values:
            return (side, side, side, channels)
    return None


def samples_of_names(folder: Path, split: str) -> int | None:
    """Returns the number of files if the first one holds one sample, as all then do; else None.

    Raises:
        RecordError: the first file is damaged.
    """
    names = names_of(folder, split)
    if not names:
        return None
    path = folder / split / os.fsdecode(names[0])
    return len(names) if len(record_bounds(path, is_packed(path))) == 2 else None


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
    first = mesh is None or mesh.rank == 0
    text = b"\n".join(names_of(folder, split)) if first else b""
    names = _from_first(np.frombuffer(text, np.uint8), mesh)
    if not len(names):
        raise RecordError(f"{folder / split} holds no record files")
    place = os.fsencode(folder / split) + b"/"
    paths = np.array([place + name for name in names.tobytes().split(b"\n")])
    packed = is_packed(_path(paths[0]))
    bounds = record_bounds(_path(paths[0]), packed)
    one = int(bounds[1]) if len(bounds) == 2 else None
    sizes = _from_all(_size, paths, mesh)
    # A file of this size has one record, at its beginning.
    records = np.stack([np.arange(len(paths)), np.zeros(len(paths), np.int64)], axis=1)
    unclear = np.flatnonzero(packed | (sizes != one))
    if len(unclear):
        place_hash = hashlib.sha256(os.fsencode((folder / split).resolve())).hexdigest()[:32]
        cache = user_cache() / "indexes" / f"{place_hash}.npz"
        state = hashlib.sha256(names.tobytes() + sizes.tobytes()).hexdigest()
        opened = _from_first(_read_cache(cache, state) if first else records[:0, 0], mesh)
        if not len(opened):
            opened = _opened(paths, unclear, packed, one, volume_bytes, mesh)
            if first and len(unclear) >= LEAST_KEPT:
                _write_cache(cache, state, opened)
        records = np.concatenate([np.delete(records, unclear, axis=0), opened.reshape(-1, 2)])
        records = records[np.argsort(records[:, 0], kind="stable")]
    return paths, records[:, 0], records[:, 1]


def _opened(
    paths: np.ndarray,
    unclear: np.ndarray,
    packed: bool,
    one: int | None,
    volume_bytes: int,
    mesh: ProcessMesh | None,
) -> np.ndarray:
    """Returns the file number and the first byte of each record, one record after another.

    All ranks open their shares of the files with the numbers `unclear`, and get the same.
    """

    def checked(path: Path) -> np.ndarray:
        bounds = record_bounds(path, packed, one)
        if wrong := wrong_record(bounds, volume_bytes):
            raise RecordError(f"{path}: {wrong[1]}")
        return bounds[:-1]

    def records(file: int) -> list[int]:
        try:
            return [number for start in checked(_path(paths[file])) for number in (file, start)]
        except RecordError:
            return [file, _UNREADABLE]

    opened = _from_all(records, unclear, mesh)
    damaged = opened[::2][opened[1::2] == _UNREADABLE]
    if damaged.size:
        # Every rank looks for itself: all raise, and say the same.
        path = _path(paths[damaged[0]])
        checked(path)
        raise RecordError(f"{path} could not be read on another rank")
    return opened


def _path(path: bytes) -> Path:
    return Path(os.fsdecode(path))


def _size(path: bytes) -> list[int]:
    try:
        return [os.stat(path).st_size]
    except OSError:
        return [0]  # the file is opened then, and that says why it cannot be read


def _from_all(
    numbers_of: Callable[[Any], list[int]], items: np.ndarray, mesh: ProcessMesh | None
) -> np.ndarray:
    """Returns the joined results of a function, int64, for which all ranks take their shares."""
    rank, ranks = (0, 1) if mesh is None else (mesh.rank, mesh.size)
    share = items[rank * len(items) // ranks : (rank + 1) * len(items) // ranks]
    with ThreadPool(READERS) as pool:
        mine = np.fromiter(itertools.chain.from_iterable(pool.map(numbers_of, share)), np.int64)
    if mesh is None:
        return mine
    parts = mesh.gather_to_root(mine)
    return mesh.array_from_root(mine if parts is None else np.concatenate(parts))


def _from_first(values: np.ndarray, mesh: ProcessMesh | None) -> np.ndarray:
    """Returns any number of values of rank 0 on all ranks."""
    return values if mesh is None else mesh.array_from_root(values)


def _read_cache(path: Path, state: str) -> np.ndarray:
    """Returns the index of the same files from the cache; empty if there is none."""
    with contextlib.suppress(UnreadableError, KeyError):
        cached = read_arrays(path)
        if str(cached["state"]) == state:
            return cached["records"].astype(np.int64)
    return np.zeros(0, np.int64)


def _write_cache(path: Path, state: str, records: np.ndarray) -> None:
    """Writes the index to the cache, if the cache can be written."""
    with contextlib.suppress(WriteError), written_whole(path) as aside:
        with aside.open("wb") as file:
            np.savez_compressed(file, state=state, records=records)


def public_header(path: Path, parameters: Sequence[str] | None) -> DatasetHeader:
    """Returns a header for the public layout, int16 counts in a cube, from its first record.

    Raises:
        RecordError: if there are no names of parameters, no record, or no such cube.
    """
    if parameters is None:
        raise RecordError(f"{path.parent} has no {DATASET}: give the names of the parameters")
    packed = is_packed(path)
    if len(record_bounds(path, packed)) == 1:
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
