"""The script with which a user checks GPUs, on one rank of a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))
import gpu_check  # noqa: E402
import gpu_checks  # noqa: E402

Run = Callable[[], tuple[int, str, dict[str, Any]]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the script without timings; its status, its table and its JSON."""
    monkeypatch.setattr("meshimpl.launch.configure_threads", lambda: 1)  # TensorFlow has begun

    def run() -> tuple[int, str, dict[str, Any]]:
        status = gpu_check.main(["--grid", "0", "--output", str(tmp_path)])
        table = capsys.readouterr().out
        assert (tmp_path / "gpu_check.txt").read_text() == table
        return status, table, json.loads((tmp_path / "gpu_check.json").read_text())

    return run


def test_all_checks_hold_on_a_cpu(run: Run) -> None:
    status, table, found = run()
    assert status == 0 and f"all {len(found['checks'])} checks ok" in table, table
    assert "no GPU in sight" in table
    kinds = {(row["name"], row["precision"]) for row in found["checks"]}
    assert len(kinds) == len(found["checks"])
    assert {("gradient", "float32"), ("FFT", "float64"), ("collectives", "bfloat16")} < kinds
    (rank,) = found["ranks"]
    assert rank["gpus"] == 0 and rank["versions"]["python"]


def test_wrong_answers_and_missing_operations(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise tf.errors.NotFoundError(None, None, "Could not find device\nfor node")

    checks = [
        gpu_checks.Check("right", "float64", 1e-8, lambda: gpu_checks.Found(1e-9, "CPU:0")),
        gpu_checks.Check("wrong", "float64", 1e-8, lambda: gpu_checks.Found(1e-7, "CPU:0")),
        gpu_checks.Check("nan", "float64", 1e-8, lambda: gpu_checks.Found(float("inf"), "CPU:0")),
        gpu_checks.Check("missing", "float64", 1e-8, missing),
    ]
    monkeypatch.setattr(gpu_checks, "all_checks", lambda *_: checks)
    status, table, found = run()
    assert status == 1 and "3 of 4 checks wrong" in table
    assert [row["ok"] for row in found["checks"]] == [True, False, False, False]
    assert "NotFoundError: Could not find device\n" in table
    # A number that is no number is as wrong as can be.
    assert gpu_checks._worst([float("nan")], [1.0]) == float("inf")


def test_optimizers_of_graphs_take_networks_on_gpus() -> None:
    """Strided slices in float64 crashed them, and with them the check of a step on an H200."""
    script = Path(__file__).parents[1] / "support" / "gpu_graphs.py"
    found = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-2000:]
    transposes: dict[str, int] = {}
    for name, number in map(str.split, found.stdout.splitlines()):
        transposes[name] = transposes.get(name, 0) + int(number)
    assert transposes.keys() == {"float32", "float64", "correction"}
    assert all(transposes.values())  # so the optimizer of layouts worked on them


def test_ranks_that_the_grid_does_not_suit(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="5"):
        gpu_checks.mesh_of(5)
