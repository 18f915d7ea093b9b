"""The interface of a set of particle kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import tensorflow as tf

from flowpm_dist.particle_mesh.kernels.ball import Ball
from flowpm_dist.particle_mesh.kernels.lattice import Lattice
from flowpm_dist.particle_mesh.kernels.slabs import Slabs
from flowpm_dist.particle_mesh.options import ForceGradient


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

    A particle whose place on a map of the sky is not finite makes a value of each of its maps NaN,
    and takes no part in the adjoint.
    """

    name: str

    @abstractmethod
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

    @abstractmethod
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

    @abstractmethod
    def read(self, g: Lattice, fields: tf.Tensor, s: tf.Tensor) -> tf.Tensor:
        """Returns cloud-in-cell values [b, nx, ny, nz, c] of fields [b, px, py, pz, c]."""

    @abstractmethod
    def read_vjp(
        self, g: Lattice, fields: tf.Tensor, s: tf.Tensor, dvalues: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns (dfields, ds), the adjoint of `read`."""

    @abstractmethod
    def read_gradient(self, g: Lattice, potential: tf.Tensor, s: tf.Tensor) -> tf.Tensor:
        """Returns minus the 4-point finite-difference gradient of a potential, cloud in cell.

        It is -(8 (f_+1 - f_-1) - (f_+2 - f_-2)) / (12 cell). Its symbol is that of -gradient times
        (8 sin kh - sin 2kh) / (6 kh) (Feng and others 2016).

        Args:
            g: the particles and the mesh.
            potential: [b, px, py, pz].
            s: the displacement.

        Returns:
            The force [b, nx, ny, nz, 3] [unit of the potential per Mpc/h].
        """

    @abstractmethod
    def read_gradient_vjp(
        self, g: Lattice, potential: tf.Tensor, s: tf.Tensor, dforce: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns (dpotential, ds), the adjoint of `read_gradient`."""

    @abstractmethod
    def kick(
        self,
        g: Lattice,
        field: tf.Tensor,
        s: tf.Tensor,
        v: tf.Tensor,
        factors: tf.Tensor,
        force_gradient: ForceGradient,
    ) -> tf.Tensor:
        """Returns the velocity after a kick, factors[:, 0] v + factors[:, 1] force, in one pass.

        Args:
            g: the particles and the mesh.
            field: the potential [b, px, py, pz] of `read_gradient` for "finite-difference"; the
                force [b, px, py, pz, 3], which is read cloud in cell, for "spectral".
            s: the displacement.
            v: the velocity before the kick.
            factors: [b, 2].
            force_gradient: "finite-difference" or "spectral".
        """

    @abstractmethod
    def kick_vjp(
        self,
        g: Lattice,
        field: tf.Tensor,
        s: tf.Tensor,
        v_after: tf.Tensor,
        dv: tf.Tensor,
        ds: tf.Tensor,
        factors: tf.Tensor,
        force_gradient: ForceGradient,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
        """Undoes a kick and propagates cotangents back through it, in one pass.

        Args:
            g, field, s, factors, force_gradient: as for `kick`.
            v_after: the velocity after the kick.
            dv: the cotangent of v_after.
            ds: the cotangent of s from all that follows the kick.

        Returns:
            v_before; dfield; ds with the contribution of this kick; and the sums [b, 2], float64,
            over these particles: <dv, v_before> and <dv, force>. The cotangent of v_before is
            factors[:, 0] dv.
        """

    @abstractmethod
    def linear(self, x: tf.Tensor, y: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
        """Returns x + factor y for particles [b, nx, ny, nz, 3] and factor [b]."""

    @abstractmethod
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

    @abstractmethod
    def paint_sky(
        self, slabs: Slabs, fields: Sequence[tf.Tensor], factors: tf.Tensor, amounts: tf.Tensor
    ) -> tf.Tensor:
        """Paints layers of particles on maps of the sky, bilinearly.

        A particle's place is that on the lattice and the sum of factors times fields; at distance
        chi from the observer it adds (amount + slope (chi - that of its layer)) / chi^2.

        Args:
            slabs: the layers, and how they lie on the sky.
            fields: displacement [Mpc/h] and what else moves the particles, [b, nx, ny, nz, 3].
            factors: [b, layers, fields].
            amounts: amount and slope [b, layers, weights, 2]; that of a weight goes to the map of
                that number, counted from the layer's first.

        Returns:
            The maps [b, maps, y, x].
        """

    @abstractmethod
    def paint_sky_vjp(
        self,
        slabs: Slabs,
        fields: Sequence[tf.Tensor],
        factors: tf.Tensor,
        amounts: tf.Tensor,
        dmaps: tf.Tensor,
    ) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
        """Returns (dfields, dfactors, damounts), the adjoint of `paint_sky`; the latter float64."""

    @abstractmethod
    def paint_ball(
        self, ball: Ball, fields: Sequence[tf.Tensor], factors: tf.Tensor, amounts: tf.Tensor
    ) -> tf.Tensor:
        """Paints the particles about an observer on maps of the whole sky, bilinearly.

        A particle's place is that on the lattice and the sum of factors times fields, with factors
        that are polynomials in the distance of that on the lattice. Of a weight it adds the amount
        at the distance of its place, between two nodes linearly, to the four pixels of
        `Healpix.corners`.

        Args:
            ball: the particles, and how they are seen.
            fields: displacement [Mpc/h] and what else moves the particles, [b, nx, ny, nz, 3].
            factors: [b, segments, fields, 4]: coefficients of u^0 to u^3, with u from -1 to 1 in
                each segment.
            amounts: [b, nodes, weights]; that of a weight goes to the map of that number, counted
                from the segment's first. Beyond the last node they are as there.

        Returns:
            The maps [b, maps, pixels].
        """

    @abstractmethod
    def paint_ball_vjp(
        self,
        ball: Ball,
        fields: Sequence[tf.Tensor],
        factors: tf.Tensor,
        amounts: tf.Tensor,
        dmaps: tf.Tensor,
    ) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
        """Returns (dfields, dfactors, damounts), the adjoint of `paint_ball`; the last float64."""
