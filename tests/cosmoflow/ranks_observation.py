"""The observed fields of the universes of a training: what the forward model gives for their white
noise and parameters, with noise of the stated variance, on any number of ranks."""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf
from ranks import SIZE, by_rank_zero, process_mesh, shared_folder, solo
from scipy import stats

import flowpm_dist as fpm
from flowpm_dist.cosmoflow.volumes.draws import Lanes, Priors, View
from flowpm_dist.cosmoflow.volumes.generations import HISTOGRAM_EDGES
from flowpm_dist.cosmoflow.volumes.universes import OF_SURVEY, VolumeMaker
from flowpm_dist.initial.conditions import noise_function
from flowpm_dist.observables.noise import FEW, SurveyNoise, counts_of
from flowpm_dist.observables.options import CountsOptions, DensityOptions
from flowpm_dist.statistics.histogram import CellValues

GRID, BATCH, SIGMA, MEAN_COUNT = 8, 2, 0.4, 2.5
MESHES = {1: "row:1", 2: "row:2", 4: "replica:2,row:2"}
RANGES = {"b1": (0.0, 1.0), "sigma8": (0.6, 1.0), "amplitude": (0.8, 1.2)}
RANGES["noise_amplitude"] = (0.5, 1.5)
PRIORS = Priors(RANGES, "sobol", seed=3)
SEEN = {"structure": "1lpt", "redshift_space": "z", "bias": {"b1": 0.5}}
COUNTED = {"kind": "counts", "mean_count": MEAN_COUNT}


def a_mask():
    mask = np.random.default_rng(1).uniform(0.2, 1, [GRID] * 3)
    mask[:, 2, :] = 0
    return mask


@functools.cache
def simulation(mesh):
    return fpm.Simulation(
        fpm.Cosmology.planck18(), grid=GRID, box_size=64.0, steps=[0.1, 1.0], lpt_order=1,
        precision="float64", mesh=mesh,
    )  # fmt: skip


def expected_of(options):
    """What one rank finds by the model itself: the density without noise, and its universes'
    parameters and seeds."""
    model = options.forward_model(simulation(solo()))
    values = PRIORS.draw("train", 0, BATCH)
    found = []
    for row, seed in zip(values, PRIORS.noise_seeds("train", 0, BATCH), strict=True):
        noise = noise_function(model.simulation.box)(np.int64(seed))
        parameters = dict(zip(PRIORS.names, map(tf.constant, row), strict=True))
        del parameters["noise_amplitude"]
        found.append(model(noise, {k: tf.cast(x, tf.float64) for k, x in parameters.items()}))
    normals = [
        noise_function(model.simulation.box)(np.int64(seed))
        for seed in PRIORS.noise_seeds("train", 0, BATCH, OF_SURVEY)
    ]
    return {"density": np.stack(found), "normal": np.stack(normals)}


@pytest.mark.dealt
@pytest.mark.ranks(1, 2, 4)
def test_universes_of_a_training_are_the_models(tmp_path_factory):
    """In redshift space, biased, with amplitude, mask and noise that differ between universes."""
    mesh = process_mesh(MESHES[SIZE])
    path = shared_folder(tmp_path_factory) / f"mask-{mesh.rank}.npy"
    np.save(path, a_mask())
    options = DensityOptions(**SEEN, sigma=SIGMA, mask=path)
    alone = by_rank_zero("models", lambda: expected_of(options))
    own = simulation(mesh.without("replica"))
    noise, lanes = SurveyNoise(options, own.box), Lanes.of(mesh, BATCH)
    model, values = options.forward_model(own), CellValues(positive=False)
    maker = VolumeMaker(model, PRIORS, lanes, ["sigma8"], noise, values)
    made = maker.make("train", 0)
    np.testing.assert_allclose(made.histogram.sum(axis=1), 1, rtol=1e-13)
    np.testing.assert_array_equal(made.edges, values.bins(HISTOGRAM_EDGES))
    values = PRIORS.draw("train", 0, BATCH)
    np.testing.assert_array_equal(made.parameters, values[list(lanes), 1:2])
    assert all(low <= x <= high for (low, high), x in zip(RANGES.values(), values[0], strict=True))
    mask = a_mask()
    with np.errstate(divide="ignore"):
        spread = np.where(mask > 0, SIGMA / np.sqrt(mask), 0)
    observed = np.where(
        mask > 0, alone["density"] + values[:, 3, None, None, None] * spread * alone["normal"], 1
    )
    place = own.box.place[-3:]
    expected = [volume[place] for volume in observed[list(lanes)]]
    np.testing.assert_allclose(made.volumes, expected, rtol=0, atol=1e-11)
    for name in ("density", "normal"):
        universe, other = (x.ravel() for x in alone[name])
        assert abs(np.corrcoef(universe, other)[0, 1]) < 0.5, f"universes share their {name}"
    if SIZE > 1:
        return
    of_counts = CountsOptions(**SEEN, **COUNTED, mask=path)
    expected = MEAN_COUNT * mask * np.maximum(alone["density"][0], 0)
    box, density = own.box_of(300), tf.constant(np.repeat(alone["density"][:1], 300, axis=0))
    counts = SurveyNoise(of_counts, own.box).observe(density, box, range(300), None)
    clear = expected > 0.2  # where the rate is not bent to stay above 0
    means, variances = counts.mean(axis=0)[clear], counts.var(axis=0)[clear]
    error = np.sqrt(expected[clear] / 300)
    assert np.abs((means - expected[clear]) / error).max() < 5
    np.testing.assert_allclose(variances.mean(), expected[clear].mean(), rtol=0.03)
    assert not counts[:, mask == 0].any()
    densities = noise.observe(density, box, range(300), np.full(300, 0.5))
    deviations = (densities - alone["density"][0])[:, mask > 0] / (0.5 * spread[mask > 0])
    assert abs(deviations.var() - 1) < 5 * np.sqrt(2 / deviations.size)
    assert abs(deviations.mean()) < 5 / np.sqrt(deviations.size)


@pytest.mark.ranks(1)
def test_seeds_are_of_one_universe_and_one_purpose():
    streams = itertools.product(("train", "validation", "test"), ((), (OF_SURVEY,)))
    seeds = np.concatenate([PRIORS.noise_seeds(stream, 0, 50, *key) for stream, key in streams])
    assert len(np.unique(seeds)) == seeds.size


@pytest.mark.ranks(1)
def test_counts_are_the_inverse_distribution():
    """Of rates on both sides of where the way to find them changes, and of 0."""
    rng = np.random.default_rng(4)
    density, normal = rng.uniform(0.2, 8, [2, 20, 20, 20]), rng.normal(size=[2, 20, 20, 20])
    mask = np.ones([20, 20, 20])
    mask[0] = 0
    counts = counts_of(tf.constant(density), 20.0, mask, normal)
    rate = 20 * mask * density
    expected = np.where(rate > 0, stats.poisson.ppf(stats.norm.cdf(normal), rate), 0)
    # Densities of 0.2 and more are bent by 1e-6 at most, which moves a count now and then.
    assert np.mean(counts != expected) < 1e-4 and np.abs(counts - expected).max() <= 1
    assert rate.max() > FEW > np.quantile(rate, 0.2)


@pytest.mark.ranks(1)
def test_a_line_of_sight_stays_where_it_is():
    rng = np.random.default_rng(2)
    views = [View.draw(rng, GRID, True, "y") for _ in range(60)]
    assert {view.axes for view in views} == {(0, 1, 2), (2, 1, 0)}
    assert {view.flips for view in views} == set(itertools.product((1, -1), repeat=3))
