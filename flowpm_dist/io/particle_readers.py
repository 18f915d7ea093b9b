"""Opens snapshots of particles of other codes. Nothing here imports TensorFlow.

A format is a module with these names, and an entry of `READERS`:

    WORDS = "bigfile"  # the format, in messages
    def recognises(path) -> bool: ...  # whether a file, or a folder, is of this format
    def is_alone(path) -> bool: ...  # whether it says that it holds a whole snapshot
    def open_files(path, names, units) -> ParticleFiles: ...

`open_files` gets the path that was given, for messages; the files, in order; and the units that
they may lack, by the names of `formats.UNITS`. It opens each file and checks its sizes, but reads
no particles. It raises SnapshotError, or whatever a damaged file makes a library raise.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from flowpm_dist.io import (
    bigfile_particles,
    gadget_binary,
    hdf5_particles,
    swift_particles,
)
from flowpm_dist.io.files import SNAPSHOT, reading
from flowpm_dist.io.particle_files import ParticleFiles
from flowpm_dist.io.particle_formats import particle_folders
from flowpm_dist.io.snapshot import SnapshotError

_NUMBER = re.compile(r"\.(\d+)(\.hdf5|\.h5)?$")
"""The end of the name of one file of several."""
_SUFFIX = re.compile(r"(\.\d+)?(\.hdf5|\.h5)?$")
"""The end of a name that the files of a snapshot do not have in common."""


class Reader(Protocol):
    """A format of particles, see the head of this file."""

    WORDS: str

    def recognises(self, path: Path) -> bool:
        """Returns whether a path is of this format."""

    def is_alone(self, path: Path) -> bool:
        """Returns whether a file of this format says that it holds a whole snapshot."""

    def open_files(
        self, path: Path, names: Sequence[Path], units: Mapping[str, Any]
    ) -> ParticleFiles:
        """Opens a snapshot of this format."""


READERS: tuple[Reader, ...] = (
    bigfile_particles,
    swift_particles,
    hdf5_particles,
    gadget_binary,
)
"""The formats. The first one that recognises a file opens it."""


def open_particles(path: str | Path, units: Mapping[str, Any] | None = None) -> ParticleFiles:
    """Opens a snapshot of particles of any code; no particle is read yet.

    Args:
        path: a file; one of several files, such as `snap_004.0.hdf5`, which stands for all; their
            common name, such as `snapdir_004/snap_004`; a folder that holds one snapshot; or the
            folder of a run of ours that holds a snapshot for other codes.
        units: units that the files lack, see `formats.UNITS`: `UnitLength_in_cm` is the unit of a
            length times h, and `UnitMass_in_g` of a mass times h.

    Raises:
        SnapshotError: there is no such snapshot, or more than one; a file is missing or damaged, or
            of no known format; or a unit is missing.
    """
    files = find_particles(Path(path), units)
    if files is None and not os.path.lexists(path):
        raise SnapshotError(f"{path}: there is no such file or folder")
    if files is None:
        known = ", ".join(reader.WORDS for reader in READERS)
        raise SnapshotError(f"{path} holds no particles of a known format: must be {known}")
    return files


def find_particles(path: Path, units: Mapping[str, Any] | None = None) -> ParticleFiles | None:
    """Returns the snapshot of particles at a path, see `open_particles`; None if there is none.

    Raises:
        SnapshotError: as in `open_particles`, but for a path without particles.
    """
    if path.name == SNAPSHOT or (path / SNAPSHOT).exists():
        return None
    with reading(path, raises=SnapshotError):
        ours = (path / name for name in particle_folders())
        places = (path, *(folder for folder in ours if folder.is_dir()))
        snapshots = [snapshot for place in places for snapshot in _snapshots_in(place)]
    if len(snapshots) > 1:
        held = sorted(where.name for where, _, _ in snapshots)
        shown = " and ".join(held) if len(held) < 4 else ", ".join([*held[:3], "..."])
        raise SnapshotError(f"{path} holds {shown}: give the path of one of them")
    for where, reader, names in snapshots:
        with reading(where, raises=SnapshotError):
            return reader.open_files(where, names, units or {})
    return None


def _snapshots_in(path: Path) -> Iterator[tuple[Path, Reader, list[Path]]]:
    """Yields the snapshots at a path: where each is, its format, and its files."""
    if path.is_dir() and (reader := _reader_of(path)):
        yield path, reader, [path]
        return
    folder = path if path.is_dir() else path.parent
    series: dict[str, list[Path]] = {}
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        if file.is_file():
            series.setdefault(_SUFFIX.sub("", file.name), []).append(file)
    if not path.is_dir():
        name = _SUFFIX.sub("", path.name) if path.is_file() else path.name
        series = {path.name: [path] if _stands_alone(path) else series.get(name, [])}
    series = {name: files for stem in series for name, files in _divided(stem, series[stem])}
    known = {
        name: (reader, files)
        for name, files in series.items()
        if files and (reader := _reader_of(files[0]))
    }
    for name, (reader, files) in known.items():
        where = folder / name if len(known) > 1 else path
        yield where, reader, _in_order(files)


def _stands_alone(path: Path) -> bool:
    """Returns whether a path is a file that is no part of a snapshot in several files.

    A number at the end of its name may be a decimal, as in `snap_z0.5.hdf5`.
    """
    if not path.is_file():
        return False
    reader = _reader_of(path)
    return not _NUMBER.search(path.name) or (reader is not None and reader.is_alone(path))


def _divided(stem: str, files: Sequence[Path]) -> Iterator[tuple[str, list[Path]]]:
    """Yields the snapshots in files whose names begin with a stem: their names and their files."""
    numbered = [file for file in files if _NUMBER.search(file.name)]
    if len(files) > 1 and numbered and _stands_alone(numbered[0]):
        yield from ((file.name, [file]) for file in numbered)
        files = [file for file in files if file not in numbered]
    yield stem, [*files]


def _reader_of(path: Path) -> Reader | None:
    return next((reader for reader in READERS if reader.recognises(path)), None)


def _in_order(files: Sequence[Path]) -> list[Path]:
    """Returns the numbered files by number; those without a number if there are no others.

    Raises:
        SnapshotError: two have the same number.
    """
    ends = {file: _NUMBER.search(file.name) for file in files}
    numbered = {file: int(end[1]) for file, end in ends.items() if end}
    ordered = sorted(numbered, key=lambda file: numbered[file])
    for one, other in itertools.pairwise(ordered):
        if numbered[one] == numbered[other]:
            raise SnapshotError(f"{one} and {other} have the same number: must be files of one")
    return ordered or [*files]
