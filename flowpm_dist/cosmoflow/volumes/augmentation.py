"""Transformations of training volumes: periodic shifts and the 48 symmetries of the cube.

A periodic box has no origin and no preferred axes, so the parameters stay the same. In redshift
space one axis is the line of sight, which stays where it is.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from meshimpl.process_mesh import ProcessMesh

Augment = bool | Literal["symmetries"]

_PERMUTATIONS = list(itertools.permutations(range(3)))
_KEEPING = [[axes for axes in _PERMUTATIONS if axes[kept] == kept] for kept in range(3)]
_FLIPS = list(itertools.product((1, -1), repeat=3))


@dataclass(frozen=True)
class View:
    """A symmetry and a shift that are applied to a volume.

    Attributes:
        axes: the side of the volume that becomes x, y and z.
        flips: 1 or -1 for each of the new sides.
        shift: cells along each side of the volume as it is.
    """

    axes: tuple[int, int, int] = (0, 1, 2)
    flips: tuple[int, int, int] = (1, 1, 1)
    shift: tuple[int, int, int] = (0, 0, 0)

    @classmethod
    def draw(
        cls,
        rng: np.random.Generator,
        width: int,
        augment: Augment = True,
        axis: str | None = None,
    ) -> View:
        """Returns one of all possible views, each equally likely.

        Args:
            rng: drawn from.
            width: cells along a side of the volume.
            augment: True: shifts and symmetries; "symmetries" alone, of volumes that are not
                periodic; False: as it is.
            axis: "x", "y" or "z", a line of sight, which may be turned round but not exchanged.
        """
        if not augment:
            return cls()
        x, y, z = (0, 0, 0) if augment == "symmetries" else rng.integers(width, size=3).tolist()
        allowed = _PERMUTATIONS if axis is None else _KEEPING["xyz".index(axis)]
        axes = allowed[rng.integers(len(allowed))]
        return cls(axes, _FLIPS[rng.integers(len(_FLIPS))], (x, y, z))  # type: ignore[arg-type]

    def of(self, volume: np.ndarray) -> np.ndarray:
        """Returns the volume [x, y, z, ...] under this view."""
        shifted = np.roll(volume, self.shift, axis=(0, 1, 2))
        turned = shifted.transpose(*self.axes, *range(3, volume.ndim))
        return turned[tuple(slice(None, None, flip) for flip in self.flips)]


def views_of(volumes: np.ndarray, views: list[View], mesh: ProcessMesh) -> np.ndarray:
    """Returns this rank's blocks of several volumes, each under its view.

    Where volumes are split, each is gathered for it: one channel, where the network's first layer
    makes many more.

    Args:
        volumes: blocks [n, x/row, y/col, z, ...].
        views: n of them.
        mesh: the ranks that hold the volumes, of axes `row` and `col`.

    Returns:
        blocks of the same shape.
    """
    wholes = whole_volumes(volumes, mesh)
    found = np.stack([view.of(whole) for view, whole in zip(views, wholes, strict=True)])
    return block_of(found, mesh)


def whole_volumes(volumes: np.ndarray, mesh: ProcessMesh) -> np.ndarray:
    """Returns whole volumes [n, x, y, ...] on every rank, from blocks [n, x/row, y/col, ...]."""
    gathered: Any = volumes
    for axis, name in ((1, "row"), (2, "col")):
        if mesh.axis_size(name) > 1:
            gathered = mesh.communicator(name).allgather(tf.convert_to_tensor(gathered), axis)
    return np.asarray(gathered)


def block_of(volumes: np.ndarray, mesh: ProcessMesh) -> np.ndarray:
    """Returns this rank's blocks of whole volumes [n, x, y, ...]."""
    for axis, name in ((1, "row"), (2, "col")):
        parts = mesh.axis_size(name)
        volumes = np.split(volumes, parts, axis)[mesh.coordinate(name)] if parts > 1 else volumes
    return volumes
