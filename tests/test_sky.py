"""Layers of particles on maps of the sky: both kinds of kernels, mass, and the adjoint."""

import numpy as np
import pytest
import tensorflow as tf

from flowpm_dist.particle_mesh.kernels import Compiled, Portable, Slabs

SIDES, LENGTHS, PIXELS = (8, 6, 10), (16.0, 12.0, 20.0), 12
RNG = np.random.default_rng(1)


def slabs(field_of_view=0.5):
    """Each axis once along the line of sight, in front and behind, with a map for some layers."""
    places = [[0, 1, 2, 3, 4, 0], [2, 1, 0, 1, 3, 4], [0, 2, 1, 0, 6, 7]]
    directions = [[-3.2, 1, 2.1, -1, 1], [5.0, -1, 0.3, 1, -1], [-9.0, 1, 0.1, -1, 1]]
    return Slabs(
        places=np.array(places, np.int32),
        directions=np.array(directions),
        distances=np.linspace(20.0, 60.0, 13),
        first_map=np.arange(13, dtype=np.int32) % 3,
        spacing=tuple(length / n for length, n in zip(LENGTHS, SIDES, strict=True)),
        lengths=LENGTHS,
        pixel=field_of_view / PIXELS,
        pixels=PIXELS,
        maps=5,
    )


def drawn(dtype, batch=2, fields=3, weights=2, spread=1.0):
    moved = [
        tf.constant(RNG.normal(size=(batch, *SIDES, 3), scale=spread).astype(dtype))
        for _ in range(fields)
    ]
    factors = RNG.normal(size=(batch, 13, fields)).astype(dtype)
    amounts = RNG.normal(size=(batch, 13, weights, 2)).astype(dtype)
    return moved, tf.constant(factors), tf.constant(amounts)


def relative(ours, expected):
    return np.abs(ours - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-13), ("float32", 1e-5)])
@pytest.mark.parametrize(
    "field_of_view", [0.1, 0.5]
)  # with images of some particles, in the latter
def test_compiled_and_portable_kernels_agree(dtype, tolerance, field_of_view):
    given = slabs(field_of_view), *drawn(dtype)
    maps = Compiled().paint_sky(*given)
    assert relative(maps, Portable().paint_sky(*given)) < tolerance
    dmaps = tf.constant(RNG.normal(size=maps.shape).astype(dtype))
    ours, expected = (k.paint_sky_vjp(*given, dmaps) for k in (Compiled(), Portable()))
    for slope, known in zip([*ours[0], *ours[1:]], [*expected[0], *expected[1:]], strict=True):
        assert relative(slope, known) < tolerance


def test_the_adjoint_is_that_of_the_difference():
    """<dmaps, J d> = <J^T dmaps, d>, the left side by differences of the maps."""
    at = slabs(0.9)
    fields, factors, amounts = drawn("float64", batch=1)
    dmaps = tf.constant(RNG.normal(size=(1, 5, PIXELS, PIXELS)))
    dfields, dfactors, damounts = Compiled().paint_sky_vjp(at, fields, factors, amounts, dmaps)
    d = [tf.constant(RNG.normal(size=x.shape)) for x in (*fields, factors, amounts)]
    h = 1e-7

    def along(sign):
        moved = [x + sign * h * y for x, y in zip((*fields, factors, amounts), d, strict=True)]
        maps = Compiled().paint_sky(at, moved[:3], moved[3], moved[4])
        return float(tf.reduce_sum(maps * dmaps))

    slopes = [*dfields, dfactors, damounts]
    expected = sum(float(tf.reduce_sum(x * y)) for x, y in zip(slopes, d, strict=True))
    assert (along(1) - along(-1)) / (2 * h) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("make", [Compiled, Portable])
@pytest.mark.parametrize(
    ("field", "factor", "maps_of"),
    [
        ((np.nan, 0.0, 0.0), None, [0, 1, 2]),
        ((0.0, np.nan, 0.0), None, [0, 1, 2]),
        ((0.0, 0.0, -np.inf), None, [0, 1, 2]),
        ((0.0, 0.0, 0.0), (1, np.nan), [1, 2]),  # of one layer
        ((0.0, 1e20, 0.0), (slice(None), 1e25), [0, 1, 2]),  # their product overflows in float32
        ((0.0, 0.0, 201.0), (slice(None), 1.0), [0, 1, 2]),  # ten times the longest side is 200
        ((-201.0, 0.0, 0.0), (slice(None), 1.0), [0, 1, 2]),
        ((199.0, -199.0, 199.0), (slice(None), 1.0), []),
    ],
)
def test_a_particle_without_a_place_is_seen_on_its_maps(make, field, factor, maps_of):
    """Along whatever axis, outside of the field along another; it has no part in the adjoint."""
    fields, factors, amounts = drawn("float32")
    moved, by = [f.numpy() for f in fields], factors.numpy()
    moved[1][1] = 0.0
    for each in moved:
        each[1, 3, 2, 4] = 0.0
    moved[1][1, 3, 2, 4] = field
    if factor is not None:
        by[1, factor[0], 1] = factor[1]
    given = slabs(0.1), [tf.constant(f) for f in moved], tf.constant(by), amounts
    maps = make().paint_sky(*given).numpy()
    assert np.isfinite(maps[0]).all()
    assert np.flatnonzero(np.isnan(maps[1]).any(axis=(1, 2))).tolist() == maps_of
    slopes = make().paint_sky_vjp(*given, tf.ones(maps.shape))
    assert all(np.isfinite(x).all() for x in tf.nest.flatten(slopes))


def test_every_particle_in_the_field_is_there_once():
    """On maps that hold the whole box from afar, each weighs its amount over its distance^2."""
    fields, factors, amounts = drawn("float64", batch=1, fields=1, spread=0.1)
    one = slabs(1.0)
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
    at, rest = slabs(), drawn("float64")
    for change in ([0, 0, 2, 3, 4, 0], [0, 1, 2, 8, 4, 0], [0, 1, 2, 3, 4, 10]):
        places = at.places.copy()
        places[0] = change
        wrong = Slabs(**{**vars(at), "places": places})
        with pytest.raises(tf.errors.InvalidArgumentError, match="slab 0 has"):
            Compiled().paint_sky(wrong, *rest)
