"""Initial conditions from maps of the convergence: gradients, and a mock that is found again."""

import functools
import json

import numpy as np
import pytest
import tensorflow as tf
from derivatives import slope_at_zero
from ranks import SIZE, by_rank_zero, shared_folder
from sky_runs import GRID, SIDE, SkyRuns, cosmology_of, solo

from flowpm_dist import Simulation
from flowpm_dist.cosmology.background import Distances
from flowpm_dist.cosmology.growth import Growth
from flowpm_dist.io.snapshot import load_snapshot
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.observables import ConvergenceModel
from flowpm_dist.observables.lensing.planes import LensPlanes, plane_weights
from flowpm_dist.observables.light_cone import FlatField, LightCone
from flowpm_dist.observables.light_cone.geometry import farthest
from flowpm_dist.observables.light_cone.layers import Layers
from flowpm_dist.reconstruction import EXACT, GaussianMaps, Posterior, Unknowns
from flowpm_dist.reconstruction.folder import ReconstructionFolder
from flowpm_dist.reconstruction.options import ReconstructionOptions
from flowpm_dist.reconstruction.search_session import SearchSession
from flowpm_dist.statistics.angular_spectra import angular_power, octave_edges
from tests.reconstruction.ranks_reconstruction import block_of

CONE = LightCone(FlatField(field_of_view=12.0, pixels=8, z_max=0.25, tiles=3))
RUNS = SkyRuns(CONE, (0.2, 0.5, 0.75, 1.0), plane=0.2, smail=(0.1, 0.23), shift=0.01)
PRIORS = {"Omega_m": (0.2, 0.4), "sigma8": (0.6, 1.0), "noise_amplitude": (0.5, 2.0)}


def model_of(mesh):
    cosmology = cosmology_of(0.31, 0.8)
    simulation = Simulation(
        cosmology, GRID, SIDE, np.array(RUNS.edges), precision="float64", halo=3, mesh=mesh
    )
    return ConvergenceModel(simulation, CONE, RUNS.sources())


def whole(seed):
    return np.random.default_rng(seed).normal(size=[GRID] * 3)


@functools.cache
def evaluated(mesh):
    """A posterior of random maps, a point, and what is found there."""
    model = model_of(mesh)
    data = 0.01 * np.random.default_rng(5).normal(size=[2, 8, 8])
    sigma = np.array([0.004, 0.006])[:, np.newaxis, np.newaxis]
    likelihood = GaussianMaps(model.box, tf.constant(data), sigma)
    posterior = Posterior(model, likelihood, PRIORS)
    point = Unknowns(block_of(whole(1), model.box), tf.constant([-0.5, 0.3, 0.7], tf.float64))
    return posterior, point, posterior.evaluate(point)


@pytest.mark.ranks(1, 2)
def test_gradient_is_the_slope_and_the_same_on_any_mesh(mesh):
    """Through the light cone, by the white noise and by parameters."""
    posterior, point, found = evaluated(mesh)
    box = posterior.space.box

    def alone():
        slope = evaluated(solo())[2].gradient
        loss = evaluated(solo())[2].loss
        return {"loss": loss, "field": slope.field, "parameters": slope.parameters}

    expected = by_rank_zero("convergence", alone)
    np.testing.assert_allclose(found.loss, expected["loss"], rtol=1e-11)
    np.testing.assert_allclose(found.gradient.parameters, expected["parameters"], rtol=1e-9)
    np.testing.assert_allclose(found.gradient.field, block_of(expected["field"], box), atol=1e-9)
    if SIZE == 1:
        nothing = posterior.space.zeros()
        directions = [Unknowns(block_of(whole(2), box), nothing.parameters)]
        directions += [Unknowns(nothing.field, tf.eye(3, dtype=tf.float64)[n]) for n in range(3)]
        for direction in directions:

            def loss(step, direction=direction):
                return posterior.evaluate(point.plus(step, direction)).loss

            slope = float(posterior.space.dot(found.gradient, direction))
            assert slope == pytest.approx(slope_at_zero(loss, 1e-6), rel=2e-6)


