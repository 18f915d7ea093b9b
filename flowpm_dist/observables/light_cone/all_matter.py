"""Maps of all matter from maps of particles, which lack massive neutrinos.

Light is deflected by all matter. At small angles only waves across the line of sight count
(Limber's approximation), so a map of the particles at one distance becomes one of all matter when
its multipoles l are multiplied by F(k, a) of `cosmology.neutrinos`, at k = l / f_K on the flat sky
and (l + 1/2) / f_K on the full sky. A map of particles at many distances is the sum of a few,
whose weights are the Lagrange polynomials of Chebyshev's nodes in the root of the distance. Each
is multiplied by the factor at its node.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.arrays import as_float64, sqrt, stacked
from flowpm_dist.cosmology.theory import Theory
from flowpm_dist.grid.flat_sky import FlatSky
from flowpm_dist.grid.healpix import Healpix
from flowpm_dist.observables.light_cone.geometry import Geometry
from flowpm_dist.observables.light_cone.options import PARTS, FlatField, FullSky
from meshimpl.tapes import once_differentiable

_ROOTS = 0.5 * (1.0 + np.cos(np.pi * (np.arange(PARTS) + 0.5) / PARTS))


def part_distances(end: Any) -> Any:
    """Returns the distances at which the factors of the parts are taken [part] [Mpc/h].

    Args:
        end: the largest distance of particles [Mpc/h], a number or a tensor.
    """
    return end * _ROOTS**2


def part_weights(chi: np.ndarray, end: Any) -> Any:
    """Returns the weights of particles in each part [part, distance] [1], whose sum is 1.

    Args:
        chi: distances [distance] [Mpc/h].
        end: see `part_distances`.
    """
    roots = sqrt(chi / end)
    others = [np.delete(_ROOTS, number) for number in range(PARTS)]
    return stacked(
        [
            math.prod((roots - x) / (root - x) for x in rest)
            for root, rest in zip(_ROOTS, others, strict=True)
        ],
        axis=0,
    )


def all_matter(maps: tf.Tensor, chi: Any, geometry: Geometry) -> tf.Tensor:
    """Returns the sums of maps at several distances, with massive neutrinos; differentiable.

    Maps are taken as periodic on the flat sky. On the full sky the neutrinos' harmonics reach to
    l = 3 nside - 1.

    Args:
        maps: overdensities of the particles [..., map, distance, *pixels] [1], of one universe or,
            in a batch, of all in the first dimension.
        chi: the distances [distance] [Mpc/h], or one for each map and distance, which broadcast.
        geometry: the sky and the universes.

    Returns:
        [..., map, *pixels], in the dtype of the maps.
    """
    chi, sky = as_float64(chi, "chi", "Mpc/h"), geometry.sky
    cosmologies = geometry.inputs.cosmologies
    if isinstance(sky, FlatField):
        square = FlatSky((sky.pixels, sky.pixels), (sky.fov, sky.fov))
        x, y = square.wavenumbers()
        multipoles, multiply = np.sqrt(x**2 + y**2), multiply_flat
    else:
        assert isinstance(sky, FullSky)
        multipoles, multiply = np.arange(3 * sky.nside) + 0.5, multiply_multipoles
    apart = chi[(..., *[np.newaxis] * multipoles.ndim)]

    def factors(theory: Theory) -> tf.Tensor:
        neutrinos, distances = theory.background.neutrinos, theory.distances
        k = multipoles / distances.transverse(apart)
        if neutrinos is None:
            return tf.ones_like(k)
        return as_float64(neutrinos.matter(k, distances.scale_factor(apart)))

    of_universes = cosmologies.stack(cosmologies.of_growths(factors))
    if cosmologies.batched and chi.shape.rank == 1:
        of_universes = of_universes[:, tf.newaxis]
    return multiply(maps, of_universes)


def multiply_flat(maps: tf.Tensor, factors: tf.Tensor) -> tf.Tensor:
    """Returns the sums of periodic maps whose modes are multiplied by factors.

    Args:
        maps: [..., part, x, y].
        factors: one for each mode of `tf.signal.rfft2d` [..., part, kx, ky], which broadcast.

    Returns:
        [..., x, y].
    """
    real = tf.cast(factors, maps.dtype)
    total = tf.reduce_sum(tf.signal.rfft2d(maps) * tf.complex(real, tf.zeros_like(real)), axis=-3)
    return tf.signal.irfft2d(total, maps.shape[-2:])


def multiply_multipoles(maps: tf.Tensor, factors: tf.Tensor) -> tf.Tensor:
    """Returns the sums of maps of the full sky whose multipoles are multiplied by factors.

    Higher multipoles than there are factors have the last factor. The harmonics are sums over
    pixels of equal weight, so that the operation is its own adjoint.

    Args:
        maps: [..., part, pixel], in HEALPix's order of rings.
        factors: for each multipole from 0 on [..., part, ell], float64, which broadcast.

    Returns:
        [..., pixel].
    """
    import healpy  # takes long

    last, dtype = factors.shape[-1] - 1, maps.dtype
    area = 4 * np.pi / maps.shape[-1]
    nside = Healpix(round((maps.shape[-1] / 12) ** 0.5)).nside
    factors = tf.broadcast_to(factors, [*maps.shape[:-1], last + 1])

    def harmonics(x: np.ndarray) -> np.ndarray:
        return healpy.map2alm(x.astype(np.float64), lmax=last, iter=0, use_pixel_weights=False)

    def smoothed(modes: np.ndarray) -> np.ndarray:
        return healpy.alm2map(modes, nside, lmax=last)

    def gradient(dy: tf.Tensor, x: tf.Tensor, f: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        to_maps, to_factors = np.zeros(x.shape), np.zeros(f.shape)
        for place in np.ndindex(*x.shape[:-2]):
            back = dy.numpy()[place].astype(np.float64)
            modes = harmonics(back)
            rows = zip(x.numpy()[place], f.numpy()[place], strict=True)
            for part, (one, factor) in enumerate(rows):
                changed = healpy.almxfl(modes, factor - factor[-1])
                to_maps[(*place, part)] = factor[-1] * back + smoothed(changed)
                spectrum = healpy.alm2cl(modes, harmonics(one), lmax=last)
                slopes = (2 * np.arange(last + 1) + 1) * spectrum / area
                slopes[-1] += np.sum(back * one) - slopes.sum()
                to_factors[(*place, part)] = slopes
        return tf.constant(to_maps, dtype), tf.constant(to_factors, f.dtype)

    @tf.custom_gradient
    def multiplied(x: tf.Tensor, f: tf.Tensor) -> tuple[tf.Tensor, Any]:
        sums = np.zeros([*x.shape[:-2], x.shape[-1]])
        for place in np.ndindex(*x.shape[:-2]):
            rows, of_rows = x.numpy()[place], f.numpy()[place]
            modes = [
                healpy.almxfl(harmonics(row), factor - factor[-1])
                for row, factor in zip(rows, of_rows, strict=True)
            ]
            sums[place] = of_rows[:, -1] @ rows + smoothed(np.sum(modes, axis=0))

        def back(dy: tf.Tensor) -> Any:
            return once_differentiable(gradient, "the matter of neutrinos on the full sky")(
                dy, x, f
            )

        return tf.constant(sums, dtype), back

    return multiplied(maps, factors)
