"""Counts of galaxies as an observation: each universe of a batch has the galaxies of its halos, by
its own occupation and seed, on any mesh."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from ranks import SIZE, by_rank_zero, process_mesh, solo
from scipy.integrate import quad

import flowpm_dist as fpm
from flowpm_dist.catalogues.abundance import predicted
from flowpm_dist.catalogues.occupation import expected_density, mean_occupation, populate
from flowpm_dist.catalogues.options import HOD
from flowpm_dist.cosmoflow.volumes.generations import HISTOGRAM_EDGES
from flowpm_dist.cosmology.background import Background
from flowpm_dist.grid.field import Field
from flowpm_dist.io.errors import UserError
from flowpm_dist.observables import StructureFormation
from flowpm_dist.observables.options import observation_of
from flowpm_dist.observables.tracers import ObservationError
from flowpm_dist.posteriors.features import measured
from flowpm_dist.statistics.histogram import CellValues
from flowpm_dist.statistics.register import STATISTICS

GRID, SIDE, SEEDS, TIMES = 16, 40.0, (5, 2**63 - 1), [0.8, 1.0]
MESH = {1: "row:1", 2: "row:1,col:2", 4: "replica:2,row:2"}[SIZE]
FINDER = {"minimum": 6, "relaxed": [[30, 0.25]]}
OCCUPATION = {"log_M_min": 12.6, "log_M_0": 12.0, "log_M_1": 13.2, "concentration": 5.0, "seed": 3}
VARIED = {"log_M_min": [12.3, 12.9], "concentration": [4.0, 6.0]}
COSMOLOGIES = [fpm.Cosmology.planck18(), fpm.Cosmology.planck18().replace(sigma8=0.9)]


def simulation(mesh):
    steps = [0.1, 0.4, 0.7, 1.0]
    return fpm.Simulation(COSMOLOGIES[0], GRID, SIDE, steps, precision="float64", mesh=mesh)


def cloud_in_cell(positions):
    """Counts of points by the definition, one point after the other."""
    counts = np.zeros([GRID] * 3)
    for place in positions * (GRID / SIDE):
        low = np.floor(place).astype(int)
        for corner in itertools.product((0, 1), repeat=3):
            share = np.prod(np.where(corner, place - low, 1 - (place - low)))
            counts[tuple((low + corner) % GRID)] += share
    return counts


def expected_counts():
    """What each universe alone has on one rank [universe, time, x, y, z]."""
    volumes = []
    for number, (seed, cosmology) in enumerate(zip(SEEDS, COSMOLOGIES, strict=True)):
        sim = simulation(solo())
        states = sim.run(seed=seed, cosmology=cosmology, outputs=TIMES)
        own = {name: values[number] for name, values in VARIED.items()}
        hod = HOD(**{**OCCUPATION, **own, "seed": (seed + 3) % 2**63})
        for state in states:
            found = fpm.halos(state, **FINDER)
            galaxies = populate(found, hod)
            assert galaxies.total > 5
            rate = float(Background(cosmology).e(state.a))
            places = galaxies["position"].copy()
            places[:, 1] += galaxies["velocity"][:, 1] / (100 * state.a * rate)
            volumes.append(cloud_in_cell(places % SIDE))
    return {"counts": np.reshape(volumes, (2, len(TIMES), GRID, GRID, GRID))}


@pytest.mark.dealt
@pytest.mark.ranks(1, 2, 4)
def test_galaxies_of_a_batch_are_those_of_its_universes():
    expected = by_rank_zero("galaxies", expected_counts)["counts"]
    keys = {"kind": "galaxies", "redshift_space": "y", "redshifts": [0.25, 0.0]}
    options = observation_of({**keys, "halos": FINDER, "galaxies": OCCUPATION})
    model = options.forward_model(simulation(process_mesh(MESH)))
    varied = {name: tf.constant(values, tf.float64) for name, values in VARIED.items()}
    assert model.fitted("alpha") and model.fitted("sigma8") and not model.fitted("amplitude")
    channels = model.at_times(TIMES, SEEDS, COSMOLOGIES, varied)
    for number, field in enumerate(channels):
        np.testing.assert_allclose(field.numpy(), expected[:, number], rtol=0, atol=1e-9)


@pytest.mark.ranks(1)
def test_numbers_that_no_occupation_has_are_refused():
    model = observation_of({"kind": "galaxies"}).forward_model(simulation(solo()))
    with pytest.raises(ValueError, match="alpha = -1"):
        varied = {"alpha": tf.constant([-1.0], tf.float64)}
        model.at_times([1.0], SEEDS[:1], COSMOLOGIES[:1], varied)


class OwnDensity(StructureFormation):
    def density(self, state, axis=None, weights=None):
        return state.density().block


@pytest.mark.ranks(1)
def test_a_universe_without_galaxies_has_statistics():
    """All that networks are compared with: finite features, and a histogram of every cell."""
    counts = np.zeros([2, GRID, GRID, GRID])
    counts[1] = np.random.default_rng(2).poisson(0.3, counts[1].shape)
    field = Field(tf.constant(counts), simulation(solo()).box_of(2), "cic")
    for features in measured(list(STATISTICS), field, CellValues(True, 0.2)).values():
        assert np.isfinite(features).all() and len(features) == 2
    found = CellValues(True, 0.2).histogram(field, HISTOGRAM_EDGES)
    assert (found.counts.sum(axis=-1) == GRID**3).all() and found.counts[1].max() < GRID**3


@pytest.mark.ranks(1)
def test_the_density_of_galaxies_that_is_expected():
    """Against an adaptive integral over log M; about as many as in universes."""
    hod = HOD(log_M_min=13.4, log_M_0=13.4, log_M_1=14.3)
    sim = fpm.Simulation(
        COSMOLOGIES[0], 32, 80.0, fpm.scale_factor_steps(0.1, 1, 5), mesh_factor=2, mesh=solo()
    )

    def integrand(log_mass):
        galaxies = sum(mean_occupation(np.array([10**log_mass]), hod))
        return float(np.log(10) * (predicted(sim.theory, [10**log_mass]) * galaxies)[0])

    expected = expected_density(sim.theory, hod)
    integral = quad(integrand, 10, 16, points=[13.4], epsrel=1e-4)[0]
    np.testing.assert_allclose(expected, integral, rtol=1e-3)
    states = [sim.run(seed=seed) for seed in range(4)]
    found = np.mean([populate(fpm.halos(state), hod).total for state in states]) / 80.0**3
    assert 0.6 < found / expected < 1.5


@pytest.mark.ranks(1)
def test_what_galaxies_cannot_be_made_of():
    keys = {"kind": "galaxies"}
    linear = StructureFormation(has_particles=False)
    with pytest.raises(ObservationError, match="no particles to find halos in"):
        observation_of({**keys, "structure": linear}).forward_model(simulation(solo()))
    with pytest.raises(ObservationError, match="overrides `density`"):
        observation_of({**keys, "structure": OwnDensity()}).forward_model(simulation(solo()))
    with pytest.raises(ObservationError, match="observation.: .*no 'nothere'"):
        observation_of({**keys, "structure": "math:nothere"}).forward_model(simulation(solo()))
    with pytest.raises(UserError, match="observation.galaxies.occupation: .*no 'mine'"):
        own = {**keys, "galaxies": {"occupation": "math:mine"}}
        observation_of(own).forward_model(simulation(solo()))
    model = observation_of(keys).forward_model(simulation(solo()))
    with pytest.raises(ValueError, match="drawn by the seeds of universes"):
        model(tf.zeros([GRID] * 3, tf.float64), {})
