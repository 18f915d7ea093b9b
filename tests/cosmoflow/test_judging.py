"""Predictions judged: scores against theory, collapse found, baselines, tables and figures."""

import csv
import io
import json
import math

import numpy as np
import pytest
from rich.console import Console

from flowpm_dist.cosmoflow.evaluation import results
from flowpm_dist.cosmoflow.scores import baselines, figures, judging
from flowpm_dist.cosmoflow.scores.baselines import Mean, RidgeOnPower, SmallNetwork
from flowpm_dist.cosmoflow.scores.judging import (
    Features,
    LearningCurve,
    Predictions,
    difference,
    differences_from,
    score,
)
from flowpm_dist.cosmoflow.training import held_out
from flowpm_dist.io.figures import save_figure

NAMES = ("Omega_m", "sigma8", "n_s")
MEANS = np.array([0.30, 0.865, 0.95])
WIDTHS = np.array([0.05, 0.085, 0.05])


def test_a_universe_without_galaxies_has_a_logarithm_of_its_power(tmp_path):
    power = np.array([[2.0, 30.0], [0.0, 0.0], [0.1, 0.0]])
    rest = {"histogram": np.zeros((3, 1)), "parameters": np.zeros((3, 1)), "names": ["a"]}
    for name, values in {"some": power, "none": 0 * power}.items():
        np.savez(tmp_path / f"{name}.npz", power=values, **rest)
    some, none = (held_out.features(tmp_path / f"{name}.npz") for name in ("some", "none"))
    expected = np.log10([[2, 30], [1, 1], [0.1, 1]])
    np.testing.assert_allclose(some.log_power, expected, rtol=1e-15)
    assert not none.log_power.any()


def targets(count: int, seed: int = 0) -> np.ndarray:
    return MEANS + WIDTHS * np.random.default_rng(seed).uniform(-1, 1, (count, 3))


def predictions(count=200, error=0.1, with_sigma=True, seed=1) -> Predictions:
    """Gaussian errors of a known sigma, a share `error` of the half width of the prior."""
    truth = targets(count)
    sigma = np.broadcast_to(error * WIDTHS, truth.shape)
    mean = truth + sigma * np.random.default_rng(seed).standard_normal(truth.shape)
    return Predictions(NAMES, truth, mean, sigma if with_sigma else None)


def features(count: int, seed: int, truth_of) -> Features:
    """Random inputs and the truth `truth_of` makes of log_power [n, 6] and histogram [n, 4]."""
    rng = np.random.default_rng(seed)
    log_power, histogram = rng.standard_normal((count, 6)), rng.standard_normal((count, 4))
    truth = truth_of(log_power, histogram)
    return Features(NAMES[: truth.shape[1]], log_power, histogram, truth)


def linear(log_power, histogram):
    weights = np.array([[1, 2, 3, 4, 5, 6], [1, -1, 1, -1, 1, -1]], dtype=float).T
    return 0.3 + 0.01 * log_power @ weights


def test_scores_of_three_samples_worked_by_hand():
    found = score(
        Predictions(
            ("x",),
            truth=np.array([[1.0], [2.0], [6.0]]),
            mean=np.array([[2.0], [2.0], [3.0]]),
            sigma=np.array([[1.0], [1.0], [2.0]]),
        ),
        train_mean=np.array([2.0]),
    )["x"]
    # Errors 1, 0, -3; truth about its mean 3: -2, -1, 3; the mean predictor's errors 1, 0, -4.
    assert found.count == 3
    assert found.rmse == pytest.approx(math.sqrt(10 / 3))
    assert found.r2 == pytest.approx(1 - 10 / 14)
    assert found.bias == pytest.approx(-2 / 3)
    assert found.bias_error == pytest.approx(math.sqrt(26 / 3 / 2 / 3))
    assert found.mae == pytest.approx(4 / 3)
    assert found.mae_over_mean == pytest.approx(4 / 5)
    assert found.rmse_over_mean == pytest.approx(math.sqrt(10 / 17))
    assert found.spread == pytest.approx(math.sqrt(2 / 9) / math.sqrt(14 / 3))
    assert found.coverage_1 == pytest.approx(2 / 3)
    assert found.coverage_2 == 1
    assert found.chi2 == pytest.approx((1 + 0 + 9 / 4) / 3)
    assert found.mean_sigma == pytest.approx(4 / 3)
    nll = [0.5, 0, 9 / 8 + math.log(2)]
    assert found.nll == pytest.approx(np.mean(nll) + 0.5 * math.log(2 * math.pi))


