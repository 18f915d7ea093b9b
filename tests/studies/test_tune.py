"""Tuning: the space is checked, the optimum is found, and no trial is counted twice or lost.

The subjects are scripts of a few lines, whose optimum is known. The last test tunes a training.
"""

import contextlib
import csv
import json
import math
import os
import re
import signal
import sqlite3
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from commands import COMMAND, ROOT, flowpm, flowpm_here, plain
from full_disk import disk_of, run_on_disk_of
from scipy.stats import nct
from scipy.stats import t as student

from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.io.files import UnreadableError, WriteError
from flowpm_dist.jobs.run_file import ConfigError, read_table
from flowpm_dist.simulation.demand import TooLargeError
from flowpm_dist.studies.process import STOPPED
from flowpm_dist.studies.subject import Subject
from flowpm_dist.studies.tuning.judges import Judge, constant_value, judge_of
from flowpm_dist.studies.tuning.options import TuneOptions, fresh_seed
from flowpm_dist.studies.tuning.records import JudgedRun, TrialRecord
from flowpm_dist.studies.tuning.results import (
    Candidate,
    Gain,
    ranked,
    verdict_of,
    write_run_file,
)
from flowpm_dist.studies.tuning.runs import (
    DEFAULTS,
    SHARED_BY,
    check_memory,
    prepared,
    repeat,
    threads_of_rank,
)
from flowpm_dist.studies.workers import StopSignals
from meshimpl import launch

SCRIPT = """
import argparse, csv, random, signal, time
from pathlib import Path
p = argparse.ArgumentParser()
p.add_argument("--rate", type=float, default=0.9)
p.add_argument("--batch", type=int, default=16)
p.add_argument("--seed", type=int, default=0)
p.add_argument("--pause", type=float, default=0.0)
p.add_argument("--end", type=float, default=0.0)
p.add_argument("--output", type=Path)
a = p.parse_args()
value = (a.rate - 0.3) ** 2 + ((a.batch - 8) / 8) ** 2 + random.Random(a.seed).gauss(0, 1e-3)
if a.batch == 5:
    raise SystemExit("five is no batch")
def note(what):
    with Path("order.txt").open("a") as file:
        file.write(f"{what} {a.output.parent.name}\\n")
def stop(*_):
    time.sleep(a.end)
    note("end")
    raise SystemExit(1)
signal.signal(signal.SIGTERM, stop)
note("begin")
with (a.output / "metrics.csv").open("w") as file:
    rows = csv.writer(file)
    rows.writerow(["step", "loss", "validation_loss"])
    for step in range(1, 10):
        late = 2.0 if a.batch == 9 and step > 2 else 0.0
        rows.writerow([step, 1.0, value + late + 1 / step if a.batch != 6 else "nan"])
        rows.writerow([step, 1.0, ""])
        file.flush()
        time.sleep(a.pause)
note("end")
"""
SPACE = {"rate": {"low": 0.0, "high": 1.0}, "batch": {"low": 4, "high": 16, "step": 4}}
TRAINING = {
    "box": {"grid": 24, "size": 96.0},
    "cosmology": {"Omega_b": 0.049, "h": 0.67, "n_s": 0.96},
    "priors": {"Omega_m": [0.1, 0.5], "sigma8": [0.6, 1.0]},
    "evolution": {"steps": 2},
    "training": {"batch": 4, "learning_rate": 1e-3, "warmup": 2, "validate_every": 4},
    "data": {"simulations": 16, "reuse": 4, "fill": 16, "validation": 8, "test": 8},
}


