"""A light cone of the whole sky, of the runs of a simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.distances import Distances
from flowpm_dist.cosmology.growth import GrowthFunctions
from flowpm_dist.evolution.observers import Seen
from flowpm_dist.grid.healpix import Healpix
from flowpm_dist.io.light_cone_file import LightConeFiles
from flowpm_dist.observables.lensing.alignment import IntrinsicAlignment
from flowpm_dist.observables.lensing.planes import LensPlanes
from flowpm_dist.observables.lensing.sources import Sources
from flowpm_dist.observables.light_cone.convergence import (
    Population,
    check_latest,
    farthest_of_all,
    stacked_means,
    warn_of_fine_pixels,
)
from flowpm_dist.observables.light_cone.maps import DensityShells, SphericalConvergence
from flowpm_dist.observables.light_cone.options import FullSkyOptions
from flowpm_dist.observables.light_cone.recorder import write_particles
from flowpm_dist.observables.light_cone.sphere import SpherePainter
from flowpm_dist.observables.light_cone.sphere_recorder import SphereRecorder
from flowpm_dist.particle_mesh.kernels import Ball
from flowpm_dist.simulation.inputs import Inputs
from flowpm_dist.simulation.simulation import ObserverOf, Simulation

NODES = 512
"""Of the distance, between which weights are linear, at least: at most twice as many."""


class FullSkyLightCone(FullSkyOptions):
    """What an observer in the box sees at z = 0 of a simulated universe, on the whole sky.

    The periodic box is repeated in all three directions, as it is, neither shifted nor turned:
    there is no border at which structure is cut, but the same structure is seen again a side of the
    box away. Where its light is seen, a particle is at the place that it has when the light leaves
    its undisplaced place. `FullSkyOptions` describes the attributes.
    """

    def convergence(
        self,
        simulation: Simulation,
        sources: Sequence[Sources],
        seed: int | Sequence[int] | None = None,
        *,
        alignment: IntrinsicAlignment | None = None,
        **run: Any,
    ) -> SphericalConvergence:
        """Simulates, and returns the convergence of sources in the Born approximation.

        The maps are made as the run goes on: no shells are kept. Each particle is weighed by its
        own distance. The mean that is subtracted is that of the universe. Under a tape gradients
        flow as they do for `LightCone.convergence`.

        Args:
            simulation: from before z_max to a = 1.
            sources: populations of sources, none of them behind z_max.
            seed: as for `Simulation.run`.
            alignment: intrinsic alignments; none by default.
            **run: white_noise, particles, cosmology, paired and progress of `Simulation.run`.

        Raises:
            ValueError: an observer outside the box, a box that is repeated too often, a run that
                begins too late or ends too early, sources behind z_max, or what `Simulation.run`
                refuses.
        """
        warn_of_fine_pixels(self, simulation, sources)
        return simulation.observe(self.convergence_observer(sources, alignment), seed, **run)

    def shells(
        self,
        simulation: Simulation,
        edges: float | Sequence[float] | np.ndarray,
        seed: int | Sequence[int] | None = None,
        **run: Any,
    ) -> DensityShells:
        """Simulates, and returns the matter of shells of the universe.

        A shell has the particles whose undisplaced places lie in it.

        Args:
            simulation: as for `convergence`.
            edges: distances between which the shells lie [shell + 1] [Mpc/h]; or the width of all
                up to z_max, to the nearest whole number of them. With a width, edges follow the
                distance of z_max, the largest of a batch, and gradients leave that out: give edges
                to compare universes, or to differentiate by the cosmology.
            seed, **run: as for `convergence`.

        Raises:
            ValueError: as for `convergence`; or edges that do not increase from 0 or more up to
                z_max, or a width that is not above 0.
        """
        return simulation.observe(self.shells_observer(edges), seed, **run)

    def particles(
        self,
        simulation: Simulation,
        folder: str | Path,
        seed: int | Sequence[int] | None = None,
        **run: Any,
    ) -> Path:
        """Simulates, and writes all copies of particles as they cross the light cone.

        Files and errors are those of `LightCone.particles`; `Coordinates` are x, y and z from the
        observer, along the axes of the box, as are `Velocities`. A copy is there if its undisplaced
        place is nearer than z_max.

        Args:
            simulation, seed, **run: as for `convergence`; of one universe.
            folder: of the files, which is made. On a file system that all ranks see.

        Returns:
            The folder.
        """
        return write_particles(self.particles_observer, simulation, folder, seed, **run)

    def particles_observer(self, files: LightConeFiles) -> ObserverOf:
        """Returns the observer of `particles`, which writes to files of this rank."""

        def recorder(inputs: Inputs, halo: int) -> SphereRecorder:
            end, ball = self.reach(inputs), self.ball(inputs, 1.0, per_distance=False)
            return SphereRecorder(inputs, self, ball, end, files)

        return recorder

    def convergence_observer(
        self, sources: Sequence[Sources], alignment: IntrinsicAlignment | None = None
    ) -> ObserverOf:
        """Returns the observer of `convergence`, for a run with other observers beside it.

        Raises:
            ValueError: no sources.
        """
        if not sources:
            raise ValueError("lensing needs at least one source")
        return lambda inputs, halo: _Convergence(
            self, inputs, Population(self, sources, alignment, inputs.box.mesh)
        )

    def shells_observer(self, edges: float | Sequence[float] | np.ndarray) -> ObserverOf:
        """Returns the observer of `shells`, likewise.

        Raises:
            ValueError: edges that do not increase from 0 or more, or a width not above 0.
        """
        given = np.asarray(edges, np.float64)
        if given.ndim == 0 and not 0 < given < np.inf:
            raise ValueError(f"width = {given}: shells of matter need a width above 0 [Mpc/h]")
        if given.ndim and (len(given) < 2 or given[0] < 0 or not (np.diff(given) > 0).all()):
            raise ValueError("edges of shells must increase from 0 or more, and be two at least")
        return lambda inputs, halo: _Shells(self, inputs, given)

    @property
    def earliest(self) -> float:
        """The scale factor of z_max."""
        return 1.0 / (1.0 + self.z_max)

    def reach(self, inputs: Inputs) -> float:
        """Returns the distance of z_max [Mpc/h], after checking that the run sees so far.

        Raises:
            ValueError: it does not.
        """
        end = farthest_of_all(self, inputs)
        self.check_boxes(inputs.box.size, end)
        check_latest(inputs, 0.0)
        return end

    def ball(self, inputs: Inputs, step: float, *, per_distance: bool) -> Ball:
        """Returns the particles of a run about the observer, without copies and maps.

        Args:
            inputs: of the run.
            step, per_distance: see `Ball`.

        Raises:
            ValueError: the observer is not in the box.
        """
        box = inputs.box
        return Ball(
            copies=np.zeros([0, 3], np.int32),
            edges=np.zeros(1),
            first_map=np.zeros(0, np.int32),
            first=box.offset,
            spacing=box.cell,
            lengths=box.size,
            observer=self.place(box.size, box.grid),
            step=step,
            per_distance=per_distance,
            nside=self.nside,
            maps=0,
        )


class _Convergence(SpherePainter):
    """Paints the convergence of sources."""

    def __init__(self, cone: FullSkyLightCone, inputs: Inputs, population: Population) -> None:
        end = cone.reach(inputs)
        # Steps of a power of two stay the same when the cosmology changes a little.
        step = 2.0 ** math.floor(math.log2(end / NODES))
        chi = step * np.arange(math.ceil(end / step) + 1)
        edges = np.concatenate([chi[:1], 0.5 * (chi[1:] + chi[:-1]), chi[-1:]])
        # Integrals of chi and of what is 1 at one node and 0 at the others, linear in between.
        moments = step * chi
        moments[0], moments[-1] = step**2 / 6, step * chi[-1] / 2 - step**2 / 6
        chi[0] = 1e-9 * step
        number = _density(inputs) * Healpix(cone.nside).pixel_area
        means = []

        def amounts(distances: Distances, growth: GrowthFunctions) -> tf.Tensor:
            """Returns W / chi, which is nearly linear, over the number."""
            a = distances.scale_factor(chi)
            slopes = [w / chi for w in population.lensing(distances, chi, a)]
            aligned = population.aligned(distances, edges, a, growth)
            if aligned is not None:
                slopes = [s + more / moments for s, more in zip(slopes, aligned, strict=True)]
            means.append(tf.stack([tf.reduce_sum(s * moments) for s in slopes]))
            return tf.stack(slopes, axis=-1) / number

        ball, maps = cone.ball(inputs, step, per_distance=True), len(population.sources)
        shells, first = np.array([0.0, chi[-1]]), np.zeros(1, np.int32)
        super().__init__(inputs, ball, shells, cone.earliest, amounts, maps, first)
        self._means, self._nside = stacked_means(inputs, means), cone.nside

    def results(self, seen: Seen) -> SphericalConvergence:
        """See `Observer.results`."""
        maps = per_painted_area(self.summed(seen), self._nside)
        means = tf.cast(self._means, maps.dtype)[..., tf.newaxis]
        return SphericalConvergence(maps - means, self._nside)


class _Shells(SpherePainter):
    """Paints the matter of shells."""

    def __init__(self, cone: FullSkyLightCone, inputs: Inputs, given: np.ndarray) -> None:
        end = cone.reach(inputs)
        edges = given
        if not given.ndim:
            edges = np.linspace(0.0, end, cone.shell_count(float(given), end) + 1)
        if edges[-1] > end * (1 + 1e-9):
            raise ValueError(
                f"shells up to {edges[-1]:g} Mpc/h: z_max = {cone.z_max:g} is at {end:.6g} Mpc/h"
            )
        ball, count = cone.ball(inputs, 1.0, per_distance=False), len(edges) - 1
        one = tf.ones([2, 1], tf.float64)
        numbers = np.arange(count, dtype=np.int32)
        super().__init__(inputs, ball, edges, cone.earliest, lambda *_: one, count, numbers)
        volumes = np.diff(edges**3) / 3 * Healpix(cone.nside).pixel_area
        self._expected = _density(inputs) * volumes[:, np.newaxis]
        self._edges, self._nside = edges, cone.nside

    def results(self, seen: Seen) -> DensityShells:
        """See `Observer.results`."""
        counts = per_painted_area(self.summed(seen), self._nside)
        delta = counts / tf.constant(self._expected, counts.dtype) - 1.0
        return DensityShells(delta, LensPlanes.of_shells(self._edges), self._nside)


def per_painted_area(maps: tf.Tensor, nside: int) -> tf.Tensor:
    """Returns maps [..., pixel] of sums, made those of pixels of the same solid angle.

    Bilinear weights integrate to other solid angles than the pixels', see
    `Healpix.painted_areas`: without this a uniform universe would not have uniform maps.
    """
    sphere = Healpix(nside)
    return maps * tf.constant(sphere.pixel_area / sphere.painted_areas, maps.dtype)


def _density(inputs: Inputs) -> float:
    """Returns the number density of particles [(h/Mpc)^3]."""
    return inputs.box.cells / inputs.box.volume
