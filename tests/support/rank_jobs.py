"""Jobs of several ranks that run the files `tests/*/ranks_*.py`.

`python tests/support/rank_jobs.py RANKS PYTEST_ARGUMENTS...` runs chosen tests on a number of
ranks: `python tests/support/rank_jobs.py 4 tests/meshimpl/ranks_fft.py -x`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from meshimpl.launch import mpirun_command

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# [s] of one job with all files. Only a machine that has stopped takes so long: a test that hangs
# runs into its own limit, see ranks.py.
TIME_LIMIT = 4500
WHICH = ["not long", pytest.param("long", marks=pytest.mark.long)]
LAST_LINES = 120  # of a failing rank's output
# Of Horovod's thread, which asks the other ranks in each cycle whether they have something to say:
# ranks that mostly build graphs, on fewer cores than there are ranks, have something rarely.
CYCLE_TIME = "2"  # [ms]
# Pytest rewrites the sources of packages with plugins, which takes each rank a second or two.
PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "pytest_timeout,ranks"}


def needs_horovod(ranks: int) -> None:
    """Skip a test of several ranks where Horovod was left out on purpose; in CI it must not be."""
    if ranks > 1 and importlib.util.find_spec("horovod") is None and "CI" not in os.environ:
        pytest.skip("Horovod is not installed (`make setup` builds it): one rank only")


def run_job(
    ranks: int, arguments: list[str], folder: Path, time_limit: float
) -> tuple[str | None, dict[str, float]]:
    """Run pytest with `arguments` on several ranks.

    Args:
        ranks: their number; one rank runs without mpirun.
        arguments: of pytest.
        folder: where the ranks leave their output.
        time_limit: time limit of the whole job [s].

    Returns:
        what went wrong, None when nothing did, and the processor time of each test on all ranks
        together [s].
    """
    command = [sys.executable, str(HERE / "run_rank.py"), str(folder), *arguments]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment.setdefault("HOROVOD_CYCLE_TIME", CYCLE_TIME)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment |= PLUGINS
    if ranks > 1:
        command, launching = mpirun_command(ranks, command)
        environment = launching | environment
    paths = [str(ROOT), str(HERE), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    job = subprocess.Popen(
        command,
        env=environment,
        cwd=ROOT,
        text=True,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
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
        return _report(folder, ranks, f"no end after {time_limit:.0f} s", output), {}
    results = _results(folder, ranks)
    seconds = {
        name: round(sum(result.get("seconds", {}).get(name, 0.0) for result in results), 2)
        for name in results[0].get("seconds", {})
    }
    trouble = _trouble(folder, ranks, job.returncode, output, results)
    return trouble, seconds


def run_all(
    ranks: int, which: str, folder: Path, record_property: Callable[[str, object], None]
) -> None:
    """Runs the marked tests of all rooms on ranks; reports their times to tests/conftest.py."""
    needs_horovod(ranks)
    arguments = ["tests", "--tb=short", "-m", which]
    trouble, seconds = run_job(ranks, arguments, folder, TIME_LIMIT)
    record_property("ranks", ranks)
    record_property("on ranks", seconds)
    record_property("long", which == "long")
    assert trouble is None, trouble


def _trouble(folder: Path, ranks: int, status: int, output: str, results: list[dict]) -> str | None:
    if status != 0:
        return _report(folder, ranks, f"the job ended with status {status}", output)
    if any(result.get("tests") != results[0].get("tests") for result in results):
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


def run_two(folder: Path, text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a program on two ranks.

    Args:
        folder: where the program is written.
        text: the program.
        **environment: variables that the ranks have in addition.
    """
    needs_horovod(2)
    script = folder / "program.py"
    script.write_text(text)
    command, prepared = mpirun_command(2, [sys.executable, str(script)])
    return subprocess.run(
        command,
        env={**os.environ, **prepared, **environment},
        timeout=150,
        text=True,
        capture_output=True,
    )


def main(ranks: str, *arguments: str) -> int:
    """Run chosen tests on several ranks; print what the first rank and those that failed said."""
    with tempfile.TemporaryDirectory() as folder:
        trouble, seconds = run_job(int(ranks), [*arguments], Path(folder), 3600)
        print(trouble or Path(folder, "rank-0.txt").read_text())
    for name in sorted(seconds, key=seconds.__getitem__, reverse=True)[:20]:
        print(f"{seconds[name]:8.1f} s of processor time: {name}")
    return trouble is not None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
