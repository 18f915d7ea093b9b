"""Tests that every rank of a job runs together, in the same order: the plugin of their pytest.

A test runs on 2 ranks, in slabs, unless it or its module is marked otherwise. `ranks(1, 2, 4)` sets
the numbers of ranks; with `every_split` the fixture `mesh` takes all ways to split a box over them.
With `dealt` each case of the test runs on one of these meshes; the others are long tests. After
each test all ranks agree on whether it passed. So a failure on one rank is a failure on all, and no
rank waits in a collective that the others never reach.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nccl_stand_in import build_stand_in
from quick import optimise_graphs, trace_once

from meshimpl import ProcessMesh, engine, initialise, launch

TIME_LIMIT = 120  # [s] of one test; a rank that hangs ends the job
DEFAULT_RANKS = (2,)
SHAPES = {1: ["row:1,col:1"], 2: ["row:2"], 4: ["row:2,col:2"], 8: ["row:4,col:2"]}
# Slabs along either axis, and slabs whose neighbours before and behind are not the same.
OTHER_SPLITS = {2: ["row:1,col:2"], 4: ["row:4"]}
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
    8: ["replica:2,row:2,col:2"],
}
# Of networks: batch, one side, the other, both, and mixed.
NETWORK_SHAPES = {
    1: ["row:1,col:1"],
    2: ["replica:2,row:1,col:1", "row:2", "row:1,col:2"],
    4: ["row:2,col:2", "replica:2,row:2"],
}
SHAPE = re.compile(r"\w+:\d+(,\w+:\d+)*$")
MESHES = ("mesh", "any_mesh", "network_mesh")
"""The fixtures that are meshes of all ranks."""
RANK, SIZE = launch.detect().rank, launch.detect().size
_failures = itertools.count(1)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(*numbers): the numbers of ranks it runs on")
    config.addinivalue_line("markers", "every_split: `mesh` is every way of splitting a box")
    config.addinivalue_line("markers", "dealt(ranks): each case on one mesh; the others are long")
    config.addinivalue_line("markers", "grappler: with TensorFlow's graph optimiser on any ranks")
    if SIZE == 2:
        _make_two_devices()
    others = ["row:2,replica:2"] if SIZE == 4 else []
    initialise([*shapes_of("any_mesh"), *shapes_of("network_mesh"), *others])


def _make_two_devices() -> None:
    """Give TensorFlow a second device, CPU:1, as a stand-in for a GPU."""
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    device = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(cpu, [device, device])


def shapes_of(fixture: str, every_split: bool = False) -> list[str]:
    """The shapes, for this number of ranks, that a fixture goes through."""
    if fixture == "network_mesh":
        return NETWORK_SHAPES.get(SIZE, [f"row:{SIZE}"])
    shapes = SHAPES.get(SIZE, [f"row:{SIZE}"])
    if every_split or fixture == "any_mesh":
        shapes = [*OTHER_SPLITS.get(SIZE, []), *shapes]
    return [*shapes, *OTHER_SHAPES.get(SIZE, [])] if fixture == "any_mesh" else shapes


def ranks_of(item: pytest.Item) -> tuple[int, ...]:
    """The numbers of ranks a test runs on: as its parameters say, or itself, or its module."""
    callspec = getattr(item, "callspec", None)
    marks = [mark for mark in (callspec.marks if callspec else []) if mark.name == "ranks"]
    mark = marks[0] if marks else item.get_closest_marker("ranks")
    return mark.args if mark else DEFAULT_RANKS


def leave_out_dealt(items: list[pytest.Item]) -> None:
    """Make a test marked `dealt` a long one where another mesh has its case.

    The cases go in turn to the numbers of ranks, one rank last, and on each to its meshes. Their
    order is as if by chance: neighbours differ in one parameter, and each of its values is to meet
    each mesh. So are the first mesh and the first number, unless the mark has the number:
    `dealt(2)` makes a long test cheaper. A test with a part for one rank alone is not dealt.
    """
    tests: dict[str, list[tuple[pytest.Item, str, str]]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("dealt") is not None:
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            shape = next(filter(SHAPE.match, map(str, parameters.values())), "")
            case = item.name.replace(shape, "") if shape else item.name
            tests[item.nodeid.partition("[")[0]].append((item, shape, case))
    for test, found in tests.items():
        shapes = list(dict.fromkeys(shape for _, shape, _ in found))
        cases = sorted({case for *_, case in found}, key=lambda name: zlib.crc32(name.encode()))
        for item, shape, case in found:
            several = [number for number in ranks_of(item) if number > 1]
            wanted = item.get_closest_marker("dealt").args
            start = zlib.crc32(test.partition("::")[2].encode())
            first = start % max(len(several), 1)
            if wanted and wanted[0] in several:
                first = several.index(wanted[0])
            numbers = [*several[first:], *several[:first], *({1} & {*ranks_of(item)})]
            turn, place = divmod(cases.index(case), len(numbers))
            if numbers[place] != SIZE or shapes[(start + turn) % len(shapes)] != shape:
                item.add_marker(pytest.mark.long)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Limit the time of each test; leave out those that run on other numbers of ranks."""
    leave_out_dealt(items)
    here, elsewhere = [], []
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIME_LIMIT, method="thread"))
        (here if SIZE in ranks_of(item) else elsewhere).append(item)
    config.hook.pytest_deselected(items=elsewhere)
    items[:] = here


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    trace_once()
    optimise_graphs(item.get_closest_marker("grappler") is not None)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise the mesh fixtures over the shapes of this number of ranks."""
    every_split = metafunc.definition.get_closest_marker("every_split") is not None
    for fixture in MESHES:
        if fixture in metafunc.fixturenames:
            metafunc.parametrize(fixture, shapes_of(fixture, every_split), indirect=True)


@functools.cache
def process_mesh(shape: str) -> ProcessMesh:
    """One mesh for each shape in this process."""
    return ProcessMesh(shape)


def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new folder that all ranks see: rank 0's."""
    import tensorflow as tf

    mine = str(tmp_path_factory.mktemp("shared")).encode().ljust(512)
    name = tf.constant(np.frombuffer(mine, np.uint8).astype(np.int32))
    chosen = process_mesh(f"row:{SIZE}").world.broadcast(name).numpy()
    return Path(bytes(chosen.astype(np.uint8)).decode().strip())


