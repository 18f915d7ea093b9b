"""The order of an in situ training: all universes equally often, in batches that mix the prior."""

import numpy as np
import pytest
from scipy.stats import kstest, norm

from flowpm_dist.cosmoflow.volumes.draws import (
    Draws,
    Priors,
    most_filled,
    summary_of_draws,
    summary_of_passes,
)
from flowpm_dist.cosmoflow.volumes.records import batch_positions
from flowpm_dist.posteriors.heads import unbounded

CASES = {
    "all kept": Draws(simulations=48, reuse=3, buffer=48, fill=16, batch=4, seed=1),
    "all made before": Draws(simulations=48, reuse=3, buffer=48, fill=48, batch=4, seed=1),
    "chunks that do not divide": Draws(44, reuse=5, buffer=44, fill=12, batch=4, seed=2),
    "small buffer": Draws(simulations=48, reuse=3, buffer=20, fill=12, batch=4, seed=1),
    "small buffer, odd chunks": Draws(simulations=52, reuse=4, buffer=24, fill=12, batch=4, seed=0),
    "nothing to choose from": Draws(simulations=12, reuse=2, buffer=4, fill=4, batch=4, seed=0),
    "each once": Draws(simulations=40, reuse=1, buffer=40, fill=8, batch=4, seed=0),
    "random batches": Draws(48, reuse=3, buffer=48, fill=16, batch=4, seed=1, balanced=False),
    "random, small buffer": Draws(48, reuse=3, buffer=20, fill=12, batch=4, seed=1, balanced=False),
}


def steps_of(draws: Draws) -> int:
    """The number of steps in which each universe is drawn `reuse` times."""
    return draws.generations * draws.reuse


def universes(draws: Draws, step: int) -> np.ndarray:
    """The numbers of the universes in the batch of a step."""
    drawn = enumerate(draws.drawn(step))
    return np.array([draws.members(generation)[lane] for lane, generation in drawn])


@pytest.mark.parametrize("draws", CASES.values(), ids=CASES)
def test_each_universe_is_drawn_equally_often_and_from_what_the_buffer_holds(draws):
    kept = draws.buffer // draws.batch
    drawn = []
    for step in range(steps_of(draws)):
        generations, made = draws.drawn(step), draws.made(step)
        assert made - kept <= generations.min() and generations.max() < made
        drawn.append(universes(draws, step))
    counts = np.bincount(np.ravel(drawn), minlength=draws.simulations)
    assert counts.tolist() == [draws.reuse] * draws.simulations
    assert draws.made(steps_of(draws)) * draws.batch == draws.simulations
    assert draws.made(0) * draws.batch == draws.fill
    # A lane keeps its universes, which are on the replica that simulated them.
    lanes = np.transpose(drawn)
    owner = {number: lane for lane, numbers in enumerate(lanes) for number in numbers}
    assert len(owner) == draws.simulations
    assert all(owner[number] == lane for lane, numbers in enumerate(lanes) for number in numbers)


def test_passes_go_on_after_the_last_and_over_what_a_small_buffer_holds():
    for draws in (CASES["all kept"], CASES["small buffer"]):
        kept = draws.buffer // draws.batch
        for number in range(3):
            first = steps_of(draws) + number * kept
            steps = range(first, first + kept)
            found = np.sort(np.ravel([universes(draws, step) for step in steps]))
            last = np.sort([draws.members(g) for g in range(draws.generations)], axis=None)
            np.testing.assert_array_equal(found, last[-draws.buffer :])


def test_a_smaller_number_of_simulations_has_the_first_of_the_same():
    for generation in range(3):
        first = generation * 8
        members = Draws(48, 2, 48, 16, 8, seed=3).members(generation)
        assert sorted(members) == list(range(first, first + 8))
        assert any(members != np.arange(first, first + 8))


PRIORS = {"Omega_m": (0.25, 0.35), "sigma8": (0.78, 0.95)}


def summary_of(sampling, **options):
    """What a training of 1,024 steps of 16 of 2,048 universes states, and its lanes' share."""
    draws = Draws(simulations=2048, reuse=8, fill=256, batch=16, seed=0, **options)
    priors = Priors(PRIORS, sampling, seed=0)
    parameters = priors.draw("train", 0, 2048)
    found = summary_of_draws(draws, parameters, steps_of(draws), priors.names)
    assert found["steps"] == 1024 and found["volumes"] == 2048
    assert found["draws"] == {"min": 8, "median": 8.0, "max": 8}
    drawn = np.array([universes(draws, step) for step in range(steps_of(draws))])
    of_lanes = parameters[drawn].mean(axis=0).var(axis=0) / parameters.var(axis=0)
    return np.array(list(found["spread_of_batch_means"].values())), of_lanes


