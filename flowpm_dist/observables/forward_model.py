"""The forward model from white noise to observables: structure formation, redshift space, bias."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from flowpm_dist.cosmology.parameters import (
    AMPLITUDES,
    Cosmology,
    as_float64,
    compiled_cosmologies,
)
from flowpm_dist.evolution.halo import HaloError
from flowpm_dist.grid.box import Box
from flowpm_dist.grid.field import Field
from flowpm_dist.grid.fourier import cic_window
from flowpm_dist.observables.bias import bias_with
from flowpm_dist.observables.options import ForwardModelOptions, LineOfSight, ObservationError
from flowpm_dist.observables.per_chain import as_factor, local_values
from flowpm_dist.observables.structure import STRUCTURES
from flowpm_dist.options import constructed, object_named
from flowpm_dist.simulation.simulation import Simulation
from flowpm_dist.simulation.state import State
from meshimpl.mesh_function import replicated

Parameters = Mapping[str, tf.Tensor]

AMPLITUDE = "amplitude"
"""The parameter that the density that is seen is multiplied by; 1 unless it is given."""


class ForwardModel:
    """The density that white noise becomes, or that of its tracers, with mean 1; differentiable.

    Args:
        simulation: box, steps, LPT order, and the cosmology unless parameters say otherwise. For
            "1lpt" and "2lpt" its `lpt_order` must be 1 and 2. "linear" and LPT make no step, and
            give the universe at the last of the steps.
        structure: see `ForwardModelOptions`.
        redshift_space: the line of sight "x", "y" or "z", or None.
        bias: the values of the bias parameters by name: "b" (`EulerianBias`, not in redshift
            space), or some of "b1", "b2" and "bs2" (`LagrangianBias`); empty for matter. A value
            stands unless `parameters` have another.
        bias_scheme: "package.module:object" of a `Bias` of your own, with its parameters in `bias`.

    Raises:
        ValueError: choices that do not fit each other.
    """

    def __init__(
        self,
        simulation: Simulation,
        structure: str = "pm",
        *,
        redshift_space: LineOfSight | None = None,
        bias: Mapping[str, float] | None = None,
        bias_scheme: str | None = None,
    ) -> None:
        given = {"structure": structure, "redshift_space": redshift_space}
        given |= {"bias_scheme": bias_scheme, "bias": dict(bias) if bias else None}  # type: ignore[dict-item]
        options = constructed(ForwardModelOptions, given)
        self.simulation, self.structure = simulation, structure
        self.axis, self.bias = redshift_space, dict(options.bias or {})
        self.formation = object_named(structure, STRUCTURES, "structure")
        self._scheme = bias_with(self.bias, bias_scheme)
        needed = self.formation.lpt_order
        if needed is not None and simulation.options.lpt_order != needed:
            raise ValueError(f"{structure} needs a simulation of lpt_order {needed}")
        weighs = self._scheme is not None and self._scheme.needs_particles
        if not self.formation.has_particles and (redshift_space or weighs):
            raise ValueError(
                "linear theory on the grid moves no particles: neither redshift space nor "
                "Lagrangian bias goes with it"
            )
        self._may_grow = False

    def fitted(self, name: str) -> bool:
        """Returns whether the model depends on a parameter of this name.

        Those are parameters of cosmology and bias, and "amplitude", which multiplies the density.
        """
        return name == AMPLITUDE or name in self.bias or name in self.simulation.cosmology.names

    def run(self, noise: tf.Tensor, parameters: Parameters) -> State:
        """Returns the universe, without bias; for linear theory that of LPT.

        Args:
            noise: this rank's block [..., x, y, z].
            parameters: of cosmology and bias, float64 [...] of all chains.

        Raises:
            HaloError: a particle left the halo, on every rank.
        """
        field = Field(noise, self._box_of(noise))
        return self.formation.state(self.simulation, field, self._cosmology(parameters))

    def seen_at(
        self,
        times: Sequence[float],
        seeds: Sequence[int],
        cosmologies: Sequence[Cosmology],
        parameters: Parameters,
    ) -> list[Field]:
        """Returns what is seen at several times of a batch of universes, see `observe`.

        Args:
            times: scale factors, increasing; the last is that of the last of the steps.
            seeds: of the white noise of each universe.
            cosmologies: of each universe.
            parameters: of bias and amplitude, float64 [universe], the same at all times.

        Raises:
            HaloError: a particle left the halo, on every rank.
            ObservationError: see `StructureFormation.at_times`.
        """

        def look(state: State) -> Field:
            return Field(self.observe(state, parameters), state.box)

        return self.formation.at_times(self.simulation, times, look, cosmologies, seeds)

    def _box_of(self, noise: tf.Tensor) -> Box:
        """Returns the box of one universe, or of all chains of which this is the rank's block."""
        if noise.shape.rank == 3:
            return self.simulation.box
        replicas = self.box.mesh.axis_size("replica")
        return self.simulation.box_of(noise.shape[0] * replicas)

    def _cosmology(self, parameters: Parameters) -> Cosmology | list[Cosmology] | None:
        own = self.simulation.cosmology
        chosen = {name: x for name, x in parameters.items() if name in own.names}
        if not chosen:
            return None
        if next(iter(chosen.values())).shape.rank == 0:
            return own.replace(**chosen)
        rows = zip(*(tf.unstack(x) for x in chosen.values()), strict=True)
        return [own.replace(**dict(zip(chosen, row, strict=True))) for row in rows]

    def matter(self, state: State) -> tf.Tensor:
        """Returns this rank's block of the matter density [..., x, y, z], mean 1."""
        return self.formation.density(state)

    def observe(self, state: State, parameters: Parameters) -> tf.Tensor:
        """Returns this rank's block of the density that is seen [..., x, y, z].

        Its mean is 1, or the amplitude where `parameters` have one.
        """
        scheme, box = self._scheme, state.box
        if scheme is None:
            density = self.formation.density(state, self.axis)
        else:
            values = {
                name: replicated(box.mesh, _exactly(parameters.get(name, value)))
                for name, value in self.bias.items()
            }
            seen = self.formation.density(state, self.axis, scheme.weights(state, values))
            density = 1 + scheme.contrast(seen - 1, values, box)
        if AMPLITUDE in parameters:
            shared = replicated(box.mesh, _exactly(parameters[AMPLITUDE]))
            density = density * local_values(shared, box)
        return density

    def __call__(self, noise: tf.Tensor, parameters: Parameters) -> tf.Tensor:
        """Returns what is seen of the universe of white noise: `observe` of `run`.

        A sigma8 or A_s among the parameters multiplies the noise instead, which gives the same
        universe: then chains that differ in it have one cosmology, whose growth and power are
        known.
        """
        parameters, ratio = self._without_normalisation(parameters)
        if ratio is not None:
            box, shared = self._box_of(noise), replicated(self.box.mesh, ratio)
            noise *= local_values(shared, box) if ratio.shape.rank else as_factor(shared, box)
        with compiled_cosmologies():
            return self.observe(self.run(noise, parameters), parameters)

    def _without_normalisation(self, parameters: Parameters) -> tuple[Parameters, tf.Tensor | None]:
        """Returns the other parameters, and how many times larger linear fields are, float64 [...].

        That is None where the simulation's own sigma8 or A_s is not among them, and for structure
        of a user's own, which may use it otherwise.
        """
        own = self.simulation.cosmology
        name = next(name for name in AMPLITUDES if getattr(own, name) is not None)
        if name not in parameters or self.structure not in STRUCTURES:
            return parameters, None
        others = {key: value for key, value in parameters.items() if key != name}
        ratio = tf.cast(parameters[name], tf.float64) / as_float64(getattr(own, name))
        return others, ratio if name == "sigma8" else tf.sqrt(ratio)

    def linear_response(self, parameters: Parameters) -> tf.Tensor:
        """Returns modes of the observed density over those of the noise, in linear theory.

        That is b D sqrt(P / V_cell), and the cloud-in-cell window where there are particles. What
        redshift space adds is left out. Differentiable.

        Args:
            parameters: float64 [...] of all chains.

        Returns:
            For this rank's modes [kz, ky, kx], or [chain, kz, ky, kx] where parameters have chains.
        """
        chains = next((x.shape[0] for x in parameters.values() if x.shape.rank), None)
        box = self.box if chains is None else self.simulation.box_of(chains)
        scheme = self._scheme

        def factor(values: Any) -> tf.Tensor:
            shared = replicated(box.mesh, _exactly(values))
            return local_values(shared, box) if shared.shape.rank else as_factor(shared, box)

        others, ratio = self._without_normalisation(parameters)
        cosmology = self._cosmology(others)
        response = self._own_response
        if cosmology is not None:
            with compiled_cosmologies():
                response = self.simulation.linear_amplitude(cosmology)
        if ratio is not None:
            response = response * factor(ratio)
        if scheme is not None and (name := scheme.parameters[0]) in self.bias:
            values = parameters.get(name, self.bias[name])
            response = response * scheme.linear_response(factor(values))
        if AMPLITUDE in parameters:
            response = response * factor(parameters[AMPLITUDE])
        if chains is not None and response.shape.rank == 3:  # it depends on none of them
            response = tf.broadcast_to(response, [*box.local_batch, *response.shape])
        if not self.formation.has_particles:
            return response
        kx, ky, kz = (tf.constant(k, box.dtype) for k in box.wavenumbers())
        return response * cic_window(kx, ky, kz, box)

    @functools.cached_property
    def _own_response(self) -> tf.Tensor:
        """The linear amplitude of the simulation's own cosmology, see `linear_response`."""
        return self.simulation.linear_amplitude()

    @property
    def box(self) -> Box:
        """The box of one universe, or of one for each replica."""
        return self.simulation.box_of_replicas

    def with_room(self, attempt: Callable[[], Any]) -> Any:
        """Returns what an attempt gives, repeated with a wider halo where a particle left it.

        A halo that was given, not "auto", stays as it is.
        """
        while True:
            try:
                return attempt()
            except HaloError as error:
                if not self._may_grow:
                    raise
                self.simulation.halo = error.needed

    def hold_halo(self, seed: int = 0) -> None:
        """Fixes an automatic halo at that of a universe of the prior.

        It would follow the field during a search otherwise, and functions would be compiled for
        each width.
        """
        if self.formation.makes_steps and self.simulation.halo == "auto":
            self._may_grow = True
            batch = self.simulation.box_of_replicas.batch
            seeds = seed if batch is None else [seed] * batch
            self.simulation.halo = self.simulation.lpt(seed=seeds).halo


def _exactly(value: Any) -> tf.Tensor:
    """Returns a value in float64; `tf.cast` would take a Python number by way of float32."""
    return tf.cast(value, tf.float64) if tf.is_tensor(value) else tf.constant(value, tf.float64)


def forward_model_of(options: ForwardModelOptions, simulation: Simulation) -> ForwardModel:
    """Returns the forward model that options describe.

    Raises:
        ObservationError: an object of the user's own that cannot serve, or the simulation does not
            fit the structure.
    """
    try:
        return ForwardModel(
            simulation,
            options.structure,
            redshift_space=options.redshift_space,
            bias=options.bias,
            bias_scheme=options.bias_scheme,
        )
    except ValueError as error:
        raise ObservationError(f"[observation]: {error}") from error
