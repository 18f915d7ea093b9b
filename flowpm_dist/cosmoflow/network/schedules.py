"""Learning rates as functions of the step alone, so that a resumed run goes on as it would have.

A step is the number of updates made before: the first update takes `rate(0)`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

RULES = ("none", "sqrt", "linear")


def scaled_rate(
    base: float, samples_per_step: int, reference: int = 1, rule: str = "none"
) -> float:
    """The learning rate for a number of samples per step, from the one that suits `reference`.

    Args:
        base: the rate that suits `reference` samples per step.
        samples_per_step, reference: over all ranks.
        rule: "none"; "linear", base x samples / reference (Goyal and others, arXiv:1706.02677);
            "sqrt", base x sqrt(samples / reference) (Krizhevsky, arXiv:1404.5997).

    Raises:
        ValueError: an unknown rule, or a number of samples below 1.
    """
    if samples_per_step < 1 or reference < 1:
        raise ValueError(
            f"{samples_per_step} samples per step with reference {reference}: both must be "
            "1 or more"
        )
    if rule not in RULES:
        raise ValueError(f"no rule {rule!r} for the learning rate: give one of {', '.join(RULES)}")
    power = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[rule]
    return base * (samples_per_step / reference) ** power


@dataclass(frozen=True)
class Schedule(ABC):
    """A linear warm-up to the base rate, then what the subclass says.

    Attributes:
        base: the rate at the end of the warm-up.
        warmup_steps: steps of the warm-up; `rate(warmup_steps)` is the first after it.
        start_factor: the warm-up starts from base x start_factor.

    Raises:
        ValueError: a number out of its range.
    """

    base: float
    warmup_steps: int = field(default=0, kw_only=True)
    start_factor: float = field(default=0.1, kw_only=True)

    def __post_init__(self) -> None:
        _check(self.base > 0, f"base rate {self.base}", "positive")
        _check(self.warmup_steps >= 0, f"warmup_steps {self.warmup_steps}", "0 or more")
        _check(self.start_factor >= 0, f"start_factor {self.start_factor}", "0 or more")

    def rate(self, step: Any) -> Any:
        """The learning rate of a step.

        Args:
            step: an int or numpy integers, or an integer tensor.

        Returns:
            A float, a float64 array or a float64 tensor, after the kind of `step`.
        """
        xp, step = _as_float64(step)
        done = step / max(self.warmup_steps, 1)
        warming = self.base * (self.start_factor + (1 - self.start_factor) * done)
        rate = xp.where(step < self.warmup_steps, warming, self._after_warmup(step, xp))
        return float(rate) if xp is np and rate.ndim == 0 else rate

    @abstractmethod
    def _after_warmup(self, step: Any, xp: Any) -> Any:
        """The rate at a float64 step, by the functions of xp, numpy or TensorFlow."""


@dataclass(frozen=True)
class Constant(Schedule):
    """The base rate for ever."""

    def _after_warmup(self, step: Any, xp: Any) -> Any:
        return self.base * xp.ones_like(step)


@dataclass(frozen=True)
class _Decay(Schedule):
    """A decay after the warm-up: base rate to end rate in `decay_steps` steps, then constant.

    Attributes:
        end: the rate from step warmup_steps + decay_steps on.
        decay_steps: steps of the decay.
    """

    end: float
    decay_steps: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self.end >= 0, f"end rate {self.end}", "0 or more")
        _check(self.decay_steps >= 1, f"decay_steps {self.decay_steps}", "1 or more")

    def _after_warmup(self, step: Any, xp: Any) -> Any:
        left = 1 - (step - self.warmup_steps) / self.decay_steps
        share = self._share(xp.minimum(xp.maximum(left, 0.0), 1.0), xp)
        return self.base * share + self.end * (1 - share)

    @abstractmethod
    def _share(self, left: Any, xp: Any) -> Any:
        """The base rate's share of the rate; `left` of the decay falls from 1 to 0."""


@dataclass(frozen=True)
class Polynomial(_Decay):
    """Polynomial decay, linear by default: end + (base - end) (1 - t)^power, t from 0 to 1.

    That of SC18 CosmoFlow (arXiv:1808.04728).
    """

    power: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self.power > 0, f"power {self.power}", "positive")

    def _share(self, left: Any, xp: Any) -> Any:
        return left**self.power


@dataclass(frozen=True)
class Cosine(_Decay):
    """Half a cosine from base to end (Loshchilov and Hutter, arXiv:1608.03983, no restarts)."""

    def _share(self, left: Any, xp: Any) -> Any:
        return 0.5 - 0.5 * xp.cos(math.pi * left)


@dataclass(frozen=True)
class StepDecay(Schedule):
    """Base x the factor of the last milestone reached: the schedule of MLPerf HPC CosmoFlow.

    MLPerf counts in epochs, and warms up from the rate not scaled for the samples per step.

    Attributes:
        milestones: (step, factor) in rising order of steps, which count from the start of the
            training; factors are of the base rate, not of the one before.
    """

    milestones: Sequence[tuple[int, float]]

    def __post_init__(self) -> None:
        super().__post_init__()
        steps = [step for step, _ in self.milestones]
        rising = all(a < b for a, b in zip(steps, steps[1:], strict=False))
        _check(rising, f"the milestones' steps {steps}", "in rising order")
        for step, factor in self.milestones:
            _check(factor >= 0, f"the factor {factor} of step {step}", "0 or more")

    def _after_warmup(self, step: Any, xp: Any) -> Any:
        base = self.base * xp.ones_like(step)
        rate = base
        for start, factor in self.milestones:
            rate = xp.where(step >= start, base * factor, rate)
        return rate


@dataclass(frozen=True)
class ByEpochs(StepDecay):
    """Rates that change between epochs alone, as in the reference of MLPerf HPC CosmoFlow.

    `warmup_steps` and the milestones count epochs, from 0. A factor holds for epochs *after* its
    milestone: with (32, 0.25) the rate of epoch 32 is the base rate, that of epoch 33 a quarter.

    Attributes:
        steps, epochs: of the whole training.
    """

    steps: int = field(kw_only=True)
    epochs: int = field(kw_only=True)

    def rate(self, step: Any) -> Any:
        """The learning rate of a step, see `Schedule.rate`."""
        whole = isinstance(step, int | np.integer)
        xp, step = _as_float64(step)
        epoch = xp.floor(step * self.epochs / self.steps)
        rate = super().rate(np.asarray(epoch) if xp is np else epoch)
        return float(rate) if whole else rate

    def _after_warmup(self, step: Any, xp: Any) -> Any:
        return super()._after_warmup(step - 1, xp)


def _as_float64(step: Any) -> tuple[Any, Any]:
    """The module that computes with such a step, and the step in float64."""
    if isinstance(step, int | np.integer | np.ndarray):
        return np, np.asarray(step, np.float64)
    import tensorflow as tf  # not where a schedule is only read or drawn

    return tf, tf.cast(step, tf.float64)


def _check(right: bool, what: str, should_be: str) -> None:
    if not right:
        raise ValueError(f"{what} of a schedule must be {should_be}")