def fill(folder):
    """Writes the subjects into a folder."""
    (folder / "script.py").write_text(SCRIPT)
    (folder / "train.toml").write_text(tomli_w.dumps(TRAINING))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a script, and the current one."""
    fill(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ROOT)
    return tmp_path


def run_file(space=None, shortened=None, **tune):
    """Writes tune.toml; the script is its subject unless another is given."""
    tune = {"subject": "script.py", "repeats": 0, "pruning": "none", "startup": 5, **tune}
    table = {"tune": tune, "space": SPACE if space is None else space}
    Path("tune.toml").write_text(tomli_w.dumps(table | {"shortened": shortened or {}}))


def rows_of(path):
    with Path(path).open() as file:
        return list(csv.DictReader(file))


def states(path="out/trials.csv"):
    return [row["state"] for row in rows_of(path)]


@pytest.mark.parametrize(
    "space, message",
    [
        ({"rate": {"low": 3, "high": 3}}, "space.rate low = 3: must be below high = 3"),
        ({"rate": {"low": 0.0, "high": 1.0, "log": True}}, "low = 0.0: must be above 0 with log"),
        ({"rate": {"low": 0, "high": 9, "step": 2}}, "step = 2: high - low = 9 must be a whole"),
        ({"rate": {"low": 1, "high": 9, "step": 2, "log": True}}, "does not go with log = true"),
        ({"rate": {"low": 1, "hihg": 9}}, "there is no option 'hihg'; did you mean high?"),
        ({"rate": 3}, "space.rate must be a table with low and high, or a list of choices"),
        ({"rate": [1, 1]}, "space.rate = [1, 1]: choices must be different"),
        ({"rate": [1]}, "there must be at least two choices"),
        ({"a": {"b": [1, 2]}, "a.b": [1, 2]}, "space.a.b is given twice"),
        ({}, "space is empty: give a key"),
        ({"seed": [1, 2]}, "space.seed is a seed, and trials must not be chosen by luck"),
    ],
)
def test_a_space_with_mistakes(here, space, message):
    run_file(space)
    refused = flowpm_here("tune", "tune.toml", "--check")
    assert refused.returncode == 2 and message in plain(refused.stderr), refused.stderr


def test_a_space_may_be_nested(here):
    run_file({"training": {"batch": [4, 8], "decay": ["cosine", "none"]}, "data.reuse": [1, 2]})
    space = TuneOptions.load("tune.toml").space
    assert {*space} == {"training.batch", "training.decay", "data.reuse"}
    again = TuneOptions.check(TuneOptions.load("tune.toml").to_table(), Path("tune.toml"))
    assert again.space == space


@pytest.mark.parametrize(
    "space, more, message",
    [
        ({"training.lerning_rate": [1e-3, 1e-2]}, {}, "did you mean learning_rate?"),
        ({"training.learning_rate": {"low": -1.0, "high": 1.0}}, {}, "must be a number above 0"),
        ({"training.batch": {"low": 4, "high": 12, "step": 4}}, {}, "multiple of training.batch"),
        ({"network.dropout": {"low": 0.0, "high": 1.0}}, {}, "a share from 0 to below 1"),
        ({"training.warmup": {"low": 0, "high": 16}}, {}, "must be below the 16 steps"),
        ({"data.test": [8, 16]}, {}, "space.data.test belongs to the test set"),
        ({"data.seed": [1, 2]}, {}, "is a seed, and trials must not be chosen by luck"),
        ({"network.loss": ["l1", "l2"]}, {}, "decides what trials are judged by"),
        ({"network.dropout": [0.0, 0.1]}, {"pruning": "asha"}, "validated only at its end"),
        ({"network.dropout": [0.0, 0.1]}, {"subject": "simulate.toml"}, "measures no validation"),
        ({"network.dropout": [0.0, 0.1]}, {"subject": "none.toml"}, "there is no"),
        ({"network.dropout": [0.0, 0.1]}, {"subject": "tune.toml"}, "run file of a study itself"),
        ({"network.dropout": [0.0, 0.1]}, {"seed_keys": ["training.sed"]}, "did you mean seed?"),
        ({"network.dropout": [0.0, 0.1]}, {"seed_keys": ["training.batch"]}, "has training.batch"),
        ({"network.dropout": [0.0, 0.1]}, {"metric": "loss"}, 'must be "validation_loss" or "va'),
        ({"network.dropout": [0.0, 0.1]}, {"first": 3}, 'goes with pruning = "asha" or "median"'),
    ],
)
def test_a_space_that_a_training_does_not_take(here, space, more, message):
    cosmology = {"Omega_m": 0.3, "sigma8": 0.8, **TRAINING["cosmology"]}
    simulation = {"box": TRAINING["box"], "cosmology": cosmology, "initial": {"seed": 1}}
    Path("simulate.toml").write_text(tomli_w.dumps(simulation))
    seldom = {"training.validate_every": 100} if more == {"pruning": "asha"} else {}
    run_file(space, shortened=seldom, **{"subject": "train.toml", **more})
    refused = flowpm_here("tune", "tune.toml", "--check")
    assert refused.returncode == 2 and message in plain(refused.stderr), refused.stderr


def test_the_loss_may_be_tuned_if_another_metric_judges(here):
    """Values must fit the shortened trials, and the repeats at full length, too."""
    run_file({"network.loss": ["l1", "l2"]}, subject="train.toml", metric="validation_mae")
    found = flowpm_here("tune", "tune.toml", "--check")
    assert "1 key, validation_mae" in found.stdout, found.stderr
    longer = {"data.simulations": 24, "data.fill": 24}
    run_file({"training.batch": [4, 6]}, longer, subject="train.toml")
    refused = flowpm_here("tune", "tune.toml", "--check").stderr
    assert "space.training.batch allows training.batch = 6: data.simulations = 16" in refused


def test_without_optuna(here, monkeypatch):
    run_file()
    monkeypatch.setattr("flowpm_dist.studies.tuning.check.find_spec", lambda name: None)
    refused = flowpm_here("tune", "tune.toml", "--check")
    assert refused.returncode == 2
    assert "tune needs the package optuna: pip install optuna" in refused.stderr


@pytest.mark.parametrize("bounded", [False, True])
def test_the_value_of_a_constant_prediction(bounded):
    """The mean of a uniform prior, and the best constant error bar, by integration.

    A network that explains R^2 = 0.05 of the variance is as good as that within a few percent.
    """
    side = 1.0 if bounded else math.sqrt(3)
    x = np.linspace(-side, side, 40_001)
    likelihoods = [np.mean(0.5 * (s + x**2 * np.exp(-s))) for s in np.linspace(-3, 1, 401)]
    truth = {"l1": np.abs(x).mean(), "l2": np.square(x).mean(), "likelihood": min(likelihoods)}
    left = {"l1": 0.95**0.5, "l2": 0.95}
    for loss, constant in truth.items():
        known = constant_value(loss, "validation_loss", bounded=bounded)
        wanted = constant * left[loss] if loss in left else constant + 0.5 * math.log(0.95)
        assert known == pytest.approx(wanted, abs=2e-4)
        mae = constant_value(loss, "validation_mae", bounded=bounded)
        assert mae == pytest.approx(truth["l1"] * 0.95**0.5, abs=1e-4)
    assert constant_value("l1", "loss", bounded=bounded) is None


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A folder with a complete tuning, which no test changes, and what the command did."""
    folder = tmp_path_factory.mktemp("tuned")
    fill(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_file(trials=24, repeats=2, seeds=3)
        return folder, flowpm_here("tune", "tune.toml", "--output", "out")


def test_a_tuning_finds_the_optimum(tuned, monkeypatch):
    """rate = 0.3 and batch = 8; it leaves its tables, its pictures, and the best values."""
    folder, done = tuned
    monkeypatch.chdir(folder)
    assert done.returncode == 0, done.stderr
    trials = rows_of("out/trials.csv")
    assert len(trials) == 24 and {row["state"] for row in trials} == {"complete"}
    best = min(trials, key=lambda row: float(row["value"]))
    assert best["batch"] == "8" and abs(float(best["rate"]) - 0.3) < 0.15
    # Each value is the last of its run, which is the least.
    for row in trials:
        assert float(row["value"]) - 1 / 9 == pytest.approx(bowl(row), abs=5e-3)
    kept = read_table("out/best.toml")
    repeated = rows_of("out/best.csv")
    assert [row["purpose"] for row in repeated] == 2 * ["verdict"] + 2 * ["choice"]
    assert repeated[0]["name"] == f"trial {best['number']}" == repeated[2]["name"]
    assert kept["batch"] == 8 and kept["rate"] == pytest.approx(float(repeated[0]["rate"]))
    # On one seed luck is the same: the difference follows from the bowl alone.
    difference = bowl(repeated[0]) - bowl({"rate": 0.9, "batch": 16})
    assert float(repeated[0]["difference"]) == pytest.approx(difference, abs=1e-8)
    assert float(repeated[0]["error"]) == pytest.approx(0, abs=1e-8)
    assert all(float(row["spread"]) > 1e-5 for row in repeated)
    assert f"On fresh seeds {repeated[0]['name']} beats the defaults by" in done.stdout
    for name in ("history.png", "importances.png", "parallel.png", "report.html"):
        assert Path("out", name).stat().st_size > 3000
    assert "complete" in flowpm_here("tune", "tune.toml", "--output", "out", "--resume").stdout
    listed = plain(flowpm_here("runs").stdout)
    assert "24 trials" in listed and "beats the defaults true" in listed


def bowl(values):
    return (float(values["rate"]) - 0.3) ** 2 + ((float(values["batch"]) - 8) / 8) ** 2


@pytest.mark.parametrize("pruning", ["asha", pytest.param("median", marks=pytest.mark.long)])
def test_trials_that_fall_behind_stop_early(here, pruning):
    """None that is pruned would have become better than the best by more than luck."""
    slow = {"pause": 0.2}
    run_file(
        {"rate": {"low": 0.0, "high": 1.0}}, slow, pruning=pruning, trials=8, startup=2, seed=1
    )
    done = flowpm_here("tune", "tune.toml", "--output", "out")
    assert done.returncode == 0, done.stderr
    trials = rows_of("out/trials.csv")
    pruned = [row for row in trials if row["state"] == "pruned"]
    complete = [row for row in trials if row["state"] == "complete"]
    assert len(pruned) >= 2 and len(pruned) + len(complete) == 8
    best = min(map(bowl_of_rate, complete))
    assert all(bowl_of_rate(row) > best - 0.02 for row in pruned)
    made = [len(rows_of(f"out/trials/{row['folder']}/run/metrics.csv")) for row in pruned]
    assert max(made) < 18  # the rows of a complete one


def bowl_of_rate(row):
    return abs(float(row["rate"]) - 0.3)


def test_failed_and_collapsed_trials_have_names(here):
    """A batch of 5 fails, of 6 has no finite loss, and 16 is no better than a constant.

    A batch of 9 overfits, after it was better than the constant.
    """
    run_file({"batch": [5, 6, 7, 9, 16]}, trials=12, sampler="random", constant=1.0)
    done = flowpm_here("tune", "tune.toml", "--output", "out")
    assert done.returncode == 0, done.stderr
    wanted = {"5": "failed", "6": "collapsed", "7": "complete", "9": "complete"}
    wanted["16"] = "collapsed"
    trials = rows_of("out/trials.csv")
    assert len(trials) == 12 and {row["batch"] for row in trials} == {*wanted}
    for row in trials:
        assert row["state"] == wanted[row["batch"]]
    messages = {row["batch"]: row["message"] for row in trials}
    assert "five is no batch" in messages["5"] and "is not finite" in messages["6"]
    assert "a constant prediction reaches 1" in messages["16"]
    assert json.loads(Path("out/tune.json").read_text())["best"]["values"] == {"batch": 7}


def test_a_killed_worker_loses_no_trial(here):
    """Killed in the second trial, which is made again with its values, and counted once.

    It is repeated only after its process has ended, which takes a second.
    """
    import flowpm_dist.studies.tuning.trials  # noqa: F401  (what follows is to begin at once)

    run_file(shortened={"pause": 0.05, "end": 1.0}, trials=4)
    words = [*COMMAND, "tune", "tune.toml", "--output", "out"]
    worker = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: Path("out/trials/0001/run/metrics.csv").exists())
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    run_file(shortened={"pause": 0.0, "end": 1.0}, trials=4)
    changed = flowpm_here("tune", "tune.toml", "--output", "out", "--resume")
    assert "shortened.pause = 0.0: the tuning in out has 0.05" in changed.stderr
    run_file(shortened={"pause": 0.05, "end": 1.0}, trials=4)
    done = flowpm_here("tune", "tune.toml", "--output", "out", "--resume")
    assert done.returncode == 0, done.stderr
    trials = rows_of("out/trials.csv")
    assert [(row["state"], row["folder"]) for row in trials] == [
        ("complete", f"{number:04d}") for number in range(4)
    ]
    assert "4 trials, 4 complete" in done.stdout
    order = Path("order.txt").read_text().splitlines()
    assert [line for line in order if "0001" in line] == 2 * ["begin 0001", "end 0001"]
    # More trials can be asked for; what was made is kept.
    more = flowpm_here("tune", "tune.toml", "--output", "out", "--resume", "--set", "tune.trials=5")
    assert "5 trials, 5 complete" in more.stdout, more.stderr


