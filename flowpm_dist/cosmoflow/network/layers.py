"""The layers of a declared network, on the blocks of a mesh and on whole volumes, and its losses.

On a mesh the density enters in the layout that the simulator leaves it in: batch over `replica`, x
over `row`, y over `col`. Convolutions and pools work on blocks while those are thick. Then each
replica gathers its volumes, which are small by now, and every rank of it does the rest. On whole
volumes the layers are plain TensorFlow, which can be saved and run without this package. A loss is
one number for each sample, of standardised targets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmoflow.planning.declarations import (
    Convolution,
    Dense,
    Dropout,
    Pool,
    Shrink,
    Stage,
)
from flowpm_dist.cosmology.options import UniformPriors
from meshimpl.compat import mtf
from meshimpl.operations import layers
from meshimpl.operations.layers import convolution, halo_widths, pooled_block
from meshimpl.operations.local import layer

if TYPE_CHECKING:
    from flowpm_dist.cosmoflow.network.network import Network

USUAL_CONVERGENCE = 0.02
"""Typical convergence of lines of sight to galaxies at a redshift of 1; networks see multiples."""

INPUTS: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "density": tf.identity,
    "log1p": lambda density: tf.math.log1p(density) - np.log(2.0),
    "log1p-counts": tf.math.log1p,
    "asinh": lambda density: tf.math.asinh(density - 1),
    "convergence": lambda convergence: convergence / USUAL_CONVERGENCE,
}
"""First functions of the volumes: "log1p" and "asinh" are 0 at the mean density, "log1p-counts" at
0. "asinh" also takes densities below 0, as noise makes them.
"""
SPLIT_CHANNEL = "channel_split"


def mesh_outputs(
    network: Network, volume: Any, held: Sequence[Any], dropping: tuple[Any, Any] | None
) -> tuple[Any, Any, Any]:
    """Returns the outputs, and the features that the first and the last dense layer are given.

    Args:
        network: the layers and their options.
        volume: mesh tensor [batch, x, y, z], or with channels.
        held: kernel and bias of each layer in turn, then shift and scale of the features.
        dropping: seed and sample numbers of dropout; None outside training.

    Returns:
        Mesh tensors [batch, outputs], [batch, features] and [batch, last features].
    """
    *weights, shift, scale = held
    features = hidden = None
    x, rest, split = _prepared(network, volume), iter(weights), _split_sides(volume)
    drops, dropout = 0, network.options.dropout
    for stage in network.stages:
        here = stage.layer
        if split and _too_thin(stage, split, network.options.gather_below):
            x, split = layers.whole(x, list(split)), {}
        if isinstance(here, Convolution):
            kernel, out = next(rest), "channel_out"
            # Renaming adds what is still to be added over ranks, so only where it must split.
            if network.split_channels is not None:
                out = SPLIT_CHANNEL
                kernel = mtf.rename_dimension(kernel, "channel_out", out)
            edges = network.declaration.edges
            x = convolution(x, kernel, stride=here.stride, edges=edges, name=stage.name)
            x = mtf.rename_dimension(x, out, "channel")
        elif isinstance(here, Pool):
            x = layers.pool(x, here.kind, here.size, name=stage.name)
        elif isinstance(here, Shrink):
            x = layers.pool(x, "average", stage.width // here.width, name=stage.name)
        elif isinstance(here, Dense):
            kernel = next(rest)
            x = mtf.reshape(x, mtf.Shape([x.shape[0], kernel.shape[0]]))
            if features is None:
                x = mtf.cast(x, kernel.dtype)  # few numbers from here on
                if network.centre and dropping is not None:
                    # Not the shift and then the mean: a step is the same to the bit whatever the
                    # shift is, which depends on where a training was stopped (`recentre`).
                    shift = mtf.reduce_mean(x, reduced_dim=x.shape[0])
                parts = [x, shift, scale]
                x = layer(lambda y, a, b: (y - a) * b, parts, x.shape, name="scaled")
                features = x
            hidden = x
            x = layers.dense(x, kernel, name=stage.name)
        elif isinstance(here, Dropout) and dropping is not None and dropout:
            drops += 1
            x = layers.dropout(x, dropout, *dropping, drops, name=stage.name)
        if stage.weights is not None:
            x = layers.add_bias(x, next(rest), name=f"{stage.name}_bias")
            if stage is not network.stages[-1]:
                x = layers.leaky_relu(x, network.declaration.slope, name=f"{stage.name}_relu")
    if network.declaration.bounded or network.within is not None:
        x = layer(functools.partial(_limited, network), [x], x.shape, name="bounded")
    return x, features, hidden


def whole_outputs(network: Network, volumes: tf.Tensor) -> tf.Tensor:
    """Returns the outputs for whole volumes, as after training [n, outputs].

    Args:
        network: the layers and their weights.
        volumes: [n, x, y, z], or with channels as a last dimension where there are several.
    """
    weights, flat = iter(network.weights), False
    x = INPUTS[network.input](volumes)
    x = tf.cast(x if network.channels > 1 else x[..., tf.newaxis], network.precision)
    for stage in network.stages:
        here = stage.layer
        if isinstance(here, Convolution):
            kernel = tf.cast(next(weights), x.dtype)
            strides, edges = [1, *[here.stride] * 3, 1], network.declaration.edges
            if edges == "periodic":
                before, after = halo_widths(stage.width, here.kernel, here.stride)
                cells = np.arange(-before, stage.width + after) % stage.width
                for axis in (1, 2, 3):
                    x = tf.gather(x, cells, axis=axis)
            x = tf.nn.conv3d(x, kernel, strides, "SAME" if edges == "zero" else "VALID")
        elif isinstance(here, Pool):
            x = pooled_block(x, here.kind, here.size)
        elif isinstance(here, Shrink):
            x = pooled_block(x, "average", stage.width // here.width)
        elif isinstance(here, Dense):
            kernel = tf.convert_to_tensor(next(weights))
            if not flat:
                flat, features = True, tf.reshape(x, [-1, kernel.shape[0]])
                x = (tf.cast(features, kernel.dtype) - network.shift) * network.scale
            x = tf.matmul(x, kernel)
        if stage.weights is not None:
            x += tf.cast(next(weights), x.dtype)
            if stage is not network.stages[-1]:
                x = tf.nn.leaky_relu(x, network.declaration.slope)
    return _limited(network, x)


def _limited(network: Network, outputs: tf.Tensor) -> tf.Tensor:
    bounded = network.declaration.bounded
    return kept_within(outputs, network.parameters, bounded=bounded, within=network.within)


def _prepared(network: Network, volume: Any) -> Any:
    dims = volume.shape.dims + ([] if network.channels > 1 else [mtf.Dimension("channel", 1)])
    x = layer(INPUTS[network.input], [volume], volume.shape, name="input")
    return mtf.cast(mtf.reshape(x, mtf.Shape(dims)), network.precision)


def _too_thin(stage: Stage, split: Mapping[str, int], gather_below: int) -> bool:
    """Whether a layer had better work on whole volumes than on blocks."""
    here = stage.layer
    if isinstance(here, Dense | Shrink | Dropout):
        return True
    step = here.stride if isinstance(here, Convolution) else here.size
    blocks = [(stage.width // ranks, stage.width % ranks) for ranks in split.values()]
    return any(left or block % step or block < gather_below for block, left in blocks)


def _split_sides(volume: Any) -> dict[str, int]:
    """Sides of a volume [batch, x, y, z, ...] that are split, and over how many ranks."""
    sides = volume.shape.dims[1:4]
    ranks = {dim.name: volume.mesh.impl.ranks_over(dim).size for dim in sides}
    return {side: count for side, count in ranks.items() if count > 1}


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

    The Gaussian of each parameter has the predicted mean and log variance s, softly limited to the
    range +- `LOG_VARIANCE_LIMIT` (Nix and Weigend 1994). For the share, only the prior is known:
    the density of a target is (1 - `DOUBT`) x the Gaussian's + `DOUBT` x 1 / (2 sqrt(3)). The
    constant is the uniform prior's density if targets have a standard deviation of 1, and 0.58 of
    it if they lie between -1 and 1. The result is the mean over the parameters, without ln(2 pi) /
    2. A Gaussian's own tails are so thin that a single volume, ten of its error bars off, would
    dominate a step's loss and gradient. Here no volume's loss is above 4.93, and its gradient goes
    to 0.

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
"""Losses by name: functions (targets, outputs) -> [batch]."""


def split_prediction(loss: str, outputs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | None]:
    """The predicted means, and their standard deviations where the loss trains them, else None.

    Args:
        loss: a name of `LOSSES`.
        outputs: the network's outputs [..., output], see `NetworkOptions.outputs_of`.

    Returns:
        Each [..., parameter], in standardised units.
    """
    if loss != "likelihood":
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
    bounded = BOUND * tf.tanh(means) if within is None else within * tf.tanh(means / within)
    return tf.concat([bounded, outputs[:, parameters:]], axis=1)


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
