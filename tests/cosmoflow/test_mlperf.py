"""The preset of MLPerf HPC's reference: its settings, rates, first weights and log."""

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from flowpm_dist.cosmoflow.network.network import initial_weights
from flowpm_dist.cosmoflow.planning.declarations import declaration
from flowpm_dist.cosmoflow.planning.folder import CONTENTS, TrainingFolder
from flowpm_dist.cosmoflow.planning.options import AdamOptions, CosineDecay, MomentumOptions
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.cosmoflow.training.logs import MLPerfLog
from flowpm_dist.cosmoflow.training.trainer import optimiser_of, schedule_of
from flowpm_dist.jobs.run_file import ConfigError

SAMPLES = 1024
RUN = """
[box]
grid = 128
size = 128.0
[training]
preset = "mlperf"
"""
FILES = """[data]
source = "files"
folder = "set"
parameters = ["Omega_m", "sigma8", "n_s", "h"]
"""
RUN += FILES


@pytest.fixture
def folder(tmp_path) -> Path:
    """Public files that are looked at for their number alone."""
    for split in ("train", "validation"):
        (tmp_path / "set" / split).mkdir(parents=True)
        for number in range(SAMPLES if split == "train" else 1):
            record = (100).to_bytes(8, "little") + bytes(108)
            (tmp_path / "set" / split / f"{number}.tfrecord").write_bytes(record)
    return tmp_path


def read(folder: Path, text: str = RUN):
    (folder / "run.toml").write_text(text)
    return TrainingPlan.load(folder / "run.toml")


def with_keys(*keys: str) -> str:
    return RUN.replace('"mlperf"\n', "\n".join(['"mlperf"', *keys, ""]), 1)


def test_its_settings_are_those_of_the_reference(folder):
    plan = read(folder)
    network, requested = plan.network, plan.training
    assert (network.name, network.loss, network.input, network.dropout, network.precision) == (
        "mlperf", "l2", "log1p-counts", 0.5, "float32",
    )  # fmt: skip
    assert (requested.optimiser, requested.learning_rate, requested.batch) == (
        MomentumOptions(),
        1e-3,
        64,
    )
    assert MomentumOptions().momentum == 0.9
    assert (requested.calibrate, requested.centres, requested.larc, requested.weight_decay) == (
        0,
        False,
        False,
        0,
    )
    assert (plan.data.augment, requested.epochs, requested.steps) == (
        False,
        128,
        128 * SAMPLES // 64,
    )
    assert requested.validate_every == requested.checkpoint_every == SAMPLES // 64
    assert plan.outputs == 4 and optimiser_of(plan).clip_norm is None
    (folder / "again.toml").write_text(plan.resolved())
    assert TrainingPlan.load(folder / "again.toml").resolved() == plan.resolved()


def test_keys_of_the_file_go_before_it(folder):
    plan = read(folder, with_keys("batch = 8", 'decay = "cosine"', "steps = 40", "warmup = 3"))
    assert (plan.training.batch, plan.training.steps, plan.training.epochs) == (8, 40, None)
    assert plan.training.decay == CosineDecay()
    assert "milestones" not in tomllib.loads(plan.resolved())["training"]
    plan = read(folder, with_keys('optimiser = "adam"', "epochs = 90", "validate_every = 7"))
    assert (plan.training.optimiser, plan.training.validate_every) == (AdamOptions(), 7)
    for keys, message in (
        (["steps = 40"], "training.epochs is missing: with decay = .epochs. it must"),
        (["steps = 40", "epochs = 90"], "training.steps, training.epochs.* give exactly one"),
        (["epochs = 4"], "training.warmup = 4: must be below the 4 epochs of the training"),
        (['preset = "mlperff"'], "preset"),
    ):
        text = with_keys(*keys) if "preset" not in keys[0] else RUN.replace("mlperf", "mlperff")
        with pytest.raises(ConfigError, match=message):
            read(folder, text)


