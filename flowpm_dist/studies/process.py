"""A process of a run, watched until it ends: its time, its memory, and its last output.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from flowpm_dist.io.files import no_link
from flowpm_dist.jobs.locks import Lock
from flowpm_dist.options.regular_files import check_regular, human_size
from flowpm_dist.studies.workers import LOOK_SECONDS
from meshimpl import launch

COMPLETE, FAILED, NO_MEMORY, STOPPED = "complete", "failed", "no memory", "stopped"
"""How a run ended."""
STOP_SECONDS = 300.0
"""Time within which a run that is asked to stop must end, where its checkpoint is needed [s]."""
END_SECONDS = 5.0
"""Time that a launcher has to end after its ranks were killed [s]."""
LAST_LINES = 12
"""Lines of a run's output that a message shows."""
LAST_BYTES = 2**20
"""The end of a run's output that is searched for the reason of its failure [bytes]."""
_NO_MEMORY = (
    "ResourceExhausted",
    "RESOURCE_EXHAUSTED",
    "std::bad_alloc",
    "OOM when",
    "MemoryError",
)
"""Texts by which programs say that they have no memory."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        status: `COMPLETE`, `FAILED`, `NO_MEMORY` or `STOPPED`.
        seconds: its duration [s].
        message: why it did not complete, or an empty text.
        code: the exit status of its process.
    """

    status: str
    seconds: float
    message: str = ""
    code: int = 0


def run(
    command: Sequence[str],
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    memory: int | None = None,
    limit: float | None = None,
    grace: float = STOP_SECONDS,
    claim: Lock | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Run a command to its end, in a process group of its own.

    If this process dies, the command is sent SIGTERM by the system.

    Args:
        command: the command line.
        log: the file of its output and its errors, which is begun anew.
        environment: its environment variables; by default this process's variables.
        memory: the memory of all its processes at which they are killed [bytes].
        limit: its longest duration [s]; after it the command is asked to stop.
        grace: time that it has to stop [s]; then it is killed.
        claim: the claim of this work. The command holds it as well, so that nobody else takes it
            while the command ends, should this process die.
        should_stop: returns whether the command is to stop; it is called several times a second.
            The command is then sent SIGTERM.
    """
    begin = time.monotonic()
    with open(log, "wb", opener=no_link) as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=None if environment is None else dict(environment),
            process_group=0,
            pass_fds=() if claim is None else claim.descriptors,
            preexec_fn=launch.dying_with_parent(),
        )
        try:
            ended = _watched(process, begin, memory, limit, grace, should_stop)
        except BaseException:
            _kill(process)
            raise
    status, message = ended or _by_itself(process.returncode, log)
    code = 0 if ended else process.returncode
    return Outcome(status, time.monotonic() - begin, message, code)


def _watched(
    process: subprocess.Popen[bytes],
    begin: float,
    memory: int | None,
    limit: float | None,
    grace: float,
    should_stop: Callable[[], bool],
) -> tuple[str, str] | None:
    """Waits for the end of a process; ends it at a limit, or if the study is to stop.

    Returns:
        How it was ended and why, see `Outcome`; None if it ended by itself.
    """
    stopped: tuple[str, str] | None = None
    stopped_at = 0.0
    while True:
        try:
            process.wait(LOOK_SECONDS)
            _kill_group(process.pid)  # what it has left behind
            return stopped
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        if memory is not None and memory_of(process.pid) > memory:
            _kill(process)
            return NO_MEMORY, f"it was killed when it took more than {human_size(memory)}"
        if stopped is None:
            if limit is not None and now - begin > limit:
                stopped = FAILED, f"it was stopped after {now - begin:.0f} s, its time limit"
            elif should_stop():
                stopped = STOPPED, ""
            if stopped is not None:
                stopped_at = now
                process.terminate()
        elif now - stopped_at > grace:
            _kill(process)
            return stopped


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and all that it has started; a launcher may then end by itself."""
    descendants = _family(process.pid)[1:]
    for member in descendants:
        with contextlib.suppress(psutil.Error):
            member.kill()
    if descendants:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    process.kill()
    process.wait()
    _kill_group(process.pid)


def _family(pid: int) -> list[psutil.Process]:
    """Returns a process and all that it has started; nothing if it has ended."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _by_itself(status: int, log: Path) -> tuple[str, str]:
    """Returns the end of a process that was not stopped: its status and its last output."""
    if status == 0:
        return COMPLETE, ""
    text = _end_of(log)
    killed = status in (-signal.SIGKILL, 128 + signal.SIGKILL)
    kind = NO_MEMORY if killed or any(each in text for each in _NO_MEMORY) else FAILED
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [n for n, line in enumerate(lines) if line.startswith("error: ")]
    last = lines[errors[-1] :] if errors else lines[-LAST_LINES:]
    return kind, "\n".join(last) or f"it ended with status {status}"


def _end_of(log: Path) -> str:
    """Returns the end of a log, which may be of any size."""
    check_regular(log)
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LAST_BYTES))
        return file.read(LAST_BYTES).decode(errors="replace")


def is_on_one_host() -> bool:
    """Returns whether all ranks that this process starts are on its host."""
    return int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) == 1


def memory_of(pid: int) -> int:
    """Returns the memory of a process and all that it has started [bytes].

    Pages that several of them share are counted once, where the system says how many share them.
    Processes on other hosts are not counted.
    """
    total = 0
    for member in _family(pid):
        with contextlib.suppress(psutil.Error):
            try:
                memory = member.memory_full_info()
                total += getattr(memory, "pss", memory.rss)
            except psutil.AccessDenied:
                total += member.memory_info().rss
    return total
