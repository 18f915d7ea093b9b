"""Trainings on maps of weak lensing: what is seen, and one answer on any number of ranks."""

import numpy as np
import pytest
from ranks import RANK, SIZE, by_rank_zero, process_mesh, shared_folder
from run_files import PRIORS
from sky_runs import solo

from flowpm_dist import Cosmology
from flowpm_dist.cosmoflow.evaluation import summaries
from flowpm_dist.cosmoflow.evaluation.evaluation import evaluate
from flowpm_dist.cosmoflow.evaluation.prediction import check_question, predict_volume
from flowpm_dist.cosmoflow.evaluation.trainings import PosteriorOptions
from flowpm_dist.cosmoflow.network import keras_network
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.cosmoflow.scores import baselines
from flowpm_dist.cosmoflow.training.saved import read_training
from flowpm_dist.cosmoflow.volumes import sources
from flowpm_dist.cosmoflow.volumes.draws import Lanes
from flowpm_dist.cosmoflow.volumes.universes import OF_SURVEY, as_maps, maker_of
from flowpm_dist.grid.field import Field
from flowpm_dist.initial.conditions import noise_function
from flowpm_dist.io.labelled import LabelledArray
from flowpm_dist.io.light_cone import write_light_cone
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.observables.convergence_model import ConvergenceModel
from flowpm_dist.observables.light_cone.results import attributes_of
from flowpm_dist.observables.tracers import ObservationError
from flowpm_dist.statistics.angular_spectra import angular_power
from tests.cosmoflow.ranks_training import assert_same, trained_alone, trained_in_two

BATCH, PIXELS = 4, 8
RUN = (
    PRIORS
    + """noise_amplitude = [0.5, 1.5]
targets = ["Omega_m", "sigma8"]
[box]
grid = 8
size = 160.0
[evolution]
a_start = 0.4
steps = 2
[observation]
kind = "convergence"
[lightcone]
field_of_view = 10.0
pixels = 8
z_max = 0.25
tiles = 3
sources = [{ redshift = 0.2 }, { smail = [0.1, 2.0, 1.5], z_max = 0.23 }]
shape_noise = { sigma_e = 0.26, n_eff = 10.0 }
[network]
name = "flowpm_dist.cosmoflow.network.keras_network:map_convolutions"
precision = "float64"
[training]
batch = 4
validate_every = 2
checkpoint_every = 2
[data]
simulations = 8
reuse = 2
validation = 4
test = 8
"""
)

pytestmark = pytest.mark.timeout(300, method="thread")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return shared_folder(tmp_path_factory)


def plan_of(folder, text=RUN):
    path = folder / f"run-{RANK}.toml"
    path.write_text(text)
    return TrainingPlan.load(path)


def alone(plan):
    """Maps without noise, of the light cone of each universe of a generation on a single rank."""
    maker = maker_of(plan, solo(), Lanes(BATCH, 0, BATCH))
    priors, numbers = maker.priors, range(BATCH, 2 * BATCH)
    seeds, rows = (draw("train", BATCH, BATCH) for draw in (priors.noise_seeds, priors.draw))
    sources, alignment = plan.lightcone.population()
    maps, steps = [], set()
    for number, seed, (omega_m, sigma8) in zip(numbers, seeds, rows[:, :2], strict=True):
        simulation = maker.model_of("train", number).simulation
        steps.add(len(simulation.edges) - 1)
        cone = ConvergenceModel.of(simulation, plan.lightcone).cone
        cosmology = Cosmology(**plan.fixed_parameters, Omega_m=omega_m, sigma8=sigma8)
        noise = Field(noise_function(simulation.box)(seed), simulation.box)
        run = {"white_noise": noise, "cosmology": cosmology, "alignment": alignment}
        maps.append(cone.convergence(simulation, sources, **run).kappa.numpy())
    of_noise = priors.noise_seeds("train", BATCH, BATCH, OF_SURVEY)
    return {"kappa": np.stack(maps), "rows": rows, "noise_seeds": of_noise, "steps": [*steps]}


