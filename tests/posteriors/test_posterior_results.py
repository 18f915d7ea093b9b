"""What commands are asked for, judge and keep of posteriors; the exact ones of test_posteriors."""

import re
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom, binomtest, norm

from flowpm_dist.cosmoflow.evaluation.posterior_fits import not_uniform, own_answers
from flowpm_dist.cosmoflow.evaluation.posteriors import PosteriorResults, Question, VolumePosterior
from flowpm_dist.cosmoflow.evaluation.summaries import SplitSummaries
from flowpm_dist.cosmoflow.evaluation.trainings import PosteriorError, posterior_options
from flowpm_dist.cosmoflow.scores.judging import Predictions, mean_difference
from flowpm_dist.cosmology.options import UniformPriors
from flowpm_dist.io.files import UnreadableError
from flowpm_dist.jobs.folder import OutputError
from flowpm_dist.posteriors import figures
from flowpm_dist.posteriors.calibration import LEVELS, Answers, calibration_of
from flowpm_dist.posteriors.heads import Posterior
from flowpm_dist.posteriors.novelty import FeatureDensity
from flowpm_dist.posteriors.options import HEADS
from flowpm_dist.statistics.register import STATISTICS
from tests.posteriors.test_posteriors import PRIORS, answers, fitted


def test_parameters_that_are_not_drawn_from_the_prior_are_told():
    """As the logarithms of feedback's strength are in tables of others; a Latin hypercube is."""
    priors = UniformPriors({"Omega_m": (0.1, 0.5), "A_SN1": (0.25, 4.0)})
    even = 0.1 + 0.4 * (np.arange(200) + 0.5) / 200
    logs = 0.25 * 16 ** np.random.default_rng(0).random(200)
    assert not_uniform(priors, np.stack([even, (even - 0.1) * 3.75 / 0.4 + 0.25], 1)) == []
    drawn = priors.low + (priors.high - priors.low) * np.random.default_rng(3).random((60, 2))
    assert not_uniform(priors, np.repeat(drawn, 64, axis=0)) == [], "64 parts of each universe"
    (message,) = not_uniform(priors, np.stack([even, logs], 1))
    assert message.startswith("Values of A_SN1 are not spread evenly")


def test_the_posteriors_that_a_loss_has_trained():
    """99 % of a Gaussian and 1 % of the prior, for each parameter separately."""
    one = UniformPriors({"sigma8": (0.6, 1.0)})
    axis = 0.6 + 0.4 * (np.arange(4000) + 0.5) / 4000
    same = np.ones((4000, 1))
    found = own_answers(Predictions(("sigma8",), axis[:, np.newaxis], 0.8 * same, 0.01 * same), one)
    assert np.exp(found.gain).mean() == pytest.approx(1, abs=1e-6)
    assert found.gain[0] == pytest.approx(np.log(0.01)), "the truth is 20 error bars off"
    assert found.gain[2000] == pytest.approx(
        np.log(0.99 * norm.pdf(0) * 0.4 / 0.01 + 0.01), rel=1e-3
    )
    far = np.abs(found.samples - 0.8) > 0.06
    assert far.mean() == pytest.approx(0.01 * 0.28 / 0.4, rel=0.02)
    assert own_answers(Predictions(("sigma8",), same, same), one) is None


def results(judged_by: str) -> PosteriorResults:
    """Of two heads that fail the tests of ranks and of TARP."""
    one = calibration_of(answers(60), np.arange(60))
    failed = replace(one, ranks_p=np.array([0.5, 0.004, 0.5]), tarp_p=0.0001)
    found = {("network", "flow"): failed, ("power", "gaussian"): failed}
    errors = {key: np.array([0.1, 0.2, 0.3]) for key in found}
    return PosteriorResults(("network", "flow"), found, errors, {}, {}, {}, judged_by)


def test_posteriors_are_called_wrong_by_the_number_of_their_tests():
    """Three of ranks, one of TARP, and of two levels the coverage of three and of all together."""
    said = results("test").sentences()
    assert len(said) == 2 and all("below 0.01 / 12, the number of its tests" in one for one in said)
    assert "for all parameters together: P = 0.0001" in said[0] and "see tarp.png" in said[0]
    assert "see posteriors.md" in said[1], "figures have the last head alone"
    failed = {
        k: replace(v, ranks_p=v.ranks_p / 10, tarp_p=0.5)
        for k, v in results("test").calibrations.items()
    }
    alone = replace(results("test"), calibrations=dict([*failed.items()][:1]))
    assert alone.sentences()[0].startswith("Posteriors of network (flow) are not right for sigma8")
    assert alone.sentences()[0].endswith("see ranks.png.")


