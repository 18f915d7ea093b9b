"""3-D convolution of volumes that are split over ranks along any of their sides.

A cell of the result needs `before` cells before and `after` cells behind it; where a side is split
they come from the neighbours' blocks, and on the way back their gradients return to their owners
and are added there. The local work is TensorFlow's own convolution (oneDNN, cuDNN).
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
    """Cells before and after a side of `size` that give ceil(size / stride) cells of the result.

    The even share goes before, the rest after, as in TensorFlow's padding SAME.
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
    """Cross-correlation of volumes with a kernel, as networks have it.

    Args:
        x: mtf tensor [batch, x, y, z, channel], whatever the names; any but the channel may be
            split.
        filters: mtf tensor [., ., ., channel, out] of three more dimensions of any names; `out`
            alone may be split. Its dtype may differ from that of `x`, which is worked in.
        stride: 1 or more, along each side.
        edges: the volume is "periodic", or zero beyond its edges, or "valid": no cell whose kernel
            would reach beyond them; then no side may be split.
        name: of the operation.

    Returns:
        mtf tensor [batch, x, y, z, out]; periodic and zero: sides of ceil(n / stride).

    Raises:
        ValueError: shapes that do not fit, a split side with "valid", or one whose blocks the
            stride does not divide.
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
