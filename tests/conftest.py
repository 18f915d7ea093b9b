"""The report of where the processor's time went, and budgets.

A test's budget is of processor time, its own and that of the processes it starts: the clock depends
on what else the machine does. `@pytest.mark.budget(seconds)` gives it one of its own. A test over
its budget is named at the end; `--budget` (`make test-budget`) makes that a failure. Ranks
that a test has started count there, test by test.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from typing import Any

from quick import QUICK_XLA, collect_seldom

# Two workers share two cores; what is set here is what TensorFlow finds when a test imports it.
if "PYTEST_XDIST_WORKER" in os.environ:
    for _name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        os.environ.setdefault(_name, "1")
    os.environ.setdefault("XLA_FLAGS", QUICK_XLA)

# Nothing that a test measures or builds is left in the user's cache.
if "FLOWPM_CACHE" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="flowpm-cache-")
    os.environ["FLOWPM_CACHE"] = _cache.name

import pytest
from processor_time import processor_time

BUDGET = 20.0  # [s] of processor time of a test, its fixtures included
ON_RANKS = 40.0  # [s] of one on all ranks of a job together
SHOWN = 15

_BEGAN = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--budget", action="store_true", help="fail where a test exceeds its budget")


def pytest_configure(config: pytest.Config) -> None:
    collect_seldom()
    config.addinivalue_line("markers", "budget(seconds): processor time it may take")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Report(config.getoption("--budget")), "processor time")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Jobs on ranks first: with two workers, one has them while the other has all the rest.

    A worker with no more than two tests left takes the next file: test_ranks.py ends with small
    ones, so that no file waits behind its jobs.
    """
    first = ["test_ranks.py", "test_one_rank.py"]
    items.sort(key=lambda item: (item.path.name not in first, item.path.name == first[1]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Any:
    report = yield
    if report.when == "teardown":
        mark = item.get_closest_marker("budget")
        seconds = processor_time() - item.stash.get(_BEGAN, processor_time())
        report.user_properties.append(("seconds", round(seconds, 2)))
        report.user_properties.append(("budget", float(mark.args[0]) if mark else BUDGET))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_BEGAN] = processor_time()


class Report:
    """What the tests took, told at the end; in the process that collects their results."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.seconds: dict[str, float] = {}
        self.over: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "teardown":
            return
        facts: dict[str, Any] = dict(report.user_properties)
        on_ranks: dict[str, float] = facts.get("on ranks", {})
        name = report.nodeid
        self._add(name, facts["seconds"], float("inf") if on_ranks else facts["budget"])
        for test, seconds in on_ranks.items():
            budget = float("inf") if facts["long"] else ON_RANKS
            self._add(f"{test} on {facts['ranks']} rank(s)", seconds, budget)

    def _add(self, name: str, seconds: float, budget: float) -> None:
        self.seconds[name] = seconds
        if seconds > budget:
            self.over.append(f"{name}: {seconds:.0f} s, its budget is {budget:.0f} s")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if sum(self.seconds.values()) < BUDGET:
            return
        files: Counter[str] = Counter()
        for name, seconds in self.seconds.items():
            file, _, test = name.partition("::")
            ranks = test.partition("] on ")[2] or test.partition(" on ")[2]
            files[f"{file} on {ranks}" if ranks else file] += seconds
        terminalreporter.section("processor time [s]")
        for title, counted in (("files", files), ("tests", Counter(self.seconds))):
            terminalreporter.write_line(f"{title}:")
            for name, seconds in counted.most_common(SHOWN):
                terminalreporter.write_line(f"{seconds:8.1f} {name}")
        for line in self.over:
            terminalreporter.write_line(f"over budget: {line}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.strict and self.over and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
