"""Particles and the mesh they are painted on: paint and read on many ranks, with their adjoints.

A particle of lattice cell i with displacement s lies at i + s / spacing. It stays on the rank of
its lattice cell. A rank paints its particles on its block of the mesh with a halo around it. The
halo is then added to the neighbours' blocks. Fields are read from a block with its halo. An axis
that is not split has no halo; it is periodic within the block. The kernels themselves are in
`kernels`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box, cached_for_all_sizes, cast_float
from flowpm_dist.grid.decomposition import needed_halo, suggested_halo
from flowpm_dist.particle_mesh.kernels import Lattice, kernels
from meshimpl.compat import mtf
from meshimpl.mesh_function import MeshFunction
from meshimpl.operations.halo import halo_exchange, halo_reduce, padded_shape
from meshimpl.operations.local import local, maximum_over_ranks

STENCIL = 2
"""Number of planes that the 4-point difference needs beyond the cells of a particle."""

_AXES = mtf.Shape([mtf.Dimension("axis", 3)])


@dataclass(frozen=True)
class ParticleMesh:
    """The particles of a box, and a mesh `mesh_factor` times as fine per side, see `Box.finer`.

    Attributes:
        box: the box of the particles, with one in each cell of its grid.
        mesh_factor: the number of mesh cells per particle spacing.
        halo: the width of the halo along split axes [particle spacings]; every displacement along
            them must be less.
        half: whether the messages of the mesh are float16, see `Communicator.alltoall`.
    """

    box: Box
    mesh_factor: float
    halo: int
    half: bool = False

    @functools.cached_property
    def mesh(self) -> Box:
        """The box with the mesh as its grid."""
        return self.box.finer(self.mesh_factor)

    @property
    def ratio(self) -> tuple[int, int]:
        """Cells and particle spacings of the same length: the factor as a fraction."""
        cells, spacings = self.mesh.grid[0], self.box.grid[0]
        common = math.gcd(cells, spacings)
        return cells // common, spacings // common

    @property
    def cells_per_particle(self) -> float:
        """The number of mesh cells divided by the number of particles."""
        return self.mesh.cells / self.box.cells

    @property
    def mean(self) -> float:
        """The mean number of particles in a cell of the mesh."""
        return 1.0 / self.cells_per_particle

    def widths(self, margin: int = 0) -> dict[str, int]:
        """Returns the planes of halo along x and y of the mesh; 0 where an axis is not split."""
        cells, spacings = self.ratio
        planes = -(-self.halo * cells // spacings) + margin  # rounded up
        return {name: planes if ranks > 1 else 0 for name, ranks in self.box.split.items()}

    def with_halo(self, field: Any, margin: int = 0) -> Any:
        """Returns a field of the mesh whose blocks have their neighbours' planes around them."""
        return halo_exchange(field, self.widths(margin), half=self.half)

    def without_halo(self, padded: Any, shape: Any, margin: int = 0) -> Any:
        """Adds the planes of halos to their owners: the adjoint of `with_halo`."""
        return halo_reduce(padded, shape, self.widths(margin), half=self.half)

    def lattice(self, margin: int = 0) -> Lattice:
        """Returns the lattice of this rank's particles in their padded block of the mesh."""
        widths = self.widths(margin)
        halo = widths["x"], widths["y"], 0
        with tf.device("CPU:0"):  # where GPUs' kernels expect the size
            cell = self.mesh.cell_lengths
        return Lattice(self.box.block, self.mesh_factor, halo, cell)

    def padded(self, shape: Any) -> Any:
        """Returns the `mtf.Shape` of a field of `shape` on the mesh, with its halo."""
        return padded_shape(shape, self.widths(), self.box.impl)

    def particles(self, x: tf.Tensor) -> tf.Tensor:
        """Returns a vector for each particle in the kernels' shape: [batch, x, y, z, 3]."""
        return tf.reshape(x, [-1, *self.box.block, 3])

    def block(self, x: tf.Tensor, margin: int = 0, components: int = 0) -> tf.Tensor:
        """Returns a padded block in the kernels' shape: [batch, x, y, z] or [..., components]."""
        shape = [-1, *self.lattice(margin).mesh_block]
        return tf.reshape(x, [*shape, components] if components else shape)


