"""The commands, as processes of their own or in this one, and a folder to give them in."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from meshimpl import launch

COMMAND = [sys.executable, "-m", "flowpm_dist.cli"]
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
ROOT = str(Path(__file__).parents[2])
HEAVY = {"tensorflow", "horovod", "mpi4py", "zarr", "matplotlib", "scipy", "camb", "h5py", "rich"}


def folder_with(run_file: str) -> Any:
    """A fixture: a folder with this `run.toml`, and the current one."""

    @pytest.fixture
    def here(tmp_path, monkeypatch):
        (tmp_path / "run.toml").write_text(run_file)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("PYTHONPATH", ROOT)
        return tmp_path

    return here


def flowpm(
    *words: str,
    folder: Path | None = None,
    timeout: float = 240,
    program: Sequence[str] = COMMAND,
    path: str = ROOT,
) -> subprocess.CompletedProcess[str]:
    """What a command did in a folder, or in the current one."""
    return subprocess.run(
        [*program, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def python(script: str) -> subprocess.CompletedProcess[str]:
    """What a script does in a process of its own, in the current folder."""
    return flowpm(script, program=[sys.executable, "-c"])


def flowpm_and_loaded(
    *words: str, before: str = ""
) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """What a command did, after a script, and the heavy libraries that it had loaded at its end."""
    done = python(
        f"{before}\nimport sys; from flowpm_dist import cli; sys.argv[1:] = {[*words]}\n"
        "try: cli.main()\n"
        f"finally: print('#', *({HEAVY} & set(sys.modules)))"
    )
    return done, set(done.stdout.rpartition("#")[2].split())


def plain(text: str) -> str:
    """Without the boxes and line ends of the help pages."""
    return re.sub(r"[\s│╭╮╰╯─]+", " ", text)


def flowpm_here(*words: str) -> subprocess.CompletedProcess[str]:
    """What a command does in this process, which has TensorFlow loaded already.

    For tests of a command's results. Those of its signals, ranks, imports and its end are of a
    process of its own, see `flowpm`.
    """
    from flowpm_dist.cli.program import app

    handlers = {number: signal.getsignal(number) for number in HANDLED}
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "configure_threads", lambda: 1)
        patch.setattr(sys, "argv", ["flowpm-dist", *words])
        patch.setattr(os, "environ", os.environ.copy())
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                app(list(words))
                status = 0
            except SystemExit as end:
                status = int(end.code or 0)
            finally:
                for number, handler in handlers.items():
                    signal.signal(number, handler)
    return subprocess.CompletedProcess(words, status, out.getvalue(), err.getvalue())
