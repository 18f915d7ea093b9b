"""Traces of small recordings against spans and sums by hand; the options of the command."""

import csv
import gzip
import json
import sys
import threading
import time

import numpy as np
import pytest
import tensorflow as tf
from commands import flowpm_here, folder_with, plain
from run_files import RUN
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from flowpm_dist.jobs.folder import LONGEST, TRACE
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.spans import (
    LEAST,
    PythonCalls,
    Span,
    Spent,
    collectives,
    nested,
    operations,
    spent_in,
)
from flowpm_dist.jobs.trace import COLUMNS, DRIFT, Trace, longest, offset, write_trace

here = folder_with(RUN)
START = 1_700_000_000_000_000_000
"""The beginning of the recordings, since 1970 [ns]."""
US = 1000
EVENTS = {
    # line: its begin after the start [ns], and events: name, offset and duration [ps]
    "python/1": (500, [("phase:paint", 0, 90_000_000), ("Run", 1_000_000, 80_000_000)]),
    "tf_Compute/2": (0, [
        ("ExecutorState::Process", 10_000_000, 60_000_000),
        ("a/MatMul:_MklMatMul", 20_000_000, 30_000_000),
        ("a/Add:AddV2", 55_000_000, 10_000_000),
        ("short:Add", 66_000_000, 1_000_000),
        ("ThreadpoolListener::Record", 67_000_000, 0),
    ]),
    "tf_XLAEigen/3": (0, [("add_fusion.2", 30_000_000, 7_000_000)]),
}  # fmt: skip
TIMELINE = (
    '[\n{"name": "process_name", "ph": "M", "pid": 0, "args": '
    '{"start_time_since_epoch_in_micros":1700000000000010}},\n'
    '{"name": "process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 0}},\n'
    '{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "x"}},\n'
    '{"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 5, "pid": 1},'
    '{"ph": "X", "name": "1", "ts": 6, "pid": 1, "dur": 0},{"ph": "E", "ts": 25, "pid": 1},'
    '{"name": "process_name", "ph": "M", "pid": 2, "args": {"name": "y"}},\n'
    '{"ph": "B", "name": "ALLREDUCE", "ts": 30, "pid": 1},'
    '{"ph": "B", "name": "NEGOTIATE_ALLTOALL", "ts": 32, "pid": 2},'
    '{"ph": "B", "name": "MPI_ALLREDUCE", "ts": 33, "pid": 1},{"ph": "E", "ts": 43, "pid": 1},'
    '{"ph": "E", "ts": 45, "pid": 2},{"ph": "E", "ts": 50, "pid": 1, "args": {"dtype": "int8"}},'
    '{"ph": "B", "name": "ALLTOALL", "ts": 52, "pid": 2},{"ph": "E", "ts": 60, "pid": 2}'
)


def write_profile(folder):
    """A recording of TensorFlow's profiler, as `EVENTS` has it."""
    space = xplane_pb2.XSpace()
    host = space.planes.add(name="/host:CPU")
    for key, (line_name, (begin, events)) in enumerate(EVENTS.items()):
        line = host.lines.add(id=key, name=line_name, timestamp_ns=begin)
        for name, offset_ps, duration_ps in events:
            number = len(host.event_metadata) + 1
            host.event_metadata[number].name = name
            line.events.add(metadata_id=number, offset_ps=offset_ps, duration_ps=duration_ps)
    about = space.planes.add(name="Task Environment")
    about.stat_metadata[7].name = "profile_start_time"
    about.stats.add(metadata_id=7, uint64_value=START)
    path = folder / "plugins/profile/now"
    path.mkdir(parents=True)
    (path / "host.xplane.pb").write_bytes(space.SerializeToString())


def test_a_recorded_profile(tmp_path):
    """The starts of profile, line and event add up; short events are left out."""
    write_profile(tmp_path)
    found = [
        (kind, track, name, begin - START, end - begin)
        for kind, track, name, begin, end in operations(tmp_path)
    ]
    assert found == [
        ("phase", "phases, python 1", "paint", 500, 90 * US),
        ("runtime", "python 1", "Run", 1500, 80 * US),
        ("runtime", "tf_Compute 2", "ExecutorState::Process", 10 * US, 60 * US),
        ("operation", "tf_Compute 2", "a/MatMul:_MklMatMul", 20 * US, 30 * US),
        ("operation", "tf_Compute 2", "a/Add:AddV2", 55 * US, 10 * US),
        ("XLA operation", "XLA, tf_XLAEigen 3", "add_fusion.2", 30 * US, 7 * US),
    ]


