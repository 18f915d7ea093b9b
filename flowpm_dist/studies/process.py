"""The runs of a study: each is a process of its own, watched until it ends.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from flowpm_dist.io.errors import UserError
from flowpm_dist.io.files import human_size, no_link, read_bytes, remove
from flowpm_dist.jobs.job import JOBS, PROGRAM, Job, Request, command_of, job_class
from flowpm_dist.jobs.run_file import Settings, read_table
from flowpm_dist.options import as_written
from meshimpl import launch

COMPLETE, FAILED, NO_MEMORY, STOPPED = "complete", "failed", "no memory", "stopped"
"""How a run ended."""
LOOK_SECONDS = 0.2
"""Time between two looks at a running process [s]."""
STOP_SECONDS = 300.0
"""Time within which a run that is asked to stop must end, where its checkpoint is needed [s]."""
END_SECONDS = 5.0
"""Time that a launcher has to end after its ranks were killed [s]."""
LAST_LINES = 12
"""Lines of a run's output that a message shows."""
CLAIM, LOG, RESULT, RUN = ".claim", "log.txt", "result.json", "run"
"""Names in the folder of a run: its claim, its output, how it ended, and its results."""
_NO_MEMORY = (
    "ResourceExhausted",
    "RESOURCE_EXHAUSTED",
    "std::bad_alloc",
    "OOM when",
    "MemoryError",
)
"""Texts by which programs say that they have no memory."""

Values = Mapping[str, Any]
"""Values of a subject's keys, by "section.key", or by the option of a script."""


@dataclass(frozen=True)
class Subject:
    """What a study runs: a job, by its run file, or a Python script.

    A script takes the options `--output DIR`, and `--KEY VALUE` for each key of a study. Under
    mpirun each rank runs it. It leaves `metrics.csv` in DIR.

    Attributes:
        path: path of the run file or the script.
    """

    path: Path

    @property
    def is_script(self) -> bool:
        """Whether it is a script."""
        return self.path.suffix == ".py"

    @property
    def command(self) -> str:
        """The command of the job; an empty text for a script.

        Raises:
            ConfigError: the run file cannot be read.
        """
        return "" if self.is_script else command_of({*read_table(self.path)})

    def plan(self, values: Values, ranks: int, output: Path) -> Job[Any, Any] | None:
        """Returns the job with these values, after all checks; None for a script.

        Raises:
            UserError: the job cannot begin.
        """
        if self.is_script:
            return None
        settings: Settings = {_section_and_key(key): value for key, value in values.items()}
        return job_class(self.command).plan(
            Request(self.path, ranks, output, overwrite=True, settings=settings)
        )

    def run(
        self,
        folder: Path,
        values: Values,
        ranks: int,
        *,
        threads: int | None = None,
        resume: bool = False,
        more: Sequence[str] = (),
        **limits: Any,
    ) -> Outcome:
        """Run it to its end, with its results in `RUN` and its output in `LOG`.

        Args:
            folder: the folder of the run.
            values: values of its keys.
            ranks: number of ranks.
            threads: threads of each rank; by default the cores divided by the ranks.
            resume: whether a job that was begun there is resumed; otherwise it is removed.
            more: further options of the command of a job.
            limits: see `run`.

        Raises:
            LaunchError: there is no mpirun.
        """
        output = folder / RUN
        if resume and self._can_resume(output):
            more = [*more, "--resume"]
        else:
            remove(output, ignore_errors=True)
        (output if self.is_script else folder).mkdir(parents=True, exist_ok=True)
        environment = {**os.environ}
        if threads is not None:
            environment[launch.THREADS] = str(threads)
        if self.is_script:
            command = [sys.executable, str(self.path), "--output", str(output)]
            for key, value in values.items():
                command += [f"--{key.replace('_', '-')}", _word(value)]
            if ranks > 1:
                command, environment = launch.mpirun_command(ranks, command, threads=threads)
        else:
            command = [*PROGRAM, self.command, str(self.path), "--ranks", str(ranks)]
            command += ["--output", str(output), *more]
            command += [w for k, v in values.items() for w in ("--set", f"{k}={as_written(v)}")]
        return run(command, folder / LOG, environment=environment, **limits)

    def _can_resume(self, output: Path) -> bool:
        return not self.is_script and job_class(self.command).folder_type(output).can_resume()


