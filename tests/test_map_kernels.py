"""Particles on flat and whole-sky maps: weights, both kinds of kernels, mass, the adjoint."""

import healpy
import numpy as np
import pytest
import tensorflow as tf

from flowpm_dist.grid.healpix import Healpix
from flowpm_dist.particle_mesh.kernels import Ball, Compiled, Portable, Slabs

SIDES, LENGTHS, NSIDE = (6, 4, 8), (12.0, 8.0, 16.0), 4
FLAT_SIDES, FLAT_LENGTHS, PIXELS = (8, 6, 10), (16.0, 12.0, 20.0), 12
RNG = np.random.default_rng(1)


def ball(**changes):
    """Two copies and the box itself, in three segments, of which the last two share a map."""
    given = dict(
        copies=np.array([[0, 0, 0], [1, 0, -1], [0, -1, 0], [9, 9, 9]], np.int32),
        edges=np.array([1.0, 5.0, 9.0, 14.0]),
        first_map=np.array([0, 1, 1], np.int32),
        first=(2, 0, 4),
        spacing=tuple(length / n for length, n in zip(LENGTHS, SIDES, strict=True)),
        lengths=LENGTHS,
        observer=(5.1, 3.7, 9.2),
        step=2.5,
        per_distance=True,
        nside=NSIDE,
        maps=3,
    )
    return Ball(**{**given, **changes})


def slabs(field_of_view=0.5):
    """Each axis once along the line of sight, in front and behind, with a map for some layers."""
    places = [[0, 1, 2, 3, 4, 0], [2, 1, 0, 1, 3, 4], [0, 2, 1, 0, 6, 7]]
    directions = [[-3.2, 1, 2.1, -1, 1], [5.0, -1, 0.3, 1, -1], [-9.0, 1, 0.1, -1, 1]]
    return Slabs(
        places=np.array(places, np.int32),
        directions=np.array(directions),
        distances=np.linspace(20.0, 60.0, 13),
        first_map=np.arange(13, dtype=np.int32) % 3,
        spacing=tuple(length / n for length, n in zip(FLAT_LENGTHS, FLAT_SIDES, strict=True)),
        lengths=FLAT_LENGTHS,
        pixel=field_of_view / PIXELS,
        pixels=PIXELS,
        maps=5,
    )


def drawn(at, dtype, batch=2, fields=3, weights=2, spread=0.7):
    """Fields of displacements, their factors and the amounts, for a ball or for slabs."""
    is_ball = isinstance(at, Ball)
    shape = (batch, *(SIDES if is_ball else FLAT_SIDES), 3)
    moved = [tf.constant(RNG.normal(size=shape, scale=spread).astype(dtype)) for _ in range(fields)]
    of_factors = (batch, 3, fields, 4) if is_ball else (batch, 13, fields)
    of_amounts = (batch, 6, weights) if is_ball else (batch, 13, weights, 2)
    factors = RNG.normal(size=of_factors, scale=0.5).astype(dtype)
    return moved, tf.constant(factors), tf.constant(RNG.normal(size=of_amounts).astype(dtype))


def painted(kernels, at, *given):
    return (kernels.paint_ball if isinstance(at, Ball) else kernels.paint_sky)(at, *given)


def slopes_of(kernels, at, *given):
    """The adjoint: a flat list of the slopes of all inputs."""
    vjp = kernels.paint_ball_vjp if isinstance(at, Ball) else kernels.paint_sky_vjp
    return tf.nest.flatten(vjp(at, *given))


