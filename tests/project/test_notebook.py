"""What a notebook shows: facts and pictures of objects; curves, tables and arrays of results."""

import base64
import io
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from astropy.cosmology import units
from astropy.cosmology.units import littleh
from astropy.table import QTable
from astropy.units import Unit, add_enabled_units
from matplotlib import pyplot

import flowpm_dist as fpm
from flowpm_dist.cosmology import Halofit, TabulatedPower
from flowpm_dist.io.labelled import Values
from flowpm_dist.observables import ForwardModel
from flowpm_dist.observables.light_cone.observers import ConvergenceMaps, DensityPlanes
from flowpm_dist.observables.light_cone.options import FlatField
from flowpm_dist.options.html import as_html
from flowpm_dist.simulation import state as states
from flowpm_dist.statistics import (
    AngularPower,
    Bispectrum,
    Comparison,
    CorrelationFunction,
    CorrelationMultipoles,
    Histogram,
    Multipoles,
    Peaks,
    PowerSpectrum,
    Wedges,
    power_spectrum,
)
from flowpm_dist.statistics.histogram import Histograms

K, MODES = np.array([0.1, 0.2, 0.4]), np.array([6, 18, 30])
POWER = np.array([[30.0, 20.0, 10.0], [3.0, -2.0, 1.0]])
SPECTRUM = PowerSpectrum(K, POWER[0], MODES)
POLES = Multipoles(K, POWER, MODES, orders=(0, 2))


@pytest.fixture(autouse=True)
def figures_closed():
    yield
    pyplot.close("all")


def curves(axes):
    """The curves of axes, [curve, bin, 2]."""
    return np.array([line.get_xydata() for line in axes.lines])


def test_a_spectrum_is_drawn_with_its_scatter_and_units():
    axes = SPECTRUM.plot(label="a")
    np.testing.assert_array_equal(curves(axes), [np.stack([K, POWER[0]], axis=1)])
    (bars,) = (each.get_segments() for each in axes.collections)
    np.testing.assert_allclose(
        np.diff(np.array(bars)[:, :, 1])[:, 0] / 2, POWER[0] * (2 / MODES) ** 0.5
    )
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert "Mpc" in axes.get_xlabel() and "Mpc" in axes.get_ylabel()
    assert axes.figure.number in pyplot.get_fignums()  # so that a notebook shows it


def test_multipoles_are_drawn_with_the_scatter_of_a_gaussian_field():
    """In closed form where power is the same at all angles; else integrated over them."""
    power, ones = POWER[0], np.ones(3)
    even = Multipoles(K, np.array([power, 0 * ones, 0 * ones]), MODES, orders=(0, 2, 4))
    expected = [power * (2 * (2 * order + 1) / MODES) ** 0.5 for order in even.orders]
    np.testing.assert_allclose(even.scatter, expected, rtol=1e-13)
    beta, mu = 0.4, (np.arange(20000) + 0.5) / 20000
    kaiser = [1 + 2 * beta / 3 + beta**2 / 5, 4 * beta / 3 + 4 * beta**2 / 7, 8 * beta**2 / 35]
    batch = np.stack([np.outer(kaiser, power)] * 2)
    for orders in ((0, 2, 4), (4, 0, 2)):
        found = Multipoles(K, batch[:, np.argsort(np.argsort(orders))], MODES, orders=orders)
        shapes = [np.polynomial.Legendre.basis(order)(mu) for order in orders]
        means = [np.mean((1 + beta * mu**2) ** 4 * shape**2) for shape in shapes]
        factors = (2 * np.array(orders) + 1) * np.sqrt(2 * np.array(means))
        expected = factors[:, np.newaxis] * power / MODES**0.5
        np.testing.assert_allclose(found.scatter, [expected] * 2, rtol=1e-7)
    bars = [each.get_segments() for each in even.plot().collections]
    lengths = np.diff(np.array(bars)[..., 1], axis=-1)[..., 0]
    np.testing.assert_allclose(lengths, 2 * K * even.scatter)
    without = Multipoles(K, POWER, MODES, orders=(2, 4))
    assert not without.plot().collections
    with pytest.raises(ValueError, match="needs the monopole"):
        _ = without.scatter


