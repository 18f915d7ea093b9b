"""Statistics on every mesh: numpy's transforms and histograms, and central differences."""

import numpy as np
import pytest
import tensorflow as tf
from numpy_modes import (
    BATCH_MESHES,
    GRID,
    SIZE,
    Modes,
    blocks_on,
    box_on,
    check_slope,
    field_on,
    painted,
    random,
    weighted,
)
from ranks import process_mesh

from flowpm_dist.grid.field import Field
from flowpm_dist.posteriors import measured
from flowpm_dist.statistics import (
    binned_compare,
    binned_multipoles,
    binned_power,
    compare,
    correlation_coefficient,
    cross_power,
    density_histogram,
    multipoles,
    power_spectrum,
    soft_histogram,
    transfer_function,
)
from flowpm_dist.statistics.histogram import SCALES, CellValues

EDGES = np.array([0.3, 0.6, 0.8, 1.0, 1.3, 1.5, 2.0])


@pytest.fixture(params=BATCH_MESHES)
def batch_mesh(request):
    """With universes on ranks of their own, and on the same ranks."""
    return process_mesh(request.param)


@pytest.mark.dealt
@pytest.mark.ranks(1, 2, 4)
def test_two_fields_are_numpys(mesh):
    box, modes = box_on(mesh), Modes()
    a, b = random(1), random(2) + 0.4 * random(1)
    fields = field_on(box, a), field_on(box, b)
    found = compare(*fields, window=("cic", "tsc"), shot_noise=(0.5, 0.25))
    one, two = modes.spectrum(a, window="cic"), modes.spectrum(b, window="tsc")
    power_a, power_b, cross = modes.power(one), modes.power(two), modes.power(one, two)
    np.testing.assert_allclose(found.k, modes.means(modes.k), rtol=1e-13)
    np.testing.assert_allclose(found.power_a, power_a - 0.5, rtol=1e-12)
    np.testing.assert_allclose(found.power_b, power_b - 0.25, rtol=1e-12)
    np.testing.assert_allclose(found.cross, cross, atol=1e-12 * power_a.max())
    plain = compare(*fields, SIZE, window=("cic", "tsc"))
    np.testing.assert_allclose(plain.transfer, np.sqrt(power_a / power_b), rtol=1e-12)
    np.testing.assert_allclose(plain.correlation, cross / np.sqrt(power_a * power_b), rtol=1e-10)
    k, *_, correlation = plain
    assert k.shape == correlation.shape == (modes.bins,)
    counts = [modes.weight[modes.bin == i].sum() for i in range(1, modes.bins + 1)]
    np.testing.assert_array_equal(found.modes, counts)
    only = cross_power(*fields, window=("cic", "tsc"), shot_noise=2.0)
    np.testing.assert_array_equal(only.power, plain.cross - 2.0)
    for function, values in (
        (transfer_function, plain.transfer),
        (correlation_coefficient, plain.correlation),
    ):
        np.testing.assert_array_equal(function(*fields, window=("cic", "tsc"))[1], values)


def test_field_with_itself(line):
    field = field_on(box_on(line), random(1))
    found = compare(field, field)
    np.testing.assert_allclose(found.correlation, 1.0, rtol=1e-14)
    np.testing.assert_allclose(found.transfer, 1.0, rtol=1e-14)
    np.testing.assert_allclose(correlation_coefficient(field, field)[1], 1.0, rtol=1e-14)


def test_single_precision_sums_in_double(line):
    whole = random(1)
    single, double = (
        power_spectrum(field_on(box_on(line, dtype=d), whole), window="cic").power
        for d in (tf.float32, tf.float64)
    )
    np.testing.assert_allclose(single, double, rtol=2e-6)


