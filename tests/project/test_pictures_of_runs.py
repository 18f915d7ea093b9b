"""Pictures of trainings, emulations, studies and tunings; see test_pictures.py."""

import drawn
import numpy as np
import pytest
from drawn import bars_of, curve, half_lengths
from matplotlib import colormaps
from matplotlib.lines import Line2D

from flowpm_dist.cosmoflow.scores import figures as scores
from flowpm_dist.cosmoflow.scores.judging import Predictions
from flowpm_dist.emulate import figures as emulation
from flowpm_dist.io import figures
from flowpm_dist.studies import figures as studies
from flowpm_dist.studies.tuning import figures as tuning


def test_predictions():
    methods = {"network": drawn.NETWORK, "ridge": drawn.RIDGE}
    figure = scores.predicted_figure(methods, drawn.MEANS)
    for i, axes in enumerate(figure.axes):
        truth, sigma = drawn.TRUTH[:, i], drawn.SIGMA[0, i]
        np.testing.assert_allclose(half_lengths(axes), [sigma] * scores.MOST_BARS)
        texts = [text.get_text() for text in axes.texts]
        for (name, each), text in zip(methods.items(), texts, strict=True):
            np.testing.assert_array_equal(curve(axes, name), np.stack([truth, each.mean[:, i]], 1))
            errors = each.mean[:, i] - truth
            r2 = 1 - (errors**2).sum() / ((truth - truth.mean()) ** 2).sum()
            rmse = (errors**2).mean() ** 0.5
            assert text == f"$R^2$ = {r2:.3f},  RMSE = {rmse:#.2g}"
        diagonal = next(line for line in axes.lines if type(line) is not Line2D)
        assert diagonal.get_slope() == 1 and len({*diagonal.get_xy1()}) == 1
        assert curve(axes, "mean of the training set")[0, 1] == drawn.MEANS[i]


def test_a_training():
    top, below = scores.training_figure(drawn.METRICS).axes
    loss = np.array([float(row["loss"]) for row in drawn.METRICS])
    assert (top.lines[0].get_ydata() == loss).all()
    wanted = [(n, loss[n - 2 : n + 1].mean()) for n in range(2, 150)]  # 150 // 50 steps
    np.testing.assert_allclose(curve(top, "training"), wanted)
    np.testing.assert_allclose(curve(top, "validation"), [(0, 2), (50, 1.5), (100, 1)])
    np.testing.assert_allclose(curve(top, "best: 1 after step 101"), [(100, 1)])
    np.testing.assert_allclose(below.lines[0].get_ydata(), 1e-4 * (150 - np.arange(150)))
    assert below.get_ylim()[0] == 0


def test_error_bars():
    pulls = (drawn.NETWORK.mean - drawn.TRUTH) / drawn.SIGMA
    pulls[:3] = 7.0, -6.0, 5.5  # they are counted in the outermost bins
    mean = drawn.TRUTH + pulls * drawn.SIGMA
    found = Predictions(drawn.NAMES, drawn.TRUTH, mean, drawn.SIGMA)
    for axes, pull in zip(scores.calibration_figure(found).axes, pulls.T, strict=True):
        bars = [(b.get_x(), b.get_x() + b.get_width(), b.get_height()) for b in axes.patches]
        low, high, height = np.array(bars).T
        assert (height * (high - low)).sum() == pytest.approx(1)
        assert low[0] == -5 and high[-1] == pytest.approx(5) and axes.get_xlim() == (-5, 5)
        counted = [((pull >= a) & (pull < b)).sum() for a, b in zip(low, high, strict=True)]
        counted[0] += (pull < -5).sum()
        counted[-1] += (pull >= 5).sum()
        np.testing.assert_allclose(height * (high - low) * 300, counted, atol=1e-6)
        x, normal = curve(axes, "unit normal").T
        np.testing.assert_allclose(normal, np.exp(-(x**2) / 2) / (2 * np.pi) ** 0.5)
        (text,) = axes.texts
        for count in (1, 2):
            share = 100 * np.mean(np.abs(pull) <= count)
            assert f"within {count}$\\sigma$: {share:.0f} %" in text.get_text()
        assert f"= {np.mean(pull**2):.3g}" in text.get_text()


def test_phases_of_a_step():
    (axes,) = scores.phases_figure({"read": 3.0, "compute": 5.0}).axes
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([3 / 8, 5 / 8])
    assert [text.get_text() for text in axes.texts] == ["37.5 %", "62.5 %"]


def test_an_emulation():
    axes = emulation.correction_figure(drawn.emulation_rows()).axes
    k = np.array([0.1, 0.5, 2.0])
    for panel in axes[:2]:
        np.testing.assert_allclose(curve(panel, "plain")[:, 1], 1 - 0.4 * k)
        np.testing.assert_allclose(curve(panel, "corrected")[:, 1], 1.1 + 0.2 * k)
        np.testing.assert_allclose(curve(panel, "corrected")[:, 0], k)
        (band,) = panel.patches
        assert (band.get_y(), band.get_height()) == pytest.approx((0.99, 0.02))
    for panel in axes[2:]:
        np.testing.assert_allclose(curve(panel, "corrected")[:, 1], 0.002 * k)
    rows = [
        {"iteration": f"{n}", "loss": f"{2.0**-n}", "held out": "0.5" if n == 3 else ""}
        for n in range(6)
    ]
    (panel,) = emulation.learning_figure(rows).axes
    np.testing.assert_array_equal(curve(panel, "each")[:, 1], 2.0 ** -np.arange(6))
    np.testing.assert_array_equal(curve(panel, "held out"), [(3, 0.5)])


