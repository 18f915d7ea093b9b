"""Run files run from Python, a notebook included, on any number of ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli_w

from flowpm_dist.cli.common import MISUSE
from flowpm_dist.io.errors import UserError, WorkError
from flowpm_dist.jobs.job import JOBS, command_of, job_class, read_record
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.results import RunRecord
from flowpm_dist.jobs.run_file import read_table
from flowpm_dist.options import in_unit
from meshimpl import launch

OF_A_TABLE = "the run"
"""The name in messages of a run that has no file."""


def run(
    run_file: str | Path | Mapping[str, Mapping[str, Any]],
    output: str | Path | None = None,
    *,
    command: str | None = None,
    settings: Mapping[str, Any] | None = None,
    ranks: int | None = None,
    mesh: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    ignore_memory: bool = False,
    quiet: bool = False,
) -> RunRecord:
    """Runs the job that a run file describes, in new processes, and returns its results.

    Args:
        run_file: path of a TOML file, or its sections as dictionaries. Paths inside it are relative
            to the folder of the file, or to the current one.
        output: folder of the results; for a file it may be left out, as on the command line.
        command: the command, such as "simulate"; by default the one whose run files have the
            sections of this file.
        settings: values in place of the run file's own, such as {"evolution.steps": 20}. None
            leaves a key out.
        ranks: number of ranks to start; 1 by default.
        mesh: shape of the mesh of ranks.
        resume: continue the run in the folder.
        overwrite: replace what is in the folder.
        ignore_memory: start even if the estimated memory does not fit.
        quiet: show no progress. Otherwise it is a bar in a notebook and on a terminal, see
            `Progress`, and lines on the standard error elsewhere.

    Returns:
        The folder of the run with its state, its main results and its settings.

    Raises:
        UserError: a mistake of the user, found before the work started.
        WorkError: the work could not continue; the message says why.
        LaunchError: this process is one of several ranks already.
        KeyboardInterrupt: the run was interrupted; a checkpoint is kept.
    """
    if launch.detect().size > 1:
        raise launch.LaunchError("run() starts ranks of its own: call it in a single process")
    with _as_file(run_file) as (path, named):
        table = {**read_table(path)}
        command = command or command_of({*table, *(k.partition(".")[0] for k in settings or {})})
        if command not in JOBS:
            raise UserError(f"command = {command!r}: must be one of {', '.join(JOBS)}")
        if output is None:
            if named is OF_A_TABLE:
                raise UserError("output is missing: a run without a file needs a folder's name")
            output = job_class(command).folder_type.default_path(path)
        flags = {"resume": resume, "overwrite": overwrite, "ignore_memory": ignore_memory}
        words = _options(settings or {}, ranks=ranks, mesh=mesh, quiet=quiet, **flags)
        _work([command, str(path), "--output", str(output), *words], str(path), named)
    record = read_record(Path(output))
    if record is None:
        raise WorkError(f"{output} holds no run")
    return record


def _options(settings: Mapping[str, Any], **options: Any) -> list[str]:
    """Returns the words of a command line.

    Args:
        settings: the values of --set, by "section.key".
        options: the values of other options by their names; True for a flag, and None or False for
            an option that is left out.
    """
    words = []
    for name, value in settings.items():
        words += ["--set", f"{name}={'' if value is None else _as_toml(value, name)}"]
    for name, value in options.items():
        if value is not None and value is not False:
            option = f"--{name.replace('_', '-')}"
            words += [option] if value is True else [option, str(value)]
    return words


@contextmanager
def _as_file(run_file: str | Path | Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[Path, str]]:
    """Yields the path of a run file, and its name in messages; a table is written to a file."""
    if isinstance(run_file, str | Path):
        yield Path(run_file), str(Path(run_file))
        return
    # Paths inside are relative to its folder.
    here = Path.cwd() if os.access(Path.cwd(), os.W_OK) else None
    with tempfile.NamedTemporaryFile(prefix=".flowpm-", suffix=".toml", dir=here) as file:
        file.write(tomli_w.dumps(_plain(run_file)).encode())
        file.flush()
        yield Path(file.name), OF_A_TABLE


def _plain(value: Any, name: str = "") -> Any:
    """Returns a value as TOML takes it; keys that are None are left out.

    Raises:
        ValueError: a value has a unit; the message names its key.
    """
    if isinstance(value, Mapping):
        items = {str(key): item for key, item in value.items() if item is not None}
        return {key: _plain(item, key) for key, item in items.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, name) for item in value]
    if isinstance(value, Path):
        return str(value)
    value = in_unit(name, value, "the unit of run files")
    # Of numpy: an array becomes a list, a number one of Python's.
    return value.tolist() if hasattr(value, "tolist") else value


def _as_toml(value: Any, name: str) -> str:
    return tomli_w.dumps({"value": _plain(value, name)}).partition("=")[2].strip()


def _work(words: Sequence[str], path: str, named: str) -> None:
    """Run a command to its end, and show its progress."""
    process = subprocess.Popen(
        [sys.executable, "-m", "flowpm_dist.cli", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # An interrupt of a terminal reaches this process, which passes it on once.
        process_group=0,
    )
    said: list[str] = []
    interrupted = False
    while True:
        try:
            _show(process, said)
            break
        except KeyboardInterrupt:
            # Its last messages are still shown; a second interrupt reaches it, too.
            interrupted = True
            process.send_signal(signal.SIGINT)
    status = process.wait()
    message = "".join(said).removeprefix("error: ").replace(path, named).strip()
    if interrupted:
        raise KeyboardInterrupt(message)
    if status:
        kind = UserError if status == MISUSE else WorkError
        raise kind(message or f"flowpm-dist {words[0]} ended with status {status}")


def _show(process: subprocess.Popen[str], said: list[str]) -> None:
    """Show a command's progress until it ends; keep the message that it ends with."""
    assert process.stderr is not None
    with Progress(rank=0) as progress:
        for line in process.stderr:
            if said or line.startswith("error: "):
                said.append(line)
            else:
                progress.relay(line.removesuffix("\n"))
