"""Trainings on what a survey sees: views keep the line of sight; and a training with noise and a
mask, stopped, gone on with, exported and asked, gives one answer, and its files say what they hold.
"""

import json

import numpy as np
import pytest
import tensorflow as tf
from ranks import RANK, SIZE, process_mesh, shared_folder
from tiny_network import TINY

from flowpm_dist.cosmoflow.evaluation.prediction import predict_volume
from flowpm_dist.cosmoflow.planning.data_options import FileData
from flowpm_dist.cosmoflow.planning.folder import TrainingFolder
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.cosmoflow.training.export import ExportFolder, export_network
from flowpm_dist.cosmoflow.training.held_out import header_of
from flowpm_dist.cosmoflow.training.saved import read_training
from flowpm_dist.cosmoflow.volumes import sources
from flowpm_dist.cosmoflow.volumes.draws import Lanes
from flowpm_dist.cosmoflow.volumes.generations import Generation
from flowpm_dist.cosmoflow.volumes.sources import PhaseClock
from flowpm_dist.cosmoflow.volumes.universes import cell_values_of
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.statistics.histogram import DENSITIES, CellValues
from tests.cosmoflow.ranks_training import RUN, trained_whole_and_in_two

GRID, STEPS = 16, 4
SURVEY = """
[observation]
structure = "1lpt"
redshift_space = "y"
sigma = 0.3
mask = "{mask}"
"""
PRIORS = "[priors]\nnoise_amplitude = [0.5, 1.5]"

pytestmark = pytest.mark.timeout(300, method="thread")


def plan_of(folder, observation):
    text = RUN.format(name=TINY.name, steps=STEPS, checkpoint_every=2)
    text = text.replace("simulations = 16", "simulations = 8").replace("buffer = 8\n", "")
    if "mask" in observation:
        text = text.replace("[priors]", PRIORS)
    (folder / f"run-{RANK}.toml").write_text(text + observation)
    return TrainingPlan.load(folder / f"run-{RANK}.toml")


def along_y(count):
    """Volumes that vary along the line of sight alone."""
    profile = np.random.default_rng(1).normal(size=(count, 1, GRID, 1))
    return np.broadcast_to(profile, (count, GRID, GRID, GRID))


class Universes:
    """In the place of what simulates, and of files."""

    targets = ("Omega_m", "sigma8")

    def __init__(self, lanes):
        self.lanes = lanes
        self.block_shape = (GRID, GRID, GRID, 1)

    def make(self, stream, generation, numbers=None):
        count = self.lanes.count
        nothing = np.zeros((count, 2))
        return Generation(along_y(count), nothing, np.arange(count), *[nothing] * 4)

    def batches(self, batch, lane, **_):
        while True:
            yield along_y(lane[1])[..., np.newaxis], np.zeros((lane[1], 2)), np.arange(lane[1])


@pytest.mark.ranks(1)
@pytest.mark.parametrize("source", ["simulate", "files"])
def test_views_keep_the_line_of_sight(source, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "maker_of", lambda plan, mesh, lanes, *_: Universes(lanes))
    monkeypatch.setattr(sources, "stored_split", lambda *_, **__: Universes(lanes))
    plan = plan_of(tmp_path, '[observation]\nredshift_space = "y"\n')
    if source == "files":
        data = FileData(folder=tmp_path, augment=plan.data.augment)
        plan = plan.model_copy(update={"data": data})
    assert plan.data.augment is True
    mesh = process_mesh("row:1")
    lanes = Lanes.of(mesh, 4)
    volumes = sources.source_of(plan, mesh, TrainingFolder(tmp_path), lanes, PhaseClock())
    volumes.start(0)
    batches = [volumes.batch(step).volumes for step in range(STEPS)]
    volumes.close()
    assert np.ptp(batches, axis=(2, 4)).max() == 0  # of [step, lane, x, y, z]
    assert len(np.unique(batches, axis=0)) == STEPS  # they are turned and shifted


@pytest.mark.ranks(1)
def test_a_dataset_says_what_a_value_of_one_is(tmp_path):
    mesh = process_mesh("row:1")
    for observation, unit, values in (
        ("", "mean density 1", DENSITIES),
        ("[observation]\nsigma = 0.3\n", "mean density", CellValues(positive=False)),
        ('[observation]\nkind = "counts"\nmean_count = 2.0\n', "one count", CellValues(True, 2.0)),
    ):
        plan = plan_of(tmp_path, observation)
        assert header_of(plan, mesh).unit == unit and cell_values_of(plan) == values


@pytest.mark.long
def test_a_training_on_noisy_masked_volumes(tmp_path_factory, monkeypatch):
    """Stopped and gone on with it has the same losses; its network is asked on one rank and two."""
    shared = shared_folder(tmp_path_factory)
    mask = np.random.default_rng(4).uniform(0.2, 1, [GRID] * 3)
    mask[:, :4] = 0
    np.save(shared / f"mask-{RANK}.npy", mask)
    mesh = process_mesh(f"row:{SIZE}")
    mesh.barrier()
    plan = plan_of(shared, SURVEY.format(mask=shared / "mask-0.npy"))
    trained_whole_and_in_two(plan, mesh, shared, monkeypatch)

    training = read_training(shared / "run")
    assert training.plan.record == plan.record
    assert not training.divides_by_mean(None)
    volumes, _, _ = next(iter(training.files("test").batches(1, shuffle=False)))
    volume = np.asarray(volumes)[0, ..., 0]
    assert np.all(volume[mask == 0] == 1) and volume.min() < 0
    hidden = np.where(mask > 0, volume, np.nan)
    np.save(shared / f"volume-{RANK}.npy", hidden)
    mesh.barrier()
    found = predict_volume(training, shared / "volume-0.npy", mesh, Progress(rank=1), 128.0)
    if RANK:
        return
    alone = mesh.without("row")
    monkeypatch.setattr("meshimpl.process_mesh.ProcessMesh", lambda *_: alone)
    folder = ExportFolder(shared / "network")
    folder.begin()
    about = export_network(training, folder)
    folder.release()
    message = json.loads((folder.path / "network.json").read_text())
    assert message["observation"] == plan.record.table() and about["unobserved_cells"] == 1.0
    assert message["divided_by_mean"] is False
    network = tf.saved_model.load(str(folder.path))
    answer = network.ask(tf.constant(volume[np.newaxis], tf.float64))["mean"].numpy()[0]
    np.testing.assert_allclose([x for _, x, _ in found.parameters], answer, rtol=1e-9)
