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
ONES = tf.ones([1, 2, 1], tf.float64)


def ball(**changes):
    """Two copies and the box itself, in three segments, with shells that some do not reach."""
    given = dict(
        copies=np.array([[0, 0, 0], [1, 0, -1], [0, -1, 0], [9, 9, 9]], np.int32),
        edges=np.array([1.0, 5.0, 9.0, 14.0]),
        near=0.5,
        far=14.5,
        borders=np.array([1.3, 6.0, 7.1, 13.0]),
        depth=1.9,
        first=(2, 0, 4),
        spacing=tuple(length / n for length, n in zip(LENGTHS, SIDES, strict=True)),
        lengths=LENGTHS,
        observer=(5.1, 3.7, 9.2),
        step=2.5,
        power=1,
        nside=NSIDE,
    )
    return Ball(**{**given, **changes})


def slabs(field_of_view=0.5, **changes):
    """Each axis once along the line of sight, in front and behind, in three shells."""
    places = [[0, 1, 2, 3, 4, 0], [2, 1, 0, 1, 3, 4], [0, 2, 1, 0, 6, 7]]
    ends = [[-np.inf, np.inf], [29.0, 44.5], [33.5, 54.0]]
    directions = [[-3.2, 1, 2.1, -1, 1], [5.0, -1, 0.3, 1, -1], [-9.0, 1, 0.1, -1, 1]]
    directions = np.concatenate([directions, ends], axis=1)
    given = dict(
        places=np.array(places, np.int32),
        directions=directions,
        distances=np.linspace(20.0, 60.0, 13),
        borders=np.array([-np.inf, 31.0, 32.5, 58.0]),
        depth=2.2,
        step=13.0,
        power=2,
        spacing=tuple(length / n for length, n in zip(FLAT_LENGTHS, FLAT_SIDES, strict=True)),
        lengths=FLAT_LENGTHS,
        pixel=field_of_view / PIXELS,
        pixels=PIXELS,
    )
    return Slabs(**{**given, **changes})


def drawn(at, dtype, batch=2, fields=3, weights=2, spread=0.7):
    """Fields of displacements, their factors and the amounts, for a ball or for slabs."""
    is_ball = isinstance(at, Ball)
    shape = (batch, *(SIDES if is_ball else FLAT_SIDES), 3)
    moved = [tf.constant(RNG.normal(size=shape, scale=spread).astype(dtype)) for _ in range(fields)]
    of_factors = (batch, 3, fields, 4) if is_ball else (batch, 13, fields)
    of_amounts = (batch, 6, weights)
    factors = RNG.normal(size=of_factors, scale=0.5).astype(dtype)
    amounts = RNG.normal(size=of_amounts)
    if not is_ball and at.curved:  # the last column is f_K / chi
        amounts[..., -1] = 1.0 + 0.02 * np.cumsum(RNG.uniform(size=of_amounts[:2]), axis=1)
    return moved, tf.constant(factors), tf.constant(amounts.astype(dtype))


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
        (ball(power=1), 1e-12, 3e-5),
        (ball(power=0), 1e-12, 3e-5),
        (slabs(0.1, power=1), 1e-12, 1e-5),
        (slabs(0.3), 1e-12, 1e-5),  # with images of some particles
        (slabs(0.3, curved=True), 1e-12, 1e-5),
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
    """Places of all that is looked at, in numpy."""
    lattice = np.stack(np.meshgrid(*map(np.arange, SIDES), indexing="ij"), -1) + at.first
    found = []
    for copy in at.copies:
        q = lattice * np.array(at.spacing) + copy * np.array(at.lengths) - at.observer
        chi = np.linalg.norm(q, axis=-1)
        for segment, (low, high) in enumerate(zip(at.edges[:-1], at.edges[1:], strict=True)):
            begin, end = (at.near if segment == 0 else low), (at.far if segment == 2 else high)
            seen = (chi >= begin) & (chi < end)
            u = np.clip((2 * chi[seen] - low - high) / (high - low), -1, 1)
            c = [np.polynomial.Polynomial(f)(u) for f in factors.numpy()[b, segment]]
            moved = sum(f[:, None] * s.numpy()[b][seen] for f, s in zip(c, fields, strict=True))
            found.append(q[seen] + moved)
    return np.concatenate(found)


