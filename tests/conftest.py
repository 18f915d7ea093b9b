"""What tests take of the processor's time, for the report of tests/support/budgets.py.

A test's budget is of processor time, its own and that of the processes it starts: the clock depends
on what else the machine does. `@pytest.mark.budget(seconds)` gives it one of its own.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

from quick import QUICK_XLA, collect_seldom, trace_once

# Workers share two cores; what is set here is what TensorFlow finds when a test imports it.
if "PYTEST_XDIST_WORKER" in os.environ:
    for _name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        os.environ.setdefault(_name, "1")
    os.environ.setdefault("XLA_FLAGS", QUICK_XLA)

# Where bytecode may not be written, as in many containers, each process compiles all it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Nothing that a test measures or builds is left in the user's cache.
if "FLOWPM_CACHE" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="flowpm-cache-")
    os.environ["FLOWPM_CACHE"] = _cache.name

import pytest
from budgets import BUDGET, HELD, Report
from processor_time import processor_time

_BEGAN = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--budget", choices=HELD, help="fail over budgets, see budgets.py")


def pytest_configure(config: pytest.Config) -> None:
    collect_seldom()
    sys.dont_write_bytecode = False
    config.addinivalue_line("markers", "budget(seconds): processor time it may take")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Report(config.getoption("--budget")), "processor time")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Jobs on ranks first: one worker has them while the others have all the rest.

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
    trace_once()
    item.stash[_BEGAN] = processor_time()
