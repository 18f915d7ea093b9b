"""Optimisers of weights that every rank holds whole, and the learning rates of their steps.

Each rank makes the same update for itself. An update is one XLA program with few passes over
memory: the gradient's norm, then each tensor's slots and weights, with one pass more for LARC. No
sum's order depends on the number of threads, so ranks with the same inputs on the same kind of
processor get the same bits. A learning rate is a function of the number of updates made before (the
first takes `rate(0)`), so that a resumed training has the rates that it would have had.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import field
from typing import Annotated, Any

import tensorflow as tf
from pydantic import Field, InstanceOf
from pydantic.dataclasses import dataclass

from flowpm_dist.cosmoflow.planning.options import (
    TRAINING_DEFAULTS,
    ConstantDecay,
    CosineDecay,
    EpochDecay,
    MilestoneDecay,
    MomentumOptions,
    PolynomialDecay,
)
from flowpm_dist.options import Options, in_unit

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
AtLeastOne = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class Schedule:
    """The learning rates of a training: a linear warm-up to the base rate, then a decay.

    Polynomial decay is end + (base - end) (1 - t)^power, with t from 0 to 1 (SC18 CosmoFlow,
    arXiv:1808.04728). Cosine decay is half a cosine from base to end (Loshchilov and Hutter,
    arXiv:1608.03983, no restarts). Milestones count steps from the start of the training. With
    `EpochDecay` rates change between epochs alone, as in the reference of MLPerf HPC CosmoFlow:
    warm-up and milestones count epochs from 0, and a factor holds for epochs *after* its milestone.
    With (32, 0.25) epoch 32 has the base rate, epoch 33 a quarter of it.

    Attributes:
        base: the rate at the end of the warm-up.
        decay: what follows the warm-up; by default a constant rate.
        steps, epochs: length of the whole training, at whose end a decay ends.
        warmup_steps: steps of the warm-up; `rate(warmup_steps)` is the first after it.
        start_factor: the warm-up starts from base x start_factor.

    Raises:
        ValueError: a number out of its range.
    """

    base: Positive
    decay: InstanceOf[Options] = ConstantDecay()
    steps: AtLeastOne = field(default=1, kw_only=True)
    epochs: AtLeastOne | None = field(default=None, kw_only=True)
    warmup_steps: Annotated[int, Field(ge=0)] = field(default=0, kw_only=True)
    start_factor: NotNegative = field(default=0.1, kw_only=True)

    def rate(self, step: Any) -> tf.Tensor:
        """Returns the learning rate of a step, or of several [...], float64."""
        step = tf.cast(step, tf.float64)
        if isinstance(self.decay, EpochDecay):
            step = tf.floor(step * self.epochs / self.steps)
        done = step / max(self.warmup_steps, 1)
        warming = self.base * (self.start_factor + (1 - self.start_factor) * done)
        return tf.where(step < self.warmup_steps, warming, self._after_warmup(step))

    def _after_warmup(self, step: tf.Tensor) -> tf.Tensor:
        decay, rate = self.decay, self.base * tf.ones_like(step)
        if isinstance(decay, MilestoneDecay):
            base, after = rate, step - 1 if isinstance(decay, EpochDecay) else step
            for start, factor in decay.milestones:
                rate = tf.where(after >= start, base * factor, rate)
        elif isinstance(decay, CosineDecay):
            left = 1 - (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
            left = tf.minimum(tf.maximum(left, 0.0), 1.0)
            share = 0.5 - 0.5 * tf.cos(math.pi * left)
            if isinstance(decay, PolynomialDecay):
                share = left**decay.power
            rate = self.base * share + decay.end_rate * (1 - share)
        return rate


class Optimiser(tf.Module):
    """The base of optimisers: counter, slots, clipping, LARC's rate, skip of bad gradients.

    A subclass names its slots and gives `_step`. To be saved with `tf.train.Checkpoint`; what is
    restored before the slots exist is kept for them.

    Attributes:
        schedule: the rate of each update.
        larc: trust coefficient of `local_rate`, or None for the schedule's rate everywhere. Biases
            keep the schedule's rate: from zero, a share of their norm would leave them there.
        weight_decay: each update also takes rate x weight_decay of every weight away, apart from
            gradient, moments and LARC (Loshchilov and Hutter, arXiv:1711.05101).
        clip_norm: the global norm that longer gradients are shortened to, or None.
        iterations: updates made, an int64 variable; skipped ones do not count.
        slots: for each name a list of variables of the weights' shapes and dtypes.

    Raises:
        ValueError: a number out of its range.
    """

    SLOTS: tuple[str, ...] = ()

    def __init__(
        self,
        schedule: Schedule,
        *,
        larc: float | None = TRAINING_DEFAULTS.trust,
        weight_decay: float = TRAINING_DEFAULTS.weight_decay,
        clip_norm: float | None = TRAINING_DEFAULTS.max_gradient_norm,
    ) -> None:
        super().__init__()
        larc, clip_norm = in_unit("larc", larc), in_unit("clip_norm", clip_norm)
        weight_decay = in_unit("weight_decay", weight_decay)
        _check(larc is None or larc > 0, f"larc {larc}", "positive or None")
        _check(weight_decay >= 0, f"weight_decay {weight_decay}", "0 or more")
        _check(clip_norm is None or clip_norm > 0, f"clip_norm {clip_norm}", "positive or None")
        self.schedule = schedule
        self.larc = larc
        self.weight_decay = weight_decay
        self.clip_norm = clip_norm
        self.iterations = tf.Variable(0, dtype=tf.int64, trainable=False, name="iterations")
        self.slots: dict[str, list[tf.Variable]] = {}
        self._compiled = tf.function(self._update, autograph=False, jit_compile=True)

    def build(self, variables: Sequence[tf.Variable]) -> None:
        """Makes the slots of these weights. Without this call, the first `apply` makes them.

        Raises:
            ValueError: slots of other shapes exist already.
        """
        shapes = [tuple(variable.shape) for variable in variables]
        for name in self.SLOTS:
            if name not in self.slots:
                with tf.init_scope():
                    self.slots[name] = [
                        tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False, name=name)
                        for v in variables
                    ]
            built = [tuple(slot.shape) for slot in self.slots[name]]
            if built != shapes:
                raise ValueError(f"an optimiser of weights {built} was given weights {shapes}")

    def apply(
        self, gradients: Sequence[tf.Tensor], variables: Sequence[tf.Variable]
    ) -> dict[str, tf.Tensor]:
        """Change the weights by one update; a gradient that is not finite changes nothing at all.

        Args:
            gradients: complete, the same on all ranks; each of its weights' shape and dtype.
            variables: the weights, float32 or float64, each time the same in the same order.

        Returns:
            Scalars: "rate", the schedule's, float64; "gradient_norm", global, not clipped, float64;
            "finite", bool, whether the update was made. False also where squares of the gradient
            overflow its dtype, which would spoil the moments for good.

        Raises:
            ValueError: gradients and weights do not match.
        """
        wanted = [tuple(variable.shape) for variable in variables]
        shapes = [None if g is None else tuple(g.shape) for g in gradients]
        if shapes != wanted:
            raise ValueError(f"gradients of shapes {shapes} for weights of shapes {wanted}")
        self.build(variables)
        return self._compiled(list(gradients), list(variables))

    def _update(
        self, gradients: list[tf.Tensor], variables: list[tf.Variable]
    ) -> dict[str, tf.Tensor]:
        norm = tf.sqrt(tf.add_n([_sum_of_squares(gradient) for gradient in gradients]))
        rate = self.schedule.rate(self.iterations)

        def update() -> tf.Tensor:
            for n, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
                if self.clip_norm is not None:
                    gradient *= tf.cast(tf.minimum(self.clip_norm / norm, 1.0), gradient.dtype)
                slots = [self.slots[name][n] for name in self.SLOTS]
                change = self._step(gradient, variable, slots, rate)
                decayed: tf.Tensor = variable
                if self.weight_decay:
                    decayed = variable * tf.cast(1.0 - rate * self.weight_decay, variable.dtype)
                variable.assign(decayed - change)
            self.iterations.assign_add(1)
            return tf.constant(True)

        finite = tf.cond(tf.math.is_finite(norm), update, lambda: tf.constant(False))
        return {"rate": rate, "gradient_norm": norm, "finite": finite}

    @abstractmethod
    def _step(
        self, gradient: tf.Tensor, variable: tf.Variable, slots: list[tf.Variable], rate: tf.Tensor
    ) -> tf.Tensor:
        """Assign the slots of one weight tensor; returns what is to be taken from the weights."""

    def _rate_for(self, direction: tf.Tensor, variable: tf.Variable, rate: tf.Tensor) -> tf.Tensor:
        if self.larc is not None and variable.shape.rank > 1:
            rate = local_rate(rate, self.larc, variable, direction)
        return tf.cast(rate, variable.dtype)


class Adam(Optimiser):
    """Adam (Kingma and Ba, arXiv:1412.6980, algorithm 1), on request with LARC on its update.

    The moments m, v give the direction u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon),
    and w <- w - local_rate(u) u. With LARC this is LAMB (You and others 2020, arXiv:1904.00962)
    whose rate never exceeds the global one, without a weight decay inside the norm. SC18 scaled the
    gradient instead of u. But Adam's direction does not change with the gradient's scale, so that
    the trust ratio had hardly an effect.

    Args:
        schedule: the rate of each update.
        beta1, beta2, epsilon: as in the formula.
        options: larc, weight_decay and clip_norm of `Optimiser`.
    """

    SLOTS = ("mean", "square")

    def __init__(
        self,
        schedule: Schedule,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        **options: Any,
    ) -> None:
        super().__init__(schedule, **options)
        beta1, beta2 = in_unit("beta1", beta1), in_unit("beta2", beta2)
        epsilon = in_unit("epsilon", epsilon)
        _check(0 <= beta1 < 1, f"beta1 {beta1}", "in [0, 1)")
        _check(0 <= beta2 < 1, f"beta2 {beta2}", "in [0, 1)")
        _check(epsilon > 0, f"epsilon {epsilon}", "positive")
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon

    def _step(
        self, gradient: tf.Tensor, variable: tf.Variable, slots: list[tf.Variable], rate: tf.Tensor
    ) -> tf.Tensor:
        mean, square = slots
        mean.assign(mean + (1 - self.beta1) * (gradient - mean))
        square.assign(square + (1 - self.beta2) * (gradient * gradient - square))
        # Both corrections as scalars: one division for each weight instead of three.
        time = tf.cast(self.iterations + 1, tf.float64)
        spread = tf.sqrt(1.0 - self.beta2**time)
        factor = tf.cast(spread / (1.0 - self.beta1**time), variable.dtype)
        epsilon = tf.cast(self.epsilon * spread, variable.dtype)
        direction = factor * mean / (tf.sqrt(square) + epsilon)
        return self._rate_for(direction, variable, rate) * direction


class Momentum(Optimiser):
    """Gradient descent with momentum, as of MLPerf HPC CosmoFlow and Keras's SGD.

    v <- momentum v + local_rate(g) g, w <- w - v: with LARC, algorithm 1 of You, Gitman and
    Ginsburg 2017.

    Args:
        schedule: the rate of each update.
        momentum: as in the formula.
        options: larc, weight_decay and clip_norm of `Optimiser`.
    """

    SLOTS = ("velocity",)

    def __init__(
        self, schedule: Schedule, momentum: float = MomentumOptions().momentum, **options: Any
    ) -> None:
        super().__init__(schedule, **options)
        momentum = in_unit("momentum", momentum)
        _check(0 <= momentum < 1, f"momentum {momentum}", "in [0, 1)")
        self.momentum = momentum

    def _step(
        self, gradient: tf.Tensor, variable: tf.Variable, slots: list[tf.Variable], rate: tf.Tensor
    ) -> tf.Tensor:
        (velocity,) = slots
        push = self._rate_for(gradient, variable, rate) * gradient
        velocity.assign(self.momentum * velocity + push)
        return velocity.read_value()


def local_rate(rate: Any, trust: float, weights: tf.Tensor, direction: tf.Tensor) -> tf.Tensor:
    """LARC's rate of one weight tensor, min(rate, trust ||weights|| / ||direction||).

    Layer-wise adaptive rates of You, Gitman and Ginsburg 2017 (arXiv:1708.03888), never above
    the global rate ("clip" mode), as in SC18 CosmoFlow. Where a norm is zero, as a bias's is
    at first, the global rate.

    Args:
        rate: global, a float64 scalar.
        trust: how much of its norm a tensor may change by in one update.
        weights, direction: of one shape; the weights change by rate x direction.

    Returns:
        A float64 scalar.
    """
    weight_norm = tf.sqrt(_sum_of_squares(weights))
    direction_norm = tf.sqrt(_sum_of_squares(direction))
    known = tf.logical_and(weight_norm > 0, direction_norm > 0)
    trusted = tf.minimum(rate, trust * weight_norm / direction_norm)
    return tf.where(known, trusted, rate)


def _sum_of_squares(values: tf.Tensor) -> tf.Tensor:
    """A float64 scalar: over the last axis in float64, before in the tensor's dtype.

    XLA makes vector code of a sum over leading axes, not of one over all.
    """
    shape = values.shape
    columns = tf.reshape(values, [-1, shape[-1] if shape.rank else 1])
    return tf.reduce_sum(tf.cast(tf.reduce_sum(columns * columns, axis=0), tf.float64))


def _check(right: bool, what: str, should_be: str) -> None:
    if not right:
        raise ValueError(f"{what} of an optimiser must be {should_be}")