def test_r2_is_one_when_perfect_and_zero_for_the_mean():
    truth = targets(50)
    perfect = score(Predictions(NAMES, truth, truth), truth.mean(axis=0))
    naive = np.broadcast_to(truth.mean(axis=0), truth.shape)
    mean = score(Predictions(NAMES, truth, naive), truth.mean(axis=0))
    for name in NAMES:
        assert (perfect[name].r2, perfect[name].rmse) == (1, 0)
        assert mean[name].r2 == pytest.approx(0, abs=1e-12)
        assert mean[name].rmse_over_mean == pytest.approx(1)
        assert mean[name].mae_over_mean == pytest.approx(1)
        assert mean[name].chi2 is None


def test_gaussian_errors_of_known_sigma_are_scored_as_theory_says():
    count, shift = 20_000, 0.2
    found = predictions(count)
    shifted = Predictions(NAMES, found.truth, found.mean + shift * found.sigma, found.sigma)
    scores, biased = score(found, MEANS), score(shifted, MEANS)
    for name, sigma in zip(NAMES, 0.1 * WIDTHS, strict=True):
        one = scores[name]
        # Five standard deviations of each estimate.
        assert one.rmse == pytest.approx(sigma, rel=5 / math.sqrt(2 * count))
        assert abs(one.bias) < 5 * one.bias_error
        assert one.bias_error == pytest.approx(sigma / math.sqrt(count), rel=0.03)
        assert one.coverage_1 == pytest.approx(0.6827, abs=5 * math.sqrt(0.22 / count))
        assert one.coverage_2 == pytest.approx(0.9545, abs=5 * math.sqrt(0.044 / count))
        assert one.chi2 == pytest.approx(1, abs=5 * math.sqrt(2 / count))
        entropy = 0.5 * math.log(2 * math.pi * math.e * sigma**2)
        assert one.nll == pytest.approx(entropy, abs=5 * math.sqrt(0.5 / count))
        assert biased[name].bias - one.bias == pytest.approx(shift * sigma)


def test_bootstrap_error_of_the_rmse_is_that_of_gaussian_errors_and_repeats():
    found = predictions(2000)
    scores = score(found, MEANS)
    for name, sigma in zip(NAMES, 0.1 * WIDTHS, strict=True):
        # sigma / sqrt(2 n), itself known to 1 / sqrt(2 x 400 resamples) = 3.5 %.
        assert scores[name].rmse_error == pytest.approx(sigma / math.sqrt(4000), rel=0.18)
    assert scores == score(found, MEANS)


def test_parts_of_one_universe_count_once():
    """Eight copies of each sample, in any order, tell no more than one."""
    one, other = predictions(60), predictions(60, error=0.3, seed=2)
    order = np.concatenate([np.arange(60), np.random.default_rng(1).permutation(420) % 60])
    parts = [
        Predictions(NAMES, found.truth[order], found.mean[order], found.sigma[order])
        for found in (one, other)
    ]
    wanted, found = score(one, MEANS), score(parts[0], MEANS)
    for name in NAMES:
        for key in ("rmse_error", "r2_error", "bias_error"):
            assert getattr(found[name], key) == pytest.approx(getattr(wanted[name], key))
        error = difference(*parts)[name].rmse_error
        assert error == pytest.approx(difference(one, other)[name].rmse_error)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mean": np.zeros((4, 2))}, "mean has shape"),
        ({"sigma": np.zeros((4, 3))}, "12 values of sigma are not positive"),
        ({"mean": np.full((4, 3), np.nan)}, "not finite in 4 of 4"),
        ({"truth": np.ones((1, 3)), "mean": np.ones((1, 3))}, "at least two"),
    ],
)
def test_predictions_that_cannot_be_judged_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Predictions(**{"names": NAMES, "truth": targets(4), "mean": targets(4), **change})