def paint(displacement: Any, pm: ParticleMesh, weights: Any = None) -> tuple[Any, Any]:
    """Returns the cloud-in-cell sums of the particles' weights in the cells of the mesh.

    Args:
        displacement: mtf tensor [..., x, y, z, component] [Mpc/h].
        pm: the particles, the mesh and the halo.
        weights: mtf tensor [..., x, y, z]; by default each particle has weight 1.

    Returns:
        An mtf tensor [..., x, y, z] of the mesh, and the reach over all ranks: the largest
        |displacement| along each axis [particle spacings], infinite where a displacement is not
        finite. A particle beyond the halo is left out, so the caller must compare the reach with
        the halo.
    """
    dtype = displacement.dtype
    padded = pm.padded(pm.mesh.shape)
    cells, spacings = pm.ratio
    inputs = [displacement] if weights is None else [displacement, weights]

    def run(s: tf.Tensor, w: tf.Tensor | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        w = None if w is None else tf.reshape(w, [-1, *pm.box.block])
        painted, reach = kernels().paint(pm.lattice(), pm.particles(s), w)
        # In this order a particle that is beyond the halo is not rounded into it.
        return painted, reach * spacings / cells

    def adjoint(xs: list[Any], dys: list[Any]) -> list[Any]:
        return paint_adjoint(dys[0], xs, pm, padded=True)

    outputs = [(padded, dtype), (_AXES, dtype)]
    painted, reach = local(run, inputs, outputs, adjoint=adjoint, name="paint")
    return pm.without_halo(painted, pm.mesh.shape), maximum_over_ranks(reach)


def paint_adjoint(
    cotangent: Any, inputs: list[Any], pm: ParticleMesh, *, padded: bool = False, add: Any = None
) -> list[Any]:
    """Returns the cotangents of the inputs of `paint`: displacement, and weights if there were any.

    Args:
        cotangent: the cotangent of the painted mesh [..., x, y, z].
        inputs: the displacement, and the weights if there were any.
        pm: as for `paint`.
        padded: whether the cotangent already has its halo.
        add: a cotangent of the displacement to which this one is added.
    """
    cotangent = cotangent if padded else pm.with_halo(cotangent)
    displacement, *weights = inputs

    def run(dy: tf.Tensor, s: tf.Tensor, *rest: tf.Tensor) -> Any:
        others = list(rest)
        w = tf.reshape(others.pop(0), [-1, *pm.box.block]) if weights else None
        total = pm.particles(others.pop(0)) if add is not None else None
        ds, dw = kernels().paint_vjp(pm.lattice(), pm.particles(s), w, pm.block(dy), total)
        return [ds] if w is None else [ds, dw]

    extra = [] if add is None else [add]
    outputs = [(x.shape, x.dtype) for x in inputs]
    return local(run, [cotangent, displacement, *weights, *extra], outputs, name="paint_adjoint")


def read(field: Any, displacement: Any, pm: ParticleMesh) -> Any:
    """Returns the cloud-in-cell values of a field of the mesh at the particles.

    Args:
        field: mtf tensor [..., x, y, z, component] of the mesh.
        displacement: mtf tensor [..., x, y, z, component] [Mpc/h].
        pm: as for `paint`.

    Returns:
        mtf tensor [..., x, y, z, component] of the particles.
    """
    components = field.shape.dims[-1]
    padded = pm.with_halo(field)

    def run(f: tf.Tensor, s: tf.Tensor) -> tf.Tensor:
        return kernels().read(pm.lattice(), pm.block(f, 0, components.size), pm.particles(s))

    def backward(f: tf.Tensor, s: tf.Tensor, dy: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        dy = tf.reshape(dy, [-1, *pm.box.block, components.size])
        f = pm.block(f, 0, components.size)
        return kernels().read_vjp(pm.lattice(), f, pm.particles(s), dy)

    shape = mtf.Shape([*displacement.shape.dims[:-1], components])
    return _read(run, backward, padded, displacement, shape)


def read_gradient(
    potential: Any, displacement: Any, pm: ParticleMesh, *, padded: bool = False
) -> Any:
    """Returns minus the 4-point finite-difference gradient of a potential at the particles.

    The difference is (8 (f_+1 - f_-1) - (f_+2 - f_-2)) / (12 h), whose symbol is
    i (8 sin kh - sin 2kh) / (6h) (Feng and others 2016). One field is exchanged, with two more
    planes than `read` needs.

    Args:
        potential: mtf tensor [..., x, y, z] of the mesh.
        displacement, pm: as for `read`.
        padded: whether the potential already has its halo.

    Returns:
        mtf tensor [..., x, y, z, component] of the particles, per [Mpc/h].
    """
    potential = potential if padded else pm.with_halo(potential, STENCIL)

    def run(f: tf.Tensor, s: tf.Tensor) -> tf.Tensor:
        return kernels().read_gradient(pm.lattice(STENCIL), pm.block(f, STENCIL), pm.particles(s))

    def backward(f: tf.Tensor, s: tf.Tensor, dy: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        f = pm.block(f, STENCIL)
        return kernels().read_gradient_vjp(
            pm.lattice(STENCIL), f, pm.particles(s), pm.particles(dy)
        )

    return _read(run, backward, potential, displacement, displacement.shape)


def _read(run: Any, backward: Any, padded: Any, displacement: Any, shape: Any) -> Any:
    def adjoint(xs: list[Any], dys: list[Any]) -> list[Any]:
        outputs = [(x.shape, x.dtype) for x in xs]
        return local(backward, [*xs, dys[0]], outputs, name="read_adjoint")

    (values,) = local(
        run, [padded, displacement], [(shape, displacement.dtype)], adjoint=adjoint, name="read"
    )
    return values


class MaxDisplacement:
    """The largest distance of particles from their lattice sites along the axes that are split.

    Args:
        box: the grid, its size and its ranks.

    Attributes:
        is_bounded: whether an axis is split, so that a halo bounds the distance.
    """

    def __init__(self, box: Box) -> None:
        self._split = [box.split.get(name, 1) > 1 for name in "xyz"]
        self.is_bounded = any(self._split)
        self._reach = _reach_function(box)

    def __call__(self, displacement: tf.Tensor) -> float:
        """Returns the largest |displacement| along a split axis over all ranks.

        It is infinite if any component of any displacement is not finite, and 0 if no axis is
        split [particle spacings].
        """
        return self.of(self._reach(tf.stop_gradient(displacement)).numpy())

    def check_finite(self, displacement: tf.Tensor, label: str) -> None:
        """Checks that displacements are finite, wherever this is called, see `check_finite`."""
        reach = self._reach(tf.stop_gradient(displacement))
        if tf.executing_eagerly():
            check_finite(self.of(reach.numpy()), label)
        else:
            assert_finite(reach, label)

    def of(self, along: np.ndarray) -> float:
        """Returns the same from the reach along each axis [3], as returned by `paint`."""
        if not np.isfinite(along).all():
            return math.inf
        return float(max(along[self._split], default=0.0))


@cached_for_all_sizes(16)
def _reach_function(box: Box) -> MeshFunction:
    """Returns `f(displacement)`: the largest |displacement| along each axis [particle spacings]."""

    def largest(s: tf.Tensor) -> tf.Tensor:
        size = tf.where(tf.math.is_nan(s), tf.constant(math.inf, s.dtype), tf.abs(s))
        # first over lines along z, whose values XLA compares many at a time
        along_z = tf.reduce_max(tf.reshape(size, [-1, s.shape[-2] * 3]), axis=0)
        most = tf.reduce_max(tf.reshape(along_z, [-1, 3]), axis=0)
        return most / tf.stack([cast_float(n, s.dtype) for n in box.cell_lengths])

    def build(_: Any, displacement: Any) -> Any:
        # compiled anew for each graph, whose size of the box it holds
        run = tf.function(largest, jit_compile=True, autograph=False)
        (reach,) = local(run, [displacement], [(_AXES, displacement.dtype)], name="reach")
        return maximum_over_ranks(reach)

    return box.function(build, displacement=box.vector_shape)


class HaloError(RuntimeError):
    """A particle moved beyond the halo. Raised on every rank, before any mass is lost.

    Attributes:
        needed: the halo that should be wide enough for the whole run [particle spacings].
    """

    def __init__(self, message: str, needed: int) -> None:
        super().__init__(message)
        self.needed = needed


_NOT_FINITE = "the displacement has values that are not finite"


def check_finite(reach: float, label: str) -> None:
    """Checks that displacements are finite, from their reach, which is infinite where one is not.

    Args:
        reach: largest displacement, as `MaxDisplacement` gives it.
        label: of this moment of the run, for the message.

    Raises:
        FloatingPointError: one is not.
    """
    if not math.isfinite(reach):
        raise FloatingPointError(f"{label}: {_NOT_FINITE}")


def assert_finite(reaches: tf.Tensor, label: str) -> None:
    """Adds an assertion to the graph under construction that a reach is finite.

    Its tf.errors.InvalidArgumentError has the message of `check_finite`.

    Args:
        reaches: as returned by `paint`.
        label: of this moment of the run, for the message.
    """
    finite = tf.reduce_all(tf.math.is_finite(reaches))
    tf.debugging.Assert(finite, [f"{label}: {_NOT_FINITE}"])


def check_halo(reach: float, halo: int, label: str, growth: float = 1.0) -> None:
    """Checks that particles that stray `reach` cells are all within a halo.

    Args:
        reach: largest displacement [particle spacings].
        halo: [particle spacings].
        label: of this moment of the run, for the message.
        growth: of linear displacements from here to the end of the run, for the halo to suggest.

    Raises:
        FloatingPointError: the displacement is not finite.
        HaloError: names the step, the reach and the halo that would do.
    """
    check_finite(reach, label)
    if reach >= halo:
        whole_run = suggested_halo(reach, growth)
        raise HaloError(
            f"{label}: a particle is {reach:.2f} cells from its lattice site, beyond the halo of "
            f"{halo}; halo = {needed_halo(reach)} would do for this step, "
            f"halo = {whole_run} should for the whole run",
            whole_run,
        )
