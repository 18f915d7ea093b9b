"""The pyramid force: the potential from a coarse mesh of the box and from each rank's block.

The potential is split by a Gaussian S = exp(-k^2 r^2), as in TreePM (Bagla 2002,
astro-ph/9911025). The long-range part S phi is transformed on a coarse mesh. The density is summed
onto this mesh with a B-spline, and the potential is interpolated from it with the same B-spline.
The windows of both are divided out. Each rank transforms the short-range part (1 - S) phi on its
own block, around which the density has a halo. So ranks exchange halos and the transforms of a
coarse mesh instead of the transforms of the mesh.

A response F(k), see `response`, becomes (F - F_inf) phi + F_inf (1 - S) phi + F_inf S phi: F_inf is
its limit at large k, and F - F_inf is smooth, so that the coarse mesh holds the first term, too.

Two meshes, B-splines and local transforms are as in Modi, Lanusse and Seljak 2021,
arXiv:2010.11847, section 3. Their short-range part is what the coarse mesh does not hold.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box, cast_float
from flowpm_dist.grid.decomposition import ORDER, Pyramid
from flowpm_dist.grid.fourier import (
    Factor,
    Filter,
    Kernel,
    convolve,
    convolve_adjoint,
    multiply,
)
from flowpm_dist.particle_mesh.spread import Block, Spread, spread_function
from meshimpl.compat import mtf
from meshimpl.operations.halo import halo_exchange, halo_reduce, padded_shape
from meshimpl.operations.local import local, sum_over_ranks

_LARGE = 1e15  # a wavenumber at which a response has its limit [h/Mpc]


@dataclass(frozen=True)
class BlockMap:
    """A linear operation on each rank's blocks, with its adjoint.

    Attributes:
        forward, backward: the function and its adjoint.
        before, after: the `mtf.Shape` of its input and of its result.
        name: the name of the operation.
    """

    forward: Block
    backward: Block
    before: Any
    after: Any
    name: str

    @property
    def adjoint(self) -> BlockMap:
        """The adjoint operation."""
        return BlockMap(self.backward, self.forward, self.after, self.before, self.name)

    def __call__(self, x: Any) -> Any:
        """Returns the result for an mtf tensor."""

        def run(block: tf.Tensor) -> tf.Tensor:
            return self.forward(tf.reshape(block, [-1, *block.shape[-3:]]))

        def back(_: list[Any], dys: list[Any]) -> list[Any]:
            return [self.adjoint(dys[0])]

        return local(run, [x], [(self.after, x.dtype)], adjoint=back, name=self.name)[0]


@dataclass(frozen=True)
class TwoMeshes:
    """The linear operator from a density to the potential with its halo, and its adjoint.

    Attributes:
        mesh: the mesh of the density, with cubic cells.
        pyramid: the coarse mesh and the split.
        inverse: the kernel from the density to the potential.
        width: planes of halo of the potential along the axes that are split.
        half: whether messages are float16, see `Communicator.alltoall`.
        response: a factor of the potential; None without one.
    """

    mesh: Box
    pyramid: Pyramid
    inverse: Kernel
    width: int
    half: bool = False
    response: Factor | None = None

    @functools.cached_property
    def coarse(self) -> Box:
        """The box with the coarse mesh as its grid."""
        return dataclasses.replace(self.mesh, grid=self.pyramid.coarse(self.mesh.grid))

    @property
    def shape(self) -> Any:
        """The `mtf.Shape` of the potential [..., x_halo, y_halo, z]."""
        return padded_shape(self.mesh.shape, self._widths(self.width), self.mesh.impl)

    def field(self, density: Any, coefficients: Any = None) -> Any:
        """Returns the potential with its halo, up to a constant on each rank.

        Args:
            density: mtf tensor [..., x, y, z] of the mesh.
            coefficients: coefficients of the response [..., n]; None without one.
        """
        wide = halo_exchange(density, self._density_halo, half=self.half)
        coarse, far = self.to_coarse(wide), self._far_filter
        smooth = convolve(coarse, self.coarse, far, coefficients, half=self.half)
        smooth = halo_exchange(smooth, self._coarse_halo, half=self.half)
        near = self.short_range(wide)
        if coefficients is not None:
            near = self._scaled(near, coefficients)
        return near + self.to_fine(smooth)

    def adjoint(self, cotangent: Any, coefficients: Any = None, density: Any = None) -> Any:
        """Returns the density's cotangent, from the cotangent of the potential with its halo.

        With coefficients of the response and the density, it is a list of the density's cotangent
        and this rank's part of the coefficients' own, as of `convolve_adjoint`.
        """
        near, far = cotangent, self.to_fine.adjoint(cotangent)
        far = halo_reduce(far, self.coarse.shape, self._coarse_halo, half=self.half)
        slopes = None
        if coefficients is None:
            far = convolve_adjoint(far, self.coarse, self._far_filter, half=self.half)
        else:
            wide = halo_exchange(density, self._density_halo, half=self.half)
            convolved = self._far_filter, coefficients, self.to_coarse(wide)
            far, slopes = convolve_adjoint(far, self.coarse, *convolved, half=self.half)
            slopes += self._slopes(self.short_range(wide), cotangent, coefficients)
            near = self._scaled(cotangent, coefficients)
        total = self.short_range.adjoint(near) + self.to_coarse.adjoint(far)
        total = halo_reduce(total, self.mesh.shape, self._density_halo, half=self.half)
        return total if slopes is None else [total, slopes]

    def _scaled(self, x: Any, coefficients: Any) -> Any:
        """Returns blocks times the limit of the response at large wavenumbers."""

        def run(block: tf.Tensor, c: tf.Tensor) -> tf.Tensor:
            scale = self._limit(tf.reshape(c, [-1, c.shape[-1]]))
            return tf.reshape(block, [-1, *block.shape[-3:]]) * scale[:, None, None, None]

        def adjoint(inputs: list[Any], dys: list[Any]) -> list[Any]:
            slopes = sum_over_ranks(self._slopes(inputs[0], dys[0], coefficients), like=x)
            return [self._scaled(dys[0], coefficients), mtf.cast(slopes, coefficients.dtype)]

        inputs, outputs = [x, coefficients], [(x.shape, x.dtype)]
        return local(run, inputs, outputs, adjoint=adjoint, name="scaled")[0]

    def _slopes(self, x: Any, y: Any, coefficients: Any) -> Any:
        """Returns this rank's part of the derivatives of the product of y and `_scaled` x."""

        def run(x: tf.Tensor, y: tf.Tensor, c: tf.Tensor) -> tf.Tensor:
            products = tf.reshape(x * y, [-1, math.prod(x.shape[-3:])])
            sums = tf.reduce_sum(tf.cast(products, tf.float64), axis=1)
            c = tf.cast(tf.reshape(c, [-1, c.shape[-1]]), tf.float64)
            with tf.GradientTape() as tape:
                tape.watch(c)
                total = tf.reduce_sum(sums * self._limit(c))
            return tape.gradient(total, c, unconnected_gradients="zero")

        outputs = [(coefficients.shape, tf.float64)]
        return local(run, [x, y, coefficients], outputs, name="scaled_slopes")[0]

    def _limit(self, c: tf.Tensor) -> tf.Tensor:
        """Returns the limit of the response [batch] for coefficients [batch, n]."""
        assert self.response is not None
        far = tf.constant(_LARGE, c.dtype)
        return self.response(far, tf.zeros_like(far), tf.zeros_like(far), tf.unstack(c, axis=-1))

    def _widths(self, planes: int) -> dict[str, int]:
        return {name: planes if ranks > 1 else 0 for name, ranks in self.mesh.split.items()}

    @property
    def _density_halo(self) -> dict[str, int]:
        return self._widths(self.pyramid.density_halo(self.width))

    @property
    def _coarse_halo(self) -> dict[str, int]:
        return self._widths(self.pyramid.coarse_halo(self.width))

    def _padded(self, box: Box, halo: dict[str, int]) -> Any:
        return padded_shape(box.shape, halo, box.impl)

    @property
    def to_coarse(self) -> BlockMap:
        """The sum of a density with its halo, onto the coarse mesh."""
        scale = self.pyramid.factor**-3.0
        return self._joined({}, self._density_halo, scale, "to_coarse").adjoint

    @property
    def to_fine(self) -> BlockMap:
        """The interpolation of a potential of the coarse mesh with its halo."""
        return self._joined(self._coarse_halo, self._widths(self.width), 1.0, "to_fine")

    def _joined(
        self, coarse: dict[str, int], fine: dict[str, int], scale: float, name: str
    ) -> BlockMap:
        """Returns the sum of B-splines around the coarse cells, on the fine cells.

        Args:
            coarse, fine: the halos of both meshes; none if empty.
            scale: a factor of the result.
            name: the name of the operation.
        """
        split = {axis: ranks > 1 for axis, ranks in self.mesh.split.items()}
        steps = [
            Spread(
                n,
                (coarse.get(name, 0), fine[name]) if split.get(name) else None,
                axis,
                self.pyramid,
            )
            for axis, (name, n) in enumerate(zip("xyz", self.coarse.block, strict=True), 1)
        ]

        def forward(block: tf.Tensor) -> tf.Tensor:
            block = scale * block
            for step in reversed(steps):  # x, which makes the largest block of it, at last
                block = spread_function(step)(block)
            return block

        def backward(block: tf.Tensor) -> tf.Tensor:
            for step in steps:
                block = spread_function(step, adjoint=True)(block)
            return scale * block

        shapes = self._padded(self.coarse, coarse), self._padded(self.mesh, fine)
        return BlockMap(forward, backward, *shapes, name)

    @property
    def short_range(self) -> BlockMap:
        """The short-range potential with its halo, of the density with its own."""
        wide, narrow = (
            [*halo.values(), 0] for halo in (self._density_halo, self._widths(self.width))
        )
        starts = [w - k for w, k in zip(wide, narrow, strict=True)]
        before, after = (
            [n + 2 * h for n, h in zip(self.mesh.block, halo, strict=True)]
            for halo in (wide, narrow)
        )
        lengths = [fft_length(n) if w else n for n, w in zip(before, wide, strict=True)]

        def convolved(block: tf.Tensor) -> tf.Tensor:
            """Returns the short-range potential of a block, padded to the transform's length.

            Planes next to the edge feel zeros or the block's opposite edge instead of the density
            beyond it. Only particles that have moved far are there.
            """
            spectrum = tf.signal.rfft3d(block, lengths)
            pairs = tf.bitcast(spectrum, block.dtype)
            k = _wavenumbers(lengths, self.mesh, block.dtype)
            pairs = self._multiply(pairs, *k)
            return tf.signal.irfft3d(tf.bitcast(pairs, spectrum.dtype), lengths)

        def forward(block: tf.Tensor) -> tf.Tensor:
            return tf.slice(convolved(block), [0, *starts], [-1, *after])

        def backward(block: tf.Tensor) -> tf.Tensor:
            block = tf.pad(block, [[0, 0], *([n, n] for n in starts)])
            return tf.slice(convolved(block), [0] * 4, [-1, *before])

        density = self._padded(self.mesh, self._density_halo)
        return BlockMap(forward, backward, density, self.shape, "short_range")

    @property
    def _multiply(self) -> Callable[..., tf.Tensor]:
        """Multiplication by the filter of a block, which belongs to one graph, as lengths do.

        It leaves out the mean, which would add a constant to the potential.
        """
        return multiply(Filter(lambda *k: self.inverse(*k) * (1 - self._split(*k))), 1.0)

    @property
    def _far_filter(self) -> Filter:
        """The filter of the coarse mesh, which divides the windows of both B-splines out."""
        factor = self.pyramid.factor
        split = self._split if self.response is None else lambda *_: 1.0

        def kernel(*k: tf.Tensor) -> tf.Tensor:
            cell = cast_float(self.mesh.cell_lengths[0], k[0].dtype)
            x, y, z = (_window(component, cell, factor) for component in k)
            return self.inverse(*k) * split(*k) / (x * y * z) ** 2

        response = self.response
        if response is None:
            return Filter(kernel)

        def smooth_part(
            kx: tf.Tensor, ky: tf.Tensor, kz: tf.Tensor, coefficients: Sequence[tf.Tensor]
        ) -> tf.Tensor:
            limit = response(tf.constant(_LARGE, kx.dtype), 0.0, 0.0, coefficients)
            return response(kx, ky, kz, coefficients) - limit * (1 - self._split(kx, ky, kz))

        return Filter(kernel, factor=smooth_part)

    def _split(self, kx: tf.Tensor, ky: tf.Tensor, kz: tf.Tensor) -> tf.Tensor:
        """Returns S(k) [1]."""
        radius = self.pyramid.radius * self.coarse.cell_lengths[0]
        return tf.exp(cast_float(-(radius**2), kx.dtype) * (kx**2 + ky**2 + kz**2))


