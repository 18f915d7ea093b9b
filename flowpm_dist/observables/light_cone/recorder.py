"""Writes the particles of a run to files when their light leaves them."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.distances import Distances
from flowpm_dist.evolution.observers import Moment, Seen
from flowpm_dist.io.light_cone_file import LightConeFiles, holds_light_cone
from flowpm_dist.io.particles import HUBBLE
from flowpm_dist.observables.light_cone.crossings import (
    CrossingObserver,
    LayerLook,
    check_seen,
    layer_looks,
    layer_times,
    reaching,
)
from flowpm_dist.observables.light_cone.options import DepthOptions
from flowpm_dist.observables.light_cone.tiles import Layers
from flowpm_dist.particle_mesh.kernels.farthest import farthest_move
from flowpm_dist.simulation.inputs import Inputs
from flowpm_dist.simulation.simulation import ObserverOf, Simulation

Particles = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Positions [n, 3] [Mpc/h], velocities [n, 3] [km/s] and scale factors [n]."""
AT_ONCE = 2**17
"""Particles that are looked at together."""


def pieces(shape: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    """Yields slices of the first two of three axes that cut a lattice into small pieces.

    Args:
        shape: of the lattice. A piece has at most AT_ONCE particles, or one line of them.
    """
    columns = min(shape[1], max(1, AT_ONCE // shape[2]))
    rows = max(1, AT_ONCE // (columns * shape[2]))
    for i in range(0, shape[0], rows):
        for j in range(0, shape[1], columns):
            yield slice(i, i + rows), slice(j, j + columns)


def placed(moved: np.ndarray, lengths: Sequence[float]) -> np.ndarray:
    """Returns displacements [..., 3] with NaN for those too large to have a place, in place.

    Args:
        moved: [Mpc/h].
        lengths: of the box along its axes [Mpc/h].
    """
    moved[~(np.abs(moved) <= farthest_move(lengths))] = np.nan
    return moved


class Recorder(CrossingObserver):
    """Writes places, velocities and scale factors of particles as they cross; no gradient.

    They are those of the states of the integrator at the times of the crossings.

    Args:
        inputs: of the run, of one universe.
        cone: that is seen; its options are kept with the particles.
        looks, kicks: see `CrossingObserver`.
        files: of this rank.

    Raises:
        ValueError: a batch of universes.
    """

    needs_before = True
    inputs = ()

    def __init__(
        self,
        inputs: Inputs,
        cone: DepthOptions,
        looks: Mapping[int, Sequence[Any]],
        kicks: Iterable[int],
        files: LightConeFiles,
    ) -> None:
        if inputs.box.batch is not None:
            raise ValueError("the particles of one universe are written, not those of a batch")
        super().__init__(inputs.box, looks, kicks)
        self._files, self._finite = files, True
        files.describe(
            {
                **cone.model_dump(),
                "grid": list(inputs.box.grid),
                "box_size": list(inputs.box.size),
                "cosmology": inputs.cosmologies.cosmologies[0].numbers(),
                "seed": inputs.source.seed,
                "paired": inputs.source.paired,
            }
        )

    def see(self, look: Any, moment: Moment, inputs: Sequence[tf.Tensor]) -> Seen:
        """See `CrossingObserver.see`."""
        if not self._files.closed:  # as they are on the way back
            dtype = self._box.dtype.as_numpy_dtype
            place, *fields = (t.numpy() for t in moment.tensors)
            for columns in self.seen_of(look, place, fields):
                self._finite &= all(bool(np.isfinite(column.sum())) for column in columns)
                if len(columns[0]):
                    self._files.append(*(column.astype(dtype) for column in columns))
        return {}

    @abc.abstractmethod
    def seen_of(
        self, look: Any, displacement: np.ndarray, fields: list[np.ndarray]
    ) -> Iterator[Particles]:
        """Yields the particles of a look; one that is not finite is among them.

        Args:
            look: of those that it was made with.
            displacement: [x, y, z, 3] [Mpc/h].
            fields: the velocities before and after the kick, and LPT fields, likewise.
        """

    def results(self, seen: Seen) -> None:
        """Returns None: all is in the files.

        Raises:
            FloatingPointError: a particle was not finite, or too far displaced. On every rank.
        """
        check_seen(self._finite, self._box)

    def pack(self, seen: Seen) -> dict[str, tf.Tensor]:
        """See `Observer.pack`, and `results` for errors: all is in the files."""
        check_seen(self._finite, self._box)
        return {}


class FieldRecorder(Recorder):
    """Writes the particles in a field of the flat sky.

    Args:
        inputs: of the run, of one universe.
        cone: that is seen.
        layers: of the cone.
        fov: side of the field of view [rad].
        files: of this rank.

    Raises:
        ValueError: a batch of universes.
    """

    def __init__(
        self,
        inputs: Inputs,
        cone: DepthOptions,
        layers: Layers,
        fov: float,
        files: LightConeFiles,
    ) -> None:
        self._layers, self._fov = layers, fov
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
        looks = layer_looks(inputs.box, layers, [found.kicks])
        super().__init__(inputs, cone, looks, found.kicks, files)

    def seen_of(
        self, look: LayerLook, displacement: np.ndarray, fields: list[np.ndarray]
    ) -> Iterator[Particles]:
        """See `Recorder.seen_of`."""
        for at, directions in zip(look.places, look.directions, strict=True):
            yield from self._slab(look.layers, at, directions, displacement, fields)

    def _slab(
        self,
        layers: np.ndarray,
        place: np.ndarray,
        directions: np.ndarray,
        displacement: np.ndarray,
        fields: list[np.ndarray],
    ) -> Iterator[Particles]:
        """Yields what is seen of a slab, by layers."""
        # Columns of maps are y and rows x: so are the first two of a slab's axes.
        axes = int(place[1]), int(place[0]), int(place[2])
        senses = directions[3], directions[1], directions[4]
        origins = directions[2], directions[0]
        for i in range(place[4]):
            of_layer = (*(slice(None),) * axes[2], place[3] + i)
            planes = [field[of_layer] for field in (displacement, *fields)]
            for piece in pieces((*planes[0].shape[:2], 1)):
                yield from self._piece(
                    layers[place[5] + i], axes, senses, origins, piece, [p[piece] for p in planes]
                )

    def _piece(
        self,
        layer: int,
        axes: tuple[int, int, int],
        senses: tuple[float, float, float],
        origins: tuple[float, float],
        piece: tuple[slice, slice],
        planes: list[np.ndarray],
    ) -> Iterator[Particles]:
        """Yields what is seen of a piece of a plane of particles, by images.

        Args:
            layer: of the plane.
            axes, senses, origins: of x, y and the distance, of which the plane has the first two.
            piece: where it is in the plane, whose axes are in the order of the box.
            planes: its displacements, velocities and LPT fields [., ., 3].
        """
        own, *others = planes
        moved, speed = (
            sum(c * plane for c, plane in zip(factors[layer], others, strict=False))
            for factors in (self._moved, self._speed)
        )
        moved = placed(own + moved, self._box.size)
        distance = self._layers.distances[layer] + senses[2] * moved[..., axes[2]]
        across = []
        for axis, sense, origin in zip(axes, senses, origins, strict=False):
            first = axis == min(axes[:2])
            begin, count = piece[0 if first else 1].start, own.shape[0 if first else 1]
            lattice = (begin + np.arange(count)) * self._box.cell[axis]
            lattice = lattice[:, np.newaxis] if first else lattice[np.newaxis]
            length = self._box.size[axis]
            x = origin + sense * (lattice + moved[..., axis])
            across.append((x - length * np.rint(x / length), length))
        lost = ~np.isfinite(distance + across[0][0] + across[1][0])
        reach = np.where(lost, 0.0, 0.5 * self._fov * distance)
        velocity = np.stack([s * speed[..., a] for a, s in zip(axes, senses, strict=True)], -1)
        shifts = [
            range(-n, n + 1)
            for n in (int(np.ceil(max(reach.max() / length - 0.5, 0))) for _, length in across)
        ]
        for j, k in itertools.product(*shifts):
            x, y = (c + m * length for (c, length), m in zip(across, (j, k), strict=True))
            inside = (np.abs(x) <= reach) & (np.abs(y) <= reach) & (distance > 0) | lost
            positions = np.stack([x, y, distance], axis=-1)[inside]
            yield positions, velocity[inside], np.full(len(positions), self._a[layer])


def write_particles(
    observer_of: Any,
    simulation: Simulation,
    folder: str | Path,
    seed: int | Sequence[int] | None,
    **run: Any,
) -> Path:
    """Simulates, and writes the particles of a light cone: see `LightCone.particles`.

    Args:
        observer_of: from the files of this rank to the observer that writes them.
        simulation, folder, seed, **run: as there.
    """
    path, mesh = Path(folder), simulation.box.mesh
    if int(mesh.world.allreduce(tf.constant(int(holds_light_cone(path))), "max")):
        raise FileExistsError(f"{path} holds a light cone: give another folder, or remove it")
    with LightConeFiles(path, mesh) as files:
        observer: ObserverOf = observer_of(files)
        simulation.observe(observer, seed, **run)
    return path
