"""Gravity of the particles: density -> potential or force field -> kick, and their adjoints.

With a density of mean 1 and time in 1/H0, the acceleration is -grad phi, where laplacian phi =
1.5 Omega_m (density - 1). The scale factor and 1.5 Omega_m are parts of the kick factors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf

from flowpm_dist.grid.decomposition import PYRAMIDS
from flowpm_dist.grid.fourier import (
    Filter,
    Kernel,
    beyond_mode,
    cic_window,
    convolve,
    convolve_adjoint,
    inverse_square,
    without_nyquist,
)
from flowpm_dist.particle_mesh.cloud_in_cell import STENCIL, ParticleMesh, read, read_gradient
from flowpm_dist.particle_mesh.kernels import kernels
from flowpm_dist.particle_mesh.options import ForceOptions
from flowpm_dist.particle_mesh.pyramid import TwoMeshes
from meshimpl.compat import mtf
from meshimpl.operations.local import local


class Basis(Hashable, Protocol):
    """Functions of the wavenumber, of which the correction of a force is a sum."""

    @property
    def size(self) -> int:
        """The number of functions."""

    def __call__(self, k: tf.Tensor) -> Sequence[tf.Tensor]:
        """Returns the value of each function [1], of any shape.

        Args:
            k: wavenumbers over the Nyquist wavenumber of the force mesh, of the same shape.
        """


@dataclass(frozen=True)
class Gravity:
    """The gravity between the particles of a mesh.

    Attributes:
        pm: the particles, the mesh and the halo.
        options: the options of the force. The window is divided out up to the particles' Nyquist
            wavenumber: beyond it lie the harmonics of their lattice.
        basis: the functions by whose sum the potential is corrected; None without a correction.
    """

    pm: ParticleMesh
    options: ForceOptions = ForceOptions()
    basis: Basis | None = None

    def __post_init__(self) -> None:
        if self.options.pyramid != "off" and not (self._differences and self.basis is None):
            raise ValueError("a pyramid force has a potential, and no correction")

    @functools.cached_property
    def _pyramid(self) -> TwoMeshes | None:
        """The operator of a pyramid force, whose potential has its halo."""
        pyramid, pm = self.options.pyramid, self.pm
        if pyramid == "off":
            return None
        inverse = _inverse_laplacian(pm, self.options.deconvolve)
        width = max(pm.widths(self._margin).values())
        return TwoMeshes(pm.mesh, PYRAMIDS[pyramid], inverse, width, pm.half)

    @property
    def _differences(self) -> bool:
        """Whether the potential is read, and differences of it taken."""
        return self.options.force_gradient == "finite-difference"

    @property
    def filters(self) -> Filter | Sequence[Filter]:
        """The filters from the painted mesh to the potential, or to the force's components."""
        mesh = self.pm.mesh
        inverse = _inverse_laplacian(self.pm, self.options.deconvolve)
        basis, nyquist = self.basis, math.pi / math.prod(mesh.cell) ** (1 / 3)

        def terms(kx: tf.Tensor, ky: tf.Tensor, kz: tf.Tensor) -> Sequence[tf.Tensor]:
            assert basis is not None
            return basis(tf.sqrt(kx**2 + ky**2 + kz**2) / nyquist)

        given = None if basis is None else terms
        if self._differences:
            return Filter(inverse, terms=given)

        def along(axis: int) -> Kernel:
            return lambda *k: -without_nyquist(k[axis], axis, mesh) * inverse(*k)

        return [Filter(along(axis), imaginary=True, terms=given) for axis in range(3)]

    @property
    def is_symmetric(self) -> bool:
        """Whether `field` is its own adjoint."""
        plain = self._differences and not self.pm.half and self.basis is None
        return plain and self._pyramid is None

    @property
    def _margin(self) -> int:
        return STENCIL if self._differences else 0

    @property
    def _components(self) -> int:
        return 0 if self._differences else 3

    @property
    def field_shape(self) -> Any:
        """The `mtf.Shape` of the field that is read, which has its halo in a pyramid force."""
        if self._pyramid is not None:
            return self._pyramid.shape
        mesh = self.pm.mesh
        return mesh.vector_shape if self._components else mesh.shape

    def field(self, painted: Any, coefficients: Any = None) -> Any:
        """Returns the potential [(Mpc/h)^2] or the force field [Mpc/h], over 1.5 Omega_m.

        Args:
            painted: the particles in each cell of the mesh, mtf tensor [..., x, y, z].
            coefficients: coefficients of the basis, mtf tensor [..., size of the basis].
        """
        if self.pm.half:
            # Rounding is relative: at early times the mean is far larger than what matters.
            painted = painted - self.pm.mean
        if self._pyramid is not None:
            return self._pyramid.field(painted)
        return convolve(painted, self.pm.mesh, self.filters, coefficients, half=self.pm.half)

    def field_adjoint(self, cotangent: Any, coefficients: Any = None, painted: Any = None) -> Any:
        """Returns the cotangents of the inputs of `field`; its adjoint. See `convolve_adjoint`."""
        if self._pyramid is not None:
            return self._pyramid.adjoint(cotangent)
        return convolve_adjoint(
            cotangent, self.pm.mesh, self.filters, coefficients, painted, half=self.pm.half
        )

    def force(self, field: Any, displacement: Any) -> Any:
        """Returns the force over 1.5 Omega_m at the particles.

        Returns:
            mtf tensor [..., x, y, z, component] [Mpc/h].
        """
        if self._differences:
            return read_gradient(field, displacement, self.pm, padded=self._pyramid is not None)
        return read(field, displacement, self.pm)

    def _with_halo(self, field: Any) -> Any:
        return field if self._pyramid is not None else self.pm.with_halo(field, self._margin)

    def kick(self, field: Any, displacement: Any, velocity: Any, factors: Any) -> Any:
        """Returns factors[0] velocity + factors[1] force, read and added in one pass.

        It has no gradient; its adjoint is `kick_adjoint`.

        Args:
            field: the result of `field`.
            displacement, velocity: mtf tensors [..., x, y, z, component].
            factors: mtf tensor [..., 2].
        """
        g, pm = self.pm.lattice(self._margin), self.pm

        def run(f: tf.Tensor, s: tf.Tensor, v: tf.Tensor, c: tf.Tensor) -> tf.Tensor:
            f = pm.block(f, self._margin, self._components)
            c = tf.reshape(c, [-1, 2])
            return kernels().kick(g, f, pm.particles(s), pm.particles(v), c)

        padded = self._with_halo(field)
        inputs = [padded, displacement, velocity, factors]
        return local(run, inputs, [(velocity.shape, velocity.dtype)], name="kick")[0]

    def kick_adjoint(
        self, field: Any, displacement: Any, velocity: Any, dv: Any, ds: Any, factors: Any
    ) -> tuple[Any, Any, Any, Any]:
        """Undoes a kick and propagates cotangents backwards through it.

        Args:
            field, displacement, factors: the arguments of the kick.
            velocity: the velocity after the kick.
            dv: the cotangent of the velocity after the kick.
            ds: the cotangent of the displacement, without the kick's contribution.

        Returns:
            The velocity before the kick, the cotangent of `field`, the cotangent of the
            displacement, and this rank's part of the cotangents of the factors [..., 2], float64,
            which differs between ranks.
        """
        g, pm = self.pm.lattice(self._margin), self.pm

        def run(*blocks: tf.Tensor) -> tuple[tf.Tensor, ...]:
            f, c = pm.block(blocks[0], self._margin, self._components), blocks[-1]
            s, v, dv, ds = (pm.particles(x) for x in blocks[1:-1])
            c = tf.reshape(c, [-1, 2])
            return kernels().kick_vjp(g, f, s, v, dv, ds, c)

        padded = self._with_halo(field)
        outputs = [(x.shape, x.dtype) for x in (velocity, padded, ds)]
        outputs.append((factors.shape, tf.float64))
        inputs = [padded, displacement, velocity, dv, ds, factors]
        before, dfield, ds, sums = local(run, inputs, outputs, name="kick_adjoint")
        if self._pyramid is None:
            dfield = pm.without_halo(dfield, field.shape, self._margin)
        return before, dfield, ds, sums


def _inverse_laplacian(pm: ParticleMesh, deconvolve: bool) -> Kernel:
    def kernel(kx: tf.Tensor, ky: tf.Tensor, kz: tf.Tensor) -> tf.Tensor:
        result = -pm.cells_per_particle * inverse_square(kx, ky, kz)
        if not deconvolve:
            return result
        x, y, z = (
            beyond_mode(k, (n + 1) / 2, axis, pm.box)
            for axis, (k, n) in enumerate(zip((kx, ky, kz), pm.box.grid, strict=True))
        )
        inside = cic_window(kx, ky, kz, pm.mesh)
        window = tf.where(x | y | z, tf.ones_like(result), inside)
        return result / window**2

    return kernel


FACTORS = mtf.Dimension("factor", 2)
"""The factors of a kick: one of the velocity, one of the force."""
