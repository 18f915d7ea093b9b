"""The interface of a time integration scheme: kicks and drifts, and their factors.

Also the functions that build schedules from the factors of each step. Schemes are declared without
TensorFlow, so that run files can name them and their options.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from flowpm_dist.cosmology.arrays import (
    as_array,
    as_float64,
    joined,
    known,
    reshape,
    sqrt,
    stacked,
)
from flowpm_dist.options import Options, name_in

if TYPE_CHECKING:
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
    """Factors that give the states at times between kicks from the particles at a kick.

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

    def wrong_start(self, a: float, *, radiation: bool = False) -> str:
        """Returns why a run cannot begin at a scale factor; an empty text if it can.

        Args:
            a: the scale factor.
            radiation: whether the universe has radiation.
        """
        if a > 0 or (self.starts_at_zero and not radiation):
            return ""
        if radiation:
            return "starts at 0: with radiation a run must start later"
        able = " and ".join(n for n, other in INTEGRATORS.items() if other.starts_at_zero)
        kind = type(self)
        name = next((n for n, other in INTEGRATORS.items() if kind is other), kind.__name__)
        return f"starts at 0: only {able} can start there; {name} must start later"

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

        Outputs need it, and light cones with a correction of states.

        Args:
            growth: the cosmology's growth.
            edges: the scale factors at which steps begin and end.
            times: scale factors from the first to the last of the edges.

        Raises:
            ValueError: the scheme gives no states between kicks.
        """
        raise ValueError(
            f"{type(self).__name__} gives no states between kicks: it defines no `interpolation`"
        )

    def since_kick(
        self, growth: Growth, edges: Sequence[float], times: tf.Tensor
    ) -> tuple[np.ndarray | tf.Tensor, tf.Tensor]:
        """Returns how positions at given times follow from the positions at the kick before.

        Between two kicks the velocity does not change.

        Args:
            growth: the cosmology's growth.
            edges: the scale factors at which steps begin and end.
            times: scale factors from the first kick to the last of the edges, float64 [times].

        Returns:
            The numbers of the kicks, int32 [times], and the factors c, float64 [times, 4] with
            c0 = 0, differentiable with respect to the times and the cosmology. They give
            displacement = displacement at the kick + c1 velocity after the kick + c2 psi1 + c3
            psi2. In a graph the numbers are a tensor, where it has yet to compute them.

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
    return a**2 * sqrt(growth.background.e2(a))


def rows(*columns: Any) -> Any:
    """Returns factors [n, 4] from four columns: numbers, or arrays or tensors [n]."""
    count = max((c.shape[0] for c in columns if np.ndim(c)), default=1)
    return stacked([as_array(c) * np.ones(count) for c in columns], axis=1)


def kick_drift_kick(edges: Sequence[float], opening: Any, drift: Any, closing: Any) -> Schedule:
    """Returns the schedule of kick-drift-kick steps.

    The closing kick of a step and the opening kick of the next use the same force, so they become a
    single kick.

    Args:
        edges: scale factors [n + 1].
        opening, drift, closing: factors [n, 4] of each step.
    """
    kicks = joined([opening[:1], _in_turn(closing[:-1], opening[1:]), closing[-1:]], axis=0)
    operations = [Operation("kick", float(edges[0]), 1)]
    for step, a in enumerate(edges[1:], start=1):
        operations.append(Operation("drift", float(a), step))
        operations.append(Operation("kick", float(a), step, ends_step=True))
    between = reshape(stacked([drift, kicks[1:]], axis=1), [-1, 4])
    return Schedule(tuple(operations), as_float64(joined([kicks[:1], between], axis=0)))


def drift_kick_drift(edges: Sequence[float], first: Any, kick: Any, second: Any) -> Schedule:
    """Returns the schedule of drift-kick-drift steps.

    The second drift of a step and the first drift of the next become a single drift.

    Args:
        edges: scale factors [n + 1].
        first, kick, second: factors [n, 4] of each step.
    """
    drifts = joined([first[:1], second[:-1] + first[1:], second[-1:]], axis=0)
    a = np.asarray(edges, dtype=np.float64)
    operations = [Operation("drift", float(a[:2].mean()), 1)]
    for step in range(1, len(a)):
        operations.append(Operation("kick", float(a[step - 1 : step + 1].mean()), step))
        operations.append(Operation("drift", float(a[step]), step, ends_step=True))
    between = reshape(stacked([kick, drifts[1:]], axis=1), [-1, 4])
    return Schedule(tuple(operations), as_float64(joined([drifts[:1], between], axis=0)))


