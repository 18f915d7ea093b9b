"""The interface of a set of particle kernels, and the geometry that they are given."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from typing_extensions import override

from flowpm_dist.grid.decomposition import TOLERANCE

BOXES = 10.0
"""Largest displacement [box sides]. A wave as long as the box with overdensity d gives d / 2 pi."""


def farthest_move(lengths: Sequence[float]) -> float:
    """Returns the largest displacement along an axis with which a particle is seen [Mpc/h].

    One that is larger, or not finite, has no place: it makes the values of maps not finite.

    Args:
        lengths: the sides of the box [Mpc/h].
    """
    return BOXES * max(lengths)


Triple = tuple[int, int, int]

# [mesh cells]. A particle with a larger displacement, or one that is not finite, is left out.
FARTHEST = 2.0**30


@dataclass(frozen=True)
class Lattice:
    """A rank's block of the particle lattice and the padded block of the mesh around it.

    The particle of lattice cell i with displacement s lies at mesh coordinate
    halo + mesh_factor i + s / cell of the padded block.

    Attributes:
        particles: the number of this rank's particles along each axis, (nx, ny, nz).
        mesh_factor: the number of mesh cells per particle spacing, for which the particles' block
            has a whole number of cells along each axis.
        halo: the planes of the padded block on either side of this rank's cells along each axis
            [mesh cells]; 0 where the axis is periodic within the block.
        cell: the sides of a mesh cell [Mpc/h], numbers or float64 tensors.

    Raises:
        ValueError: if a number is out of its range.
    """

    particles: Triple
    mesh_factor: float
    halo: Triple
    cell: Sequence[Any]

    def __post_init__(self) -> None:
        if min(self.particles) < 1 or self.mesh_factor < 1:
            raise ValueError(f"an empty lattice: {self.particles}, refined by {self.mesh_factor}")
        if any(abs(self.mesh_factor * n - m) > TOLERANCE for n, m in self._lengths):
            misfit = f"refined by {self.mesh_factor}, has no whole number of cells along each axis"
            raise ValueError(f"a block of {self.particles} particles, {misfit}")
        if min(self.halo) < 0:
            raise ValueError(f"halo {self.halo} is negative")
        sides = [side for side in self.cell if not isinstance(side, tf.Tensor)]
        if not all(math.isfinite(side) and side > 0 for side in sides):
            raise ValueError(f"cell sides {self.cell} Mpc/h are not all positive")
        if max(self.mesh_block) >= FARTHEST:
            raise ValueError(f"a padded block of {self.mesh_block} cells is too long")

    @property
    def _lengths(self) -> Iterator[tuple[int, int]]:
        return zip(self.particles, self.inner_block, strict=True)

    @property
    def inner_block(self) -> Triple:
        """The number of cells of the block without its halo along each axis."""
        x, y, z = (round(self.mesh_factor * n) for n in self.particles)
        return x, y, z

    @property
    def mesh_block(self) -> Triple:
        """The number of cells of the padded block along each axis."""
        x, y, z = (n + 2 * h for n, h in zip(self.inner_block, self.halo, strict=True))
        return x, y, z

    @property
    def is_whole(self) -> bool:
        """Whether every lattice place is a whole number of cells."""
        return self.inner_block[0] % self.particles[0] == 0

    def places(self, axis: int) -> tuple[np.ndarray, Any]:
        """Returns the cell of each lattice place along an axis, and the rest, without the halo.

        Returns:
            The cells, int64 [n], and the distances from there to the places, float64 [n] [Mpc/h].
        """
        n = self.particles[axis]
        cells, rest = np.divmod(np.arange(n) * self.inner_block[axis], n)
        return cells, rest / (n * self.per_cell[axis])

    @property
    def per_cell(self) -> tuple[Any, Any, Any]:
        """The number of mesh cells per unit length along each axis [h/Mpc]."""
        x, y, z = (1 / side for side in self.cell)
        return x, y, z


@dataclass(frozen=True, eq=False, kw_only=True)
class Shells:
    """Shells of the sky, and how the particles in them add to its maps.

    Distances are comoving [Mpc/h]. Along the line of sight a particle is a cloud as deep as the
    lattice's spacing. The part of the cloud that lies in a shell is on the shell's maps, so that
    maps change continuously as a particle moves from one shell into the next.

    Attributes:
        borders: the distances between which the shells lie, increasing; the first may be -inf.
            float64 [shells + 1].
        depth: depth of the cloud.
        step: distance between the nodes at which the amounts are given, from 0 on.
        power: the power of the particle's distance by which its amount is divided: 0, 1 or 2.
        spacing: the spacing of the particles along each axis.
        lengths: the sides of the box.
    """

    borders: np.ndarray
    depth: float
    step: float
    power: int
    spacing: tuple[float, float, float]
    lengths: tuple[float, float, float]

    def maps(self, amounts: tf.Tensor) -> int:
        """Returns the number of maps of a universe, for amounts [b, nodes, weights]."""
        return self.shells * int(amounts.shape[2])

    @property
    def shells(self) -> int:
        """The number of shells."""
        return len(self.borders) - 1


@dataclass(frozen=True, eq=False, kw_only=True)
class Slabs(Shells):
    """Slabs of this rank's particles, each of several layers one behind the other, and the maps.

    A slab has an axis of the box along the line of sight; the other two are x and y of the maps.
    Distances are comoving [Mpc/h], angles small, the sky flat. Images of a particle in the
    periodic box are seen wherever they lie on a map.

    Attributes:
        places: int32 [slabs, 6]: the axes of x, of y and of the distance; the first of this rank's
            layers along the latter, and their number; the number of the first one among `layers`.
        directions: float64 [slabs, 7]. Columns 0 and 1: position of this rank's first particle in
            x, relative to the line of sight [Mpc/h], and 1 or -1 for the sense of the axis. Columns
            2 and 3: the same in y. Column 4: the sense of the distance. Columns 5 and 6: the
            distances between which particles are painted [Mpc/h]; the part of a cloud outside them
            is left out.
        distances: the distance of each layer, float64 [layers].
        pixel: side of a pixel [rad].
        pixels: the number of pixels along each side of a map.
        curved: whether the last of the weights in `amounts` has no maps, but is f_K / chi. A
            particle at x across the line of sight is at the angle x / f_K; in flat space, x / chi.
    """

    places: np.ndarray
    directions: np.ndarray
    distances: np.ndarray
    pixel: float
    pixels: int
    curved: bool = False

    @override
    def maps(self, amounts: tf.Tensor) -> int:
        return self.shells * (int(amounts.shape[2]) - self.curved)


DEGREE = 3
"""Degree of the polynomials in the distance that give the factors of `Kernels.paint_ball`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Ball(Shells):
    """Copies of this rank's particles about an observer, and maps of the whole sky.

    Attributes:
        copies: the offset of each copy of the box along the axes [box sides], int32 [copies, 3].
        edges: the limits of the segments of the distance, increasing, float64 [segments + 1].
        near, far: a copy of a particle is looked at if the distance of its undisplaced place is at
            least `near` and below `far`.
        first: the numbers of this rank's first particle along the axes of the whole lattice.
        observer: place in the box.
        nside: the resolution of the HEALPix maps, whose pixels are in ring order.
    """

    copies: np.ndarray
    edges: np.ndarray
    near: float
    far: float
    first: tuple[int, int, int]
    observer: tuple[float, float, float]
    nside: int


