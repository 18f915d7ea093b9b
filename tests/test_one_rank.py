"""The files `ranks_*.py` on one rank, in a separate file from the jobs of several ranks."""

from collections.abc import Callable
from pathlib import Path

import pytest
from rank_jobs import TIME_LIMIT, WHICH, run_all


@pytest.mark.timeout(TIME_LIMIT + 60)
@pytest.mark.parametrize("which", WHICH)
def test_on_one_rank(
    which: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    run_all(1, which, tmp_path, record_property)
