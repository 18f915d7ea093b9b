"""The commands as subprocesses, and a folder to give them in."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COMMAND = [sys.executable, "-m", "flowpm_dist.cli"]
ROOT = str(Path(__file__).parents[1])


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
    *words: str, folder: Path | None = None, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """What a command did in a folder, or in the current one."""
    return subprocess.run(
        [*COMMAND, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def plain(text: str) -> str:
    """Without the boxes and line ends of the help pages."""
    return re.sub(r"[\s│╭╮╰╯─]+", " ", text)