def _section_and_key(key: str) -> tuple[str, str]:
    section, _, name = key.partition(".")
    return section, name


def _word(value: Any) -> str:
    return value if isinstance(value, str) else as_written(value)


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        status: `COMPLETE`, `FAILED`, `NO_MEMORY` or `STOPPED`.
        seconds: its duration [s].
        message: why it did not complete, or an empty text.
        code: the exit status of its process.
        value: the value by which a tuning judges it; None if it has none.
    """

    status: str
    seconds: float
    message: str = ""
    code: int = 0
    value: float | None = None


def run(
    command: Sequence[str],
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    memory: int | None = None,
    limit: float | None = None,
    grace: float = STOP_SECONDS,
    claim: Claim | None = None,
    asked: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Run a command to its end, in a process group of its own.

    If this process dies, the command is sent SIGTERM by the system.

    Args:
        command: the command line.
        log: the file of its output and its errors, which is begun anew.
        environment: its environment variables; by default those of this process.
        memory: the memory of all its processes at which they are killed [bytes].
        limit: its longest duration [s]; after it the command is asked to stop.
        grace: time that it has to stop [s]; then it is killed.
        claim: the claim of this work. The command holds it as well, so that nobody else takes it
            while the command ends, should this process die.
        asked: whether the command is to stop; called several times a second. It is then sent
            SIGTERM.
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
            pass_fds=() if claim is None else claim.held,
            preexec_fn=launch.dying_with_parent(),
        )
        try:
            ended = _watched(process, begin, memory, limit, grace, asked)
        except BaseException:
            _kill(process)
            raise
    return _outcome(ended or "", process.returncode, time.monotonic() - begin, log, memory)


def _watched(
    process: subprocess.Popen[bytes],
    begin: float,
    memory: int | None,
    limit: float | None,
    grace: float,
    asked: Callable[[], bool],
) -> str | None:
    """Waits for the end of a process; returns how it was ended, or None if it ended by itself."""
    stopping: float | None = None
    why = None
    while True:
        try:
            process.wait(LOOK_SECONDS)
            _kill_group(process.pid)  # what it has left behind
            return why
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        if memory is not None and memory_of(process.pid) > memory:
            _kill(process)
            return NO_MEMORY
        if stopping is None:
            over = limit is not None and now - begin > limit
            if over or asked():
                why, stopping = "limit" if over else STOPPED, now
                process.terminate()
        elif now - stopping > grace:
            _kill(process)
            return why


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and all that it has started; a launcher may then end by itself."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.Error:
        family = []
    for member in family:
        with contextlib.suppress(psutil.Error):
            member.kill()
    if family:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    process.kill()
    process.wait()
    _kill_group(process.pid)


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _outcome(ended: str, status: int, seconds: float, log: Path, memory: int | None) -> Outcome:
    if ended == NO_MEMORY:
        what = f"it was killed when it took more than {human_size(memory or 0)}"
        return Outcome(NO_MEMORY, seconds, what)
    if ended == STOPPED:
        return Outcome(STOPPED, seconds)
    if ended:
        return Outcome(FAILED, seconds, f"it was stopped after {seconds:.0f} s, its time limit")
    if status == 0:
        return Outcome(COMPLETE, seconds)
    text = read_bytes(log).decode(errors="replace")
    killed = status in (-signal.SIGKILL, 128 + signal.SIGKILL)
    kind = NO_MEMORY if killed or any(each in text for each in _NO_MEMORY) else FAILED
    lines = [line for line in text.splitlines() if line.strip()]
    own = [n for n, line in enumerate(lines) if line.startswith("error: ")]
    last = lines[own[-1] :] if own else lines[-LAST_LINES:]
    return Outcome(kind, seconds, "\n".join(last) or f"it ended with status {status}", status)


def memory_of(pid: int) -> int:
    """Returns the memory of a process and all that it has started [bytes].

    Pages that several of them share are counted once, where the system says how many share them.
    Processes on other hosts are not counted.
    """
    try:
        family = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return 0
    return sum(_proportional(each) for each in (pid, *(child.pid for child in family)))


def _proportional(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        with contextlib.suppress(psutil.Error):
            return int(psutil.Process(pid).memory_info().rss)
    return 0


class Claim:
    """A piece of work that one process at a time does, on any host that sees its folder.

    The system gives the claim up when the process ends, however it ends.

    Args:
        folder: folder of the piece; it is made.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / CLAIM
        self._file: IO[str] | None = None

    def take(self) -> bool:
        """Returns whether this process has the claim now."""
        file = open(self._path, "a", opener=no_link)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        self._file = file
        return True

    @property
    def held(self) -> tuple[int, ...]:
        """The file descriptor of the claim, if this process has it."""
        return () if self._file is None else (self._file.fileno(),)

    def give_up(self) -> None:
        """Let another process take it."""
        if self._file is not None:
            self._file.close()
            self._file = None


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Inside, no other worker is inside for the same folder, which is claimed."""
    claim = Claim(folder)
    while not claim.take():
        time.sleep(LOOK_SECONDS)
    try:
        yield
    finally:
        claim.give_up()


def share(
    pieces: Mapping[Path, Callable[[Claim], object]],
    stop: StopSignals,
    show: Callable[[int, Path], None],
    wait: float,
) -> int:
    """Do those pieces of work that no other worker does, until all are done or a signal comes.

    Args:
        pieces: what does the work, or what is left of it, by the folder that a worker claims.
        stop: the signals that this process has received.
        show: is called after each piece, with the number of pieces that are done and its folder.
        wait: time between two looks at the pieces of other workers [s].

    Returns:
        The number of pieces that are done.
    """
    left = dict(pieces)
    while left and not stop:
        before = len(left)
        for folder, do in pieces.items():
            claim = Claim(folder)
            if stop or folder not in left or not claim.take():
                continue
            try:
                do(claim)
            finally:
                claim.give_up()
            if not stop:
                del left[folder]
                show(len(pieces) - len(left), folder)
        if len(left) == before and not stop:
            time.sleep(wait)
    return len(pieces) - len(left)


def keys_and_values(table: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Yields "section.key" and what is given for it, however tables are nested.

    Args:
        table: sections and keys; a table with `low` or `high` is a value.
        within: the names of the tables around it, each with a dot.
    """
    for name, given in table.items():
        is_section = isinstance(given, Mapping) and given and not {*given} & {"low", "high"}
        if is_section:
            yield from keys_and_values(given, f"{within}{name}.")
        else:
            yield f"{within}{name}", given


