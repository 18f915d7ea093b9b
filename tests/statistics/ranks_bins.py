"""Chosen bins and wedges on every mesh: numpy's means, Kaiser's limit, and central differences."""

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
    random,
    weighted,
)
from ranks import process_mesh

import flowpm_dist as fpm
from flowpm_dist.grid.field import Field
from flowpm_dist.statistics import (
    Bins,
    bin_edges,
    binned_compare,
    binned_multipoles,
    binned_power,
    binned_wedges,
    compare,
    multipoles,
    power_spectrum,
    power_wedges,
)

FUNDAMENTAL = 2 * np.pi / max(SIZE)
NYQUIST = min(np.pi * n / length for n, length in zip(GRID, SIZE, strict=True))
CHOICES = {
    "edges": [0.0, 0.17, 0.3, 0.31, 0.6],
    "a number": 5,
    "a width": Bins(width=0.06, k_min=0.1, k_max=0.5),
    "logarithmic": Bins(4, spacing="log"),
    "decades": Bins(width=0.1, spacing="log", k_min=0.15),
}
EDGES = {
    "edges": np.array(CHOICES["edges"]),
    "a number": np.linspace(FUNDAMENTAL, NYQUIST, 6),
    "a width": 0.1 + 0.06 * np.arange(7),
    "logarithmic": np.geomspace(FUNDAMENTAL, NYQUIST, 5),
    "decades": 0.15 * 10 ** (0.1 * np.arange(7)),
}


def in_bins(edges, mu_edges=(0.0, 1.0), axis=2):
    """numpy's modes, in bins of k and wedges of |mu|; those near an edge are beyond it."""
    modes = Modes()
    bins, wedges = len(edges) - 1, len(mu_edges) - 1
    number = np.digitize(modes.k * (1 + 1e-9), edges) - 1
    wedge = np.digitize(np.abs(modes.mu[axis]) * (1 + 1e-9), mu_edges[:-1]) - 1
    inside = (number >= 0) & (number < bins) & (modes.k > 0)
    modes.bin = np.where(inside, 1 + wedge * bins + number, 0)
    modes.bins = bins * wedges
    return modes


@pytest.fixture
def box(mesh):
    return box_on(mesh)


ON_RANKS = ("edges", "logarithmic")
ALONE = [pytest.param(c, marks=pytest.mark.ranks(1)) for c in CHOICES if c not in ON_RANKS]


@pytest.mark.dealt
@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("choice", [*ON_RANKS, *ALONE])
def test_chosen_bins_are_numpys(box, choice):
    modes, bins = in_bins(EDGES[choice]), CHOICES[choice]
    np.testing.assert_allclose(bin_edges(bins, box), EDGES[choice], rtol=1e-13)
    a, b = random(1) + 3.0, random(2)  # the mean, k = 0, is in no bin
    one, two = modes.spectrum(a, window="cic"), modes.spectrum(b)
    found = power_spectrum(field_on(box, a), bins=bins, window="cic", shot_noise=0.5)
    np.testing.assert_allclose(found.k, modes.means(modes.k), rtol=1e-12)
    np.testing.assert_allclose(found.power, modes.power(one) - 0.5, rtol=1e-11)
    counts = [modes.weight[modes.bin == i].sum() for i in range(1, modes.bins + 1)]
    np.testing.assert_array_equal(found.modes, counts)
    if choice == "edges":
        fields = field_on(box, a), field_on(box, b)
        cross = compare(*fields, bins=bins, window=("cic", None)).cross
        np.testing.assert_allclose(cross, modes.power(one, two), rtol=1e-10)
        poles = multipoles(fields[0], axis="y", bins=bins, window="cic").power
        expected = [modes.power(one, order=order, axis=1) for order in (0, 2, 4)]
        np.testing.assert_allclose(poles, expected, rtol=1e-10, atol=1e-10)


def test_modes_on_an_edge_are_in_the_bin_above(line):
    """In a cube, where |k| = 1, 2 and 3 fundamental modes are met exactly."""
    field = field_on(box_on(line, grid=(8,) * 3, size=(7.3,) * 3), random(1, 8, 8, 8))
    found = power_spectrum(field, bins=2 * np.pi / 7.3 * np.array([1.0, 2.0, 3.0]))
    n = np.sort(
        [x * x + y * y + z * z for x in range(-3, 4) for y in range(-3, 4) for z in range(-3, 4)]
    )
    expected = [((n >= low) & (n < high)).sum() for low, high in ((1, 4), (4, 9))]
    np.testing.assert_array_equal(found.modes, expected)


