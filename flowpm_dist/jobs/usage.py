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
import functools
import importlib
import json
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
from typing import Any, Self

import numpy as np

from meshimpl import launch

POWERCAP = Path("/sys/class/powercap")
"""The folder in which Linux keeps RAPL's counters, of Intel's processors and of AMD's."""
CRAY = Path("/sys/cray/pm_counters")
NODE, PLATFORM, GPUS = "Cray node", "RAPL platform", "NVML"
PARTS = ("RAPL package", "RAPL DRAM", GPUS)
"""Sources that measure different parts of a host, so that their energies may be added."""
MOST_GPUS = 16
"""GPUs of a rank that are counted."""

_RAPL_ZONES = {"package": PARTS[0], "dram": PARTS[1], "psys": PLATFORM}
_CRAY_FILES = {
    r"energy": NODE,
    r"cpu_energy": "part of Cray node: CPU",
    r"memory_energy": "part of Cray node: memory",
    r"accel\d+_energy": "part of Cray node: accelerators",
}
_OF_HOST = (*_RAPL_ZONES.values(), *_CRAY_FILES.values())
_ROW_BYTES = 4096  # of the text that a rank gives the others; fits `MOST_GPUS`


@dataclass
class Counter:
    """A counter of energy, and the energy that it has counted.

    Args:
        source: what it counts; counters of one source measure different parts, which are added.
        name: tells it from the others of its source.
        read: returns the energy so far [J]. Any exception means that it cannot be read.
        wraps_at: the energy after which it begins at 0 again [J]; infinite if it does not.

    Attributes:
        energy: the energy since `begin` [J]; NaN if that failed.
        is_whole: whether the last attempt to read it went well.
        last: its last reading [J].
    """

    source: str
    name: str
    read: Callable[[], float]
    wraps_at: float = math.inf
    energy: float = 0.0
    is_whole: bool = False
    last: float = math.nan

    def begin(self) -> None:
        """Read the counter for the first time."""
        with contextlib.suppress(Exception):
            self.last, self.is_whole = self.read(), True

    def sample(self) -> None:
        """Read the counter again, and add the energy since the last reading."""
        try:
            now = self.read()
        except Exception:
            self.is_whole = False
            return
        gain = now - self.last
        if gain < 0:
            # One that begins anew without a wrap, as after a driver's restart, has lost it.
            gain = gain + self.wraps_at if math.isfinite(self.wraps_at) else now
        self.last, self.energy, self.is_whole = now, self.energy + gain, True

    @property
    def known(self) -> float:
        """The energy since `begin` [J]; NaN if the first or the last reading failed."""
        return self.energy if self.is_whole else math.nan


@dataclass
class PowerIntegral:
    """The energy of something whose power is known, by the trapezoidal rule.

    Args:
        power: returns the power [W].
        clock: returns the time [s].
    """

    power: Callable[[], float]
    clock: Callable[[], float] = time.monotonic
    _energy: float = 0.0
    _last: tuple[float, float] | None = None

    def __call__(self) -> float:
        """Returns the energy since the first call [J]."""
        power, now = self.power(), self.clock()
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

    def energy(folder: Path, file: str = "energy_uj") -> float:
        return 1e-6 * int((folder / file).read_text())

    zones: list[Counter] = []
    for folder in sorted(root.glob("intel-rapl:*")):
        with contextlib.suppress(OSError, ValueError):
            kind = re.split(r"[-_]", (folder / "name").read_text().strip())[0]
            if kind in _RAPL_ZONES:
                wraps_at = energy(folder, "max_energy_range_uj")
                read = functools.partial(energy, folder)
                zones.append(Counter(_RAPL_ZONES[kind], folder.name, read, wraps_at))
    return zones


def cray_files(root: Path = CRAY) -> list[Counter]:
    """Returns the counters of a Cray's node and of its parts.

    Args:
        root: the folder of the counters: files such as "12345 J 1700000000000000 us".
    """

    def energy(file: Path) -> float:
        value, unit, *_ = file.read_text().split()
        if unit != "J":
            raise ValueError(f"{file} is in {unit}")
        return float(value)

    return [
        Counter(source, file.name, functools.partial(energy, file))
        for file in sorted(root.glob("*energy"))
        for pattern, source in _CRAY_FILES.items()
        if re.fullmatch(pattern, file.name)
    ]


def gpus(nvml: Any = None, environment: Mapping[str, str] | None = None) -> list[Counter]:
    """Returns the counters of the GPUs that this process may use.

    A part of a GPU (MIG) has no counter of its own and is left out. A GPU that has no counter of
    energy has its power integrated from reading to reading.

    Args:
        nvml: the module pynvml; by default it is imported, and without it there are no counters.
        environment: variables to read instead of `os.environ`; see CUDA_VISIBLE_DEVICES.
    """
    counters: list[Counter] = []
    env = os.environ if environment is None else environment
    # Library or driver may be missing or broken, and a job does not need them.
    with contextlib.suppress(Exception):
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(n) for n in range(nvml.nvmlDeviceGetCount())]
        names = [nvml.nvmlDeviceGetUUID(handle) for handle in handles]
        names = [name.decode() if isinstance(name, bytes) else name for name in names]
        for n in _visible(names, env.get("CUDA_VISIBLE_DEVICES")):
            counters.append(Counter(GPUS, names[n], _energy_of_gpu(nvml, handles[n])))
    return counters[:MOST_GPUS]


