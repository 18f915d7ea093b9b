"""Particles on maps of the sky, flat and full, in TensorFlow's own operations."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.healpix import Healpix
from flowpm_dist.particle_mesh.kernels.base import DEGREE, Ball, Shells, Slabs, farthest_move

PaintPart = Callable[[Sequence[tf.Tensor], tf.Tensor, tf.Tensor], tf.Tensor]
"""What one slab or copy adds to the maps, by its fields, factors and amounts; differentiable."""


def paint(
    geometry: Slabs | Ball, fields: Sequence[tf.Tensor], factors: tf.Tensor, amounts: tf.Tensor
) -> tf.Tensor:
    """Returns the maps of `Kernels.paint_sky` or of `Kernels.paint_ball`, differentiable."""
    size = [geometry.pixels] * 2 if isinstance(geometry, Slabs) else [12 * geometry.nside**2]
    shape = [fields[0].shape[0], geometry.maps(amounts), *size]
    maps = tf.zeros([shape[0], math.prod(shape[1:])], fields[0].dtype)
    for part in _parts(geometry):
        maps += part(fields, factors, amounts)
    return tf.reshape(maps, shape)


def paint_vjp(
    geometry: Slabs | Ball,
    fields: Sequence[tf.Tensor],
    factors: tf.Tensor,
    amounts: tf.Tensor,
    dout: tf.Tensor,
) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
    """Returns the cotangents of fields, factors and amounts, the last two float64.

    A tape holds one part: memory does not grow with their number.
    """
    sources = [*fields, factors, amounts]
    total = [tf.zeros_like(source) for source in sources]
    for part in _parts(geometry):
        with tf.GradientTape() as tape:
            tape.watch(sources)
            maps = part(fields, factors, amounts)
        zeros, dpart = tf.UnconnectedGradients.ZERO, tf.reshape(dout, maps.shape)
        gradients = tape.gradient(maps, sources, dpart, unconnected_gradients=zeros)
        total = [a + b for a, b in zip(total, gradients, strict=True)]
    *dfields, dfactors, damounts = total
    return dfields, tf.cast(dfactors, tf.float64), tf.cast(damounts, tf.float64)


def _parts(geometry: Slabs | Ball) -> list[PaintPart]:
    if isinstance(geometry, Slabs):
        if isinstance(geometry.places, tf.Tensor):
            raise RuntimeError(
                "a light cone inside a tf.function needs the compiled kernels on a CPU; call run "
                "eagerly"
            )
        return [functools.partial(_slab, geometry, slab) for slab in range(len(geometry.places))]
    return [functools.partial(_copy, geometry, copy) for copy in geometry.copies]


def _slab(
    slabs: Slabs,
    slab: int,
    fields: Sequence[tf.Tensor],
    factors: tf.Tensor,
    amounts: tf.Tensor,
) -> tf.Tensor:
    """Returns the maps of one slab's particles, [b, maps * pixels * pixels]."""
    dtype, n, each = fields[0].dtype, slabs.pixels, slabs.maps(amounts)
    amounts, lengths = (amounts[..., :-1], amounts[..., -1:]) if slabs.curved else (amounts, None)
    ax, ay, az, begin, count, first = (int(i) for i in slabs.places[slab])
    x0, sense_x, y0, sense_y, sense_z, *cut = (float(v) for v in slabs.directions[slab])
    layers = slice(first, first + count)
    index = [slice(None)] * 5
    index[1 + az] = slice(begin, begin + count)

    def by_layer(values: tf.Tensor) -> tf.Tensor:
        """Returns [b, layers] as a factor of [b, x, y, z]."""
        shape = [-1, 1, 1, 1]
        shape[1 + az] = count
        return tf.reshape(values, shape)

    moved, placed = moved_by(
        [field[tuple(index)] for field in fields],
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

    layer = tf.reshape(tf.constant(slabs.distances[layers]), [1, -1])
    exact = by_layer(layer) + sense_z * tf.cast(moved[..., az], tf.float64)
    in_front = exact > 0
    exact = tf.where(in_front, exact, tf.ones_like(exact))
    batch = fields[0].shape[0]
    flat = tf.reshape(exact, [batch, -1])
    length = tf.cast(exact, dtype)
    if lengths is not None:
        per_distance = tf.reshape(_interpolated(slabs, lengths, flat)[..., 0], exact.shape)
        length = tf.cast(exact * per_distance, dtype)
    size, middle = length * slabs.pixel, 0.5 * n - 0.5
    x, y = across(ax, x0, sense_x), across(ay, y0, sense_y)
    farthest = float(tf.reduce_max(size)) * (middle + 1)
    # The number of boxes away, on either side, at which an image may lie on a map.
    away = [math.ceil(max(farthest / slabs.lengths[a] - 0.5, 0.0)) for a in (ax, ay)]
    reach = [range(-k, k + 1) for k in away]
    of_universe = tf.reshape(tf.range(batch) * each, [-1, 1, 1, 1])
    out = tf.zeros([batch * each * n * n], dtype)
    lost = tf.boolean_mask(tf.broadcast_to(of_universe, placed.shape), ~placed)
    for w in range(amounts.shape[2]):
        nans = tf.fill(lost.shape, tf.constant(math.nan, dtype))
        out = tf.tensor_scatter_nd_add(out, ((lost + w) * n * n)[:, tf.newaxis], nans)
    of_distance = [
        (of_universe + map_.reshape(exact.shape), tf.cast(tf.reshape(amount, exact.shape), dtype))
        for map_, amount in _amounts(slabs, amounts, flat, *cut)
    ]
    for i, j in itertools.product(*reach):
        px = (x + i * slabs.lengths[ax]) / size + middle
        py = (y + j * slabs.lengths[ay]) / size + middle
        out = _add_bilinearly(out, n, px, py, placed & in_front, of_distance)
    return tf.reshape(out, [batch, -1])


def _add_bilinearly(
    out: tf.Tensor,
    n: int,
    px: tf.Tensor,
    py: tf.Tensor,
    visible: tf.Tensor,
    of_distance: Sequence[tuple[tf.Tensor, tf.Tensor]],
) -> tf.Tensor:
    """Returns the maps with particles added to the four pixels around each.

    Args:
        out: the maps, flat [maps * n * n].
        n: pixels along each side of a map.
        px, py: positions of the particles [b, x, y, z] [pixels].
        visible: the particles to add.
        of_distance: the map of each particle, and the amount that the particle adds to it.
    """
    column, row = tf.floor(px), tf.floor(py)
    near = visible & (column >= -1) & (column < n) & (row >= -1) & (row < n)
    for dx, dy, (maps, amount) in itertools.product((0, 1), (0, 1), of_distance):
        share = (px - column if dx else 1 + column - px) * (py - row if dy else 1 + row - py)
        c, r = column + dx, row + dy
        inside = near & (c >= 0) & (c < n) & (r >= 0) & (r < n)
        places = tf.boolean_mask(maps, inside)
        pixel = tf.cast(tf.boolean_mask(r * n + c, inside), tf.int32)
        values = tf.boolean_mask(share * amount, inside)
        out = tf.tensor_scatter_nd_add(out, (places * n * n + pixel)[:, tf.newaxis], values)
    return out


def moved_by(
    fields: Sequence[tf.Tensor], factors: Sequence[tf.Tensor], farthest: float
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the sum of factors times fields, 0 without a place, and a mask of places.

    Args:
        fields: [..., 3].
        factors: the factor of each field, broadcast to [...].
        farthest: see `farthest_move` [Mpc/h].

    Returns:
        The sum [..., 3], without a gradient where it has no place; and bool [...].
    """

    def total(fields: Iterable[tf.Tensor], factors: Iterable[tf.Tensor]) -> tf.Tensor:
        return tf.add_n([c[..., tf.newaxis] * f for c, f in zip(factors, fields, strict=True)])

    placed = tf.reduce_all(tf.abs(total(fields, factors)) <= farthest, axis=-1)
    # Both of each product: the gradient of one is the other.
    kept_fields = [tf.where(placed[..., tf.newaxis], f, tf.zeros_like(f)) for f in fields]
    kept_factors = [tf.where(placed, c, tf.zeros_like(c)) for c in factors]
    return total(kept_fields, kept_factors), placed


def _copy(
    ball: Ball,
    copy: np.ndarray,
    fields: Sequence[tf.Tensor],
    factors: tf.Tensor,
    amounts: tf.Tensor,
) -> tf.Tensor:
    """Returns the maps of the particles in one copy of the box, [b, maps * pixels]."""
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
    chosen = np.flatnonzero((squares >= ball.near**2) & (squares < ball.far**2))
    each = ball.shells * amounts.shape[2]
    if not chosen.size:
        return tf.zeros([batch, each * pixels], dtype)
    undisplaced = np.sqrt(squares[chosen])
    segments = np.searchsorted(ball.edges, undisplaced, side="right") - 1
    segments = np.clip(segments, 0, len(ball.edges) - 2)
    lower, upper = ball.edges[segments], ball.edges[segments + 1]
    along = np.clip((2 * undisplaced - lower - upper) / (upper - lower), -1.0, 1.0)
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
    out = tf.zeros([batch * each * pixels], dtype)
    of_universe = np.arange(batch)[:, np.newaxis] * each
    distance, shares, corners = _direction(Healpix(ball.nside), place)
    for maps, amount in _amounts(ball, amounts, distance):
        for share, corner in zip(shares, corners, strict=True):
            values = tf.cast(share * amount, dtype)
            values = tf.where(placed, values, tf.constant(math.nan, dtype))
            number = of_universe + np.where(placed, maps, maps % amounts.shape[2])
            index = (number * pixels + np.where(placed, corner, 0)).reshape(-1, 1)
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
    corners = sphere.corners(theta.numpy(), phi.numpy())
    return _root(x**2 + y**2 + z**2), corners.weights(theta, phi), corners.pixels


def _root(square: tf.Tensor) -> tf.Tensor:
    """Returns the square root, whose gradient at 0 is 0."""
    above = square > 0
    return tf.where(above, tf.sqrt(tf.where(above, square, 1.0)), 0.0)


def _interpolated(geometry: Shells, amounts: tf.Tensor, distance: tf.Tensor) -> tf.Tensor:
    """Returns amounts [b, nodes, weights] at distances [b, n], float64 [b, n, weights]."""
    along = distance / geometry.step
    node = np.minimum(along.numpy().astype(np.int64), amounts.shape[1] - 2)
    share = tf.minimum(along - node, 1.0)
    table = tf.cast(amounts, tf.float64)
    lower, upper = (tf.gather(table, node + i, axis=1, batch_dims=1) for i in (0, 1))
    return lower + share[..., tf.newaxis] * (upper - lower)


def _amounts(
    geometry: Shells,
    amounts: tf.Tensor,
    distance: tf.Tensor,
    near: float = -math.inf,
    far: float = math.inf,
) -> Iterator[tuple[np.ndarray, tf.Tensor]]:
    """Yields the number of each map to which particles at distances [b, n] add, and their amounts.

    Of their clouds, only what lies between `near` and `far` is added.

    Each item is one shell of the particles and one of their weights. The number of the map is int32
    [b, n], counted from the first map of a universe. The amount is float64 [b, n]; it is 0 where a
    particle has no such shell.
    """
    weights, interpolated = amounts.shape[2], _interpolated(geometry, amounts, distance)
    if geometry.power:
        interpolated = tf.math.divide_no_nan(
            interpolated, distance[..., tf.newaxis] ** geometry.power
        )
    borders = geometry.borders
    low = tf.maximum(distance - 0.5 * geometry.depth, near)
    high = tf.minimum(distance + 0.5 * geometry.depth, far)
    first = np.searchsorted(borders, low.numpy(), side="right") - 1
    # A cloud that begins in a shell ends behind so many borders at most.
    most = np.searchsorted(borders, borders + geometry.depth) - np.arange(len(borders))
    for number in range(1 + int(most.max())):
        shell = np.clip(first + number, 0, geometry.shells - 1).astype(np.int32)
        begin, end = borders[shell], borders[shell + 1]
        part = (tf.minimum(high, end) - tf.maximum(low, begin)) / geometry.depth
        here = (first + number == shell) & (part.numpy() > 0)
        if not here.any():
            continue
        part = tf.where(here, part, tf.zeros_like(part))
        for w in range(weights):
            yield shell * weights + w, interpolated[..., w] * part
