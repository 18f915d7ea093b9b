"""Layers of networks on volumes that are split over ranks along any of their sides.

A convolution takes the cells that it needs from the neighbours' blocks, and in the backward pass
their gradients return to the owners and are added there. The local computation is TensorFlow's own
(oneDNN, cuDNN). Pooling, bias, activation, dense layers and dropout work on the rank's block only;
`whole` gathers split dimensions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

import tensorflow as tf

from meshimpl.collectives import Communicator
from meshimpl.compat import mtf
from meshimpl.operations.halo import halo_exchange, pad_axis
from meshimpl.operations.local import layer

Padding = Literal["periodic", "zero", "valid"]
PADDINGS = ("periodic", "zero", "valid")
POOLS = ("average", "max")
_ALONE = Communicator((0,), 0)


def halo_widths(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """Returns the cells before and after a side of `size` for ceil(size / stride) cells out.

    If their number is odd, one more cell is added after the side, as in TensorFlow's padding SAME.
    """
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


def convolution(
    x: Any,
    filters: Any,
    *,
    stride: int = 1,
    edges: Padding = "periodic",
    name: str = "convolution",
) -> Any:
    """Returns the cross-correlation of volumes with a kernel, as in convolutional networks.

    Args:
        x: mtf tensor [batch, x, y, z, channel], with any names; all but the channel may be split.
        filters: mtf tensor [., ., ., channel, out] with three more dimensions of any names; only
            `out` may be split. They are cast to the dtype of `x`.
        stride: the stride along each side, at least 1.
        edges: "periodic"; "zero" beyond the edges of the volume; or "valid": cells whose kernel
            would reach beyond the edges are left out, and no side may be split.
        name: the name of the operation.

    Returns:
        mtf tensor [batch, x, y, z, out], with sides of ceil(n / stride) for "periodic" and "zero".

    Raises:
        ValueError: if shapes do not fit, a side is split with "valid", or the stride does not
            divide the blocks of a split side.
    """
    if edges not in PADDINGS:
        raise ValueError(f"edges {edges!r} is not one of {', '.join(map(repr, PADDINGS))}")
    batch, *sides, channel = x.shape.dims
    *kernel, incoming, out = filters.shape.dims
    if incoming != channel or len(sides) != 3 or len(kernel) != 3:
        raise ValueError(f"{name}: filters {filters.shape} do not fit a tensor {x.shape}")
    widths, results = {}, []
    for dim, k in zip(sides, kernel, strict=True):
        if edges == "valid":
            if (ranks := x.mesh.impl.ranks_over(dim).size) > 1:
                raise ValueError(
                    f"{name}: {dim.name} is split over {ranks} ranks; valid edges need all"
                )
            results.append(mtf.Dimension(dim.name, (dim.size - k.size) // stride + 1))
        else:
            _check_blocks(x, dim, stride, f"the stride {stride}", name)
            widths[dim.name] = halo_widths(dim.size, k.size, stride)
            results.append(mtf.Dimension(dim.name, -(-dim.size // stride)))
    if min(d.size for d in results) < 1:
        raise ValueError(f"{name}: a volume {x.shape} is smaller than the kernel {filters.shape}")
    padded = x if edges == "valid" else halo_exchange(x, widths, edges)

    def correlate(volume: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        return correlated_block(volume, tf.cast(weights, volume.dtype), stride)

    return layer(correlate, [padded, filters], mtf.Shape([batch, *results, out]), name=name)


def correlated_block(volume: tf.Tensor, weights: tf.Tensor, stride: int = 1) -> tf.Tensor:
    """Returns `convolution` of a tensor of one rank, without what lies beyond the edges.

    On CPUs the gradient at stride 1 is made of matrix products and of another correlation:
    TensorFlow's own takes several times as long where channels are few.

    Args:
        volume: [batch, x, y, z, channel].
        weights: [., ., ., channel, out], of the same dtype.
        stride: the stride along each side.
    """
    gpu = bool(tf.config.get_visible_devices("GPU"))
    if stride == 1 and not gpu and volume.dtype in (tf.float32, tf.float64):
        return _correlated(volume, weights)
    return tf.nn.conv3d(volume, weights, [1, stride, stride, stride, 1], "VALID")


@tf.custom_gradient
def _correlated(volume: tf.Tensor, weights: tf.Tensor) -> tuple[tf.Tensor, Any]:
    ones, kernel = [1] * 5, weights.shape.as_list()

    def by_volume(dy: tf.Tensor) -> tf.Tensor:
        if kernel[3] < 8 or kernel[4] > 32:  # where TensorFlow is not slower
            sizes = tf.constant(volume.shape.as_list())
            return tf.raw_ops.Conv3DBackpropInputV2(
                input_sizes=sizes, filter=weights, out_backprop=dy, strides=ones, padding="VALID"
            )
        for axis, size in enumerate(kernel[:3], start=1):
            dy = pad_axis(dy, axis, (size - 1, size - 1), _ALONE, "zero")
        flipped = tf.transpose(tf.reverse(weights, [0, 1, 2]), [0, 1, 2, 4, 3])
        return tf.nn.conv3d(dy, flipped, ones, "VALID")

    def by_weights(dy: tf.Tensor) -> tf.Tensor:
        rows = tf.reshape(dy, [-1, kernel[4]])
        products: list[tf.Tensor] = []
        for corner in itertools.product(*map(range, kernel[:3])):
            # One after the other: each has a copy of the volume.
            with tf.control_dependencies(products[-1:]):
                cells = tf.slice(volume, [0, *corner, 0], [*dy.shape[:4], kernel[3]])
            cells = tf.reshape(cells, [-1, kernel[3]])
            products.append(tf.matmul(cells, rows, transpose_a=True))
        return tf.reshape(tf.stack(products), kernel)

    def gradient(dy: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return by_volume(dy), by_weights(dy)

    return tf.nn.conv3d(volume, weights, ones, "VALID"), gradient


def _check_blocks(x: Any, dim: Any, size: int, what: str, name: str) -> None:
    ranks = x.mesh.impl.ranks_over(dim).size
    if ranks > 1 and dim.size // ranks % size:
        raise ValueError(
            f"{name}: blocks of {dim.size // ranks} cells along {dim.name} do not divide by {what}"
        )


def pool(x: Any, kind: Literal["average", "max"], size: int, *, name: str = "pool") -> Any:
    """Returns one value for each cube of `size` cells a side.

    Cells left over at the end of a side are dropped.

    Args:
        x: mtf tensor [batch, x, y, z, channel].
        kind: "average" or "max".
        size: the side of the cubes [cells].
        name: the name of the operation.

    Raises:
        ValueError: if the kind is another one, or `size` does not divide the blocks of a split
            side.
    """
    if kind not in POOLS:
        raise ValueError(f"pool {kind!r} is not one of {', '.join(map(repr, POOLS))}")
    batch, *sides, channel = x.shape.dims
    for dim in sides:
        _check_blocks(x, dim, size, str(size), name)
    smaller = [mtf.Dimension(dim.name, dim.size // size) for dim in sides]
    shape = mtf.Shape([batch, *smaller, channel])
    return layer(lambda block: pooled_block(block, kind, size), [x], shape, name=name)


def pooled_block(x: tf.Tensor, kind: str, size: int) -> tf.Tensor:
    """Returns `pool` of a tensor of one rank [batch, x, y, z, channel]."""
    if x.dtype != tf.float64:
        function = {"average": tf.nn.avg_pool3d, "max": tf.nn.max_pool3d}[kind]
        return function(x, size, size, "VALID")
    # TensorFlow has no pooling kernels for float64, which tests of gradients need. Strided slices
    # would crash its layout optimizer where there is a GPU.
    reduce = {"average": tf.reduce_mean, "max": tf.reduce_max}[kind]
    *sides, channels = x.shape.as_list()[1:]  # an exported network's batch has no known size
    smaller = [n // size for n in sides]
    x = tf.slice(x, [0] * 5, [-1, *(n * size for n in smaller), channels])
    for axis in range(3):
        behind = math.prod(n * size for n in smaller[axis + 1 :]) * channels
        x = reduce(tf.reshape(x, [-1, size, behind]), axis=1)
    return tf.reshape(x, [-1, *smaller, channels])


def add_bias(x: Any, bias: Any, *, name: str = "bias") -> Any:
    """Adds a number to each channel.

    Args:
        x: mtf tensor [..., channel].
        bias: mtf tensor [channel], of any floating dtype.
        name: the name of the operation.
    """
    return layer(_with_bias, [x, bias], x.shape, name=name)


@tf.custom_gradient
def _with_bias(block: tf.Tensor, bias: tf.Tensor) -> tuple[tf.Tensor, Any]:
    def gradient(dy: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        if dy.dtype != tf.bfloat16:
            return dy, tf.cast(tf.raw_ops.BiasAddGrad(out_backprop=dy), bias.dtype)
        # TensorFlow's sum over all cells is made in bfloat16; a matrix product's is not.
        rows = tf.reshape(dy, [-1, dy.shape[-1]])
        total = tf.matmul(tf.ones([1, rows.shape[0]], dy.dtype), rows)
        return dy, tf.cast(total[0], bias.dtype)

    return tf.nn.bias_add(block, tf.cast(bias, block.dtype)), gradient


def leaky_relu(x: Any, slope: float, *, name: str = "leaky_relu") -> Any:
    """Returns x where it is positive, and slope x where it is not."""
    return layer(lambda block: tf.nn.leaky_relu(block, slope), [x], x.shape, name=name)


def dense(x: Any, weights: Any, *, name: str = "dense") -> Any:
    """Returns the matrix product of features and weights, mtf tensor [batch, units].

    Args:
        x: mtf tensor [batch, features].
        weights: mtf tensor [features, units], of any floating dtype.
        name: the name of the operation.
    """
    return layer(
        lambda block, w: tf.matmul(block, tf.cast(w, block.dtype)),
        [x, weights],
        mtf.Shape([x.shape[0], weights.shape[1]]),
        name=name,
    )


def dropout(
    x: Any, rate: float, seed: Any, samples: Any, number: int, *, name: str = "dropout"
) -> Any:
    """Sets a share of the features to zero and scales the others to keep the mean.

    The choice depends on the seed, the layer and the sample. So it is the same on all ranks that
    work on a sample, and differs between samples.

    Args:
        x: mtf tensor [batch, features], of which only the batch may be split.
        rate: the share that is dropped, from 0 to below 1.
        seed: int64 mtf tensor [], which must differ between steps.
        samples: int64 mtf tensor [batch], the number of each sample.
        number: the number of the layer.
        name: the name of the operation.
    """
    batch, features = x.shape.dims

    def drop(block: tf.Tensor, step: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
        keys = [tf.stack([step, (number << 40) + i]) for i in tf.unstack(ids)]
        draws = [tf.random.stateless_uniform([features.size], key) for key in keys]
        mask = tf.cast(tf.stack(draws) >= rate, block.dtype)
        return block * mask / (1 - rate)

    return layer(drop, [x, seed, samples], mtf.Shape([batch, features]), name=name)


def whole(x: Any, names: Sequence[str]) -> Any:
    """Gathers split dimensions on every rank, under the names `<name>_whole`."""
    for name in names:
        x = mtf.rename_dimension(x, name, f"{name}_whole")
    return x
