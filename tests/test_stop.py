"""A signal is answered at once, and ends a step or, the second time, the process."""

import errno
import hashlib
import os
import signal
import threading
import time

import pytest

from flowpm_dist.cli.common import job
from flowpm_dist.jobs.stop import StopRequest
from meshimpl import launch
from meshimpl.process_mesh import ProcessMesh

MESH = ProcessMesh("replica:1")


def busy() -> None:
    """What no signal handler of Python interrupts, as a step of TensorFlow."""
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000)


def test_the_first_signal_is_answered_before_the_step_ends():
    said: list[tuple[str, float]] = []
    stop = StopRequest(MESH, "move", lambda line: said.append((line, time.monotonic())))
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
    with StopRequest(MESH, "step", said.append).heard() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.name() == "SIGINT"
        with pytest.raises(SystemExit) as end:
            signal.raise_signal(signal.SIGINT)
    assert end.value.code == 128 + signal.SIGINT
    assert said == ["stopping after this step ..."]


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
    with pytest.raises(SystemExit) as end, job():
        raise error
    assert end.value.code == status
    assert capsys.readouterr().err.endswith(said)
