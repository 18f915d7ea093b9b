"""The time of each part of a run: paint, exchange, FFT, transposes, filter, read, update.

::

    from flowpm_dist.simulation import profile

    print(profile(simulation, seed=1))

TensorFlow's own profiler records every operation of the evolution; nothing is built differently for
it. Each rank profiles itself, and what it waits for shows up as exchange; on one rank the overhead
of calls is in "other", and a force has no transposes. Only operations of a CPU are distinguished.
Messages are counted where they are sent, see `meshimpl.traffic`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from flowpm_dist.evolution.plan import PHASES
from flowpm_dist.simulation.simulation import Simulation
from meshimpl.traffic import Tally, added, so_far

PARTS = ("paint", "exchange", "FFT", "transposes", "filter", "read", "update", "other")

_KERNELS = {"FlowpmPaint": "paint", "FlowpmKick": "read", "FlowpmRead": "read"}
MARK = "phase:"
"""What the names of a phase's events begin with."""

_COMPILED = "CpuExecutable::ExecuteAsyncOnStream"


class Event(NamedTuple):
    """Something that TensorFlow's profiler has recorded.

    Attributes:
        name: the name of an operation, "NAME:TYPE", or of something else.
        begin, end: when, since 1970 [ns].
        thread: the thread, or the stream of a GPU.
    """

    name: str
    begin: int
    end: int
    thread: str


@dataclass(frozen=True)
class Profile:
    """Seconds of each part of an evolution, on this rank.

    Attributes:
        seconds: by the names of `PARTS`.
        ns_per_particle_per_step: likewise [ns], over all particles of all ranks.
        total: seconds of the evolution.
        traffic: what this rank sends in the last of several steps, by kind of collective; empty of
            a single step, which has two forces.
    """

    seconds: dict[str, float]
    ns_per_particle_per_step: dict[str, float]
    total: float
    traffic: Tally

    def __str__(self) -> str:
        rows = [f"{'part':12s}{'s':>9s}{'ns/particle/step':>19s}{'share':>8s}"]
        for part, seconds in self.seconds.items():
            ns = self.ns_per_particle_per_step[part]
            rows.append(f"{part:12s}{seconds:9.3f}{ns:19.2f}{seconds / self.total:8.1%}")
        if self.traffic:
            rows.append(f"{'in a step':12s}{'collectives':>13s}{'messages':>10s}{'MiB sent':>12s}")
        for kind, sent in self.traffic.items():
            mib = sent.sent / 2**20
            rows.append(f"{kind:12s}{sent.collectives:13d}{sent.messages:10d}{mib:12.4f}")
        return "\n".join(rows)


def profile(simulation: Simulation, **run: Any) -> Profile:
    """Profile a run's evolution, after a first run that compiles.

    On all ranks together. Painting or reading with the portable kernels counts as "paint" and
    "read" too.

    Args:
        simulation: to run twice.
        **run: arguments of `Simulation.run`.
    """
    callback = run.pop("progress", None)
    sent: list[Tally] = []
    simulation.run(**run)

    def progress(*step: Any) -> None:
        sent.append(so_far())
        if callback is not None:
            callback(*step)

    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        try:
            state = simulation.run(**run, progress=progress)
        finally:
            tf.profiler.experimental.stop()
        seconds = _parts([*events(Path(folder))], alone=state.box.mesh.size == 1)
    total = state.timings["evolution"]
    seconds["other"] = max(0.0, total - sum(seconds.values()))
    box, steps = state.box, len(state.timings["steps"])
    work = box.cells * (box.batch or 1) * steps
    ns = {part: 1e9 * t / work for part, t in seconds.items()}
    last = added(sent[-1], sent[-2], -1) if len(sent) > 1 else {}
    return Profile(seconds, ns, total, last)


def events(folder: Path) -> Iterator[Event]:
    """Yields what TensorFlow's profiler has written to a folder."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    for path in folder.glob("**/*.xplane.pb"):
        space = xplane_pb2.XSpace()
        space.ParseFromString(path.read_bytes())
        start = _start(space)
        for plane in space.planes:
            names = {key: meta.name for key, meta in plane.event_metadata.items()}
            device = f"{plane.name[8:]} " if plane.name.startswith("/device:") else ""
            for number, line in enumerate(plane.lines, 1):
                thread = f"{device}{line.name.partition('/')[0]} {number}"
                base = start + line.timestamp_ns
                for event in line.events:
                    begin = base + event.offset_ps // 1000
                    end = base + (event.offset_ps + event.duration_ps) // 1000  # nested as before
                    yield Event(names[event.metadata_id], begin, end, thread)


def _start(space: Any) -> int:
    """Returns the time from which a profile counts, since 1970 [ns]."""
    for plane in space.planes:
        for stat in plane.stats:
            if plane.stat_metadata[stat.metadata_id].name == "profile_start_time":
                return int(stat.uint64_value)
    return 0


def _parts(events: Sequence[Event], *, alone: bool) -> dict[str, float]:
    """Returns the seconds of each part but the last; the rest of a phase is exchange."""
    seconds = dict.fromkeys(PARTS, 0.0)
    windows = sorted(
        (begin, end, name.removeprefix(MARK))
        for name, begin, end, _ in events
        if name.startswith(MARK)
    )
    left = dict.fromkeys(PHASES, 0.0)
    for begin, end, window in windows:
        left[window] += 1e-9 * (end - begin)
    for name, begin, end, _ in events:
        kind = _part_of(name)
        phase = next((phase for first, last, phase in windows if first <= begin <= last), None)
        if kind is None or phase is None:
            continue
        # compiled: the filter of the force, or a portable kernel
        part = phase if kind == "filter" and phase != "force" else kind
        seconds[part] += 1e-9 * (end - begin)
        left[phase] -= 1e-9 * (end - begin)
    for phase, rest in left.items():
        if phase == "update" or not alone:
            seconds["update" if phase == "update" else "exchange"] += max(0.0, rest)
    return seconds


def _part_of(name: str) -> str | None:
    if name == _COMPILED:
        return "filter"
    scope, _, kind = name.rpartition(":")
    if not scope:
        return None
    for kernel, part in _KERNELS.items():
        if kind.startswith(kernel):
            return part
    if kind.upper().endswith(("FFT", "FFT2D", "FFT3D")):
        return "FFT"
    return "transposes" if kind.endswith("Transpose") else None