def _energy_of_gpu(nvml: Any, handle: Any) -> Callable[[], float]:
    """Returns how the energy of a GPU is read."""

    def energy() -> float:
        return 1e-3 * float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle))

    try:
        energy()
    except Exception:
        return PowerIntegral(lambda: 1e-3 * float(nvml.nvmlDeviceGetPowerUsage(handle)))
    return energy


def _visible(names: Sequence[str], chosen: str | None) -> list[int]:
    """Returns the numbers of the GPUs with these UUIDs that CUDA shows for a list of entries."""
    if chosen is None:
        return [*range(len(names))]
    visible: list[int] = []
    for entry in map(str.strip, chosen.split(",")):
        if entry.startswith("GPU-"):
            there = [n for n, name in enumerate(names) if name.startswith(entry)]
        else:
            there = [int(entry)] if entry.isdigit() and int(entry) < len(names) else []
        if not there:  # CUDA takes the entries before the first that is none
            break
        visible += there
    return visible


def peak_memory() -> int:
    """Returns the greatest memory that this process has held so far [bytes]."""
    # The system's other figure includes the process that started this one.
    with contextlib.suppress(OSError):
        if peak := re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text()):
            return 1024 * int(peak[1])
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else 1024 * resident


@dataclass
class Usage:
    """The energy and memory that a process uses from its beginning to its end. A context.

    Args:
        counters: the counters to read; by default the counters of this process's GPUs, and of
            its host if it is the first rank there.
        here: place of this process in its job.
        period: time between two readings [s]; the fastest counter wraps around in about a minute.
    """

    counters: Sequence[Counter] | None = None
    here: launch.RankEnvironment = field(default_factory=launch.detect)
    period: float = 1.0

    def __post_init__(self) -> None:
        self._counters: Sequence[Counter] = []
        self._lock, self._end = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name=launch.WITHOUT_RANKS, daemon=True)
        self._began = self._ended = time.monotonic()

    def __enter__(self) -> Self:
        self._began = self._ended = time.monotonic()
        if self.counters is None:
            of_host = [*rapl_zones(), *cray_files()] if self.here.local_rank == 0 else []
            self._counters = [*of_host, *gpus()]
        else:
            self._counters = self.counters
        for counter in self._counters:
            counter.begin()
        if any(counter.is_whole for counter in self._counters):
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._sample()
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()

    def _follow(self) -> None:
        while not self._end.wait(self.period):
            self._sample()

    def _sample(self) -> None:
        """Read all counters; after the end of the context, do nothing."""
        with self._lock:
            if not self._end.is_set():
                for counter in self._counters:
                    counter.sample()
                self._ended = time.monotonic()

    def _of_rank(self) -> dict[str, Any]:
        """Returns the peak memory of this rank [bytes] and the energy of its GPUs [J].

        Of the first rank of a host also the energy of each source of the host [J], NaN if unknown;
        of the others None.
        """
        host: dict[str, float] = {}
        gpus: dict[str, float] = {}
        for counter in self._counters:
            if counter.source != GPUS:
                host[counter.source] = host.get(counter.source, 0.0) + counter.known
            elif not math.isnan(counter.known):
                gpus[counter.name] = counter.known
        return {
            "memory": peak_memory(),
            "host": host if self.here.local_rank == 0 else None,
            "gpus": gpus,
        }

    def of_job(self, allgather: Callable[[np.ndarray], np.ndarray] | None = None) -> dict[str, Any]:
        """Returns the usage of a job so far. On all ranks together.

        A source of the hosts that one of them cannot read is left out: the energy of the others
        would be no energy of the job. A GPU that several ranks use is counted once.

        Args:
            allgather: returns the uint8 vectors [n] of all ranks, [ranks, n]; None for one rank.

        Returns:
            "peak memory of a rank [bytes]", the largest; "energy [J]" by source, and "mean power
            [W]" of the whole job (see `whole`), which are absent where nothing could be read.
        """
        self._sample()
        ranks = [self._of_rank()]
        if allgather is not None:
            text = json.dumps(ranks[0]).encode().ljust(_ROW_BYTES)
            ranks = [json.loads(bytes(row)) for row in allgather(np.frombuffer(text, np.uint8))]
        facts: dict[str, Any] = {"peak memory of a rank [bytes]": max(r["memory"] for r in ranks)}
        hosts = [rank["host"] for rank in ranks if rank["host"] is not None]
        energy = {name: sum(host.get(name, math.nan) for host in hosts) for name in _OF_HOST}
        by_gpu = {name: joules for rank in ranks for name, joules in rank["gpus"].items()}
        if by_gpu:
            energy[GPUS] = sum(by_gpu.values())
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
