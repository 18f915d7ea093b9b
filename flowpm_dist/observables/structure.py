"""Models of structure formation: linear theory on the grid, LPT, or the particle mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import tensorflow as tf

from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.grid.field import Field
from flowpm_dist.observables.options import LineOfSight, ObservationError
from flowpm_dist.observables.per_chain import as_factor
from flowpm_dist.simulation.simulation import Simulation
from flowpm_dist.simulation.state import State

T = TypeVar("T")


@dataclass(frozen=True)
class StructureFormation:
    """A way from white noise to a density.

    One of a user's own is an object of a class that derives from this one. It overrides `state`,
    with `at_times` if it is to be seen at several redshifts, or `density`, and is named in run
    files as "package.module:object".

    Attributes:
        makes_steps: whether the particles are evolved; they stand where LPT puts them otherwise.
        has_particles: whether the density is that of particles; that of linear theory otherwise.
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
            white_noise: of one universe, or of a batch; or
            seed: of the white noise of each universe of a batch.
            cosmology: of the universes; None for that of the simulation.
        """
        make = simulation.run if self.makes_steps else simulation.lpt
        if seed is not None:
            return make(seed=seed, cosmology=cosmology)
        return make(white_noise=white_noise, cosmology=cosmology)

    def at_times(
        self,
        simulation: Simulation,
        times: Sequence[float],
        look: Callable[[State], T],
        cosmology: Cosmology | Sequence[Cosmology] | None,
        seed: Sequence[int],
    ) -> list[T]:
        """Returns what a function makes of universes at several times, in the order of time.

        Args:
            simulation: whose steps are made.
            times: scale factors, increasing; the last is that of the last of the steps.
            look: called with the state at each time, on every rank. States are not kept.
            cosmology, seed: see `state`.

        Raises:
            ObservationError: a structure of a user's own that makes the state at one time alone.
        """
        if len(times) == 1:
            return [look(self.state(simulation, None, cosmology, seed))]
        if type(self).state is not StructureFormation.state:
            raise ObservationError(
                f"observation.redshifts: {type(self).__name__} has a `state` of its own, at one "
                "time alone: override `at_times`, too, or leave redshifts out"
            )
        if self.makes_steps:
            return simulation.run(seed=seed, cosmology=cosmology, outputs=times, on_output=look)
        return [look(simulation.lpt(seed=seed, a=a, cosmology=cosmology)) for a in times]

    def density(
        self, state: State, axis: LineOfSight | None = None, weights: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Returns this rank's block of the density [..., x, y, z], mean 1.

        Args:
            state: the universe.
            axis: the line of sight of redshift space.
            weights: of the particles [..., x, y, z].
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