def test_a_parameter_that_never_varies_is_refused():
    with pytest.raises(ValueError, match="Omega_m is 1 in all samples"):
        score(Predictions(NAMES, np.ones((4, 3)), targets(4)), MEANS)


def test_the_error_of_a_difference_is_that_of_paired_samples():
    """By error propagation: of RMSE_2 - RMSE_1, the mean of (e_2^2 - e_1^2) / (2 RMSE)."""
    count, rng = 4000, np.random.default_rng(5)
    truth = targets(count)
    hard = WIDTHS * rng.standard_normal((count, 3))
    errors = [hard + 0.1 * scale * WIDTHS * rng.standard_normal((count, 3)) for scale in (1, 3)]
    methods = [Predictions(NAMES, truth, truth + error) for error in errors]
    found, back = difference(*methods), difference(*reversed(methods))
    scores = [score(method, MEANS) for method in methods]
    for i, name in enumerate(NAMES):
        one, other = (of_method[name] for of_method in scores)
        assert found[name].rmse == pytest.approx(other.rmse - one.rmse)
        assert found[name].r2 == pytest.approx(one.r2 - other.r2)
        spread = np.std(errors[1][:, i] ** 2 - errors[0][:, i] ** 2) / math.sqrt(count)
        assert found[name].rmse_error == pytest.approx(spread / (one.rmse + other.rmse), rel=0.2)
        assert found[name].rmse_error < 0.5 * math.hypot(one.rmse_error, other.rmse_error)
        assert found[name].better > 0.95 and back[name].better < 0.05
        assert back[name].r2 == -found[name].r2
    same = difference(methods[0], methods[0])["sigma8"]
    assert (same.r2, same.r2_error, same.rmse, same.rmse_error, same.better) == (0, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="only predictions for the same samples"):
        difference(methods[0], predictions(count - 1))


def test_differences_are_told_for_each_parameter():
    methods = {"network": predictions(), "ridge": predictions(error=0.3, seed=2)}
    found = differences_from("network", methods)
    assert list(found) == ["ridge"]
    rows = results.markdown_of_differences("network", found).splitlines()
    assert [row.split("|")[1:3] for row in rows[2:]] == [[f" {n} ", " ridge "] for n in NAMES]
    said = found["ridge"]["n_s"].sentence("n_s", "network", "ridge")
    r2 = score(methods["network"], MEANS)["n_s"].r2 - score(methods["ridge"], MEANS)["n_s"].r2
    assert said.startswith(f"n_s: R² of network minus R² of ridge: {r2:+.3f} ± ")


def test_collapse_is_found_where_it_is_and_not_elsewhere():
    good = predictions(error=0.2)
    assert "better than by the mean" in judging.describe_collapse(good, MEANS)

    jitter = 0.02 * WIDTHS * np.random.default_rng(3).standard_normal(good.truth.shape)
    constant = Predictions(NAMES, good.truth, MEANS + jitter)
    said = judging.describe_collapse(constant, MEANS)
    assert said.startswith("All parameters: the network has collapsed to the mean")

    weak = Predictions(NAMES, good.truth, np.where([True, True, False], good.mean, constant.mean))
    said = judging.describe_collapse(weak, MEANS)
    assert said.startswith("No better than the mean predictor: n_s (R^2 = ")
    assert "sigma8" not in said and "collapsed" not in said


def test_predictions_unrelated_to_the_truth_are_no_collapse_to_the_mean_but_no_better():
    shuffled = Predictions(NAMES, targets(300), targets(300, seed=9))
    said = judging.describe_collapse(shuffled, MEANS)
    assert said.startswith("No parameter is predicted better") and "collapsed" not in said