def wait_for(condition, seconds=60.0):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_two_workers_share_the_trials_and_a_signal_stops_both(here):
    """One of them is this process. Later a single worker joins with the same run file."""
    run_file(shortened={"pause": 0.1}, trials=8, workers=2, repeats=1, seeds=2, storage="journal")

    def has_begun_a_trial():
        running = Path("out/trials").glob("*/run/metrics.csv")
        return any(1 <= len(rows_of(path)) <= 6 for path in running)

    def stop():
        wait_for(lambda: Path("out/trials.csv").exists() and len(states()) >= 3)
        wait_for(has_begun_a_trial)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    stopped = flowpm_here("tune", "tune.toml", "--output", "out")
    thread.join()
    assert stopped.returncode == 128 + signal.SIGTERM, stopped.stderr
    assert "of 8 trials; go on with --resume" in plain(stopped.stderr)
    assert not processes_with("out/trials"), "runs of the trials are left"
    stopped_rows = [row for row in rows_of("out/trials.csv") if row["state"] == "stopped"]
    assert 1 <= len(stopped_rows) <= 2, "the table is as old as the last trial"
    (log,) = Path("out/workers").iterdir()
    assert "trial" in log.read_text(), "the other worker had none"
    words = ["tune", "tune.toml", "--output", "out", "--resume", "--set", "tune.workers=1"]
    done = flowpm_here(*words)
    assert done.returncode == 0, done.stderr
    assert [*Path("out/workers").iterdir()] == [log]
    trials = rows_of("out/trials.csv")
    assert [row["state"] for row in trials] == 8 * ["complete"]
    ended = {row["folder"]: row for row in trials}
    assert len(ended) == 8
    assert all(ended[row["folder"]]["rate"] == row["rate"] for row in stopped_rows)
    assert len(rows_of("out/best.csv")) == 2


def processes_with(text):
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if text in line and os.getcwd() in line]


def candidate(name, scores, values=None):
    """Values that were repeated, by the value on each seed; None for a run that failed."""
    # A run that failed in the middle has a value, which does not count.
    runs = [JudgedRun("failed", 0.1) if x is None else JudgedRun("complete", x) for x in scores]
    return Candidate(name, values or {}, runs)


def gain_of(winner, defaults):
    """The gain of trial 3, by the values on each seed."""
    return Gain(
        candidate("trial 3", winner, {"rate": 0.1}), candidate(DEFAULTS, defaults, {"rate": 0.2})
    )


TRIAL = TrialRecord("complete", 1.0, number=3, values={"rate": 0.1})


def test_repeats_are_chosen_by_their_mean():
    """Means and spreads by hand; a missing run is left out, and puts values last."""
    values = {"trial 5": [0.5, None, 0.7], "trial 7": [2.0, 4.0, 3.0], "trial 3": [1.0, 2.0, 3.0]}
    first, second, last = ranked(candidate(name, scores) for name, scores in values.items())
    assert [first.name, second.name, last.name] == ["trial 3", "trial 7", "trial 5"]
    assert (first.mean, first.spread) == (2.0, 1.0)
    assert (last.failed, last.mean) == (1, pytest.approx(0.6))


def test_the_gain_is_tested_by_pairs(here):
    """Differences, their error and the limits of Student's t with 2 degrees of freedom by hand."""
    gain = gain_of([1.0, 2.0, 3.0], [2.0, 4.0, 3.0])
    assert (gain.pairs, gain.mean) == (3, 1.0)  # 1, 2 and 0
    assert gain.error == pytest.approx(1 / math.sqrt(3))
    assert gain.limits == pytest.approx((1 - 2.919986 / math.sqrt(3), 1 + 2.919986 / math.sqrt(3)))
    verdict = verdict_of(gain, [TRIAL])
    assert verdict.beats is None and (verdict.name, verdict.values) == (DEFAULTS, {"rate": 0.2})
    assert verdict.sentence == (
        "Not decided: on 3 fresh seeds trial 3 gains 1 +- 0.58 over the defaults (95% limits "
        "-0.686 and 2.69). The defaults are kept; more seeds may decide."
    )


@pytest.mark.parametrize(
    "gains, worth, beats, sentence",
    [
        ([1.0, 1.1, 0.9], 0.0, True, "On fresh seeds trial 3 beats the defaults by 1 +- 0.058"),
        ([1.0, 1.1, 0.9], 0.9, True, "beats the defaults by 1"),
        ([1.0, 1.1, 0.9], 1.1, False, "less than tune.worth = 1.1: the defaults stand"),
        ([0.1, 0.2, -0.2], 1.1, False, "gains 0.0333 +- 0.12 over the defaults (95% limits"),
        ([-1.0, -1.1, -0.9], 0.0, False, "gains -1 +- 0.058 over the defaults (95% limits"),
        ([1.0, 1.0, 1.0], 0.0, True, "beats the defaults by 1 +- 0"),
        ([0.0, 0.0, 0.0], 0.0, False, "the defaults stand"),
        ([1.0, 1.0], 0.0, None, "Not decided: a verdict needs at least 3 seeds, and a value on e"),
        ([1.0, 1.0, 1.0, None], 0.0, None, "Not decided: a verdict needs at least 3 seeds"),
    ],
)
def test_the_verdict(gains, worth, beats, sentence):
    """Better, better by less than matters, no better, or not decided."""
    scores = [None if gain is None else -gain for gain in gains]
    verdict = verdict_of(gain_of(scores, np.zeros(len(gains))), [TRIAL], worth)
    assert verdict.beats is beats and sentence in verdict.sentence
    assert verdict.values == {"rate": 0.1 if beats else 0.2}


def test_the_verdict_without_values():
    unknown = [None] * 3
    no_defaults = verdict_of(gain_of([1.0, 1.0, 1.0], unknown), [TRIAL])
    assert "no value on fresh seeds" in no_defaults.sentence and no_defaults.beats is None
    assert (no_defaults.name, no_defaults.values) == ("trial 3", {"rate": 0.1})
    none = verdict_of(gain_of(unknown, unknown), [TRIAL])
    assert "No run on fresh seeds has a value" in none.sentence and none.name == DEFAULTS
    lost = verdict_of(gain_of(unknown, [1.0, 1.0, 1.0]), [TRIAL])
    assert lost.name == DEFAULTS and lost.beats is None
    assert verdict_of(None, [TRIAL]).name == "trial 3"
    assert verdict_of(None, []).sentence == "No trial is complete: the defaults stand."


def share_called_better(true_gain, seeds, tunings=2_000):
    """How often the best of three trials is called better than the defaults.

    All trials have the same true gain, and each run has luck of deviation 1.
    """
    draws = np.random.default_rng(seeds)

    def repeated(name, true):
        return candidate(name, draws.normal(true, size=seeds))

    better = 0
    for _ in range(tunings):
        chosen = ranked(repeated(f"trial {number}", -true_gain) for number in range(3))[0].name
        gain = Gain(repeated(chosen, -true_gain), repeated(DEFAULTS, 0.0))
        better += bool(verdict_of(gain, [TRIAL]).beats)
    return better / tunings


def test_how_often_the_verdict_is_wrong():
    """Without a gain at most 5 %, within four errors of 2,000 draws; with one, more with seeds.

    A gain of one deviation of a run is detected with the power of the paired t-test, from the
    noncentral t distribution: 0.21, 0.56 and 0.92.
    """
    error = math.sqrt(0.05 * 0.95 / 2000)
    for seeds in (3, 8, 20):
        assert share_called_better(0.0, seeds) < 0.05 + 4 * error
    powers = {seeds: share_called_better(1.0, seeds) for seeds in (3, 8, 20)}
    for seeds, power in powers.items():
        shift = math.sqrt(seeds / 2)
        exact = nct.sf(student.ppf(0.95, seeds - 1), seeds - 1, shift)
        assert power == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / 2000))
    assert powers[3] < powers[8] < powers[20]


def test_runs_for_the_verdict_have_guided_no_choice(here, monkeypatch):
    """They have seeds and folders of their own: the lowest of several means is lucky."""
    runs = []

    def judged_run(options, values, folder, *rest):
        runs.append((values["seed"], folder))
        return JudgedRun("complete", 1.0)

    monkeypatch.setattr("flowpm_dist.studies.tuning.runs.judged_run", judged_run)
    run_file(seeds=4)
    options, place, stop = TuneOptions.load("tune.toml"), Path("out"), StopSignals(print)
    for purpose in ("choice", "verdict"):
        values = {"trial 3": {"rate": 0.1}}
        repeat(values, purpose, options, Judge(), place, stop, lambda *shown: None)
    seeds, folders = zip(*runs, strict=True)
    assert len({*seeds}) == len({*folders}) == 8
    seeds = [fresh_seed(0, n, purpose) for n in range(100) for purpose in ("choice", "verdict")]
    assert len({*seeds}) == 200


def test_the_best_run_file_has_the_defaults_where_they_stand(here):
    run_file({"network.dropout": [0.0, 0.2]}, subject="train.toml")
    gain = Gain(
        candidate("trial 1", [1.0, 3.0, 2.0], {"network.dropout": 0.2}),
        candidate(DEFAULTS, [1.5, 3.0, 2.1], {"network.dropout": 0.0}),
    )
    write_run_file(Path("best.toml"), TuneOptions.load("tune.toml"), verdict_of(gain, [TRIAL]))
    assert "# Not decided: " in Path("best.toml").read_text()
    assert read_table("best.toml")["network"]["dropout"] == 0.0


@pytest.mark.parametrize("again", [False, True])
def test_a_stopped_trial_competes_once(here, again):
    """ASHA promotes the second best of six, also if the best was stopped and run again."""
    from flowpm_dist.studies.tuning.trials import Trials

    run_file({"rate": {"low": 0.0, "high": 1.0}}, pruning="asha", sampler="random")
    options = TuneOptions.load("tune.toml")
    trials = Trials(Path("storage"), Path("runs"), options.tune, options.space, first=1)
    best = trials.next()
    best.falls_behind(1, 0.4)
    if again:
        values = best.values
        trials.end(best, JudgedRun(STOPPED, seconds=1.0))
        best = trials.next()
        assert best.values == values
        assert not best.falls_behind(1, 0.4)
    others = [trials.next() for _ in range(6)]  # a trial without its worker would be lost
    values = (1.0, 1.1, 1.2, 1.3, 0.5, 0.6)
    behind = [each.falls_behind(1, value) for each, value in zip(others, values, strict=True)]
    assert behind == [True, True, True, True, False, True]


def trials_in(here, **tune):
    """The trials of a tuning, in a storage of its own."""
    from flowpm_dist.studies.tuning.trials import Trials

    run_file({"rate": {"low": 0.0, "high": 1.0}}, sampler="random", **tune)
    options = TuneOptions.load("tune.toml")
    return lambda: Trials(Path("storage"), Path("runs"), options.tune, options.space, first=1)


@pytest.mark.parametrize("storage", ["journal", "sqlite"])
def test_a_storage_names_no_folder_but_a_trials_own(here, storage):
    """What is in a trial's folder may be removed: a run that cannot be resumed, and weights."""
    Path("precious/run/weights").mkdir(parents=True)
    trials = trials_in(here, storage=storage)()
    trial = trials.next()
    trial.optuna_trial.set_user_attr("folder", "../precious")
    trials.end(trial, JudgedRun(STOPPED))
    again = trials_in(here, storage=storage)()
    assert [record.folder for record in again.records] == ["0000"]
    assert again.next().folder == Path("runs/0000")
    assert Path("precious/run/weights").exists() and [*Path("runs").iterdir()] == [
        again._runs / "0000"
    ]


def test_a_full_disk_costs_a_journal_its_last_line_alone(here):
    """The half line that it leaves would otherwise be continued by the next one."""
    open_trials, journal = trials_in(here, storage="journal"), Path("storage/journal.log")
    trials = open_trials()
    trial = trials.next()
    whole = journal.read_bytes()
    with disk_of(len(whole) + 40), pytest.raises(WriteError, match="cannot write .*journal.log: "):
        trial.optuna_trial.set_user_attr("message", "x" * 100)
    assert journal.read_bytes().startswith(whole) and len(journal.read_bytes()) == len(whole) + 40
    with pytest.warns(UserWarning, match=f"{journal}: removed a last line"):
        trials.end(trial, JudgedRun("complete", 1.0, 1.0))
    assert [json.loads(line) for line in journal.read_bytes()[len(whole) :].splitlines()]
    with journal.open("a") as file:
        file.write('{"op_code":')
    with pytest.warns(UserWarning, match=f"{journal}: removed a last line"):
        again = open_trials()
    assert [record.value for record in again.records] == [1.0] and again.next().number == 1
    assert not Path("storage/journal.log.lock").exists()


