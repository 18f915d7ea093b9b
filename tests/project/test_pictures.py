"""Pictures that carry numbers: the numbers are read back from what is drawn.

`CHECKED` lists all functions that draw, and what holds each of them.
"""

import ast
import io
from pathlib import Path

import drawn
import healpy
import numpy as np
import pytest
from drawn import curve, half_lengths, limits
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread
from matplotlib.lines import Line2D

import flowpm_dist
from flowpm_dist.catalogues.abundance import predicted, watson
from flowpm_dist.cosmology import Theory
from flowpm_dist.io import figures
from flowpm_dist.observables.light_cone import pictures as sky
from flowpm_dist.posteriors import figures as posteriors
from flowpm_dist.reconstruction import figures as reconstruction

ROOT, TESTS = Path(flowpm_dist.__file__).parent, Path(__file__).parents[1]
NO_NUMBERS = "draws nothing itself"
CORNER = "test_corner_plots.py::test_contours_hold_the_shares_of_samples_that_they_state"
NOTEBOOK = "test_notebook.py::test_results_are_drawn_as_they_are_usually_shown"
MAPS = "test_notebook.py::test_a_map_is_drawn_on_its_field"
SPECTRA = "test_notebook.py::test_a_spectrum_is_drawn_with_its_scatter_and_units"
RUNS = "test_pictures_of_runs.py::"
CHECKED = {
    "catalogues/abundance.py MassFunction.plot": "test_the_abundance_of_halos",
    "catalogues/clustering.py TracerPower.plot": "test_the_power_of_halos",
    "catalogues/survey_power.py SurveyMultipoles.plot": "test_surveys.py::"
    "test_the_result_is_a_table_and_a_picture",
    "catalogues/figures.py abundance_figure": "test_the_abundance_of_halos",
    "catalogues/figures.py halos_figure": "test_halos_over_the_density",
    "catalogues/figures.py tracer_figure": "test_the_power_of_halos",
    "cosmoflow/scores/figures.py predicted_figure": RUNS + "test_predictions",
    "cosmoflow/scores/figures.py learning_curve_figure": "test_judging.py::"
    "test_the_learning_curve_figure_takes_seeds_and_gaps",
    "cosmoflow/scores/figures.py training_figure": RUNS + "test_a_training",
    "cosmoflow/scores/figures.py calibration_figure": RUNS + "test_error_bars",
    "cosmoflow/scores/figures.py phases_figure": RUNS + "test_phases_of_a_step",
    "emulate/figures.py correction_figure": RUNS + "test_an_emulation",
    "emulate/figures.py learning_figure": RUNS + "test_an_emulation",
    "io/drawing.py draw_curves": NO_NUMBERS,
    "io/figures.py new_figure": NO_NUMBERS,
    "io/figures.py save_figure": NO_NUMBERS,
    "io/figures.py add_colour_bar": "test_a_slab_of_density",
    "io/figures.py draw_measured": "test_a_power_spectrum",
    "io/figures.py draw_curves": NOTEBOOK,
    "io/figures.py density_picture": "test_a_slab_of_density",
    "io/figures.py density_figure": "test_a_slab_of_density",
    "io/figures.py power_spectrum_figure": "test_a_power_spectrum",
    "observables/light_cone/observers.py ConvergenceMaps.plot": MAPS,
    "observables/light_cone/observers.py DensityPlanes.plot": MAPS,
    "observables/light_cone/pictures.py field_figure": "test_a_map_with_its_shear",
    "observables/light_cone/pictures.py draw_field": "test_a_map_with_its_shear",
    "observables/light_cone/pictures.py draw_plane": MAPS,
    "observables/light_cone/pictures.py sky_figure": "test_the_whole_sky",
    "observables/light_cone/pictures.py draw_sky": "test_the_whole_sky",
    "observables/light_cone/pictures.py power_figure": "test_power_of_the_convergence",
    "posteriors/figures.py rank_figure": "test_the_band_of_ranks",
    "posteriors/figures.py tarp_figure": "test_the_band_of_tarp",
    "posteriors/figures.py corner_figure": CORNER,
    "posteriors/heads.py Posterior.plot": "test_posteriors.py::"
    "test_a_posterior_is_repeatable_and_the_same_when_read_again",
    **{
        f"reconstruction/observed.py {name}.figure": NO_NUMBERS
        for name in ("Observed", "ObservedCells", "ObservedMaps")
    },
    "reconstruction/figures.py slabs_figure": "test_slabs",
    "reconstruction/figures.py maps_figure": "test_maps",
    "reconstruction/figures.py correlation_figure": "test_correlations",
    "reconstruction/figures.py loss_figure": "test_the_loss_of_a_search",
    "reconstruction/figures.py chains_figure": "test_chains",
    "io/labelled.py Values.plot": NOTEBOOK,
    "statistics/angular_spectra.py AngularPower.plot": NOTEBOOK,
    "statistics/bispectra.py Bispectrum.plot": NOTEBOOK,
    "statistics/comparison.py Comparison.plot": NOTEBOOK,
    "statistics/correlation.py CorrelationFunction.plot": NOTEBOOK,
    "statistics/histogram.py Histogram.plot": NOTEBOOK,
    "statistics/histogram.py Histograms.plot": NOTEBOOK,
    "statistics/histogram.py Peaks.plot": NOTEBOOK,
    "statistics/power.py PowerSpectrum.plot": SPECTRA,
    "statistics/power.py Multipoles.plot": NOTEBOOK,
    "statistics/power.py Wedges.plot": NOTEBOOK,
    "studies/figures.py scaling_figure": RUNS + "test_scaling",
    "studies/figures.py phases_figure": RUNS + "test_phases_of_a_study",
    "studies/figures.py keys_figure": RUNS + "test_keys_and_energy",
    "studies/figures.py energy_figure": RUNS + "test_keys_and_energy",
    "studies/tuning/figures.py history_figure": RUNS + "test_the_history_of_a_tuning",
    "studies/tuning/figures.py importances_figure": RUNS + "test_importances",
    "studies/tuning/figures.py parallel_figure": RUNS + "test_parallel_coordinates",
}
"""Function that draws -> the test of its numbers, or what was looked at by eye."""


