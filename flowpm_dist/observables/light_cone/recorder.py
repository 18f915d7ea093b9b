"""Writes the particles of a run to files when their light leaves them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.growth import GrowthFunctions
from flowpm_dist.evolution.integrators import Integrator
from flowpm_dist.evolution.observers import Look, Moment, Seen
from flowpm_dist.io.light_cone_file import LightConeFile
from flowpm_dist.io.particles import HUBBLE
from flowpm_dist.observables.light_cone.observer import SkyPainter
from flowpm_dist.observables.light_cone.tiles import Layers
from flowpm_dist.particle_mesh.kernels import Slabs
from flowpm_dist.simulation.inputs import Inputs


class ParticleRecorder(SkyPainter):
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

    def __init__(self, inputs: Inputs, layers: Layers, fov: float, file: LightConeFile) -> None:
        if inputs.box.batch is not None:
            raise ValueError("the particles of one universe are written, not those of a batch")
        nothing = tf.zeros([len(layers.distances), 1, 2], tf.float64)
        maps = np.zeros(len(layers.distances), np.int32)
        self._file, self._every = file, frozenset[int]()
        super().__init__(inputs, layers, fov, 1, maps, 1, lambda *_: nothing)
        self.kicks = self._every

    def _crossing(
        self, integrator: Integrator, growth: GrowthFunctions, edges: list[float], a: tf.Tensor
    ) -> tuple[tuple[int, ...], tf.Tensor]:
        """See `SkyPainter._crossing`: by the states of the integrator, which have velocities."""
        self._a = a.numpy()
        found = integrator.interpolation(growth, edges, self._a.tolist())
        places, velocities = np.moveaxis(found.factors.numpy(), 1, 0)
        # a dx/dt is the canonical velocity over a.
        self._speed = velocities * (HUBBLE / self._a)[:, np.newaxis]
        self._moved, self._every = places, frozenset(found.kicks)
        return found.kicks, found.factors[:, 0]

    def looks(self, kick: int) -> list[Look]:
        """See `Observer.looks`."""
        return [functools.partial(self._record, kick)]

    def _record(self, kick: int, moment: Moment, inputs: Sequence[tf.Tensor]) -> Seen:
        if self._file.closed:  # on the way back
            return {}
        place, *fields = (t.numpy() for t in moment.tensors)
        for look in self._looks.get(kick, []):
            for at, directions in zip(look.slabs.places, look.slabs.directions, strict=True):
                for particles in self._slab(look.slabs, look.layers, at, directions, place, fields):
                    self._file.append(*particles)
        return {}

    def results(self, seen: Seen) -> None:
        """Returns None: all is in the files."""

    def _slab(
        self,
        slabs: Slabs,
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
            distance = slabs.distances[place[5] + i] + senses[2] * moved[..., axes[2]]
            across = []
            for axis, sense, origin in zip(axes, senses, origins, strict=False):
                lattice = np.arange(displacement.shape[axis]) * slabs.spacing[axis]
                before_other = axis < next(a for a in axes[:2] if a != axis)
                lattice = lattice[:, np.newaxis] if before_other else lattice[np.newaxis]
                length = slabs.lengths[axis]
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