def test_a_database_that_cannot_be_written_is_named(here, monkeypatch):
    """On a full disk, and where another process holds its lock; nothing is lost."""
    monkeypatch.setattr("flowpm_dist.studies.tuning.storage.LOCK_SECONDS", 0.1)
    run_file({"rate": {"low": 0.0, "high": 1.0}}, trials=1)
    size = 2**15  # smaller than an empty database
    full = run_on_disk_of(size, [*COMMAND, "tune", "tune.toml", "--output", "full"])
    assert full.returncode == 1 and "Traceback" not in full.stderr
    assert re.search(
        r"error: cannot write full/storage/study.db: .*(full|disk)", plain(full.stderr)
    )
    assert flowpm_here("tune", "tune.toml", "--output", "out").returncode == 0
    with contextlib.closing(sqlite3.connect("out/storage/study.db")) as other:
        other.execute("BEGIN EXCLUSIVE")
        words = ["tune", "tune.toml", "--output", "out", "--resume", "--set", "tune.trials=2"]
        locked = flowpm_here(*words)
        assert locked.returncode == 1
        message = "cannot write out/storage/study.db: database is locked"
        assert message in plain(locked.stderr)
    assert "2 trials, 2 complete" in flowpm_here(*words).stdout


def test_a_damaged_line_of_a_journal_is_named(here):
    open_trials, journal = trials_in(here, storage="journal"), Path("storage/journal.log")
    open_trials().next().claim.give_up()
    lines = journal.read_text().splitlines(keepends=True)
    lines[1] = lines[1][:9] + lines[1]
    journal.write_text("".join(lines))
    with pytest.raises(UnreadableError, match=f"^{journal}, line 2 is damaged .*--overwrite"):
        open_trials()
    assert journal.read_text() == "".join(lines)


def test_a_script_without_a_seed_fails_in_its_first_trial(here):
    Path("script.py").write_text(SCRIPT.replace('"--seed"', '"--luck"').replace("a.seed", "a.luck"))
    run_file(trials=1, repeats=1)
    done = flowpm_here("tune", "tune.toml", "--output", "out")
    assert "unrecognized arguments: --seed 0" in rows_of("out/trials.csv")[0]["message"]
    for attempt in (done, flowpm_here("tune", "tune.toml", "--output", "out", "--resume")):
        assert attempt.returncode == 1
        message = "error: No trial is complete: the defaults stand. trial 0 is failed: "
        assert message in plain(attempt.stderr)
    assert Path("out/best.toml").exists()


def test_collapse_is_judged_by_the_best_value():
    """A search is judged by its last value. A run that has diverged has collapsed."""
    judge = Judge(constant=1.0)
    assert not judge.has_collapsed([0.5, 1.2]) and judge.has_collapsed([1.2, 1.1])
    assert judge.has_collapsed([0.5, math.nan]) and judge.has_collapsed([math.inf])
    assert not judge.has_collapsed([math.nan, 0.5])
    assert Judge(constant=1.0, keeps_best=False).has_collapsed([0.5, 1.2])
    assert not Judge().has_collapsed([1e9])


def test_workers_share_the_host(here, monkeypatch):
    """Memory, as many times as there are workers, and cores; a given constant holds in trials."""
    run_file({"network.dropout": [0.0, 0.1]}, subject="train.toml", workers=3, constant=5.0)
    options = TuneOptions.load("tune.toml")
    job = Subject(options.tune.subject).plan({}, 1, Path("planned"))
    assert prepared(options, {"network.dropout": 0.1}, Path("trial")).constant == 5.0
    memory = launch.HostMemory(int(2.5 * job.costs.estimate.on_host), 0, False)
    monkeypatch.setattr(launch, "host_memory", lambda: memory)
    monkeypatch.setattr(launch, "available_cores", lambda: 2)
    check_memory(job, 2)
    with pytest.raises(TooLargeError, match=r"tune.workers = 3: .* 2 would fit"):
        check_memory(job, 3)
    with pytest.raises(TooLargeError, match="tune.workers = 3"):
        prepared(options, {}, Path("trial"))
    alone = TuneOptions.load("tune.toml", {("tune", "workers"): 1})
    assert prepared(alone, {}, Path("trial"))
    monkeypatch.setenv(SHARED_BY, "3")  # of a further worker
    with pytest.raises(TooLargeError, match="tune.workers = 3"):
        prepared(alone, {}, Path("trial"))
    monkeypatch.delenv(launch.THREADS, raising=False)
    assert [threads_of_rank(1, workers) for workers in (1, 2, 3)] == [None, 1, 1]
    monkeypatch.setattr(launch, "available_cores", lambda: 13)
    assert threads_of_rank(2, 3) == 2
    monkeypatch.setattr(launch, "available_cores", lambda: 2)
    found = plain(flowpm_here("tune", "tune.toml", "--check").stdout)
    assert "tune.workers = 3: 3 ranks share 2 cores here" in found and "2 would fit" in found


