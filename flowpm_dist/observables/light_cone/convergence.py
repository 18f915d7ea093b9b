"""What particles on a light cone add to maps of convergence, and where these light cones end."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.distances import Distances, lensing_weight
from flowpm_dist.cosmology.growth import GrowthFunctions
from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.observables.lensing.alignment import IntrinsicAlignment
from flowpm_dist.observables.lensing.sources import Sources
from flowpm_dist.observables.light_cone.options import (
    DepthOptions,
    FullSkyOptions,
    LightConeOptions,
)
from flowpm_dist.simulation.inputs import Inputs
from flowpm_dist.simulation.simulation import Simulation
from meshimpl import launch
from meshimpl.mesh_function import replicated
from meshimpl.process_mesh import ProcessMesh

T = TypeVar("T")


class Population:
    """The sources of a light cone, and their intrinsic alignments.

    Args:
        cone: how far is seen.
        sources: the populations, none of them behind that.
        alignment: intrinsic alignments; none by default.
        mesh: the ranks, on each of which gradients to the sources' tensors arrive complete.
    """

    def __init__(
        self,
        cone: DepthOptions,
        sources: Sequence[Sources],
        alignment: IntrinsicAlignment | None,
        mesh: ProcessMesh,
    ) -> None:
        self._cone = cone
        self.sources = [with_shared_tensors(source, mesh) for source in sources]
        self._alignment = None if alignment is None else with_shared_tensors(alignment, mesh)

    def lensing(self, distances: Distances, chi: np.ndarray, a: tf.Tensor) -> list[tf.Tensor]:
        """Returns W of each source at distances [n], of scale factors a [n]: [n] [h/Mpc].

        Raises:
            ValueError: sources behind z_max.
        """
        self._check(distances)
        strength = lensing_weight(distances.cosmology, chi, a=a)
        return [strength * source.efficiency(chi, distances) for source in self.sources]

    def aligned(
        self, distances: Distances, edges: np.ndarray, a: tf.Tensor, growth: GrowthFunctions
    ) -> list[tf.Tensor] | None:
        """Returns the integrals of what alignments add to W between edges [n + 1]: [n] [1].

        None for nothing.

        Args:
            distances, growth: of the cosmology.
            edges: the last of them at or beyond z_max.
            a: scale factors between them [n].
        """
        if self._alignment is None:
            return None
        response = self._alignment.response(a, distances.cosmology, growth)
        return [response * source.fractions(edges, distances) for source in self.sources]

    def _check(self, distances: Distances) -> None:
        end = farthest(self._cone, distances.cosmology)
        for number, source in enumerate(self.sources):
            reach = float(source.farthest(distances))
            if reach > end * (1 + 1e-6):
                z = float(distances.redshift(reach))
                raise ValueError(
                    f"sources[{number}] reach to z = {z:.4g}, behind z_max = "
                    f"{self._cone.z_max:g}: see farther, or cut their distribution"
                )


def warn_of_fine_pixels(
    cone: LightConeOptions | FullSkyOptions, simulation: Simulation, sources: Sequence[Sources]
) -> None:
    """Warns where the pixels of a light cone are finer than the force mesh. On rank 0.

    Args:
        cone: with the pixels.
        simulation: with the mesh.
        sources: the populations.
    """
    if launch.detect().rank or not sources:
        return
    distances = Distances(simulation.cosmology)
    half = 0.5 * max(float(source.farthest(distances)) for source in sources)
    told = cone.too_fine(half, simulation.spacing / simulation.options.mesh_factor)
    if told:
        warnings.warn(told, stacklevel=3)


def farthest(cone: DepthOptions, cosmology: Cosmology) -> float:
    """Returns the comoving distance of z_max [Mpc/h]."""
    return float(Distances(cosmology).comoving(1.0 / (1.0 + cone.z_max)))


def farthest_of_all(cone: DepthOptions, inputs: Inputs) -> float:
    """Returns that of all universes of a run, those of other replicas included.

    Raises:
        ValueError: the run begins too late.
    """
    cone.check_begin(inputs.edges[0])
    ends = [farthest(cone, cosmology) for cosmology in inputs.cosmologies.cosmologies]
    return float(inputs.box.mesh.world.allreduce(tf.constant(max(ends), tf.float64), "max"))


def check_latest(inputs: Inputs, nearest: float) -> None:
    """Check that a run goes on until the light of the nearest particles leaves them.

    Args:
        inputs: of the run.
        nearest: their distance [Mpc/h].

    Raises:
        ValueError: it ends before.
    """
    for growth in inputs.cosmologies.growths:
        latest = float(Distances(growth.background.cosmology).scale_factor(nearest))
        if latest > inputs.edges[-1]:
            raise ValueError(
                f"the run ends at a = {inputs.edges[-1]:g}: a light cone to an observer today "
                "needs one that ends at a = 1"
            )


def stacked_means(inputs: Inputs, means: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the means of the maps of a rank's universes [..., map].

    Args:
        inputs: of the run.
        means: of each growth that universes do not share [map].
    """
    growths = inputs.cosmologies.growths
    by_growth = dict(zip(map(id, dict.fromkeys(growths)), means, strict=True))
    return inputs.cosmologies.stack([by_growth[id(growth)] for growth in growths])


def with_shared_tensors(parameters: T, mesh: ProcessMesh) -> T:
    """Returns a copy of parameters whose tensors have gradients that arrive complete on each rank.

    Args:
        parameters: an object with parameters as its attributes, or in lists or dictionaries of
            these; the same on every rank.
        mesh: the ranks.
    """
    shared = copy.copy(parameters)

    def share(value: Any) -> Any:
        is_tensor = isinstance(value, (tf.Tensor, tf.Variable))
        return replicated(mesh, value) if is_tensor else value

    for name, value in vars(parameters).items():
        object.__setattr__(shared, name, tf.nest.map_structure(share, value))
    return shared
