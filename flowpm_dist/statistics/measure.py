"""The means of the products of one or two fields in bins of wavenumber."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box, check_same_box
from flowpm_dist.grid.caches import cached_on_mesh
from flowpm_dist.grid.field import Field
from flowpm_dist.grid.fourier import to_spectrum
from flowpm_dist.statistics.bins import BinChoice, Binning, binning, contents
from flowpm_dist.statistics.interlacing import interlace
from flowpm_dist.statistics.mode_sums import ModeSums, Weights
from meshimpl.compat import mtf
from meshimpl.mesh_function import MeshFunction
from meshimpl.process_mesh import ProcessMesh

Window = Literal["cic"] | None
"""The window of the painting that made a field, which is divided out of its modes."""


@dataclass(frozen=True)
class Sample:
    """A field as it was sampled.

    Attributes:
        block: this rank's block [..., x, y, z].
        window: "cic" if its modes are to be divided by the cloud-in-cell window.
        shifted: the block of the density of the particles moved by half a cell along each axis.

    Raises:
        ValueError: if the window is unknown.
    """

    block: tf.Tensor
    window: Window = None
    shifted: tf.Tensor | None = None

    def __post_init__(self) -> None:
        if self.window not in (None, "cic"):
            raise ValueError(f"window {self.window!r}: 'cic' or None")


def sum_over_cells(
    local: Callable[[tf.Tensor], tf.Tensor], field: Any, box: Box, outputs: Any, name: str
) -> Any:
    """Lowers the sums over the cells of each universe of what every rank finds in its block.

    Args:
        local: the sums over a rank's block, [..., output] in float64, of the block [..., x, y, z].
        field: a mesh tensor over the box's cells, of one or more numbers in each.
        box: of the field.
        outputs: the dimension of the sums.
        name: of the operation.

    Returns:
        The mesh tensor [universe, output] in the field's dtype, whole on the ranks of a universe.
    """
    each_rank = [mtf.Dimension(axis, box.split[axis]) for axis in "xy"]
    partial = mtf.Shape([*box.number_shape.dims, *each_rank, outputs])
    sums = mtf.slicewise(
        lambda block: tf.reshape(local(block), box.impl.slice_shape(partial)),
        [field],
        output_shape=partial,
        output_dtype=tf.float64,
        splittable_dims=partial.dims[:-1] + box.shape.dims,
        name=name,
    )
    total = mtf.reduce_sum(sums, output_shape=mtf.Shape([*box.number_shape.dims, outputs]))
    return mtf.cast(total, field.dtype)


@cached_on_mesh(16)
def _function(box: Box, weights: Weights, interlaced: tuple[bool, ...]) -> MeshFunction:
    def build(_: Any, *fields: Any) -> Any:
        rest = iter(fields)
        spectra = []
        for twice in interlaced:
            spectrum = to_spectrum(next(rest))
            spectra.append(interlace(spectrum, to_spectrum(next(rest)), box) if twice else spectrum)
        return ModeSums(spectra, box, weights).outputs[0]

    names = [
        name
        for i, twice in enumerate(interlaced)
        for name in ([f"field{i}", f"shifted{i}"] if twice else [f"field{i}"])
    ]
    return box.function(build, **dict.fromkeys(names, box.shape))


def mode_means(
    samples: Sequence[Sample],
    box: Box,
    orders: tuple[int, ...] = (0,),
    axis: int = 2,
    bins: BinChoice | Binning = None,
) -> tf.Tensor:
    """Returns the means over the modes of each bin, times the volume [(Mpc/h)^3], differentiable.

    Args:
        samples: one field, or two of the same box.
        box: the box of the fields.
        orders: the orders l of the Legendre weights (2 l + 1) L_l(mu).
        axis: the axis of the line of sight.
        bins: as for `power_spectrum`.

    Returns:
        The means [..., product, order, bin] in the box's dtype, for the universes of which this
        rank has a block. The products are |a|^2, or |a|^2, |b|^2 and Re a b*. Means of a bin
        without modes are NaN, with a gradient of 0.

    Raises:
        ValueError: bins that are not allowed, or without any mode.
    """
    bins = binning(bins, box)
    weights = Weights(bins, tuple(s.window is not None for s in samples), orders, axis)
    _, _, modes = contents(box, bins)
    function = _function(box, weights, tuple(s.shifted is not None for s in samples))
    blocks = [b for s in samples for b in (s.block, s.shifted) if b is not None]
    means = function(*blocks) * tf.constant(
        box.volume / box.cells**2 / np.maximum(modes, 1), box.dtype
    )
    return means if modes.all() else means + tf.constant(np.where(modes, 0, np.nan), box.dtype)


def whole(means: tf.Tensor, box: Box) -> np.ndarray:
    """Gathers the means of all universes on every rank, in float64."""
    trailing = means.shape[len(box.local_batch) :]
    dims = [mtf.Dimension(f"axis{i}", n) for i, n in enumerate(trailing)]
    return box.whole(means, mtf.Shape(box.number_shape.dims + dims)).astype(np.float64)


def box_of(field: Any, box_size: Any) -> tuple[Box, tf.Tensor]:
    """Returns the box and the block of a `Field`, or of a whole array on one rank.

    Raises:
        ValueError: if the field is not scalar, an array has no box_size, or box_size is not the
            field's own.
    """
    if isinstance(field, Field):
        box, block = field.box, field.block
        given = np.broadcast_to(np.asarray(box.size if box_size is None else box_size, float), (3,))
        if not np.allclose(given, box.size):
            raise ValueError(f"box_size {tuple(given)} is not that of the field, {box.size}")
        if block.shape.rank != len(box.shape):
            raise ValueError(f"a scalar field is needed, got blocks of shape {block.shape}")
        return box, block
    block = tf.convert_to_tensor(field)
    if block.shape.rank != 3:
        raise ValueError(f"a scalar field [x, y, z] is needed, got shape {block.shape}")
    if box_size is None:
        raise ValueError("an array has no box of its own: box_size [Mpc/h] is needed")
    x, y, z = (float(s) for s in np.broadcast_to(np.asarray(box_size, float), (3,)))
    nx, ny, nz = block.shape.as_list()
    return Box((nx, ny, nz), (x, y, z), ProcessMesh("row:1,col:1"), block.dtype), block


def located(
    field: Any, box: Box | None, window: Window = None, interlaced: Any = None
) -> tuple[Box, Sample]:
    """Returns the box and the sample of a `Field`, or of a block whose box is given.

    Args:
        field: a `Field`, or this rank's block [..., x, y, z].
        box: of a block; may be None for a `Field`.
        window: of the sample.
        interlaced: the field of the shifted particles, given as `field` is; or None.

    Raises:
        ValueError: a block without a box, or a `Field` that is not scalar or of another box.
    """
    if box is None:
        if not isinstance(field, Field):
            raise ValueError(
                "a block has no box of its own: give a Field, or the block and its box"
            )
        box = field.box
    shifted = None if interlaced is None else _block_on(box, interlaced)
    return box, Sample(_block_on(box, field), window, shifted)


def _block_on(box: Box, field: Any) -> tf.Tensor:
    if not isinstance(field, Field):
        return field
    check_same_box(box, field.box, "the fields")
    return box_of(field, None)[1]


def sample_of(
    field: Any, box_size: Any, window: Window = None, interlaced: Any = None
) -> tuple[Box, Sample]:
    """Returns the box of a field, and its sample with that of the shifted particles.

    Raises:
        ValueError: see `box_of`; also if the two are not on the same box.
    """
    box, block = box_of(field, box_size)
    if interlaced is None:
        return box, Sample(block, window)
    shifted_box, shifted = box_of(interlaced, box_size)
    check_same_box(box, shifted_box, "the field and its interlaced one")
    return box, Sample(block, window, shifted)
