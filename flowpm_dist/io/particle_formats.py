"""The formats of snapshots of particles for other codes, by name.

A format is a module with two functions, and an entry here:

    def write_part(folder, number, parts, block, header) -> numpy.ndarray: ...
    def finish(folder, parts, header) -> None: ...

`write_part` writes one part of a snapshot. It gets the snapshot's folder, which exists, the number
of the part from 0, the number of parts, a `ParticleBlock` with the particles of the part, and a
`Header` with facts about the universe. It returns numbers about the part that `finish` needs,
int64 [n]. `finish` writes what needs all parts, from what `write_part` returned for each. Both
raise OSError if they cannot write.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ParticleFormat:
    """A format that holds particles only.

    Attributes:
        folder: name of the folder of such a snapshot.
        module: name of the module that writes it.
        help: what it is, in a few words.
    """

    folder: str
    module: str
    help: str


PARTICLE_FORMATS = {
    "gadget-hdf5": ParticleFormat(
        "snapshot.gadget", "flowpm_dist.io.gadget_hdf5", "as Gadget-4 writes"
    ),
    "bigfile": ParticleFormat("snapshot.bigfile", "flowpm_dist.io.bigfile", "as FastPM does"),
}


def particle_folders() -> tuple[str, ...]:
    """Returns the names of the folders of all these snapshots."""
    return tuple(each.folder for each in PARTICLE_FORMATS.values())


def checked_format(name: Any) -> Any:
    """Returns the name of a format of snapshots if there is such a format.

    Raises:
        ValueError: there is none.
    """
    if name not in FORMAT_NAMES:
        raise ValueError(f"format {name!r}: must be one of {', '.join(map(repr, FORMAT_NAMES))}")
    return name


FORMAT_NAMES = ("zarr", *PARTICLE_FORMATS)
"""The names of all formats of snapshots."""
