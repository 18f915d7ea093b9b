"""L-BFGS with a backtracking line search (Nocedal and Wright 2006, algorithms 7.4 and 3.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from flowpm_dist.options import in_unit
from flowpm_dist.reconstruction.posterior import Evaluation, EvenPosterior, attempt
from flowpm_dist.reconstruction.unknowns import Memory, Unknowns

MOST_TRIES = 8
"""Number of steps that an iteration tries, each shorter than the last, before it gives up."""

PARTS = ("data", "prior", "volume")
"""Names of the parts of the loss."""

SUFFICIENT = 1e-4
"""Share of the decrease predicted by the slope that a step must achieve (Armijo)."""


class NoProgressError(FloatingPointError):
    """An error: the loss is not finite wherever a step leads. The last good point is kept."""


class StalledError(Exception):
    """An error: no step lowers the loss any more within its precision."""


@dataclass(frozen=True)
class Report:
    """The result of an iteration.

    Attributes:
        point: the point that the minimiser has reached.
        evaluation: the evaluation there.
        step: the length of the step divided by the length of the direction.
        before: the loss before the step.
        expected: the decrease of the loss that the gradient and the approximate Hessian predicted
            before the step: half g^T H^-1 g.
    """

    point: Unknowns
    evaluation: Evaluation
    step: float
    before: float
    expected: float


class LBFGS:
    """A minimiser with quasi-Newton steps from the latest changes of point and gradient.

    These changes correct an initial Hessian: the Hessian of `Scaling.preconditioned`, times a
    number. A step of length 1 is tried first. That holds for the steepest descent of the first
    iteration, too, as the coordinates make it about right. A step that does not lower the loss
    enough is shortened to the minimum of the parabola through what is known. A step to values that
    are not finite is shortened to a tenth. Pairs without positive curvature are left out.

    Attributes:
        evaluations: the number of gradient evaluations so far.

    Args:
        history: the number of pairs that are kept.
    """

    def __init__(self, history: int = 10) -> None:
        self._history, self.evaluations = in_unit("history", history), 0

    def start(self, objective: EvenPosterior, point: Unknowns) -> None:
        """Begins at a point of the unknowns, without any memory of earlier iterations."""
        self._begin(objective, objective.scaling.to_even(point))

    def _begin(self, objective: EvenPosterior, place: Unknowns) -> None:
        self._objective, self._point = objective, place
        self._here: Evaluation | None = None
        self._pairs: list[tuple[Unknowns, Unknowns]] = []

    def iterate(self) -> Report:
        """Makes one iteration. Must be called on all ranks together.

        Raises:
            NoProgressError: if the loss is not finite wherever a step leads.
            StalledError: if no step lowers the loss.
        """
        space = self._objective.space
        if self._here is None:
            self._here = self._finite_evaluation(self._point)
            if self._here is None:
                raise NoProgressError("the loss is not finite where the search begins")
        here = self._here
        direction = self._direction(here.gradient)
        slope = float(space.dot(direction, here.gradient))
        if slope >= 0:  # rounding has spoilt the pairs
            self._pairs.clear()
            direction = self._direction(here.gradient)
            slope = float(space.dot(direction, here.gradient))
        length, lost = 1.0, 0
        for _ in range(MOST_TRIES):
            trial = self._point.plus(length, direction)
            evaluation = self._finite_evaluation(trial)
            # Near the minimum the decrease is below rounding; the gradient is still significant.
            size = abs(float(here.loss))
            rounding = 4e-7 * size if slope > -1e-5 * size else 0.0
            enough = float(here.loss) + SUFFICIENT * length * slope + rounding
            if evaluation is not None and float(evaluation.loss) <= enough:
                s, y = trial - self._point, evaluation.gradient - here.gradient
                if float(space.dot(s, y)) > 1e-10 * float(space.dot(y, y)):
                    self._pairs = [*self._pairs, (s, y)][-self._history :]
                self._point, self._here = trial, evaluation
                return Report(trial, evaluation, length, float(here.loss), -slope / 2)
            lost += evaluation is None
            length = _shorter(length, slope, here, evaluation)
        if self._pairs:
            self._pairs.clear()
            return self.iterate()
        tried = f"{MOST_TRIES} steps, down to {length:.1e} of the steepest descent,"
        if lost == MOST_TRIES:
            raise NoProgressError(f"{tried} lead to a loss that is not finite")
        raise StalledError(f"{tried} do not lower the loss of {float(here.loss):.6g}")

    def _finite_evaluation(self, point: Unknowns) -> Evaluation | None:
        """Returns the evaluation at a point, or None if the loss or its gradient is not finite."""
        self.evaluations += 1
        evaluation = attempt(self._objective, point)
        if evaluation is None:
            return None
        square = self._objective.space.dot(evaluation.gradient, evaluation.gradient)
        finite = math.isfinite(float(evaluation.loss)) and bool(np.isfinite(square))
        return evaluation if finite else None

    def _direction(self, gradient: Unknowns) -> Unknowns:
        """Returns minus the approximate inverse Hessian times the gradient (two-loop recursion)."""
        dot = self._objective.space.dot
        q, factors = gradient, []
        for s, y in reversed(self._pairs):
            rho = 1 / float(dot(y, s))
            alpha = rho * float(dot(s, q))
            q = q.plus(-alpha, y)
            factors.append((rho, alpha))
        preconditioned = self._objective.scaling.preconditioned
        q = preconditioned(q)
        if self._pairs:
            s, y = self._pairs[-1]
            q = q.times(float(dot(s, y)) / float(dot(y, preconditioned(y))))
        for (s, y), (rho, alpha) in zip(self._pairs, reversed(factors), strict=True):
            beta = rho * float(dot(y, q))
            q = q.plus(alpha - beta, s)
        return -q

    def memory(self) -> Memory:
        """Returns all that the next iteration depends on."""
        points = {"point": self._point}
        for number, (s, y) in enumerate(self._pairs):
            points[f"s{number}"], points[f"y{number}"] = s, y
        numbers: dict[str, float] = {"pairs": len(self._pairs)}
        if self._here is not None:
            points["gradient"] = self._here.gradient
            numbers |= {name: float(getattr(self._here, name)) for name in PARTS}
        return Memory(points, numbers)

    def resume(self, objective: EvenPosterior, memory: Memory) -> None:
        """Resumes from what `memory` returned."""
        self._begin(objective, memory.points["point"])
        count = int(memory.numbers["pairs"])
        self._pairs = [(memory.points[f"s{i}"], memory.points[f"y{i}"]) for i in range(count)]
        if "gradient" in memory.points:
            data, prior, volume = (np.array(memory.numbers[name]) for name in PARTS)
            self._here = Evaluation(data, prior, memory.points["gradient"], volume)


def _shorter(length: float, slope: float, here: Evaluation, found: Evaluation | None) -> float:
    """Returns a shorter length, between a tenth and a half of the given one."""
    if found is None:
        return 0.1 * length
    rise = float(found.loss) - float(here.loss) - slope * length
    best = -slope * length**2 / (2 * rise) if rise > 0 else 0.5 * length
    return min(max(best, 0.1 * length), 0.5 * length)
