"""Several redshifts as channels of a volume: each is what the forward model gives there, with noise
of its own; and a training on them, stopped, gone on with, asked, and written into files."""

import functools
import json

import numpy as np
import pytest
import tensorflow as tf
from ranks import RANK, SIZE, by_rank_zero, process_mesh, shared_folder, solo
from tiny_network import TINY

import flowpm_dist as fpm
from flowpm_dist.cosmoflow.evaluation.prediction import check_question, predict_volume
from flowpm_dist.cosmoflow.evaluation.summaries import HIDDEN, summarise
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.cosmoflow.training.dataset import write_dataset
from flowpm_dist.cosmoflow.training.saved import read_training
from flowpm_dist.cosmoflow.volumes.draws import Draws, Lanes, Priors
from flowpm_dist.cosmoflow.volumes.generations import Generation
from flowpm_dist.cosmoflow.volumes.sources import InSituSource, PhaseClock
from flowpm_dist.cosmoflow.volumes.universes import OF_SURVEY, VolumeMaker, noise_key
from flowpm_dist.initial.conditions import noise_function
from flowpm_dist.io.volume import VolumeError
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.observables.noise import SurveyNoise
from flowpm_dist.observables.options import DensityOptions
from flowpm_dist.observables.tracers import ObservationError
from flowpm_dist.observables.universe_model import StructureFormation
from tests.cosmoflow.ranks_training import RUN, train, trained_whole_and_in_two

GRID, BATCH, SIGMA = 8, 2, 0.4
EDGES = (0.1, 0.25, 0.5, 1.0)
REDSHIFTS = (3.0, 1.0, 0.0)
MESHES = {1: "row:1", 2: "row:2", 4: "replica:2,row:2"}
PRIORS = Priors({"sigma8": (0.6, 1.0), "b1": (0.0, 1.0)}, "sobol", seed=3)
BIASED = {"bias": {"b1": 0.5}, "redshift_space": "z"}
STRUCTURES = {"pm": {"bias": {"b": 1.0}}, "1lpt": BIASED, "linear": {"bias": {"b": 1.0}}}
SURVEY = """
[observation]
structure = "1lpt"
redshifts = [1.0, 0.0]
sigma = 0.3
"""

pytestmark = pytest.mark.timeout(300, method="thread")


@functools.cache
def simulation(mesh):
    return fpm.Simulation(
        fpm.Cosmology.planck18(), grid=GRID, box_size=64.0, steps=EDGES, precision="float64",
        mesh=mesh, halo=4, lpt_order=1,
    )  # fmt: skip


def drawn():
    """Seeds, cosmologies and bias of the first universes."""
    rows = PRIORS.draw("train", 0, BATCH)
    cosmologies = [simulation(solo()).cosmology.replace(sigma8=float(row[0])) for row in rows]
    return PRIORS.noise_seeds("train", 0, BATCH), cosmologies, tf.constant(rows[:, 1])


def expected_of(structure, observed):
    """What one rank finds: each channel by a simulation that ends there, with its noise."""
    options = DensityOptions(structure=structure, **observed)
    seeds, cosmologies, b1 = drawn()
    own, channels = simulation(solo()), []
    for number in range(len(REDSHIFTS)):
        model = options.forward_model(own.with_steps(EDGES[: number + 2]))
        state = model.formation.state(model.simulation, None, cosmologies, seeds.tolist())
        values = dict.fromkeys(observed["bias"], b1)
        key = (OF_SURVEY, len(REDSHIFTS) - 1 - number)[: 1 + (number < len(REDSHIFTS) - 1)]
        of_noise = PRIORS.noise_seeds("train", 0, BATCH, *key)
        normal = [noise_function(own.box)(np.int64(seed)) for seed in of_noise]
        channels.append(model.observe(state, values) + SIGMA * np.stack(normal))
    return {"volumes": np.stack(channels, axis=-1)}


@pytest.mark.parametrize(
    "structure",
    [
        pytest.param("pm", marks=pytest.mark.ranks(1, 2)),
        pytest.param("1lpt", marks=pytest.mark.ranks(1)),
        pytest.param("linear", marks=pytest.mark.ranks(1)),
    ],
)
def test_each_channel_is_the_model_at_its_redshift(structure):
    expected = by_rank_zero(structure, lambda: expected_of(structure, STRUCTURES[structure]))
    mesh = process_mesh(MESHES[SIZE])
    own, lanes = simulation(mesh.without("replica")), Lanes.of(mesh, BATCH)
    options = DensityOptions(
        structure=structure, sigma=SIGMA, redshifts=REDSHIFTS, **STRUCTURES[structure]
    )
    (name,) = STRUCTURES[structure]["bias"]
    priors = Priors({"sigma8": PRIORS.ranges["sigma8"], name: PRIORS.ranges["b1"]}, seed=3)
    model, noise = options.forward_model(own), SurveyNoise(options, own.box)
    times = options.scale_factors(EDGES[-1])
    assert times == list(EDGES[1:])
    maker = VolumeMaker(model, priors, lanes, ["sigma8"], noise, times=times)
    made = maker.make("train", 0)
    place = own.box.place[-3:]
    wanted = [volume[place] for volume in expected["volumes"][list(lanes)]]
    np.testing.assert_allclose(made.volumes, wanted, rtol=0, atol=1e-11)
    assert made.power.shape == (lanes.count, 3 * made.k.size)
    if structure == "1lpt":
        single = VolumeMaker(model, priors, lanes, ["sigma8"], noise).make("train", 0)
        np.testing.assert_array_equal(single.volumes, made.volumes[..., -1])
        np.testing.assert_array_equal(single.power, made.power[:, -made.k.size :])


