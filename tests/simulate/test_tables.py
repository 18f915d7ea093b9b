"""Universes from the rows of a table: in one process, on two ranks, and as an array of jobs."""

import os
import shutil
import signal
from types import SimpleNamespace

import numpy as np
import pytest
from commands import flowpm, flowpm_here, folder_with

from flowpm_dist.io import load_snapshot
from flowpm_dist.simulate import session
from flowpm_dist.simulation.simulation import Simulation

RUN = """
[box]
grid = 8
size = 32.0
[cosmology]
Omega_m = 0.31
Omega_b = 0.049
h = 0.68
n_s = 0.97
sigma8 = 0.8
[initial]
seed = 1
[evolution]
steps = 2
[run]
halo = 3
[output]
fields = []
figures = false
"""
TABLE = "cosmology.sigma8, initial.seed,cosmology.A_s\n0.7,3,\n0.9,4,\n,5,2e-9\n"
SIZE = ("--nodes", "1", "--ranks-per-node", "1", "--time", "1:00:00", "--dry-run")

here = folder_with(RUN)


def spectrum(folder):
    return np.loadtxt(folder / "power_spectrum.csv", delimiter=",", skiprows=1)


def test_each_row_is_a_run_of_its_own(here):
    """Equal to what --set gives; finished rows are skipped, others begun or made again."""
    (here / "table.csv").write_text(TABLE)
    words = ["simulate", "run.toml", "--table", "table.csv", "--output", "all"]
    done = flowpm_here(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"all-{n}: complete" for n in range(3)]
    folders = [here / f"all-{n}" for n in range(3)]
    for folder in folders:
        names = {path.name for path in folder.iterdir()} - {"report.html", "provenance.json"}
        assert names == {"snapshot.zarr", "power_spectrum.csv", "run.toml", "timings.json"}
        assert not load_snapshot(folder).arrays
    assert [load_snapshot(folder).attributes["seed"] for folder in folders] == [3, 4, 5]
    own = ["initial.seed=5", "cosmology.sigma8=", "cosmology.A_s=2e-9"]
    alone = flowpm_here("simulate", "run.toml", *(word for s in own for word in ("--set", s)))
    assert alone.returncode == 0, alone.stderr
    np.testing.assert_array_equal(spectrum(folders[2]), spectrum(here / "run-output"))

    before = {folder: (folder / "timings.json").stat().st_mtime_ns for folder in folders}
    assert "--resume" in flowpm_here(*words).stderr
    shutil.rmtree(folders[1])
    done = flowpm_here(*words, "--resume")
    assert done.stdout.splitlines() == ["all-1: complete"]
    kept = [(folder / "timings.json").stat().st_mtime_ns == before[folder] for folder in folders]
    assert kept == [True, False, True]
    assert flowpm_here(*words, "--resume").stdout.count("is complete") == 3
    script = flowpm_here("submit", *words, *SIZE)
    assert "all-*: the work is complete" in script.stderr


def test_steps_of_short_rows_are_one_call(here, monkeypatch):
    """Not where a checkpoint or a trace follows them, nor in a run of its own."""
    (here / "table.csv").write_text("initial.seed\n3\n")
    followed = []
    run = Simulation.run

    def noted(*arguments, **given):
        followed.append((given["progress"] is not None, given["after_step"] is not None))
        return run(*arguments, **given)

    monkeypatch.setattr(Simulation, "run", noted)
    row = ["--table", "table.csv"]
    for number, more in enumerate(
        (row, [], [*row, "--set", "output.checkpoint_every=1"], [*row, "--trace", "2"])
    ):
        done = flowpm_here("simulate", "run.toml", *more, "--output", f"out{number}")
        assert done.returncode == 0, done.stderr
    monkeypatch.setattr(session, "SHORT", 1)
    assert flowpm_here("simulate", "run.toml", *row, "--output", "long").returncode == 0
    assert followed == [(False, False), *[(True, True)] * 4]