def normal_answers(count: int, correlated: bool, seed: int) -> Answers:
    """Exact normal posteriors, far from the edges of the priors."""
    rng = np.random.default_rng(seed)
    flat = UniformPriors(dict.fromkeys("abc", (0.0, 1.0)))
    factor = np.linalg.cholesky(0.9 * np.ones((3, 3)) + 0.1 * np.eye(3)) if correlated else 1.0
    truth, samples = (rng.standard_normal(s) for s in ((count, 1, 3), (count, 50, 3)))
    truth, samples = (0.5 + 0.05 * (x @ factor if correlated else x) for x in (truth, samples))
    return Answers(flat, truth[:, 0], samples, np.zeros(count))


@pytest.mark.parametrize("correlated", [False, True])
def test_the_test_of_the_coverage_rejects_exact_posteriors_at_the_nominal_rate(correlated):
    """A binomial P-value has steps: the rate of the test of a parameter is known exactly."""
    repeats, count, nominal = 150, 100, 0.05
    found = [
        calibration_of(normal_answers(count, correlated, n), np.arange(count), n)
        for n in range(repeats)
    ]
    rates = np.mean([one.coverage_p < nominal for one in found], axis=0)  # [level, column]
    hits = np.arange(count + 1)
    for rate, level in zip(rates, LEVELS, strict=True):
        p = np.array([binomtest(int(n), count, level).pvalue for n in hits])
        exact = binom.pmf(hits, count, level)[p < nominal].sum()
        assert 0.015 < exact <= nominal
        errors = 4 * np.sqrt(exact / repeats)
        np.testing.assert_allclose(rate[:3], exact, atol=errors)
        # Normal, and its error is not below that of independent parameters.
        assert 0.005 < rate[3] < nominal + errors
    alarms = [(one.coverage_p < 0.01 / one.coverage_p.size).any() for one in found]
    assert np.mean(alarms) < 0.01 + 4 * np.sqrt(0.01 / repeats)


@pytest.mark.parametrize(("widen", "by"), [(1.15, 0.15), (0.85, -0.15)])
def test_a_width_that_is_wrong_by_15_percent_is_found_out(widen, by):
    found = calibration_of(answers(512, widen=widen), np.arange(512))
    limit = 0.01 / found.tests
    assert found.coverage_p[0, 3] < limit, "all parameters together"
    assert found.ranks_p.min() > limit, "the test of the ranks hardly notices it"
    # The error of a share as that of a width: by the slope of the normal distribution.
    error = found.coverage_error[0, 3] / (2 * norm.pdf(1) * widen)
    assert found.too_wide(0, 3) == pytest.approx(by, abs=3 * error)


def test_parts_of_a_universe_count_as_one_in_the_test_of_the_coverage():
    wide = answers(128, widen=1.3)
    parts = np.repeat(np.arange(128), 8)
    again = Answers(wide.priors, wide.truth[parts], wide.samples[parts], wide.gain[parts])
    once, several = calibration_of(wide, np.arange(128)), calibration_of(again, parts)
    # The random part of a rank among 300 moves few of 128 truths.
    np.testing.assert_allclose(several.coverage, once.coverage, atol=2 / 128)
    np.testing.assert_allclose(several.coverage_error, once.coverage_error, rtol=0.03)
    np.testing.assert_allclose(np.log(several.coverage_p), np.log(once.coverage_p), atol=1.5)


@pytest.mark.parametrize(("widen", "said"), [(1.15, "wide"), (0.85, "narrow")])
def test_a_width_that_is_wrong_by_15_percent_is_said_in_a_sentence(widen, said):
    one = calibration_of(answers(512, widen=widen), np.arange(512))
    of = {("network", "flow"): one}
    found = PosteriorResults(("network", "flow"), of, dict.fromkeys(of, np.ones(3)), {}, {}, {})
    (message,) = [x for x in found.sentences() if "all parameters together" in x and "68.3%" in x]
    share = f"{one.coverage[0, 3]:.3f}±{one.coverage_error[0, 3]:.3f}"
    match = re.fullmatch(
        rf"Posteriors of network \(flow\) are about (\d+)% too {said} for all parameters together: "
        rf"{share} of the truths are in the central 68.3%, and P = \S+ is below 0.01 / 12, the "
        "number of its tests.",
        message,
    )
    assert match is not None and 8 <= int(match[1]) <= 22
    assert share in found.markdown() and f"{one.coverage_p[0, 3]:.2g}" in found.markdown()
    kept = found.numbers()["scores"][0]["coverage_0.683_p"]
    assert kept["all parameters together"] == one.coverage_p[0, 3] and len(kept) == 4