@pytest.mark.parametrize("end", ["]", "", ","])
def test_a_recorded_timeline(end):
    """Clocks begin 10 us later; collectives at the same time are on two tracks."""
    found = [
        (track, name, begin - START, end - begin)
        for _, track, name, begin, end in collectives(TIMELINE + end)
    ]
    assert sorted(found, key=lambda each: each[2]) == [
        ("Horovod 1", "NEGOTIATE_ALLREDUCE x", 15 * US, 20 * US),
        ("Horovod 1", "ALLREDUCE x", 40 * US, 20 * US),
        ("Horovod 2", "NEGOTIATE_ALLTOALL y", 42 * US, 13 * US),
        ("Horovod 1", "MPI_ALLREDUCE x", 43 * US, 10 * US),
        ("Horovod 1", "ALLTOALL y", 62 * US, 8 * US),
    ]
    assert [*collectives("")] == []


def test_spans_that_overlap_are_on_tracks_of_their_own():
    times = [(0, 10), (2, 5), (4, 8), (5, 10), (9, 12), (10, 11), (11, 20)]
    tracks = [
        (span.begin, span.end, span.track)
        for span in nested(Span("operation", "one", "f", *each) for each in times)
    ]
    assert tracks == [
        (0, 10, "one"), (2, 5, "one"), (4, 8, "one (2)"), (5, 10, "one"), (9, 12, "one (2)"),
        (10, 11, "one"), (11, 20, "one"),
    ]  # fmt: skip


def test_time_with_and_without_what_is_inside(tmp_path):
    write_profile(tmp_path)
    spent = spent_in([*operations(tmp_path), *collectives(TIMELINE)])
    assert spent["runtime", "ExecutorState::Process"] == Spent(1, 60 * US, 20 * US)
    assert spent["operation", "a/MatMul:_MklMatMul"] == Spent(1, 30 * US, 30 * US)
    assert spent["collective", "ALLREDUCE x"] == Spent(1, 20 * US, 10 * US)
    # A recursion: 100, and inside it 60, and inside that 10; then 7.
    nested = [(0, 100), (20, 80), (30, 40), (200, 207)]
    calls = spent_in(Span("runtime", "one", "f", *each) for each in nested)
    assert calls == {("runtime", "f"): Spent(4, 107, 107)}


class Ticks:
    """A clock that moves on by 10 us at each reading."""

    now = START

    def __call__(self):
        self.now += 10 * US
        return self.now


def leaf():
    return len("leaf")


def branch(depth):
    leaf()
    if depth:
        branch(depth - 1)


def test_calls_of_python():
    calls = PythonCalls()
    calls._clock = Ticks()
    assert sys.getprofile() is None
    calls.start()
    branch(1)
    calls.stop()
    assert sys.getprofile() is None
    spent = {name.partition(" ")[0]: each for (_, name), each in calls.spent.items()}
    # Leaving `start` takes the first 10 us. A call and its return are 10 us apart: len 10, leaf 30,
    # the inner branch 50, the outer 110.
    assert spent["builtins.len"] == Spent(2, 20 * US, 20 * US)
    assert spent["leaf"] == Spent(2, 60 * US, 40 * US)
    assert spent["branch"] == Spent(2, 110 * US, 50 * US)
    spans = {span.name.partition(" ")[0]: (span.begin - START, span.end - START)
             for span in calls.spans}  # fmt: skip
    assert spans["branch"] == (20 * US, 130 * US)
    assert "(jobs/test_trace.py:" in next(s.name for s in calls.spans if s.name[:3] == "bra")
    calls.spans.clear()
    threading.Thread(target=leaf).start()
    assert not calls.spans and LEAST <= 10 * US


def test_the_written_trace(tmp_path):
    """Two ranks on one time axis: the clock of the second is 3 s ahead."""
    ahead = 3_000_000_000
    first = [
        Span("phase", "phases, python 1", "paint", START + 5 * US, START + 25 * US),
        Span("collective", "Horovod 1", "ALLREDUCE x", START + 7 * US, START + 9 * US),
    ]
    other = [Span("phase", "phases, python 1", "paint", START + ahead, START + ahead + 30 * US)]
    clocks = [[START] * 5, [START + ahead + late for late in (-1, 0, 40, 0, 0)]]
    ranks = [
        {"spans": spans, "rows": longest(n, spent_in(spans), 40e-6), "moments": moments}
        for n, (spans, moments) in enumerate(zip([first, other], clocks, strict=True))
    ]
    write_trace(tmp_path, json.loads(json.dumps(ranks)))
    trace = json.loads(gzip.decompress((tmp_path / TRACE).read_bytes()))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(e["pid"], e["cat"], e["name"], e["ts"], e["dur"]) for e in spans] == [
        (0, "phase", "paint", 5.0, 20.0),
        (0, "collective", "ALLREDUCE x", 7.0, 2.0),
        (1, "phase", "paint", 0.0, 30.0),
    ]
    named = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in trace["traceEvents"]
        if e["name"] == "thread_name"
    }
    assert [named[e["pid"], e["tid"]] for e in spans] == ["phases, python", "Horovod",
                                                           "phases, python"]  # fmt: skip
    assert len({(e["pid"], e["tid"]) for e in spans}) == 3
    rows = [*csv.DictReader((tmp_path / LONGEST).open())]
    assert [*rows[0]] == [*COLUMNS]
    assert [*rows[0].values()] == ["0", "phase", "paint", "1", "0.000020", "0.000020", "0.5000"]
    assert [(row["rank"], row["share"]) for row in rows[1:]] == [("0", "0.0500"), ("1", "0.7500")]


