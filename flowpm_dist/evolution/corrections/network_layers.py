"""The layers of the residual network on a mesh: on blocks, with halos of one cell."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from flowpm_dist.grid.box import Box, cached_on_mesh
from meshimpl.compat import mtf
from meshimpl.mesh_function import MeshFunction
from meshimpl.operations.layers import convolution
from meshimpl.operations.local import layer


@cached_on_mesh(16)
def network_function(box: Box, channels: int, hidden: int, spacing: float) -> MeshFunction:
    """Returns the function from displacement and velocity to those with what is missing.

    Its further inputs are the modulation of the layers and the kernels in order. The modulation of
    a universe has, for each layer in turn, scales less 1 and shifts of all channels, and their
    rates of change; then the factor of the result, and its rate.

    Args:
        box: the box of one universe, or of a batch.
        channels: of each layer.
        hidden: the number of convolutions between the first and the last one.
        spacing: of the particles [Mpc/h], the unit of displacements in the network.
    """
    vector, layers = box.vector_shape, hidden + 1
    size = 4 * channels * layers + 2
    modulation = mtf.Shape([*box.number_shape.dims, mtf.Dimension("modulation", size)])
    kernel = [mtf.Dimension(name, 3) for name in "ijk"]
    first, inner, middle = (
        mtf.Dimension(name, n)
        for name, n in (("component", 3), ("channel", channels), ("channel_next", channels))
    )
    shapes = {
        "first": mtf.Shape([*kernel, first, inner]),
        **{f"hidden_{n}": mtf.Shape([*kernel, inner, middle]) for n in range(hidden)},
        "last": mtf.Shape([*kernel, inner, first]),
    }
    # Values and their rates of change, one after the other on each rank.
    both = mtf.Dimension("batch", 2 * (box.batch or 1))

    def build(_: Any, s: Any, v: Any, modulated: Any, *kernels: Any) -> tuple[Any, Any]:
        space = s.shape.dims[-4:-1]
        joined = functools.partial(_joined, spacing=spacing)
        x = layer(joined, [s, v], mtf.Shape([both, *space, first]), name="joined")
        x = convolution(x, kernels[0], name="first")
        for n, weights in enumerate(kernels[1:-1]):
            y = _activated(x, modulated, n, channels)
            y = convolution(y, weights, name=f"hidden_{n}")
            x = layer(lambda a, b: a + b, [x, y], x.shape, name="added")
        x = _activated(x, modulated, hidden, channels)
        x = convolution(x, kernels[-1], name="last")
        moved = [
            layer(
                functools.partial(_moved, spacing=spacing, rate=rate),
                [y, x, modulated],
                vector,
                name="moved",
            )
            for rate, y in enumerate((s, v))
        ]
        return moved[0], moved[1]

    return box.function(
        build, displacement=vector, velocity=vector, modulation=modulation, **shapes
    )


def _joined(s: tf.Tensor, v: tf.Tensor, *, spacing: float) -> tf.Tensor:
    """Returns displacement and velocity [2 universes, x, y, z, 3], in units of the spacing."""
    shape = [-1, *s.shape[-4:]]
    return tf.concat([tf.reshape(s, shape), tf.reshape(v, shape)], axis=0) / spacing


def _moved(
    y: tf.Tensor, out: tf.Tensor, modulation: tf.Tensor, *, spacing: float, rate: int
) -> tf.Tensor:
    """Returns the displacement, or the velocity, with what the network gives."""
    value, change = tf.split(out, 2, axis=0)
    factor, slope = (_per_universe(modulation[..., n, tf.newaxis]) for n in (-2, -1))
    added = factor * change + slope * value if rate else factor * value
    return y + spacing * tf.reshape(added, y.shape)


def _activated(x: Any, modulation: Any, number: int, channels: int) -> Any:
    """Returns a modulated and activated layer, with its rate of change."""
    function = functools.partial(_modulated, number=number, channels=channels)
    return layer(function, [x, modulation], x.shape, name=f"activated_{number}")


def _modulated(x: tf.Tensor, modulation: tf.Tensor, *, number: int, channels: int) -> tf.Tensor:
    begin = 4 * channels * number
    four = tf.split(modulation[..., begin : begin + 4 * channels], 4, axis=-1)
    return _compiled(x, *map(_per_universe, four))


def _per_universe(numbers: tf.Tensor) -> tf.Tensor:
    """Returns numbers of each universe [..., n] as factors of blocks [universe, x, y, z, n]."""
    return tf.reshape(numbers, [-1, 1, 1, 1, numbers.shape[-1]])


def _swish(
    x: tf.Tensor, scale: tf.Tensor, shift: tf.Tensor, scale_rate: tf.Tensor, shift_rate: tf.Tensor
) -> tf.Tensor:
    """Returns y sigmoid(y) of y = (1 + scale) x + shift, and after it its rate of change."""
    value, change = tf.split(x, 2, axis=0)
    y = value + scale * value + shift
    dy = change + scale * change + scale_rate * value + shift_rate
    gate = tf.sigmoid(y)
    return tf.concat([y * gate, gate * (1.0 + y * (1.0 - gate)) * dy], axis=0)


_compiled: Callable[..., tf.Tensor] = tf.function(_swish, jit_compile=True, autograph=False)
