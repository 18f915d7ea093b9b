"""A network learns from universes as they are simulated, and nothing from labels of others."""

import os
from dataclasses import replace
from types import SimpleNamespace

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import pytest

from flowpm_dist.cosmoflow.planning.declarations import (
    DECLARATIONS,
    Convolution,
    Declaration,
    Dense,
    Pool,
)
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.cosmoflow.scores.judging import score
from flowpm_dist.cosmoflow.training.trainer import Trainer, optimiser_of, regressor_of
from flowpm_dist.cosmoflow.volumes.draws import Lanes
from flowpm_dist.cosmoflow.volumes.sources import Batch, InSituSource, PhaseClock
from flowpm_dist.cosmoflow.volumes.universes import draws_of, maker_of
from meshimpl.process_mesh import ProcessMesh

SMALL = Declaration(
    "small", (Convolution(8, 3), Pool(), Convolution(16, 3), Pool(), Dense(32)), "periodic", 0.01
)
RUN = """
[box]
grid = 16
size = 64.0
[cosmology]
Omega_m = 0.31
Omega_b = 0.049
h = 0.67
n_s = 0.96
[priors]
sigma8 = [0.6, 1.0]
[initial]
lpt_order = 1
[evolution]
steps = 2
[network]
name = "small"
[training]
batch = 16
learning_rate = 1e-3
warmup = 20
[data]
simulations = 256
reuse = 8
fill = 64
validation = 16
test = 64
"""
MESH = ProcessMesh("replica:1")


class Kept:
    """A maker of universes that simulates each once, with labels that may belong to others."""

    def __init__(self, maker):
        self.maker, self.made, self.labels = maker, {}, None
        self.priors, self.lanes = maker.priors, maker.lanes

    def make(self, stream, generation, numbers=None):
        if (stream, generation) not in self.made:
            self.made[stream, generation] = self.maker.make(stream, generation, numbers)
        found = self.made[stream, generation]
        if stream != "train" or self.labels is None:
            return found
        return replace(found, parameters=self.labels[found.index])


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    path = tmp_path_factory.mktemp("learning") / "run.toml"
    path.write_text(RUN)
    DECLARATIONS[SMALL.name] = SMALL
    plan = TrainingPlan.load(path)
    regressor, optimiser = regressor_of(plan, MESH), optimiser_of(plan)
    network = regressor.network
    optimiser.build(network.weights)
    begin = [variable.numpy() for variable in (*network.state, *optimiser.variables)]
    maker = Kept(maker_of(plan, MESH, Lanes.of(MESH, plan.training.batch)))
    yield SimpleNamespace(
        plan=plan, regressor=regressor, optimiser=optimiser, begin=begin, maker=maker
    )
    del DECLARATIONS[SMALL.name]


def fresh_score(parts, labels=None):
    """The score of sigma8 on universes of the test set, and the losses of the training."""
    plan, regressor, optimiser = parts.plan, parts.regressor, parts.optimiser
    network = regressor.network
    for variable, value in zip((*network.state, *optimiser.variables), parts.begin, strict=True):
        variable.assign(value)
    parts.maker.labels = labels
    options = {"augment": True, "clock": PhaseClock()}
    source = InSituSource(parts.maker, MESH, draws_of(plan), **options)
    trainer = Trainer(regressor, optimiser, source, options["clock"])
    source.start(0)
    network.calibrate(batch.volumes for batch in source.preview(4))
    losses = [trainer.step(step).loss for step in range(plan.training.steps)]
    network.recentre(batch.volumes for batch in source.preview(4))
    source.close()
    made = [parts.maker.make("test", generation) for generation in range(4)]
    fresh = [Batch(found.volumes, found.parameters, found.index) for found in made]
    found = regressor.predict(fresh, 64)
    return score(found, regressor.standardiser.centre)["sigma8"], losses


@pytest.mark.long
@pytest.mark.budget(30)
def test_a_network_learns_sigma8(parts):
    found, losses = fresh_score(parts)
    assert found.r2 - 2 * found.r2_error > 0.5
    assert found.coverage_2 > 0.8
    # No spikes after the warm-up: the mean predictor's loss is 0.5.
    assert max(losses[20:]) < 3 * 0.5


@pytest.mark.long
def test_nothing_is_learnt_from_labels_of_other_universes(parts):
    order = np.random.default_rng(0).permutation(256)
    found, _ = fresh_score(parts, parts.maker.priors.draw("train", 0, 256)[order])
    assert found.r2 < 0.2