def test_curves_share_axes_and_a_label_has_a_colour():
    batch = PowerSpectrum(K, np.array([POWER[0], 2 * POWER[0]]), MODES)
    axes = batch.plot(label="batch")
    assert SPECTRUM.plot(axes, label="one") is axes
    first, second, third = (line.get_color() for line in axes.lines)
    assert first == second != third
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["batch", "one"]


def test_results_are_drawn_as_they_are_usually_shown():
    np.testing.assert_array_equal(curves(POLES.plot())[:, :, 1], K * POWER)
    poles = CorrelationMultipoles(K, POWER, MODES, (0, 2))
    np.testing.assert_allclose(curves(poles.plot(label="xi"))[:, :, 1], K**2 * POWER)
    np.testing.assert_allclose(
        curves(CorrelationFunction(K, POWER, MODES).plot())[:, :, 1], K[np.newaxis] ** 2 * POWER
    )
    found = Comparison(K, 4 * POWER[0], POWER[0], POWER[0], MODES)
    np.testing.assert_allclose(curves(found.plot())[:, :, 1], [[0.5] * 3, [2.0] * 3])
    ell = np.array([10.0, 100.0, 1000.0])
    angular = AngularPower(ell, POWER[0], MODES, np.arange(4.0))
    np.testing.assert_allclose(
        curves(angular.plot())[0, :, 1], ell * (ell + 1) * POWER[0] / (2 * np.pi)
    )
    edges = np.array([0.0, 1.0, 3.0, 4.0])
    counts = np.array([1, 4, 5])
    np.testing.assert_allclose(
        curves(Histogram(edges, counts, 20).plot())[0, :, 1], [0.05, 0.1, 0.25]
    )
    np.testing.assert_array_equal(
        curves(Peaks(edges, counts).plot())[0], [[0.5, 1], [2, 4], [3.5, 5]]
    )
    wedges = Wedges(
        np.array([K, 2 * K]), POWER, POWER, np.array([MODES] * 2), np.array([0, 0.5, 1])
    )
    np.testing.assert_array_equal(curves(wedges.plot())[:, :, 0], [K, 2 * K])
    sides = np.array([[0.1, 0.2, 0.3], [0.1, 0.1, 0.1]])
    both = Bispectrum(np.zeros((2, 3)), sides, np.array([[5.0, 6.0], [0, -1]]), np.array([7, 8]))
    found = curves(both.plot(label="B"))
    np.testing.assert_allclose(found[:, :, 1], [[0.03, 0.006], [0, -0.001]])
    np.testing.assert_array_equal(found[:, :, 0], [[0, 1], [0, 1]])
    counts = np.array([[2, 8, 0], [1, 1, 3]])
    smoothed = Histograms(np.array([0.0, 2.0]), np.zeros((2, 3, 2)), counts, 20)
    np.testing.assert_allclose(curves(smoothed.plot())[:, :, 1], counts / 20)
    np.testing.assert_array_equal(curves(Values(POWER).plot())[:, :, 1], POWER)


def test_a_map_is_drawn_on_its_field():
    sky = FlatField.model_construct(field_of_view=2.0, pixels=4)
    maps = np.arange(32.0).reshape(2, 4, 4)
    axes = ConvergenceMaps(tf.constant(maps), sky).plot(source=0)
    (image,) = axes.images
    np.testing.assert_array_equal(image.get_array(), maps[0].T)  # rows of a picture are y
    assert image.get_extent() == [0, 2, 0, 2]
    found = ConvergenceMaps(tf.constant(maps), sky).labelled()
    assert found["kappa"].dimensions == ("source", "x", "y")
    np.testing.assert_allclose(found["y"].values, [0.25, 0.75, 1.25, 1.75])
    chi = SimpleNamespace(chi=tf.constant(np.array([1.0, 2.0])))
    delta = np.arange(96.0).reshape(3, 2, 4, 4)
    planes = DensityPlanes(tf.constant(delta), chi, sky)
    assert planes.labelled()["delta"].dimensions == ("batch", "plane", "x", "y")
    axes = planes.plot(plane=1, universe=2)
    (image,) = axes.images
    np.testing.assert_array_equal(image.get_array(), delta[2, 1].T)
    assert "distance of 2 Mpc/h" in axes.get_title() and image.get_extent() == [0, 2, 0, 2]