def relative(ours, expected):
    return np.abs(ours - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("nside", [1, 2, 8, 64])
def test_weights_are_those_of_healpy(nside):
    """In all directions, on rings, at the poles and near them."""
    sphere = Healpix(nside)
    z = np.concatenate(
        [RNG.uniform(-1, 1, 2000), np.cos(sphere.theta), [1, -1], 2 / 3 + np.zeros(4)]
    )
    theta = np.concatenate([np.arccos(z), [1e-9, np.pi - 1e-9, 1e-3, np.pi - 1e-3]])
    phi = RNG.uniform(0, 2 * np.pi, theta.size)
    phi[:3] = 0.0, 2 * np.pi - 1e-15, np.pi
    corners = sphere.corners(theta, phi - 2 * np.pi * (phi > np.pi))
    ours = np.stack(corners.weights(theta, phi - 2 * np.pi * (phi > np.pi)))
    pixels, weights = healpy.get_interp_weights(nside, theta, phi)
    for i in range(theta.size):
        both = np.zeros(sphere.pixels)
        np.add.at(both, corners.pixels[:, i], ours[:, i])
        np.add.at(both, pixels[:, i], -weights[:, i])
        assert np.abs(both).max() < 1e-12 * max(1, nside)  # the longitude's, in pixels
    centres = healpy.pix2ang(nside, np.arange(sphere.pixels))
    np.testing.assert_allclose(
        sphere.theta[1:-1].repeat(sphere.counts[1:-1]), centres[0], atol=1e-14
    )


@pytest.mark.parametrize("nside", [1, 2, 16])
def test_painted_areas_are_integrals_of_weights(nside):
    sphere, fine = Healpix(nside), 16 * nside
    directions = healpy.pix2ang(fine, np.arange(12 * fine**2))
    corners = sphere.corners(*directions)
    sums = np.zeros(sphere.pixels)
    np.add.at(sums, corners.pixels, np.stack(corners.weights(*directions)))
    expected = sums * 4 * np.pi / (12 * fine**2)
    np.testing.assert_allclose(sphere.painted_areas, expected, rtol=3e-3)
    assert sphere.painted_areas.sum() == pytest.approx(4 * np.pi, rel=1e-13)
    with pytest.raises(ValueError, match="a power of two up to 8192"):
        Healpix(3)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("at", "double", "single"),
    [
        (ball(per_distance=True), 1e-12, 3e-5),
        (ball(per_distance=False), 1e-12, 3e-5),
        (slabs(0.1), 1e-13, 1e-5),
        (slabs(0.5), 1e-13, 1e-5),  # with images of some particles
    ],
)
def test_compiled_and_portable_kernels_agree(at, double, single, dtype):
    tolerance = double if dtype == "float64" else single
    given = at, *drawn(at, dtype)
    maps = painted(Compiled(), *given)
    assert relative(maps, painted(Portable(), *given)) < tolerance
    dmaps = tf.constant(RNG.normal(size=maps.shape).astype(dtype))
    ours, expected = (slopes_of(k, *given, dmaps) for k in (Compiled(), Portable()))
    for slope, known in zip(ours, expected, strict=True):
        assert relative(slope, known) < tolerance


def places_of(at, fields, factors, b):
    """Undisplaced distances and places of all that is seen, and their segments, in numpy."""
    lattice = np.stack(np.meshgrid(*map(np.arange, SIDES), indexing="ij"), -1) + at.first
    found = []
    for copy in at.copies:
        q = lattice * np.array(at.spacing) + copy * np.array(at.lengths) - at.observer
        chi = np.linalg.norm(q, axis=-1)
        for segment, (low, high) in enumerate(zip(at.edges[:-1], at.edges[1:], strict=True)):
            seen = (chi >= low) & (chi < high)
            u = (2 * chi[seen] - low - high) / (high - low)
            c = [np.polynomial.Polynomial(f)(u) for f in factors.numpy()[b, segment]]
            moved = sum(f[:, None] * s.numpy()[b][seen] for f, s in zip(c, fields, strict=True))
            found.append((q[seen] + moved, np.full(seen.sum(), segment)))
    places, segments = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return places, segments


@pytest.mark.parametrize("per_distance", [True, False])
def test_maps_are_those_of_healpys_weights(per_distance):
    """Maps equal the same particles added one by one; their sums are the sums of the amounts."""
    at = ball(per_distance=per_distance)
    fields, factors, amounts = drawn(at, "float64")
    maps = Compiled().paint_ball(at, fields, factors, amounts).numpy()
    for b in range(2):
        places, segments = places_of(at, fields, factors, b)
        distance = np.linalg.norm(places, axis=-1)
        pixels, shares = healpy.get_interp_weights(
            NSIDE, np.arccos(places[:, 2] / distance), np.arctan2(places[:, 1], places[:, 0])
        )
        expected = np.zeros((3, 12 * NSIDE**2))
        for w in range(2):
            nodes = at.step * np.arange(6)
            amount = np.interp(distance, nodes, amounts.numpy()[b, :, w])
            amount = amount / distance if per_distance else amount
            number = at.first_map[segments] + w
            np.add.at(expected, (np.broadcast_to(number, pixels.shape), pixels), shares * amount)
        assert relative(maps[b], expected) < 1e-11
        assert len(places) > 200


