"""Budgets of the tests, and the report of their processor time.

Tests above their budget are listed at the end. `--budget` determines whether they fail:

- `seconds` (`make test-budget`): a test above its budget fails. The machine must be as fast as the
  one that the budgets were measured on.
- `share` (`make test`): a test fails above three times its budget. On a slower machine its share of
  the whole time must also exceed three times its budget's share of the suite's budget, so that no
  machine fails for being slow.

The tests of ranks that a test starts count one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import pytest

BUDGET = 20.0  # [s] of processor time of a test, its fixtures included
ON_RANKS = 40.0  # [s] of one on all ranks of a job together
SUITE = 2400.0  # [s] of all tests together: 20 minutes of two cores
TOLERANCE = 3.0
SHOWN = 30
HELD = ("seconds", "share")


class Report:
    """What the tests took, told at the end; in the process that collects their results."""

    def __init__(self, held: Literal["seconds", "share"] | None) -> None:
        self.held = held
        self.total = 0.0
        self.seconds: dict[str, float] = {}
        self.budgets: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "teardown":
            return
        facts: dict[str, Any] = dict(report.user_properties)
        on_ranks: dict[str, float] = facts.get("on ranks", {})
        self.total += facts["seconds"]
        self.seconds[report.nodeid] = facts["seconds"]
        if not on_ranks:
            self.budgets[report.nodeid] = facts["budget"]
        for test, seconds in on_ranks.items():
            name = f"{test} on {facts['ranks']} rank(s)"
            self.seconds[name] = seconds
            if not facts["long"]:
                self.budgets[name] = ON_RANKS

    def over(self, allowed: float = 1.0) -> Iterator[str]:
        """Yield a line for each test that took more than `allowed` times its budget."""
        for name, budget in self.budgets.items():
            if self.seconds[name] > allowed * budget:
                yield f"{name}: {self.seconds[name]:.0f} s, its budget is {budget:.0f} s"

    def failures(self) -> list[str]:
        """The lines that are failures."""
        if self.held is None:
            return []
        slowness = max(1.0, self.total / SUITE)
        return list(self.over(1.0 if self.held == "seconds" else TOLERANCE * slowness))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.total < BUDGET:
            return
        files: Counter[str] = Counter()
        for name, seconds in self.seconds.items():
            file, _, test = name.partition("::")
            ranks = test.partition("] on ")[2] or test.partition(" on ")[2]
            files[f"{file} on {ranks}" if ranks else file] += seconds
        terminalreporter.section(f"processor time [s], {self.total:.0f} in all")
        for title, counted in (("files", files), ("tests", Counter(self.seconds))):
            terminalreporter.write_line(f"{title}:")
            for name, seconds in counted.most_common(SHOWN):
                terminalreporter.write_line(f"{seconds:8.1f} {name}")
        failures = self.failures()
        for line in self.over():
            wrong = "FAILED, far over budget" if line in failures else "over budget"
            terminalreporter.write_line(f"{wrong}: {line}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.OK and self.failures():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