def test_scaling():
    figure = studies.scaling_figure(drawn.groups())
    ranks = np.array([1, 2, 4])
    for curve_number, batch in enumerate((4, 8)):
        seconds = batch * np.array([1.0, 1.1, 1.2])[:, np.newaxis] / ranks**0.8
        speed = ranks**0.8
        ends = np.array([speed / 1.2, speed * 1.2])
        ends[:, 0] = 1  # compared with itself
        for axes, middle, (low, high) in zip(
            figure.axes,
            (seconds[1], 1 / seconds[1], speed, speed / ranks),
            (seconds[[0, 2]], 1 / seconds[[2, 0]], ends, ends / ranks),
            strict=True,
        ):
            container = axes.containers[curve_number]
            np.testing.assert_allclose(
                container.lines[0].get_xydata(), np.stack([ranks, middle], 1)
            )
            np.testing.assert_allclose(bars_of(container), np.stack([low, high], 1))
    np.testing.assert_array_equal(curve(figure.axes[2], "ideal")[:, 1], ranks)


def test_phases_of_a_study():
    (axes,) = studies.phases_figure(drawn.groups()).axes
    read, network = axes.containers
    medians = [batch * 1.1 / ranks**0.8 for batch in (4, 8) for ranks in (1, 2, 4)]
    np.testing.assert_allclose([bar.get_width() for bar in read], 0.3 * np.array(medians))
    np.testing.assert_allclose([bar.get_x() for bar in network], 0.3 * np.array(medians))
    ends = [bar.get_x() + bar.get_width() for bar in network]
    np.testing.assert_allclose(ends, medians)
    assert [text.get_text() for text in axes.get_yticklabels()][0] == "batch 4, 1 rank"
    assert read[0].get_y() > read[-1].get_y()


def test_keys_and_energy():
    seconds, loss = studies.keys_figure(drawn.groups(), ["training.batch"]).axes
    batch = np.array([4, 8])
    for container, ranks in zip(seconds.containers, (1, 2, 4), strict=True):
        wanted = np.stack([batch, 1.1 * batch / ranks**0.8], 1)
        np.testing.assert_allclose(container.lines[0].get_xydata(), wanted)
        np.testing.assert_allclose(bars_of(container), wanted[:, [1]] * [[1 / 1.1, 1.2 / 1.1]])
    np.testing.assert_allclose(bars_of(loss.containers[0]), [[0.4, 0.42], [0.8, 0.82]])
    energy, power = studies.energy_figure(drawn.groups()).axes
    np.testing.assert_allclose(energy.containers[0].lines[0].get_ydata(), [11, 21, 41])
    np.testing.assert_allclose(bars_of(energy.containers[0]), [[10, 12], [20, 22], [40, 42]])
    np.testing.assert_allclose(power.containers[1].lines[0].get_ydata(), [5, 10, 20])


def test_the_history_of_a_tuning():
    (axes,) = tuning.history_figure(drawn.TRIALS, "loss").axes
    values = [trial.value for trial in drawn.TRIALS]
    np.testing.assert_array_equal(curve(axes, "complete"), [*enumerate(values[:11])])
    np.testing.assert_array_equal(curve(axes, "pruned"), [(11, 0.2)])
    best = [0.9, 0.5, 0.5, 0.4, 0.4, 0.4, 0.3, 0.3, 0.3, 0.3, 0.3]
    np.testing.assert_array_equal(curve(axes, "best so far")[:, 1], best)
    assert axes.get_ylim()[1] < 40 and [*curve(axes, "above the axis")[:, 0]] == [7]
    assert curve(axes, "without a value")[0, 0] == 12 < axes.get_xlim()[1]


def test_importances():
    (axes,) = tuning.importances_figure({"a": 0.7, "b": 0.3}, "loss").axes
    assert [bar.get_width() for bar in axes.patches] == [0.3, 0.7]
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert names == ["b", "a"] and {text.get_text() for text in axes.texts} == {" 0.70", " 0.30"}


def test_parallel_coordinates():
    figure = tuning.parallel_figure(drawn.TRIALS, drawn.SPACE, "loss")
    axes, bar = figure.axes
    lines = [line for line in axes.lines if len({*line.get_xdata()}) == 2]
    complete = [trial.value for trial in drawn.TRIALS if trial.state == "complete"]
    low, high = min(complete), np.quantile(complete, 0.9)
    assert bar.yaxis.get_view_interval() == pytest.approx((low, high))
    found = {(*np.round(line.get_ydata(), 6), line.get_color()) for line in lines}
    for trial in drawn.TRIALS:
        rate, network = trial.values.values()
        heights = (np.log10(rate) + 5) / 4, "abc".index(network) / 2
        colour = figures.MUTED
        if trial.state == "complete":
            colour = colormaps["viridis_r"]((trial.value - low) / (high - low))
        assert (*np.round(heights, 6), colour) in found
    assert len(lines) == len(drawn.TRIALS)
