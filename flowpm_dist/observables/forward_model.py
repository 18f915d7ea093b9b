"""The forward model from white noise to observables: structure formation, redshift space, bias."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf
from typing_extensions import override

from flowpm_dist.cosmology.arrays import as_float64
from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.grid.field import Field
from flowpm_dist.grid.options import Scheme
from flowpm_dist.observables.bias import SCHEMES, Bias, bias_with
from flowpm_dist.observables.tracers import LineOfSight, TracerOptions
from flowpm_dist.observables.universe_model import (
    Parameters,
    StructureFormation,
    UniverseModel,
    local_values,
)
from flowpm_dist.options import constructed
from flowpm_dist.simulation.simulation import Simulation
from flowpm_dist.simulation.state import State
from meshimpl.mesh_function import replicated

AMPLITUDE = "amplitude"
"""The parameter that multiplies the observed density; 1 unless it is given."""


class ForwardModel(UniverseModel):
    """The density of matter or tracers that white noise becomes, mean 1; differentiable.

    Args:
        simulation: see `UniverseModel`. "linear" and LPT make no step, and give the universe at
            the last of the steps.
        structure: see `CellOptions`; or a `StructureFormation` itself.
        redshift_space: the line of sight "x", "y" or "z", or None.
        bias: the values of the bias parameters by name: "b" (`EulerianBias`, not in redshift
            space), or some of "b1", "b2" and "bs2" (`LagrangianBias`); empty for matter. A value
            stands unless `parameters` have another.
        bias_scheme: a custom `Bias`, with its parameters in `bias`: the class, a `Bias` of it, or
            its name "package.module:object".

    Raises:
        ValueError: choices that do not fit each other.
    """

    def __init__(
        self,
        simulation: Simulation,
        structure: str | StructureFormation = "pm",
        *,
        redshift_space: LineOfSight | None = None,
        bias: Mapping[str, float] | None = None,
        bias_scheme: type[Bias] | Bias | str | None = None,
    ) -> None:
        keys = {
            "structure": structure,
            "redshift_space": redshift_space,
            "bias": dict(bias or {}) if bias or bias_scheme else None,
            "bias_scheme": bias_scheme,
        }
        keys = {key: value for key, value in keys.items() if value is not None}
        options = constructed(TracerOptions, keys)
        super().__init__(simulation, structure)
        self.axis, self.bias = redshift_space, dict(options.bias or {})
        self._scheme = bias_with(self.bias, bias_scheme)
        weighs = self._scheme is not None and self._scheme.needs_particles
        if not self.formation.has_particles and (redshift_space or weighs):
            raise ValueError(
                f"structure {structure!r} moves no particles: neither redshift space nor a bias "
                "that weighs them goes with it"
            )

    def fitted(self, name: str) -> bool:
        """Returns whether the model depends on a parameter of this name.

        Those are parameters of cosmology and bias, and "amplitude", which multiplies the density.
        """
        return name == AMPLITUDE or name in self.bias or super().fitted(name)

    @property
    @override
    def is_built_in(self) -> bool:
        return super().is_built_in and type(self._scheme) in (type(None), *SCHEMES)

    @property
    def painting(self) -> Scheme | None:
        """The window of the observed density, as a `Field` has it."""
        return "cic" if self.formation.has_particles else None

    def run_and_observe(self, noise: tf.Tensor, parameters: Parameters) -> tuple[State, tf.Tensor]:
        """Returns the universe of white noise, and its observed density (see `observe`)."""
        state = self.run(noise, parameters)
        return state, self.observe(state, parameters)

    def at_times(
        self,
        times: Sequence[float],
        seeds: Sequence[int],
        cosmologies: Sequence[Cosmology],
        parameters: Parameters,
    ) -> list[Field]:
        """Returns the observed densities of a batch of universes at several times, see `observe`.

        Args:
            times: scale factors, increasing; the last is the end of the steps.
            seeds: the seed of the white noise of each universe.
            cosmologies: the cosmology of each universe.
            parameters: of bias and amplitude, float64 [universe], the same at all times.

        Raises:
            HaloError: a particle left the halo, on every rank.
            ObservationError: see `StructureFormation.at_times`.
        """

        def observed_field(state: State) -> Field:
            return Field(self.observe(state, parameters), state.box, self.painting)

        return self.formation.at_times(self.simulation, times, observed_field, cosmologies, seeds)

    def observe(self, state: State, parameters: Parameters) -> tf.Tensor:
        """Returns this rank's block of the observed density [..., x, y, z].

        Its mean is 1, or the amplitude where `parameters` have one.
        """
        scheme, box = self._scheme, state.box
        if scheme is None:
            density = self.formation.density(state, self.axis)
        else:
            values = {
                name: replicated(box.mesh, as_float64(parameters.get(name, value)))
                for name, value in self.bias.items()
            }
            weighted = self.formation.density(state, self.axis, scheme.weights(state, values))
            density = 1 + scheme.contrast(weighted - 1, values, box)
        if AMPLITUDE in parameters:
            shared = replicated(box.mesh, as_float64(parameters[AMPLITUDE]))
            density = density * local_values(shared, box)
        return density

    def linear_response(self, parameters: Parameters) -> tf.Tensor:
        """Returns the ratio of the observed density's modes to the noise's, in linear theory.

        That is b D sqrt(P / V_cell), and the cloud-in-cell window where there are particles. What
        redshift space adds is left out.
        """
        scheme, response = self._scheme, self.matter_response(parameters)
        if scheme is not None and (name := scheme.parameters[0]) in self.bias:
            values = self.factor(parameters.get(name, self.bias[name]), parameters)
            response = response * scheme.linear_response(values)
        if AMPLITUDE in parameters:
            response = response * self.factor(parameters[AMPLITUDE], parameters)
        response = self.for_chains(response, parameters)
        return response * self.window() if self.formation.has_particles else response
