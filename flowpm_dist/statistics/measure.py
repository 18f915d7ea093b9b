"""The means of the products of one or two fields in bins of wavenumber."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box, cached_on_mesh, check_same_box
from flowpm_dist.grid.field import Field
from flowpm_dist.grid.fourier import Kernel, filter_imaginary, filter_real, to_spectrum
from flowpm_dist.statistics.bins import BinChoice, Binning, binning, contents
from flowpm_dist.statistics.mode_sums import Weights, mode_sums
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
        window: "cic" to divide its modes by the cloud-in-cell window; else None.
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
    """Lowers sums over the cells of each universe.

    Args:
        local: takes a rank's block [..., x, y, z]; returns the sums over it, float64 [..., output].
        field: a mesh tensor over the box's cells, with one or more numbers in each cell.
        box: the field's box.
        outputs: the dimension of the sums.
        name: the operation's name.

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


def interlace(spectrum: Any, shifted: Any, box: Box) -> Any:
    """Returns (delta_1 + exp(+i k.h/2) delta_2) / 2, with h the cell.

    The leading aliases of two paintings half a cell apart cancel (Sefusatti, Crocce, Scoccimarro
    and Couchman 2016, arXiv:1512.07295).

    With the transform's exp(-i k.x), the modes of the second density have the phase factor
    exp(-i k.h/2), which is undone here. The images with an odd sum of cell numbers then have
    opposite signs in the two and cancel.

    Args:
        spectrum: the spectrum of the density of particles at x, an mtf tensor.
        shifted: the spectrum of the density of the same particles at x + h/2.
        box: the box of both.
    """

    def of_phase(function: Callable[[tf.Tensor], tf.Tensor]) -> Kernel:
        def kernel(*k: tf.Tensor) -> tf.Tensor:
            return function(sum(0.5 * h * along for h, along in zip(box.cell, k, strict=True)))

        return kernel

    real = filter_real(shifted, box, of_phase(tf.cos))
    imaginary = filter_imaginary(shifted, box, of_phase(tf.sin))
    return (spectrum + real + imaginary) * 0.5


@cached_on_mesh(16)
def _function(box: Box, weights: Weights, interlaced: tuple[bool, ...]) -> MeshFunction:
    def build(_: Any, *fields: Any) -> Any:
        rest = iter(fields)
        spectra = []
        for twice in interlaced:
            spectrum = to_spectrum(next(rest))
            spectra.append(interlace(spectrum, to_spectrum(next(rest)), box) if twice else spectrum)
        return mode_sums(spectra, box, weights)

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
        bins: see `power_spectrum`.

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
    """Returns the means of all universes on every rank, float64."""
    trailing = means.shape[len(box.local_batch) :]
    dims = [mtf.Dimension(f"axis{i}", n) for i, n in enumerate(trailing)]
    return box.whole(means, mtf.Shape(box.number_shape.dims + dims)).astype(np.float64)


def box_of(field: Any, box: Any = None) -> tuple[Box, tf.Tensor]:
    """Returns the box and the block of a scalar field.

    Args:
        field: a `Field`; or this rank's block [..., x, y, z] of a field on `box`; or a whole array
            [x, y, z] on one rank.
        box: the `Box` of a block; or the sides of a whole array's box [Mpc/h], one number or three.
            A `Field` has its own box.

    Raises:
        ValueError: the field is not scalar, an array has no box, or a `Field` has another box.
    """
    if isinstance(field, Field):
        if isinstance(box, Box):
            check_same_box(box, field.box, "the fields")
        sides = field.box.size if box is None or isinstance(box, Box) else box
        sides = np.broadcast_to(np.asarray(sides, float), (3,))
        if not np.allclose(sides, field.box.size):
            raise ValueError(
                f"box_size {tuple(sides)} differs from the field's own, {field.box.size}"
            )
        if field.block.shape.rank != len(field.box.shape):
            raise ValueError(f"a scalar field is needed, got blocks of shape {field.block.shape}")
        return field.box, field.block
    if isinstance(box, Box):
        return box, field
    block = tf.convert_to_tensor(field)
    if box is None:
        raise ValueError(
            "an array has no box of its own: box_size [Mpc/h] is needed, or the box of a block"
        )
    if block.shape.rank != 3:
        raise ValueError(f"a scalar field [x, y, z] is needed, got shape {block.shape}")
    x, y, z = (float(s) for s in np.broadcast_to(np.asarray(box, float), (3,)))
    nx, ny, nz = block.shape.as_list()
    return Box((nx, ny, nz), (x, y, z), ProcessMesh("row:1,col:1"), block.dtype), block


def sample_of(
    field: Any, box: Any = None, window: Window = None, interlaced: Any = None
) -> tuple[Box, Sample]:
    """Returns the box and the sample of a field.

    Args:
        field, box: see `box_of`.
        window: the window of the painting.
        interlaced: the field of the shifted particles, given as `field` is; or None.

    Raises:
        ValueError: see `box_of`; also if the two fields are not on the same box.
    """
    own, block = box_of(field, box)
    if interlaced is None:
        return own, Sample(block, window)
    shifted_box, shifted = box_of(interlaced, box)
    check_same_box(own, shifted_box, "the field and its interlaced one")
    return own, Sample(block, window, shifted)
