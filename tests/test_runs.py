"""Keys set from outside, how much a job says, lists of runs, and run files run from Python."""

import json
import os
import re
import shutil
import signal
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from commands import flowpm_here, folder_with, plain, python
from run_files import RUN
from test_cli_training import RUN as TRAINING

import flowpm_dist as fpm
from flowpm_dist.cosmoflow.planning.folder import TrainingFolder
from flowpm_dist.cosmoflow.training.dataset import UNFINISHED
from flowpm_dist.io.errors import UserError
from flowpm_dist.jobs.job import command_of, read_record
from flowpm_dist.jobs.run_file import LEFT_OUT, parse_settings
from flowpm_dist.reconstruction.work import ReconstructionFolder

here = folder_with(RUN)


def test_settings_are_read_as_in_a_run_file():
    texts = ["a.b=3", "a.c = [1, 2.5]", 'a.d="x y"', "a.e=cola", "a.f=row:2,col:2", "a.g=", "a.b=4"]
    assert parse_settings(texts) == {
        ("a", "b"): 4, ("a", "c"): [1, 2.5], ("a", "d"): "x y", ("a", "e"): "cola",
        ("a", "f"): "row:2,col:2", ("a", "g"): LEFT_OUT,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps=3", "--set steps=3: must be SECTION.KEY=VALUE, such as evolution.steps=20"),
        ("box.grid=[1,", "--set box.grid=[1,: the value must be as in a run file"),
        ("evolution.steps=0", "evolution.steps = 0: must be a whole number of at least 1"),
        ("evolution.steps=two", "evolution.steps = 'two': must be a whole number"),
        ("evolution.stebs=2", "evolution.stebs is not a key; did you mean steps?"),
        ("evolutoin.steps=2", "evolutoin is not a section; did you mean evolution?"),
        ("initial.seed=", "initial.seed, initial.white_noise neither is given"),
    ],
)
def test_a_wrong_setting_is_told_as_in_a_run_file(here, text, message):
    done = flowpm_here("simulate", "run.toml", "--set", text)
    assert done.returncode == 2
    assert message in plain(done.stderr)


def test_every_command_with_a_run_file_takes_settings(here):
    Path("train.toml").write_text(TRAINING)
    for words in (["train", "train.toml"], ["dataset", "train.toml", "--output", "set"]):
        done = flowpm_here(*words, "--set", "training.batch=0")
        assert "training.batch = 0: must be a whole number of at least 1" in plain(done.stderr)
    example = Path(__file__).parents[1] / "examples" / "reconstruct.toml"
    done = flowpm_here("reconstruct", str(example), "--set", "search.keep=0")
    assert "search.keep = 0: must be a whole number of at least 1" in plain(done.stderr)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two simulations, the second with more steps by --set and quiet; and what they said."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "run.toml").write_text(RUN)
    words = ["simulate", str(folder / "run.toml"), "--output"]
    one = flowpm_here(*words, str(folder / "one"), "--verbose")
    more = flowpm_here(*words, str(folder / "more"), "-q", "--set", "evolution.steps=3")
    assert (one.returncode, more.returncode) == (0, 0), (one.stderr, more.stderr)
    return folder, one, more


def test_a_setting_is_in_the_resolved_run(two):
    folder, _, _ = two
    assert tomllib.loads((folder / "more/run.toml").read_text())["evolution"]["steps"] == 3
    assert len(json.loads((folder / "more/timings.json").read_text())["steps"]) == 3


def test_a_quiet_run_says_its_results_and_a_verbose_one_where_it_runs(two):
    _, verbose, quiet = two
    assert quiet.stderr == ""
    assert "Results in" in quiet.stdout
    assert "1 rank, " in verbose.stderr and "numpy " in verbose.stderr
    assert "step 2/2" in verbose.stderr