def drawing_functions():
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text()
        if not any(word in text for word in ("Figure", "Axes", "_picture", "corner_figure")):
            continue
        tree = ast.parse(text)
        places = [
            ("", tree),
            *((f"{n.name}.", n) for n in tree.body if isinstance(n, ast.ClassDef)),
        ]
        for owner, place in places:
            for one in place.body:
                if not isinstance(one, ast.FunctionDef) or one.name.startswith("_"):
                    continue
                returned = ast.unparse(one.returns) if one.returns else ""
                drawn = one.name.endswith(("_figure", "_picture")) or one.name == "plot"
                first = [ast.unparse(a.annotation) for a in one.args.args[:1] if a.annotation]
                if drawn or returned in ("Figure", "Axes") or first == ["Axes"]:
                    yield f"{path.relative_to(ROOT).as_posix()} {owner}{one.name}"


STYLE = {"io/figures.py style_axes", "observables/light_cone/pictures.py new_axes"}
"""Functions that take or return axes and draw no numbers."""


def test_every_function_that_draws_is_listed_with_its_test():
    assert {*drawing_functions()} - STYLE == {*CHECKED}
    for test in CHECKED.values():
        file, found, name = test.rpartition("::")
        if not test.startswith("test_"):
            continue
        (path,) = TESTS.glob(f"*/{file if found else 'test_pictures.py'}")
        text = path.read_text()
        assert f"\ndef {name}(" in text, f"there is no {test}"


@pytest.mark.parametrize("name", drawn.DRAWN)
def test_no_text_and_no_data_is_cut_off(name):
    figure = drawn.DRAWN[name]()
    figure.set_dpi(50)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    box = figure.get_tightbbox(canvas.get_renderer())
    assert box.x0 > -0.02 and box.y0 > -0.02, box
    width, height = figure.get_size_inches()
    assert box.x1 < width + 0.02 and box.y1 < height + 0.02, box
    for axes in figure.axes:
        for line in axes.lines:
            if type(line) is not Line2D or line.get_transform() != axes.transData:
                continue
            ends = (axes.get_xlim(), axes.get_ylim())
            values = np.array(line.get_xydata(), float)
            if name == "history":  # arrows mark what is above
                values = values[values[:, 1] < 1]
            for (low, high), column in zip(ends, values[np.isfinite(values).all(1)].T, strict=True):
                assert ((column >= low) & (column <= high)).all(), (line.get_label(), low, high)


