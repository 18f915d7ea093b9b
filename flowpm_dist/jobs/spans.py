"""What a rank did, and when: calls of Python, operations of TensorFlow, collectives of Horovod."""

from __future__ import annotations

import functools
import itertools
import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
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
        exclusive: time without what it called [ns].
    """

    count: int = 0
    total: int = 0
    exclusive: int = 0


Spending = dict[tuple[str, str], Spent]
"""By kind and name."""


class Nesting:
    """What has begun on a track and not ended, one thing inside the other.

    Args:
        spent: to which the time of what ends is added.

    Attributes:
        open: kind and name, begin, and the time of what was inside.
    """

    def __init__(self, spent: Spending) -> None:
        self._spent = spent
        self.open: list[list[Any]] = []
        self._active: dict[tuple[str, str], int] = defaultdict(int)

    def begin(self, key: tuple[str, str], now: int) -> None:
        """Begin something, by its kind and name."""
        self._active[key] += 1
        self.open.append([key, now, 0])

    def end(self, now: int) -> tuple[str, int]:
        """End what has begun last, and return its name and its begin."""
        key, begin, inside = self.open.pop()
        duration, spent = now - begin, self._spent[key]
        self._active[key] -= 1
        spent.count += 1
        spent.exclusive += duration - inside
        if not self._active[key]:  # of a recursion, the outermost call
            spent.total += duration
        if self.open:
            self.open[-1][2] += duration
        return key[1], begin


class PythonCalls:
    """The calls of Python functions by one thread, between `start` and `stop`.

    Attributes:
        spans: the calls that took at least `LEAST`.
        spent: the time in each function, of all calls.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.spent: Spending = defaultdict(Spent)
        self._calls, self._clock = Nesting(self.spent), time.time_ns

    def start(self) -> None:
        """Begin to record the calls of this thread."""
        sys.setprofile(self._event)

    def stop(self) -> None:
        """End the record, in the same thread."""
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, function: Any) -> None:
        now = self._clock()
        if event == "call":
            self._calls.begin(_python_call(frame.f_code), now)
        elif event == "c_call":
            self._calls.begin((PYTHON, _c_name(function)), now)
        elif self._calls.open:  # otherwise it was called before the start
            name, begin = self._calls.end(now)
            if now - begin >= LEAST:
                self.spans.append(Span(PYTHON, PYTHON + "s", name, begin, now))


@functools.cache
def _python_call(code: CodeType) -> tuple[str, str]:
    """Returns the kind and the name of a function's calls."""
    path = Path(code.co_filename)
    return PYTHON, f"{code.co_qualname} ({'/'.join(path.parts[-2:])}:{code.co_firstlineno})"


def _c_name(function: Any) -> str:
    """Returns the name of a function that is not written in Python."""
    owner = getattr(function, "__module__", None)
    return f"{owner}." * bool(owner) + str(getattr(function, "__qualname__", function))


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
    events = json.loads(text.removesuffix("]") + "]") if text else []
    start = 0
    tensors: dict[int, str] = {}
    unended: dict[int, list[tuple[str, int]]] = defaultdict(list)
    tracks: dict[int, int] = {}  # of the tensors with something that has not ended
    for event in events:
        tensor, about = event.get("pid", 0), event.get("args", {})
        now = 1000 * (start + event.get("ts", 0))
        if event["ph"] == "M":
            start = about.get("start_time_since_epoch_in_micros", start)
            tensors[tensor] = about.get("name", tensors.get(tensor, ""))
        elif event["ph"] == "B":
            if not unended[tensor]:
                tracks[tensor] = next(n for n in itertools.count(1) if n not in tracks.values())
            unended[tensor].append((event["name"], now))
        elif event["ph"] == "E" and unended[tensor]:
            name, begin = unended[tensor].pop()
            label = f"{name} {tensors.get(tensor, '')}".strip()[:_NAME_LENGTH]
            yield Span(COLLECTIVE, f"Horovod {tracks[tensor]}", label, begin, now)
            if not unended[tensor]:
                del tracks[tensor]


def nested(spans: Iterable[Span]) -> Iterator[Span]:
    """Yields spans; those that overlap without one being inside the other get other tracks.

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
    """Returns the time in each kind of span, with and without the spans inside it.

    Args:
        spans: spans of a track are nested, or do not overlap.
    """
    spent: Spending = defaultdict(Spent)
    in_order = sorted(spans, key=lambda span: (span.track, span.begin, -span.end))
    for _, of_track in itertools.groupby(in_order, lambda span: span.track):
        nesting, ends = Nesting(spent), list[int]()
        for span in of_track:
            while ends and ends[-1] <= span.begin:
                nesting.end(ends.pop())
            nesting.begin((span.kind, span.name), span.begin)
            ends.append(span.end)
        while ends:
            nesting.end(ends.pop())
    return spent
