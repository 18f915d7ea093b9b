"""What a rank did when: calls of Python, operations of TensorFlow, collectives of Horovod."""

from __future__ import annotations

import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

LEAST = 5_000
"""Duration of the shortest spans that are kept [ns]."""
PHASE, COLLECTIVE, OPERATION, XLA = "phase", "collective", "operation", "XLA operation"
PYTHON, RUNTIME = "Python function", "runtime"
KINDS = (PHASE, COLLECTIVE, OPERATION, XLA, RUNTIME, PYTHON)
"""What ranks do, in the order in which it is shown. The runtime is what TensorFlow does around its
operations; it includes waiting."""
_NAME_LENGTH = 160
_OPERATION = re.compile(r".+:_?[A-Z]\w*")
_XLA = re.compile(r"[a-z][\w-]*\.\d+|\w*fusion|wrapped_[\w-]+|(Thunk|CpuExec)\w+::\w+")


class Span(NamedTuple):
    """Something that a thread of a rank did.

    Attributes:
        kind: one of `KINDS`.
        track: the thread, or another line of spans that are nested or do not overlap.
        name: what was done.
        begin, end: when, since 1970 [ns].
    """

    kind: str
    track: str
    name: str
    begin: int
    end: int


@dataclass
class Spent:
    """How often something was done, and how long it took.

    Attributes:
        count: how often.
        total: time with all that it called [ns].
        own: time without what it called [ns].
    """

    count: int = 0
    total: int = 0
    own: int = 0


Spending = dict[tuple[str, str], Spent]
"""By kind and name."""


class PythonCalls:
    """The calls of Python functions by one thread, between `start` and `stop`."""

    def __init__(self) -> None:
        self._stack: list[list[Any]] = []
        self._active: dict[Any, int] = defaultdict(int)
        self._found: list[tuple[Any, int, int]] = []
        self._spent: dict[Any, Spent] = defaultdict(Spent)
        self._clock = time.time_ns

    def start(self) -> None:
        """Begin, in this thread."""
        sys.setprofile(self._event)

    def stop(self) -> None:
        """End, in the same thread."""
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        now = self._clock()
        if event == "call" or event == "c_call":
            what = frame.f_code if event == "call" else _c_name(argument)
            self._active[what] += 1
            self._stack.append([what, now, 0])
        elif self._stack:  # otherwise it was called before the start
            what, begin, inner = self._stack.pop()
            duration, spent = now - begin, self._spent[what]
            self._active[what] -= 1
            spent.count += 1
            spent.own += duration - inner
            if not self._active[what]:  # of a recursion, the outermost call
                spent.total += duration
            if self._stack:
                self._stack[-1][2] += duration
            if duration >= LEAST:
                self._found.append((what, begin, now))

    def spans(self) -> Iterator[Span]:
        """Yields the calls that took at least `LEAST`."""
        for what, begin, end in self._found:
            yield Span(PYTHON, PYTHON + "s", _python_name(what), begin, end)

    def spent(self) -> Spending:
        """Returns the time in each function, of all calls."""
        found: Spending = defaultdict(Spent)
        for what, spent in self._spent.items():
            _add(found[PYTHON, _python_name(what)], spent)
        return dict(found)


def _c_name(function: Any) -> str:
    """Returns the name of a function that is not written in Python."""
    owner = getattr(function, "__module__", None)
    return f"{owner}." * bool(owner) + str(getattr(function, "__qualname__", function))


def _python_name(what: Any) -> str:
    if isinstance(what, str):
        return what
    path = Path(what.co_filename)
    return f"{what.co_qualname} ({'/'.join(path.parts[-2:])}:{what.co_firstlineno})"


def _add(to: Spent, more: Spent) -> None:
    to.count, to.total, to.own = to.count + more.count, to.total + more.total, to.own + more.own


