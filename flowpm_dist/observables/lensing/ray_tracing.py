"""Light rays through many lens planes, with a gradient that keeps no plane.

A ray that reaches plane k at the angle beta_k is deflected there by alpha_k = grad psi_k, with
laplacian psi_k = 2 S_k delta_k and S_k the plane's strength (`LensPlanes.strength`). The angle
under which it comes from a distance chi is

    beta(chi) = theta - sum over chi_k < chi of f_K(chi - chi_k) / f_K(chi) alpha_k(beta_k),

and its Jacobian A = d beta / d theta follows with U_k A_k in place of alpha_k. U_k has the second
derivatives of psi_k (Jain, Seljak and White 2000, astro-ph/9901191; Hilbert and others 2009,
arXiv:0809.5035). The ratio is C_k - f_k / t(chi), with f_k = f_K(chi_k), C_k and t of `Distances`;
in a flat universe it is 1 - chi_k / chi. So only two sums over the planes before chi are needed:
first = sum of C_k alpha_k and second = sum of f_k alpha_k. A ray meets plane k at
theta - first + second / t_k. The deflections by this plane and by planes beyond it do not change
this position. So the gradient starts at the last plane and subtracts from the sums what each plane
added. It stores the sums, not the rays at each plane.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from flowpm_dist.cosmology.theory import Universe, theory_of
from flowpm_dist.grid.flat_sky import FlatSky, SkyFilter, filter_maps, inverse_square, mixed_product
from flowpm_dist.observables.lensing.planes import LensPlanes, efficiency_of_planes
from flowpm_dist.observables.lensing.sources import Sources
from flowpm_dist.options import in_unit
from meshimpl.tapes import once_differentiable


@dataclass(frozen=True)
class RayTracing:
    """The source positions and distortions of light rays; means over each population.

    Component i of positions and of the Jacobian belongs to axis i of the map.

    Attributes:
        position: angular positions of the sources beta(theta) [source, ..., 2] [rad].
        jacobian: A = d beta / d theta [source, ..., 2, 2] [1]; the last index belongs to theta.
    """

    position: tf.Tensor
    jacobian: tf.Tensor

    @property
    def kappa(self) -> tf.Tensor:
        """The convergence 1 - (A11 + A22) / 2 [source, ...] [1]."""
        return 1.0 - 0.5 * (self.jacobian[..., 0, 0] + self.jacobian[..., 1, 1])

    @property
    def gamma1(self) -> tf.Tensor:
        """The shear (A22 - A11) / 2 [source, ...] [1]."""
        return 0.5 * (self.jacobian[..., 1, 1] - self.jacobian[..., 0, 0])

    @property
    def gamma2(self) -> tf.Tensor:
        """The shear -(A12 + A21) / 2 [source, ...] [1]."""
        return -0.5 * (self.jacobian[..., 0, 1] + self.jacobian[..., 1, 0])

    @property
    def rotation(self) -> tf.Tensor:
        """The rotation (A21 - A12) / 2 [source, ...] [rad], 0 in the Born approximation."""
        return 0.5 * (self.jacobian[..., 1, 0] - self.jacobian[..., 0, 1])


def ray_trace(
    delta: Any,
    planes: LensPlanes,
    sources: Sequence[Sources],
    cosmology: Universe,
    fov: Any,
    positions: Any | None = None,
) -> RayTracing:
    """Follows rays from the observer to the sources through all planes, in one pass.

    The mean of each plane deflects no ray, so the convergence lacks it.
    Warns of sources behind the last edge as `born` does.

    Deflections and their derivatives are computed by FFT, of planes that are taken as periodic, and
    read bilinearly where a ray meets the plane. Differentiable by the planes, the positions, the
    cosmology and the parameters of the sources. Apart from the planes and their gradient, the
    memory of the gradient does not grow with the number of planes. Second derivatives raise
    LookupError.

    Args:
        delta: overdensities [plane, x, y] [1], float32 or float64.
        planes: their distances.
        sources: the populations. For those with a distribution of redshifts, position and Jacobian
            are the means over it.
        cosmology: the parameters, or the theory.
        fov: field of view of each plane [rad], one number or those along x and y. The corner of the
            map is at 0.
        positions: angles theta [..., 2] [rad] at which the rays reach the observer, by default the
            centres of the pixels.

    Returns:
        The rays at the sources, in the dtype of the planes.

    Raises:
        ValueError: more or fewer planes than distances; positions that are no pairs;
            no sources.
    """
    delta, positions = in_unit("delta", delta), in_unit("positions", positions, "rad")
    delta = tf.convert_to_tensor(delta)
    planes.check(delta)
    if delta.shape.rank != 3:
        raise ValueError(f"planes of matter are a tensor [plane, x, y]: got {delta.shape}")
    sky = FlatSky.of(delta, fov)
    theta = tf.cast(sky.centres() if positions is None else positions, delta.dtype)
    if not theta.shape.is_fully_defined() or theta.shape[-1:] != (2,):
        raise ValueError(f"positions are a tensor [..., 2] of known shape: got {theta.shape}")
    theory = theory_of(cosmology)
    strength, distances = planes.strength(theory), theory.distances
    efficiency = efficiency_of_planes(planes, sources, distances, stacklevel=2)
    undistorted = tf.constant([1.0, 0.0, 0.0, 1.0], delta.dtype)
    rays = tf.concat([theta, tf.broadcast_to(undistorted, [*theta.shape[:-1], 4])], axis=-1)
    lengths = [
        length(planes.chi)
        for length in (distances.transverse_slope, distances.transverse, distances.tangent)
    ]
    lenses = [tf.cast(x, delta.dtype) for x in (strength, *lengths, efficiency)]

    at_source = _tracer(sky)(delta, *lenses, rays)
    position, jacobian = tf.split(at_source, [2, 4], axis=-1)
    return RayTracing(position, tf.reshape(jacobian, [*position.shape[:-1], 2, 2]))


def _tracer(sky: FlatSky) -> Callable[..., tf.Tensor]:
    """Returns the function that follows rays through planes of these pixels, with its gradient."""

    @tf.custom_gradient
    def trace(*tensors: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
        """Returns the rays at the sources [source, ..., 6], position and Jacobian.

        Args:
            tensors: for each plane delta [plane, x, y]; strength, C, f and t [plane]; efficiency
                [source, plane]; and the rays at the observer [..., 6].
        """
        # A tape would keep all that is computed here, were its inputs watched.
        delta, strength, slope, length, tangent, efficiency, rays = map(tf.stop_gradient, tensors)
        count, (read, _) = delta.shape[0], _readers(sky)

        def deflect(k: tf.Tensor, first: Any, second: Any, total: Any) -> tuple[Any, ...]:
            met = rays - first + second / tangent[k]
            added = read(filter_maps(strength[k] * delta[k], sky, _DERIVATIVES), met)
            total += tf.tensordot(efficiency[:, k], added, 0)
            return k + 1, first + slope[k] * added, second + length[k] * added, total

        nothing = tf.zeros_like(rays)
        everywhere = tf.tensordot(tf.zeros_like(efficiency[:, 0]), nothing, 0)
        start = (tf.constant(0), nothing, nothing, everywhere)
        _, *sums, total = tf.while_loop(
            lambda k, *_: k < count, deflect, start, parallel_iterations=1
        )

        def gradient(dy: tf.Tensor) -> tuple[tf.Tensor, ...]:
            return once_differentiable(functools.partial(_return, sky), "ray tracing")(
                dy, *sums, *tensors
            )

        return rays - total, gradient

    return trace


def _return(sky: FlatSky, dy: tf.Tensor, *tensors: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """Returns the cotangents of the arguments of `trace`, plane by plane from the last.

    Args:
        sky: pixels of the planes.
        dy: cotangent of its result [source, ..., 6].
        tensors: first and second after the last plane [..., 6], and its arguments.
    """
    *sums, delta, strength, slope, length, tangent, efficiency, rays = tensors
    count = delta.shape[0]
    _, read_with_gradient = _readers(sky)

    def undo(
        k: tf.Tensor, sums: list[tf.Tensor], cotangents: list[tf.Tensor], of_planes: list[Any]
    ) -> tuple[Any, ...]:
        (first, second), (d_first, d_second, d_rays) = sums, cotangents
        kappa, met = strength[k] * delta[k], rays - first + second / tangent[k]
        d_added = slope[k] * d_first + length[k] * d_second
        d_added -= tf.tensordot(efficiency[:, k], dy, 1)
        with tf.GradientTape() as tape:
            tape.watch(kappa)
            maps = filter_maps(kappa, sky, _DERIVATIVES)
        added, d_maps, d_met = read_with_gradient(maps, met, d_added)
        d_kappa = tape.gradient(maps, kappa, d_maps)
        first, second = first - slope[k] * added, second - length[k] * added
        of_plane = (
            strength[k] * d_kappa,
            tf.reduce_sum(d_kappa * delta[k]),
            tf.reduce_sum(d_first * added),
            tf.reduce_sum(d_second * added),
            -tf.reduce_sum(d_met * second) / tangent[k] ** 2,
            -tf.tensordot(dy, added, len(added.shape)),
        )
        cotangents = [d_first - d_met, d_second + d_met / tangent[k], d_rays + d_met]
        of_planes = [
            array.write(k, value) for array, value in zip(of_planes, of_plane, strict=True)
        ]
        return k - 1, [first, second], cotangents, of_planes

    nothing = tf.zeros_like(rays)
    arrays = [tf.TensorArray(delta.dtype, count) for _ in range(6)]
    start = (tf.constant(count - 1), list(sums), [nothing, nothing, tf.reduce_sum(dy, 0)], arrays)
    _, _, cotangents, of_planes = tf.while_loop(
        lambda k, *_: k >= 0, undo, start, parallel_iterations=1
    )
    *of_lenses, d_efficiency = (array.stack() for array in of_planes)
    return *of_lenses, tf.transpose(d_efficiency), cotangents[2]


@functools.lru_cache(maxsize=16)
def _readers(sky: FlatSky) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns functions that read a plane where rays meet it, compiled to keep little in memory.

    The first returns what a plane adds to the sums: alpha, and U A [..., 6]. Its arguments are the
    derivatives of the plane's potential [x, y, 5], and position and Jacobian of the rays [..., 6].
    The second returns the same, and the cotangents of these arguments from the result's own.
    """

    def read(maps: tf.Tensor, rays: tf.Tensor) -> tf.Tensor:
        values = bilinear(maps, rays[..., :2], sky)
        first, second = rays[..., 2:4], rays[..., 4:]  # rows of A
        u11, u12, u22 = (values[..., i, tf.newaxis] for i in (2, 3, 4))
        rows = [u11 * first + u12 * second, u12 * first + u22 * second]
        return tf.concat([values[..., :2], *rows], axis=-1)

    def gradient(maps: tf.Tensor, rays: tf.Tensor, dy: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.GradientTape() as tape:
            tape.watch([maps, rays])
            # Not the compiled function: the compiler would take its inputs for constants.
            result = read(maps, rays)
        return result, *tape.gradient(result, [maps, rays], dy)

    compiled = functools.partial(tf.function, jit_compile=True, autograph=False)
    return compiled(read), compiled(gradient)


def bilinear(maps: tf.Tensor, positions: tf.Tensor, sky: FlatSky) -> tf.Tensor:
    """Returns periodic maps [x, y, ...] at positions [..., 2] [rad], linear between the centres.

    Differentiable by both; that by the position jumps where it passes the centre of a pixel.
    """
    n_x, n_y = sky.pixels
    cells = positions / tf.constant(sky.pixel, positions.dtype) - 0.5
    lower = tf.floor(cells)
    x, y = tf.unstack(tf.cast(lower, tf.int64), axis=-1)
    share_x, share_y = tf.unstack((cells - lower)[..., tf.newaxis, :], axis=-1)
    flat = tf.reshape(maps, [n_x * n_y, *maps.shape[2:]])

    def corner(i: int, j: int) -> tf.Tensor:
        weight = (share_x if i else 1.0 - share_x) * (share_y if j else 1.0 - share_y)
        return weight * tf.gather(flat, (x + i) % n_x * n_y + (y + j) % n_y)

    return corner(0, 0) + corner(0, 1) + corner(1, 0) + corner(1, 1)


# From kappa to psi is -2 / k^2; a derivative along an axis is a factor i k.
_DERIVATIVES = (
    SkyFilter(lambda s: -2.0 * s.wavenumbers(odd=True)[0] * inverse_square(s), imaginary=True),
    SkyFilter(lambda s: -2.0 * s.wavenumbers(odd=True)[1] * inverse_square(s), imaginary=True),
    SkyFilter(lambda sky: 2.0 * sky.wavenumbers()[0] ** 2 * inverse_square(sky)),
    SkyFilter(lambda sky: 2.0 * mixed_product(sky) * inverse_square(sky)),
    SkyFilter(lambda sky: 2.0 * sky.wavenumbers()[1] ** 2 * inverse_square(sky)),
)
"""From kappa, psi's derivatives along axes 0 and 1, and second ones along 00, 01 and 11."""
