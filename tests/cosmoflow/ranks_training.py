"""Trainings on every mesh against one on whole volumes: the same losses, step by step; stopped and
gone on with; and what batches hold."""

import itertools
import json
import os
import shutil
import signal

import numpy as np
import pytest
import tensorflow as tf
from ranks import NETWORK_SHAPES, RANK, SIZE, by_rank_zero, process_mesh, shared_folder, solo
from run_files import PRIORS
from tiny_network import TINY

from flowpm_dist.cosmoflow.planning.folder import TrainedError, TrainingFolder
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.cosmoflow.training.saved import read_training, trained_network
from flowpm_dist.cosmoflow.training.session import TrainingSession
from flowpm_dist.cosmoflow.training.trainer import DivergedError, Trainer
from flowpm_dist.cosmoflow.volumes import sources
from flowpm_dist.cosmoflow.volumes.draws import (
    Draws,
    Lanes,
    View,
    block_of,
    views_of,
    whole_volumes,
)
from flowpm_dist.cosmoflow.volumes.sources import PHASES, InSituSource, PhaseClock
from flowpm_dist.cosmoflow.volumes.universes import maker_of
from flowpm_dist.jobs.job import StopError
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.results import read_rows

RUN = (
    PRIORS
    + """[box]
grid = 16
size = 128.0
[initial]
lpt_order = 1
[evolution]
steps = 2
[network]
name = "{name}"
precision = "float64"
gather_below = 2
dropout = 0.2
[training]
batch = 4
calibrate = 8
learning_rate = 1e-3
validate_every = {steps}
checkpoint_every = {checkpoint_every}
steps = {steps}
[data]
simulations = 16
reuse = 2
buffer = 8
fill = 4
validation = 4
test = 4
"""
)

STEPS = 10  # with each generation of universes, and beyond the last

pytestmark = [pytest.mark.grappler, pytest.mark.timeout(300, method="thread")]


@pytest.fixture
def shared(tmp_path_factory):
    return shared_folder(tmp_path_factory)


MAKERS = {}


def kept_maker(plan, mesh, lanes, universes=0):
    """What simulates on a mesh: one for all trainings of this file, as their universes are."""
    if (mesh, lanes) not in MAKERS:
        MAKERS[mesh, lanes] = maker_of(plan, mesh, lanes)
    return MAKERS[mesh, lanes]


@pytest.fixture(autouse=True)
def makers_are_kept(monkeypatch):
    """Lowering a simulation takes longer than the steps of a training."""
    monkeypatch.setattr(sources, "maker_of", kept_maker)


def config_of(shared, steps=STEPS, checkpoint_every=5, change=("", ""), name=TINY.name):
    path = shared / f"run-{RANK}.toml"
    text = RUN.format(name=name, steps=steps, checkpoint_every=checkpoint_every)
    path.write_text(text.replace(*change))
    return TrainingPlan.load(path)


def train(config, mesh, path, resume=False):
    """A session on a mesh; its outcome, its rows, and its weights."""
    folder = TrainingFolder(path)
    if mesh.rank == 0:
        folder.begin(resume=resume)
    mesh.barrier()
    session = TrainingSession(config, mesh, folder, Progress(rank=1))
    try:
        outcome = session.run(resume=resume)
    finally:
        folder.release()
    weights = [w.numpy() for w in session.network.weights]
    mesh.barrier()
    return outcome, read_rows(path / "metrics.csv"), weights