@pytest.mark.dealt
@pytest.mark.ranks(1, 2, 4)
def test_wedges_are_numpys_and_add_up_to_the_monopole(box):
    """The line of sight is the second axis, and modes with mu = 1 are in the last wedge."""
    edges, mu_edges = np.array(CHOICES["edges"]), np.array([0.0, 0.3, 0.55, 1.0])
    modes, field = in_bins(edges, mu_edges, 1), field_on(box, random(1))
    spectrum = modes.spectrum(random(1), window="cic")
    options = {"bins": edges, "window": "cic"}
    found = power_wedges(field, wedges=mu_edges, axis="y", shot_noise=0.5, **options)
    shape = 3, 4
    np.testing.assert_allclose(found.k, modes.means(modes.k).reshape(shape), rtol=1e-12)
    expected = modes.means(np.abs(modes.mu[1])).reshape(shape)
    np.testing.assert_allclose(found.mu, expected, atol=1e-13)
    expected = modes.power(spectrum).reshape(shape) - 0.5
    np.testing.assert_allclose(found.power, expected, rtol=1e-11)
    np.testing.assert_array_equal(found.edges, mu_edges)
    whole = power_spectrum(field, **options)
    np.testing.assert_array_equal(found.modes.sum(axis=0), whole.modes)
    there = whole.modes > 0
    total = np.nansum(found.modes * (found.power + 0.5), axis=0)
    np.testing.assert_allclose(total[there] / whole.modes[there], whole.power[there], rtol=1e-12)
    k, mu, power = power_wedges(field, wedges=1)
    np.testing.assert_allclose(power[0], power_spectrum(field).power, rtol=1e-13)
    assert k.shape == mu.shape == power.shape


@pytest.mark.parametrize("shape", BATCH_MESHES)
def test_wedges_of_a_batch(shape):
    box, whole = box_on(process_mesh(shape), batch=2), random(6, 2, *GRID)
    modes = in_bins(EDGES["logarithmic"], np.array([0.0, 0.5, 1.0]))
    found = power_wedges(field_on(box, whole), wedges=2, bins=CHOICES["logarithmic"])
    assert found.k.shape == (2, 4) and found.power.shape == (2, 2, 4)
    for power, universe in zip(found.power, whole, strict=True):
        expected = modes.power(modes.spectrum(universe)).reshape(2, 4)
        np.testing.assert_allclose(power, expected, rtol=1e-11)


def test_a_bin_without_modes_is_nan_and_has_no_gradient(line):
    box = box_on(line)
    (block,) = blocks_on(box, 1)
    edges = FUNDAMENTAL * np.array([1.0, 1.1, 1.2, 1.5])
    found = power_spectrum(Field(block, box), bins=edges)
    np.testing.assert_array_equal(np.isnan(found.power), [False, True, False])
    np.testing.assert_array_equal(np.isnan(found.k), found.modes == 0)
    gradients = []
    for bins, kept in ((edges, [0, 2]), (edges[:2], [0]), (edges[2:], [0])):
        with tf.GradientTape() as tape:
            tape.watch(block)
            loss = tf.reduce_sum(tf.gather(binned_power(block, box, bins=bins), kept))
        gradients.append(tape.gradient(loss, block))
    np.testing.assert_allclose(gradients[0], gradients[1] + gradients[2], rtol=1e-12, atol=1e-13)


@pytest.mark.ranks(4)
def test_gradient_of_chosen_bins_and_wedges(box):
    """Quadratic in the field: its central difference is exact but for rounding."""
    field, shifted, *directions = blocks_on(box, 1, 2, 3, 4)

    def loss(field, shifted):
        wedges = binned_wedges(field, box, 2, "x", "cic", shifted, bins=[0.05, 0.2, 0.4])
        poles = binned_multipoles(field, box, "y", (2,), bins=CHOICES["logarithmic"])
        shared = binned_compare(field, shifted, box, bins=3).cross
        return sum(weighted(values, box) for values in (wedges, poles, shared))

    check_slope(loss, [field, shifted], directions, box, 1e-1)


def test_a_field_is_taken_with_its_box(box):
    field, shifted = field_on(box, random(1)), field_on(box, random(2))
    expected = binned_power(field.block, box, "cic", shifted.block)
    with tf.GradientTape() as tape:
        tape.watch(field.block)
        power = binned_power(2.0 * field, None, "cic", 2.0 * shifted)
    np.testing.assert_allclose(power, 4 * expected, rtol=1e-12)
    assert tape.gradient(power, field.block) is not None
    pair = binned_compare(field, shifted)
    np.testing.assert_array_equal(pair.cross, binned_compare(field.block, shifted.block, box).cross)


