"""A trace of some steps of a job: what each rank does when, and what takes the longest.

Each rank records the operations of TensorFlow by TensorFlow's profiler, the phases of the work, and
the Python functions of its main thread. Rank 0 also records its collectives, in Horovod's timeline.
At the end rank 0 writes `TRACE`, in Chrome's trace format, and the longest in `LONGEST`.

Times come from the hosts' clocks. If a clock differs by more than `DRIFT` from the clock of
rank 0, it is corrected by the moments at which the ranks leave a barrier.
"""

from __future__ import annotations

import csv
import gzip
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.io.files import written_whole
from flowpm_dist.jobs.folder import LONGEST, TRACE
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.spans import (
    KINDS,
    PythonCalls,
    Span,
    Spending,
    collectives,
    nested,
    operations,
    spent_in,
)
from meshimpl import engine
from meshimpl.process_mesh import ProcessMesh

MOST = 400_000
"""Spans that are kept of all ranks together: the longest of each rank."""
DRIFT = 10_000_000
"""Difference between clocks that is corrected [ns]."""
ROWS = 10
"""Rows of `LONGEST` for each rank and kind."""
TIMELINE = "timeline.json"
COLUMNS = ("rank", "kind", "name", "count", "seconds", "own_seconds", "share")


def chrome_events(rank: int, spans: Sequence[Span], start: int) -> Iterator[dict[str, Any]]:
    """Yields a rank's spans as events of Chrome's trace format: a process with a track a thread.

    Args:
        rank: number of the rank.
        spans: its spans.
        start: the time that is 0 in the trace, since 1970 [ns].
    """
    tracks = sorted({(KINDS.index(span.kind), span.track) for span in spans})
    numbers = {track: n for n, track in enumerate(dict.fromkeys(track for _, track in tracks), 1)}
    yield _about("process_name", rank, name="rank")  # viewers add its number
    yield _about("process_sort_index", rank, sort_index=rank)
    for track, number in numbers.items():
        yield _about("thread_name", rank, number, name=track.rstrip(" 0123456789"))
        yield _about("thread_sort_index", rank, number, sort_index=number)
    for span in sorted(spans, key=lambda each: (each.begin, -each.end)):
        yield {
            "ph": "X", "pid": rank, "tid": numbers[span.track], "cat": span.kind, "name": span.name,
            "ts": (span.begin - start) / 1000, "dur": (span.end - span.begin) / 1000,
        }  # fmt: skip


