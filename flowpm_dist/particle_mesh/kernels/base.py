"""What a set of particle kernels provides, whatever it is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod

import tensorflow as tf

from flowpm_dist.particle_mesh.kernels.lattice import Lattice
from flowpm_dist.particle_mesh.options import ForceGradient


class Kernels(ABC):
    """Cloud-in-cell kernels between the particles and the padded mesh block of one rank.

    Tensors are float32 or float64, all of a call alike. They lead with a batch axis b; particles
    follow as x, y, z of their lattice, meshes as px, py, pz of `Lattice.mesh_block`:

        s    displacement [b, nx, ny, nz, 3] [Mpc/h]
        v    velocity or momentum [b, nx, ny, nz, 3], in any unit
        dA   cotangent of A, of its shape

    No gradients are registered: each kernel has its adjoint beside it.

    Along an axis with halo, a particle whose cells (or those that the difference at its cells
    needs) are not all in the padded block takes no part: it adds nothing to a mesh, and what is
    read at it is NaN, as is the cotangent of its displacement there. So is one whose displacement
    is not finite. Along an axis without halo everything wraps around.
    """

    name: str

    @abstractmethod
    def paint(
        self, g: Lattice, s: tf.Tensor, weights: tf.Tensor | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Cloud-in-cell sum of the particles' weights.

        Args:
            g: particles and mesh.
            s: displacement.
            weights: [b, nx, ny, nz]; 1 if None.

        Returns:
            mesh [b, px, py, pz], and max_displacement [3], the largest |s| along each axis
            [mesh cells], infinite if any component of any displacement is not finite.
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
        """Adjoint of `paint`: (ds, dweights), the latter None without weights.

        Args:
            g, s, weights: as for `paint`.
            dmesh: [b, px, py, pz].
            add: [b, nx, ny, nz, 3], to which ds is added; 0 if None.
        """

    @abstractmethod
    def read(self, g: Lattice, fields: tf.Tensor, s: tf.Tensor) -> tf.Tensor:
        """Cloud-in-cell values [b, nx, ny, nz, c] of fields [b, px, py, pz, c]."""

    @abstractmethod
    def read_vjp(
        self, g: Lattice, fields: tf.Tensor, s: tf.Tensor, dvalues: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Adjoint of `read`: (dfields, ds)."""

    @abstractmethod
    def read_gradient(self, g: Lattice, potential: tf.Tensor, s: tf.Tensor) -> tf.Tensor:
        """Minus the 4-point finite-difference gradient of a potential, cloud in cell.

        -(8 (f_+1 - f_-1) - (f_+2 - f_-2)) / (12 cell), whose symbol is that of -gradient times
        (8 sin kh - sin 2kh) / (6 kh) (Feng and others 2016).

        Args:
            g: particles and mesh.
            potential: [b, px, py, pz].
            s: displacement.

        Returns:
            force [b, nx, ny, nz, 3], potential per [Mpc/h].
        """

    @abstractmethod
    def read_gradient_vjp(
        self, g: Lattice, potential: tf.Tensor, s: tf.Tensor, dforce: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Adjoint of `read_gradient`: (dpotential, ds)."""

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
        """Velocity after a kick, factors[:, 0] v + factors[:, 1] force, in one pass.

        Args:
            g: particles and mesh.
            field: with "finite-difference" the potential [b, px, py, pz] of `read_gradient`, with
                "spectral" the force [b, px, py, pz, 3], read cloud in cell.
            s: displacement.
            v: velocity before.
            factors: [b, 2].
            force_gradient: how the field gives the force.
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
        """Undo a kick and carry cotangents back through it, in one pass.

        Args:
            g, field, s, factors, force_gradient: as for `kick`.
            v_after: velocity after the kick.
            dv: cotangent of v_after.
            ds: cotangent of s from what came after the kick.

        Returns:
            v_before; dfield; ds, now with what this kick adds; sums [b, 2] float64 over these
            particles, <dv, v_before> and <dv, force>. The cotangent of v_before is
            factors[:, 0] dv.
        """

    @abstractmethod
    def linear(self, x: tf.Tensor, y: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
        """x + factor y for particles [b, nx, ny, nz, 3] and factor [b]."""

    @abstractmethod
    def drift_vjp(
        self, x_after: tf.Tensor, v: tf.Tensor, dx: tf.Tensor, dv: tf.Tensor, factor: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Undo a drift x_after = x_before + factor v and carry cotangents back through it.

        Args:
            x_after, v: [b, nx, ny, nz, 3].
            dx, dv: cotangents of x_after and, from what came after, of v.
            factor: [b].

        Returns:
            x_before, dv + factor dx, and <dx, v> [b] float64 over these particles.
        """
