"""Layers of particles on maps of the sky, in TensorFlow's own operations."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from flowpm_dist.particle_mesh.kernels.farthest import farthest_move
from flowpm_dist.particle_mesh.kernels.portable_parts import moved_by, vjp_of_parts
from flowpm_dist.particle_mesh.kernels.slabs import Slabs


def paint_sky(
    slabs: Slabs, fields: Sequence[tf.Tensor], factors: tf.Tensor, amounts: tf.Tensor
) -> tf.Tensor:
    """See `Kernels.paint_sky`; differentiable by all tensors."""
    batch, n = fields[0].shape[0], slabs.pixels
    maps = tf.zeros([batch, slabs.maps * n * n], fields[0].dtype)
    for slab in range(len(slabs.places)):
        maps += _slab(slabs, slab, fields, factors, amounts)
    return tf.reshape(maps, [batch, slabs.maps, n, n])


def paint_sky_vjp(
    slabs: Slabs,
    fields: Sequence[tf.Tensor],
    factors: tf.Tensor,
    amounts: tf.Tensor,
    dmaps: tf.Tensor,
) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
    """See `Kernels.paint_sky_vjp`."""
    paint = functools.partial(_slab, slabs)
    return vjp_of_parts(paint, range(len(slabs.places)), fields, factors, amounts, dmaps)


def _slab(
    slabs: Slabs,
    slab: int,
    fields: Sequence[tf.Tensor],
    factors: tf.Tensor,
    amounts: tf.Tensor,
) -> tf.Tensor:
    """Returns what one slab adds to the maps, [b, maps * pixels * pixels]."""
    dtype, n = fields[0].dtype, slabs.pixels
    ax, ay, az, begin, count, first = (int(i) for i in slabs.places[slab])
    x0, sense_x, y0, sense_y, sense_z = (float(v) for v in slabs.directions[slab])
    layers = slice(first, first + count)
    seen = [slice(None)] * 5
    seen[1 + az] = slice(begin, begin + count)

    def by_layer(values: tf.Tensor) -> tf.Tensor:
        """Returns [b, layers] as a factor of [b, x, y, z]."""
        shape = [-1, 1, 1, 1]
        shape[1 + az] = count
        return tf.reshape(values, shape)

    moved, placed = moved_by(
        [field[tuple(seen)] for field in fields],
        [by_layer(factors[:, layers, f]) for f in range(len(fields))],
        farthest_move(slabs.lengths),
    )

    def across(axis: int, origin: float, sense: float) -> tf.Tensor:
        shape = [1, 1, 1, 1]
        shape[1 + axis] = -1
        lattice = np.arange(fields[0].shape[1 + axis]) * slabs.spacing[axis]
        place = tf.reshape(tf.constant(origin + sense * lattice, dtype), shape)
        place += sense * moved[..., axis]
        length = tf.constant(slabs.lengths[axis], dtype)
        return place - length * tf.stop_gradient(tf.round(place / length))

    shift = sense_z * moved[..., az]
    layer = tf.reshape(tf.constant(slabs.distances[layers], dtype), [1, -1])
    distance = by_layer(layer) + shift
    in_front = distance > 0
    distance = tf.where(in_front, distance, tf.ones_like(distance))
    size, middle = distance * slabs.pixel, 0.5 * n - 0.5
    x, y = across(ax, x0, sense_x), across(ay, y0, sense_y)
    farthest = float(tf.reduce_max(size)) * (middle + 1)
    reach = [range(-k, k + 1) for k in (_images(farthest, slabs.lengths[a]) for a in (ax, ay))]
    batch = fields[0].shape[0]
    first_map = tf.reshape(tf.constant(slabs.first_map[layers]), [1, -1])
    maps = by_layer(first_map) + tf.reshape(tf.range(batch) * slabs.maps, [-1, 1, 1, 1])
    out = tf.zeros([batch * slabs.maps * n * n], dtype)
    lost = tf.boolean_mask(tf.broadcast_to(maps, placed.shape), ~placed)
    for w in range(amounts.shape[2]):
        nans = tf.fill(lost.shape, tf.constant(math.nan, dtype))
        out = tf.tensor_scatter_nd_add(out, ((lost + w) * n * n)[:, tf.newaxis], nans)
    for i, j in itertools.product(*reach):
        px = (x + i * slabs.lengths[ax]) / size + middle
        py = (y + j * slabs.lengths[ay]) / size + middle
        column, row = tf.floor(px), tf.floor(py)
        near = placed & in_front & (column >= -1) & (column < n) & (row >= -1) & (row < n)
        for dx, dy, w in itertools.product((0, 1), (0, 1), range(amounts.shape[2])):
            share = (px - column if dx else 1 + column - px) * (py - row if dy else 1 + row - py)
            amount = by_layer(amounts[:, layers, w, 0]) + by_layer(amounts[:, layers, w, 1]) * shift
            c, r = column + dx, row + dy
            inside = near & (c >= 0) & (c < n) & (r >= 0) & (r < n)
            places = tf.boolean_mask([tf.broadcast_to(maps + w, c.shape)], [inside])
            pixel = tf.cast(tf.boolean_mask(r * n + c, inside), tf.int32)
            values = tf.boolean_mask(share * amount / distance**2, inside)
            out = tf.tensor_scatter_nd_add(out, (places * n * n + pixel)[:, tf.newaxis], values)
    return tf.reshape(out, [batch, -1])


def _images(farthest: float, length: float) -> int:
    """Returns how many boxes away, on either side, an image may lie on a map."""
    return math.ceil(max(farthest / length - 0.5, 0.0))
