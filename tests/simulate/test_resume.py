"""A stopped simulation resumes; the contents of its folder meanwhile; what is refused."""

import contextlib
import errno
import itertools
import json
import os
import re
import shutil
import signal
import tomllib
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
import zarr
from commands import flowpm_here, folder_with, plain
from full_disk import disk_of
from run_files import RUN

import flowpm_dist as fpm
from flowpm_dist.cli import from_python
from flowpm_dist.grid.box import Box
from flowpm_dist.grid.field import Field
from flowpm_dist.io import load_snapshot
from flowpm_dist.io.files import GENERATOR, SNAPSHOT
from flowpm_dist.jobs import session as job_session
from flowpm_dist.jobs.checkpoints import CheckpointStore
from flowpm_dist.jobs.folder import OF_EVERY_JOB
from flowpm_dist.jobs.job import Request, read_record
from flowpm_dist.jobs.session import CheckpointError, FieldCheckpoints, StopRequest
from flowpm_dist.simulate import session as simulation_session
from flowpm_dist.simulate.folder import FILES, SimulationFolder
from flowpm_dist.simulate.job import SimulationJob
from meshimpl.process_mesh import ProcessMesh

SHORT = RUN.replace("grid = 16", "grid = 8").replace("size = 64.0", "size = 32.0")
STEPS = SHORT.replace("steps = 2", "steps = 4")
here = folder_with(STEPS)
SIMULATE = ["simulate", "run.toml", "--output"]


def stopped(monkeypatch, step, *words, name="SIGTERM"):
    """What the command did whose ranks hear a signal after a step of the session."""
    with monkeypatch.context() as patch:
        count = itertools.count(1)
        patch.setattr(StopRequest, "name", lambda self: name if next(count) == step else None)
        return flowpm_here(*SIMULATE, "out", *words)


