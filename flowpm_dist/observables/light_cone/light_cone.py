"""The light cone of the runs of a simulation."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.arrays import known
from flowpm_dist.io.light_cone import LightConeFiles, holds_light_cone
from flowpm_dist.observables.lensing.sources import IntrinsicAlignment, Sources, check_sources
from flowpm_dist.observables.light_cone.flat import FlatGeometry
from flowpm_dist.observables.light_cone.geometry import Geometry
from flowpm_dist.observables.light_cone.observers import (
    ConvergenceMaps,
    ConvergencePainter,
    DensityPlanes,
    PlanePainter,
    Recorder,
)
from flowpm_dist.observables.light_cone.options import FlatField, FullSky
from flowpm_dist.observables.light_cone.sphere import SphereGeometry
from flowpm_dist.options import in_unit
from flowpm_dist.simulation.outputs import ObserverOf
from flowpm_dist.simulation.run import Inputs
from flowpm_dist.simulation.simulation import Simulation
from meshimpl import launch
from meshimpl.graph_guards import check_eager


@dataclass(frozen=True)
class LightCone:
    """The light cone of an observer at z = 0 in a simulated universe.

    In a `FlatField` the periodic box is repeated along the line of sight. Each copy is shifted and
    flipped, and its axes are reordered; a seed determines how. So no structure appears twice in the
    same way. Angles are small: a particle at distance chi and at x from the line of sight
    appears at the angle x / f_K(chi), which is x / chi in flat space.

    On the `FullSky` the box is repeated in all three directions, without shifts or rotations. No
    structure is cut at a border, but the same structure appears again at a distance of one box
    side.

    A particle is observed at the position that it has at a certain time: the time at which the
    observed light leaves the undisplaced place of the particle. Its distance is the distance of
    this position.

    Attributes:
        sky: the sky, and the depth of the light cone.
    """

    sky: FlatField | FullSky

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

        The maps are made during the run: no planes are kept. Each particle is weighted according to
        its own distance. The mean of the universe is subtracted. Under a tape, gradients exist with
        respect to all differentiable inputs of the run, and to the source parameters that are
        tensors. Memory does not grow with the number of steps.

        Args:
            simulation: a simulation that begins before z_max and ends at a = 1.
            sources: populations of sources, none of them behind z_max.
            seed: as for `Simulation.run`.
            alignment: intrinsic alignments; none by default.
            **run: white_noise, particles, cosmology, paired and progress of `Simulation.run`.

        Raises:
            ValueError: a field wider than the box, an observer outside the box, a box that is
                repeated too often, a run that begins too late or ends too early, or sources beyond
                z_max. Also any error of `Simulation.run`.
        """
        if launch.detect().rank == 0 and sources:
            distances = simulation.theory.distances
            half = [known(0.5 * source.farthest(distances)) for source in sources]
            cell = simulation.spacing / simulation.options.mesh_factor
            if all(each is not None for each in half) and (
                message := self.sky.fine_pixels_warning(float(max(half)), cell)
            ):
                warnings.warn(message, stacklevel=2)
        self._warn_of(simulation)
        return simulation.observed(self.convergence_observer(sources, alignment), seed, **run)

    def planes(
        self,
        simulation: Simulation,
        width: float | Sequence[float] | np.ndarray,
        seed: int | Sequence[int] | None = None,
        **run: Any,
    ) -> DensityPlanes:
        """Simulates, and returns the matter of slabs, each projected on a plane or a shell.

        A slab contains the matter that lies in it when its light leaves. Along the line of sight a
        particle is a cloud as deep as the lattice's spacing. It therefore moves continuously from
        one slab into the next, and gradients are the derivatives of the maps.

        Args:
            simulation: as for `convergence`.
            width: width of all slabs [Mpc/h]. On the flat sky it is rounded to the nearest number
                of layers of particles; a remainder of less than half a slab joins the last slab. On
                the full sky it is rounded so that a whole number of shells reaches z_max. Instead
                of a width, a full sky can be given the edges of its shells, as distances [shell +
                1] [Mpc/h]. Edges that follow from a width depend on the distance of z_max (the
                largest of a batch), and gradients leave this dependence out. Give edges to compare
                universes, or to differentiate with respect to the cosmology.
            seed, **run: as for `convergence`.

        Raises:
            ValueError: as for `convergence`; or a width that is not above 0; or edges that are
                negative, do not increase, or do not lie within z_max.
        """
        self._warn_of(simulation)
        return simulation.observed(self.planes_observer(width), seed, **run)

    def particles(
        self,
        simulation: Simulation,
        folder: str | Path,
        seed: int | Sequence[int] | None = None,
        **run: Any,
    ) -> Path:
        """Simulates, and writes the particles that cross the light cone within z_max.

        Each rank that holds such particles writes an HDF5 file, `light_cone.0.hdf5`, ... with
        `Coordinates` (comoving [Mpc/h]), `Velocities` (peculiar, along the same axes [km/s]) and
        `ScaleFactor`, in the precision of the run. On the flat sky the coordinates are x, y and the
        distance from the observer. On the full sky they are x, y and z relative to the observer,
        along the axes of the box. Every copy of a particle is written that crosses nearer than
        z_max, in the field of view where there is one. The last file is `light_cone.json`, with the
        number of particles and the attributes. `io.read_light_cone` reads these files.

        Args:
            simulation, seed, **run: as for `convergence`; for one universe.
            folder: the folder to create for the files, on a file system that all ranks see.

        Returns:
            The folder.

        Raises:
            FileExistsError: there is a light cone in the folder. Raised on every rank.
            ValueError: as for `convergence`; or a batch.
            FloatingPointError: a particle is not finite. Raised on every rank.
            WriteError: raised only on a rank that cannot write; the job must then end.
            RuntimeError: inside a `tf.function`.
        """
        check_eager("a light cone that writes particles")
        path, mesh = Path(folder), simulation.box.mesh
        if int(mesh.world.allreduce(tf.constant(int(holds_light_cone(path))), "max")):
            raise FileExistsError(f"{path} holds a light cone: give another folder, or remove it")
        self._warn_of(simulation)
        with LightConeFiles(path, mesh) as files:
            simulation.observed(self.particles_observer(files), seed, **run)
        return path

    def convergence_observer(
        self, sources: Sequence[Sources], alignment: IntrinsicAlignment | None = None
    ) -> ObserverOf:
        """Returns the observer of `convergence`, for a run with several observers.

        Raises:
            ValueError: no sources.
        """
        check_sources(sources)
        return functools.partial(_convergence_painter, self, sources, alignment)

    def planes_observer(self, width: float | Sequence[float] | np.ndarray) -> ObserverOf:
        """Returns the observer of `planes`, for a run with several observers.

        Raises:
            ValueError: a width that is not above 0, or edges that do not increase from 0 or more.
        """
        edges = np.asarray(in_unit("width", width, "Mpc/h"), np.float64)
        if edges.ndim == 0 and not 0 < edges < np.inf:
            raise ValueError(f"width = {edges}: planes of matter need a width above 0 [Mpc/h]")
        if edges.ndim and isinstance(self.sky, FlatField):
            raise ValueError("planes of the flat sky have one width, not edges")
        if edges.ndim and (len(edges) < 2 or edges[0] < 0 or not (np.diff(edges) > 0).all()):
            raise ValueError("edges of shells must increase from 0 or more, and be two at least")
        return functools.partial(_plane_painter, self, edges)

    def particles_observer(self, files: LightConeFiles) -> ObserverOf:
        """Returns the observer of `particles`, which writes to the files of this rank."""
        return lambda inputs: Recorder(self.geometry(inputs), files)

    def _warn_of(self, simulation: Simulation) -> None:
        """Warns of times outside a correction's training, and of a field that is too wide."""
        simulation.warn_of_times([self.sky.earliest, 1.0])
        if launch.detect().rank == 0 and (message := self.sky.wide_field_warning()):
            warnings.warn(message, stacklevel=3)

    def geometry(self, inputs: Inputs) -> Geometry:
        """Returns the geometry of the sky around a run's box, after checking that the run fills it.

        Raises:
            ValueError: the run does not fill the sky.
        """
        if isinstance(self.sky, FullSky):
            return SphereGeometry(self.sky, inputs)
        return FlatGeometry(self.sky, inputs)


# Not lambdas: ranks compare what these are given.
def _convergence_painter(
    cone: LightCone,
    sources: Sequence[Sources],
    alignment: IntrinsicAlignment | None,
    inputs: Inputs,
) -> ConvergencePainter:
    return ConvergencePainter(cone.geometry(inputs), sources, alignment)


def _plane_painter(cone: LightCone, width: np.ndarray, inputs: Inputs) -> PlanePainter:
    return PlanePainter(cone.geometry(inputs), width)