def kicks_of(times: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Returns for each time the number of the kick during which the velocity reaches that time.

    Args:
        times: scale factors [n].
        bounds: scale factors [kicks + 1]; kick i brings the velocity from bound i to bound i + 1.
    """
    return np.clip(np.searchsorted(bounds, times, side="left") - 1, 0, len(bounds) - 2)


def between_kicks(
    kicks: np.ndarray, share: tf.Tensor, drift: tf.Tensor, later: np.ndarray | tf.Tensor
) -> Interpolation:
    """Returns the states at times near kicks, with the scheme's velocity.

    Args:
        kicks: their numbers [n].
        share: the part of each kick that has been made [n].
        drift: factors of the velocity in the drift from the positions at the kick [n]; negative for
            a drift back in time.
        later: whether the times are later than the kick's positions [n].
    """
    import tensorflow as tf

    zero = tf.zeros_like(share)
    displacement = [tf.where(later, zero, drift), tf.where(later, drift, zero), zero, zero]
    velocity = [1.0 - share, share, zero, zero]
    factors = tf.stack([tf.stack(displacement, axis=-1), tf.stack(velocity, axis=-1)], axis=-2)
    return Interpolation(tuple(kicks.tolist()), factors)


def kick_drift_kick_between(
    edges: Sequence[float],
    halves: np.ndarray,
    times: Sequence[float],
    kicked: Callable[[np.ndarray], tf.Tensor],
    drifted: Callable[[np.ndarray, np.ndarray, np.ndarray], tf.Tensor],
) -> Interpolation:
    """Returns the states between the kicks of kick-drift-kick steps, by partial kicks and drifts.

    Args:
        edges: scale factors [steps + 1].
        halves: where each step is halved [steps].
        times: scale factors [n].
        kicked: a function of times [n]; its difference between two times is proportional to the
            kick between them.
        drifted: the factor of a drift from times [n] to later or earlier times [n] with the
            velocity at halves [n].
    """
    a, t = np.asarray(edges, dtype=np.float64), np.asarray(times, dtype=np.float64)
    bounds = np.concatenate([a[:1], halves, a[-1:]])
    kicks = kicks_of(t, bounds)
    begin, end = kicked(bounds[kicks]), kicked(bounds[kicks + 1])
    later = t > a[kicks]
    step = np.clip(kicks - 1 + later, 0, len(halves) - 1)
    drift = drifted(a[kicks], t, halves[step])
    return between_kicks(kicks, (kicked(t) - begin) / (end - begin), drift, later)


def last_kicks(times: Any, kicks: Any) -> np.ndarray | tf.Tensor:
    """Returns, for each time, the number of the last kick before it, but not the run's final kick.

    Args:
        times: [n], in any unit.
        kicks: times of the positions at which the kicks are made, in the same unit.

    Returns:
        int32 [n]; a tensor, where a graph has yet to compute the times.

    Raises:
        ValueError: a time lies before the first kick. In a graph it is an assertion.
    """
    early = "a time lies before the first force is known: start the run earlier"
    at, begun = known(times), known(kicks)
    if at is None or begun is None:
        import tensorflow as tf

        at, begun = (tf.stop_gradient(as_float64(x)) for x in (times, kicks))
        last = tf.searchsorted(begun, at, side="right") - 1
        tf.debugging.Assert(tf.reduce_all(last >= 0), [early])
        return last
    last = np.searchsorted(begun, at, side="right").astype(np.int32) - 1
    if (last < 0).any():
        raise ValueError(early)
    return last


def followed_by_velocity(schedule: Schedule, factors: Any) -> Schedule:
    """Returns the schedule with a last operation on the velocity, with factors [1, 4]."""
    last = schedule.operations[-1]
    operation = Operation("velocity", last.a, last.step)
    return Schedule((*schedule.operations, operation), joined([schedule.factors, factors], axis=0))


def _in_turn(first: Any, second: Any) -> Any:
    """Returns the factors [n, 4] of one kick that replaces two kicks by the same force."""
    decay = second[:, :1]
    return joined([decay * first[:, :1], decay * first[:, 1:] + second[:, 1:]], axis=1)


INTEGRATORS: dict[str, type[Integrator]] = {}
"""Name in a run file -> scheme; filled by the package."""


def name_of(integrator: Integrator) -> str:
    """Returns the name of a scheme in run files, or the class name of a user's scheme."""
    return name_in(INTEGRATORS, integrator)