def fft_length(least: int) -> int:
    """Returns the smallest number from `least` on without prime factors beyond 7."""
    return next(n for n in itertools.count(least) if _is_smooth(n))


def _is_smooth(number: int) -> bool:
    for prime in (2, 3, 5, 7):
        while number % prime == 0:
            number //= prime
    return number == 1


def _wavenumbers(lengths: Sequence[int], mesh: Box, dtype: tf.DType) -> list[tf.Tensor]:
    """Returns kx, ky, kz [h/Mpc] of the real transform of a block, which broadcast."""
    x, y, z = lengths
    frequencies = np.fft.fftfreq(x)[:, np.newaxis, np.newaxis], np.fft.fftfreq(y)[:, np.newaxis]
    numbers = [
        np.rint(f * n) for f, n in zip((*frequencies, np.fft.rfftfreq(z)), lengths, strict=True)
    ]
    return [
        cast_float(2 * np.pi * (number * (1 / (n * cell))), dtype)
        for number, n, cell in zip(numbers, lengths, mesh.cell_lengths, strict=True)
    ]


def _window(k: tf.Tensor, cell: tf.Tensor, factor: int) -> tf.Tensor:
    """Returns the transform of the B-spline along one axis [1]."""
    x = 0.5 * k * cell
    small = tf.abs(x) < 1e-4
    safe = tf.where(small, tf.ones_like(x), x)
    ratio = tf.sin(factor * safe) / (factor * tf.sin(safe))
    return tf.where(small, 1 - (factor**2 - 1) * x**2 / 6, ratio) ** ORDER
