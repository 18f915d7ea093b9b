"""The means of the products of one or two fields in bins of wavenumber."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box, cached_on_mesh, check_same_box
from flowpm_dist.grid.field import Field
from flowpm_dist.grid.fourier import Filter, Kernel, filtered, to_spectrum
from flowpm_dist.grid.options import SCHEMES, Scheme
from flowpm_dist.options import in_unit, keep_in_units
from flowpm_dist.statistics.bins import (
    Axes,
    BinChoice,
    Binning,
    binning,
    contents,
    inverse_windows,
    multiplicities,
    relative_wavenumber,
    relative_wavenumbers,
)
from meshimpl.compat import mtf
from meshimpl.graph_guards import check_eager, fence
from meshimpl.hvd_simd_mesh_impl import HvdSimdMeshImpl, LaidOutTensor
from meshimpl.mesh_function import MeshFunction
from meshimpl.operations.local import local, on_blocks
from meshimpl.process_mesh import ProcessMesh

Window = Literal["own"] | Scheme | None
"""The window that is divided out of a field's modes. "own" is the window with which a `Field` was
painted; arrays and blocks have none. "cic", "tsc" and "pcs" are the windows of these schemes. None
leaves the modes.
"""

TOLERANCE = 0.1
"""How far the mean of a density may be from 1 without a warning."""


@dataclass(frozen=True)
class Sample:
    """A field as it was sampled.

    Attributes:
        block: this rank's block [..., x, y, z].
        window: the scheme whose window its modes are divided by; None for no window.
        shifted: the block of the density of the particles moved by half a cell along each axis.

    Raises:
        ValueError: if the window is unknown.
    """

    block: tf.Tensor
    window: Scheme | None = None
    shifted: tf.Tensor | None = None

    def __post_init__(self) -> None:
        keep_in_units(self, block="", shifted="")
        if self.window not in (None, *SCHEMES):
            raise ValueError(f"window {self.window!r}: 'own', 'cic', 'tsc', 'pcs' or None")

    @property
    def order(self) -> int:
        """The power of sinc(k cell / 2) that modes are divided by, along each axis."""
        return 0 if self.window is None else SCHEMES[self.window]


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

    real = filtered(shifted, box, Filter(of_phase(tf.cos)))
    imaginary = filtered(shifted, box, Filter(of_phase(tf.sin), imaginary=True))
    return (spectrum + real + imaginary) * 0.5


@dataclass(frozen=True)
class Weights:
    """The bins of modes, and their weights in the sums.

    Attributes:
        bins: the bin of each mode.
        windows: for each spectrum, the power of sinc(k cell / 2) that it is divided by.
        orders: the orders l of the Legendre polynomials (2 l + 1) L_l(mu), even.
        axis: the axis of the line of sight, 0, 1 or 2.
    """

    bins: Binning
    windows: tuple[int, ...]
    orders: tuple[int, ...] = (0,)
    axis: int = 2

    @property
    def products(self) -> int:
        """The number of products: |a|^2 of one spectrum; |a|^2, |b|^2 and Re a b* of two."""
        return 1 if len(self.windows) == 1 else 3

    def legendre(self, along: Axes, k: tf.Tensor) -> list[tf.Tensor]:
        """Returns (2 l + 1) L_l(mu) for each order."""
        mu2 = tf.math.divide_no_nan(along[self.axis] ** 2, k**2)
        result = []
        for order in self.orders:
            coefficients = np.polynomial.legendre.leg2poly([0] * order + [2 * order + 1])
            value = tf.zeros_like(k)
            for c in coefficients[::-2]:
                value = value * mu2 + float(c)
            result.append(value)
        return result

    def scales(self, inverse: Axes) -> list[tf.Tensor]:
        """Returns the factor of each spectrum: 1, or the product of the inverse windows."""
        unwindowed = _outer(inverse)
        return [unwindowed**power if power else tf.ones_like(unwindowed) for power in self.windows]


def _vectors(box: Box) -> tuple[Axes, Axes, Axes]:
    """Returns wavenumbers, multiplicities and inverse windows, float64.

    Their graph is the same on every rank.
    """

    vectors = relative_wavenumbers(box), multiplicities(box), inverse_windows(box)
    fenced: tuple[Axes, Axes, Axes] = tf.nest.map_structure(
        lambda along: fence(tf.constant(along, tf.float64)), vectors
    )
    return fenced


def _outer(along: Axes) -> tf.Tensor:
    x, y, z = along
    return x * y * z


def mode_sums(spectra: Sequence[Any], box: Box, weights: Weights) -> Any:
    """Returns the sums over the modes of each bin of (2 l + 1) L_l(mu) times products of spectra.

    The result is the mtf tensor [..., product, order, bin], complete on every rank that shares the
    universe. Each rank sums its modes, plane by plane in float64, and one small allreduce follows.

    Args:
        spectra: one or two mtf tensors [..., kz, ky, kx, pair].
        box: the box of both.
        weights: the bins and the weights of the modes.
    """
    dtype, pencil = spectra[0].dtype, mtf.Shape(spectra[0].shape.dims[-4:])
    sizes = {"product": weights.products, "order": len(weights.orders), "bin": weights.bins.size}
    shape = mtf.Shape([*box.number_shape.dims, *(mtf.Dimension(*size) for size in sizes.items())])

    def lower(impl: HvdSimdMeshImpl, *slices: tf.Tensor) -> tf.Tensor:
        sums = tf.reshape(_local_sums(box, weights, slices), impl.slice_shape(shape))
        axes = sorted(axis for axis in impl.tensor_layout(pencil) if axis is not None)
        total = impl.allreduce(LaidOutTensor([sums]), axes, "SUM").one_slice
        return tf.cast(total, dtype)

    def adjoint(inputs: list[Any], cotangents: list[Any]) -> list[Any]:
        def spread(*slices: tf.Tensor) -> list[tf.Tensor]:
            """Returns the cotangents of this rank's spectra: each bin's, spread over its modes."""
            cotangents_of = functools.partial(_mode_cotangents, weights)
            compiled = tf.function(cotangents_of, jit_compile=True, autograph=False)
            values = [_batched(s, 4) for s in slices[:-1]]
            return compiled(values, _batched(slices[-1], 3), _vectors(box))

        outputs = [(x.shape, x.dtype) for x in inputs]
        return local(spread, [*inputs, *cotangents], outputs, name="mode_sums_gradient")

    (sums,) = on_blocks(lower, spectra, [(shape, dtype)], adjoint=adjoint, name="mode_sums")
    return sums


def _local_sums(box: Box, weights: Weights, slices: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns this rank's part of the sums, float64 [batch, product, order, bin]."""
    values, count = [_batched(s, 4) for s in slices], weights.bins.size
    summands_of = functools.partial(_plane_summands, weights)
    plane, vectors = tf.function(summands_of, jit_compile=True, autograph=False), _vectors(box)

    def sums(index: tf.Tensor) -> tf.Tensor:
        here = tuple((x[0], y[0], z[index, 0, 0]) for x, y, z in vectors)
        summands, number = plane([value[:, index] for value in values], here)
        return tf.math.unsorted_segment_sum(summands, number, count + 1)

    per_plane = tf.map_fn(sums, tf.range(values[0].shape[1]), fn_output_signature=tf.float64)
    total = tf.reduce_sum(per_plane, axis=0)[:-1]
    shape = [values[0].shape[0], weights.products, len(weights.orders), count]
    return tf.reshape(tf.transpose(total, [1, 2, 0]), shape)


