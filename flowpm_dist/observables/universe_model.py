"""The base of all forward models, from white noise to a universe and its observation."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import tensorflow as tf

from flowpm_dist.cosmology.arrays import as_float64
from flowpm_dist.cosmology.parameters import AMPLITUDES, Cosmology, compiled_cosmologies
from flowpm_dist.evolution.corrections import LPT_ONLY
from flowpm_dist.grid.box import Box
from flowpm_dist.grid.field import Field
from flowpm_dist.grid.fourier import painting_window
from flowpm_dist.observables.tracers import LineOfSight, ObservationError
from flowpm_dist.options import in_unit, object_named
from flowpm_dist.particle_mesh.cloud_in_cell import HaloError
from flowpm_dist.simulation.simulation import Simulation
from flowpm_dist.simulation.state import State
from meshimpl.mesh_function import replicated

SMALL = 2**19
"""Most cells of a rank, of all its universes, of an evaluation that is one graph."""
MANY = 1024
"""Evaluations from which on it is worth to compile them as one graph, see `one_graph`."""

T = TypeVar("T")
Parameters = Mapping[str, tf.Tensor]


@dataclass(frozen=True)
class StructureFormation:
    """A way from white noise to a density.

    A custom one is an object of a class that derives from this one. It overrides `state`,
    with `at_times` if it is observed at several redshifts, or `density`, and is named in run
    files as "package.module:object".

    Attributes:
        makes_steps: whether the particles are evolved; they stand where LPT puts them otherwise.
        has_particles: whether particles have the density; linear theory has it otherwise.
        lpt_order: the order of LPT that the simulation must have; None if any will do.
    """

    makes_steps: bool = False
    has_particles: bool = True
    lpt_order: int | None = None

    def state(
        self,
        simulation: Simulation,
        white_noise: Field | None,
        cosmology: Cosmology | Sequence[Cosmology] | None,
        seed: Sequence[int] | None = None,
    ) -> State:
        """Returns the universe of white noise at the last of the simulation's steps.

        Args:
            simulation: whose steps are made.
            white_noise: the white noise of one universe, or of a batch; or
            seed: the seed of the white noise of each universe of a batch.
            cosmology: the cosmology of the universes; None for the simulation's.
        """
        make = simulation.run if self.makes_steps else simulation.lpt
        return make(seed=seed, white_noise=white_noise, cosmology=cosmology)

    def at_times(
        self,
        simulation: Simulation,
        times: Sequence[float],
        observe: Callable[[State], T],
        cosmology: Cosmology | Sequence[Cosmology] | None,
        seed: Sequence[int],
    ) -> list[T]:
        """Returns the observations of universes at several times, in the order of time.

        Args:
            simulation: whose steps are made.
            times: scale factors, increasing; the last is the end of the steps.
            observe: called with the state at each time, on every rank. States are not kept.
            cosmology, seed: see `state`.

        Raises:
            ObservationError: a custom structure that makes the state at one time alone.
        """
        if len(times) == 1:
            return [observe(self.state(simulation, None, cosmology, seed))]
        if type(self).state is not StructureFormation.state:
            raise ObservationError(
                f"observation.redshifts: {type(self).__name__} overrides `state`, which gives one "
                "time only: override `at_times`, too, or leave redshifts out"
            )
        if self.makes_steps:
            return simulation.run(seed=seed, cosmology=cosmology, outputs=times, on_output=observe)
        return [observe(simulation.lpt(seed=seed, a=a, cosmology=cosmology)) for a in times]

    def density(
        self, state: State, axis: LineOfSight | None = None, weights: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Returns this rank's block of the density [..., x, y, z], mean 1.

        Args:
            state: the universe.
            axis: the line of sight of redshift space.
            weights: the weights of the particles [..., x, y, z].
        """
        if not self.has_particles:
            return 1 + state.linear_delta.block * as_factor(state.linear_growth, state.box)
        return state.density(redshift_space=axis, weights=weights).block


STRUCTURES: Mapping[str, StructureFormation] = {
    "linear": StructureFormation(has_particles=False),
    "1lpt": StructureFormation(lpt_order=1),
    "2lpt": StructureFormation(lpt_order=2),
    "pm": StructureFormation(makes_steps=True),
}


def local_values(values: tf.Tensor, box: Box) -> tf.Tensor:
    """Returns the values of this rank's chains, shaped to multiply their fields.

    Args:
        values: a number, or one for each chain of the box [chain].
        box: whose batch are the chains.

    Returns:
        [..., 1, 1, 1] in the box's dtype.
    """
    if box.batch is not None:
        values = tf.broadcast_to(values, [box.batch])
        values = values[box.batch_offset : box.batch_offset + box.local_batch[0]]
    return as_factor(values, box)


