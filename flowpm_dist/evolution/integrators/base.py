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

    from flowpm_dist.cosmology.growth import Growth


@dataclass(frozen=True)
class Operation:
    """One operation on the particles: c0 to c3 are its factors, psi1 and psi2 the LPT fields.

    kick: velocity = c0 velocity + c1 force + c2 psi1 + c3 psi2. The force is -grad phi with
    laplacian phi = delta, at the present displacement.
    drift: displacement += c1 velocity + c2 psi1 + c3 psi2.
    velocity: a kick without the force.

    Attributes:
        kind: which of these three operations.
        a: scale factor of the positions [1], for messages. A drift that two steps share has the
            scale factor of the step that it completes.
        step: number of the step, from 1.
        ends_step: whether this operation completes the step.
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
        factors: float64 [operations, 4], differentiable with respect to the cosmology.
    """

    operations: tuple[Operation, ...]
    factors: tf.Tensor


@dataclass(frozen=True)
class Interpolation:
    """How states at times between the kicks follow from the particles at a kick.

    displacement = displacement at the kick + c0 before + c1 after + c2 psi1 + c3 psi2. The
    canonical velocity is the same sum without the first term. Here `before` and `after` are the
    scheme's own velocity before and after the kick, and psi1 and psi2 are the LPT fields.

    Attributes:
        kicks: for each time, the number of its kick; the first kick has number 0.
        factors: the factors for displacement and velocity, float64 [times, 2, 4], differentiable
            with respect to the cosmology.
    """

    kicks: tuple[int, ...]
    factors: tf.Tensor


class Integrator(Options, abc.ABC):
    """A time integration scheme; its fields are its options, in Python and in run files.

    A scheme may define its own velocity variable. By default this is the canonical velocity, a^2
    dx/dt.

    Attributes:
        starts_at_zero: whether a run can begin at a = 0.
        uses_lpt: whether its operations need the LPT fields psi1 and psi2.
    """

    starts_at_zero: ClassVar[bool] = False
    uses_lpt: ClassVar[bool] = False

    @abc.abstractmethod
    def schedule(self, growth: Growth, edges: Sequence[float]) -> Schedule:
        """Returns the operations of a run from the first to the last edge.

        The first operation acts on the scheme's own velocity. After the last one the velocity is
        canonical.
        """

    def initial(self, growth: Growth, a: float, order: int) -> tf.Tensor:
        """Returns the LPT factors of displacement and scheme's velocity, float64 [2, terms].

        Args:
            growth: the cosmology's growth.
            a: scale factor.
            order: the order of LPT.
        """
        import tensorflow as tf

        from flowpm_dist.initial.lpt import growth_terms

        terms = growth_terms(growth, a, order)
        return tf.stack([terms[0], momentum_factor(growth, a) * terms[1]])

    def interpolation(
        self, growth: Growth, edges: Sequence[float], times: Sequence[float]
    ) -> Interpolation:
        """Returns how states at given times follow from the states at the kicks.

        Args:
            growth: the cosmology's growth.
            edges: the scale factors at which steps begin and end.
            times: scale factors from the first to the last of the edges.

        Raises:
            ValueError: the scheme gives no states between kicks.
        """
        raise ValueError(
            f"{type(self).__name__} gives no states between the kicks: it has no `interpolation`"
        )

    def since_kick(
        self, growth: Growth, edges: Sequence[float], times: tf.Tensor
    ) -> tuple[tuple[int, ...], tf.Tensor]:
        """Returns how positions at given times follow from the positions at the kick before.

        Between two kicks the velocity does not change.

        Args:
            growth: the cosmology's growth.
            edges: the scale factors at which steps begin and end.
            times: scale factors from the first kick to the last of the edges, float64 [times].

        Returns:
            The numbers of the kicks, and the factors c, float64 [times, 4] with c0 = 0,
            differentiable with respect to the times and the cosmology. They give displacement =
            displacement at the kick + c1 velocity after the kick + c2 psi1 + c3 psi2.

        Raises:
            ValueError: the scheme gives no positions between kicks, or a time lies before the first
                kick.
        """
        raise ValueError(
            f"{type(self).__name__} gives no places between the kicks: it has no `since_kick`"
        )

    def from_canonical(self, growth: Growth, a: float) -> tf.Tensor | None:
        """Returns the factors [4] of the "velocity" operation from canonical to the scheme's own.

        None if the scheme's velocity is the canonical one.
        """
        return None


def momentum_factor(growth: Growth, a: float | np.ndarray) -> tf.Tensor:
    """Returns a^2 E [1]: canonical velocity a^2 dx/dt over dx/dlna, in units of H0."""
    import tensorflow as tf

    return a**2 * tf.sqrt(growth.background.e2(a))


INTEGRATORS: dict[str, type[Integrator]] = {}
"""Name in a run file -> scheme; filled by the package."""


IntegratorChoice = Annotated[
    InstanceOf[Integrator], BeforeValidator(from_registry(INTEGRATORS, "integrator"))
]
"""A scheme, or the name of one."""
