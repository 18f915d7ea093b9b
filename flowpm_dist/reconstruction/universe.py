"""A universe as results show it."""

from __future__ import annotations

from dataclasses import dataclass

from flowpm_dist.grid.field import Field
from flowpm_dist.observables.forward_model import ForwardModel, Parameters
from flowpm_dist.simulation.state import State


@dataclass(frozen=True)
class Universe:
    """A universe, found or true.

    Attributes:
        state: its particles and initial conditions.
        matter: density [mean density].
        expected: density that would be observed of it [mean density].
    """

    state: State
    matter: Field
    expected: Field

    @classmethod
    def of(cls, model: ForwardModel, state: State, parameters: Parameters) -> Universe:
        """Returns the densities of what a model's run gave."""
        return cls(
            state,
            Field(model.matter(state), state.box),
            Field(model.observe(state, parameters), state.box),
        )