def as_factor(values: tf.Tensor, box: Box) -> tf.Tensor:
    """Returns numbers of this rank's chains, shaped to multiply their fields [..., 1, 1, 1]."""
    return tf.cast(values, box.dtype)[..., tf.newaxis, tf.newaxis, tf.newaxis]


class UniverseModel(abc.ABC):
    """A model from white noise to the observation of its universe; differentiable.

    A subclass implements `run_and_observe` and `linear_response`.

    Args:
        simulation: box, steps, LPT order, and the cosmology unless parameters say otherwise. For
            "1lpt" and "2lpt" its `lpt_order` must be 1 and 2.
        structure: see `ObservationOptions`.

    Raises:
        ValueError: choices that do not fit each other.
    """

    def __init__(self, simulation: Simulation, structure: str | StructureFormation = "pm") -> None:
        self.simulation, self.structure = simulation, structure
        self.formation = object_named(structure, STRUCTURES, "structure")
        needed = self.formation.lpt_order
        if needed is not None and simulation.options.lpt_order != needed:
            raise ValueError(f"{structure} needs a simulation of lpt_order {needed}")
        correction = simulation.options.state_correction
        if correction is not None and correction.of_lpt == self.formation.makes_steps:
            learned = LPT_ONLY if correction.of_lpt else "runs of the particle mesh"
            raise ValueError(f"structure {structure!r}: the correction was learned from {learned}")
        self._may_grow = False

    @abc.abstractmethod
    def run_and_observe(self, noise: tf.Tensor, parameters: Parameters) -> tuple[State, tf.Tensor]:
        """Returns the universe of white noise, and its observation: the observed field or maps.

        Args:
            noise: this rank's block [..., x, y, z].
            parameters: float64 [...] of all chains.

        Raises:
            HaloError: a particle left the halo, on every rank.
        """

    @abc.abstractmethod
    def linear_response(self, parameters: Parameters) -> tf.Tensor:
        """Returns the observation's modes divided by the noise's, in linear theory. Differentiable.

        Its square times the information of the data is about their information on the mode.

        Args:
            parameters: float64 [...] of all chains.

        Returns:
            For this rank's modes [kz, ky, kx], or [chain, kz, ky, kx] where parameters have chains.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.structure!r}, {self.simulation})"

    @property
    def is_built_in(self) -> bool:
        """Whether no class of a user takes part, whose code a graph would call once only."""
        return type(self.formation) is StructureFormation

    def fitted(self, name: str) -> bool:
        """Returns whether the model depends on a parameter of this name: one of its cosmology."""
        return name in self.simulation.cosmology.names

    def run(self, noise: tf.Tensor, parameters: Parameters) -> State:
        """Returns the universe of matter, see `run_and_observe`; linear theory has LPT's."""
        field = Field(noise, self.box_of(noise))
        return self.formation.state(self.simulation, field, self.cosmology(parameters))

    def box_of(self, noise: tf.Tensor) -> Box:
        """Returns the box of one universe, or of all chains of which this is the rank's block."""
        if noise.shape.rank == 3:
            return self.simulation.box
        replicas = self.box.mesh.axis_size("replica")
        return self.simulation.box_of(noise.shape[0] * replicas)

    def cosmology(self, parameters: Parameters) -> Cosmology | list[Cosmology] | None:
        """Returns the cosmology of parameters, one for each chain; None for the simulation's."""
        simulated = self.simulation.cosmology
        chosen = {name: x for name, x in parameters.items() if name in simulated.names}
        if not chosen:
            return None
        if next(iter(chosen.values())).shape.rank == 0:
            return simulated.replace(**chosen)
        rows = zip(*(tf.unstack(x) for x in chosen.values()), strict=True)
        return [simulated.replace(**dict(zip(chosen, row, strict=True))) for row in rows]

    def __call__(self, noise: tf.Tensor, parameters: Parameters) -> tf.Tensor:
        """Returns the observation of the universe of white noise, see `run_and_observe`.

        A sigma8 or A_s among the parameters multiplies the noise instead, which gives the same
        universe: then chains that differ in it have one cosmology, whose growth and power are
        known.
        """
        noise = in_unit("noise", noise)
        parameters = {name: in_unit(name, value) for name, value in parameters.items()}
        others, ratio = self._without_normalisation(parameters)
        if ratio is not None:
            noise *= self.factor(ratio, parameters)
        with compiled_cosmologies():
            return self.observed(noise, others)

    def observed(self, noise: tf.Tensor, parameters: Parameters) -> tf.Tensor:
        """Returns the observation of the universe of white noise, see `run_and_observe`."""
        return self.run_and_observe(noise, parameters)[1]

    def _without_normalisation(self, parameters: Parameters) -> tuple[Parameters, tf.Tensor | None]:
        """Returns the other parameters and the linear fields' factor, float64 [...].

        The factor is None where the simulation's own sigma8 or A_s is not among the parameters, and
        for a custom structure or with a correction, which may use it otherwise.
        """
        simulated = self.simulation.cosmology
        known = self.structure in STRUCTURES and self.simulation.options.correction is None
        name = next((name for name in AMPLITUDES if getattr(simulated, name) is not None), "")
        if name not in parameters or not known:
            return parameters, None
        others = {key: value for key, value in parameters.items() if key != name}
        ratio = tf.cast(parameters[name], tf.float64) / as_float64(getattr(simulated, name))
        return others, ratio if name == "sigma8" else tf.sqrt(ratio)

    def matter_response(self, parameters: Parameters) -> tf.Tensor:
        """Returns the ratio of the matter overdensity's modes to the noise's, in linear theory.

        That is D sqrt(P / V_cell), at the last of the steps. See `linear_response`.
        """
        others, ratio = self._without_normalisation(parameters)
        cosmology = self.cosmology(others)
        response = self._own_response
        if cosmology is not None:
            with compiled_cosmologies():
                response = self.simulation.linear_amplitude(cosmology)
        return response if ratio is None else response * self.factor(ratio, parameters)

    def factor(self, values: Any, parameters: Parameters) -> tf.Tensor:
        """Returns numbers as factors of this rank's modes or fields, of one universe or of chains.

        Args:
            values: a number, or one for each chain.
            parameters: which tell whether there are chains.
        """
        chains = _chains(parameters)
        box = self.box if chains is None else self.simulation.box_of(chains)
        shared = replicated(box.mesh, as_float64(values))
        return local_values(shared, box) if shared.shape.rank else as_factor(shared, box)

    def for_chains(self, response: tf.Tensor, parameters: Parameters) -> tf.Tensor:
        """Returns a response for each chain, also where the response depends on no parameter.

        Args:
            response: [kz, ky, kx], or with chains before.
            parameters: which tell whether there are chains.
        """
        chains = _chains(parameters)
        if chains is None or response.shape.rank > 3:
            return response
        local = self.simulation.box_of(chains).local_batch
        return tf.broadcast_to(response, [*local, *response.shape])

    def window(self) -> tf.Tensor:
        """Returns the cloud-in-cell window of this rank's modes [kz, ky, kx]."""
        kx, ky, kz = (tf.constant(k, self.box.dtype) for k in self.box.wavenumbers())
        return painting_window(kx, ky, kz, self.box)

    @functools.cached_property
    def _own_response(self) -> tf.Tensor:
        """The linear amplitude of the simulation's own cosmology, see `matter_response`."""
        return self.simulation.linear_amplitude()

    @property
    def box(self) -> Box:
        """The box of one universe, or of one for each replica."""
        return self.simulation.box_of_replicas

    def retry_with_wider_halo(self, attempt: Callable[[], Any]) -> Any:
        """Returns the result of an attempt, repeated with a wider halo if a particle left the halo.

        A halo that was given, not "auto", is kept.
        """
        while True:
            try:
                return attempt()
            except HaloError as error:
                if not self._may_grow:
                    raise
                self.simulation.halo = error.needed

    def hold_halo(self, other: UniverseModel | None = None) -> None:
        """Fixes an automatic halo at the width that a universe of the prior needs.

        It would follow the field during a search otherwise, and functions would be compiled for
        each width.

        Args:
            other: a model of the same box whose halo is held already, and is taken.
        """
        if self.formation.makes_steps and self.simulation.halo == "auto":
            self._may_grow = True
            if other is not None:
                self.simulation.halo = other.simulation.halo
                return
            batch = self.simulation.box_of_replicas.batch
            self.simulation.halo = self.simulation.lpt(seed=[0] * batch if batch else 0).halo


def _chains(parameters: Parameters) -> int | None:
    """Returns the number of chains that parameters have; None for one universe."""
    return next((int(x.shape[0]) for x in parameters.values() if x.shape.rank), None)