@pytest.mark.parametrize("sampling", ["sobol", "uniform"])
@pytest.mark.parametrize("buffer", [2048, 512])
def test_random_batches_mix_the_prior(sampling, buffer):
    """Means of batches vary as for independent draws; no lane is limited to a part of the prior."""
    spread, of_lanes = summary_of(sampling, buffer=buffer, balanced=False)
    # Of 1,024 independent batches the variance is known to 4.4 %; a small buffer's chunks of 256
    # are drawn from without replacement; where each covers the prior that takes 1 / 16 of it.
    expected = 15 / 16 if sampling == "sobol" and buffer == 512 else 1
    np.testing.assert_allclose(spread, expected, atol=4 * np.sqrt(2 / 1023))
    assert (of_lanes < 4 / 128).all()  # each lane has 128 universes; in turn they had 98 %


@pytest.mark.parametrize("buffer", [2048, 512])
def test_balanced_batches_cover_the_prior_evenly(buffer):
    """Sixteen neighbours of a Sobol sequence have one value in each sixteenth of each range."""
    spread, of_lanes = summary_of("sobol", buffer=buffer)
    # Random draws from each stratum would have 1 / 256 of the variance of independent ones.
    assert (spread < 1 / 256).all()
    assert (of_lanes < 4 / 128).all()


def test_the_order_follows_from_the_seed():
    one, same, other = (Draws(48, 2, 48, 16, 8, seed=seed) for seed in (3, 3, 4))
    for step in range(12):
        np.testing.assert_array_equal(universes(one, step), universes(same, step))
    assert any((universes(one, step) != universes(other, step)).any() for step in range(3))
    assert sorted(one.drawn(step)[0] for step in range(2)) == [0, 1]
    assert all(len(set(one.drawn(step))) == 1 for step in range(12))
    random = Draws(48, 2, 48, 16, 8, seed=3, balanced=False)
    assert any(len(set(random.drawn(step))) > 1 for step in range(12))


def test_a_look_at_the_buffer_sees_each_universe_once_before_any_again():
    draws = CASES["small buffer"]
    seen = np.array([draws.preview(number, 7) for number in range(5)])
    assert np.sort(seen, axis=0).T.tolist() == [[2, 3, 4, 5, 6]] * 4
    np.testing.assert_array_equal(draws.preview(5, 7), seen[0])
    assert draws.preview(0, 1).tolist() == [0] * 4


def test_summaries_of_a_training_that_has_hardly_begun_and_of_files():
    draws, parameters = CASES["all kept"], np.random.default_rng(0).uniform(size=(48, 1))
    begun = summary_of_draws(draws, parameters, 1, ["h"])
    assert begun["draws"] == {"min": 0, "median": 0.0, "max": 1}
    assert begun["spread_of_batch_means"] is None
    found = summary_of_passes(10, 4, 6)
    counts = np.bincount(batch_positions(10, 0, 24))
    known = {"min": counts.min(), "median": np.median(counts), "max": counts.max()}
    assert found["draws"] == known and (found["steps"], found["volumes"]) == (6, 10)


def test_half_of_a_buffer_makes_room_for_new_universes():
    assert most_filled(48, 48, 4) == 48
    assert most_filled(48, 20, 4) == 12
    assert most_filled(48, 24, 4) == 12


def test_p_values_are_right_on_what_is_judged_by():
    """Of exact posteriors; on universes that fill the prior evenly P would be too large."""

    def uniform(stream):
        found = []
        for seed in range(100):
            priors, rng = Priors({"n_s": (0.9, 1.0)}, "sobol", seed), np.random.default_rng(seed)
            z = unbounded(priors, priors.draw(stream, 0, 128))[:, 0]
            data = z + 3 * rng.standard_normal(128)
            ranks = norm.cdf((z - 0.1 * data) / np.sqrt(0.9))
            found.append(kstest(ranks, "uniform").pvalue)
        return kstest(found, "uniform").pvalue

    assert uniform("test") > 0.01 and uniform("fresh-1") > 0.01
    assert uniform("train") < 1e-6
