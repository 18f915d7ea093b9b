"""What looks at particles when they cross a light cone: after which kick, and which of them.

A particle crosses when the light leaves its undisplaced place: at the scale factor of that
distance. From the kick before that time it has drifted by a part of the integrator's own drift.
Each copy of a particle is seen once, and moves on the sky smoothly with all that it depends on
(MADLens, Boehm and others 2021, arXiv:2012.07266, section 2.2).
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.distances import Distances
from flowpm_dist.evolution.observers import Look, Moment, Observer, Seen
from flowpm_dist.grid.box import Box
from flowpm_dist.observables.light_cone.tiles import Layers
from flowpm_dist.particle_mesh.kernels.farthest import BOXES


class CrossingObserver(Observer):
    """Looks at the particles that cross the light cone after each kick.

    Args:
        box: of the particles.
        looks: what is looked at after each kick, anything that `see` takes.
        kicks: the numbers of the kicks.
    """

    def __init__(self, box: Box, looks: Mapping[int, Sequence[Any]], kicks: Iterable[int]) -> None:
        self._box, self._looks = box, looks
        self.kicks = frozenset(kicks)

    def looks(self, kick: int) -> list[Look]:
        """See `Observer.looks`."""
        return [functools.partial(self.see, look) for look in self._looks.get(kick, [])]

    @abc.abstractmethod
    def see(self, look: Any, moment: Moment, inputs: Sequence[tf.Tensor]) -> Seen:
        """Returns what one look sees, as a `Look` does."""


@dataclass(frozen=True)
class LayerLook:
    """What is seen of the universes whose layers are crossed after the same kicks.

    Attributes:
        universes: their numbers among those of this rank.
        layers: numbers among those of the cone, in the order of `places`.
        places, directions: of this rank's particles, see `Slabs`; x are the rows of a map.
    """

    universes: np.ndarray
    layers: np.ndarray
    places: np.ndarray
    directions: np.ndarray


def layer_times(layers: Layers, distances: Distances) -> tf.Tensor:
    """Returns the scale factors at which the light of layers leaves them [layers] [1]."""
    return tf.maximum(distances.scale_factor(layers.distances), layers.earliest)


@contextmanager
def reaching(a: Any) -> Iterator[None]:
    """Names, in a ValueError that is raised inside, the redshift of the farthest light.

    Args:
        a: its scale factor.
    """
    try:
        yield
    except ValueError as error:
        z = 1.0 / float(a) - 1.0
        raise ValueError(f"a light cone that reaches to z = {z:.4g}: {error}") from error


def check_seen(finite: tf.Tensor | bool, box: Box) -> None:
    """Checks that what crossed the light cone has a finite place, on all ranks together.

    Args:
        finite: whether what this rank has seen is.
        box: of the particles.

    Raises:
        FloatingPointError: some is not, on this rank or another.
    """
    lost = tf.constant(int(not finite))
    if int(box.mesh.world.allreduce(lost, "max")):
        raise FloatingPointError(
            "light cone: a particle that crosses it has a place, a velocity or a weight that is "
            f"not finite, or is displaced by more than {BOXES:g} times the longest side of the box"
        )


def layer_looks(
    box: Box, layers: Layers, kicks: Sequence[tuple[int, ...]]
) -> dict[int, list[LayerLook]]:
    """Returns, for each kick, the looks at this rank's layers that are crossed after it.

    Args:
        box: of the particles.
        layers: of the cone.
        kicks: of each universe of this rank, and each layer.
    """
    looks: dict[int, list[LayerLook]] = {}
    for each in dict.fromkeys(kicks):
        same = np.flatnonzero([each == others for others in kicks])
        for kick in sorted(set(each)):
            look = _look_at(box, layers, same, np.flatnonzero(np.array(each) == kick))
            if look is not None:
                looks.setdefault(kick, []).append(look)
    return looks


def _look_at(
    box: Box, layers: Layers, universes: np.ndarray, chosen: np.ndarray
) -> LayerLook | None:
    """Returns a look at chosen layers; None where this rank has no particle of theirs."""
    places, directions = [], []
    order: list[int] = []
    for number in sorted(set(layers.tile[chosen].tolist())):
        axis = layers.tiles[number].axes[2]
        first, count = box.offset[axis], box.block[axis]
        here = [
            (int(layers.index[m]) - first, int(m))
            for m in chosen[layers.tile[chosen] == number]
            if first <= layers.index[m] < first + count
        ]
        axes = layers.tiles[number].axes
        for run in _runs(sorted(here)):
            places.append([axes[1], axes[0], axis, run[0][0], len(run), len(order)])
            directions.append(_directions(box, layers, number))
            order += [m for _, m in run]
    if not order:
        return None
    return LayerLook(universes, np.array(order), np.array(places, np.int32), np.array(directions))


def _directions(box: Box, layers: Layers, number: int) -> list[float]:
    """Returns a row of `Slabs.directions`: of the columns of a map, y, and of its rows, x."""
    tile = layers.tiles[number]
    row: list[float] = []
    for i in (1, 0):
        axis, sense = tile.axes[i], tile.senses[i]
        row += [tile.shifts[i] + sense * box.offset[axis] * box.cell[axis], sense]
    return [*row, tile.senses[2]]


def _runs(places: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Returns pairs, sorted by their first number, in runs without a gap in it."""
    runs: list[list[tuple[int, int]]] = []
    for place in places:
        if runs and runs[-1][-1][0] == place[0] - 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs
