"""Writes the particles of a run to files when their light leaves them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.distances import Distances
from flowpm_dist.evolution.observers import Moment, Seen
from flowpm_dist.io.light_cone_file import LightConeFile
from flowpm_dist.observables.light_cone.observer import SkyPainter
from flowpm_dist.observables.light_cone.tiles import Layers
from flowpm_dist.particle_mesh.kernels import Slabs
from flowpm_dist.simulation.inputs import Inputs

HUBBLE = 100.0  # [km/s h/Mpc]


class ParticleRecorder(SkyPainter):
    """Writes places, velocities and scale factors of particles as they cross; no gradient.

    The velocity is that of the integrator's drift at the time of the crossing.

    Args:
        inputs: of the run, of one universe.
        layers: of the cone.
        fov: side of the field of view [rad].
        file: of this rank.

    Raises:
        ValueError: a batch of universes.
    """

    def __init__(self, inputs: Inputs, layers: Layers, fov: float, file: LightConeFile) -> None:
        if inputs.box.batch is not None:
            raise ValueError("the particles of one universe are written, not those of a batch")
        nothing = tf.zeros([len(layers.distances), 1, 2], tf.float64)
        maps = np.zeros(len(layers.distances), np.int32)
        super().__init__(inputs, layers, fov, 1, maps, 1, lambda _: nothing)
        self._file = file
        growth, edges = inputs.cosmologies.growths[0], inputs.edges.tolist()
        a = Distances(growth.background.cosmology).scale_factor(layers.distances)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(a)
            _, factors = inputs.options.integrator.since_kick(growth, edges, a)
            columns = tf.unstack(factors[:, 1:], axis=1)
        slopes = [tape.gradient(c, a, unconnected_gradients="zero") for c in columns]
        # a dx/dt = a^2 E dx/da, in units of H0.
        rate = a**2 * growth.background.e(a) * HUBBLE
        self._a = a.numpy()
        self._moved, self._speed = (
            np.concatenate([np.full((len(self._a), 1), first), columns], axis=1)
            for first, columns in (
                (1.0, factors[:, 1:].numpy()),
                (0.0, tf.stack([rate * slope for slope in slopes], axis=1).numpy()),
            )
        )

    def look(self, kick: int, moment: Moment, inputs: Sequence[tf.Tensor]) -> Seen:
        """See `Observer.look`."""
        fields = [t.numpy() for t in (moment.displacement, moment.after, *moment.lpt)]
        for look in self._looks[kick]:
            for place, directions in zip(look.slabs.places, look.slabs.directions, strict=True):
                for particles in self._slab(look.slabs, look.layers, place, directions, fields):
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
        fields: list[np.ndarray],
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yields positions, velocities and scale factors of what is seen of a slab, by layers."""
        # Columns of maps are y and rows x: so are the first two of a slab's axes.
        axes = int(place[1]), int(place[0]), int(place[2])
        senses = directions[3], directions[1], directions[4]
        origins = directions[2], directions[0]
        for i in range(place[4]):
            layer = layers[place[5] + i]
            planes = [np.take(field, place[3] + i, axis=axes[2]) for field in fields]
            moved, speed = (
                sum(c * plane for c, plane in zip(factors[layer], planes, strict=False))
                for factors in (self._moved, self._speed)
            )
            distance = slabs.distances[place[5] + i] + senses[2] * moved[..., axes[2]]
            across = []
            for axis, sense, origin in zip(axes, senses, origins, strict=False):
                lattice = np.arange(fields[0].shape[axis]) * slabs.spacing[axis]
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
