"""Every test of tests/ranks on 1, 2 and 4 ranks: a job for each room.

A job fails when a test fails on any rank, when it runs into its time limit, when a rank ends
without a word, or when its ranks have not run the same tests.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshimpl.launch import mpirun_command

HERE = Path(__file__).parent
TIME_LIMIT = 900  # [s] of one job
LAST_LINES = 120  # of a failing rank's output


def needs_horovod(ranks: int) -> None:
    """Skip a test of several ranks where Horovod was left out on purpose; in CI it must not be."""
    if ranks > 1 and importlib.util.find_spec("horovod") is None and "CI" not in os.environ:
        pytest.skip("Horovod is not installed (`make setup` builds it): one rank only")


def run_job(ranks: int, arguments: list[str], folder: Path, time_limit: float) -> str | None:
    """Run pytest with `arguments` on several ranks; return what went wrong, None when nothing did.

    Args:
        ranks: their number; one rank runs without mpirun.
        arguments: of pytest.
        folder: where the ranks leave their output.
        time_limit: of the whole job [s].
    """
    command = [sys.executable, str(HERE / "ranks" / "run_rank.py"), str(folder), *arguments]
    environment = dict(os.environ)
    if ranks > 1:
        command, environment = mpirun_command(ranks, command)
    paths = [str(HERE.parent), str(HERE), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    job = subprocess.Popen(
        command,
        env=environment,
        cwd=HERE.parent,
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output, _ = job.communicate(timeout=time_limit)
    except subprocess.TimeoutExpired:
        job.terminate()  # mpirun takes its ranks with it
        try:
            output, _ = job.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            job.kill()
            output, _ = job.communicate()
        return _report(folder, ranks, f"no end after {time_limit:.0f} s", output)
    if job.returncode != 0:
        return _report(folder, ranks, f"the job ended with status {job.returncode}", output)
    results = _results(folder, ranks)
    if any(result != results[0] for result in results):
        return _report(folder, ranks, "the ranks have not run the same tests")
    if "passed" not in results[0].get("tests", {}).values():
        return _report(folder, ranks, "no test has passed")
    return None


def _results(folder: Path, ranks: int) -> list[dict]:
    files = [folder / f"rank-{rank}.json" for rank in range(ranks)]
    return [json.loads(f.read_text()) if f.exists() else {} for f in files]


def _report(folder: Path, ranks: int, headline: str, launcher: str = "") -> str:
    lines, outputs = [f"{ranks} ranks: {headline}"], {}
    for rank, result in enumerate(_results(folder, ranks)):
        failed = [name for name, outcome in result.get("tests", {}).items() if outcome == "failed"]
        lines += [f"failed on rank {rank}: {name}" for name in failed]
        if result.get("running"):
            lines.append(f"rank {rank} was in {result['running']}")
        path = folder / f"rank-{rank}.txt"
        output = path.read_text(errors="replace").splitlines() if path.exists() else ["nothing"]
        if failed or result.get("running") or not result:
            # Ranks often fail alike: such an output once.
            outputs.setdefault(tuple([*failed, result.get("running")]), (rank, output))
    for rank, output in outputs.values():
        lines += [f"---- rank {rank} said, at the end:", *output[-LAST_LINES:]]
    return "\n".join([*lines, "---- the launcher said:", *launcher.splitlines()[-30:]])


def files_of(subject: str) -> list[str]:
    """The test files of a subject: that of the uppermost room they know."""
    rooms = {
        "cosmoflow": "flowpm_dist.cosmoflow",
        "chains": "flowpm_dist.reconstruction.chains",
        "reconstruction": "flowpm_dist.reconstruction",
        "solver": "flowpm_dist",
        "mesh": "",
    }
    chosen = []
    for file in sorted((HERE / "ranks").glob("test_*.py")):
        text = file.read_text()
        if next(name for name, room in rooms.items() if room in text) == subject:
            chosen.append(str(file.relative_to(HERE.parent)))
    return chosen


@pytest.mark.timeout(TIME_LIMIT + 60)
@pytest.mark.parametrize("subject", ["mesh", "solver", "reconstruction", "chains", "cosmoflow"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_on_ranks(ranks: int, subject: str, tmp_path: Path) -> None:
    needs_horovod(ranks)
    arguments = [*files_of(subject), "--tb=short", "-q"]
    trouble = run_job(ranks, arguments, tmp_path, TIME_LIMIT)
    assert trouble is None, trouble


SELF_TEST = """
import os, time
import pytest
from conftest import RANK, SIZE

def test_before():
    pass

def test_one_rank_fails():
    assert RANK != 1, "rank one does not like it"

def test_after(line):
    line.barrier()
"""


@pytest.mark.timeout(120)
def test_a_failure_on_one_rank_is_found(tmp_path: Path) -> None:
    """The harness itself: one rank of two fails a test, and the tests after it still run."""
    needs_horovod(2)
    trouble = run_job(2, [_with_conftest(tmp_path, SELF_TEST), "-q"], tmp_path, 100)
    assert trouble is not None
    headline, output = trouble.split("----", 1)
    assert "failed on rank 1: " in headline and "test_self.py::test_one_rank_fails" in headline
    assert "rank 0" not in headline and "test_after" not in headline
    assert "rank one does not like it" in output and "2 passed" in output


def test_a_job_without_tests_is_a_failure(tmp_path: Path) -> None:
    trouble = run_job(1, [_with_conftest(tmp_path, "\n"), "-q"], tmp_path, 100)
    assert trouble is not None and "status 5" in trouble


def _with_conftest(folder: Path, text: str) -> str:
    """A folder with the conftest of tests/ranks and one test file."""
    tests = folder / "tests"
    tests.mkdir()
    (tests / "conftest.py").write_text((HERE / "ranks" / "conftest.py").read_text())
    (tests / "test_self.py").write_text(text)
    return str(tests)
