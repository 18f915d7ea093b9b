"""A universe as results show it."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from flowpm_dist.grid.field import Field
from flowpm_dist.observables.universe_model import UniverseModel
from flowpm_dist.simulation.state import State


@dataclass(frozen=True)
class Universe:
    """A universe, found or true.

    Attributes:
        state: its particles and initial conditions.
        seen: what would be observed of it without noise, see `UniverseModel.look`.
        matter: density [mean density].
    """

    state: State
    seen: tf.Tensor
    matter: Field

    @classmethod
    def of(cls, model: UniverseModel, state: State, seen: tf.Tensor) -> Universe:
        """Returns the universe of what a model's `look` gave."""
        return cls(state, seen, Field(model.matter(state), state.box))

    @property
    def expected(self) -> Field:
        """The density that would be observed of it [mean density]."""
        return Field(self.seen, self.state.box)
