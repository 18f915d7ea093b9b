"""Particle kernels as operations of a library compiled for this TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from flowpm_dist.grid.healpix import Healpix
from flowpm_dist.particle_mesh.kernels import library
from flowpm_dist.particle_mesh.kernels.ball import Ball
from flowpm_dist.particle_mesh.kernels.base import ForceGradient, Kernels
from flowpm_dist.particle_mesh.kernels.lattice import Lattice
from flowpm_dist.particle_mesh.kernels.slabs import Slabs


def _geometry(g: Lattice) -> dict[str, Any]:
    return {
        "per_cell": tf.constant(g.per_cell, tf.float64),
        "particles": g.particles,
        "mesh_factor": g.mesh_factor,
        "halo": g.halo,
    }


def _sky(slabs: Slabs) -> dict[str, Any]:
    scales = [*slabs.spacing, *slabs.lengths, slabs.pixel]
    return {
        "places": tf.constant(slabs.places, tf.int32),
        "directions": tf.constant(slabs.directions, tf.float64),
        "distances": tf.constant(slabs.distances, tf.float64),
        "first_map": tf.constant(slabs.first_map, tf.int32),
        "scales": tf.constant(scales, tf.float64),
        "maps": slabs.maps,
        "pixels": slabs.pixels,
    }


def _ball(ball: Ball) -> dict[str, Any]:
    return {
        "copies": tf.constant(ball.copies, tf.int32),
        "edges": tf.constant(ball.edges, tf.float64),
        "first_map": tf.constant(ball.first_map, tf.int32),
        "numbers": tf.constant(ball.numbers),
        "rings": tf.constant(Healpix(ball.nside).theta),
        "maps": ball.maps,
        "nside": ball.nside,
        "first": ball.first,
        "per_distance": ball.per_distance,
    }


class Compiled(Kernels):
    """The kernels on CPUs, in C++.

    Every result has the same bits on any number of threads.

    Raises:
        RuntimeError: if the library does not exist or does not load.
    """

    name = "compiled"

    def __init__(self) -> None:
        self._ops, reason = library.load()
        if reason is not None:
            raise RuntimeError(reason)

    def paint(
        self, g: Lattice, s: tf.Tensor, weights: tf.Tensor | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """See `Kernels.paint`."""
        return tuple(
            self._ops.flowpm_paint(s=s, weights=_list(weights), **_geometry(g)),
        )

    def paint_vjp(
        self,
        g: Lattice,
        s: tf.Tensor,
        weights: tf.Tensor | None,
        dmesh: tf.Tensor,
        add: tf.Tensor | None = None,
    ) -> tuple[tf.Tensor, tf.Tensor | None]:
        """See `Kernels.paint_vjp`."""
        ds, dweights = self._ops.flowpm_paint_vjp(
            s=s, dmesh=dmesh, weights=_list(weights), add=_list(add), **_geometry(g)
        )
        return ds, (dweights[0] if dweights else None)

    def read(self, g: Lattice, fields: tf.Tensor, s: tf.Tensor) -> tf.Tensor:
        """See `Kernels.read`."""
        return self._ops.flowpm_read(s=s, fields=fields, **_geometry(g))

    def read_vjp(
        self, g: Lattice, fields: tf.Tensor, s: tf.Tensor, dvalues: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """See `Kernels.read_vjp`."""
        return tuple(self._ops.flowpm_read_vjp(s=s, fields=fields, dvalues=dvalues, **_geometry(g)))

    def read_gradient(self, g: Lattice, potential: tf.Tensor, s: tf.Tensor) -> tf.Tensor:
        """See `Kernels.read_gradient`."""
        return self._ops.flowpm_read_gradient(s=s, potential=potential, **_geometry(g))

    def read_gradient_vjp(
        self, g: Lattice, potential: tf.Tensor, s: tf.Tensor, dforce: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """See `Kernels.read_gradient_vjp`."""
        return tuple(
            self._ops.flowpm_read_gradient_vjp(
                s=s, potential=potential, dforce=dforce, **_geometry(g)
            )
        )

    def kick(
        self,
        g: Lattice,
        field: tf.Tensor,
        s: tf.Tensor,
        v: tf.Tensor,
        factors: tf.Tensor,
        force_gradient: ForceGradient,
    ) -> tf.Tensor:
        """See `Kernels.kick`."""
        return self._ops.flowpm_kick(
            s=s, field=field, v=v, factors=factors, force_gradient=force_gradient, **_geometry(g)
        )

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
        """See `Kernels.kick_vjp`."""
        dfield, ds, v_before, sums = self._ops.flowpm_kick_vjp(
            s=s,
            field=field,
            v_after=v_after,
            dv=dv,
            ds=ds,
            factors=factors,
            force_gradient=force_gradient,
            **_geometry(g),
        )
        return v_before, dfield, ds, sums

    def linear(self, x: tf.Tensor, y: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
        """See `Kernels.linear`."""
        return self._ops.flowpm_linear(x=x, y=y, factor=factor)

    def drift_vjp(
        self, x_after: tf.Tensor, v: tf.Tensor, dx: tf.Tensor, dv: tf.Tensor, factor: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """See `Kernels.drift_vjp`."""
        return tuple(self._ops.flowpm_drift_vjp(x_after=x_after, v=v, dx=dx, dv=dv, factor=factor))

    def paint_sky(
        self, slabs: Slabs, fields: Sequence[tf.Tensor], factors: tf.Tensor, amounts: tf.Tensor
    ) -> tf.Tensor:
        """See `Kernels.paint_sky`."""
        return self._ops.flowpm_paint_sky(
            fields=fields, factors=factors, amounts=amounts, **_sky(slabs)
        )

    def paint_sky_vjp(
        self,
        slabs: Slabs,
        fields: Sequence[tf.Tensor],
        factors: tf.Tensor,
        amounts: tf.Tensor,
        dmaps: tf.Tensor,
    ) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
        """See `Kernels.paint_sky_vjp`."""
        return tuple(
            self._ops.flowpm_paint_sky_vjp(
                fields=fields, factors=factors, amounts=amounts, dout=dmaps, **_sky(slabs)
            )
        )

    def paint_ball(
        self, ball: Ball, fields: Sequence[tf.Tensor], factors: tf.Tensor, amounts: tf.Tensor
    ) -> tf.Tensor:
        """See `Kernels.paint_ball`."""
        return self._ops.flowpm_paint_ball(
            fields=fields, factors=factors, amounts=amounts, **_ball(ball)
        )

    def paint_ball_vjp(
        self,
        ball: Ball,
        fields: Sequence[tf.Tensor],
        factors: tf.Tensor,
        amounts: tf.Tensor,
        dmaps: tf.Tensor,
    ) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
        """See `Kernels.paint_ball_vjp`."""
        return tuple(
            self._ops.flowpm_paint_ball_vjp(
                fields=fields, factors=factors, amounts=amounts, dout=dmaps, **_ball(ball)
            )
        )


def _list(tensor: tf.Tensor | None) -> list[tf.Tensor]:
    return [] if tensor is None else [tensor]