def operations(folder: Path) -> Iterator[Span]:
    """Yields what TensorFlow's profiler has recorded: operations, its runtime, and phases.

    Args:
        folder: the folder that it wrote to.
    """
    from flowpm_dist.simulation.profiling import MARK, events

    for name, begin, end, thread in events(folder):
        if end - begin < LEAST:
            continue
        if name.startswith(MARK):
            yield Span(PHASE, f"phases, {thread}", name.removeprefix(MARK), begin, end)
        elif _XLA.fullmatch(name):
            yield Span(XLA, f"XLA, {thread}", name[:_NAME_LENGTH], begin, end)
        else:
            kind = OPERATION if _OPERATION.fullmatch(name) and "::" not in name else RUNTIME
            yield Span(kind, thread, name[:_NAME_LENGTH], begin, end)


def collectives(timeline: str) -> Iterator[Span]:
    """Yields the collectives in a timeline of Horovod, on as few tracks as they need.

    Each is first negotiated, until all ranks are there, and then done.

    Args:
        timeline: the text of the timeline; the last bracket may be missing.

    Raises:
        ValueError: the text is no timeline.
    """
    text = timeline.strip().rstrip(",")
    events = json.loads(text if text.endswith("]") else text + "]") if text else []
    tensors: dict[int, str] = {}
    start, open_, free = 0, defaultdict[int, list[tuple[str, int]]](list), list[int]()
    lanes: dict[int, int] = {}
    for event in events:
        pid, about = event.get("pid", 0), event.get("args", {})
        if event["ph"] == "M":
            start = about.get("start_time_since_epoch_in_micros", start)
            if "name" in about:
                tensors[pid] = about["name"]
            continue
        now = 1000 * (start + event.get("ts", 0))
        if event["ph"] == "B":
            if not open_[pid]:
                lane = next((n for n, until in enumerate(free) if until <= now), len(free))
                free[lane : lane + 1] = [sys.maxsize]
                lanes[pid] = lane
            open_[pid].append((event["name"], now))
        elif event["ph"] == "E" and open_[pid]:
            name, begin = open_[pid].pop()
            if not open_[pid]:
                free[lanes[pid]] = now
            label = f"{name} {tensors.get(pid, '')}".strip()[:_NAME_LENGTH]
            yield Span(COLLECTIVE, f"Horovod {lanes[pid] + 1}", label, begin, now)


def nested(spans: Iterable[Span]) -> Iterator[Span]:
    """Yields spans, on another track if they overlap with a span of theirs without being inside it.

    Viewers drop these otherwise. TensorFlow's threads have a few.
    """
    tracks: dict[str, list[list[int]]] = defaultdict(list)
    for span in sorted(spans, key=lambda s: (s.begin, -s.end)):
        lanes = tracks[span.track]
        for ends in lanes:
            while ends and ends[-1] <= span.begin:
                ends.pop()
        free = (n for n, ends in enumerate(lanes) if not ends or span.end <= ends[-1])
        if (lane := next(free, len(lanes))) == len(lanes):
            lanes.append([])
        lanes[lane].append(span.end)
        yield span._replace(track=f"{span.track} ({lane + 1})") if lane else span


def spent_in(spans: Iterable[Span]) -> Spending:
    """Returns the time in each kind of span, with and without the spans inside it."""
    found: Spending = defaultdict(Spent)
    tracks: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        tracks[span.track].append(span)
    for track in tracks.values():
        around: list[Span] = []
        for span in sorted(track, key=lambda s: (s.begin, -s.end)):
            while around and around[-1].end <= span.begin:
                around.pop()
            spent, duration = found[span.kind, span.name], span.end - span.begin
            spent.count += 1
            spent.own += duration
            if all((s.kind, s.name) != (span.kind, span.name) for s in around):
                spent.total += duration
            if around:
                outer = around[-1]
                found[outer.kind, outer.name].own -= min(span.end, outer.end) - span.begin
            around.append(span)
    return dict(found)