def trained_alone(name, config, path):
    """What `train` returns, but the outcome, of a training by one rank that shares nothing."""

    def rank_zeros():
        _, rows, weights = train(config, solo(), path)
        return {"rows": json.dumps(rows)} | {f"weight {n:03}": w for n, w in enumerate(weights)}

    found = by_rank_zero(name, rank_zeros)
    return None, json.loads(str(found.pop("rows"))), [found[name] for name in sorted(found)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return trained_alone("training", config_of(folder), folder / "run")


MESHES = NETWORK_SHAPES[SIZE]


def assert_same(found, expected):
    """As rounding of float64 lets ten steps of an optimiser be."""
    for column in ("loss", "validation_loss", "gradient_norm", "rate", "simulations"):
        values, known = ([row[column] for row in rows] for rows in (found[1], expected[1]))
        assert [bool(v) for v in values] == [bool(k) for k in known], column
        values, known = ([float(v) for v in column if v] for column in (values, known))
        np.testing.assert_allclose(values, known, rtol=1e-7)
    for w, e in zip(found[2], expected[2], strict=True):
        # Adam turns gradients near its epsilon into updates: their rounding is enlarged.
        np.testing.assert_allclose(w, e, atol=1e-5 * np.abs(e).max())


def trained_whole_and_in_two(plan, mesh, shared, monkeypatch):
    """Train at once, and in `run` stopped in step 2 and resumed: returned, as the same."""
    maker = sources.maker_of(plan, mesh, Lanes.of(mesh, 4))  # one: lowering it takes seconds
    monkeypatch.setattr(sources, "maker_of", lambda *_: maker)
    whole = train(plan, mesh, shared / "whole")
    assert_same(trained_in_two(plan, mesh, shared / "run", monkeypatch), whole)
    return whole


def trained_in_two(plan, mesh, path, monkeypatch):
    """What `train` returns of a training that was stopped in step 2 and resumed."""
    step = Trainer.step
    monkeypatch.setattr(Trainer, "step", lambda self, n: 1 / 0 if n == 2 else step(self, n))
    with pytest.raises(ZeroDivisionError):
        train(plan, mesh, path)
    monkeypatch.setattr(Trainer, "step", step)
    return train(plan, mesh, path, resume=True)


def assert_phases(outcome, shape):
    assert set(outcome.phases) == set(PHASES) and outcome.phases["compute"] > 0
    assert (outcome.phases["allreduce"] > 0) == (SIZE > 1)
    assert (outcome.phases["halo"] > 0) == (process_mesh(shape).without("replica").size > 1)


@pytest.mark.long
@pytest.mark.ranks(4)
@pytest.mark.parametrize("shape", MESHES[1:2])
def test_ten_steps_are_those_of_one_rank(shape, shared, alone):
    """On meshes of two ranks in the next test; on columns of four in ranks_network.py."""
    found = train(config_of(shared), process_mesh(shape), shared / "run")
    outcome = found[0]
    assert (outcome.step, outcome.steps) == (STEPS, STEPS)
    draws = json.loads((shared / "run" / "draws.json").read_text())
    # Each of 16 universes twice in 8 steps; in two more, eight of those that the buffer holds.
    assert draws["volumes"] == 16 and draws["draws"] == {"min": 2, "median": 2.5, "max": 3}
    assert set(draws["spread_of_batch_means"]) == {"Omega_m", "sigma8"}
    assert_phases(outcome, shape)
    assert_same(found, alone)


def stopped_in(step):
    """`Trainer.step`, in one of whose steps the last rank gets a stop signal."""
    original = Trainer.step

    def interrupted(self, number):
        if number == step and RANK == SIZE - 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return original(self, number)

    return interrupted


@pytest.mark.long
def test_stopped_by_a_signal_and_gone_on_with_elsewhere(shared, alone, monkeypatch):
    """The last rank gets a stop signal in step 3: replicas stop, columns continue with step 4."""
    original = Trainer.step
    monkeypatch.setattr(Trainer, "step", stopped_in(3))
    config = config_of(shared)
    with pytest.raises(StopError) as stopped:
        train(config, process_mesh(MESHES[0]), shared / "run")
    assert (stopped.value.signal, stopped.value.place) == ("SIGUSR1", f"after step 4 of {STEPS}")
    monkeypatch.setattr(Trainer, "step", original)
    found = train(config, process_mesh(MESHES[-1]), shared / "run", resume=True)
    assert found[0].step == STEPS
    assert_phases(found[0], MESHES[-1])
    assert [int(row["step"]) for row in found[1]] == list(range(STEPS))
    assert_same(found, alone)


@pytest.mark.parametrize("shape", [MESHES[0], MESHES[-1]])
def test_each_universe_has_one_of_the_runs_that_are_drawn(shared, shape):
    """Each table as often as others, steps at random: universes that others make, too."""
    tables = "{steps = [2, 4]}, {correction = 'network-2'}"
    mesh = process_mesh(shape)
    plan, *single = (
        config_of(shared, change=("steps = 2", text))
        for text in (
            f"steps = 2\ndrawn = [{tables}]",
            *("steps = 2", "steps = 3", "steps = 4", "steps = 2\ncorrection = 'network-2'"),
        )
    )
    mesh.check_equal("the job", **dict(plan))
    lanes = Lanes.of(mesh, 4)
    maker = maker_of(plan, mesh, lanes)
    models = list(itertools.chain(*maker.groups))
    chosen = [models.index(maker.model_of("train", number)) for number in range(40)]
    assert all((a < 3) != (b < 3) for a, b in zip(chosen[::2], chosen[1::2], strict=True))
    assert set(chosen) == {0, 1, 2, 3} and len({a < 3 for a in chosen[::2]}) == 2
    assert chosen != [models.index(maker.model_of("test", number)) for number in range(40)]
    found = [maker.make("train", generation) for generation in (0, 1)]
    kinds = [chosen[number] for made in found for number in made.index]
    assert len(set(kinds)) > 1
    for kind in set(kinds):
        alone = maker_of(single[kind], mesh, lanes)
        for generation, made in enumerate(found):
            expected = alone.make("train", generation)
            same = [chosen[number] == kind for number in made.index]
            for name in ("parameters", "index", "seeds"):
                np.testing.assert_array_equal(getattr(made, name), getattr(expected, name))
            for name in ("volumes", "power", "histogram"):
                ours, others = (getattr(each, name) for each in (made, expected))
                np.testing.assert_allclose(ours[same], others[same], rtol=1e-9, atol=1e-12)
                assert (np.abs(ours - others).reshape(len(same), -1).max(1) > 1e-6).tolist() == [
                    not each for each in same
                ]


def test_gradients_that_are_not_finite_end_the_run(shared, monkeypatch):
    """With the checkpoint before them as it was."""
    config = config_of(shared, steps=6, checkpoint_every=2)
    original = Trainer.step

    def spoiled(self, number):
        if number == 3:
            self.regressor.network.weights[0].assign(self.regressor.network.weights[0] * np.nan)
        return original(self, number)

    monkeypatch.setattr(Trainer, "step", spoiled)
    with pytest.raises(DivergedError, match="3 steps in a row, up to step 5, are not finite"):
        train(config, process_mesh(MESHES[0]), shared / "run")
    latest = tf.train.latest_checkpoint(str(shared / "run" / "checkpoints"))
    assert latest.endswith("step-2")
    kernel = tf.train.load_variable(latest, "weights/0/.ATTRIBUTES/VARIABLE_VALUE")
    assert np.isfinite(kernel).all()


@pytest.mark.dealt
@pytest.mark.ranks(2, 4)
def test_views_of_split_volumes(network_mesh):
    """All 48 orientations differ, keep the values, and do not depend on the split."""
    mesh = network_mesh.without("replica")
    rng = np.random.default_rng(0)
    volumes = rng.normal(size=(3, 8, 8, 8))
    views = [View.draw(rng, 8) for _ in volumes]
    expected = np.stack([v.of(x) for v, x in zip(views, volumes, strict=True)])
    found = views_of(block_of(volumes, mesh), views, mesh)
    np.testing.assert_array_equal(whole_volumes(found, mesh), expected)
    np.testing.assert_array_equal(np.sort(expected.ravel()), np.sort(volumes.ravel()))
    draws = {(v.axes, v.flips) for v in (View.draw(rng, 8) for _ in range(2000))}
    assert len(draws) == 48
    corner = np.arange(8.0).reshape(2, 2, 2)
    assert len({View(axes, flips).of(corner).tobytes() for axes, flips in draws}) == 48


@pytest.mark.dealt
def test_batches_are_the_universes_of_their_draws(network_mesh, shared):
    """Of each lane of this replica, as they were simulated; and so when a training goes on."""
    config = config_of(shared)
    lanes = Lanes.of(network_mesh, 4)
    maker = kept_maker(config, network_mesh, lanes)
    draws = Draws(simulations=16, reuse=2, buffer=12, fill=8, batch=4, seed=3)
    known, made = maker.priors.draw("train", 0, 16), {}

    def keep(generation):
        made.update(zip(generation.index.tolist(), generation.volumes, strict=True))

    def source():
        options = {"augment": False, "clock": PhaseClock(), "made": keep}
        return InSituSource(maker, network_mesh, draws, **options)

    batches, first = {}, source()
    first.start(0)
    for step in range(draws.generations * draws.reuse):
        batch = batches[step] = first.batch(step)
        numbers = [draws.members(draws.drawn(step)[lane])[lane] for lane in lanes]
        np.testing.assert_array_equal(batch.parameters, known[numbers])
        for number, volume in zip(numbers, batch.volumes, strict=True):
            np.testing.assert_array_equal(volume, made[number])
        assert list(batch.samples) == [4 * step + lane for lane in lanes]
    first.close()
    again = source()
    again.start(5)
    for step in range(5, draws.generations * draws.reuse):
        np.testing.assert_array_equal(again.batch(step).volumes, batches[step].volumes)
    again.close()


def test_a_training_ends_where_validations_get_no_better(shared, monkeypatch):
    """Its best weights are kept, and another training starts from them."""
    losses = [0.9, 0.5, 0.6, 0.5, 0.1]
    monkeypatch.setattr(TrainingSession, "_validation_errors", lambda self: (losses.pop(0), 0.1))
    change = ("validate_every = 6", "validate_every = 1\npatience = 2")
    config = config_of(shared, steps=6, checkpoint_every=6, change=change)
    mesh, folder = process_mesh(MESHES[0]), TrainingFolder(shared / "run")
    outcome, rows, _ = train(config, mesh, folder.path)
    assert (outcome.step, outcome.ended_early, outcome.best) == (4, True, (0.5, 2))
    assert [float(row["validation_loss"]) for row in rows] == [0.9, 0.5, 0.6, 0.5]
    mark = folder.mark()
    assert (mark["complete"], mark["ended_early"], mark["step"]) == (True, True, 4)
    best = tf.train.load_checkpoint(str(folder.weights("best")))
    assert best.get_tensor("step/.ATTRIBUTES/VARIABLE_VALUE") == 2
    assert best.get_tensor("loss/.ATTRIBUTES/VARIABLE_VALUE") == 0.5
    mesh.barrier()
    if RANK == 0:
        folder.write_mark(complete=False, step=4)
    mesh.barrier()
    outcome, rows, _ = train(config, mesh, folder.path, resume=True)
    assert (outcome.step, outcome.best, len(rows)) == (4, (0.5, 2), 4)
    assert folder.mark()["ended_early"] is True

    change = ("validate_every = 6", f'start_from = "{folder.path}"')
    other = config_of(shared, steps=6, checkpoint_every=6, change=change)
    session = TrainingSession(other, mesh, TrainingFolder(shared / "other"), Progress(rank=1))
    session._take_weights()
    for number, weight in enumerate(session.network.state):
        stored = best.get_tensor(f"weights/{number}/.ATTRIBUTES/VARIABLE_VALUE")
        np.testing.assert_array_equal(weight, stored)
    change = ("[training]", f'loss = "l2"\n[training]\nstart_from = "{folder.path}"')
    session = TrainingSession(
        config_of(shared, change=change), mesh, TrainingFolder(shared / "wrong"), Progress(rank=1)
    )
    with pytest.raises(TrainedError, match="best cannot be used"):
        session.run(resume=False)
    assert not (shared / "wrong").exists()  # no volume was simulated


@pytest.mark.long
def test_a_keras_model_is_trained_on_replicas_as_on_one_rank(shared, monkeypatch):
    """Stopped after three of six steps, gone on with, and asked with its last weights."""
    own = "gather_below = 2\ndropout = 0.2\n[training]\nbatch = 4\ncalibrate = 8\n"
    options = {"name": "keras_models:small", "change": (own, "[training]\nbatch = 4\n")}
    options |= {"steps": 6, "checkpoint_every": 3}

    mesh, folder = process_mesh(f"replica:{SIZE}"), TrainingFolder(shared / "run")
    config = config_of(shared, **options)
    expected = trained_alone("keras", config, shared / "alone")
    original = Trainer.step
    monkeypatch.setattr(Trainer, "step", stopped_in(2))
    with pytest.raises(StopError, match="after step 3 of 6"):
        train(config, mesh, folder.path)
    monkeypatch.setattr(Trainer, "step", original)
    whole = train(config, mesh, folder.path, resume=True)
    assert (whole[0].step, [int(row["step"]) for row in whole[1]]) == (6, list(range(6)))
    assert_same(whole, expected)
    requested = trained_network(read_training(folder.path), mesh, SIZE, "last")
    assert requested.step == 6
    for weight, last in zip(requested.network.weights, whole[2], strict=True):
        np.testing.assert_array_equal(weight, last)


def test_resuming_where_nothing_is_left_to_do_or_to_go_on_from(shared):
    """Completes the one; and nothing that was made is dropped in silence."""
    config = config_of(shared, steps=2, checkpoint_every=1)
    mesh = process_mesh(MESHES[0])
    train(config, mesh, shared / "run")
    folder = TrainingFolder(shared / "run")
    if RANK == 0:
        folder.write_mark(complete=False, step=2)
    mesh.barrier()
    outcome, rows, _ = train(config, mesh, shared / "run", resume=True)
    mesh.barrier()
    assert outcome.step == 2 and len(rows) == 2 and folder.mark()["complete"] is True
    checkpoints = shared / "run" / "checkpoints"
    if RANK == 0:
        for file in checkpoints.glob("step-*"):
            file.write_bytes(file.read_bytes()[:10])
    mesh.barrier()
    with pytest.raises(TrainedError, match="the latest checkpoint in .* cannot be used"):
        train(config, mesh, shared / "run", resume=True)
    mesh.barrier()
    if RANK == 0:
        shutil.rmtree(checkpoints)
    mesh.barrier()
    with pytest.raises(TrainedError, match="has made 2 steps, but .* holds no checkpoint"):
        train(config, mesh, shared / "run", resume=True)
    assert len(read_rows(shared / "run" / "metrics.csv")) == 2