def shares_of(at, distance, near=-np.inf):
    """Shares of clouds in shells [shell, n]: the mean of what is inside, from many points."""
    points = distance + at.depth * ((np.arange(4000) + 0.5) / 4000 - 0.5)[:, np.newaxis]
    pairs = zip(at.borders[:-1], at.borders[1:], strict=True)
    return np.stack([np.mean((points >= max(a, near)) & (points < b), axis=0) for a, b in pairs])


@pytest.mark.parametrize("power", [1, 0])
def test_maps_are_those_of_healpys_weights(power):
    """Maps equal the same particles added one by one, each to the shells that hold it."""
    at = ball(power=power)
    fields, factors, amounts = drawn(at, "float64")
    maps = Compiled().paint_ball(at, fields, factors, amounts).numpy()
    for b in range(2):
        places = places_of(at, fields, factors, b)
        distance = np.linalg.norm(places, axis=-1)
        pixels, shares = healpy.get_interp_weights(
            NSIDE, np.arccos(places[:, 2] / distance), np.arctan2(places[:, 1], places[:, 0])
        )
        expected = np.zeros((3, 2, 12 * NSIDE**2))
        for w in range(2):
            amount = np.interp(distance, at.step * np.arange(6), amounts.numpy()[b, :, w])
            for shell, part in enumerate(shares_of(at, distance)):
                np.add.at(expected[shell, w], pixels, shares * amount / distance**power * part)
        assert relative(maps[b], expected.reshape(6, -1)) < 1e-3  # of the points
        assert len(places) > 200


@pytest.mark.parametrize("at", [ball(), slabs(0.9)])
def test_shells_add_up_to_what_is_in_one(at):
    """No part of a particle is lost at a border or counted twice, whatever the shells' widths."""
    given = drawn(at, "float64")
    ends, fine = at.borders[[0, -1]], np.sort(RNG.uniform(2.0, 57.0, 90))
    inner = fine[(fine > ends[0]) & (fine < ends[1])]
    assert np.diff(inner).min() < at.depth < np.diff(inner).max() + at.depth
    many = painted(
        Compiled(), type(at)(**{**vars(at), "borders": np.sort([*ends, *inner])}), *given
    )
    one = painted(Compiled(), type(at)(**{**vars(at), "borders": ends}), *given).numpy()
    parts = many.numpy().reshape(one.shape[0], -1, *one.shape[1:]).sum(axis=1)
    assert relative(parts, one) < 1e-13


@pytest.mark.parametrize("make", [Compiled, Portable])
def test_a_particle_that_crosses_a_border_moves_from_shell_to_shell(make):
    """Its share of the far shell is the part of its cloud beyond the border."""
    at = ball(borders=np.array([0.0, 6.0, 40.0]), near=0.0, far=20.0, power=0, depth=2.0)
    at = Ball(**{**vars(at), "copies": at.copies[:1], "observer": (-2.0, 0.0, 8.0)})
    shape, towards = (1, *SIDES, 3), np.zeros((1, *SIDES, 3))
    factors = tf.constant(np.eye(1, 4)[None].repeat(3, 1)[:, :, None])
    for moved, far in ((-1.5, 0.0), (-0.5, 0.25), (0.0, 0.5), (0.25, 0.625), (1.0, 1.0)):
        towards[0, 0, 0, 0, 0] = moved
        before = make().paint_ball(at, [tf.zeros(shape, tf.float64)], factors, ONES)
        after = make().paint_ball(at, [tf.constant(towards)], factors, ONES)
        change = tf.reduce_sum(after - before, axis=-1).numpy()[0]
        np.testing.assert_allclose(change, [0.5 - far, far - 0.5], atol=1e-12)


