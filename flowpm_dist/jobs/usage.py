"""The energy that a job takes on its hosts, and the memory of its ranks.

::

    with Usage() as usage:
        ...
    facts = usage.of_job(allgather)

The energy comes from counters of the hosts: RAPL of the processors, NVML of the GPUs, and the
pm_counters of a Cray. A thread reads them each second, so that none wraps around unseen. A counter
that may not be read is left out, and so is its source.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import math
import os
import re
import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

from meshimpl import launch

POWERCAP = Path("/sys/class/powercap")
"""The folder in which Linux keeps RAPL's counters, of Intel's processors and of AMD's."""
CRAY = Path("/sys/cray/pm_counters")
PERIOD = 1.0
"""Time between two readings [s]; the fastest counter wraps around in about a minute."""
NODE, PLATFORM, GPUS = "Cray node", "RAPL platform", "NVML"
PARTS = ("RAPL package", "RAPL DRAM", GPUS)
"""Sources that measure different parts of a host, so that their energies may be added."""
OF_HOST = (
    *PARTS[:2], PLATFORM, NODE,
    "part of Cray node: CPU", "part of Cray node: memory", "part of Cray node: accelerators",
)  # fmt: skip
"""Sources of which a host has one, in the order of the numbers that ranks exchange."""
MOST_GPUS = 16
"""GPUs of a rank that are counted."""

_ZONES = {"package": OF_HOST[0], "dram": OF_HOST[1], "psys": PLATFORM}
_CRAY_FILES = {
    r"energy": NODE, r"cpu_energy": OF_HOST[4], r"memory_energy": OF_HOST[5],
    r"accel\d+_energy": OF_HOST[6],
}  # fmt: skip


class Counter(Protocol):
    """A counter of energy.

    Attributes:
        source: what it counts; counters of one source measure different parts, which are added.
        name: tells it from the others of its source.
        wraps_at: the energy after which it begins at 0 again [J]; infinite if it does not.
    """

    source: str
    name: str
    wraps_at: float

    def read(self) -> float:
        """Returns the energy so far [J]. Any exception means that it cannot be read."""


@dataclass
class RaplZone:
    """The counter of a package, of a package's memory, or of the whole platform.

    Args:
        source, folder: the source, and the zone's folder.
    """

    source: str
    folder: Path

    def __post_init__(self) -> None:
        self.name = self.folder.name
        self.wraps_at = 1e-6 * int((self.folder / "max_energy_range_uj").read_text())

    def read(self) -> float:
        """See `Counter.read`."""
        return 1e-6 * int((self.folder / "energy_uj").read_text())


@dataclass
class CrayFile:
    """A counter of a Cray: a file such as "12345 J 1700000000000000 us".

    Args:
        source, file: the source, and the file.
    """

    source: str
    file: Path
    wraps_at: float = math.inf

    def __post_init__(self) -> None:
        self.name = self.file.name

    def read(self) -> float:
        """See `Counter.read`."""
        value, unit, *_ = self.file.read_text().split()
        if unit != "J":
            raise ValueError(f"{self.file} is in {unit}")
        return float(value)


@dataclass
class GpuEnergy:
    """The counter of a GPU since its driver was loaded.

    Args:
        nvml: the module pynvml.
        handle: the GPU's handle in it.
        name: the GPU's UUID.
    """

    nvml: Any
    handle: Any
    name: str
    source: str = GPUS
    wraps_at: float = math.inf

    def read(self) -> float:
        """See `Counter.read`."""
        return 1e-3 * float(self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle))


@dataclass
class GpuPower(GpuEnergy):
    """The power of a GPU that has no counter of energy, integrated from reading to reading."""

    clock: Callable[[], float] = time.monotonic
    _energy: float = 0.0
    _last: tuple[float, float] | None = None

    def read(self) -> float:
        """See `Counter.read`; the energy since the first reading, by the trapezoidal rule."""
        power, now = 1e-3 * float(self.nvml.nvmlDeviceGetPowerUsage(self.handle)), self.clock()
        if self._last is not None:
            before, then = self._last
            self._energy += 0.5 * (before + power) * (now - then)
        self._last = power, now
        return self._energy


