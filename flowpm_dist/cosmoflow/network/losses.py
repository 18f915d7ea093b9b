"""Losses of standardised targets, one number for each sample, and the meaning of the outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.options import UniformPriors

LOG_VARIANCE_LIMIT = 10.0
"""The log variance is kept within +- this: sigma from 0.0067 to 148 standard deviations."""

DOUBT = 0.01
"""Share of the targets for which a Gaussian is not trusted."""


def l1(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """Mean absolute error over the parameters.

    Args:
        targets, outputs: [batch, parameter].

    Returns:
        [batch], as every loss here.

    Raises:
        ValueError: the shapes do not fit, as in every loss here.
    """
    _check_outputs(targets, outputs, 1)
    return tf.reduce_mean(tf.abs(outputs - targets), axis=-1)


def l2(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """Mean squared error over the parameters; targets, outputs: [batch, parameter]."""
    _check_outputs(targets, outputs, 1)
    return tf.reduce_mean(tf.square(outputs - targets), axis=-1)


def doubting_nll(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """Minus the log likelihood of Gaussians that are not trusted for a share `DOUBT` of targets.

    The Gaussian of each parameter has the predicted mean and log variance s, softly kept within
    +- `LOG_VARIANCE_LIMIT` (Nix and Weigend 1994). For the share, only the prior is known: the
    density of a target is (1 - `DOUBT`) x the Gaussian's + `DOUBT` x 1 / (2 sqrt(3)), the uniform
    prior's density where targets have a standard deviation of 1, and 0.58 of it where they lie
    between -1 and 1. The result is the mean over the parameters, without ln(2 pi) / 2. A Gaussian's
    own tails are so thin that a single volume, ten of its error bars off, would dominate a step's
    loss and gradient. Here no volume's loss is above 4.93, and its gradient goes to 0.

    Args:
        targets: [batch, parameter].
        outputs: [batch, 2 x parameter], the means and then the log variances.
    """
    _check_outputs(targets, outputs, 2)
    mean, log_variance = _mean_and_log_variance(outputs)
    misfit = 0.5 * (log_variance + tf.square(targets - mean) * tf.exp(-log_variance))
    inner = float(np.log1p(-DOUBT)) - misfit
    # The constant that the Gaussian is without.
    outer = np.log(DOUBT) - np.log(2 * np.sqrt(3)) + 0.5 * np.log(2 * np.pi)
    densities = tf.stack([inner, tf.fill(tf.shape(inner), tf.cast(outer, inner.dtype))])
    return tf.reduce_mean(-tf.reduce_logsumexp(densities, axis=0), axis=-1)


LOSSES: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "l1": l1,
    "l2": l2,
    "likelihood": doubting_nll,
}


def loss_function(loss: str) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """Returns the loss of a name, a function (targets, outputs) -> [batch].

    Raises:
        ValueError: no such loss.
    """
    if loss not in LOSSES:
        raise ValueError(f"no loss {loss!r}: give one of {', '.join(LOSSES)}")
    return LOSSES[loss]


def outputs_of(loss: str, parameters: int) -> int:
    """Returns the number of outputs of a network. Raises ValueError for an unknown loss."""
    return parameters * _outputs_per_parameter(loss)


def split_prediction(loss: str, outputs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | None]:
    """The predicted means, and their standard deviations where the loss trains them, else None.

    Args:
        loss: a name of `LOSSES`.
        outputs: the network's outputs [..., outputs_of(loss, parameters)].

    Returns:
        Each [..., parameter], in standardised units.

    Raises:
        ValueError: no such loss.
    """
    if _outputs_per_parameter(loss) == 1:
        return outputs, None
    mean, log_variance = _mean_and_log_variance(outputs)
    return mean, tf.exp(0.5 * log_variance)


BOUND = 1.2
"""Bounded networks have means within +- this."""


def kept_within(
    outputs: tf.Tensor, parameters: int, *, bounded: bool, within: float | None
) -> tf.Tensor:
    """Returns outputs [batch, outputs] whose means are softly kept within limits.

    Args:
        outputs: outputs of a network's last layer, the means first.
        parameters: number of means.
        bounded: whether means are `BOUND` tanh of what they would be, as in MLPerf's network.
        within: else the limit L, for L tanh(mean / L); None for none.
    """
    if not bounded and within is None:
        return outputs
    means = outputs[:, :parameters]
    kept = BOUND * tf.tanh(means) if within is None else within * tf.tanh(means / within)
    return tf.concat([kept, outputs[:, parameters:]], axis=1)


def _outputs_per_parameter(loss: str) -> int:
    return 2 if loss_function(loss) is doubting_nll else 1


def _mean_and_log_variance(outputs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    mean, raw = tf.split(outputs, 2, axis=-1)
    return mean, LOG_VARIANCE_LIMIT * tf.tanh(raw / LOG_VARIANCE_LIMIT)


def _check_outputs(targets: tf.Tensor, outputs: tf.Tensor, per_parameter: int) -> None:
    """Else [batch, 1] against [batch] would be broadcast to a loss of another problem."""
    batch, parameters = targets.shape
    wanted = tf.TensorShape([batch, None if parameters is None else per_parameter * parameters])
    if outputs.shape.rank != 2 or not outputs.shape.is_compatible_with(wanted):
        raise ValueError(
            f"outputs {outputs.shape} for targets {targets.shape}: the outputs must be {wanted}"
        )


@dataclass(frozen=True)
class Standardiser(UniformPriors):
    """Parameters with uniform priors, and their scale of mean 0 and standard deviation 1.

    Attributes:
        bounded: the scale of -1 to 1 instead, from one end of each prior to the other.
    """

    bounded: bool = False

    @property
    def std(self) -> np.ndarray:
        """Unit of the scale: the priors' standard deviations, or half their width, [parameter]."""
        width = self.high - self.low
        return width / (2 if self.bounded else np.sqrt(12))

    def standardise(self, parameters: Any) -> Any:
        """Returns (y - centre) / std of a float array or tensor [..., parameter], in its dtype."""
        return (parameters - _like(self.centre, parameters)) / _like(self.std, parameters)

    def restore(self, means: Any) -> Any:
        """Returns parameters [..., parameter] from standardised ones; inverts `standardise`."""
        return means * _like(self.std, means) + _like(self.centre, means)

    def restore_sigma(self, sigmas: Any) -> Any:
        """Returns standard deviations of parameters from standardised ones, [..., parameter]."""
        return sigmas * _like(self.std, sigmas)


def _like(constants: np.ndarray, values: Any) -> np.ndarray:
    return constants.astype(getattr(values.dtype, "as_numpy_dtype", values.dtype))
