"""Tests that every rank of a job runs together, in the same order.

`python -m pytest tests/ranks` is one rank; tests/test_ranks.py starts more. All ranks agree after
each test on whether it passed, so that a failure on one rank is a failure on all and none goes on
to a collective that the others never reach.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from meshimpl import ProcessMesh, initialise, launch

TIME_LIMIT = 120  # [s] of one test; a rank that hangs ends the job
SHAPES = {
    1: ["row:1,col:1"],
    2: ["row:2", "row:1,col:2"],
    4: ["row:4", "row:2,col:2"],
}
# Of tests that are about the mesh itself, or for which three axes matter.
OTHER_SHAPES = {
    1: ["row:1", "replica:1,row:1,col:1"],
    2: ["row:2,col:1", "replica:2,row:1,col:1", "replica:1,row:2,col:1"],
    4: [
        "row:1,col:4",
        "row:4,col:1",
        "replica:2,row:2",
        "replica:2,row:2,col:1",
        "replica:1,row:2,col:2",
    ],
}
# Of networks: batch, one side, the other, both, and mixed.
NETWORK_SHAPES = {
    1: ["row:1,col:1"],
    2: ["replica:2,row:1,col:1", "row:2", "row:1,col:2"],
    4: ["row:2,col:2", "replica:2,row:2"],
}
RANK, SIZE = launch.detect().rank, launch.detect().size
_failures = itertools.count(1)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(n): needs at least this number of ranks")
    initialise([*SHAPES.get(SIZE, [f"row:{SIZE}"]), *OTHER_SHAPES.get(SIZE, [])])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Limit the time of each test; leave those out that need more ranks than there are."""
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIME_LIMIT, method="thread"))
    items[:] = [
        item for item in items if all(mark.args[0] <= SIZE for mark in item.iter_markers("ranks"))
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise `mesh` and `any_mesh` over the shapes of this number of ranks."""
    shapes = SHAPES.get(SIZE, [f"row:{SIZE}"])
    if "mesh" in metafunc.fixturenames:
        metafunc.parametrize("mesh", shapes, indirect=True)
    if "network_mesh" in metafunc.fixturenames:
        few = NETWORK_SHAPES.get(SIZE, [f"row:{SIZE}"])
        metafunc.parametrize("network_mesh", few, indirect=True)
    if "any_mesh" in metafunc.fixturenames:
        metafunc.parametrize("any_mesh", shapes + OTHER_SHAPES.get(SIZE, []), indirect=True)


@functools.cache
def process_mesh(shape: str) -> ProcessMesh:
    """One mesh for each shape in this process."""
    return ProcessMesh(shape)


def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new folder that all ranks see: rank 0's."""
    import numpy as np
    import tensorflow as tf

    mine = str(tmp_path_factory.mktemp("shared")).encode().ljust(512)
    name = tf.constant(np.frombuffer(mine, np.uint8).astype(np.int32))
    chosen = process_mesh(f"row:{SIZE}").world.broadcast(name).numpy()
    return Path(bytes(chosen.astype(np.uint8)).decode().strip())


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> ProcessMesh:
    """A mesh of all ranks, as a line and as a grid."""
    return process_mesh(request.param)


@pytest.fixture
def any_mesh(request: pytest.FixtureRequest) -> ProcessMesh:
    """As `mesh`, and with a replica axis and axes of size 1."""
    return process_mesh(request.param)


@pytest.fixture
def network_mesh(request: pytest.FixtureRequest) -> ProcessMesh:
    """A mesh of each kind that a network is split over."""
    return process_mesh(request.param)


@pytest.fixture
def line() -> ProcessMesh:
    """All ranks in one line."""
    return process_mesh(f"row:{SIZE}")


@functools.cache
def _sum_over_ranks() -> Any:
    """An allreduce under a name of its own: a rank that failed has made fewer than the others."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    return tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, name="agreement"))


def _failing_ranks(failed: bool) -> list[int]:
    if SIZE == 1:
        return [0] * failed
    import tensorflow as tf

    from meshimpl import graph_guards

    mine = tf.one_hot(RANK, SIZE, on_value=int(failed), off_value=0, dtype=tf.int32)
    flags = _sum_over_ranks()(mine).numpy()
    ranks = [rank for rank, flag in enumerate(flags) if flag]
    if ranks:
        # Names of collectives are counted, and the ranks have stopped at different counts.
        graph_guards.names.restart(1_000_000 * next(_failures))
    return ranks


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    failed = item.stash.get(_FAILED, False) or report.outcome == "failed"
    item.stash[_FAILED] = failed
    if failed and call.excinfo is not None and report.longrepr is not None:
        # Now, not at the end: another rank may wait for this one until the time limit.
        print(f"\n[rank {RANK}] {item.nodeid} ({report.when}):\n{report.longrepr}", flush=True)
    if report.when == "teardown":
        ranks = _failing_ranks(failed)
        if ranks and not failed:
            report.outcome = "failed"
            report.longrepr = f"failed on rank {', '.join(map(str, ranks))}, passed on rank {RANK}"
    return report


_FAILED = pytest.StashKey[bool]()
