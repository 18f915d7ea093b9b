"""Multipoles about the line of sight to each point: Yamamoto's estimator by Fourier transforms."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box, cached_on_mesh
from flowpm_dist.grid.fourier import to_field, to_spectrum
from flowpm_dist.grid.options import SCHEMES, Scheme
from flowpm_dist.statistics.bins import Binning, bin_contents
from flowpm_dist.statistics.measure import Weights, interlace, mode_sums, whole
from meshimpl.compat import mtf
from meshimpl.graph_guards import fence
from meshimpl.mesh_function import MeshFunction
from meshimpl.operations.local import local


def local_multipoles(
    box: Box,
    corner: np.ndarray,
    blocks: Sequence[np.ndarray],
    orders: tuple[int, ...],
    bins: Binning,
    scheme: Scheme,
) -> np.ndarray:
    """Returns (2 l + 1) times the means of Re F_0* F_l over the modes of each bin.

    F_l(k) = 4 pi / (2 l + 1) sum_m Y_lm(k) FFT[F(x) Y_lm(x)] (Hand, Li, Slepian and Seljak 2017,
    arXiv:1704.02357). The window of painting is divided out. On all ranks together.

    Args:
        box: the box of the field, in float64.
        corner: its lowest corner, from the observer [3] [Mpc/h].
        blocks: this rank's block of F [x, y, z]; and, to interlace, of F of points that were moved
            by half a cell along each axis.
        orders: the orders l, even.
        bins: the bins of wavenumber.
        scheme: by which the points were painted.

    Returns:
        Float64 [order, bin], the same on every rank; NaN for a bin without modes.
    """
    box.check_equal("survey multipoles", corner=corner, orders=orders, bins=bins)
    fields = [tf.constant(block, box.dtype) for block in blocks]
    monopole, field = _spectrum(box, len(fields) > 1)(*fields)
    _, modes = bin_contents(box, bins)
    rows = []
    for order in orders:
        if order == 0:
            sums = _sums(box, bins, 1, SCHEMES[scheme])(monopole)
        else:
            total = tf.zeros_like(monopole)
            for m in range(-order, order + 1):
                harmonic = np.concatenate([corner, _harmonic(order, m, max(orders))])
                total = _added(box, max(orders))(total, field, harmonic)
            sums = _sums(box, bins, 2, SCHEMES[scheme])(monopole, total)
        rows.append((2 * order + 1) * whole(sums, box)[-1, 0])
    with np.errstate(invalid="ignore"):
        return np.stack(rows) / modes


def _harmonic(order: int, m: int, most: int) -> np.ndarray:
    """Returns the coefficients of sqrt(4 pi / (2 l + 1)) Y_lm, real, on the unit sphere.

    It is p(z) Re[c (x + i y)^|m|] with p the derivative number |m| of the Legendre polynomial.

    Returns:
        Coefficients of p, and of the real and the imaginary part of each power of x + i y, [3,
        most + 1], flat.
    """
    absolute = abs(m)
    legendre = np.polynomial.Legendre.basis(order).convert(kind=np.polynomial.Polynomial)
    polynomial = legendre.deriv(absolute) if absolute else legendre
    ratio = math.factorial(order - absolute) / math.factorial(order + absolute)
    result = np.zeros((3, most + 1))
    coefficients = np.asarray(polynomial.coef, np.float64) * math.sqrt(ratio * (2 if m else 1))
    result[0, : coefficients.size] = coefficients
    result[2 if m < 0 else 1, absolute] = 1
    return result.ravel()


def _evaluated(
    harmonic: tf.Tensor, most: int, x: tf.Tensor, y: tf.Tensor, z: tf.Tensor
) -> tf.Tensor:
    """Returns the harmonic in the directions of vectors, 0 for the vector 0; see `_harmonic`."""
    r = tf.sqrt(x**2 + y**2 + z**2)
    x, y, z = (tf.math.divide_no_nan(component, r) for component in (x, y, z))
    p, real, imaginary = tf.unstack(tf.reshape(harmonic, [3, most + 1]))
    polynomial, around = tf.zeros_like(r), tf.zeros_like(r)
    re, im = tf.ones_like(r), tf.zeros_like(r)
    for n in range(most + 1):
        polynomial = polynomial * z + p[most - n]
        around += real[n] * re + imaginary[n] * im
        re, im = re * x - im * y, re * y + im * x
    return tf.where(r > 0, polynomial * around, 0)


@cached_on_mesh(4)
def _spectrum(box: Box, interlaced: bool) -> MeshFunction:
    """Returns `f(field, [shifted])`: the spectrum of a painted field, and the field of it."""

    def build(_: Any, field: Any, shifted: Any = None) -> Any:
        spectrum = to_spectrum(field)
        if shifted is None:
            return spectrum, field
        spectrum = interlace(spectrum, to_spectrum(shifted), box)
        return spectrum, to_field(spectrum, box)

    names = ["field", "shifted"] if interlaced else ["field"]
    return box.function(build, **dict.fromkeys(names, box.shape))


@cached_on_mesh(4)
def _added(box: Box, most: int) -> MeshFunction:
    """Returns `f(total, field, corner and harmonic)`: total + Y(k) FFT[field Y(x)]."""
    size = mtf.Shape([mtf.Dimension("coefficient", 3 + 3 * (most + 1))])
    compiled = functools.partial(tf.function, jit_compile=True, autograph=False)

    def weighted(field: tf.Tensor, c: tf.Tensor) -> tf.Tensor:
        @compiled()
        def product(field: tf.Tensor, c: tf.Tensor, *sites: tf.Tensor) -> tf.Tensor:
            x, y, z = (site + c[axis] for axis, site in enumerate(sites))
            return field * _evaluated(c[3:], most, x, y, z)

        return product(field, c, *(fence(tf.constant(site, box.dtype)) for site in box.sites()))

    def summed(total: tf.Tensor, spectrum: tf.Tensor, c: tf.Tensor) -> tf.Tensor:
        @compiled()
        def add(total: tf.Tensor, pairs: tf.Tensor, c: tf.Tensor, *k: tf.Tensor) -> tf.Tensor:
            return total + pairs * _evaluated(c[3:], most, *k)[..., tf.newaxis]

        return add(total, spectrum, c, *box.graph_wavenumbers())

    def build(_: Any, total: Any, field: Any, c: Any) -> Any:
        (product,) = local(weighted, [field, c], [(field.shape, field.dtype)])
        inputs = [total, to_spectrum(product), c]
        return local(summed, inputs, [(total.shape, total.dtype)])[0]

    return box.function(build, total=box.spectral_shape, field=box.shape, c=size)


@cached_on_mesh(8)
def _sums(box: Box, bins: Binning, count: int, order: int) -> MeshFunction:
    """Returns `f(*spectra)`: `mode_sums` of spectra over sinc(k cell / 2) to the power `order`."""
    weights = Weights(bins, (order,) * count)
    names = [f"spectrum{n}" for n in range(count)]
    return box.function(
        lambda _, *spectra: mode_sums(spectra, box, weights),
        **dict.fromkeys(names, box.spectral_shape),
    )