@pytest.fixture
def pandas(monkeypatch):
    """A stand-in that keeps what it is given."""
    stand_in = SimpleNamespace(
        DataFrame=lambda columns, index: SimpleNamespace(columns=columns, index=index, attrs={}),
        Index=lambda values, name: ([values], [name]),
        MultiIndex=SimpleNamespace(from_arrays=lambda arrays, names: (arrays, names)),
    )
    monkeypatch.setitem(sys.modules, "pandas", stand_in)


def test_a_table_has_a_row_for_each_bin(pandas):
    table = SPECTRUM.to_pandas()
    np.testing.assert_array_equal(table.index[0], [K])
    np.testing.assert_array_equal(table.columns["power"], POWER[0])
    assert table.attrs["units"] == {"k": "h/Mpc", "modes": "1", "power": "(Mpc/h)^3"}
    poles = POLES.to_pandas()
    (orders, k), names = poles.index
    assert names == ["order", "k"]
    rows = np.column_stack([orders, k, poles.columns["modes"], poles.columns["power"]])
    np.testing.assert_array_equal(rows[4], [2, K[1], MODES[1], POWER[1, 1]])
    sides = np.array([[0.1, 0.2, 0.3], [0.1, 0.1, 0.1]])
    triangles = Bispectrum(np.zeros((2, 3)), sides, np.array([5.0, 6.0]), np.array([7, 8]))
    assert triangles.to_pandas().columns["k2"].tolist() == [0.2, 0.1]


def test_a_table_of_astropy_has_units(tmp_path):
    table = POLES.to_table()
    assert table.colnames == ["order", "k", "modes", "power"]
    np.testing.assert_allclose(table["k"][:3].to_value(littleh / Unit("kpc")), K / 1e3)
    power = table["power"].to_value(Unit("Mpc") ** 3 / littleh**3)
    np.testing.assert_array_equal(power, POWER.ravel())
    np.testing.assert_array_equal(table["order"], np.repeat(POLES.orders, 3))
    assert table["modes"].info.description == "number of modes"
    table.write(tmp_path / "poles.ecsv")
    with add_enabled_units(units):  # without them astropy does not know littleh in a file
        assert (QTable.read(tmp_path / "poles.ecsv")["power"] == table["power"]).all()
    sides = np.array([[0.1, 0.2, 0.3], [0.1, 0.1, 0.1]])
    triangles = Bispectrum(np.zeros((2, 3)), sides, np.array([5.0, 6.0]), np.array([7, 8]))
    assert triangles.to_table()["bispectrum"].unit == (Unit("Mpc") / littleh) ** 6


def test_what_is_no_table_is_refused(pandas, monkeypatch):
    found = SPECTRUM.labelled()
    other = found["k"].__class__(np.arange(4.0), ("edge",), "", "edges")
    monkeypatch.setattr(PowerSpectrum, "labelled", lambda self: found | {"edges": other})
    with pytest.raises(ValueError, match="different axes: use to_xarray"):
        SPECTRUM.to_pandas()


def test_a_data_set_has_axes_and_units(monkeypatch):
    monkeypatch.setitem(sys.modules, "xarray", SimpleNamespace(Dataset=dict))
    axes, values, about = POLES.to_xarray()["power"]
    assert axes == ("order", "k") and about["units"] == "(Mpc/h)^3"
    np.testing.assert_array_equal(values, POWER)


@pytest.mark.parametrize(("method", "package"), [("to_pandas", "pandas"), ("to_xarray", "xarray")])
def test_an_optional_package_that_is_missing_is_named(monkeypatch, method, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"{package} is not installed: pip install {package}"):
        getattr(SPECTRUM, method)()


COSMOLOGY = fpm.Cosmology.planck18()