def test_the_validation_set_gives_no_p_values():
    tested, untested = results("test"), results("validation")
    assert "0.0001" in tested.markdown() and "±0.2" in tested.markdown()
    assert "0.0001" not in untested.markdown() and untested.sentences() == []
    assert "ranks_p" in tested.numbers()["scores"][0]
    assert not [name for name in untested.numbers()["scores"][0] if name.endswith("_p")]
    assert untested.numbers()["scores"][0]["rmse_error"]["n_s"] == 0.3
    figure = figures.rank_figure({"x": tested.calibrations["network", "flow"]}, tested=False)
    assert not any(axes.get_title(loc="right") for axes in figure.axes)


@pytest.mark.parametrize("kept", [0, 0.5, 0.999])
def test_files_that_were_cut_short_are_told(tmp_path, kept):
    rng, path = np.random.default_rng(0), tmp_path / "kept.npz"
    density = FeatureDensity.of(rng.standard_normal((40, 3)), rng.standard_normal((9, 3)))
    density.save(path)
    np.testing.assert_array_equal(FeatureDensity.load(path).known, density.known)
    summary = SplitSummaries(rng.random((9, 3)), {"power": rng.random((9, 4))}, 7)
    for write, read in (
        (density.save, FeatureDensity.load),
        (fitted("gaussian").save, Posterior.load),
        (summary.write, SplitSummaries.read),
    ):
        write(path)
        whole = path.read_bytes()
        path.write_bytes(whole[: int(kept * len(whole))])
        with pytest.raises(UnreadableError, match=r"kept.npz cannot be read .*missing or damaged"):
            read(path)


def test_a_posterior_replaces_only_that_of_the_same_volume(tmp_path):
    question = Question("/data/one/density.npy", "/data/run")
    posterior = VolumePosterior("flow", PRIORS, answers(1).samples[0], question, 8)
    posterior.write(tmp_path)
    posterior.write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"samples.npz", "corner.png"}
    with np.load(tmp_path / "samples.npz") as held:
        assert str(held["volume"]) == question.volume and int(held["step"]) == 8
    for other in (
        replace(question, volume="/data/two/density.npy"),
        replace(question, training="/x"),
    ):
        with pytest.raises(
            OutputError, match="of /data/one/density.npy from /data/run: give another"
        ):
            replace(posterior, question=other).write(tmp_path)


def test_summaries_of_a_users_own_code_are_not_kept(tmp_path, monkeypatch):
    """The code may change, and the version of our statistics would not."""
    monkeypatch.setitem(STATISTICS, "total", lambda density: density.numpy().sum())
    monkeypatch.setitem(STATISTICS, "voids", "voids:emptiness")
    parts = dict.fromkeys(("power", "peaks", "total", "voids", "voids:emptiness"), np.ones((2, 3)))
    SplitSummaries(np.ones((2, 1)), parts, 7).write(tmp_path / "test.npz")
    assert set(SplitSummaries.read(tmp_path / "test.npz").parts) == {"power", "peaks"}


def test_what_a_command_is_asked_for():
    chosen = posterior_options(["flow"], ["power+tests.posteriors.test_posteriors:total", "power"])
    assert chosen.heads == ("flow",) and chosen.statistics == (
        "power",
        "tests.posteriors.test_posteriors:total",
    )
    assert posterior_options().baselines[-1] == ("power", "histograms", "bispectrum")
    assert posterior_options().heads == tuple(HEADS)
    of_maps = posterior_options(None, None, of_maps=True)
    assert of_maps.of_maps and of_maps.baselines[-1] == ("power", "peaks", "histograms")
    twice = posterior_options(["flow", "flow"], ["power+power", "power"])
    assert twice.heads == ("flow",) and twice.baselines == (("power",),)
    with pytest.raises(
        PosteriorError, match="no head 'nowhere:flow': there is no module 'nowhere'"
    ):
        posterior_options(["nowhere:flow"])
    with pytest.raises(PosteriorError, match="no head 'gausian'; did you mean gaussian"):
        posterior_options(["gausian"])
    with pytest.raises(PosteriorError, match="no statistic 'spectrum'"):
        posterior_options(None, ["power+spectrum"])


def test_a_difference_of_means_is_that_of_pairs():
    rng = np.random.default_rng(0)
    hard = 10 * rng.standard_normal(500)
    first, second = hard + 0.3 + 0.1 * rng.standard_normal(500), hard
    found = mean_difference(first, second, np.arange(500))
    assert found.value == pytest.approx((first - second).mean())
    assert found.error == pytest.approx(0.1 / np.sqrt(500), rel=0.2) and found.larger == 1
    parts = np.repeat(np.arange(500), 4)
    again = mean_difference(first[parts], second[parts], parts)
    assert again.error == pytest.approx(found.error, rel=1e-9)
