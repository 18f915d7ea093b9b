"""The residual network on a mesh: on blocks, with one halo for all its convolutions."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from flowpm_dist.grid.box import Box, cached_on_mesh
from meshimpl.compat import mtf
from meshimpl.mesh_function import MeshFunction
from meshimpl.operations.halo import halo_exchange
from meshimpl.operations.layers import correlated_block
from meshimpl.operations.local import layer


@cached_on_mesh(16)
def network_function(box: Box, channels: int, hidden: int, spacing: float) -> MeshFunction:
    """Returns the function from displacements and velocities to corrected ones.

    Its further inputs are the modulation of the layers and the kernels in order. The modulation of
    a universe has, for each layer in turn, scales less 1 and shifts of all channels; then the
    factor of the result; then the displacement per velocity in linear growth [1/H0], the unit of
    velocities in the network.

    Args:
        box: the box of one universe, or of a batch.
        channels: the channels of each layer.
        hidden: the number of convolutions between the first and the last one.
        spacing: the particles' spacing [Mpc/h], the unit of displacements in the network.
    """
    vector, layers = box.vector_shape, hidden + 1
    size = 2 * channels * layers + 2
    modulation = mtf.Shape([*box.number_shape.dims, mtf.Dimension("modulation", size)])
    kernel = [mtf.Dimension(name, 3) for name in "ijk"]
    sizes = {"component": 6, "channel": channels, "channel_next": channels, "added": 6}
    first, inner, middle, last = (mtf.Dimension(name, n) for name, n in sizes.items())
    shapes = {
        "first": mtf.Shape([*kernel, first, inner]),
        **{f"hidden_{n}": mtf.Shape([*kernel, inner, middle]) for n in range(hidden)},
        "last": mtf.Shape([*kernel, inner, last]),
    }
    batch = mtf.Dimension("batch", box.batch or 1)

    def build(_: Any, *inputs: Any) -> list[Any]:
        displacement, velocity, modulated, *kernels = inputs
        space = displacement.shape.dims[-4:-1]
        joined = functools.partial(_joined, spacing=spacing)
        shape = mtf.Shape([batch, *space, first])
        x = layer(joined, [displacement, velocity, modulated], shape, name="joined")
        # Each convolution takes a plane off again, which costs less than a halo for each.
        x = halo_exchange(x, {dim.name: len(kernels) for dim in space})
        shape = mtf.Shape([batch, *space, last])
        x = layer(_convolved, [x, modulated, *kernels], shape, name="convolved")
        return [
            layer(
                functools.partial(_moved, spacing=spacing, of_velocity=of_velocity),
                [field, x, modulated],
                vector,
                name="moved",
            )
            for of_velocity, field in enumerate((displacement, velocity))
        ]

    return box.function(
        build, displacement=vector, velocity=vector, modulation=modulation, **shapes
    )


def _joined(
    displacement: tf.Tensor, velocity: tf.Tensor, modulation: tf.Tensor, *, spacing: float
) -> tf.Tensor:
    """Returns both fields as six channels [universe, x, y, z, 6], in units of the spacing."""
    s, v = (tf.reshape(field, [-1, *field.shape[-4:]]) for field in (displacement, velocity))
    return tf.concat([s, v * _per_universe(modulation[..., -1:])], axis=-1) / spacing


def _moved(
    y: tf.Tensor, out: tf.Tensor, modulation: tf.Tensor, *, spacing: float, of_velocity: int
) -> tf.Tensor:
    """Returns the displacement, or the velocity, plus the network's result."""
    factor, pace = (_per_universe(modulation[..., n, tf.newaxis]) for n in (-2, -1))
    scale = spacing * (factor / pace if of_velocity else factor)
    added = scale * tf.split(out, 2, axis=-1)[of_velocity]
    return y + tf.reshape(added, y.shape)


def _convolved(x: tf.Tensor, modulation: tf.Tensor, *kernels: tf.Tensor) -> tf.Tensor:
    """Returns the result of all convolutions of a block with a halo."""
    first, *inner, last = (tf.cast(weights, x.dtype) for weights in kernels)
    x = correlated_block(x, first)
    for n, weights in enumerate(inner):
        y = correlated_block(_modulated(x, modulation, n), weights)
        # A strided slice of volumes crashes TensorFlow's optimizer of layouts for GPUs.
        x = tf.slice(x, [0, 1, 1, 1, 0], y.shape) + y
    return correlated_block(_modulated(x, modulation, len(inner)), last)


def _modulated(x: tf.Tensor, modulation: tf.Tensor, number: int) -> tf.Tensor:
    """Returns a layer, modulated and activated; its number is among those that are."""
    size = 2 * x.shape[-1]
    both = modulation[..., number * size : (number + 1) * size]
    scale, shift = (_per_universe(each) for each in tf.split(both, 2, axis=-1))
    return _swish(x, scale, shift)


def _per_universe(numbers: tf.Tensor) -> tf.Tensor:
    """Returns numbers of each universe [..., n] as factors of blocks [universe, x, y, z, n]."""
    return tf.reshape(numbers, [-1, 1, 1, 1, numbers.shape[-1]])


@tf.function(jit_compile=True, autograph=False)
def _swish(x: tf.Tensor, scale: tf.Tensor, shift: tf.Tensor) -> tf.Tensor:
    """Returns y sigmoid(y) of y = (1 + scale) x + shift."""
    y = x + scale * x + shift
    return y * tf.sigmoid(y)
