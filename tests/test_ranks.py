"""The files `ranks_*.py` in jobs of 2 and 4 ranks, one of them on 3 and 8; test_one_rank.py has 1.

The job of 2 ranks leaves part of two cores to others and comes first. That of 8 is a long test.
A job fails when a test fails on any rank, when it runs into its time limit, when a rank ends
without a word, or when its ranks have not run the same tests.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from rank_jobs import TIME_LIMIT, WHICH, needs_horovod, run_all, run_job


@pytest.mark.timeout(TIME_LIMIT + 60)
@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_ranks(
    ranks: int, which: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    run_all(ranks, which, tmp_path, record_property)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", [3, pytest.param(8, marks=pytest.mark.long)])
def test_on_other_numbers(
    ranks: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """One file alone: each rank takes seconds to start."""
    needs_horovod(ranks)
    arguments = ["tests/meshimpl/ranks_eight.py", "--tb=short"]
    trouble, seconds = run_job(ranks, arguments, tmp_path, 360)
    record_property("ranks", ranks)
    record_property("on ranks", seconds)
    record_property("long", False)
    assert trouble is None, trouble


SELF_TEST = """
import os, time
import pytest
from ranks import RANK, SIZE

def test_before():
    pass

def test_one_rank_fails():
    assert RANK != 1, "rank one does not like it"

def test_after(line):
    line.barrier()

@pytest.mark.ranks(1, 4)
def test_elsewhere():
    assert False
"""


@pytest.mark.timeout(120)
def test_a_failure_on_one_rank_is_found(tmp_path: Path) -> None:
    """The harness itself: one rank of two fails a test, and the tests after it still run."""
    needs_horovod(2)
    trouble, _ = run_job(2, [_file_with(tmp_path, SELF_TEST)], tmp_path, 100)
    assert trouble is not None
    headline, output = trouble.split("----", 1)
    assert "failed on rank 1: " in headline and "ranks_self.py::test_one_rank_fails" in headline
    assert "rank 0" not in headline and "test_after" not in headline
    assert "rank one does not like it" in output and "2 passed, 1 deselected" in output


def test_a_job_without_tests_is_a_failure(tmp_path: Path) -> None:
    trouble, _ = run_job(1, [_file_with(tmp_path, "\n")], tmp_path, 100)
    assert trouble is not None and "status 5" in trouble


def _file_with(folder: Path, text: str) -> str:
    """A file of tests for ranks."""
    file = folder / "ranks_self.py"
    file.write_text(text)
    return str(file)