def rapl_zones(root: Path = POWERCAP) -> list[Counter]:
    """Returns the zones of RAPL: packages, their memory, and the platform.

    A package's cores and graphics are left out, as the package includes them.

    Args:
        root: the folder of all zones.
    """
    found: list[Counter] = []
    for folder in sorted(root.glob("intel-rapl:*")):
        with contextlib.suppress(OSError, ValueError):
            zone = (folder / "name").read_text().strip()
            kind = re.split(r"[-_]", zone)[0]
            if kind in _ZONES:
                found.append(RaplZone(_ZONES[kind], folder))
    return found


def cray_files(root: Path = CRAY) -> list[Counter]:
    """Returns the counters of a Cray's node and of its parts.

    Args:
        root: the folder of the counters.
    """
    return [
        CrayFile(source, file)
        for file in sorted(root.glob("*energy"))
        for pattern, source in _CRAY_FILES.items()
        if re.fullmatch(pattern, file.name)
    ]


def gpus(nvml: Any = None, environment: Mapping[str, str] | None = None) -> list[Counter]:
    """Returns the counters of the GPUs that this process may use.

    A part of a GPU (MIG) has no counter of its own and is left out.

    Args:
        nvml: the module pynvml; by default it is imported, and without it there are no counters.
        environment: variables to read instead of `os.environ`; see CUDA_VISIBLE_DEVICES.
    """
    found: list[Counter] = []
    env = os.environ if environment is None else environment
    # Library or driver may be missing or broken, and a job does not need them.
    with contextlib.suppress(Exception):
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(n) for n in range(nvml.nvmlDeviceGetCount())]
        names = [nvml.nvmlDeviceGetUUID(handle) for handle in handles]
        names = [name.decode() if isinstance(name, bytes) else name for name in names]
        for n in _visible(names, env.get("CUDA_VISIBLE_DEVICES")):
            counter = GpuEnergy(nvml, handles[n], names[n])
            try:
                counter.read()
            except Exception:
                counter = GpuPower(nvml, handles[n], names[n])
            found.append(counter)
    return found[:MOST_GPUS]


def _visible(names: Sequence[str], chosen: str | None) -> list[int]:
    """Returns the numbers of the GPUs with these UUIDs that CUDA shows for a list of entries."""
    if chosen is None:
        return [*range(len(names))]
    found: list[int] = []
    for entry in map(str.strip, chosen.split(",")):
        if entry.startswith("GPU-"):
            there = [n for n, name in enumerate(names) if name.startswith(entry)]
        else:
            there = [int(entry)] if entry.isdigit() and int(entry) < len(names) else []
        if not there:  # CUDA takes the entries before the first that is none
            break
        found += there
    return found


