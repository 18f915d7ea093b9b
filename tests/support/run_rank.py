"""One rank of a job of rank_jobs.py: pytest, with its output and its results in files of this rank.

Usage: python run_rank.py RESULTS_FOLDER PYTEST_ARGUMENTS...
"""

import json
import os
import sys
from pathlib import Path

from quick import QUICK_XLA, collect_seldom

from meshimpl import launch

launch.configure_threads()
if launch.detect().size > 1:
    os.environ.setdefault("XLA_FLAGS", QUICK_XLA)
elif os.environ.get("XLA_FLAGS") == QUICK_XLA:
    del os.environ["XLA_FLAGS"]

import pytest  # noqa: E402
from processor_time import processor_time  # noqa: E402

FILES = ["-o", "python_files=ranks_*.py"]


class Results:
    """Names of the tests by what became of them, written down as they end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tests: dict[str, str] = {}
        self.seconds: dict[str, float] = {}  # of processor time
        self.running: str | None = None
        self._began = 0.0

    def write(self) -> None:
        facts = {"tests": self.tests, "seconds": self.seconds, "running": self.running}
        self.path.write_text(json.dumps(facts))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.running, self._began = nodeid, processor_time()
        self.write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.tests.get(report.nodeid) != "failed" and (
            report.when == "call" or report.outcome != "passed"
        ):
            elsewhere = str(report.longrepr).startswith("failed on rank")
            self.tests[report.nodeid] = "failed elsewhere" if elsewhere else report.outcome

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.seconds[nodeid] = processor_time() - self._began
        self.running = None
        self.write()


def main(folder: str, *arguments: str) -> int:
    """Run pytest with standard output and error in a file."""
    collect_seldom()
    rank = launch.detect().rank
    output = os.open(Path(folder, f"rank-{rank}.txt"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ["RANKS_FOLDER"] = folder
    results = Results(Path(folder, f"rank-{rank}.json"))
    return int(pytest.main([*FILES, *arguments], plugins=[results]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