def test_an_honest_weak_regressor_is_not_called_collapsed():
    # The best predictor from x of truth = x + noise explains 20 % of the variance.
    rng = np.random.default_rng(4)
    x, noise = rng.standard_normal((2, 2000, 3))
    weak = Predictions(NAMES, math.sqrt(0.2) * x + math.sqrt(0.8) * noise, math.sqrt(0.2) * x)
    assert "All parameters are predicted better" in judging.describe_collapse(weak, np.zeros(3))


def both_scores() -> dict:
    return {
        "network": score(predictions(error=0.1), MEANS),
        "mean": score(Predictions(NAMES, targets(200), np.tile(MEANS, (200, 1))), MEANS),
    }


def test_tables_hold_every_method_of_every_parameter():
    scores = both_scores()
    rows = results.table(scores)
    assert [(row["parameter"], row["method"]) for row in rows] == [
        (name, method) for name in NAMES for method in scores
    ]
    lines = results.markdown(scores).splitlines()
    assert len(lines) == 2 + 6
    assert len({line.count("|") for line in lines}) == 1
    found = scores["network"]["Omega_m"]
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells[:2] == ["Omega_m", "network"]
    value, error = map(float, cells[2].split("±"))
    assert value == pytest.approx(found.rmse, abs=0.05 * found.rmse_error)
    assert error == pytest.approx(found.rmse_error, rel=0.05)
    assert lines[3].rstrip(" |").endswith("-"), "the mean has no error bars here"

    shown = shown_at(scores, 120)
    assert all(word in shown for word in (*NAMES, "network", cells[2], "bias"))


def shown_at(scores: dict, width: int) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(results.rich_table(scores, width))
    return console.export_text()


def test_a_narrow_terminal_shows_fewer_columns_and_whole_names():
    name = "a method with a rather long name"
    scores = {name: both_scores()["network"]}
    wide, narrow = shown_at(scores, 110), shown_at(scores, 90)
    assert wide.count(name) == narrow.count(name) == len(NAMES)
    assert "bias" in wide
    assert "bias" not in narrow


