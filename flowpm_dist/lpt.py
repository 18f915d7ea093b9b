"""Initial conditions: from white noise to the linear field to Lagrangian perturbation theory.

Conventions: x = q + D1 psi1 + D2 psi2 with psi_n = -grad phi_n, laplacian phi_1 = delta_lin and
laplacian phi_2 = sum_{i<j} (phi_ii phi_jj - phi_ij^2), D2 positive (Bouchet and others 1995,
astro-ph/9406013). The canonical velocity is a^2 dx/dt = a^2 E (dD1/dlna psi1 + dD2/dlna psi2).
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology import GrowthFunctions, LinearPower
from flowpm_dist.fields import Box
from flowpm_dist.spectral import (
    Kernel,
    filter_real,
    gradient_fields,
    inverse_square,
    to_field,
    to_spectrum,
    without_nyquist,
)
from meshimpl.compat import mtf
from meshimpl.mesh_function import MeshFunction
from meshimpl.operations.noise import white_noise

ORDERS = (1, 2)


def white_noise_function(box: Box) -> MeshFunction:
    """`f(seed)`: unit normal white noise [x, y, z], fixed by the seed and the cell alone."""
    return box.function(
        lambda _, seed: white_noise(seed, box.shape, box.dtype), seed=(mtf.Shape([]), tf.int64)
    )


def linear_amplitude(box: Box, power: LinearPower) -> tf.Tensor:
    """sqrt(P(k) / cell volume) of this rank's modes, without growth.

    Times the unnormalised spectrum of white noise it gives the spectrum of the linear overdensity
    before growth. Evaluated in float64 plane by plane, so that little memory is needed.

    Args:
        box: grid and size.
        power: its `unscaled(k)` [(Mpc/h)^3].

    Returns:
        [kz, ky, kx] of the box's dtype.
    """
    kx, ky, kz = box.wavenumbers()
    square = tf.constant(kx[0] ** 2 + ky[0] ** 2)
    cell_volume = box.volume / box.cells

    def plane(k: tf.Tensor) -> tf.Tensor:
        spectrum = power.unscaled(tf.sqrt(square + k**2)) / cell_volume
        positive = spectrum > 0  # the mean mode: its derivative by the parameters is 0, not NaN
        root = tf.sqrt(tf.where(positive, spectrum, tf.ones_like(spectrum)))
        return tf.cast(tf.where(positive, root, tf.zeros_like(root)), box.dtype)

    return tf.map_fn(plane, tf.constant(kz[:, 0, 0]), fn_output_signature=box.dtype)


def growth_factors(growth: GrowthFunctions, a: float, order: int) -> tf.Tensor:
    """(D1, D2, and their velocity factors a^2 E dD/dlna) at scale factor a, float64 [4]."""
    momentum = a**2 * tf.sqrt(growth.background.e2(a))
    second = 1.0 if order > 1 else 0.0
    return tf.stack(
        [
            growth.d1(a),
            second * growth.d2(a),
            momentum * growth.d1_dlna(a),
            second * momentum * growth.d2_dlna(a),
        ]
    )


def lpt_function(box: Box, order: int) -> MeshFunction:
    """`f(white_noise, amplitude, factors)`: the linear field and the particles' first state.

    Args of f:
        white_noise: [x, y, z].
        amplitude: [kz, ky, kx], see `linear_amplitude`.
        factors: [4], see `growth_factors`, in the box's dtype.

    Returns of f:
        linear overdensity before growth [x, y, z], displacement [Mpc/h] and canonical velocity
        [Mpc/h H0], both [x, y, z, component].

    Raises:
        ValueError: an order that is not 1 or 2.
    """
    if order not in ORDERS:
        raise ValueError(f"lpt_order {order} is not one of {', '.join(map(str, ORDERS))}")

    def build(graph_mesh: Any, noise: Any, amplitude: Any, factors: Any) -> tuple[Any, ...]:
        d1, d2, v1, v2 = mtf.unstack(factors, factors.shape.dims[0])
        linear = to_spectrum(noise) * amplitude
        first = gradient_fields(linear, box, inverse_square)
        displacement, velocity = first * d1, first * v1
        if order > 1:
            source = to_spectrum(second_order_source(linear, box))
            second = gradient_fields(source, box, inverse_square)
            displacement, velocity = displacement + second * d2, velocity + second * v2
        return to_field(linear, box), displacement, velocity

    return box.function(
        build,
        white_noise=box.shape,
        amplitude=mtf.Shape(box.spectral_shape.dims[:-1]),
        factors=mtf.Shape([mtf.Dimension("factor", 4)]),
    )


def second_order_source(linear: Any, box: Box) -> Any:
    """sum_{i<j} (phi_ii phi_jj - phi_ij^2) of the linear potential, an mtf field [x, y, z]."""
    hessian = {
        pair: to_field(filter_real(linear, box, _second_derivative(*pair, box)), box)
        for pair in itertools.combinations_with_replacement(range(3), 2)
    }
    terms = [
        hessian[i, i] * hessian[j, j] - mtf.square(hessian[i, j])
        for i, j in itertools.combinations(range(3), 2)
    ]
    return terms[0] + terms[1] + terms[2]


def _second_derivative(i: int, j: int, box: Box) -> Kernel:
    """k_i k_j / k^2: the second derivative of the potential of an overdensity."""

    def kernel(*k: tf.Tensor) -> tf.Tensor:
        if i == j:
            return k[i] ** 2 * inverse_square(*k)
        odd_i, odd_j = without_nyquist(k[i], i, box), without_nyquist(k[j], j, box)
        return odd_i * odd_j * inverse_square(*k)

    return kernel


def check_white_noise(noise: np.ndarray, box: Box) -> None:
    """Raise a `ValueError`, on every rank, that says what is wrong with given white noise.

    Args:
        noise: the whole array, of which each rank looks at its block, or this rank's block.
        box: that it is for.
    """
    if noise.shape not in (box.grid, box.block):
        raise ValueError(f"white_noise has shape {noise.shape}; the grid is {box.grid}")
    if not np.issubdtype(noise.dtype, np.floating):
        raise ValueError(f"white_noise is {noise.dtype}; real floating values are needed")
    if noise.shape == box.grid:
        (x, y, _), (nx, ny, _) = box.offset, box.block
        noise = noise[x : x + nx, y : y + ny]
    bad = noise.size - np.count_nonzero(np.isfinite(noise))
    total = int(box.mesh.world.allreduce(tf.constant(bad, tf.int64)))
    if total:
        raise ValueError(f"white_noise has {total} values that are not finite")