@pytest.mark.budget(40)
def test_a_table_on_one_rank_and_on_two(here):
    """On two in processes of their own, which TensorFlow begins in once."""
    (here / "table.csv").write_text(TABLE)
    words = ["simulate", "run.toml", "--table", "table.csv"]
    for command, ranks, name in ((flowpm_here, "1", "one"), (flowpm, "2", "two")):
        done = command(*words, "--ranks", ranks, "--output", name)
        assert done.returncode == 0, done.stderr
    for n in range(3):
        one, two = (spectrum(here / f"{name}-{n}") for name in ("one", "two"))
        np.testing.assert_allclose(two[:, 1], one[:, 1], rtol=1e-4)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (TABLE + "0.7,-1,\n", "t.csv, row 3 (counted from 0): run.toml: 1 problem"),
        (TABLE + "0.7,-1,\n", "initial.seed = -1: must be"),
        (TABLE + "0.7,-1,\n0.8,-1,\n", "t.csv, row 3; row 4 (counted from 0): run.toml: 1 problem"),
        (TABLE + 12 * "0.7,-1,\n", "row 12 and 2 more (counted from 0): run.toml: 1 problem"),
        (TABLE + "[1,6,\n", "row 3 (counted from 0): --set cosmology.sigma8=[1: the value"),
        (TABLE + "0.7,6\n", "t.csv: row 3 (counted from 0) has 2 values for 3 columns"),
        ("seed\n1\n", "the column 'seed' must be SECTION.KEY"),
        ("initial.seed,initial.seed\n1,2\n", "the column initial.seed is there twice"),
        ("initial.seed\n", "has no row below its head"),
        ("", "not a table of comma-separated values"),
        ("initial.sead\n1\n", "initial.sead is not a key"),
    ],
)
@pytest.mark.parametrize("command", [["simulate"], ["submit", "simulate"]])
def test_mistakes_of_a_table_are_named_before_any_work(here, command, table, message):
    (here / "t.csv").write_text(table)
    size = SIZE if command[0] == "submit" else ()
    done = flowpm_here(*command, "run.toml", "--table", "t.csv", *size)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert {path.name for path in here.iterdir()} == {"run.toml", "t.csv"}


def test_a_signal_while_results_are_written_ends_the_table(here, monkeypatch):
    """The row is complete, and the next one is not begun."""
    (here / "table.csv").write_text(TABLE)
    write = session.write_results

    def signalled(*arguments):
        os.kill(os.getpid(), signal.SIGUSR1)
        return write(*arguments)

    monkeypatch.setattr(session, "write_results", signalled)
    words = ["simulate", "run.toml", "--table", "table.csv", "--output", "all"]
    done = flowpm_here(*words)
    assert done.returncode == 128 + signal.SIGUSR1 and "go on with --resume" in done.stderr
    assert (here / "all-0/snapshot.zarr").exists() and not (here / "all-1").exists()


def test_the_disk_has_room_for_all_rows(here, monkeypatch):
    (here / "table.csv").write_text(TABLE)
    monkeypatch.setattr(
        "flowpm_dist.jobs.folder.shutil.disk_usage", lambda path: SimpleNamespace(free=30 * 2**20)
    )
    assert flowpm_here("simulate", "run.toml", "--check").returncode == 0
    done = flowpm_here("simulate", "run.toml", "--table", "table.csv", "--check")
    assert done.returncode == 2 and "3 runs need about" in done.stderr


def test_a_table_is_an_array_of_jobs(here):
    (here / "table.csv").write_text(TABLE)
    done = flowpm_here("submit", "simulate", "run.toml", "--table", "table.csv", *SIZE)
    assert done.returncode == 0, done.stderr
    script = (here / "run-output.sbatch").read_text()
    assert "#SBATCH --array=0-2\n" in script
    assert "cosmology_sigma8=(0.7 0.9 '')" in script and "initial_seed=(3 4 5)" in script
    both = ("--table", "table.csv", "--array", "initial.seed=1-2")
    assert "give one of them" in flowpm_here("submit", "simulate", "run.toml", *both, *SIZE).stderr


def test_a_table_is_for_simulations(here):
    (here / "table.csv").write_text(TABLE)
    done = flowpm_here("train", "run.toml", "--table", "table.csv")
    assert "--table is not for train: give it to flowpm-dist submit train" in done.stderr
