"""Particles about an observer on maps of the whole sky, in TensorFlow's own operations."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.healpix import Healpix
from flowpm_dist.particle_mesh.kernels.ball import DEGREE, Ball
from flowpm_dist.particle_mesh.kernels.farthest import farthest_move
from flowpm_dist.particle_mesh.kernels.portable_parts import moved_by, vjp_of_parts


def paint_ball(
    ball: Ball, fields: Sequence[tf.Tensor], factors: tf.Tensor, amounts: tf.Tensor
) -> tf.Tensor:
    """See `Kernels.paint_ball`; differentiable by all tensors."""
    batch, pixels = fields[0].shape[0], 12 * ball.nside**2
    maps = tf.zeros([batch, ball.maps * pixels], fields[0].dtype)
    for copy in ball.copies:
        maps += _copy(ball, copy, fields, factors, amounts)
    return tf.reshape(maps, [batch, ball.maps, pixels])


def paint_ball_vjp(
    ball: Ball,
    fields: Sequence[tf.Tensor],
    factors: tf.Tensor,
    amounts: tf.Tensor,
    dmaps: tf.Tensor,
) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
    """See `Kernels.paint_ball_vjp`."""
    paint = functools.partial(_copy, ball)
    return vjp_of_parts(paint, ball.copies, fields, factors, amounts, dmaps)


def _copy(
    ball: Ball,
    copy: np.ndarray,
    fields: Sequence[tf.Tensor],
    factors: tf.Tensor,
    amounts: tf.Tensor,
) -> tf.Tensor:
    """Returns what one copy of the box adds to the maps, [b, maps * pixels]."""
    dtype, batch, pixels = fields[0].dtype, fields[0].shape[0], 12 * ball.nside**2
    sides = [
        (first + np.arange(n)) * spacing + boxes * length - observer
        for first, n, spacing, boxes, length, observer in zip(
            ball.first, fields[0].shape[1:4], ball.spacing, copy, ball.lengths, ball.observer,
            strict=True,
        )
    ]  # fmt: skip
    lattice = np.stack(np.meshgrid(*sides, indexing="ij"), axis=-1).reshape(-1, 3)
    squares = np.square(lattice).sum(axis=-1)
    chosen = np.flatnonzero((squares >= ball.edges[0] ** 2) & (squares < ball.edges[-1] ** 2))
    if not chosen.size:
        return tf.zeros([batch, ball.maps * pixels], dtype)
    undisplaced = np.sqrt(squares[chosen])
    segments = np.searchsorted(ball.edges, undisplaced, side="right") - 1
    segments = np.clip(segments, 0, len(ball.first_map) - 1)
    lower, upper = ball.edges[segments], ball.edges[segments + 1]
    along = (2 * undisplaced - lower - upper) / (upper - lower)
    powers = tf.constant(along[:, np.newaxis] ** np.arange(DEGREE + 1), dtype)
    moved, placed = moved_by(
        [tf.gather(tf.reshape(field, [batch, -1, 3]), chosen, axis=1) for field in fields],
        [
            tf.reduce_sum(tf.gather(factors[:, :, f], segments, axis=1) * powers, axis=-1)
            for f in range(len(fields))
        ],
        farthest_move(ball.lengths),
    )
    place = tf.constant(lattice[chosen], dtype) + moved
    out = tf.zeros([batch * ball.maps * pixels], dtype)
    maps = ball.first_map[segments] + np.arange(batch)[:, np.newaxis] * ball.maps
    distance, shares, corners = _direction(Healpix(ball.nside), place)
    for w, amount in enumerate(_amounts(ball, amounts, distance)):
        for share, corner in zip(shares, corners, strict=True):
            values = tf.cast(share * amount, dtype)
            values = tf.where(placed, values, tf.constant(math.nan, dtype))
            index = ((maps + w) * pixels + np.where(placed, corner, 0)).reshape(-1, 1)
            out = tf.tensor_scatter_nd_add(out, tf.constant(index), tf.reshape(values, [-1]))
    return tf.reshape(out, [batch, -1])


def _direction(sphere: Healpix, place: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor], np.ndarray]:
    """Returns the distances of places [b, n, 3], and weights and numbers of their four pixels."""
    x, y, z = tf.unstack(tf.cast(place, tf.float64), axis=-1)
    # On the axis the longitude has no meaning, and no weight: nor has its gradient.
    across = _root(x**2 + y**2)
    off, away = across > 0, x**2 + y**2 + z**2 > 0
    theta = tf.atan2(across, tf.where(away, z, tf.ones_like(z)))
    phi = tf.atan2(y, tf.where(off, x, tf.ones_like(x)))
    found = sphere.corners(theta.numpy(), phi.numpy())
    return _root(x**2 + y**2 + z**2), found.weights(theta, phi), found.pixels


def _root(square: tf.Tensor) -> tf.Tensor:
    """Returns the square root, whose gradient at 0 is 0."""
    above = square > 0
    return tf.where(above, tf.sqrt(tf.where(above, square, 1.0)), 0.0)


def _amounts(ball: Ball, amounts: tf.Tensor, distance: tf.Tensor) -> list[tf.Tensor]:
    """Returns what particles at distances [b, n] add for each weight, [b, n]."""
    nodes = amounts.shape[1]
    along = distance / ball.step
    node = np.minimum(along.numpy().astype(np.int64), nodes - 2)
    share = tf.minimum(along - node, 1.0)
    given = tf.cast(amounts, tf.float64)
    lower, upper = (tf.gather(given, node + i, axis=1, batch_dims=1) for i in (0, 1))
    found = lower + share[..., tf.newaxis] * (upper - lower)
    if ball.per_distance:
        found = tf.math.divide_no_nan(found, distance[..., tf.newaxis])
    return tf.unstack(found, axis=-1)