def by_rank_zero(name: str, compute: Callable[[], dict[str, Any]]) -> dict[str, np.ndarray]:
    """Returns on every rank what rank 0 computes.

    The other ranks sleep meanwhile: a rank that waits in a collective would use a core.

    Args:
        name: the result's name in this job.
        compute: a function without collectives; `numpy.savez` can store its values.
    """
    file = Path(os.environ.get("RANKS_FOLDER") or tempfile.mkdtemp(), f"{name}.npz")
    failed = file.with_suffix(".failed")
    if RANK == 0 and not file.exists():
        half = file.with_suffix(".half.npz")
        try:
            np.savez(half, **compute())
        except BaseException:
            failed.touch()
            raise
        half.rename(file)
    while not file.exists():
        assert not failed.exists(), f"rank 0 failed to compute {name}"
        time.sleep(0.05)
    with np.load(file) as held:
        return dict(held)


@functools.cache
def nccl_engine() -> engine.NcclEngine:
    """Another engine for this job, whose exchanges call a library that replaces NCCL."""
    folder = os.environ.get("RANKS_FOLDER") or tempfile.mkdtemp()
    built = by_rank_zero("stand_in", lambda: {"library": build_stand_in(Path(folder))})
    nccl = engine.NcclEngine(str(built["library"]))
    vars(nccl)["_device"] = "CPU:0"  # it moves memory of the host
    nccl.process_sets = engine.current().process_sets
    nccl.connect()
    return nccl


@pytest.fixture(params=["horovod", "nccl"] if SIZE > 1 else ["horovod"])
def each_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Exchanges by Horovod, and by NCCL's functions."""
    if request.param == "nccl":
        nccl = nccl_engine()
        monkeypatch.setattr(engine, "current", lambda: nccl)
    return request.param


def solo() -> ProcessMesh:
    """A mesh of this rank alone."""
    return process_mesh(f"row:{SIZE}").without("row")


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> ProcessMesh:
    """A mesh of all ranks: slabs on 2, pencils on 4."""
    return process_mesh(request.param)


@pytest.fixture
def any_mesh(request: pytest.FixtureRequest) -> ProcessMesh:
    """Every split, and meshes with a replica axis and with axes of size 1."""
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

    return tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, name="agreement"), autograph=False)


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
        graph_guards.names = graph_guards.CollectiveNames(1_000_000 * next(_failures))
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