def test_csv_and_json_hold_the_numbers_unrounded(tmp_path):
    scores = both_scores()
    results.write_csv(scores, tmp_path / "scores.csv")
    with open(tmp_path / "scores.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    plain = json.loads(json.dumps(results.plain(scores)))
    assert len(rows) == 6
    for row in rows:
        expected = scores[row["method"]][row["parameter"]]
        assert float(row["rmse"]) == expected.rmse
        assert plain[row["method"]][row["parameter"]]["r2"] == expected.r2
        assert (row["chi2"] == "") == (expected.chi2 is None)


def test_the_mean_baseline_says_the_training_mean_with_the_spread_as_its_error_bar():
    train, validation, test = (features(n, n, linear) for n in (300, 100, 50))
    found = Mean().fit(train, validation)(test)
    expected = train.truth.mean(axis=0)
    np.testing.assert_allclose(found.mean, np.broadcast_to(expected, found.mean.shape))
    spread = np.sqrt(np.mean((validation.truth - expected) ** 2, axis=0))
    np.testing.assert_allclose(found.sigma[7], spread)


def test_ridge_recovers_a_linear_relation_and_a_product_of_two_bins():
    def product(log_power, histogram):
        return np.stack([linear(log_power, histogram)[:, 0], log_power[:, 1] * log_power[:, 4]], 1)

    train, validation, test = (features(n, n, product) for n in (400, 100, 101))
    found = RidgeOnPower().fit(train, validation)(test)
    np.testing.assert_allclose(found.mean, test.truth, atol=1e-4)


def test_ridge_is_not_misled_by_noise_alone():
    def noise(log_power, histogram):
        return histogram[:, :1]

    train, validation, test = (features(n, n, noise) for n in (60, 200, 201))
    found = score(RidgeOnPower().fit(train, validation)(test), train.truth.mean(axis=0))
    assert found["Omega_m"].rmse_over_mean < 1.05


def test_a_small_network_beats_ridge_where_the_relation_is_far_from_quadratic():
    def wavy(log_power, histogram):
        return 0.3 + 0.05 * np.sin(2.5 * log_power[:, :1])

    train, validation, test = (features(n, n, wavy) for n in (600, 200, 201))
    quick = SmallNetwork(hidden=((64,),), alphas=(1e-4,), seeds=2, epochs=150)
    errors = {
        baseline.name: score(baseline.fit(train, validation)(test), [0.3])["Omega_m"].rmse
        for baseline in (RidgeOnPower(), quick)
    }
    assert errors[quick.name] < 0.6 * errors["ridge on log P(k)"]


def test_the_histogram_is_used_by_the_network_that_has_it_and_only_by_it():
    def hidden(log_power, histogram):
        return 0.3 + 0.05 * histogram[:, :2]

    train, validation, test = (features(n, n, hidden) for n in (300, 100, 101))
    means = train.truth.mean(axis=0)
    settings = {"hidden": ((32,),), "alphas": (1e-4,), "seeds": 1, "epochs": 80}
    seeing = SmallNetwork(histogram=True, **settings)
    blind = SmallNetwork(**settings)
    assert "histogram" in seeing.name and "histogram" not in blind.name
    assert score(seeing.fit(train, validation)(test), means)["sigma8"].r2 > 0.9
    assert score(blind.fit(train, validation)(test), means)["sigma8"].r2 < 0.1


def test_a_network_keeps_its_best_epoch_and_repeats_to_the_bit():
    train, validation, test = (features(n, n, linear) for n in (40, 40, 41))
    network = SmallNetwork(hidden=((32,),), alphas=(1e-4,), seeds=1, epochs=60, patience=60)
    first, again = (network.fit(train, validation) for _ in range(2))
    np.testing.assert_array_equal(first(test).mean, again(test).mean)
    # Every shorter training is a prefix of the longer one, so none can be better on validation.
    errors = []
    for epochs in (5, 20, 60):
        shorter = SmallNetwork(hidden=((32,),), alphas=(1e-4,), seeds=1, epochs=epochs, patience=60)
        scaled = (shorter.fit(train, validation)(validation).mean - validation.truth) / np.std(
            train.truth, axis=0
        )
        errors.append(np.mean(scaled**2))
    assert errors[0] >= errors[1] >= errors[2]


def test_features_that_disagree_are_refused():
    good = features(5, 0, linear)
    with pytest.raises(ValueError, match="histogram has shape"):
        Features(good.names, good.log_power, good.histogram[:4], good.truth)
    with pytest.raises(ValueError, match="log_power has values that are not finite"):
        Features(good.names, np.full((5, 6), -np.inf), good.histogram, good.truth)
    with pytest.raises(ValueError, match="for 3 parameters"):
        Features(NAMES, good.log_power, good.histogram, good.truth)


def test_learning_curve_fits_the_first_simulations_and_falls():
    train, validation, test = (features(n, n, linear) for n in (200, 100, 101))
    chosen = [Mean(), RidgeOnPower()]
    curves = baselines.learning_curve(chosen, train, validation, test, (4, 200))
    ridge = curves["ridge on log P(k)"].errors["Omega_m"]
    assert ridge.shape == (2,) and ridge[1] < 0.01 < 0.1 < ridge[0]
    few = Mean().fit(train.first(4), validation)(test)
    expected = score(few, train.truth.mean(axis=0))["sigma8"].rmse_over_mean
    assert curves["mean"].errors["sigma8"][0] == pytest.approx(expected)
    assert curves["mean"].errors["sigma8"][1] == pytest.approx(1)


def test_learning_curve_takes_baselines_that_are_fitted_to_all_simulations(monkeypatch):
    train, validation, test = (features(n, n, linear) for n in (200, 100, 101))
    whole = RidgeOnPower().fit(train, validation)
    sizes, fit = [], RidgeOnPower.fit

    def noted(self, train, validation):
        sizes.append(len(train.truth))
        return fit(self, train, validation)

    monkeypatch.setattr(RidgeOnPower, "fit", noted)
    parts = [RidgeOnPower()], train, validation, test, (4, 200)
    again = baselines.learning_curve(*parts)["ridge on log P(k)"].errors
    taken = baselines.learning_curve(*parts, {"ridge on log P(k)": whole})
    assert sizes == [4, 200, 4]
    for name, errors in taken["ridge on log P(k)"].errors.items():
        np.testing.assert_array_equal(errors, again[name])


def drawn(figure, path) -> list[str]:
    """The texts of a figure that could be written as a PNG."""
    save_figure(figure, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    axes = figure.get_axes()
    return [t.get_text() for a in axes for t in (*a.texts, a.xaxis.label, a.title)]


@pytest.mark.parametrize("with_sigma", [True, False])
def test_the_predicted_figure_shows_the_network_and_the_best_of_the_others(tmp_path, with_sigma):
    methods = {
        "network": predictions(error=0.3, with_sigma=with_sigma),
        "worse": predictions(error=0.5),
        "best": predictions(error=0.1),
    }
    figure = figures.predicted_figure(methods, MEANS)
    texts = drawn(figure, tmp_path / "predicted.png")
    labels = [line.get_label() for line in figure.get_axes()[0].get_lines()]
    assert "network" in labels and "best" in labels and "worse" not in labels
    for name in ("network", "best"):
        assert any(f"{score(methods[name], MEANS)['n_s'].r2:.3f}" in text for text in texts)
    assert r"true $\sigma_8$" in texts
    bars = [len(axes.containers) for axes in figure.get_axes()]
    assert bars == [int(with_sigma)] * 3


def test_the_calibration_figure_states_the_coverage(tmp_path):
    found = predictions(500)
    texts = drawn(figures.calibration_figure(found), tmp_path / "calibration.png")
    coverage = score(found, MEANS)["Omega_m"].coverage_1
    assert any(f"{100 * coverage:.0f} %" in text for text in texts)


def test_the_learning_curve_figure_takes_seeds_and_gaps(tmp_path):
    sizes = np.array([50, 200, 800])
    seeds = np.array([[0.9, 0.8], [0.5, np.nan], [0.3, 0.2]])
    curves = {
        "network": LearningCurve(sizes, dict.fromkeys(NAMES, seeds)),
        "ridge": LearningCurve(sizes[:2], dict.fromkeys(NAMES, np.array([0.4, 0.3]))),
    }
    figure = figures.learning_curve_figure(curves)
    texts = drawn(figure, tmp_path / "curve.png")
    assert r"$\Omega_m$" in texts
    means = {line.get_label(): line for line in figure.get_axes()[1].get_lines()}["network"]
    np.testing.assert_allclose(means.get_ydata(), [0.85, 0.5, 0.25])
    assert figure.get_axes()[0].get_xscale() == figure.get_axes()[0].get_yscale() == "log"


@pytest.mark.parametrize("lowest", [0.1, -0.5])
def test_the_training_figure_marks_the_best_step_and_takes_negative_losses(tmp_path, lowest):
    loss = lowest + np.exp(-np.arange(200) / 50)
    held = {50: "0.8", 100: "0.3", 150: "0.4"}
    rows = [
        {
            "step": f"{n}",
            "loss": f"{x}",
            "rate": f"{200 - n}e-6",
            "validation_loss": held.get(n, ""),
        }
        for n, x in enumerate(loss)
    ]
    figure = figures.training_figure(rows)
    drawn(figure, tmp_path / "training.png")
    top = figure.get_axes()[0]
    assert "best: 0.3 after step 101" in [line.get_label() for line in top.get_lines()]
    assert top.get_yscale() == ("log" if lowest > 0 else "linear")
    drawn(figures.training_figure(rows[:1]), tmp_path / "one.png")


def test_the_phases_figure_writes_shares_of_the_whole(tmp_path):
    phases = {"simulate": 3.0, "read": 0.0, "halo": 1.0, "compute": 5.0, "allreduce": 1.0}
    texts = drawn(figures.phases_figure(phases), tmp_path / "phases.png")
    assert {"30.0 %", "0.0 %", "10.0 %", "50.0 %"} <= set(texts)
