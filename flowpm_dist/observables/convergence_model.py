"""The forward model from white noise to maps of the convergence of weak lensing."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import tensorflow as tf
from typing_extensions import override

from flowpm_dist.cosmology.arrays import as_float64
from flowpm_dist.cosmology.line_of_sight import lensing_weight
from flowpm_dist.grid.field import Field
from flowpm_dist.observables.lensing.sources import IntrinsicAlignment, Sources
from flowpm_dist.observables.light_cone.geometry import farthest
from flowpm_dist.observables.light_cone.layers import Layers
from flowpm_dist.observables.light_cone.light_cone import LightCone
from flowpm_dist.observables.light_cone.options import FlatField
from flowpm_dist.observables.light_cone.section import ConvergenceOptions
from flowpm_dist.observables.universe_model import Parameters, UniverseModel
from flowpm_dist.simulation.simulation import Simulation
from flowpm_dist.simulation.state import State


class ConvergenceModel(UniverseModel):
    """The model from white noise to maps of the convergence, by the particle mesh; differentiable.

    The observation is the maps of `LightCone.convergence`, [..., source, x, y], whole on every rank
    of a universe.

    Args:
        simulation: from before the light cone's z_max to a = 1.
        cone: a light cone of the flat sky, whose boxes are turned alike in all universes.
        sources: populations of sources, none of them behind z_max.
        alignment: intrinsic alignments; none by default.

    Raises:
        ValueError: no sources, or a light cone of the whole sky.
    """

    def __init__(
        self,
        simulation: Simulation,
        cone: LightCone,
        sources: Sequence[Sources],
        alignment: IntrinsicAlignment | None = None,
    ) -> None:
        super().__init__(simulation)
        if not isinstance(cone.sky, FlatField):
            raise ValueError("a model of convergence needs a light cone of the flat sky")
        self.cone, self.sources, self._field = cone, list(sources), cone.sky
        self._observer = cone.convergence_observer(sources, alignment)
        simulation.warn_of_times([cone.sky.earliest])

    @classmethod
    def of(cls, simulation: Simulation, options: ConvergenceOptions) -> Self:
        """Returns the model of the section [lightcone] of a run file."""
        return cls(simulation, LightCone(options), *options.population())

    def run_and_observe(self, noise: tf.Tensor, parameters: Parameters) -> tuple[State, tf.Tensor]:
        """Returns the universe of white noise, and its convergence maps [..., source, x, y]."""
        run = self._inputs(noise, parameters)
        state, maps = self.simulation.run(**run, observe=self._observer)
        return state, maps.kappa

    @override
    def observed(self, noise: tf.Tensor, parameters: Parameters) -> tf.Tensor:
        return self.simulation.observed(self._observer, **self._inputs(noise, parameters)).kappa

    def _inputs(self, noise: tf.Tensor, parameters: Parameters) -> dict[str, Any]:
        """Returns the white noise and the cosmology of a run, by argument."""
        field = Field(noise, self.box_of(noise))
        return {"white_noise": field, "cosmology": self.cosmology(parameters)}

    def linear_response(self, parameters: Parameters) -> tf.Tensor:
        """Returns the ratio of the maps' modes to the noise's, in linear theory.

        Only modes of matter that do not average out along the line of sight contribute. These are
        the modes across the line of sight of each copy of the box. Only Omega_m in the lensing
        weight follows the parameters. Which part of a copy lies in the field, and the size of the
        pixels, are left out.
        """
        response = self.matter_response(parameters) * self.window() * self._sight
        if "Omega_m" in parameters:
            simulated = as_float64(self.simulation.cosmology.Omega_m)
            ratio = as_float64(parameters["Omega_m"]) / simulated
            response = response * self.factor(ratio, parameters)
        return self.for_chains(response, parameters)

    @functools.cached_property
    def _sight(self) -> tf.Tensor:
        """The rms over sources of |sum of W D(a) e^(i k chi) d chi| over the copies of the box.

        Of this rank's modes [kz, ky, kx] [1].
        """
        box, theory = self.simulation.box, self.simulation.theory
        layers = Layers.of(box, farthest(self._field, theory), self._field.tiles)
        distances, chi, wavenumbers = theory.distances, layers.distances, box.wavenumbers()
        a = distances.scale_factor(chi)
        growth = np.asarray(theory.growth.d1(a))
        strength = np.asarray(lensing_weight(theory, chi, a=a)) * growth * layers.depths
        # W D(a) / D(1) d chi [source, layer] [1]
        weights = np.stack([strength * each.efficiency(chi, distances) for each in self.sources])
        squares = [np.zeros(k.shape) for k in wavenumbers]
        for number, tile in enumerate(layers.tiles):
            here, axis = layers.tile == number, tile.axes[2]
            waves = np.exp(1j * wavenumbers[axis][..., np.newaxis] * chi[here])
            squares[axis] += np.mean(np.abs(waves @ weights[:, here].T) ** 2, axis=-1)
        return tf.constant(np.sqrt(sum(squares)), box.dtype)
