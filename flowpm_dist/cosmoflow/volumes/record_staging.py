"""Staging: copies datasets to fast local storage before training reads them in random order."""

from __future__ import annotations

import gzip
import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

from flowpm_dist.cosmoflow.volumes.record_files import DATASET, RecordError, dataset_files, is_gzip
from flowpm_dist.io.files import WriteError, human_size
from flowpm_dist.jobs.folder import existing_part


def stage(
    folder: Path,
    into: Path,
    split: str,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Copies a split into a fast local folder and unpacks gzip. For one process of each node.

    Existing files of the same size and time are kept. Each other file appears when it is complete.

    Args:
        folder: the dataset, in the layout of this package or the public one.
        into: the local folder; created if it does not exist.
        split: the split to copy.
        progress: called with the number of files done and the number of all files.

    Returns:
        The folder to read from: `into`.

    Raises:
        RecordError: if there is no such split, there is not enough room, a gzip file is damaged, or
            `into` has files of the split that the dataset does not have.
        WriteError: if a file cannot be copied.
    """
    folder, into = Path(folder), Path(into)
    sources = dataset_files(folder, split)
    targets = {
        into / path.relative_to(folder).with_name(_unpacked_name(path)): path for path in sources
    }
    if (folder / DATASET).exists():
        targets[into / DATASET] = folder / DATASET
    _check_staging(into, split, targets)
    for done, (target, source) in enumerate(targets.items()):
        if progress is not None:
            progress(done, len(targets))
        if not _is_staged(source, target):
            _copy(source, target)
    if progress is not None:
        progress(len(targets), len(targets))
    return into


def _unpacked_name(path: Path) -> str:
    """Returns the name of a file after unpacking."""
    return path.name.removesuffix(".gz")


def _unpacked_size(path: Path) -> int:
    """Returns the size of a file after unpacking [bytes].

    A packed file states it in its last four bytes, modulo 4 GiB.
    """
    size = path.stat().st_size
    if not is_gzip(path):
        return size
    with open(path, "rb") as file:
        file.seek(-4, os.SEEK_END)
        return int.from_bytes(file.read(), "little")


def _is_staged(source: Path, target: Path) -> bool:
    if not target.exists():
        return False
    there, mtime = target.stat(), int(source.stat().st_mtime)
    return int(there.st_mtime) == mtime and there.st_size == _unpacked_size(source)


def _check_staging(into: Path, split: str, targets: Mapping[Path, Path]) -> None:
    try:
        there = set(dataset_files(into, split))
    except RecordError:
        there = set()
    if foreign := sorted(there - set(targets)):
        raise RecordError(f"{foreign[0]} is of another dataset: stage into another folder")
    missing = [source for target, source in targets.items() if not _is_staged(source, target)]
    needed = sum(_unpacked_size(source) for source in missing)
    ground = existing_part(into)
    free = shutil.disk_usage(ground).free
    if needed > free:
        raise RecordError(
            f"{ground} has {human_size(free)} free, the {len(missing)} files of split {split!r} "
            f"still to be staged need {human_size(needed)}"
        )


def _copy(source: Path, target: Path) -> None:
    partial = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if is_gzip(source):
            with gzip.open(source) as packed, open(partial, "wb") as file:
                shutil.copyfileobj(packed, file, 2**20)
        else:
            shutil.copyfile(source, partial)
        shutil.copystat(source, partial)
        partial.replace(target)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise RecordError(f"{source} is damaged: {error}") from error
    except OSError as error:
        raise WriteError.of(Path(error.filename or target), error) from error
    finally:
        partial.unlink(missing_ok=True)