SCHEMES = {
    "fastpm": [],
    "cola": ["--set", "evolution.integrator=cola"],
    "bullfrog": ["--set", "evolution.integrator=bullfrog", "--set", "evolution.a_start=0.0"],
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_run_that_was_stopped_goes_on_to_the_bit(here, monkeypatch, scheme):
    """In float32, after any step; COLA's own velocity is not the canonical one."""
    words = SCHEMES[scheme]
    whole = flowpm_here(*SIMULATE, "whole", *words)
    assert whole.returncode == 0, whole.stderr
    done = stopped(monkeypatch, 2, *words)
    assert done.returncode == 128 + 15
    assert "stopped by SIGTERM after step 2 of 4; go on with --resume" in done.stderr
    record = read_record(Path("out"))
    assert (record.kind, record.state, record.steps) == ("simulation", "stopped", "2/4 steps")
    assert record.settings["evolution.steps"] == 4
    again = stopped(monkeypatch, 2, "--resume", *words)  # after the last step
    assert "going on after step 2" in again.stderr
    assert "stopped by SIGTERM after step 4 of 4" in again.stderr
    assert not (Path("out") / SNAPSHOT).exists()
    last = flowpm_here(*SIMULATE, "out", "--resume", *words)
    assert last.returncode == 0, last.stderr
    assert "step" not in last.stderr.partition("going on after step 4")[2]
    expected, found = (load_snapshot(name) for name in ("whole", "out"))
    for name in ("displacement", "velocity", "density"):
        np.testing.assert_array_equal(found[name], expected[name])
    assert {p.name for p in Path("out").iterdir()} == {*FILES, *OF_EVERY_JOB, SNAPSHOT}
    assert len(json.loads(Path("out/timings.json").read_text())["steps"]) == 4
    assert tomllib.loads(Path("out/run.toml").read_text())["output"]["checkpoint_every"] == 0
    assert "The run in out is complete." in flowpm_here(*SIMULATE, "out", "--resume", *words).stdout


def test_a_run_does_not_go_on_with_other_white_noise(here):
    """Which the checkpoint knows by its values, not by the name of its file."""
    noise = np.random.default_rng(0).normal(size=(8, 8, 8))
    np.save("noise.npy", noise)
    (here / "run.toml").write_text(STEPS.replace("seed = 1", 'white_noise = "noise.npy"'))
    job = SimulationJob.plan(Request(Path("run.toml"), 1, Path("out")))
    step = job.folder.checkpoints.path / "step-000002.zarr"
    step.mkdir(parents=True)
    about = {"generator": GENERATOR, "complete": True, "checksums": job.options.checksums()}
    (step / "zarr.json").write_text(json.dumps({"attributes": about}))
    job.folder.owner.write_text("{}")
    job.folder.run_file.write_text(job.options.resolved())
    again = ["simulate", "run.toml", "--output", "out", "--resume", "--check"]
    np.save("noise.npy", np.asfortranarray(noise))
    assert flowpm_here(*again).returncode == 0
    noise[3, 2, 1] += 1e-9
    np.save("noise.npy", noise)
    refused = flowpm_here(*again)
    assert refused.returncode == 2
    assert 'noise.npy": it has other values than when the run in out was' in plain(refused.stderr)


def test_checkpoints_are_written_as_often_as_asked(here, monkeypatch):
    """The latest two are kept, and a disk that fills does not cost those before."""
    kept = []
    real = job_session.write_snapshot

    def write(path, *rest, **more):
        if len(kept) == 2:
            kept.append(SimulationFolder(Path("out")).checkpoints.last)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        kept.append(f"{path.parent.name}/{path.name}")
        real(path, *rest, **more)

    words = ["--set", "output.checkpoint_every=1", "--set", "evolution.steps=5"]
    with monkeypatch.context() as patch:
        patch.setattr(job_session, "write_snapshot", write)
        done = flowpm_here(*SIMULATE, "out", *words)
    assert kept == [*(f".step-{n}.partial/step-{n:06d}.zarr" for n in (1, 2)), 2]
    assert done.returncode == 1
    assert "step-3.partial/step-000003.zarr: No space left on device" in plain(done.stderr)
    assert "the last after step 2: go on with --resume" in plain(done.stderr)
    stopped(monkeypatch, 2, "--resume", *words)
    held = sorted(path.name for path in SimulationFolder(Path("out")).checkpoints.path.iterdir())
    assert held == ["step-000003.zarr", "step-000004.zarr"]
    refused = flowpm_here(*SIMULATE, "out", *words)
    assert refused.returncode == 2
    assert "out holds a stopped run: add --resume to go on with it, --overwrite" in refused.stderr
    other = flowpm_here(*SIMULATE, "out", "--resume", "--set", "initial.seed=2", *words)
    assert "initial.seed = 2: the run in out has 1; to resume it, give that" in other.stderr


def test_a_checkpoint_that_cannot_be_used_is_told(here, monkeypatch):
    stopped(monkeypatch, 3, "--set", "output.checkpoint_every=1")
    folder = SimulationFolder(Path("out"))
    last = folder.checkpoints.path / "step-000003.zarr"
    shutil.copytree(folder.checkpoints.path, "kept")
    words = [*SIMULATE, "out", "--resume"]
    (chunk,) = (path for path in (last / "velocity" / "c").rglob("*") if path.is_file())
    whole = chunk.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    for damage, reason in (
        (lambda: chunk.write_bytes(flipped), "velocity: Stored and computed checksum"),
        (lambda: chunk.write_bytes(chunk.read_bytes()[:100]), "velocity"),
        (chunk.unlink, "velocity: values are missing"),
        ((last / "zarr.json").unlink, "it is not complete"),
    ):
        damage()
        done = flowpm_here(*words)
        assert done.returncode == 1
        assert f"step-000003.zarr is damaged ({reason}" in done.stderr
        assert "--resume uses step-000002.zarr, the one before it" in plain(done.stderr)
        assert "Traceback" not in done.stderr and "intact" not in done.stderr
    shutil.rmtree(last)
    about = folder.checkpoints.path / "step-000002.zarr" / "zarr.json"
    about.write_text(about.read_text().replace('"seed": 1', '"seed": 5'))
    assert "is of seed 5; here it is 1" in flowpm_here(*words).stderr
    shutil.copytree("kept", folder.checkpoints.path, dirs_exist_ok=True)
    done = flowpm_here(*words, "--set", "output.fields=density")
    assert "output.fields = 'density': must be a list of some of" in done.stderr
    done = flowpm_here(*words, "--set", 'output.fields=["density"]', "--set", "run.halo=5")
    assert done.returncode == 0, done.stderr
    assert list(load_snapshot("out").arrays) == ["density"]


@pytest.mark.parametrize("size", [100, 2000])  # of the header, and in the middle of an array
def test_a_disk_that_fills_in_a_checkpoint_costs_no_older_one(here, monkeypatch, size):
    save = FieldCheckpoints.save

    def on_full_disk(checkpoints, number, *given, **more):
        with disk_of(size) if number == 3 else contextlib.nullcontext():
            save(checkpoints, number, *given, **more)

    words = [*SIMULATE, "out", "--set", "output.checkpoint_every=1"]
    with monkeypatch.context() as patch:
        patch.setattr(FieldCheckpoints, "save", on_full_disk)
        done = flowpm_here(*words)
    assert done.returncode == 1
    assert re.search(
        r"cannot write out/.*\.step-3\.partial/step-000003\.zarr.*: File too", done.stderr
    )
    assert "are intact, the last after step 2: go on with --resume" in plain(done.stderr)
    done = flowpm_here(*words, "--resume")
    assert done.returncode == 0 and "going on after step 2" in done.stderr, done.stderr
    assert {p.name for p in Path("out").iterdir()} == {*FILES, *OF_EVERY_JOB, SNAPSHOT}


def test_what_a_killed_job_left_of_a_checkpoint_is_removed_first(here, monkeypatch):
    """It may take the room that the resumed job needs for its first checkpoint."""
    words = ["--set", "output.checkpoint_every=1"]
    stopped(monkeypatch, 2, *words)
    left = SimulationFolder(Path("out")).checkpoints.aside(3)
    left.mkdir()

    def stop_at_once(*_, **__):
        assert not left.exists()
        raise ZeroDivisionError

    monkeypatch.setattr(FieldCheckpoints, "save", stop_at_once)
    with pytest.raises(ZeroDivisionError):
        flowpm_here(*SIMULATE, "out", *words, "--resume")


@pytest.mark.parametrize("replaced", [False, True])
def test_a_folder_that_is_removed_ends_the_run(here, monkeypatch, replaced):
    """Nothing is written into what another run has put in its place."""
    whole, other = StopRequest.name, SimulationFolder(Path("out"))

    def name(stop):
        shutil.rmtree("out")
        if replaced:
            other.begin()
        return whole(stop)

    monkeypatch.setattr(StopRequest, "name", name)
    done = flowpm_here(*SIMULATE, "out", "--set", "output.checkpoint_every=1")
    other.release()
    assert done.returncode == 1
    assert "error: out was removed or replaced while the run was going on" in done.stderr
    assert [p.name for p in Path().rglob("*")] == (
        ["run.toml", "out", other.partial.name, "owner.json"] if replaced else ["run.toml"]
    )


def test_a_failure_without_a_checkpoint_leaves_nothing(here, monkeypatch):
    done = flowpm_here(*SIMULATE, "out", "--resume")
    assert done.returncode == 2
    assert "out holds no run to resume: leave --resume out" in done.stderr
    for words in (["--resume", "--overwrite"],):
        assert "give one" in flowpm_here(*SIMULATE, "out", *words).stderr
    monkeypatch.setattr(fpm.Simulation, "run", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        flowpm_here(*SIMULATE, "out")
    assert os.listdir("out") == []


def test_a_signal_while_results_are_written_does_not_cost_them(here, monkeypatch):
    real = simulation_session.write_results

    def write(*words, **more):
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*words, **more)

    monkeypatch.setattr(simulation_session, "write_results", write)
    done = flowpm_here(*SIMULATE, "out")
    assert done.returncode == 0, done.stderr
    assert SimulationFolder(Path("out")).is_complete


def test_an_old_run_stays_until_its_replacement_is_complete(here, monkeypatch):
    assert flowpm_here(*SIMULATE, "out").returncode == 0
    other = ["--set", "initial.seed=2"]
    assert stopped(monkeypatch, 1, "--overwrite", *other).returncode == 128 + 15
    assert load_snapshot("out").attributes["seed"] == 1
    assert read_record(Path("out")).state == "stopped"
    assert flowpm_here(*SIMULATE, "out", "--resume", *other).returncode == 0
    assert load_snapshot("out").attributes["seed"] == 2
    assert read_record(Path("out")).state == "complete"


def test_python_goes_on_with_a_run(here, monkeypatch):
    stopped(monkeypatch, 1)
    monkeypatch.setattr(from_python, "_work", lambda words, *_: flowpm_here(*words))
    found = fpm.run("run.toml", "out", resume=True, quiet=True)
    assert (found.state, found.steps) == ("complete", "4/4 steps")


def test_checkpoints_are_not_written_through_links(tmp_path):
    """At the name of a checkpoint, and of one that is being written; nor are other values read."""
    box = Box((4, 4, 4), (4.0, 4.0, 4.0), ProcessMesh("row:1,col:1"))
    victims, folder = tmp_path / "precious", tmp_path / "checkpoints"
    for path in (victims, folder):
        path.mkdir()
    (victims / "thesis.tex").write_text("years of work")
    for name in ("step-000001.zarr", ".step-1.partial", ".step-000000.zarr.partial"):
        (folder / name).symlink_to(victims)
    files = FieldCheckpoints(CheckpointStore(folder, "step"), box, keep=1)
    files.save(1, {"density": Field(tf.ones(box.grid), box)}, {})
    assert [path.name for path in victims.iterdir()] == ["thesis.tex"]
    assert [path.name for path in folder.iterdir()] == ["step-000001.zarr"]
    path, _ = files.latest()
    np.testing.assert_array_equal(files.block(path, "density"), np.ones(box.grid))
    zarr.open_group(path).create_array("density", shape=box.grid, dtype="c8", overwrite=True)
    with pytest.raises(CheckpointError, match="density: .*dtype is complex64; must be the dtype"):
        files.block(path, "density")