@pytest.mark.parametrize(("at", "h"), [(ball(), 1e-8), (slabs(0.9), 1e-7)])
def test_the_adjoint_is_that_of_the_difference(at, h):
    """<dmaps, J d> = <J^T dmaps, d>, the left side by differences of the maps."""
    fields, factors, amounts = drawn(at, "float64", batch=1)
    dmaps = tf.constant(RNG.normal(size=painted(Compiled(), at, fields, factors, amounts).shape))
    slopes = slopes_of(Compiled(), at, fields, factors, amounts, dmaps)
    d = [tf.constant(RNG.normal(size=x.shape)) for x in (*fields, factors, amounts)]

    def along(sign):
        moved = [x + sign * h * y for x, y in zip((*fields, factors, amounts), d, strict=True)]
        maps = painted(Compiled(), at, moved[:3], moved[3], moved[4])
        return float(tf.reduce_sum(maps * dmaps))

    expected = sum(float(tf.reduce_sum(x * y)) for x, y in zip(slopes, d, strict=True))
    assert (along(1) - along(-1)) / (2 * h) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("make", [Compiled, Portable])
def test_a_particle_on_the_axis_or_at_the_observer(make):
    """Its slopes are finite, and it is left out only where its weight would be infinite."""
    at = ball(observer=(4.0, 4.0, 8.0), edges=np.array([0.0, 5.0, 9.0, 14.0]), first=(0, 0, 0))
    fields = [tf.zeros([1, *SIDES, 3], tf.float64)]
    factors = tf.ones([1, 3, 1, 4], tf.float64)
    amounts = tf.ones([1, 6, 1], tf.float64)
    counted = ball(**{**vars(at), "per_distance": False})
    lattice = np.stack(np.meshgrid(*map(np.arange, SIDES), indexing="ij"), -1)
    chi = [
        np.linalg.norm(
            lattice * np.array(at.spacing) + c * np.array(at.lengths) - at.observer, axis=-1
        )
        for c in at.copies
    ]
    inside = np.array(chi)[np.array(chi) < 14.0]
    assert (inside == 0).sum() == 1
    maps = make().paint_ball(counted, fields, factors, amounts).numpy()
    assert maps.sum() == pytest.approx(len(inside), rel=1e-13)
    maps = make().paint_ball(at, fields, factors, amounts)
    weight = (1 / inside[inside > 0]).sum()
    assert maps.numpy().sum() == pytest.approx(weight, rel=1e-13)
    for each in (at, counted):
        slopes = make().paint_ball_vjp(each, fields, factors, amounts, maps)
        assert all(np.isfinite(x).all() for x in tf.nest.flatten(slopes))


