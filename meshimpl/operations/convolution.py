"""3-D convolution of volumes that are split over ranks along any of their sides.

A cell of the result needs `before` cells before and `after` cells behind it. Where a side is split,
they come from the neighbours' blocks. In the backward pass their gradients return to the owners and
are added there. The local computation is TensorFlow's own convolution (oneDNN, cuDNN).
"""

from __future__ import annotations

from typing import Any, Literal

import tensorflow as tf

from meshimpl.compat import mtf
from meshimpl.operations.halo import halo_exchange
from meshimpl.operations.local import layer

Padding = Literal["periodic", "zero", "valid"]
PADDINGS = ("periodic", "zero", "valid")


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
            `out` may be split. Its dtype may differ from that of `x`, which is used in computing.
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
        _check_blocks(dim, stride, edges, x.mesh.impl, name)
        if edges == "valid":
            results.append(mtf.Dimension(dim.name, (dim.size - k.size) // stride + 1))
        else:
            widths[dim.name] = halo_widths(dim.size, k.size, stride)
            results.append(mtf.Dimension(dim.name, -(-dim.size // stride)))
    if min(d.size for d in results) < 1:
        raise ValueError(f"{name}: a volume {x.shape} is smaller than the kernel {filters.shape}")
    padded = x if edges == "valid" else halo_exchange(x, widths, edges, name=f"{name}_halo")
    strides = [1, stride, stride, stride, 1]

    def correlate(volume: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        return tf.nn.conv3d(volume, tf.cast(weights, volume.dtype), strides, "VALID")

    return layer(correlate, [padded, filters], mtf.Shape([batch, *results, out]), name=name)


def _check_blocks(dim: Any, stride: int, edges: str, impl: Any, name: str) -> None:
    ranks = impl.ranks_over(dim).size
    if ranks == 1:
        return
    if edges == "valid":
        raise ValueError(f"{name}: {dim.name} is split over {ranks} ranks; valid edges need all")
    if dim.size // ranks % stride:
        raise ValueError(
            f"{name}: blocks of {dim.size // ranks} cells along {dim.name} do not divide by the "
            f"stride {stride}"
        )