@pytest.mark.ranks(1)
def test_noise_of_channels_is_independent():
    keys = [noise_key(number, 3) for number in range(3)]
    assert noise_key(0, 1) == keys[-1] == (OF_SURVEY,)
    seeds = np.concatenate([PRIORS.noise_seeds("train", 0, 50, *key) for key in ((), *keys)])
    assert len(np.unique(seeds)) == seeds.size


class Own(StructureFormation):
    """Makes the universe in a way of its own."""

    def state(self, *_, **__):
        raise AssertionError("is not called")


@pytest.mark.ranks(1)
def test_a_structure_that_knows_one_time_is_refused():
    with pytest.raises(ObservationError, match="Own overrides `state`, which gives one time only"):
        Own().at_times(simulation(solo()), [0.5, 1.0], lambda state: state, None, [1])


class Sheets:
    """In the place of what simulates: volumes of two channels that say where a cell is."""

    targets = ("sigma8",)

    def __init__(self, lanes, mesh):
        whole = np.arange(4.0)[:, None, None, None] * np.ones((4, 4, 4, 2)) + [0, 10]
        rows = mesh.axis_size("row")
        self.lanes, self.block = lanes, np.split(whole, rows)[mesh.coordinate("row")]

    def make(self, stream, generation, numbers=None):
        count = self.lanes.count
        volumes, nothing = np.stack([self.block] * count), np.zeros((count, 1))
        return Generation(volumes, nothing, np.arange(count), *[nothing] * 4)


@pytest.mark.ranks(1, 2)
def test_channels_are_turned_together():
    mesh = process_mesh(f"row:{SIZE}")
    lanes = Lanes.of(mesh, 2)
    draws = Draws(simulations=8, reuse=2, buffer=4, fill=2, batch=2, seed=3)
    source = InSituSource(Sheets(lanes, mesh), mesh, draws, augment=True, clock=PhaseClock())
    source.start(0)
    batches = [source.batch(step).volumes for step in range(6)]
    source.close()
    for volumes in batches:
        assert volumes.shape == (2, 4 // SIZE, 4, 4, 2)
        np.testing.assert_array_equal(volumes[..., 0] + 10, volumes[..., 1])
    corners = {int(value) for volumes in batches for value in volumes[:, 0, 0, 0, 0]}
    assert corners == {0, 1, 2, 3} or RANK, "shifts are not of all cells"


@pytest.mark.long
@pytest.mark.ranks(2)
@pytest.mark.budget(60)
def test_a_training_on_two_redshifts(tmp_path_factory, monkeypatch):
    """Stopped and gone on with it has the same losses; it is asked, and written into files."""
    shared, mesh = shared_folder(tmp_path_factory), process_mesh(f"row:{SIZE}")
    text = RUN.format(name=TINY.name, steps=4, checkpoint_every=2)
    text = text.replace("simulations = 16", "simulations = 8").replace("buffer = 8\n", "")
    (shared / f"run-{RANK}.toml").write_text(text + SURVEY)
    plan = TrainingPlan.load(shared / f"run-{RANK}.toml")
    whole = trained_whole_and_in_two(plan, mesh, shared, monkeypatch)
    assert whole[2][0].shape == (3, 3, 3, 2, 4)  # of the first convolution

    training = read_training(shared / "run")
    assert training.plan.record == plan.record
    volumes, _, _ = next(iter(training.files("test").batches(1, shuffle=False)))
    volume = np.asarray(volumes)[0]
    assert volume.shape == (16, 16, 16, 2)
    deviations = np.diff(volume).std()
    assert deviations > 0.3 * np.sqrt(2), "channels share their noise"
    np.save(shared / f"volume-{RANK}.npy", volume)
    np.save(shared / f"single-{RANK}.npy", volume[..., 0])
    mesh.barrier()
    check_question(training, shared / "volume-0.npy", 128.0)
    found = predict_volume(training, shared / "volume-0.npy", mesh, Progress(rank=1), 128.0)
    with pytest.raises(VolumeError, match=r"has shape .16, 16, 16.; must be .16, 16, 16, 2."):
        check_question(training, shared / "single-0.npy", 128.0)
    requested = [training], ["test"], [["power", "histograms"]]
    again = summarise(*requested, mesh, Progress(rank=1), "last")

    write_dataset(plan, mesh, shared / "set", ["train", "validation"], progress=Progress(rank=1))
    message = json.loads((shared / "set" / "dataset.json").read_text())
    assert message["channels"] == 2 and message["attributes"]["observation"]["redshifts"] == [
        1.0,
        0.0,
    ]
    box, network = text[: text.index("[cosmology]")], text[text.index("[network]") :]
    network = (
        network[: network.index("[data]")] + f'[data]\nsource = "files"\nfolder = "{shared}/set"\n'
    )
    (shared / f"files-{RANK}.toml").write_text(box + network)
    of_files = TrainingPlan.load(shared / f"files-{RANK}.toml")
    assert of_files.channels == 2 and of_files.record == plan.record
    outcome = train(of_files, mesh, shared / "of-files")
    assert np.isfinite(float(outcome[1][-1]["loss"]))
    if RANK:
        return
    parts = again[0]["test"].parts
    assert parts["histograms"].shape[1] == 2 * 4 * 27 and HIDDEN in parts
    shares = parts["histograms"].reshape(len(again[0]["test"].truth), 8, 27) ** 2
    np.testing.assert_allclose(shares.sum(axis=-1), 1, rtol=1e-12)
    assert np.isfinite([value for _, value, _ in found.parameters]).all()
