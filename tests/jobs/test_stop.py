"""A signal is answered at once, and ends a step or, the second time, the process."""

import contextlib
import csv
import errno
import hashlib
import itertools
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from run_files import PRIORS
from tiny_network import TINY

from flowpm_dist.cli.common import working
from flowpm_dist.cosmoflow.planning.folder import TrainingFolder
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.cosmoflow.training.session import TrainingSession
from flowpm_dist.jobs.job import StopError
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.session import StopRequest
from flowpm_dist.simulate.folder import SimulationFolder
from meshimpl import launch
from meshimpl.process_mesh import ProcessMesh

MESH = ProcessMesh("replica:1")
FOLDER = SimulationFolder(Path("none"))
RUN = (
    PRIORS
    + f"""[box]
grid = 16
size = 64.0
[network]
name = "{TINY.name}"
[training]
batch = 4
steps = 6
learning_rate = 1e-3
validate_every = 4
checkpoint_every = 4
[data]
source = "dummy"
"""
)


def busy() -> None:
    """What no signal handler of Python interrupts, as a step of TensorFlow."""
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000)


def test_the_first_signal_is_answered_before_the_step_ends():
    said: list[tuple[str, float]] = []
    stop = StopRequest(MESH, FOLDER, "move", lambda line: said.append((line, time.monotonic())))
    with stop.heard():
        threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGTERM]).start()
        busy()
        end = time.monotonic()
        assert stop.name() == "SIGTERM"
    ((line, at),) = said
    assert line == "stopping after this move ..."
    assert at < end - 0.05
    assert signal.set_wakeup_fd(-1) == -1


def test_a_second_interrupt_of_one_rank_ends_it_now():
    said: list[str] = []
    with StopRequest(MESH, FOLDER, "step", said.append).heard() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.name() == "SIGINT"
        with pytest.raises(SystemExit) as end:
            signal.raise_signal(signal.SIGINT)
    assert end.value.code == 128 + signal.SIGINT
    assert said == ["stopping after this step ..."]


def test_a_terminal_that_closes_after_another_signal_is_left(monkeypatch):
    """Or the next line that is printed would end the job before its checkpoint."""
    left: list[int] = []
    monkeypatch.setattr(launch, "leave_terminal", left.append)
    with StopRequest(MESH, FOLDER, "step", lambda line: None).heard() as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGHUP)
        assert stop.name() == "SIGHUP"
    assert signal.SIGHUP in left


def losses_of(folder: Path, *, resume: bool = False) -> list[tuple[str, str]]:
    """The losses of all steps in the file, after a session of the training there."""
    held = TrainingFolder(folder)
    held.begin(resume=resume)
    plan = TrainingPlan.load(folder.parent / "run.toml")
    with contextlib.suppress(StopError):
        TrainingSession(plan, MESH, held, Progress(rank=1)).run(resume=resume)
    held.release()
    with held.metrics.open() as file:
        return [(row["loss"], row["gradient_norm"]) for row in csv.DictReader(file)]


def test_a_training_that_was_stopped_anywhere_goes_on_to_the_bit(tmp_path, monkeypatch):
    """In float32, with features that are centred anew for the checkpoint of the stop."""
    (tmp_path / "run.toml").write_text(RUN)
    whole = losses_of(tmp_path / "whole")
    with monkeypatch.context() as patch:
        count = itertools.count(1)
        patch.setattr(StopRequest, "name", lambda self: "SIGTERM" if next(count) == 3 else None)
        assert losses_of(tmp_path / "stopped") == whole[:3]
    assert losses_of(tmp_path / "stopped", resume=True) == whole
    assert len(whole) == 6


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "table.csv"),
            1,
            "error: cannot write table.csv: No space left on device\n",
        ),
    ],
)
def test_every_job_ends_with_a_line(monkeypatch, capsys, error, status, said):
    monkeypatch.setattr(launch, "configure_threads", lambda: 1)
    with pytest.raises(SystemExit) as end, working():
        raise error
    assert end.value.code == status
    assert capsys.readouterr().err.endswith(said)