def test_clocks_that_agree_are_left_as_they_are():
    assert offset(np.array([DRIFT, 5, DRIFT - 1, DRIFT, 7])) == 0
    assert offset(np.array([-2 * DRIFT, 0, -2 * DRIFT])) == -2 * DRIFT


def test_the_ten_longest_of_each_kind():
    spent = {("operation", f"op {n}"): Spent(1, 100 - n, 10 + n) for n in range(30)}
    rows = longest(3, {**spent, ("phase", "read"): Spent(2, 8, 8)}, 1e-6)
    assert [row[2] for row in rows] == ["read", *(f"op {n}" for n in range(29, 19, -1))]
    assert rows[0] == [3, "phase", "read", 2, "0.000000", "0.000000", "0.0080"]


def test_only_the_steps_asked_for_are_recorded(monkeypatch, tmp_path):
    """The first one compiles; counts of other things are none."""
    done = []
    monkeypatch.setattr(Trace, "_begin", lambda self: done.append("begin"))
    monkeypatch.setattr(Trace, "_end", lambda self: done.append("end"))
    monkeypatch.setenv("HOROVOD_TIMELINE", "DYNAMIC")
    with Progress(rank=1) as progress:
        Trace(2, "training", progress)
        for what in ("held out", "training", "held out", "training", "training", "training"):
            progress(what, 1, 9)
            done.append(what)
    assert done == ["held out", "begin", "training", "held out", "training", "end",
                    "training", "training"]  # fmt: skip


@pytest.mark.parametrize(("steps", "message"), [("0", "greater than or equal to 1"),
                                                ("two", "should be a valid integer")])  # fmt: skip
def test_a_wrong_number_of_steps(here, steps, message):
    done = flowpm_here("simulate", "run.toml", "--trace", steps)
    assert done.returncode == 2 and message in plain(done.stderr)


class OneRank:
    """A mesh of one rank."""

    rank, size = 0, 1

    def barrier(self):
        pass

    def gather_to_root(self, array):
        return [array]


def test_a_trace_that_cannot_be_made_is_a_warning(monkeypatch, tmp_path, capsys):
    def fail(*_):
        raise RuntimeError("the profiler is in use")

    monkeypatch.setenv("HOROVOD_TIMELINE", "DYNAMIC")
    monkeypatch.setattr(Trace, "_begin", fail)
    with Progress() as progress:
        trace = Trace(1, "", progress)
        for _ in range(3):
            progress("step", 1, 3)
        trace.leave(tmp_path, OneRank())
    assert progress.warnings == [
        "no trace of rank 0: the profiler is in use",
        "no trace: no step of the work was recorded",
    ]
    assert not [*tmp_path.iterdir()]


def test_of_a_rank_whose_recording_is_damaged_nothing_is_shown(monkeypatch, tmp_path):
    """Its calls of Python neither."""
    monkeypatch.setenv("HOROVOD_TIMELINE", "DYNAMIC")
    monkeypatch.setattr(Trace, "_begin", lambda self: self._python.start())

    def end(self):
        raise ValueError("no timeline")

    monkeypatch.setattr(Trace, "_end", end)
    with Progress() as progress:
        trace = Trace(1, "", progress)
        progress("step", 1, 2)
        time.sleep(0.001)
        progress("step", 2, 2)
        trace.leave(tmp_path, OneRank())
    assert progress.warnings[0] == "no trace of rank 0: no timeline"
    assert sys.getprofile() is None and not [*tmp_path.iterdir()]


def test_work_with_fewer_steps_is_recorded_to_its_end(monkeypatch, tmp_path):
    monkeypatch.setenv("HOROVOD_TIMELINE", "DYNAMIC")
    with Progress(rank=1) as progress:
        trace = Trace(9, "", progress)
        progress("step", 1, 3)
        with tf.profiler.experimental.Trace("phase:reading"):
            leaf()
            time.sleep(0.01)
        trace.leave(tmp_path, OneRank())
    rows = [*csv.DictReader((tmp_path / LONGEST).open())]
    (row,) = [row for row in rows if row["kind"] == "phase"]
    assert row["name"] == "reading" and 0.01 <= float(row["seconds"]) < 1
    (sleep,) = [row for row in rows if row["name"] == "time.sleep"]
    assert 0.01 <= float(sleep["seconds"]) <= float(row["seconds"])
    events = json.loads(gzip.decompress((tmp_path / TRACE).read_bytes()))["traceEvents"]
    phase, call = (next(e for e in events if e["name"] == n) for n in ("reading", "time.sleep"))
    # One clock for both, to the tick of the system's clock.
    assert phase["ts"] <= call["ts"] + 50
    assert call["ts"] + call["dur"] <= phase["ts"] + phase["dur"] + 50