@pytest.mark.ranks(1)
def test_the_likelihood_is_that_of_independent_pixels(mesh):
    posterior, point, found = evaluated(mesh)
    likelihood, sigma = posterior.likelihood, np.array([0.004, 0.006])[:, None, None]
    kappa = posterior.model(point.field, posterior.parameters(point)).numpy()
    amplitude = float(posterior.parameters(point)["noise_amplitude"])
    data = 0.01 * np.random.default_rng(5).normal(size=[2, 8, 8])
    expected = 0.5 * np.sum(((kappa - data) / (amplitude * sigma)) ** 2) + 128 * np.log(amplitude)
    assert float(found.data) == pytest.approx(expected, rel=1e-12)
    assert likelihood.count == 128
    information = np.sum(np.ones((8, 8)) / sigma**2) / GRID**3
    assert likelihood.information() == pytest.approx(information, rel=1e-12)
    quiet = GaussianMaps(likelihood.box, tf.constant(data), 1e-4)
    inflations = [each.inflation for each in quiet.easier()]
    assert inflations[0] == pytest.approx(100 * np.sqrt(np.mean((data / 0.01) ** 2)))
    assert inflations[-1] == 1 and min(np.divide(inflations[:-1], inflations[1:])) > 1
    assert likelihood.easier() == [EXACT]


RUN = """
[box]
grid = 16
size = 200.0
[cosmology]
Omega_m = 0.31
Omega_b = 0.049
h = 0.68
n_s = 0.965
sigma8 = 0.8
[evolution]
a_start = 0.3
steps = 2
[observation]
kind = "convergence"
[lightcone]
field_of_view = 20.0
pixels = 8
z_max = 0.2
sources = [{ redshift = 0.15 }, { redshift = 0.2 }]
shape_noise = { sigma_e = 0.26, n_eff = 2.0, seed = 3 }
[data]
mock_seed = 1
[search]
evaluations = 24
"""


@pytest.mark.long
@pytest.mark.ranks(1, 2)
def test_a_mock_is_found_again(mesh, tmp_path_factory):
    """The maps of what is found are nearer to the truth than the data are; and their results.

    On two ranks the search is short: its gradients are the same on any mesh.
    """
    path = shared_folder(tmp_path_factory)
    run_file = path / f"run-{mesh.rank}.toml"
    run_file.write_text(RUN if SIZE == 1 else RUN.replace("evaluations = 24", "evaluations = 3"))
    config, folder = ReconstructionOptions.load(run_file), ReconstructionFolder(path / "found")
    if mesh.rank == 0:
        folder.begin(resume=False)
    mesh.barrier()
    session = SearchSession(config, mesh, folder, Progress(rank=1))
    session.run(resume=False)
    mesh.barrier()
    facts = json.loads(folder.result.read_text())
    if SIZE == 1:
        for row in facts["convergence"]:
            assert row["r found"] > row["r data"] + 0.02, facts["convergence"]
        assert facts["data_per_observed_cell"] < 0.7
    maps, truth = load_snapshot(folder.path / "convergence.zarr"), session.observed.truth.expected
    assert maps.arrays["kappa"].shape == (2, 8, 8)
    np.testing.assert_array_equal(np.swapaxes(maps["data"], -1, -2), session.observed.data)
    table = np.genfromtxt(folder.path / "convergence.csv", delimiter=",", names=True)
    fov = config.lightcone.fov
    power = [angular_power(each, fov, octave_edges(fov, 8)).power for each in truth]
    np.testing.assert_allclose(table["C_ell_truth"], np.concatenate(power), rtol=1e-6)
    assert (folder.path / "convergence.png").stat().st_size > 500


@pytest.mark.ranks(1)
def test_linear_response(mesh):
    """The maps of a wave along an axis, from the planes that `born` would add up."""
    model = model_of(mesh)
    cosmology, box = model.simulation.cosmology, model.box
    layers = Layers.of(box, farthest(CONE.sky, cosmology), CONE.sky.tiles)
    planes = LensPlanes(layers.edges, layers.distances)
    growth = Growth(cosmology).d1(planes.scale_factor(Distances(cosmology)))
    weights = (plane_weights(planes, model.sources, cosmology) * growth).numpy()
    k, chi = 2 * np.pi / SIDE * 3, layers.distances
    along_z = np.array([layers.tiles[tile].axes[2] == 2 for tile in layers.tile])
    squares = 0.0
    for number in range(len(layers.tiles)):
        here = layers.tile == number
        # Of a wave along z, a copy that is observed along another axis shows every layer alike.
        waves = np.exp(1j * np.where(along_z[here], k, 0.0) * chi[here])
        squares += np.mean(np.abs(np.sum(weights[:, here] * waves, axis=1)) ** 2)
    assert along_z.any() and not along_z.all()
    found = model.linear_response({})[3, 0, 0]
    expected = np.sqrt(squares) * model.matter_response({})[3, 0, 0] * model.window()[3, 0, 0]
    assert float(found) == pytest.approx(float(expected), rel=1e-10)
    doubled = {"sigma8": tf.constant(1.6, tf.float64), "Omega_m": tf.constant(0.31, tf.float64)}
    np.testing.assert_allclose(
        model.linear_response(doubled), 2 * model.linear_response({}), rtol=1e-9
    )
