"""Linear theory of one universe, as one object."""

from __future__ import annotations

import functools
from typing import TypeAlias

import tensorflow as tf

from flowpm_dist.cosmology.background import Background, Distances
from flowpm_dist.cosmology.growth import Growth, growth_of
from flowpm_dist.cosmology.parameters import (
    PARAMETERS,
    Cosmology,
)
from flowpm_dist.cosmology.power import LinearPower


class Theory:
    """The linear theory of a universe: background, growth, power and distances.

    Simulations, states, light cones and lensing take what they need of the universe from here. A
    universe with other physics is a subclass that replaces one of the parts below, such as::

        class WithFluid(Theory):
            @functools.cached_property
            def background(self):
                return MyBackground(self.cosmology)

    and is given to `Simulation(..., theory=WithFluid)`, and to functions that take a cosmology.
    Each part is made when it is first used, and kept: make a theory of tensors where it is used,
    under the tape and inside the `tf.function`.

    Args:
        cosmology: the parameters.
    """

    def __init__(self, cosmology: Cosmology) -> None:
        self.cosmology = cosmology

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.cosmology})"

    @functools.cached_property
    def background(self) -> Background:
        """Expansion rate and densities."""
        return Background(self.cosmology)

    @functools.cached_property
    def growth(self) -> Growth:
        """Growth of structure in this background."""
        return growth_of(self.background)

    @functools.cached_property
    def power(self) -> LinearPower:
        """Linear power with this growth."""
        return LinearPower(self.cosmology, self.growth)

    @functools.cached_property
    def distances(self) -> Distances:
        """Distances in this background."""
        return Distances(self.background)

    def prepare(self) -> None:
        """Makes growth and power now, such as under the tape that watches the parameters."""
        self.growth, self.power  # noqa: B018

    def share(self, other: Theory) -> None:
        """Takes growth and power of another theory, as far as no parameter of theirs differs.

        What a cosmology is differentiated by is never taken for the same: values are compared by
        identity. A subclass shares nothing: what its parts depend on, only it knows.
        """
        if type(self) is not Theory or type(other) is not Theory:
            return
        mine, others = self.cosmology, other.cosmology
        if mine.expansion != others.expansion:
            return
        names = {*mine.names, *others.names}
        differ = [n for n in names if getattr(mine, n, None) is not getattr(others, n, None)]
        effects = frozenset().union(*(PARAMETERS[name].affects for name in differ))
        if effects.isdisjoint(("background", "growth")):
            self.__dict__.update(background=other.background, growth=other.growth)
        same = (mine.names, mine.choices) == (others.names, others.choices)
        if same and effects <= {"amplitude", "gaussianity"}:
            self.__dict__["power"] = other.power.rescaled(mine)


Universe: TypeAlias = Cosmology | Theory
"""The parameters of a universe, or its theory where that is not what follows from them alone."""


def theory_of(universe: Universe) -> Theory:
    """Returns the theory of a cosmology, or the one given."""
    return universe if isinstance(universe, Theory) else Theory(universe)


def sigma8(cosmology: Universe) -> tf.Tensor:
    """Returns the rms linear overdensity in spheres of 8 Mpc/h today [1], a float64 scalar."""
    return theory_of(cosmology).power.sigma8()
