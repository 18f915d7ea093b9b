"""A light cone with a flat, square field of view, of the runs of a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.distances import Distances
from flowpm_dist.cosmology.growth import GrowthFunctions
from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.evolution.observers import Seen
from flowpm_dist.grid.box import Box
from flowpm_dist.io.light_cone_file import LightConeFiles
from flowpm_dist.observables.lensing.alignment import IntrinsicAlignment
from flowpm_dist.observables.lensing.planes import LensPlanes
from flowpm_dist.observables.lensing.sources import Sources
from flowpm_dist.observables.light_cone.convergence import (
    Population,
    check_latest,
    farthest,
    farthest_of_all,
    stacked_means,
    warn_of_fine_pixels,
)
from flowpm_dist.observables.light_cone.maps import ConvergenceMaps, DensityPlanes
from flowpm_dist.observables.light_cone.observer import SkyPainter
from flowpm_dist.observables.light_cone.options import LightConeOptions, plane_of_layers
from flowpm_dist.observables.light_cone.recorder import FieldRecorder, write_particles
from flowpm_dist.observables.light_cone.tiles import Layers
from flowpm_dist.simulation.inputs import Inputs
from flowpm_dist.simulation.simulation import ObserverOf, Simulation


class LightCone(LightConeOptions):
    """What an observer at z = 0 sees of a simulated universe, in a square field of the flat sky.

    The periodic box is repeated along the line of sight. Each copy is shifted, flipped and has its
    axes in another order, drawn from a seed, so that no structure is seen twice in the same way.
    Where its light is seen, a particle is at the place that it has when the light leaves its
    undisplaced place. Angles are small: a place x off the line of sight at distance chi is seen at
    x / chi. `LightConeOptions` describes the attributes.
    """

    def convergence(
        self,
        simulation: Simulation,
        sources: Sequence[Sources],
        seed: int | Sequence[int] | None = None,
        *,
        alignment: IntrinsicAlignment | None = None,
        **run: Any,
    ) -> ConvergenceMaps:
        """Simulates, and returns the convergence of sources in the Born approximation.

        The maps are made as the run goes on: no planes are kept. Each particle is weighed by its
        own distance. The mean that is subtracted is that of the universe. Under a tape gradients
        flow to all that the run can be differentiated by, and to the parameters of the sources
        that are tensors; memory does not grow with the number of steps.

        Args:
            simulation: from before z_max to a = 1.
            sources: populations of sources, none of them behind z_max.
            seed: as for `Simulation.run`.
            alignment: intrinsic alignments; none by default.
            **run: white_noise, particles, cosmology, paired and progress of `Simulation.run`.

        Raises:
            ValueError: a field that is wider than the box, a run that begins too late or ends too
                early, sources behind z_max, or what `Simulation.run` refuses.
        """
        warn_of_fine_pixels(self, simulation, sources)
        return simulation.observe(self.convergence_observer(sources, alignment), seed, **run)

    def planes(
        self,
        simulation: Simulation,
        width: float,
        seed: int | Sequence[int] | None = None,
        **run: Any,
    ) -> DensityPlanes:
        """Simulates, and returns the matter of slabs of the universe, each on a plane.

        A slab has the particles whose undisplaced places lie in it.

        Args:
            simulation: as for `convergence`.
            width: of a slab [Mpc/h]; the nearest number of layers of particles is taken, and less
                than half of it that is left over joins the last slab.
            seed, **run: as for `convergence`.

        Raises:
            ValueError: as for `convergence`; or a width that is not above 0.
        """
        return simulation.observe(self.planes_observer(width), seed, **run)

    def convergence_observer(
        self, sources: Sequence[Sources], alignment: IntrinsicAlignment | None = None
    ) -> ObserverOf:
        """Returns the observer of `convergence`, for a run with other observers beside it.

        Raises:
            ValueError: no sources.
        """
        if not sources:
            raise ValueError("lensing needs at least one source")

        def painter(inputs: Inputs, halo: int) -> _Convergence:
            return _Convergence(self, inputs, Population(self, sources, alignment, inputs.box.mesh))

        return painter

    def planes_observer(self, width: float) -> ObserverOf:
        """Returns the observer of `planes`, likewise.

        Raises:
            ValueError: a width that is not above 0.
        """
        if not width > 0:
            raise ValueError(f"width = {width}: planes of matter need a width above 0 [Mpc/h]")
        return lambda inputs, halo: _Planes(self, inputs, width)

    def particles(
        self,
        simulation: Simulation,
        folder: str | Path,
        seed: int | Sequence[int] | None = None,
        **run: Any,
    ) -> Path:
        """Simulates, and writes the particles in the field as they cross the light cone.

        Each rank that sees some writes an HDF5 file, `light_cone.0.hdf5`, ... with `Coordinates`
        (x, y and distance from the observer, comoving [Mpc/h]), `Velocities` (along these, peculiar
        [km/s]) and `ScaleFactor`, in the precision of the run. The last file is `light_cone.json`,
        with their number and the attributes; `io.read_light_cone` reads them.

        Args:
            simulation, seed, **run: as for `convergence`; of one universe.
            folder: of the files, which is made. On a file system that all ranks see.

        Returns:
            The folder.

        Raises:
            FileExistsError: there is a light cone in the folder. Raised on every rank.
            ValueError: as for `convergence`; or a batch.
            FloatingPointError: a particle is not finite. Raised on every rank.
            WriteError: on a rank that cannot write; the job must end then.
        """
        return write_particles(self.particles_observer, simulation, folder, seed, **run)

    def particles_observer(self, files: LightConeFiles) -> ObserverOf:
        """Returns the observer of `particles`, which writes to files of this rank."""
        return lambda inputs, halo: FieldRecorder(
            inputs, self, self.layers(inputs), self.fov, files
        )

    def layers(self, inputs: Inputs) -> Layers:
        """Returns the layers of particles that are seen, after checking that the run has them.

        Raises:
            ValueError: it has not.
        """
        box, end = inputs.box, farthest_of_all(self, inputs)
        self.check_width(box.size, end)
        found = Layers.of(box, end, self.tiles, 1.0 / (1.0 + self.z_max))
        if not len(found.distances):
            nearest = min(found.depth_of(box, tile) for tile in found.tiles) / 2
            raise ValueError(
                f"z_max = {self.z_max:g} is at {end:.4g} Mpc/h, and the nearest particles at "
                f"{nearest:.4g}: see farther, or take a finer grid"
            )
        check_latest(inputs, found.distances[0])
        return found

    def farthest(self, cosmology: Cosmology) -> float:
        """Returns the comoving distance of z_max [Mpc/h]."""
        return farthest(self, cosmology)

    def particles_in_pixel(self, box: Box) -> float:
        """Returns the mean number of particles in a pixel, per length and distance^2 [(h/Mpc)^3].

        A particle of amount 1 / chi^2 over it adds the length that it stands for to a pixel.
        """
        return box.cells / box.volume * (self.fov / self.pixels) ** 2


class _Convergence(SkyPainter):
    """Paints the convergence of sources."""

    def __init__(self, cone: LightCone, inputs: Inputs, population: Population) -> None:
        layers = cone.layers(inputs)
        number = cone.particles_in_pixel(inputs.box)
        means = []

        def amounts(distances: Distances, a: tf.Tensor, growth: GrowthFunctions) -> tf.Tensor:
            # A universe has its own z_max, whatever others of its batch reach to.
            end = cone.farthest(distances.cosmology)
            own = max(1, int(np.sum(layers.distances < end)))
            chi, depths, a = layers.distances[:own], layers.depths[:own], a[:own]
            weights = population.lensing(distances, chi, a)
            slopes = [_slopes(weight, chi) for weight in weights]
            # The last layer has the sources between it and the end, too.
            edges = layers.edges[: own + 1]
            edges[-1] = max(edges[-1], end * (1 + 1e-9))
            aligned = population.aligned(distances, edges, a, growth)
            if aligned is not None:
                weights = [w + more / depths for w, more in zip(weights, aligned, strict=True)]
            means.append(tf.stack([tf.reduce_sum(w * depths) for w in weights]))
            pairs = [tf.stack(pair, axis=-1) for pair in zip(weights, slopes, strict=True)]
            beyond = len(layers.distances) - own
            return tf.pad(tf.stack(pairs, axis=1), [[0, beyond], [0, 0], [0, 0]]) / number

        first = np.zeros(len(layers.distances), np.int32)
        maps = len(population.sources)
        super().__init__(inputs, layers, cone.fov, cone.pixels, first, maps, amounts)
        self._means, self._fov = stacked_means(inputs, means), cone.fov

    def results(self, seen: Seen) -> ConvergenceMaps:
        """See `Observer.results`."""
        maps = self.summed(seen)
        means = tf.cast(self._means, maps.dtype)[..., tf.newaxis, tf.newaxis]
        return ConvergenceMaps(maps - means, self._fov)


class _Planes(SkyPainter):
    """Paints the matter of slabs."""

    def __init__(self, cone: LightCone, inputs: Inputs, width: float) -> None:
        layers = cone.layers(inputs)
        of_layer = plane_of_layers(len(layers.distances), float(layers.depths[0]), width)
        ends = np.append(np.flatnonzero(np.diff(of_layer)), len(of_layer) - 1)
        self._planes = LensPlanes(np.append(0.0, layers.edges[ends + 1]))
        widths = np.asarray(self._planes.widths)
        amount = 1.0 / (cone.particles_in_pixel(inputs.box) * widths[of_layer])
        amounts = np.stack([amount, np.zeros_like(amount)], axis=-1)[:, np.newaxis]
        super().__init__(
            inputs,
            layers,
            cone.fov,
            cone.pixels,
            of_layer,
            len(widths),
            lambda *_: tf.constant(amounts),
        )
        self._cone = cone

    def results(self, seen: Seen) -> DensityPlanes:
        """See `Observer.results`."""
        return DensityPlanes(self.summed(seen) - 1.0, self._planes, self._cone.fov)


def _slopes(values: tf.Tensor, x: np.ndarray) -> tf.Tensor:
    """Returns the slopes of values [n] at x [n] from those beside them."""
    lower, upper = (
        np.maximum(np.arange(len(x)) - 1, 0),
        np.minimum(np.arange(len(x)) + 1, len(x) - 1),
    )
    across = np.where(upper > lower, x[upper] - x[lower], 1.0)
    return (tf.gather(values, upper) - tf.gather(values, lower)) / across