def test_a_power_spectrum():
    top, below = drawn.power_figure().axes
    # k and -k are one complex number: m modes have m / 2 of them, each with P of scatter P.
    rng = np.random.default_rng(0)
    parts = rng.standard_normal((20000, 2, int(drawn.MODES[0]) // 2))
    scatter = (np.sum(parts**2, axis=1) / 2).mean(axis=1).std()
    found = half_lengths(top) / drawn.MEASURED
    assert found[0] == pytest.approx(scatter, rel=0.04)  # of 20000 draws, four standard errors
    np.testing.assert_allclose(found, (2 / drawn.MODES) ** 0.5)
    ratio = drawn.MEASURED / (1e4 * drawn.K**-1.5)
    np.testing.assert_allclose(half_lengths(below), found * ratio)
    np.testing.assert_allclose(top.lines[1].get_xydata(), np.stack([drawn.K, drawn.MEASURED], 1))
    np.testing.assert_allclose(below.lines[1].get_ydata(), np.geomspace(0.02, 90, 30))
    theory = curve(top, "linear theory")
    np.testing.assert_allclose(theory[:, 1], 1e4 * theory[:, 0] ** -1.5)
    noise = curve(top, "particles at random")
    np.testing.assert_allclose(noise, [[drawn.K[0], drawn.NOISE], [drawn.K[-1], drawn.NOISE]])
    assert top.lines[-1].get_xdata()[0] == 3.2 and "z = 1$" in top.get_title()


def test_halos_over_the_density():
    halos = drawn.catalogue()
    axes = drawn.DRAWN["halos"]().axes[0]
    (circles,) = axes.collections
    paths = [path.vertices for path in circles.get_paths()]
    for path, position, mass in zip(paths, halos["position"], halos["mass"], strict=True):
        low, high = path.min(axis=0), path.max(axis=0)
        np.testing.assert_allclose((low + high) / 2, position[:2])
        density = mass / (4 / 3 * np.pi * ((high - low) / 2) ** 3)
        np.testing.assert_allclose(density, 200 * 0.3 * 2.77549975e11, rtol=1e-3)
    assert axes.get_title() == "8 halos in a slab of 12.5 Mpc/$h$ at $z = 1$"


def test_the_abundance_of_halos():
    axes = drawn.DRAWN["abundance"]().axes[0]
    halos, found = drawn.catalogue(), drawn.abundance()
    held = found.count > 0
    np.testing.assert_allclose(half_lengths(axes), found.error[held])
    points = np.stack([found.mass, found.abundance], axis=1)[held]
    np.testing.assert_allclose(axes.lines[2].get_xydata(), points)
    fit = curve(axes, "Watson 2013")
    theory = predicted(Theory(halos.cosmology), fit[:, 0], halos.a, watson)
    np.testing.assert_allclose(fit[:, 1], theory)
    plotted = found.plot(figures.new_figure(4, 4).add_subplot())
    np.testing.assert_allclose(half_lengths(plotted), found.error[held])


def test_the_power_of_halos():
    top, below = drawn.DRAWN["power of halos"]().axes
    found = drawn.tracers()
    np.testing.assert_allclose(curve(top, "matter"), np.stack([found.k, found.matter], axis=1))
    shown = found.power > 0
    np.testing.assert_allclose(curve(top, "halos")[:, 1], found.power[shown])
    np.testing.assert_allclose(half_lengths(below), found.error)
    plotted = found.plot(figures.new_figure(4, 4).add_subplot())
    np.testing.assert_allclose(half_lengths(plotted), found.error)
    np.testing.assert_allclose(plotted.lines[0].get_ydata(), found.bias)


@pytest.mark.parametrize("sides", [(100, 75, 50), (800, 100, 50)])
def test_a_slab_of_density(sides):
    figure = figures.density_figure(drawn.SLAB, sides, 12.5, 0.5)
    axes, bar = figure.axes
    (image,) = axes.images
    low, high = limits(image)
    assert np.mean(drawn.SLAB < low) <= 0.01 and np.mean(drawn.SLAB > high) <= 0.01
    np.testing.assert_array_equal(image.get_array(), np.maximum(drawn.SLAB, low).T)
    assert image.get_extent() == [0, sides[0], 0, sides[1]] and image.origin == "lower"
    along = bar.xaxis if sides[0] > 2 * sides[1] else bar.yaxis
    assert along.get_view_interval() == pytest.approx((low, high))
    assert along.get_label_text() == "density / mean density" and image.colorbar.extend == "both"
    pixels = imread(io.BytesIO(figures.density_picture(drawn.SLAB)))
    shares = (np.log(np.maximum(drawn.SLAB, low)) - np.log(low)) / np.log(high / low)
    wanted = colormaps["inferno"](np.clip(shares, 0, 1))  # [x, y], from the lower left
    np.testing.assert_allclose(pixels[::-1].swapaxes(0, 1), wanted, atol=0.02)


def test_slabs():
    masked = np.where(drawn.SLAB > 2, np.nan, drawn.DENSITIES["residual"])
    figure = reconstruction.slabs_figure(
        drawn.DENSITIES | {"residual": masked}, (100, 80), 12.5, 0.5
    )
    shown = {axes.get_title(): axes.images[0] for axes in figure.axes if axes.images}
    densities = np.concatenate([drawn.DENSITIES[n].ravel() for n in ("truth", "reconstruction")])
    low, high = limits(shown["truth"])
    assert low == max(np.percentile(densities, 1), 0.05) and high == np.percentile(densities, 99.8)
    for name in ("truth", "data", "reconstruction"):
        assert limits(shown[name]) == (low, high), "one scale"
        np.testing.assert_array_equal(
            shown[name].get_array(), np.maximum(drawn.DENSITIES[name], low).T
        )
    least, most = limits(shown["data - reconstruction"])
    assert -least == most == np.nanpercentile(np.abs(masked), 99.5)
    rest = shown["data - reconstruction"].get_array()
    np.testing.assert_array_equal(np.ma.filled(rest, np.nan), masked.T)
    for image in shown.values():
        assert image.get_extent() == [0, 100, 0, 80]
        assert image.colorbar.norm is image.norm and image.colorbar.extend == "both"


@pytest.mark.parametrize(("name", "share"), [("slabs", 0.35), ("low slabs", 0.8), ("maps", 0.35)])
def test_panels_of_maps_are_large(name, share):
    figure = drawn.DRAWN[name]()
    figure.set_dpi(50)
    FigureCanvasAgg(figure).draw()
    widths = [axes.get_position().width for axes in figure.axes if axes.images]
    assert len(widths) == 4 and min(widths) > share
    assert widths == pytest.approx([widths[0]] * 4, rel=0.01)


def test_maps():
    maps = dict(zip(("truth", "data", "kappa"), drawn.KAPPA, strict=True))
    shown = {
        a.get_title(): a.images[0]
        for a in reconstruction.maps_figure(maps, 5.0, "z").axes
        if a.images
    }
    residual = maps["data"] - maps["kappa"]
    for names, values in (
        (("truth", "reconstruction"), (maps["truth"], maps["kappa"])),
        (("data", "data - reconstruction"), (maps["data"], residual)),
    ):
        most = np.percentile(np.abs(values), 99.7)
        for name, each in zip(names, values, strict=True):
            assert limits(shown[name]) == (-most, most) and shown[name].get_extent() == [0, 5, 0, 5]
            np.testing.assert_array_equal(shown[name].get_array(), each.T)


def test_correlations():
    r, t = np.exp(-drawn.K), 1 - 0.2 * drawn.K
    t[3] = np.nan
    fields = {"initial": (r, t), "final": (r - 0.2, t + 1)}
    top, below = reconstruction.correlation_figure(drawn.K, fields, 2.0).axes
    for name, (correlation, transfer) in fields.items():
        np.testing.assert_array_equal(curve(top, name), np.stack([drawn.K, correlation], 1))
        np.testing.assert_array_equal(curve(below, name), np.stack([drawn.K, transfer], 1))
    assert top.get_ylim()[0] < -0.15 and below.get_ylim()[1] > 2
    assert curve(top, "Nyquist of the grid")[0, 0] == 2.0


def test_the_loss_of_a_search():
    rows = drawn.search_rows()
    (axes,) = reconstruction.loss_figure(rows, 100, 400, "ended").axes
    at = np.arange(1, 31)
    stage, n = np.divmod(at - 1, 10)
    data, prior, half, *stages = axes.lines
    np.testing.assert_allclose(data.get_xydata(), np.stack([at, 1 + stage + n], 1))
    np.testing.assert_allclose(prior.get_xydata(), np.stack([at, 50 * (1 + n) / 400], 1))
    assert half.get_ydata()[0] == 0.5
    assert [line.get_xdata()[0] for line in stages] == [0, 10, 20]
    assert [t.get_text()[:3] for t in axes.texts] == ["8 M", "4 M", "2 M"]


def test_chains():
    figure = reconstruction.chains_figure(drawn.TRACES, {"sigma8": 0.9}, 30)
    for (left, right), (name, moves) in zip(
        zip(figure.axes[::2], figure.axes[1::2], strict=True), drawn.TRACES.items(), strict=True
    ):
        ends = moves[30:].min(), moves[30:].max()
        assert len(left.lines) == 3 + (name == "sigma8") and len(right.patches) == 3
        for chain in range(3):
            np.testing.assert_array_equal(left.lines[chain].get_ydata(), moves[:, chain])
            outline = right.patches[chain].get_xy()
            wanted, _ = np.histogram(moves[30:, chain], 24, ends)
            np.testing.assert_array_equal(outline[1:-1:2, 0], wanted)
            assert outline[[0, -1], 1] == pytest.approx(ends) and wanted.sum() == 60
        (grey,) = left.patches
        assert grey.get_x() <= 0 and 30 < grey.get_x() + grey.get_width() < 31
    assert left.lines[-1].get_ydata()[0] == 0.9


def test_the_band_of_ranks():
    found = drawn.calibrated()
    figure = posteriors.rank_figure({"prior": found})
    rng = np.random.default_rng(0)
    # 60 independent groups of two, which fall into one bin together.
    heights = 2 * rng.multinomial(60, [0.1] * 10, 20000)[:, 0]
    for axes, ranks in zip(figure.axes, found.ranks.T, strict=True):
        band, outline = axes.patches
        low, high = band.get_y(), band.get_y() + band.get_height()
        # The least band of whole numbers that at most 2.5 % are below, and at most 2.5 % above.
        error = 4 * (0.025 / 20000) ** 0.5
        assert np.mean(heights < low) < 0.025 + error < np.mean(heights < low + 2) + 2 * error
        assert np.mean(heights > high) < 0.025 + error < np.mean(heights > high - 2) + 2 * error
        counts = np.histogram(ranks, 10, (0, 1))[0]
        np.testing.assert_array_equal(outline.get_xy()[1:-1:2, 1][:10], counts)
        assert counts.sum() == 120 and axes.lines[0].get_ydata()[0] == 12


def test_the_band_of_tarp():
    found = drawn.calibrated()
    (axes,) = posteriors.tarp_figure({"prior": found}).axes
    (band,) = axes.patches
    reach = band.get_y() + band.get_height()
    assert band.get_y() == -reach
    uniform = np.sort(np.random.default_rng(0).random((4000, 60)), axis=1)
    steps = np.arange(61) / 60
    most = np.maximum((steps[1:] - uniform).max(1), (uniform - steps[:-1]).max(1))
    # Four standard errors of the share.
    assert np.mean(most < reach) == pytest.approx(0.95, abs=4 * (0.95 * 0.05 / 4000) ** 0.5)
    credibility, apart = axes.lines[-1].get_data()
    covered = [(found.tarp <= each).mean() for each in credibility]
    np.testing.assert_allclose(apart, covered - credibility)


def test_a_map_with_its_shear():
    kappa, fov, ones = drawn.KAPPA[0], 5.0, np.ones((24, 24))
    for (first, second), angle in (((0.1, 0), 0), ((0, 0.1), 45), ((-0.1, 0), 90)):
        axes, _ = sky.field_figure([kappa, first * ones, second * ones], fov, "z").axes
        (image,), (sticks,) = axes.images, axes.collections
        assert limits(image) == tuple(np.percentile(kappa, [1, 99.7]))
        np.testing.assert_array_equal(image.get_array(), kappa)
        assert image.get_extent() == [0, fov, 0, fov] and image.colorbar.extend == "both"
        lengths = np.hypot(sticks.U, sticks.V)
        np.testing.assert_allclose(lengths, 0.95 * fov / 24)  # nearly a stick's share of the map
        angles = np.degrees(np.arctan2(sticks.V, sticks.U)) % 180
        np.testing.assert_allclose(angles, angle, atol=1e-9)
        assert "a shear of 0.1" in axes.get_title() and axes.get_xlim() == (0, fov)
    half = np.where(np.arange(24) < 12, 0.05, 0.1) * ones  # along x
    axes, _ = sky.field_figure([kappa, half, 0 * ones], fov, "z").axes
    (sticks,) = axes.collections
    left = np.array(sticks.get_offsets())[:, 0] < fov / 2
    np.testing.assert_allclose(2 * np.unique(sticks.U[left].round(9)), sticks.U[~left].max())


def test_the_whole_sky(monkeypatch):
    monkeypatch.setattr(sky, "WIDTH", 400)
    nside = 32
    theta, longitude = healpy.pix2ang(nside, np.arange(12 * nside**2))
    for name, values in {
        "height": np.cos(theta),
        "left": np.sin(theta) * np.sin(longitude),
        "front": np.sin(theta) * np.cos(longitude),
    }.items():
        axes, _ = sky.sky_figure(values, "z").axes
        (image,) = axes.images
        assert limits(image) == tuple(np.percentile(values, [1, 99.7]))
        x0, x1, y0, y1 = image.get_extent()
        pixels = np.ma.filled(image.get_array(), np.nan)
        rows, columns = pixels.shape
        x = x0 + (np.arange(columns) + 0.5) / columns * (x1 - x0)
        y = (y0 + (np.arange(rows) + 0.5) / rows * (y1 - y0))[:, np.newaxis]
        # Snyder 1987, Map projections, equations 31-1 to 31-4, of a sphere of radius 1 / sqrt(2).
        auxiliary = np.arcsin(y)
        sine = (2 * auxiliary + np.sin(2 * auxiliary)) / np.pi
        east = -np.pi * x / (2 * np.cos(auxiliary))
        across = np.sqrt(1 - sine**2)
        wanted = {"height": sine + 0 * x, "left": across * np.sin(east)}
        wanted["front"] = across * np.cos(east)
        inside = np.abs(east) <= np.pi
        np.testing.assert_array_equal(np.isfinite(pixels), inside)
        # Bilinear: within h^2 / 4 of a smooth function of unit size, for pixels up to h apart.
        # The rings around the poles have few pixels.
        h = 2 * np.sqrt(4 * np.pi / len(values))
        off = np.abs(pixels - wanted[name])
        assert off[inside & (across > 3 * h)].max() < h**2 / 4 and off[inside].max() < h / 2
    figure = axes.figure  # which the title, the sky and the bar of colours fill
    figure.draw_without_rendering()
    filled = figure.get_tightbbox().extents / np.tile(figure.get_size_inches(), 2)
    np.testing.assert_allclose(filled, [0, 0, 1, 1], atol=0.05)


def test_power_of_the_convergence():
    spectra = drawn.CL
    top, below = sky.power_figure(spectra, ["near", "far"]).axes
    ell, per_log = spectra.ell, spectra.ell * (spectra.ell + 1) / (2 * np.pi)
    power = spectra.power[[0, 2]]  # of each with itself
    measured = [line for line in top.lines if line.get_marker() == "o"]
    ratios = [line for line in below.lines if line.get_marker() == "o"]
    for n in range(2):
        np.testing.assert_allclose(measured[n].get_ydata(), per_log * power[n])
        np.testing.assert_allclose(ratios[n].get_ydata(), power[n] * ell**2)
        np.testing.assert_allclose(measured[n].get_xdata(), ell, rtol=0.007)
    scatter = (2 / spectra.modes) ** 0.5
    np.testing.assert_allclose(half_lengths(top), (per_log * power * scatter).ravel())
    np.testing.assert_allclose(half_lengths(below), (power * ell**2 * scatter).ravel())
    halofit, linear = top.lines[:2]
    fine = spectra.fine * (spectra.fine + 1) / (2 * np.pi)
    np.testing.assert_allclose(halofit.get_ydata(), fine * spectra.curves[1, 0])
    np.testing.assert_allclose(linear.get_ydata(), fine * spectra.curves[0, 0])
    assert linear.get_linestyle() == "--"
    noise = [line for line in top.lines if line.get_linestyle() == ":"]
    for line, level in zip(noise, spectra.noise[[0, 2]], strict=False):
        np.testing.assert_allclose(line.get_ydata(), fine * level[0])
    assert len(noise) == 3  # one of the legend
