"""What a notebook shows of results: curves, tables and labelled arrays."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib import pyplot

from flowpm_dist.observables.light_cone.observers import ConvergenceMaps, DensityPlanes
from flowpm_dist.observables.light_cone.options import FlatField
from flowpm_dist.statistics import (
    AngularPower,
    Bispectrum,
    Comparison,
    Histogram,
    Multipoles,
    Peaks,
    PowerSpectrum,
    Wedges,
)

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


def test_curves_share_axes_and_a_label_has_a_colour():
    batch = PowerSpectrum(K, np.array([POWER[0], 2 * POWER[0]]), MODES)
    axes = batch.plot(label="batch")
    assert SPECTRUM.plot(axes, label="one") is axes
    first, second, third = (line.get_color() for line in axes.lines)
    assert first == second != third
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["batch", "one"]


def test_results_are_drawn_as_they_are_usually_shown():
    np.testing.assert_array_equal(curves(POLES.plot())[:, :, 1], K * POWER)
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


def test_a_map_is_drawn_on_its_field():
    sky = FlatField.model_construct(field_of_view=2.0, pixels=4)
    maps = np.arange(32.0).reshape(2, 4, 4)
    axes = ConvergenceMaps(tensor(maps), sky).plot(source=0)
    (image,) = axes.images
    np.testing.assert_array_equal(image.get_array(), maps[0].T)  # rows of a picture are y
    assert image.get_extent() == [0, 2, 0, 2]
    found = ConvergenceMaps(tensor(maps), sky).labelled()
    assert found["kappa"].dimensions == ("source", "x", "y")
    np.testing.assert_allclose(found["y"].values, [0.25, 0.75, 1.25, 1.75])
    chi = SimpleNamespace(chi=tensor(np.array([1.0, 2.0])))
    planes = DensityPlanes(tensor(np.zeros((3, 2, 4, 4))), chi, sky).labelled()
    assert planes["delta"].dimensions == ("batch", "plane", "x", "y")


def tensor(values):
    import tensorflow as tf

    return tf.constant(values)


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
