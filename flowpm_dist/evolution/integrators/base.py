"""The interface of a time integration scheme: kicks and drifts, and their factors.

Schemes are declared without TensorFlow, so that run files can name them and their options.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BeforeValidator, InstanceOf

from flowpm_dist.options import Options, from_registry

if TYPE_CHECKING:
    import numpy as np
    import tensorflow as tf

    from flowpm_dist.cosmology.growth import GrowthFunctions


@dataclass(frozen=True)
class Operation:
    """One change of the particles' state; c are its four factors, psi the LPT fields.

    kick: velocity = c0 velocity + c1 force + c2 psi1 + c3 psi2, the force at the displacement of
    this moment, -grad phi with laplacian phi = delta.
    drift: displacement += c1 velocity + c2 psi1 + c3 psi2.
    velocity: as kick, without a force.

    Attributes:
        kind: which of them.
        a: scale factor of the positions [1], for messages; of a drift that two steps share, that
            of the step it ends.
        step: number of the step, from 1.
        ends_step: whether that step is complete with it.
    """

    kind: Literal["kick", "drift", "velocity"]
    a: float
    step: int
    ends_step: bool = False


@dataclass(frozen=True)
class Schedule:
    """The operations of a run and their factors.

    Attributes:
        operations: in order.
        factors: float64 [operations, 4], differentiable by the cosmology.
    """

    operations: tuple[Operation, ...]
    factors: tf.Tensor


@dataclass(frozen=True)
class Interpolation:
    """The states at times between the kicks, from the particles at a kick.

    displacement = that of the kick + c0 before + c1 after + c2 psi1 + c3 psi2, and canonical
    velocity likewise without the first term: before and after are the scheme's own velocity before
    and after the kick, psi the LPT fields.

    Attributes:
        kicks: for each time, the number of the kick among the kicks, from 0.
        factors: of displacement and velocity, float64 [times, 2, 4], differentiable by the
            cosmology.
    """

    kicks: tuple[int, ...]
    factors: tf.Tensor


class Integrator(Options, abc.ABC):
    """A time integration scheme; its fields are its options, in Python and in run files.

    A scheme may have a velocity of its own; by default it is the canonical one, a^2 dx/dt.

    Attributes:
        starts_at_zero: whether it can begin at a = 0.
        uses_lpt: whether its operations need the LPT fields psi1 and psi2.
    """

    starts_at_zero: ClassVar[bool] = False
    uses_lpt: ClassVar[bool] = False

    @abc.abstractmethod
    def schedule(self, growth: GrowthFunctions, edges: Sequence[float]) -> Schedule:
        """Returns the operations from the first to the last of increasing scale factors.

        They begin with the scheme's own velocity and end with the canonical one.
        """

    def initial(self, growth: GrowthFunctions, a: float, order: int) -> tf.Tensor:
        """Returns the LPT factors of displacement and scheme's velocity, float64 [2, terms].

        Args:
            growth: of the cosmology.
            a: scale factor.
            order: of LPT.
        """
        import tensorflow as tf

        from flowpm_dist.initial.lpt import growth_terms

        terms = growth_terms(growth, a, order)
        return tf.stack([terms[0], momentum_factor(growth, a) * terms[1]])

    def interpolation(
        self, growth: GrowthFunctions, edges: Sequence[float], times: Sequence[float]
    ) -> Interpolation:
        """Returns how states at given times follow from those at the kicks of the schedule.

        Args:
            growth: of the cosmology.
            edges: of the steps, in scale factor.
            times: scale factors from the first to the last of the edges.

        Raises:
            ValueError: the scheme has no such states.
        """
        raise ValueError(
            f"{type(self).__name__} gives no states on the way: it has no `interpolation`"
        )

    def from_canonical(self, growth: GrowthFunctions, a: float) -> tf.Tensor | None:
        """Returns the factors [4] of the "velocity" operation from canonical to the scheme's own.

        None where the scheme's velocity is the canonical one.
        """
        return None


def momentum_factor(growth: GrowthFunctions, a: float | np.ndarray) -> tf.Tensor:
    """Returns a^2 E [1]: canonical velocity a^2 dx/dt over dx/dlna, in units of H0."""
    import tensorflow as tf

    return a**2 * tf.sqrt(growth.background.e2(a))


INTEGRATORS: dict[str, type[Integrator]] = {}
"""Name in a run file -> scheme; filled by the package."""


IntegratorChoice = Annotated[
    InstanceOf[Integrator], BeforeValidator(from_registry(INTEGRATORS, "integrator"))
]
"""A scheme, or the name of one."""