def test_a_list_of_runs_has_their_states_and_results(two, here):
    folder, _, _ = two
    shutil.copytree(folder / "more", "runs/more")
    running = TrainingFolder(here / "runs/net")
    running.begin(resume=False)  # and holds its lock
    stopped = TrainingFolder(here / "runs/stopped")
    stopped.begin(resume=False)
    stopped.write_mark(complete=False, step=3, steps=8)
    stopped.release()
    (stopped.metrics).write_text("step,loss,validation_loss\n0,0.5,\n1,0.4,0.6\n2,0.25,\n")
    found = ReconstructionFolder(here / "runs/found")
    found.begin(resume=False)
    found.write_mark(complete=True)
    found.release()
    found.result.write_text(json.dumps({"parameters": {"sigma8": {"value": 0.8125}}}))
    Path("runs/judged").mkdir()
    scores = {"generator": "flowpm-dist", "split": "test", "samples": 4, "main": "network",
              "trainings": [{"folder": str(stopped.path)}],
              "scores": {"network": {"sigma8": {"rmse_over_mean": 0.25}}}}  # fmt: skip
    Path("runs/judged/scores.json").write_text(json.dumps(scores))
    Path("runs/set").mkdir()
    Path("runs/set", UNFINISHED).touch()
    Path("runs/other").mkdir()
    shutil.copytree(folder / "more/snapshot.zarr", "runs/saved/snapshot.zarr")  # as State.save does
    for name, text in {
        "cut": '{"steps": [',
        "deep": "[" * 100_000,
        "list": '{"steps": ["x"]}',
    }.items():
        shutil.copytree(folder / "more", f"runs/{name}")
        Path("runs", name, "timings.json").write_text(text)
    lines = flowpm_here("runs", "runs").stdout.splitlines()
    running.release()
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines}
    names = ("cut", "deep", "found", "judged", "list", "more", "net", "saved", "set", "stopped")
    assert list(rows) == ["run", *(f"runs/{n}" for n in names)]
    for name in ("cut", "deep"):
        assert rows[f"runs/{name}"].startswith("- damaged 20")
        assert rows[f"runs/{name}"].endswith("error: timings.json is damaged")
    assert rows["runs/list"].startswith("- damaged 20")
    assert re.fullmatch(r"simulation complete [-0-9]+ [:0-9]+ -", rows["runs/saved"])
    assert rows["runs/more"].startswith("simulation complete 3/3 steps 20")
    assert "P/linear at 0." in rows["runs/more"]
    assert rows["runs/net"].startswith("training running 20")
    assert rows["runs/stopped"].startswith("training stopped 3/8 steps")
    assert rows["runs/stopped"].endswith("loss 0.25, validation loss 0.6")
    assert rows["runs/found"].startswith("reconstruction complete")
    assert rows["runs/found"].endswith("sigma8 0.8125")
    assert rows["runs/set"].startswith("dataset stopped")
    assert rows["runs/judged"].startswith("evaluation complete 4 samples 20")
    assert rows["runs/judged"].endswith("RMSE of sigma8 / mean's 0.25")


def test_a_comparison_has_what_differs_and_nothing_else(two):
    folder, _, _ = two
    lines = flowpm_here("runs", str(folder), "--compare").stdout.splitlines()
    rows = {line.split("  ")[0]: line.split() for line in lines}
    assert set(rows) >= {"done", "evolution.steps", "seconds"}
    assert rows["evolution.steps"][1:] == ["3", "2"]
    assert not [name for name in rows if name.startswith(("box", "cosmology", "mesh", "kind"))]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none"], "none: there is no such folder"),
        (["."], "no runs in .: give the folders that commands wrote"),
    ],
)
def test_folders_without_runs(here, words, message):
    done = flowpm_here("runs", *words)
    assert done.returncode == 2
    assert message in done.stderr


def test_the_sections_say_the_command():
    for name, command in (("demo", "simulate"), ("train", "train"), ("reconstruct", "reconstruct"),
                          ("sample", "reconstruct"), ("sigma8", "reconstruct"),
                          ("cosmoflow", "train")):  # fmt: skip
        path = Path(__file__).parents[1] / "examples" / f"{name}.toml"
        assert command_of(set(tomllib.loads(path.read_text()))) == command, name


def test_a_run_from_python_is_that_of_the_command(two, here):
    folder, _, _ = two
    table = {**tomllib.loads(RUN), "box": {"grid": np.int64(16), "size": np.array([64.0] * 3)}}
    found = fpm.run(table, here / "again", settings={"evolution.steps": 3}, quiet=True)
    assert found == read_record(here / "again")
    assert (found.kind, found.state, found.steps) == ("simulation", "complete", "3/3 steps")
    power = [name for name in found.results if name.startswith("P/linear")]
    assert found.results[power[0]] == pytest.approx(read_record(folder / "more").results[power[0]])
    assert sorted(os.listdir()) == ["again", "run.toml"]
    with pytest.raises(UserError, match="again holds a finished run: add --overwrite"):
        fpm.run("run.toml", "again", settings={"evolution.steps": 3})


def test_mistakes_from_python_are_exceptions_and_load_no_tensorflow(here):
    script = (
        "import sys, flowpm_dist as fpm\n"
        "try: fpm.run({'box': {'grid': 15, 'size': 64.0}}, 'out')\n"
        "except ValueError as error: print(error)\n"
        "print('tensorflow' in sys.modules)"
    )
    done = python(script)
    assert done.stdout.startswith("the run: "), done.stderr
    assert "box.grid = 15: must be an even whole number" in done.stdout
    assert done.stdout.endswith("False\n")
    with pytest.raises(UserError, match="output is missing"):
        fpm.run({"box": {}})


def test_an_interrupted_run_still_tells_how_it_ended(here, monkeypatch, capfd):
    command = here / "command"
    command.write_text("""#!/bin/sh
        trap 'echo stopping after this step >&2
            echo "error: stopped by SIGINT; a checkpoint of $3 is kept" >&2; exit 130' INT
        sleep 0.5
        kill -INT $PPID
        while :; do sleep 0.05; done
    """)
    command.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(command))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt, match="stopped by SIGINT; a checkpoint of simulate"):
            fpm.run("run.toml", "out")
    finally:
        signal.signal(signal.SIGINT, before)
    assert "stopping after this step" in capfd.readouterr().err
