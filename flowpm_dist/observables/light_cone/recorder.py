"""Writes the particles of a run to files when their light leaves them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.distances import Distances
from flowpm_dist.evolution.observers import Moment, Seen
from flowpm_dist.io.light_cone_file import LightConeFile
from flowpm_dist.io.particles import HUBBLE
from flowpm_dist.observables.light_cone.crossings import (
    CrossingObserver,
    LayerLook,
    layer_looks,
    layer_times,
    reaching,
)
from flowpm_dist.observables.light_cone.tiles import Layers
from flowpm_dist.simulation.inputs import Inputs


class ParticleRecorder(CrossingObserver):
    """Writes places, velocities and scale factors of particles as they cross; no gradient.

    They are those of the states of the integrator at the times of the crossings.

    Args:
        inputs: of the run, of one universe.
        layers: of the cone.
        fov: side of the field of view [rad].
        file: of this rank.

    Raises:
        ValueError: a batch of universes.
    """

    needs_before = True
    inputs = ()

    def __init__(self, inputs: Inputs, layers: Layers, fov: float, file: LightConeFile) -> None:
        if inputs.box.batch is not None:
            raise ValueError("the particles of one universe are written, not those of a batch")
        self._layers, self._fov, self._file = layers, fov, file
        growth = inputs.cosmologies.growths[0]
        a = layer_times(layers, Distances(growth.background.cosmology)).numpy()
        with reaching(a[-1]):
            integrator = inputs.options.integrator
            found = integrator.interpolation(growth, inputs.edges.tolist(), a.tolist())
        self._a = a
        # Of the velocities before and after the kick, and of the LPT fields.
        self._moved, velocities = np.moveaxis(found.factors.numpy(), 1, 0)
        # a dx/dt is the canonical velocity over a.
        self._speed = velocities * (HUBBLE / a)[:, np.newaxis]
        super().__init__(inputs.box, layer_looks(inputs.box, layers, [found.kicks]), found.kicks)

    def see(self, look: LayerLook, moment: Moment, inputs: Sequence[tf.Tensor]) -> Seen:
        """See `CrossingObserver.see`."""
        if not self._file.closed:  # as it is on the way back
            place, *fields = (t.numpy() for t in moment.tensors)
            for at, directions in zip(look.places, look.directions, strict=True):
                for particles in self._slab(look.layers, at, directions, place, fields):
                    self._file.append(*particles)
        return {}

    def results(self, seen: Seen) -> None:
        """Returns None: all is in the files."""

    def _slab(
        self,
        layers: np.ndarray,
        place: np.ndarray,
        directions: np.ndarray,
        displacement: np.ndarray,
        fields: list[np.ndarray],
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yields positions, velocities and scale factors of what is seen of a slab, by layers."""
        # Columns of maps are y and rows x: so are the first two of a slab's axes.
        axes = int(place[1]), int(place[0]), int(place[2])
        senses = directions[3], directions[1], directions[4]
        origins = directions[2], directions[0]
        for i in range(place[4]):
            layer = layers[place[5] + i]
            own, *planes = (
                np.take(field, place[3] + i, axis=axes[2]) for field in (displacement, *fields)
            )
            moved, speed = (
                sum(c * plane for c, plane in zip(factors[layer], planes, strict=False))
                for factors in (self._moved, self._speed)
            )
            moved = own + moved
            distance = self._layers.distances[layer] + senses[2] * moved[..., axes[2]]
            across = []
            for axis, sense, origin in zip(axes, senses, origins, strict=False):
                lattice = np.arange(displacement.shape[axis]) * self._box.cell[axis]
                before_other = axis < next(a for a in axes[:2] if a != axis)
                lattice = lattice[:, np.newaxis] if before_other else lattice[np.newaxis]
                length = self._box.size[axis]
                x = origin + sense * (lattice + moved[..., axis])
                across.append((x - length * np.rint(x / length), length))
            reach = 0.5 * self._fov * distance
            velocity = np.stack([s * speed[..., a] for a, s in zip(axes, senses, strict=True)], -1)
            shifts = [
                range(-n, n + 1)
                for n in (int(np.ceil(max(reach.max() / length - 0.5, 0))) for _, length in across)
            ]
            for j, k in itertools.product(*shifts):
                x, y = (c + m * length for (c, length), m in zip(across, (j, k), strict=True))
                inside = (np.abs(x) <= reach) & (np.abs(y) <= reach) & (distance > 0)
                positions = np.stack([x, y, distance], axis=-1)[inside]
                if len(positions):
                    yield positions, velocity[inside], np.full(len(positions), self._a[layer])