DRAWN = RUN.replace("steps = 2", "drawn = [{ steps = 2 }, { steps = 3 }]")


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("text", "numbers"), [(RUN, {2}), (DRAWN, {2, 3})])
def test_what_is_seen_are_the_maps_of_each_universe_with_noise_of_its_own(shared, text, numbers):
    plan = plan_of(shared, text)
    mesh = process_mesh(f"replica:{SIZE}")
    lanes = Lanes.of(mesh, BATCH)
    made = maker_of(plan, mesh, lanes).make("train", 1)
    known = by_rank_zero(f"maps {numbers}", lambda: alone(plan))
    assert set(known["steps"]) == numbers
    own = slice(lanes.first, lanes.first + lanes.count)
    assert tuple(plan.priors.drawn) == ("Omega_m", "sigma8", "noise_amplitude")
    rows, louder = known["rows"][own, :2], known["rows"][own, 2]
    np.testing.assert_array_equal(made.parameters, rows)
    cone = plan.lightcone
    noise = [
        f * cone.noise(s)[:, 0] for f, s in zip(louder, known["noise_seeds"][own], strict=True)
    ]
    assert made.volumes.shape == (lanes.count, PIXELS, PIXELS, 1, 2)
    kappa = as_maps(made.volumes)
    np.testing.assert_allclose(kappa, known["kappa"][own] + noise, rtol=0, atol=1e-12)
    assert np.std(known["kappa"]) > 1e-4
    relative = [np.std(n) / f for n, f in zip(noise, louder, strict=True)]
    np.testing.assert_allclose(relative, cone.pixel_sigma(), rtol=0.3)  # of 128 pixels
    edges = 2 * np.pi / cone.fov * 2 ** (np.arange(5) / 2)
    power = angular_power(kappa, cone.fov, edges).power
    np.testing.assert_allclose(made.power, power.reshape(lanes.count, -1), rtol=1e-9)
    np.testing.assert_allclose(made.histogram.reshape(lanes.count, 2, -1).sum(-1), 1, rtol=1e-12)


@pytest.mark.long
@pytest.mark.ranks(2)
def test_a_training_in_two_sessions_is_that_of_one_rank_at_once(shared, monkeypatch):
    """Then its network is judged, and asked about maps in files."""
    monkeypatch.setattr(keras_network, "MAP_CHANNELS", (8,))
    plan, mesh = plan_of(shared), process_mesh(f"replica:{SIZE}")
    known = trained_alone("training of maps", plan, shared / "alone")
    maker = maker_of(plan, mesh, Lanes.of(mesh, BATCH))  # one: lowering it takes seconds
    monkeypatch.setattr(sources, "maker_of", lambda *_: maker)
    monkeypatch.setattr(summaries, "maker_of", lambda *_: maker)
    few = (baselines.Mean(), baselines.RidgeOnPower("ridge on log C_l", alphas=(1e-2,)))
    monkeypatch.setattr(baselines, "baselines_of", lambda _: few)
    assert_same(trained_in_two(plan, mesh, shared / "run", monkeypatch), known)
    check_answers(read_training(shared / "run"), mesh, shared)


def check_answers(training, mesh, shared):
    """A network's answers about its test set, and about maps of it in files."""
    quiet = Progress(rank=1)
    volumes, truth, _ = next(iter(training.files("test").batches(1, shuffle=False)))
    maps = np.swapaxes(as_maps(np.asarray(volumes))[0], -1, -2)
    np.save(shared / f"maps-{RANK}.npy", maps)
    mesh.barrier()
    answer = predict_volume(training, shared / "maps-0.npy", mesh, quiet)
    fitted = PosteriorOptions(("gaussian",), (("power", "peaks"),), of_maps=True)
    judged = evaluate([training], mesh, quiet, posteriors=fitted)
    if RANK == 0:
        assert {"network", "mean", "ridge on log C_l"} == set(judged.scores)
        assert ("power + peaks", "gaussian") in judged.posteriors.calibrations
        requested = judged.predictions["network"]
        row = np.argmin(np.abs(requested.truth - np.asarray(truth)[0]).sum(axis=1))
        means, sigmas = ([x[n] for x in answer.parameters] for n in (1, 2))
        np.testing.assert_allclose(means, requested.mean[row], rtol=1e-6)
        np.testing.assert_allclose(sigmas, requested.sigma[row], rtol=1e-6)
    assert any("trained for fields of 10 degrees" in note for note in answer.notes)
    if RANK:
        return
    cone = training.plan.lightcone
    for path, more in (("same", {}), ("other", {"z_max": 0.3})):
        array = {"kappa": LabelledArray(maps, ("source", "y", "x"), "1", "convergence")}
        message = {"field_of_view": 10.0, **attributes_of(cone, 700.0, Cosmology.planck18(), [])}
        write_light_cone(shared / path / "lightcone.zarr", array, {**message, **more}, {})
    check_question(training, shared / "same" / "lightcone.zarr", None)
    with pytest.raises(ObservationError, match="of another light cone .*: z_max differ"):
        check_question(training, shared / "other" / "lightcone.zarr", None)
    with pytest.raises(ObservationError, match="the network takes maps"):
        check_question(training, shared / "maps-0.npy", 160.0)