def _about(key: str, pid: int, tid: int = 0, **values: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": key, "args": values}


def longest(rank: int, spent: Spending, seconds: float) -> list[list[Any]]:
    """Returns a rank's rows of `LONGEST`: what itself took the most time, for each kind.

    Args:
        rank: number of the rank.
        spent: the time by kind and name.
        seconds: duration of the trace, which shares refer to [s].
    """
    rows = []
    for kind in KINDS:
        of_kind = {name: each for (its_kind, name), each in spent.items() if its_kind == kind}
        for name, each in sorted(of_kind.items(), key=lambda item: -item[1].exclusive)[:ROWS]:
            share = 1e-9 * each.exclusive / seconds if seconds > 0 else 0.0
            values = f"{1e-9 * each.total:.6f}", f"{1e-9 * each.exclusive:.6f}", f"{share:.4f}"
            rows.append([rank, kind, name, each.count, *values])
    return rows


class Trace:
    """A trace of some steps of a job, on this rank.

    Args:
        steps: number of steps, after the first one, which compiles.
        counted: what the job counts its steps as, see `Command.steps`; empty for any count.
        progress: the display of the job, which counts the steps.
    """

    def __init__(self, steps: int, counted: str, progress: Progress) -> None:
        self._steps, self._counted, self._progress = steps, counted, progress
        self._steps_seen, self._began, self._seconds, self._problem = 0, 0, 0.0, ""
        self._python, self._recorded = PythonCalls(), list[Span]()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        engine.prepare_timeline()
        progress.on_count = self._count

    def _count(self, unit: str) -> None:
        if self._counted and unit != self._counted:
            return
        self._steps_seen += 1
        if self._steps_seen == 1:
            self._attempt(self._begin)
        elif self._steps_seen == self._steps + 1:
            self._attempt(self._end)

    def _attempt(self, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:
            self._problem, self._progress.on_count = str(error) or type(error).__name__, None
            self._python.stop()
            self._python, self._folder = PythonCalls(), None

    def _begin(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        timeline = Path(self._folder.name) / TIMELINE
        if engine.current().is_running:
            engine.current().record_timeline(timeline)
        # Its levels are the defaults: this TensorFlow refuses those that are given.
        tf.profiler.experimental.start(self._folder.name)
        self._began = time.time_ns()
        self._python.start()

    def _end(self) -> None:
        self._progress.on_count = None
        self._python.stop()
        self._seconds = 1e-9 * (time.time_ns() - self._began)
        tf.profiler.experimental.stop()
        if engine.current().is_running:
            engine.current().record_timeline(None)
        assert self._folder is not None
        with self._folder as name:
            timeline = Path(name) / TIMELINE
            text = timeline.read_text() if timeline.exists() else ""
            self._recorded = [*nested([*operations(Path(name)), *collectives(text)])]
        self._folder = None

    def leave(self, folder: Path, mesh: ProcessMesh) -> None:
        """Write `TRACE` and `LONGEST`. On all ranks together.

        A trace that cannot be made is a warning: it does not fail the job.

        Args:
            folder: the folder of the job.
            mesh: the ranks.
        """
        if self._folder is not None:  # the work had fewer steps
            self._attempt(self._end)
        spans = sorted([*self._recorded, *self._python.spans], key=lambda s: s.begin - s.end)
        spent = spent_in(self._recorded) | self._python.spent
        moments = []
        for _ in range(5):
            mesh.barrier()
            moments.append(time.time_ns())
        part = {
            "problem": self._problem,
            "rows": longest(mesh.rank, spent, self._seconds),
            "spans": spans[: MOST // mesh.size],
            "moments": moments,
        }
        packed = gzip.compress(json.dumps(part).encode(), 1)
        gathered = mesh.gather_to_root(np.frombuffer(packed, np.uint8))
        if gathered is None:
            return
        try:
            ranks = [json.loads(gzip.decompress(each.tobytes())) for each in gathered]
            for rank, part in enumerate(ranks):
                if part["problem"]:
                    self._progress.warn(f"no trace of rank {rank}: {part['problem']}")
            if not any(part["spans"] for part in ranks):
                raise ValueError("no step of the work was recorded")
            write_trace(folder, ranks)
            self._progress.say(f"trace in {folder / TRACE}; the longest in {folder / LONGEST}")
        except Exception as error:
            self._progress.warn(f"no trace: {error}")


def offset(differences: np.ndarray) -> int:
    """Returns how far a clock is ahead of rank 0's [ns]; 0 if not by more than `DRIFT`.

    Args:
        differences: the difference at each of several moments [ns].
    """
    ahead = int(np.median(differences))
    return ahead if abs(ahead) > DRIFT else 0


def write_trace(folder: Path, ranks: Sequence[dict[str, Any]]) -> None:
    """Write `TRACE` and `LONGEST`.

    Args:
        folder: the folder of the job.
        ranks: for each rank its "spans", "rows" and "moments": readings of its clock [ns] at
            moments that all ranks share.

    Raises:
        WriteError: they cannot be written.
    """
    spans = []
    for rank in ranks:
        ahead = offset(np.subtract(rank["moments"], ranks[0]["moments"]))
        of_rank = (Span(*values) for values in rank["spans"])
        spans.append([s._replace(begin=s.begin - ahead, end=s.end - ahead) for s in of_rank])
    start = min(span.begin for of_rank in spans for span in of_rank)
    events = [e for rank, each in enumerate(spans) for e in chrome_events(rank, each, start)]
    with written_whole(folder / TRACE) as path, gzip.open(path, "wt", encoding="ascii") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file, separators=(",", ":"))
    with written_whole(folder / LONGEST) as path, path.open("w", encoding="utf-8") as table:
        writer = csv.writer(table, lineterminator="\n")
        writer.writerows([COLUMNS, *(row for rank in ranks for row in rank["rows"])])
