"""Gravity of the particles: density -> potential or force field -> kick, and their adjoints.

With a density of mean 1 and time in 1/H0, the acceleration is -grad phi, where laplacian phi =
1.5 Omega_m (density - 1). The scale factor and 1.5 Omega_m are parts of the kick factors.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import tensorflow as tf

from flowpm_dist.grid.box import Box, BoxFunction, cached_for_all_sizes, cast_float
from flowpm_dist.grid.decomposition import CUBIC, PYRAMIDS
from flowpm_dist.grid.fourier import (
    Factor,
    Filter,
    Kernel,
    beyond_mode,
    convolve,
    convolve_adjoint,
    inverse_square,
    painting_window,
    without_nyquist,
)
from flowpm_dist.particle_mesh.cloud_in_cell import (
    STENCIL,
    ParticleMesh,
    paint,
    paint_adjoint,
    read,
    read_gradient,
)
from flowpm_dist.particle_mesh.kernels import kernels
from flowpm_dist.particle_mesh.options import ForceOptions
from flowpm_dist.particle_mesh.pyramid import TwoMeshes
from flowpm_dist.particle_mesh.response import NeutrinoResponse, Response
from meshimpl.compat import mtf
from meshimpl.mesh_function import MeshFunction
from meshimpl.operations.local import local


def _lowered_for_all_sizes(
    build: Callable[[Gravity], MeshFunction],
) -> functools.cached_property[BoxFunction]:
    """Makes a mesh function of `Gravity` a property, lowered once for all sizes of the box."""

    @cached_for_all_sizes(512)
    def lowered(box: Box, gravity: Gravity) -> MeshFunction:
        return build(gravity)

    @functools.wraps(build)
    def of_size(gravity: Gravity) -> BoxFunction:
        pm = gravity.pm
        of_any_size = dataclasses.replace(pm, box=pm.box.of_any_size)
        return lowered(pm.box, dataclasses.replace(gravity, pm=of_any_size))

    return functools.cached_property(of_size)


@dataclass(frozen=True)
class Gravity:
    """The gravity between the particles of a mesh.

    Each phase of a kick is a mesh function, lowered when it is first needed and then kept.

    Attributes:
        pm: the particles, the mesh and the halo.
        options: the options of the force. The window is divided out up to the particles' Nyquist
            wavenumber: beyond it lie the harmonics of their lattice.
        response: the factor by which the potential is multiplied; None without one.

    Raises:
        ValueError: a pyramid force with a correction, or of cells that are not cubic.
    """

    pm: ParticleMesh
    options: ForceOptions = ForceOptions()
    response: Response | None = None

    def __post_init__(self) -> None:
        allowed = self._differences and isinstance(self.response, NeutrinoResponse | None)
        if self.options.pyramid != "off" and not allowed:
            raise ValueError("a pyramid force has a potential, and no correction of the force")
        cell = self.pm.mesh.cell  # NaN in a box of any size
        if self.options.pyramid != "off" and max(cell) > (1 + CUBIC) * min(cell):
            raise ValueError(f"the cells {cell} Mpc/h are not cubic")

    @functools.cached_property
    def _pyramid(self) -> TwoMeshes | None:
        """The operator of a pyramid force, whose potential has its halo."""
        pyramid, pm = self.options.pyramid, self.pm
        if pyramid == "off":
            return None
        inverse = _inverse_laplacian(pm, self.options.deconvolve)
        width = max(pm.widths(self._margin).values())
        return TwoMeshes(pm.mesh, PYRAMIDS[pyramid], inverse, width, pm.half, self._factor)

    @property
    def _differences(self) -> bool:
        """Whether forces are finite differences of the potential."""
        return self.options.force_gradient == "finite-difference"

    @property
    def filters(self) -> Filter | Sequence[Filter]:
        """The filters from the painted mesh to the potential, or to the force's components."""
        mesh, factor = self.pm.mesh, self._factor
        inverse = _inverse_laplacian(self.pm, self.options.deconvolve)
        if self._differences:
            return Filter(inverse, factor=factor)

        def along(axis: int) -> Kernel:
            return lambda *k: -without_nyquist(k[axis], axis, mesh) * inverse(*k)

        return [Filter(along(axis), imaginary=True, factor=factor) for axis in range(3)]

    @property
    def _factor(self) -> Factor | None:
        """The response as a function of wavenumbers [h/Mpc] and coefficients."""
        mesh, response = self.pm.mesh, self.response
        if response is None:
            return None

        def factor(
            kx: tf.Tensor, ky: tf.Tensor, kz: tf.Tensor, coefficients: Sequence[tf.Tensor]
        ) -> tf.Tensor:
            nyquist = math.pi / math.prod(mesh.cell_lengths) ** (1 / 3)
            k = tf.sqrt(kx**2 + ky**2 + kz**2) / cast_float(nyquist, kx.dtype)
            return response(k, coefficients)

        return factor

    @property
    def is_symmetric(self) -> bool:
        """Whether `field` is its own adjoint."""
        plain = self._differences and not self.pm.half and self.response is None
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

    @property
    def kept_shapes(self) -> list[Any]:
        """The `mtf.Shape`s of what a kick can keep for its adjoint: its field and, for the adjoint
        of a response, what was painted.
        """
        return [self.field_shape, *([] if self.response is None else [self.pm.mesh.shape])]

    @_lowered_for_all_sizes
    def paint(self) -> MeshFunction:
        """The function `f(displacement)`: particles in each cell of the mesh, and their reach."""
        box = self.pm.box
        return box.function(lambda _, s: paint(s, self.pm), displacement=box.vector_shape)

    @_lowered_for_all_sizes
    def paint_weighted(self) -> MeshFunction:
        """The function `f(displacement, weights)`: `paint` with weights [..., x, y, z]."""
        box = self.pm.box
        return box.function(
            lambda _, s, w: paint(s, self.pm, w), displacement=box.vector_shape, weights=box.shape
        )

    @_lowered_for_all_sizes
    def paint_adjoint(self) -> MeshFunction:
        """`f(cotangent of what was painted, displacement, ds)`: ds and the paint's part."""
        box = self.pm.box
        return box.function(
            lambda _, dy, s, ds: paint_adjoint(dy, [s], self.pm, add=ds)[0],
            cotangent=self.pm.mesh.shape,
            displacement=box.vector_shape,
            ds=box.vector_shape,
        )

    @_lowered_for_all_sizes
    def field(self) -> MeshFunction:
        """The potential [(Mpc/h)^2] or the force field [Mpc/h], over 1.5 Omega_m.

        `f(painted)`, of the particles in each cell of the mesh [..., x, y, z]; with a
        response `f(painted, coefficients)`, of its coefficients [..., size of the response].
        """
        pm = self.pm

        def build(_: Any, painted: Any, coefficients: Any = None) -> Any:
            if pm.half:
                # Rounding is relative: at early times the mean is far larger than what matters.
                painted = painted - pm.mean
            if self._pyramid is not None:
                return self._pyramid.field(painted, coefficients)
            return convolve(painted, pm.mesh, self.filters, coefficients, half=pm.half)

        return pm.box.function(build, painted=pm.mesh.shape, **self._coefficient_shape)

    @_lowered_for_all_sizes
    def field_adjoint(self) -> MeshFunction:
        """`f(cotangent of the field)`: the cotangent of what was painted.

        With a response it is `f(cotangent, coefficients, painted)`, and the cotangents of the
        coefficients follow, this rank's part; see `convolve_adjoint`.
        """
        if self.is_symmetric:
            return cast(MeshFunction, self.field)
        pm, more = self.pm, self._coefficient_shape
        if more:
            more["painted"] = pm.mesh.shape

        def build(_: Any, cotangent: Any, coefficients: Any = None, painted: Any = None) -> Any:
            if self._pyramid is not None:
                return self._pyramid.adjoint(cotangent, coefficients, painted)
            return convolve_adjoint(
                cotangent, pm.mesh, self.filters, coefficients, painted, half=pm.half
            )

        return pm.box.function(build, cotangent=self.field_shape, **more)

    @_lowered_for_all_sizes
    def force(self) -> MeshFunction:
        """`f(field, displacement)`: the force over 1.5 Omega_m at the particles [Mpc/h].

        It is [..., x, y, z, component]. The field is a result of `field`.
        """

        def build(_: Any, field: Any, displacement: Any) -> Any:
            if self._differences:
                padded = self._pyramid is not None
                return read_gradient(field, displacement, self.pm, padded=padded)
            return read(field, displacement, self.pm)

        box = self.pm.box
        return box.function(build, field=self.field_shape, displacement=box.vector_shape)

    @_lowered_for_all_sizes
    def kick(self) -> MeshFunction:
        """`f(field, displacement, velocity, factors)`: the velocity after a kick.

        It is factors[0] velocity + factors[1] force, read and added in one pass, for a result of
        `field`, displacement and velocity [..., x, y, z, component], and factors [..., 2]. It has
        no gradient; its adjoint is `kick_adjoint`.
        """
        pm, vector = self.pm, self.pm.box.vector_shape

        def run(f: tf.Tensor, s: tf.Tensor, v: tf.Tensor, c: tf.Tensor) -> tf.Tensor:
            f = pm.block(f, self._margin, self._components)
            c = tf.reshape(c, [-1, 2])
            g = pm.lattice(self._margin)
            return kernels().kick(g, f, pm.particles(s), pm.particles(v), c)

        def build(_: Any, field: Any, displacement: Any, velocity: Any, factors: Any) -> Any:
            inputs = [self._with_halo(field), displacement, velocity, factors]
            return local(run, inputs, [(velocity.shape, velocity.dtype)], name="kick")[0]

        return pm.box.function(
            build,
            field=self.field_shape,
            displacement=vector,
            velocity=vector,
            factors=self._factor_shape,
        )

    @_lowered_for_all_sizes
    def kick_adjoint(self) -> MeshFunction:
        """`f(field, displacement, velocity, dv, ds, factors)`: a kick undone, with cotangents.

        Field, displacement and factors are the arguments of the kick. The velocity and its
        cotangent `dv` are those after the kick; `ds` is the cotangent of the displacement, without
        the kick's contribution. The results are the velocity before the kick, and the cotangents of
        the field, the displacement and the factors. The latter is float64 [..., 2], this rank's
        part, which differs between ranks.
        """
        pm, vector = self.pm, self.pm.box.vector_shape

        def run(*blocks: tf.Tensor) -> tuple[tf.Tensor, ...]:
            f, c = pm.block(blocks[0], self._margin, self._components), blocks[-1]
            s, v, dv, ds = (pm.particles(x) for x in blocks[1:-1])
            c = tf.reshape(c, [-1, 2])
            return kernels().kick_vjp(pm.lattice(self._margin), f, s, v, dv, ds, c)

        def build(_: Any, field: Any, *others: Any) -> tuple[Any, Any, Any, Any]:
            padded = self._with_halo(field)
            _displacement, velocity, _dv, ds, factors = others
            outputs = [(x.shape, x.dtype) for x in (velocity, padded, ds)]
            outputs.append((factors.shape, tf.float64))
            before, dfield, ds, sums = local(run, [padded, *others], outputs, name="kick_adjoint")
            if self._pyramid is None:
                dfield = pm.without_halo(dfield, field.shape, self._margin)
            return before, dfield, ds, sums

        return pm.box.function(
            build,
            field=self.field_shape,
            displacement=vector,
            velocity=vector,
            dv=vector,
            ds=vector,
            factors=self._factor_shape,
        )

    def without_response(self) -> list[tf.Tensor]:
        """Returns coefficients of 0 if the force has a response, else an empty list."""
        response, box = self.response, self.pm.box
        return [] if response is None else [tf.zeros([*box.local_batch, response.size], box.dtype)]

    @property
    def _coefficient_shape(self) -> dict[str, Any]:
        """The shape of a response's coefficients, by the name of the input; empty without one."""
        if self.response is None:
            return {}
        dims = [*self.pm.box.number_shape.dims, mtf.Dimension("term", self.response.size)]
        return {"coefficients": mtf.Shape(dims)}

    @property
    def _factor_shape(self) -> Any:
        """The shape of the factors of a kick: one of the velocity, one of the force."""
        return mtf.Shape([*self.pm.box.number_shape.dims, mtf.Dimension("factor", 2)])

    def _with_halo(self, field: Any) -> Any:
        return field if self._pyramid is not None else self.pm.with_halo(field, self._margin)


def _inverse_laplacian(pm: ParticleMesh, deconvolve: bool) -> Kernel:
    def kernel(kx: tf.Tensor, ky: tf.Tensor, kz: tf.Tensor) -> tf.Tensor:
        result = -pm.cells_per_particle * inverse_square(kx, ky, kz)
        if not deconvolve:
            return result
        x, y, z = (
            beyond_mode(k, (n + 1) / 2, axis, pm.box)
            for axis, (k, n) in enumerate(zip((kx, ky, kz), pm.box.grid, strict=True))
        )
        inside = painting_window(kx, ky, kz, pm.mesh)
        window = tf.where(x | y | z, tf.ones_like(result), inside)
        return result / window**2

    return kernel