class Kernels(ABC):
    """Cloud-in-cell kernels between the particles and the padded mesh block of one rank.

    Tensors are float32 or float64, the same for all arguments of a call. Their first axis is a
    batch axis b. The next axes are x, y, z of the lattice for particles, and px, py, pz of
    `Lattice.mesh_block` for meshes:

        s    displacement [b, nx, ny, nz, 3] [Mpc/h]
        v    velocity or momentum [b, nx, ny, nz, 3], in any unit
        dA   cotangent of A, with the shape of A

    No gradients are registered: each kernel has an explicit adjoint.

    Along an axis with halo, a particle is left out if the padded block does not hold all its cells,
    or all cells that the difference there needs. Such a particle adds nothing to a mesh. Values
    read at it are NaN, and so is the cotangent of its displacement from a read. The same holds for
    a particle whose displacement is not finite. An axis without halo is periodic.

    A particle whose place on maps of the sky is not finite makes a value of each map of the first
    shell NaN, and takes no part in the adjoint.
    """

    name: str

    @abstractmethod
    def _call(
        self, kernel: str, geometry: Lattice | Slabs | Ball | None = None, **arguments: Any
    ) -> Any:
        """Runs the kernel of this name; its outputs come in the order of the compiled operation."""

    def paint(
        self, g: Lattice, s: tf.Tensor, weights: tf.Tensor | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the cloud-in-cell sum of the particles' weights.

        Args:
            g: the particles and the mesh.
            s: the displacement.
            weights: [b, nx, ny, nz]; 1 if None.

        Returns:
            The mesh [b, px, py, pz] and max_displacement [3], the largest |s| along each axis
            [mesh cells], which is infinite if any component of any displacement is not finite.
        """
        return self._call("paint", g, s=s, weights=weights)

    def paint_vjp(
        self,
        g: Lattice,
        s: tf.Tensor,
        weights: tf.Tensor | None,
        dmesh: tf.Tensor,
        add: tf.Tensor | None = None,
    ) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Returns (ds, dweights), the adjoint of `paint`; dweights is None without weights.

        Args:
            g, s, weights: as for `paint`.
            dmesh: [b, px, py, pz].
            add: a cotangent [b, nx, ny, nz, 3] to which ds is added; 0 if None.
        """
        return self._call("paint_vjp", g, s=s, weights=weights, dmesh=dmesh, add=add)

    def read(self, g: Lattice, fields: tf.Tensor, s: tf.Tensor) -> tf.Tensor:
        """Returns cloud-in-cell values [b, nx, ny, nz, c] of fields [b, px, py, pz, c]."""
        return self._call("read", g, fields=fields, s=s)

    def read_vjp(
        self, g: Lattice, fields: tf.Tensor, s: tf.Tensor, dvalues: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns (dfields, ds), the adjoint of `read`."""
        return self._call("read_vjp", g, fields=fields, s=s, dvalues=dvalues)

    def read_gradient(self, g: Lattice, potential: tf.Tensor, s: tf.Tensor) -> tf.Tensor:
        """Returns minus the 4-point finite-difference gradient of a potential, cloud in cell.

        It is -(8 (f_+1 - f_-1) - (f_+2 - f_-2)) / (12 cell). Its symbol is the symbol of
        -gradient times (8 sin kh - sin 2kh) / (6 kh) (Feng and others 2016).

        Args:
            g: the particles and the mesh.
            potential: [b, px, py, pz].
            s: the displacement.

        Returns:
            The force [b, nx, ny, nz, 3] [unit of the potential per Mpc/h].
        """
        return self._call("read_gradient", g, potential=potential, s=s)

    def read_gradient_vjp(
        self, g: Lattice, potential: tf.Tensor, s: tf.Tensor, dforce: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns (dpotential, ds), the adjoint of `read_gradient`."""
        return self._call("read_gradient_vjp", g, potential=potential, s=s, dforce=dforce)

    def kick(
        self,
        g: Lattice,
        field: tf.Tensor,
        s: tf.Tensor,
        v: tf.Tensor,
        factors: tf.Tensor,
    ) -> tf.Tensor:
        """Returns the velocity after a kick, factors[:, 0] v + factors[:, 1] force, in one pass.

        Args:
            g: the particles and the mesh.
            field: the potential [b, px, py, pz] of `read_gradient`; or the force
                [b, px, py, pz, 3], which is read cloud in cell.
            s: the displacement.
            v: the velocity before the kick.
            factors: [b, 2].
        """
        return self._call("kick", g, field=field, s=s, v=v, factors=factors)

    def kick_vjp(
        self,
        g: Lattice,
        field: tf.Tensor,
        s: tf.Tensor,
        v_after: tf.Tensor,
        dv: tf.Tensor,
        ds: tf.Tensor,
        factors: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
        """Undoes a kick and propagates cotangents back through it, in one pass.

        Args:
            g, field, s, factors: as for `kick`.
            v_after: the velocity after the kick.
            dv: the cotangent of v_after.
            ds: the cotangent of s from all that follows the kick.

        Returns:
            v_before; dfield; ds with the contribution of this kick; and the sums [b, 2], float64,
            over these particles: <dv, v_before> and <dv, force>. The cotangent of v_before is
            factors[:, 0] dv.
        """
        dfield, ds, v_before, sums = self._call(
            "kick_vjp", g, field=field, s=s, v_after=v_after, dv=dv, ds=ds, factors=factors
        )
        return v_before, dfield, ds, sums

    def linear(self, x: tf.Tensor, y: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
        """Returns x + factor y for particles [b, nx, ny, nz, 3] and factor [b]."""
        return self._call("linear", x=x, y=y, factor=factor)

    def drift_vjp(
        self, x_after: tf.Tensor, v: tf.Tensor, dx: tf.Tensor, dv: tf.Tensor, factor: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Undoes a drift x_after = x_before + factor v and propagates cotangents back through it.

        Args:
            x_after, v: [b, nx, ny, nz, 3].
            dx, dv: the cotangents of x_after and of v from all that follows the drift.
            factor: [b].

        Returns:
            x_before, dv + factor dx, and <dx, v> [b] float64 over these particles.
        """
        return self._call("drift_vjp", x_after=x_after, v=v, dx=dx, dv=dv, factor=factor)

    def paint_sky(
        self, slabs: Slabs, fields: Sequence[tf.Tensor], factors: tf.Tensor, amounts: tf.Tensor
    ) -> tf.Tensor:
        """Paints layers of particles on maps of the sky, bilinearly.

        A particle's place is its lattice place plus the sum of factors times fields. At distance
        chi from the observer it adds an amount over chi^power, see `Shells`, to the maps of each
        weight of its shell. The amount is interpolated linearly between the nodes.

        Args:
            slabs: the layers, and how they lie on the sky.
            fields: displacement [Mpc/h] and what else moves the particles, [b, nx, ny, nz, 3].
            factors: [b, layers, fields].
            amounts: [b, nodes, weights], the last as `Slabs.curved` says. Beyond the last node,
                its amount is used.

        Returns:
            The maps [b, shells * weights, y, x].
        """
        return self._call("paint_sky", slabs, fields=fields, factors=factors, amounts=amounts)

    def paint_sky_vjp(
        self,
        slabs: Slabs,
        fields: Sequence[tf.Tensor],
        factors: tf.Tensor,
        amounts: tf.Tensor,
        dmaps: tf.Tensor,
    ) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
        """Returns (dfields, dfactors, damounts), the adjoint of `paint_sky`; the latter float64."""
        return self._call(
            "paint_sky_vjp", slabs, fields=fields, factors=factors, amounts=amounts, dout=dmaps
        )

    def paint_ball(
        self, ball: Ball, fields: Sequence[tf.Tensor], factors: tf.Tensor, amounts: tf.Tensor
    ) -> tf.Tensor:
        """Paints the particles about an observer on maps of the whole sky, bilinearly.

        A particle's place is its lattice place plus the sum of factors times fields. The factors
        are polynomials in the distance of the lattice place; nearer than the first edge and farther
        than the last, those at the edge. The particle adds to the four pixels of `Healpix.corners`
        what it adds in `paint_sky`.

        Args:
            ball: the particles, and how they are seen.
            fields: displacement [Mpc/h] and what else moves the particles, [b, nx, ny, nz, 3].
            factors: [b, segments, fields, 4]: coefficients of u^0 to u^3, with u from -1 to 1 in
                each segment.
            amounts: as for `paint_sky`.

        Returns:
            The maps [b, shells * weights, pixels].
        """
        return self._call("paint_ball", ball, fields=fields, factors=factors, amounts=amounts)

    def paint_ball_vjp(
        self,
        ball: Ball,
        fields: Sequence[tf.Tensor],
        factors: tf.Tensor,
        amounts: tf.Tensor,
        dmaps: tf.Tensor,
    ) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
        """Returns (dfields, dfactors, damounts), the adjoint of `paint_ball`; the last float64."""
        return self._call(
            "paint_ball_vjp", ball, fields=fields, factors=factors, amounts=amounts, dout=dmaps
        )

    def paint_points(
        self, mesh: tf.Tensor, x: tf.Tensor, weights: tf.Tensor | None, order: int
    ) -> tf.Tensor:
        """Returns a mesh with the weights of points added to it; nothing is periodic.

        Args:
            mesh: [x, y, z], float64, at least `order` cells along each axis.
            x: [n, 3], float64, finite [cells]; a point at 0 is at the centre of the first cell. All
                cells that points reach are in the mesh.
            weights: [n], float64; 1 if None.
            order: number of cells along each axis that a point reaches: 2 for cloud in cell, 3 for
                triangular-shaped cloud, 4 for piecewise cubic spline.
        """
        return self._call("paint_points", mesh=mesh, x=x, weights=weights, order=order)

    def friends(self, x: tf.Tensor, links: Sequence[float]) -> tf.Tensor:
        """Returns the groups of points that chains of links join: friends of friends.

        Two points are friends if the distance between them is at most one link; space is not
        periodic.

        Args:
            x: [n, 3], float64, finite; differences of its numbers should be exact.
            links: the number of links that make a unit of x along each axis.

        Returns:
            int32 [n], the number of the first point of each point's group.
        """
        return self._call("friends", x=x, links=tf.constant(links, tf.float64))