@pytest.mark.parametrize("axis", ["x", pytest.param("y", marks=pytest.mark.ranks(2, 4)), "z"])
def test_multipoles_are_numpys(mesh, axis):
    field = random(1)
    modes = Modes()
    spectrum = modes.spectrum(field, window="cic")
    found = multipoles(field_on(box_on(mesh), field), SIZE, axis, window="cic", shot_noise=0.5)
    expected = np.array(
        [modes.power(spectrum, order=order, axis="xyz".index(axis)) for order in (0, 2, 4)]
    )
    expected[0] -= 0.5
    np.testing.assert_allclose(found.power, expected, rtol=1e-10, atol=1e-10)
    assert found.orders == (0, 2, 4)


def test_isotropic_field(line):
    """Modes of one amplitude: in a cube the mean of mu^2 is 1/3 in every bin, so that P_2 is 0.

    P_4 is small where there are many modes. The last bin is cut by the faces of the cube.
    """
    grid, size = (16, 16, 16), (50.0, 50.0, 50.0)
    modes = Modes(grid, size)
    field = field_on(box_on(line, grid=grid, size=size), field_of(kaiser(modes, grid, 0.0), grid))
    found = multipoles(field)
    level = found.power[0, 0]
    np.testing.assert_allclose(found.power[0], level, rtol=1e-12)
    np.testing.assert_allclose(found.power[1], 0.0, atol=1e-12 * level)
    assert np.abs(found.power[2, 4:-1]).max() < 0.1 * level
    np.testing.assert_allclose(multipoles(field, axis="x").power, found.power, atol=1e-12 * level)


def field_of(spectrum, grid):
    return np.fft.irfftn(spectrum, grid, axes=(0, 1, 2))


def kaiser(modes, grid, beta):
    """Spectrum of modes of equal amplitude and random phase, times 1 + beta mu^2."""
    noise = np.fft.rfftn(random(3, *grid))
    return noise / np.abs(noise) * (1 + beta * modes.mu[2] ** 2)


def test_kaiser(line):
    """The multipoles of (1 + beta mu^2)^2: exact mode sums, and Kaiser's factors in the limit."""
    grid, size, beta = (32, 32, 32), (100.0, 100.0, 100.0), 0.7
    modes = Modes(grid, size)
    spectrum = kaiser(modes, grid, beta)
    field = field_on(box_on(line, grid=grid, size=size), field_of(spectrum, grid))
    found = multipoles(field)
    expected = [modes.power(spectrum, order=order) for order in (0, 2, 4)]
    scale = np.prod(size) / np.prod(grid) ** 2
    np.testing.assert_allclose(found.power, expected, atol=1e-10 * scale)
    factors = [
        1 + 2 * beta / 3 + beta**2 / 5,
        4 * beta / 3 + 4 * beta**2 / 7,
        8 * beta**2 / 35,
    ]
    of_many = np.average(found.power[:, 4:-1], axis=1, weights=found.modes[4:-1])
    np.testing.assert_allclose(of_many / scale, factors, atol=0.02)


