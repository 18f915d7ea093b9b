"""The layers of the residual network on a mesh: on blocks, with halos of one cell."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from flowpm_dist.grid.box import Box, cached_on_mesh
from meshimpl.compat import mtf
from meshimpl.mesh_function import MeshFunction
from meshimpl.operations.layers import convolution
from meshimpl.operations.local import layer


@cached_on_mesh(16)
def network_function(
    box: Box, channels: int, hidden: int, spacing: float, velocities: bool
) -> MeshFunction:
    """Returns the function from displacements, or displacements and velocities, to corrected ones.

    Its further inputs are the modulation of the layers and the kernels in order. The modulation of
    a universe has, for each layer in turn, scales less 1 and shifts of all channels, and their
    rates of change; then the factor of the result, and its rate.

    Args:
        box: the box of one universe, or of a batch.
        channels: the channels of each layer.
        hidden: the number of convolutions between the first and the last one.
        spacing: the particles' spacing [Mpc/h], the unit of displacements in the network.
        velocities: whether rates of change go through the layers with the values. The last kernel
            then has three components more, of what is added to velocities alone.
    """
    vector, layers, count = box.vector_shape, hidden + 1, 1 + velocities
    size = 4 * channels * layers + 2
    modulation = mtf.Shape([*box.number_shape.dims, mtf.Dimension("modulation", size)])
    kernel = [mtf.Dimension(name, 3) for name in "ijk"]
    first, inner, middle = (
        mtf.Dimension(name, n)
        for name, n in (("component", 3), ("channel", channels), ("channel_next", channels))
    )
    last = mtf.Dimension("added", 3 * count)
    shapes = {
        "first": mtf.Shape([*kernel, first, inner]),
        **{f"hidden_{n}": mtf.Shape([*kernel, inner, middle]) for n in range(hidden)},
        "last": mtf.Shape([*kernel, inner, last]),
    }
    # Values, and then their rates of change, on each rank.
    batch = mtf.Dimension("batch", count * (box.batch or 1))

    def build(_: Any, *inputs: Any) -> list[Any]:
        fields, modulated, kernels = inputs[:count], inputs[count], inputs[count + 1 :]
        space = fields[0].shape.dims[-4:-1]
        joined = functools.partial(_joined, spacing=spacing)
        x = layer(joined, fields, mtf.Shape([batch, *space, first]), name="joined")
        x = convolution(x, kernels[0], name="first")
        for n, weights in enumerate(kernels[1:-1]):
            y = _activated(x, modulated, n, channels, count)
            y = convolution(y, weights, name=f"hidden_{n}")
            x = layer(lambda a, b: a + b, [x, y], x.shape, name="added")
        x = _activated(x, modulated, hidden, channels, count)
        x = convolution(x, kernels[-1], name="last")
        added = (
            functools.partial(_moved, spacing=spacing, count=count, rate=n) for n in range(count)
        )
        return [
            layer(function, [field, x, modulated], vector, name="moved")
            for function, field in zip(added, fields, strict=True)
        ]

    fields = {"displacement": vector, **({"velocity": vector} if velocities else {})}
    return box.function(build, **fields, modulation=modulation, **shapes)


def _joined(*fields: tf.Tensor, spacing: float) -> tf.Tensor:
    """Returns the fields one after the other [universe, x, y, z, 3], in units of the spacing."""
    return tf.concat([tf.reshape(s, [-1, *s.shape[-4:]]) for s in fields], axis=0) / spacing


def _moved(
    y: tf.Tensor, out: tf.Tensor, modulation: tf.Tensor, *, spacing: float, count: int, rate: int
) -> tf.Tensor:
    """Returns the displacement, or the velocity, plus the network's result."""
    value, *change = tf.split(out, count, axis=0)
    factor, slope = (_per_universe(modulation[..., n, tf.newaxis]) for n in (-2, -1))
    value = value[..., :3]
    if rate:
        displaced, alone = tf.split(change[0], 2, axis=-1)
        added = factor * (displaced + alone) + slope * value
    else:
        added = factor * value
    return y + spacing * tf.reshape(added, y.shape)


def _activated(x: Any, modulation: Any, number: int, channels: int, count: int) -> Any:
    """Returns a modulated and activated layer, and its rate of change."""
    function = functools.partial(_modulated, number=number, channels=channels, count=count)
    return layer(function, [x, modulation], x.shape, name=f"activated_{number}")


def _modulated(
    x: tf.Tensor, modulation: tf.Tensor, *, number: int, channels: int, count: int
) -> tf.Tensor:
    begin = 4 * channels * number
    four = tf.split(modulation[..., begin : begin + 4 * channels], 4, axis=-1)
    return _swish(tf.split(x, count, axis=0), [_per_universe(each) for each in four])


def _per_universe(numbers: tf.Tensor) -> tf.Tensor:
    """Returns numbers of each universe [..., n] as factors of blocks [universe, x, y, z, n]."""
    return tf.reshape(numbers, [-1, 1, 1, 1, numbers.shape[-1]])


@tf.function(jit_compile=True, autograph=False)
def _swish(fields: Sequence[tf.Tensor], modulation: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns y sigmoid(y) of y = (1 + scale) x + shift, and then its rate of change if known."""
    scale, shift, scale_rate, shift_rate = modulation
    value, *change = fields
    y = value + scale * value + shift
    gate = tf.sigmoid(y)
    results = [y * gate]
    if change:
        dy = change[0] + scale * change[0] + scale_rate * value + shift_rate
        results.append(gate * (1.0 + y * (1.0 - gate)) * dy)
    return tf.concat(results, axis=0)