@pytest.mark.parametrize("make", [Compiled, Portable])
@pytest.mark.parametrize(
    ("at", "field", "factor", "maps_of"),
    [
        (ball(), (np.nan, 0.0, 0.0), None, [1, 2]),
        (ball(), (0.0, -np.inf, 0.0), None, [1, 2]),
        (ball(), (0.0, 0.0, np.nan), None, [1, 2]),
        (ball(), (0.0, 0.0, 0.0), (1, np.nan), [1, 2]),  # of one segment
        (ball(), (0.0, 1e20, 0.0), (slice(None), 1e25), [1, 2]),  # overflows in float32
        (ball(), (0.0, 10.1 * max(LENGTHS), 0.0), (slice(None), [1.0, 0, 0, 0]), [1, 2]),
        (ball(), (0.0, 0.0, -9.9 * max(LENGTHS)), (slice(None), [1.0, 0, 0, 0]), []),
        (slabs(0.1), (np.nan, 0.0, 0.0), None, [0, 1, 2]),
        (slabs(0.1), (0.0, np.nan, 0.0), None, [0, 1, 2]),
        (slabs(0.1), (0.0, 0.0, -np.inf), None, [0, 1, 2]),
        (slabs(0.1), (0.0, 0.0, 0.0), (1, np.nan), [1, 2]),  # of one layer
        (slabs(0.1), (0.0, 1e20, 0.0), (slice(None), 1e25), [0, 1, 2]),  # overflows in float32
        # Ten times the longest side is 200.
        (slabs(0.1), (0.0, 0.0, 201.0), (slice(None), 1.0), [0, 1, 2]),
        (slabs(0.1), (-201.0, 0.0, 0.0), (slice(None), 1.0), [0, 1, 2]),
        (slabs(0.1), (199.0, -199.0, 199.0), (slice(None), 1.0), []),
    ],
)
def test_a_particle_without_a_place_is_seen_on_its_maps(make, at, field, factor, maps_of):
    """It is not left out in silence, and takes no part in the adjoint.

    On flat maps this holds along any axis, outside of the field along another.
    """
    fields, factors, amounts = drawn(at, "float32")
    moved, by = [f.numpy() for f in fields], factors.numpy()
    moved[1][1] = 0.0
    if isinstance(at, Slabs):
        for each in moved:
            each[1, 3, 2, 4] = 0.0
    moved[1][1, 3, 2, 4] = field
    if factor is not None:
        by[1, factor[0], 1] = factor[1]
    given = at, [tf.constant(f) for f in moved], tf.constant(by), amounts
    maps = painted(make(), *given).numpy()
    assert np.isfinite(maps[0]).all()
    of_each_map = maps[1].reshape(maps.shape[1], -1)
    assert np.flatnonzero(np.isnan(of_each_map).any(axis=1)).tolist() == maps_of
    slopes = slopes_of(make(), *given, tf.ones(maps.shape))
    assert all(np.isfinite(x).all() for x in slopes)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (dict(edges=np.array([1.0, 5.0, 5.0, 14.0])), "segment 1 has edges that do not increase"),
        (dict(first_map=np.array([0, 1, 2], np.int32)), "segment 2 has maps that do not exist"),
        (dict(step=0.0), "a step above 0"),
    ],
)
def test_balls_that_cannot_be_are_refused(change, told):
    with pytest.raises(tf.errors.InvalidArgumentError, match=told):
        Compiled().paint_ball(ball(**change), *drawn(ball(), "float64"))


def test_every_particle_in_the_field_is_there_once():
    """On maps that hold the whole box from afar, each weighs its amount over its distance^2."""
    one = slabs(1.0)
    fields, factors, amounts = drawn(one, "float64", batch=1, fields=1, spread=0.1)
    places = np.array([[0, 1, 2, 0, 10, 0]], np.int32)
    far = Slabs(
        places, np.array([[-8.0, 1, -6.0, 1, 1]]), np.linspace(90.0, 110.0, 13), one.first_map,
        one.spacing, (1e6, 1e6, 1e6), 0.05, PIXELS, 5,
    )  # fmt: skip
    ones = tf.ones_like(factors)
    maps = Compiled().paint_sky(far, fields, ones, amounts).numpy()
    shift = fields[0].numpy()[0, ..., 2]
    layer = np.linspace(90.0, 110.0, 13)[:10]
    weight = amounts.numpy()[0, :10]
    total = (weight[..., 0] + weight[..., 1] * shift[..., None]) / (layer + shift)[..., None] ** 2
    for w in range(2):
        for first in range(3):
            of_map = total[..., first::3, w].sum()
            assert of_map == pytest.approx(
                maps[0, first + w].sum() - sum_of_others(total, first, w), rel=1e-12
            )


def sum_of_others(total, first, w):
    """What other layers add to the same map with their other weight."""
    other, start = 1 - w, first + w - (1 - w)
    return total[..., start::3, other].sum() if 0 <= start < 3 else 0.0


def test_slabs_that_cannot_be_are_refused():
    at = slabs()
    rest = drawn(at, "float64")
    for change in ([0, 0, 2, 3, 4, 0], [0, 1, 2, 8, 4, 0], [0, 1, 2, 3, 4, 10]):
        places = at.places.copy()
        places[0] = change
        wrong = Slabs(**{**vars(at), "places": places})
        with pytest.raises(tf.errors.InvalidArgumentError, match="slab 0 has"):
            Compiled().paint_sky(wrong, *rest)