def test_its_keys_go_where_they_mean_nothing(folder):
    """Those of files beside simulations, and those of declared networks beside a Keras model."""
    priors = (
        "[data]\n[cosmology]\nOmega_b = 0.05\nh = 0.7\nn_s = 0.96\n[priors]\nOmega_m = [0.2, 0.4]"
    )
    simulated = with_keys('decay = "cosine"')[: -len(FILES)] + f"{priors}\nsigma8 = [0.7, 0.9]\n"
    plan = read(folder, simulated.replace("[data]", "[data]\nsimulations = 256"))
    assert (plan.training.epochs, plan.training.steps) == (None, 256 * 10 // 64)
    plan = read(folder, RUN.replace("[data]", '[network]\nname = "json:loads"\n[data]'))
    assert plan.declaration.is_keras and "dropout" not in plan.to_table()["network"]
    assert read(folder, plan.resolved()).to_table() == plan.to_table()
    with pytest.raises(ConfigError, match=r"1 problem\s+training.optimiser = 3: must be \"adam\""):
        read(folder, with_keys("optimiser = 3"))


@pytest.mark.parametrize("batch", [48, 64])
def test_each_epoch_ends_with_a_validation_whatever_the_batch(folder, batch):
    plan = read(folder, with_keys(f"batch = {batch}", "epochs = 90"))
    steps = 90 * SAMPLES // batch
    due = [n for n in range(1, steps + 1) if plan.is_due(n, plan.training.validate_every)]
    assert due == [-(-epoch * steps // 90) for epoch in range(1, 91)]
    assert [n for n in range(1, 30) if plan.is_due(n, 7)] == [7, 14, 21, 28]


@pytest.mark.parametrize("batch", [64, 256])
def test_rates_change_between_epochs_as_in_the_reference(folder, batch):
    """Epoch e < 4: base + e (peak - base) / 4; a factor holds from the epoch after its own."""
    schedule, each = schedule_of(read(folder, with_keys(f"batch = {batch}"))), SAMPLES // batch
    peak = 1e-3 * batch / 64
    wanted = [1e-3 + epoch * (peak - 1e-3) / 4 for epoch in range(4)]
    wanted += [peak] * 29 + [peak / 4] * 32 + [peak / 8] * 63
    rates = schedule.rate(np.arange(128 * each)).numpy()
    np.testing.assert_allclose(rates, np.repeat(wanted, each), rtol=1e-12)
    assert schedule.rate(each) == rates[each]
    some = tf.constant([0, each - 1, each, 33 * each - 1, 33 * each], tf.int64)
    np.testing.assert_allclose(schedule.rate(some), rates[some.numpy()], rtol=1e-12)


def test_first_weights_are_those_of_keras():
    """Uniform within the limit of `GlorotUniform`, every layer alike; biases are zero."""
    stages = declaration("mlperf").stages(32, 4, 4)
    assert not declaration("mlperf").calibrated
    found = initial_weights(stages, tf.float32, 0, declaration("mlperf").first_weights)
    for kernel, bias in zip(found[::2], found[1::2], strict=True):
        assert not bias.numpy().any()
        theirs = tf.keras.initializers.GlorotUniform(seed=1)(kernel.shape).numpy()
        ours, count = kernel.numpy(), theirs.size
        limit = np.abs(theirs).max()
        assert np.abs(ours).max() == pytest.approx(limit, rel=20 / count)
        assert ours.std() == pytest.approx(theirs.std(), rel=5 / np.sqrt(count))
        assert abs(ours.mean()) < 5 * ours.std() / np.sqrt(count)


def test_the_log_has_the_lines_of_the_benchmark(folder):
    assert TrainingFolder(folder).mlperf_log.name in CONTENTS  # which --overwrite removes
    log = MLPerfLog(folder / "mlperf.log", read(folder, with_keys("batch = 256")))
    log.begin(ranks=8, nodes=2, samples=SAMPLES, validation=16)
    for step in range(12):
        log.step_begins(step)
        if step % 4 == 3:
            log.validation_begins()
            log.validated(0.5 - step / 100)
    log.end(success=True)
    lines = (folder / "mlperf.log").read_text().splitlines()
    assert all(line.startswith(":::MLLOG {") for line in lines)
    found = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]
    assert all(
        list(line) == ["namespace", "time_ms", "event_type", "key", "value", "metadata"]
        for line in found
    )
    message = {line["key"]: line["value"] for line in found}
    counts = ("global_batch_size", "train_samples", "eval_samples")
    assert [message[count] for count in counts] == [256, 1024, 16]
    counts = ("number_of_ranks", "number_of_nodes", "accelerators_per_node")
    assert [message[count] for count in counts] == [8, 2, 4]
    assert message["opt_base_learning_rate"] == pytest.approx(4e-3)
    assert message["opt_learning_rate_decay_boundary_epochs"] == [32, 64]
    assert (message["opt_name"], message["dropout"]) == ("SGD", 0.5)
    keys = [line["key"] for line in found]
    assert keys[-1] == "run_stop" and found[-1]["metadata"]["status"] == "success"
    assert keys.index("init_start") < keys.index("init_stop") < keys.index("run_start")
    of_epochs = [(line["key"], line["metadata"]["epoch_num"]) for line in found
                 if "epoch_num" in line["metadata"]]  # fmt: skip
    each = ("epoch_start", "eval_start", "eval_stop", "eval_error", "epoch_stop")
    assert of_epochs == [(key, epoch) for epoch in (1, 2, 3) for key in each]
    errors = [line["value"] for line in found if line["key"] == "eval_error"]
    assert errors == pytest.approx([0.47, 0.43, 0.39])
