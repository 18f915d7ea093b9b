"""From white noise to a universe, and to what is seen of it: what all forward models share."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping
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
from flowpm_dist.observables.per_chain import as_factor, local_values
from flowpm_dist.observables.structure import STRUCTURES
from flowpm_dist.options import object_named
from flowpm_dist.simulation.simulation import Simulation
from flowpm_dist.simulation.state import State
from meshimpl.mesh_function import replicated

Parameters = Mapping[str, tf.Tensor]


class UniverseModel(abc.ABC):
    """A model from white noise to what is seen of its universe; differentiable.

    A subclass implements `look` and `linear_response`.

    Args:
        simulation: box, steps, LPT order, and the cosmology unless parameters say otherwise. For
            "1lpt" and "2lpt" its `lpt_order` must be 1 and 2.
        structure: see `ForwardModelOptions`.

    Raises:
        ValueError: choices that do not fit each other.
    """

    def __init__(self, simulation: Simulation, structure: str = "pm") -> None:
        self.simulation, self.structure = simulation, structure
        self.formation = object_named(structure, STRUCTURES, "structure")
        needed = self.formation.lpt_order
        if needed is not None and simulation.options.lpt_order != needed:
            raise ValueError(f"{structure} needs a simulation of lpt_order {needed}")
        self._may_grow = False

    @abc.abstractmethod
    def look(self, noise: tf.Tensor, parameters: Parameters) -> tuple[State, tf.Tensor]:
        """Returns the universe of white noise, and what is seen of it.

        Args:
            noise: this rank's block [..., x, y, z].
            parameters: float64 [...] of all chains.

        Raises:
            HaloError: a particle left the halo, on every rank.
        """

    @abc.abstractmethod
    def linear_response(self, parameters: Parameters) -> tf.Tensor:
        """Returns how much is seen of each mode of the noise in linear theory. Differentiable.

        Its square, times the information of the data, is about what they tell of the mode.

        Args:
            parameters: float64 [...] of all chains.

        Returns:
            For this rank's modes [kz, ky, kx], or [chain, kz, ky, kx] where parameters have chains.
        """

    def fitted(self, name: str) -> bool:
        """Returns whether the model depends on a parameter of this name: one of its cosmology."""
        return name in self.simulation.cosmology.names

    def run(self, noise: tf.Tensor, parameters: Parameters) -> State:
        """Returns the universe of matter; for linear theory that of LPT. See `look`."""
        field = Field(noise, self.box_of(noise))
        return self.formation.state(self.simulation, field, self.cosmology(parameters))

    def box_of(self, noise: tf.Tensor) -> Box:
        """Returns the box of one universe, or of all chains of which this is the rank's block."""
        if noise.shape.rank == 3:
            return self.simulation.box
        replicas = self.box.mesh.axis_size("replica")
        return self.simulation.box_of(noise.shape[0] * replicas)

    def cosmology(self, parameters: Parameters) -> Cosmology | list[Cosmology] | None:
        """Returns that of parameters, one for each chain if they have chains; None for its own."""
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

    def __call__(self, noise: tf.Tensor, parameters: Parameters) -> tf.Tensor:
        """Returns what is seen of the universe of white noise, see `look`.

        A sigma8 or A_s among the parameters multiplies the noise instead, which gives the same
        universe: then chains that differ in it have one cosmology, whose growth and power are
        known.
        """
        parameters, ratio = self._without_normalisation(parameters)
        if ratio is not None:
            box, shared = self.box_of(noise), replicated(self.box.mesh, ratio)
            noise *= local_values(shared, box) if ratio.shape.rank else as_factor(shared, box)
        with compiled_cosmologies():
            return self.look(noise, parameters)[1]

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

    def matter_response(self, parameters: Parameters) -> tf.Tensor:
        """Returns modes of the matter's overdensity over those of the noise, in linear theory.

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
        shared = replicated(box.mesh, exactly(values))
        return local_values(shared, box) if shared.shape.rank else as_factor(shared, box)

    def for_chains(self, response: tf.Tensor, parameters: Parameters) -> tf.Tensor:
        """Returns a response for each chain of parameters, also where it depends on none of them.

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
        return cic_window(kx, ky, kz, self.box)

    @functools.cached_property
    def _own_response(self) -> tf.Tensor:
        """The linear amplitude of the simulation's own cosmology, see `matter_response`."""
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


def _chains(parameters: Parameters) -> int | None:
    """Returns how many chains parameters have; None where they are of one universe."""
    return next((int(x.shape[0]) for x in parameters.values() if x.shape.rank), None)


def exactly(value: Any) -> tf.Tensor:
    """Returns a value in float64; `tf.cast` would take a Python number by way of float32."""
    return tf.cast(value, tf.float64) if tf.is_tensor(value) else tf.constant(value, tf.float64)