@pytest.mark.parametrize(
    ("at", "h"), [(ball(), 1e-8), (slabs(0.9), 1e-7), (slabs(0.4, curved=True), 1e-8)]
)
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
    limits = dict(edges=np.array([0.0, 5.0, 9.0, 14.0]), near=0.0, far=14.0)
    limits["borders"] = np.array([-np.inf, 40.0])
    at = ball(observer=(4.0, 4.0, 8.0), first=(0, 0, 0), **limits)
    fields = [tf.zeros([1, *SIDES, 3], tf.float64)]
    factors = tf.ones([1, 3, 1, 4], tf.float64)
    amounts = tf.ones([1, 6, 1], tf.float64)
    counted = ball(**{**vars(at), "power": 0})
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
        (ball(), (np.nan, 0.0, 0.0), None, [0, 1]),
        (ball(), (0.0, -np.inf, 0.0), None, [0, 1]),
        (ball(), (0.0, 0.0, np.nan), None, [0, 1]),
        (ball(), (0.0, 0.0, 0.0), (1, np.nan), [0, 1]),  # of one segment
        (ball(), (0.0, 1e20, 0.0), (slice(None), 1e25), [0, 1]),  # overflows in float32
        (ball(), (0.0, 10.1 * max(LENGTHS), 0.0), (slice(None), [1.0, 0, 0, 0]), [0, 1]),
        (ball(), (0.0, 0.0, -9.9 * max(LENGTHS)), (slice(None), [1.0, 0, 0, 0]), []),
        (slabs(0.1), (np.nan, 0.0, 0.0), None, [0, 1]),
        (slabs(0.1), (0.0, np.nan, 0.0), None, [0, 1]),
        (slabs(0.1), (0.0, 0.0, -np.inf), None, [0, 1]),
        (slabs(0.1), (0.0, 0.0, 0.0), (1, np.nan), [0, 1]),  # of one layer
        (slabs(0.1), (0.0, 1e20, 0.0), (slice(None), 1e25), [0, 1]),  # overflows in float32
        # Ten times the longest side is 200.
        (slabs(0.1), (0.0, 0.0, 201.0), (slice(None), 1.0), [0, 1]),
        (slabs(0.1), (-201.0, 0.0, 0.0), (slice(None), 1.0), [0, 1]),
        (slabs(0.1), (199.0, -199.0, 199.0), (slice(None), 1.0), []),
    ],
)
def test_a_particle_without_a_place_is_seen_on_the_first_maps(make, at, field, factor, maps_of):
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
    ("change", "message"),
    [
        (dict(edges=np.array([1.0, 5.0, 5.0, 14.0])), "segment 1 has edges that do not increase"),
        (dict(borders=np.array([1.0, 5.0, 5.0])), "shell 1 has borders that do not increase"),
        (dict(step=0.0), "a step and a depth above 0"),
    ],
)
def test_balls_that_cannot_be_are_refused(change, message):
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        Compiled().paint_ball(ball(**change), *drawn(ball(), "float64"))


def test_every_particle_in_the_field_is_there_once():
    """On maps that hold the whole box from afar, each weighs its amount over its distance^2."""
    places, distances = np.array([[0, 1, 2, 0, 10, 0]], np.int32), np.linspace(90.0, 110.0, 13)
    far = slabs(
        places=places, directions=np.array([[-8.0, 1, -6.0, 1, 1, 93.0, 2e2]]), distances=distances,
        borders=np.array([80.0, 97.0, 105.0]), lengths=(1e6, 1e6, 1e6), pixel=0.05, step=30.0,
    )  # fmt: skip
    fields, factors, amounts = drawn(far, "float64", batch=1, fields=1, spread=0.9)
    maps = Compiled().paint_sky(far, fields, tf.ones_like(factors), amounts).numpy()
    chi = (distances[:10] + fields[0].numpy()[0, ..., 2]).ravel()
    for w in range(2):
        amount = np.interp(chi, 30.0 * np.arange(6), amounts.numpy()[0, :, w]) / chi**2
        for shell, part in enumerate(shares_of(far, chi, near=93.0)):
            found = maps[0, 2 * shell + w].sum()
            assert found == pytest.approx((amount * part).sum(), rel=2e-4)  # of the points


def test_slabs_that_cannot_be_are_refused():
    at = slabs()
    rest = drawn(at, "float64")
    for change in ([0, 0, 2, 3, 4, 0], [0, 1, 2, 8, 4, 0], [0, 1, 2, 3, 4, 10]):
        places = at.places.copy()
        places[0] = change
        wrong = Slabs(**{**vars(at), "places": places})
        with pytest.raises(tf.errors.InvalidArgumentError, match="slab 0 has"):
            Compiled().paint_sky(wrong, *rest)