def peak_memory() -> int:
    """Returns the greatest memory that this process has held so far [bytes]."""
    # The system's other figure includes the process that started this one.
    with contextlib.suppress(OSError):
        if found := re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text()):
            return 1024 * int(found[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


@dataclass
class _Sum:
    """The energy that a counter has counted.

    Attributes:
        last: its last reading [J]; NaN if there was none at the beginning.
        energy: the energy since the beginning [J].
        is_whole: whether the last attempt to read it went well.
    """

    last: float
    energy: float = 0.0
    is_whole: bool = True


@dataclass
class Usage:
    """The energy and memory that a process uses from its beginning to its end. A context.

    Args:
        counters: the counters to read; by default the counters of this process's GPUs, and of
            its host if it is the first rank there.
        here: place of this process in its job.
        period: time between two readings [s].
    """

    counters: Sequence[Counter] | None = None
    here: launch.RankEnvironment = field(default_factory=launch.detect)
    period: float = PERIOD

    def __post_init__(self) -> None:
        self._sums: list[tuple[Counter, _Sum]] = []
        self._lock, self._end = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._began = self._ended = time.monotonic()

    def __enter__(self) -> Self:
        self._began = self._ended = time.monotonic()
        found = self.counters
        if found is None:
            of_host = [*rapl_zones(), *cray_files()] if self.here.local_rank == 0 else []
            found = [*of_host, *gpus()]
        for counter in found:
            total = _Sum(math.nan, is_whole=False)
            with contextlib.suppress(Exception):
                total = _Sum(counter.read())
            self._sums.append((counter, total))
        if any(total.is_whole for _, total in self._sums):
            self._thread = threading.Thread(
                target=self._follow, name=launch.WITHOUT_RANKS, daemon=True
            )
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._sample()
        self._end.set()
        if self._thread is not None:
            self._thread.join()

    def _follow(self) -> None:
        while not self._end.wait(self.period):
            self._sample()

    def _sample(self) -> None:
        """Read all counters; after the end of the context, do nothing."""
        with self._lock:
            if self._end.is_set():
                return
            for counter, total in self._sums:
                try:
                    now = counter.read()
                except Exception:
                    total.is_whole = False
                    continue
                gain = now - total.last
                if gain < 0:
                    # One that begins anew without a wrap, as after a driver's restart, has lost it.
                    gain = gain + counter.wraps_at if math.isfinite(counter.wraps_at) else now
                total.last, total.energy, total.is_whole = now, total.energy + gain, True
            self._ended = time.monotonic()

    def _vector(self) -> np.ndarray:
        """Returns what the ranks exchange, float64 of one length on all.

        It is the peak memory, whether this is the first rank of its host, the energy of each source
        of `OF_HOST`, and for each GPU a number that no other has, and its energy. An energy that is
        not known is NaN.
        """
        by_source = dict.fromkeys(OF_HOST, math.nan)
        by_gpu: list[float] = []
        for source in OF_HOST:
            own = [total for counter, total in self._sums if counter.source == source]
            if own and all(total.is_whole for total in own):
                by_source[source] = sum(total.energy for total in own)
        for counter, total in self._sums:
            if counter.source == GPUS and total.is_whole:
                digest = hashlib.sha256(counter.name.encode()).digest()
                by_gpu += [float(int.from_bytes(digest[:6], "big")), total.energy]
        rest = [math.nan] * (2 * MOST_GPUS - len(by_gpu))
        first = float(self.here.local_rank == 0)
        return np.array([peak_memory(), first, *by_source.values(), *by_gpu, *rest])

    def of_job(self, allgather: Callable[[np.ndarray], np.ndarray] | None = None) -> dict[str, Any]:
        """Returns the usage of a job so far. On all ranks together.

        A source of the hosts that one of them cannot read is left out: the energy of the others
        would be no energy of the job. A GPU that several ranks use is counted once.

        Args:
            allgather: returns the float64 vectors [n] of all ranks, [ranks, n]; None for one rank.

        Returns:
            "peak memory of a rank [bytes]", the largest; "energy [J]" by source, and "mean power
            [W]" of the whole job (see `whole`), which are absent where nothing could be read.
        """
        self._sample()
        rows = self._vector()[np.newaxis] if allgather is None else allgather(self._vector())
        facts: dict[str, Any] = {"peak memory of a rank [bytes]": int(rows[:, 0].max())}
        of_hosts = rows[rows[:, 1] == 1, 2 : 2 + len(OF_HOST)].sum(axis=0)
        energy = dict(zip(OF_HOST, map(float, of_hosts), strict=True))
        pairs = rows[:, 2 + len(OF_HOST) :].reshape(-1, 2)
        if by_gpu := {gpu: joules for gpu, joules in pairs if not math.isnan(joules)}:
            energy[GPUS] = float(sum(by_gpu.values()))
        known = {name: round(joules, 3) for name, joules in energy.items() if joules >= 0}
        if known:
            facts["energy [J]"] = known
            seconds = self._ended - self._began
            if (total := whole(known)) is not None and seconds > 0:
                facts["mean power [W]"] = round(total / seconds, 3)
        return facts


def added(energy: Mapping[str, float]) -> list[str]:
    """Returns the sources whose sum is the energy of a whole job, see `whole`.

    Args:
        energy: the energy of each source [J].
    """
    return [NODE] if NODE in energy else [name for name in PARTS if name in energy]


def whole(energy: Mapping[str, float]) -> float | None:
    """Returns the energy of a whole job [J], in which nothing is counted twice; None if unknown.

    A Cray's node includes all its parts. Elsewhere it is the sum of processors, memory and GPUs,
    as far as there are counters.

    Args:
        energy: the energy of each source [J].
    """
    sources = added(energy)
    return sum(energy[name] for name in sources) if sources else None