@pytest.fixture(scope="module")
def universe():
    sim = fpm.Simulation(COSMOLOGY, grid=(8, 8, 16), box_size=(16.0, 16.0, 32.0), steps=[0.1, 1.0])
    return sim, sim.lpt(seed=7)


def picture(html):
    """The pixels of the picture in an object's HTML [y, x, colour]."""
    data = html.partition("base64,")[2].partition('"')[0]
    return pyplot.imread(io.BytesIO(base64.b64decode(data)))


def test_objects_are_shown_by_their_facts(universe):
    sim, state = universe
    sigma8 = tf.Variable(0.8, dtype=tf.float64)
    assert "<th>sigma8</th><td>0.8</td>" in COSMOLOGY.replace(sigma8=sigma8)._repr_html_()
    html = sim._repr_html_()
    for name, value in {"grid": "8 x 8 x 16", "steps": "1, from a = 0.1 to 1"}.items():
        assert f"<th>{name}</th><td>{value}</td>" in html
    assert "<td>Omega_m = 0.30966, " in html and "<td>fastpm</td>" in html
    assert "<td>vector</td>" in state.displacement._repr_html_()
    assert "<td>cic</td>" in state.density()._repr_html_()
    for fact in ("redshift</th><td>0<", "seed</th><td>7<", "picture</th><td>a slab of 4 Mpc/h<"):
        assert fact in state._repr_html_()


def test_what_is_printed_says_what_it_is(universe):
    """Not a place in the memory: the objects of a run, of its theory and of what is seen of it."""
    sim, state = universe
    theory, k, a = sim.theory, np.geomspace(0.01, 1.0, 5), np.linspace(0.4, 1.0, 4)
    linear = theory.power
    shown = [
        sim, state, state.density(), sim.box, sim.box.mesh, sim.options, sim.cosmology, theory,
        theory.background, theory.growth, theory.distances, linear, Halofit(linear),
        TabulatedPower(k, a, np.stack([linear(k, each) for each in a])),
        ForwardModel(sim), power_spectrum(state.density()),
    ]  # fmt: skip
    for each in shown:
        assert repr(each).startswith(type(each).__name__ + "("), each
        assert " object at 0x" not in repr(each)
    text = "Simulation(grid 8 x 8 x 16, size 16 x 16 x 32 Mpc/h, mesh row:1,col:1, float32, "
    assert repr(sim).startswith(f"{text}1 fastpm steps from a = 0.1 to 1, Cosmology(Omega_m=")


def test_the_picture_of_a_state_is_brightest_where_the_slab_is_densest(universe):
    _, state = universe
    slab = state.density().numpy()[:, :, :2].mean(axis=2)
    brightness = picture(state._repr_html_())[::-1, :, :3].sum(axis=2)  # the first row is above
    x, y = np.unravel_index(np.argmax(slab), slab.shape)
    assert brightness[y, x] == brightness.max()
    x, y = np.unravel_index(np.argmin(slab), slab.shape)
    assert brightness[y, x] == brightness.min()


def test_no_picture_is_drawn_that_takes_long_or_that_ranks_draw_together(universe, monkeypatch):
    sim, state = universe
    drawn = []
    monkeypatch.setattr(fpm.State, "density", lambda self: drawn.append(self))
    assert "none of a batch" in sim.lpt(seed=[1, 2])._repr_html_()
    with monkeypatch.context() as small:
        small.setattr(states, "MOST_PICTURED", 1000)
        assert "none of more than" in state._repr_html_()
    several = SimpleNamespace(
        mesh=SimpleNamespace(size=2),
        batch=None,
        cells=512,
        grid=(8,) * 3,
        cell=(1.0,) * 3,
        facts=dict,
    )
    monkeypatch.setattr(fpm.State, "box", several)
    assert "none on several ranks" in state._repr_html_()
    assert not drawn


def test_html_is_escaped_and_never_an_error():
    def fails():
        raise RuntimeError("no facts")

    html = as_html(COSMOLOGY, lambda: {"a<b": "<script>"})
    assert "<th>a&lt;b</th><td>&lt;script&gt;</td>" in html
    assert as_html(COSMOLOGY, fails, fails) == "<b>Cosmology</b>"