def _plane_summands(
    weights: Weights, planes: list[tf.Tensor], vectors: tuple[Axes, Axes, Axes]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the summands of the modes of one kz, and their bins.

    The summands are [ky, kx, batch, product * order], the bins [ky, kx].
    """
    along, counts, inverse = vectors
    k = relative_wavenumber(*along)
    modes = [
        tf.cast(value, tf.float64) * scale[..., tf.newaxis]
        for value, scale in zip(planes, weights.scales(inverse), strict=True)
    ]
    pairs = [(0, 0)] if len(modes) == 1 else [(0, 0), (1, 1), (0, 1)]
    summands = [
        tf.reduce_sum(modes[i] * modes[j], axis=-1) * _outer(counts) * l_mu
        for i, j in pairs
        for l_mu in weights.legendre(along, k)
    ]
    # [summand, batch, ky, kx] -> [ky, kx, batch, summand]
    return tf.transpose(tf.stack(summands), [2, 3, 1, 0]), weights.bins.number(along, k)


def _mode_cotangents(
    weights: Weights, values: list[tf.Tensor], dy: tf.Tensor, vectors: tuple[Axes, Axes, Axes]
) -> list[tf.Tensor]:
    """Returns the cotangents of the spectra.

    The derivative of |a|^2 is 2 a. Re(a b*) has the derivative b with respect to a, and a with
    respect to b. Each is multiplied by its bin's cotangent and by the weights.

    Args:
        weights: the bins and the weights of the modes, see `Weights`.
        values: the spectra [batch, kz, ky, kx, pair].
        dy: the cotangent of the sums [batch, product, order, bin].
        vectors: see `_vectors`.
    """
    along, counts, inverse = vectors
    k = relative_wavenumber(*along)
    number, legendre = weights.bins.number(along, k), weights.legendre(along, k)
    padded = tf.pad(tf.cast(dy, tf.float64), [[0, 0]] * 3 + [[0, 1]])

    def of_product(product: int) -> tf.Tensor:
        terms = [
            tf.gather(padded[:, product, order], number, axis=1) * l_mu
            for order, l_mu in enumerate(legendre)
        ]
        return tf.add_n(terms) * _outer(counts)

    def times(value: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
        return value * tf.cast(factor, value.dtype)[..., tf.newaxis]

    scales = weights.scales(inverse)
    autos = [
        times(value, 2 * scale**2 * of_product(product))
        for product, (value, scale) in enumerate(zip(values, scales, strict=True))
    ]
    if len(values) == 1:
        return autos
    cross = scales[0] * scales[1] * of_product(2)
    return [autos[0] + times(values[1], cross), autos[1] + times(values[0], cross)]


def _batched(x: tf.Tensor, rank: int) -> tf.Tensor:
    """Returns a slice with a batch dimension, which has size 1 if there was none."""
    return tf.reshape(x, [-1, *x.shape[-rank:]])


@cached_on_mesh(16)
def _function(box: Box, weights: Weights, interlaced: tuple[bool, ...]) -> MeshFunction:
    def build(_: Any, *fields: Any) -> Any:
        rest = map(to_spectrum, fields)
        spectra = [
            interlace(next(rest), next(rest), box) if twice else next(rest) for twice in interlaced
        ]
        return mode_sums(spectra, box, weights)

    names = [f"field{i}" for i in range(len(interlaced) + sum(interlaced))]
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
    windows = [sample.window for sample in samples]
    box.check_equal("a statistic", bins=bins, orders=orders, axis=axis, windows=windows)
    weights = Weights(bins, tuple(sample.order for sample in samples), orders, axis)
    _, _, modes = contents(box, bins)
    interlaced = tuple(s.shifted is not None for s in samples)
    is_cube = len(set(box.size)) == 1
    # The sums depend on wavenumbers over the fundamental one: cubes of all sizes share them.
    lowered_for = box if any(interlaced) or not is_cube else replace(box, size=(1.0, 1.0, 1.0))
    function = _function(lowered_for, weights, interlaced)
    blocks = [b for s in samples for b in (s.block, s.shifted) if b is not None]
    means = function(*blocks) * tf.constant(
        box.volume / box.cells**2 / np.maximum(modes, 1), box.dtype
    )
    return means if modes.all() else means + tf.constant(np.where(modes, 0, np.nan), box.dtype)


def whole(means: tf.Tensor, box: Box) -> np.ndarray:
    """Returns the means of all universes on every rank, float64."""
    check_eager("a statistic whose result is an array")
    trailing = means.shape[len(box.local_batch) :]
    dims = [mtf.Dimension(f"axis{i}", n) for i, n in enumerate(trailing)]
    return box.whole(means, mtf.Shape(box.number_shape.dims + dims)).astype(np.float64)


def box_of(field: Any, box: Any = None) -> tuple[Box, tf.Tensor]:
    """Returns the box and the block of a scalar field.

    Args:
        field: a `Field`; or this rank's block [..., x, y, z] of a field on `box`; or a whole array
            [x, y, z] on one rank, whose whole numbers become float64.
        box: the `Box` of a block; or the sides of a whole array's box [Mpc/h], one number or three.
            A `Field` has its own box.

    Raises:
        ValueError: the field is not scalar, an array has no box, or a `Field` has another box.
    """
    box = in_unit("box_size", box, "Mpc/h")
    if isinstance(field, Field):
        if isinstance(box, Box):
            check_same_box(box, field.box, "the fields")
        elif box is not None and not np.allclose(np.asarray(box, float), field.box.size):
            raise ValueError(f"box_size {box} differs from the field's own, {field.box.size}")
        if field.block.shape.rank != len(field.box.shape):
            raise ValueError(f"a scalar field is needed, got blocks of shape {field.block.shape}")
        return field.box, field.block
    field = in_unit("field", field)
    if isinstance(box, Box):
        return box, field
    block = tf.convert_to_tensor(field)
    block = block if block.dtype.is_floating else tf.cast(block, tf.float64)
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
    field: Any, box: Any = None, window: Window = "own", interlaced: Any = None
) -> tuple[Box, Sample]:
    """Returns the box and the sample of a field.

    Args:
        field, box: see `box_of`.
        window: see `Window`.
        interlaced: the field of the shifted particles, given as `field` is; or None.

    Raises:
        ValueError: see `box_of`; also if the two fields are not on the same box.

    Warns:
        UserWarning: a whole array is a density or counts whose mean is not 1.
    """
    interlaced = in_unit("interlaced", interlaced)
    field_box, block = box_of(field, box)
    if tf.executing_eagerly() and not isinstance(field, Field) and not isinstance(box, Box):
        _warn_of_mean(block)
    if window == "own":
        window = field.window if isinstance(field, Field) else None
    if interlaced is None:
        return field_box, Sample(block, window)
    shifted_box, shifted = box_of(interlaced, box)
    check_same_box(field_box, shifted_box, "the field and its interlaced one")
    return field_box, Sample(block, window, shifted)


def _warn_of_mean(block: tf.Tensor) -> None:
    """Warns if the mean of counts or of a density is not 1: its square is a factor of the power."""
    mean, least = float(tf.reduce_mean(block)), float(tf.reduce_min(block))
    if least >= 0 and mean > 0 and abs(mean - 1) > TOLERANCE:
        warnings.warn(
            f"no value of the field is below 0, and its mean is {mean:.4g}: the power of its "
            f"overdensity, field / mean - 1, is {mean**2:.4g} times smaller; a density must have "
            "the mean 1, an overdensity the mean 0",
            stacklevel=4,
        )