def test_interlacing(mesh):
    """numpy's transforms to rounding; and nearer to the particles' own modes than one grid is."""
    cells, particles = 16, 3000
    grid, size = (cells,) * 3, (40.0,) * 3
    positions = np.random.default_rng(4).uniform(0, cells, (particles, 3))
    first, second = painted(positions, cells), painted(positions + 0.5, cells)
    box, modes = box_on(mesh, grid=grid, size=size), Modes(grid, size)
    fields = field_on(box, first), field_on(box, second)
    found = power_spectrum(fields[0], interlaced=fields[1], window="cic").power
    combined = modes.spectrum(first, second, "cic")
    np.testing.assert_allclose(found, modes.power(combined), rtol=1e-11)
    exact = cells**3 / particles * direct_modes(positions, cells)
    truth = modes.power(exact)
    single = power_spectrum(fields[0], window="cic").power
    upper = slice(modes.bins // 2, None)
    ratio = np.abs(found / truth - 1)[upper] / np.abs(single / truth - 1)[upper]
    assert ratio.max() < 0.75 and ratio[:-1].max() < 0.25


def direct_modes(positions, cells):
    """Sum over the particles of exp(-i k.x), on numpy's half spectrum."""
    n = np.fft.fftfreq(cells, 1 / cells)
    x, y, z = (np.exp(-2j * np.pi / cells * np.outer(along, n)) for along in positions.T)
    z = np.exp(-2j * np.pi / cells * np.outer(positions[:, 2], np.arange(cells // 2 + 1)))
    return np.einsum("px,py,pz->xyz", x, y, z, optimize=True)


def test_batch_is_each_universe_alone(batch_mesh):
    """The batch over `replica`: every rank gets the result of all universes."""
    box, modes = box_on(batch_mesh, batch=2), Modes()
    a, b = random(6, 2, *GRID), random(7, 2, *GRID)
    fields = field_on(box, a), field_on(box, b)
    found = compare(*fields, interlaced=(fields[1], None))
    poles = multipoles(fields[0], axis="y").power
    histogram = density_histogram(fields[0], EDGES)
    soft = soft_histogram(fields[0].block, box, EDGES)
    assert found.k.shape == (modes.bins,) and found.cross.shape == (2, modes.bins)
    assert poles.shape == (2, 3, modes.bins) and histogram.counts.shape == (2, 6)
    assert soft.shape == (*box.local_batch, 6)
    for i in range(2):
        one, two = modes.spectrum(a[i], b[i]), modes.spectrum(b[i])
        np.testing.assert_allclose(found.power_a[i], modes.power(one), rtol=1e-12)
        np.testing.assert_allclose(found.power_b[i], modes.power(two), rtol=1e-12)
        np.testing.assert_allclose(found.cross[i], modes.power(one, two), rtol=1e-10)
        quadrupole = modes.power(modes.spectrum(a[i]), order=2, axis=1)
        np.testing.assert_allclose(poles[i, 1], quadrupole, atol=1e-10 * found.power_b.max())
        np.testing.assert_array_equal(histogram.counts[i], np.histogram(a[i], EDGES)[0])
    for i, counts in enumerate(soft.numpy(), start=box.batch_offset):
        np.testing.assert_allclose(counts, soft_counts(a[i], EDGES), atol=1e-11)


def soft_counts(values, edges):
    """Triangles around the centres, flat beyond the ends: numpy's interpolation of each one-hot."""
    centres = (edges[:-1] + edges[1:]) / 2
    return [np.interp(values, centres, one_hot).sum() for one_hot in np.eye(centres.size)]


@pytest.mark.parametrize("log", [False, True])
def test_histogram_is_numpys(mesh, log):
    density = np.exp(0.5 * random(8))
    density[0, 0, 0] = 0.0  # an empty cell
    box = box_on(mesh)
    field = field_on(box, density)
    edges = np.log(EDGES) if log else EDGES
    with np.errstate(divide="ignore"):
        values = np.log(density) if log else density
    found = density_histogram(field, edges, log=log)
    np.testing.assert_array_equal(found.counts, np.histogram(values, edges)[0])
    share = (found.pdf * np.diff(edges)).sum()
    assert share == pytest.approx(((values >= edges[0]) & (values <= edges[-1])).mean())
    soft = soft_histogram(field.block, box, edges, log=log)
    np.testing.assert_allclose(soft, soft_counts(values, edges), rtol=1e-12)
    assert float(tf.reduce_sum(soft)) == pytest.approx(density.size, rel=1e-13)


@pytest.mark.dealt
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("mean_count", [None, 2.5])
def test_histograms_of_what_is_seen_are_numpys(mesh, mean_count):
    """No cell is lost on any mesh: of a density that noise takes below 0, and of counts."""
    density = 1 + 2 * random(8)
    if mean_count is not None:
        density = np.random.default_rng(1).poisson(mean_count * np.exp(0.5 * random(8))) * 1.0
    field, values = field_on(box_on(mesh), density), CellValues(False, mean_count)
    found = measured(["histograms"], field, values)["histograms"]
    wavenumbers = (2 * np.pi * np.fft.fftfreq(n, s / n) for n, s in zip(GRID, SIZE, strict=True))
    kx, ky, kz = np.meshgrid(*wavenumbers, indexing="ij")
    cell = max(s / n for n, s in zip(GRID, SIZE, strict=True))
    expected = []
    for radius, edges in SCALES:
        window = np.exp(-0.5 * (radius * cell) ** 2 * (kx**2 + ky**2 + kz**2))
        smooth = np.fft.ifftn(np.fft.fftn(density) * window).real if radius else density
        number = np.searchsorted(np.sinh(edges[1:-1]), smooth / (mean_count or 1) - 1, "right")
        expected.append(np.bincount(number.ravel(), minlength=edges.size - 1) / density.size)
    np.testing.assert_allclose(found[0] ** 2, np.concatenate(expected), rtol=0, atol=1e-13)


@pytest.mark.dealt
@pytest.mark.ranks(2, 4)
def test_power_gradient(mesh):
    """Quadratic in the field: its central difference is exact but for rounding."""
    box = box_on(mesh)
    field, shifted, *directions = blocks_on(box, 1, 2, 3, 4)

    def loss(field, shifted):
        poles = binned_multipoles(field, box, "x", (0, 4), "cic", shifted)
        return weighted(poles, box) + weighted(binned_power(field, box, "cic"), box)

    check_slope(loss, [field, shifted], directions, box, 1e-1)
    monopole = binned_multipoles(field, box, "x", (0, 4), "cic", shifted)[0]
    np.testing.assert_allclose(binned_power(field, box, "cic", shifted), monopole, rtol=1e-12)


def check_comparison_gradient(box):
    a, b, *directions = blocks_on(box, 1, 2, 3, 4)

    def loss(a, b):
        found = binned_compare(a, b, box, ("cic", None))
        terms = (found.cross, 1.0), (found.transfer, 90.0), (found.correlation, 70.0)
        return sum(factor * weighted(values, box) for values, factor in terms)

    check_slope(loss, [a, b], directions, box, 1e-5)


def test_comparison_gradient(mesh):
    check_comparison_gradient(box_on(mesh))


@pytest.mark.ranks(2)
def test_comparison_gradient_of_a_batch():
    check_comparison_gradient(box_on(process_mesh(BATCH_MESHES[0]), batch=4))


@pytest.mark.parametrize("log", [False, True])
def test_histogram_gradient(mesh, log):
    """A step so small that no cell passes a centre; an empty cell has a gradient of 0."""
    box = box_on(mesh)
    whole = np.exp(0.5 * random(8))
    whole[0, 0, 0] = 0.0
    (direction,) = blocks_on(box, 9)
    edges = np.log(EDGES) if log else EDGES

    def loss(density):
        return weighted(soft_histogram(density, box, edges, log=log), box)

    check_slope(loss, [field_on(box, whole).block], [direction], box, 1e-6)


def test_wrong_arguments_are_told(line):
    field = field_on(box_on(line), random(1))
    other = field_on(box_on(line, size=(1.0, 1.0, 1.0)), random(1))
    vector = Field(tf.zeros([*field.box.block, 3], tf.float64), field.box)
    for message, call in {
        "two fields are not on the same box": lambda: compare(field, other),
        "interlaced one are not on the same box": lambda: power_spectrum(field, interlaced=other),
        "differs from the field's own": lambda: cross_power(field, field, 10.0),
        "box_size .* is needed": lambda: power_spectrum(np.zeros(GRID)),
        "scalar field": lambda: multipoles(vector),
        "window 'ngp'": lambda: transfer_function(field, field, window="ngp"),
        "axis 'w'": lambda: multipoles(field, axis="w"),
        "even numbers": lambda: multipoles(field, orders=(0, 1)),
        "increasing": lambda: density_histogram(field, [1.0, 1.0]),
        "two bins": lambda: soft_histogram(field.block, field.box, [0.0, 1.0]),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