class StopSignals:
    """Signals that ask this process to stop, remembered until its runs have ended."""

    def __init__(self) -> None:
        self.received: int | None = None

    @contextmanager
    def heard(self, say: Callable[[str], None]) -> Iterator[StopSignals]:
        """Inside, a signal is remembered; a second SIGINT raises SystemExit.

        Args:
            say: shows the user a line.
        """

        def note(number: int, frame: Any) -> None:
            if number == self.received == signal.SIGINT:
                raise SystemExit(128 + number)
            if self.received is None:
                say("stopping the runs ...")
            self.received = number

        before = {number: signal.signal(number, note) for number in launch.STOP_SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def __bool__(self) -> bool:
        return self.received is not None

    @property
    def name(self) -> str:
        """Name of the signal."""
        return signal.Signals(self.received or 0).name


def checksums_of(files: Mapping[str, Path]) -> dict[str, str]:
    """Returns the checksums of files by their keys."""
    return {
        key: hashlib.blake2b(read_bytes(path), digest_size=16).hexdigest()
        for key, path in files.items()
    }


def check_subject(subject: Subject) -> None:
    """Check that there is such a subject.

    Raises:
        UserError: there is none, or it is neither a run file nor a script.
    """
    if not subject.path.is_file():
        raise UserError(f"there is no {subject.path}")
    if subject.is_script:
        return
    if subject.path.suffix != ".toml":
        raise UserError(f"{subject.path} is neither a run file (.toml) nor a script (.py)")
    if subject.command not in JOBS or job_class(subject.command).starts_jobs:
        raise UserError(f"{subject.path} is the run file of a study itself")