def test_seeds_that_decide_nothing_are_a_warning(here):
    for repeats, warned in ((0, False), (1, True)):
        run_file(repeats=repeats, seeds=2)
        checked = flowpm_here("tune", "tune.toml", "--check")
        assert ("tune.seeds = 2: a verdict needs at least 3" in plain(checked.stdout)) is warned


def test_a_tuning_is_one_process(here):
    run_file()
    check = ["tune", "tune.toml", "--check"]
    assert "leave --ranks out" in flowpm_here(*check, "--ranks", "2").stderr
    assert "give mesh.shape in the run file" in flowpm_here(*check, "--mesh", "row:2").stderr
    size = ["--nodes", "1", "--ranks-per-node", "1", "--time", "01:00:00", "--dry-run"]
    several = flowpm_here("submit", "tune", "tune.toml", *size, "--set", "tune.ranks=2")
    assert several.returncode == 2 and "has jobs of 2 ranks" in several.stderr
    written = flowpm_here("submit", "tune", "tune.toml", *size, "--workers", "2")
    assert written.returncode == 0 and "2 workers" in written.stdout
    assert "tune" in flowpm_here("runs", "tune-tuning").stdout


def test_the_example_is_checked():
    example = Path(ROOT, "examples", "tune.toml")
    found = flowpm_here("tune", str(example), "--check")
    assert found.returncode == 0, found.stderr
    assert TuneOptions.load(example).tune.trials >= 30


@pytest.mark.long
@pytest.mark.budget(400)
def test_a_training_is_tuned(here):
    """Stopped in a trial, which continues from its checkpoint; `best.toml` is a whole run file."""
    space = {"training.learning_rate": {"low": 1e-4, "high": 1e-2, "log": True}}
    space |= {"network.dropout": [0.0, 0.2]}
    tune = {"trials": 3, "repeats": 1, "seeds": 2, "constant": 1e6}  # no trial collapses
    run_file(space, {"data.reuse": 2}, subject="train.toml", **tune)
    words = [*COMMAND, "tune", "tune.toml", "--output", "out"]
    worker = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    table = Path("out/trials/0000/run/metrics.csv")
    wait_for(lambda: table.exists() and len(rows_of(table)) > 1, 200)
    worker.send_signal(signal.SIGTERM)
    worker.communicate(timeout=120)
    assert worker.returncode == 128 + signal.SIGTERM
    done = flowpm("tune", "tune.toml", "--output", "out", "--resume", timeout=400)
    assert done.returncode == 0, done.stderr
    assert states() == 3 * ["complete"]
    assert re.search("training from step [1-9]", Path("out/trials/0000/log.txt").read_text())
    assert not Path("out/trials/0000/run/checkpoints").exists()
    best = read_table("out/best.toml")
    assert best["training"]["batch"] == 4 and "shape" not in best.get("mesh", {})
    repeats = [read_table(path) for path in Path("out").glob("repeats/*/*/run/run.toml")]
    assert len(repeats) == 4
    seeds = {fresh_seed(0, number, "verdict") for number in range(2)}
    assert {each["training"]["seed"] for each in repeats} == seeds
    checked = flowpm("train", "out/best.toml", "--check")
    assert checked.returncode == 0, checked.stderr


def test_seeds_of_arrays_do_not_move_the_test_set(here):
    np.save("volumes.npy", np.ones((40, 24, 24, 24), np.float32))
    rows = np.random.default_rng(0).uniform(0.6, 1.0, (40, 1))
    np.savetxt("table.txt", rows, header="sigma8", comments="# ")
    data = {"source": "arrays", "volumes": "volumes.npy", "dtype": "float32", "unit": "density"}
    data |= {"table": "table.txt", "validation": 8, "test": 8}
    training = {"batch": 4, "steps": 8, "validate_every": 4, "warmup": 1}
    table = {"box": TRAINING["box"], "priors": {"sigma8": [0.6, 1.0]}, "training": training}
    Path("train.toml").write_text(tomli_w.dumps({**table, "data": data}))
    run_file({"data.seed": [1, 2]}, subject="train.toml")
    assert "out of the test set" in flowpm_here("tune", "tune.toml", "--check").stderr
    assert judge_of(TrainingPlan.load("train.toml")).seeds == ("training.seed",)
    run_file({"network.dropout": [0.0, 0.2]}, subject="train.toml", seed_keys=["data.seed"])
    assert "out of the test set" in flowpm_here("tune", "tune.toml", "--check").stderr
    run_file({"network.dropout": [0.0, 0.2]}, subject="train.toml", seed_keys=["training.seed"])
    assert flowpm_here("tune", "tune.toml", "--check").returncode == 0


def test_the_run_file_is_checked_as_one(here):
    run_file({"rate": [1, 2]}, {"rate": 3})
    with pytest.raises(ConfigError, match=r"shortened.rate is in \[space\], too"):
        TuneOptions.load("tune.toml")