@pytest.mark.ranks(1)
def test_kaisers_limit_of_a_simulated_density():
    """P_s / P = (1 + f mu^2)^2, mode by mode, of particles that have hardly moved.

    Half a cell from its lattice, a particle's cloud is linear in its displacement s, and the
    density's modes are -i sum_j kappa_j s_j with kappa = 2 tan(k h / 2) / h: mu^2 is
    k_z kappa_z / sum_j k_j kappa_j. The rest is second order, as large as s / h.
    """
    n, length, a = 12, 600.0, 1e-3
    planck = fpm.Cosmology.planck18()
    sim = fpm.Simulation(planck, n, length, [0.1, 1.0], lpt_order=1, precision="float64")
    state = sim.lpt(seed=3, a=a)
    number = np.meshgrid(*[np.fft.fftfreq(n, 1 / n)] * 3, indexing="ij")
    kappa = [np.tan(np.pi * m / n) for m in number]
    along = [m * kap for m, kap in zip(number, kappa, strict=True)]
    total = np.sqrt(sum(m * m for m in number))
    mu2 = np.divide(along[2], sum(along), out=0 * total, where=total > 0)
    power = np.abs(np.fft.fftn(state.density(shift=0.5).numpy())) ** 2
    growth = float(fpm.Growth(planck).f1(a))
    expected = power * (1 + growth * mu2) ** 2 * length**3 / n**6
    mu = np.divide(np.abs(number[2]), total, out=0 * total, where=total > 0)
    edges = np.array([0.9, 1.9, 3.1])
    seen = state.density(redshift_space="z", shift=0.5)
    found = power_wedges(seen.delta(), wedges=4, bins=2 * np.pi / length * edges, window=None)
    reach = np.abs(state.displacement.numpy()).max() * n / length
    for wedge, (low, high) in enumerate(zip(found.edges[:-1], found.edges[1:], strict=True)):
        high = 2.0 if high == 1 else high
        for i in range(2):
            inside = (total >= edges[i]) & (total < edges[i + 1])
            inside &= (mu + 1e-9 >= low) & (mu + 1e-9 < high)
            assert found.modes[wedge, i] == inside.sum()
            if inside.any():
                assert found.power[wedge, i] == pytest.approx(
                    expected[inside].mean(), rel=8 * reach
                )
    assert 8 * reach < 0.02
    aligned = found.power[-1, 0] / np.mean(power[(total == 1) & (mu == 1)]) * n**6 / length**3
    assert aligned == pytest.approx((1 + growth) ** 2, rel=0.02)


def test_wrong_bins_are_told(line):
    field = field_on(box_on(line), random(1))
    for message, call in {
        "exactly one of them": lambda: Bins(),
        "exactly one": lambda: Bins(3, width=0.1),
        "0 bins": lambda: power_spectrum(field, bins=0),
        "2.5 bins": lambda: Bins(2.5),
        "width -0.1": lambda: Bins(width=-0.1),
        "spacing 'ln'": lambda: Bins(3, spacing="ln"),
        "from k = 0 to .* above 0": lambda: multipoles(field, bins=Bins(3, spacing="log", k_min=0)),
        "from k = 2 to": lambda: power_spectrum(field, bins=Bins(3, k_min=2.0)),
        "has no bin": lambda: power_spectrum(field, bins=Bins(width=3.0)),
        r"bins 0.1: increasing edges": lambda: power_spectrum(field, bins=0.1),
        r"bins \[0.3, 0.1\]: increasing": lambda: power_spectrum(field, bins=[0.3, 0.1]),
        r"bins \[-0.1, 0.1\]": lambda: power_spectrum(field, bins=[-0.1, 0.1]),
        "no mode of the box .* begin at 0.09817": lambda: power_spectrum(field, bins=[1e-3, 2e-3]),
        "0 wedges": lambda: power_wedges(field, wedges=0),
        r"wedges \[0, 2\]: increasing edges of \|mu\|": lambda: power_wedges(field, wedges=[0, 2]),
        "axis 'w'": lambda: power_wedges(field, axis="w"),
        "box_size .* is needed, or the box of a block": lambda: binned_power(field.block),
        "fields are not on the same box": lambda: binned_power(field, box_on(line, batch=1)),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
