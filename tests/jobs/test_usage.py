"""Energy from recorded counters, of one host and of several, against sums by hand; memory."""

import json
import math
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from flowpm_dist.jobs.usage import (
    MOST_GPUS,
    Counter,
    PowerIntegral,
    Usage,
    cray_files,
    gpus,
    rapl_zones,
    whole,
)
from meshimpl.launch import WITHOUT_RANKS, RankEnvironment

MEMORY = "peak memory of a rank [bytes]"
LONG = 3600.0
"""A time between readings in which a test ends."""
RAPL = {
    # zone: name, range, and the energies at the beginning and at the end [microjoules]
    "intel-rapl:0": ("package-0", 262143328850, 262143000000, 1671150),  # wraps around
    "intel-rapl:0:0": ("core", 262143328850, 10, 900000010),
    "intel-rapl:0:1": ("uncore", 262143328850, 10, 800000010),
    "intel-rapl:0:2": ("dram", 65712999613, 5000000, 6250000),
    "intel-rapl:1": ("package-1", 262143328850, 7000000, 10500000),
    "intel-rapl:1:0": ("dram", 65712999613, 65712999613, 249999),  # wraps around
    "intel-rapl:2": ("psys", 262143328850, 0, 9000000),
    "intel-rapl-mmio:0": ("package-0", 262143328850, 0, 700000000),  # package-0 once more
}
CRAY = {
    "energy": ("1200345 J 1700000000000000 us\n", "1200845 J 1700000010000000 us\n"),
    "cpu_energy": ("400100 J 1700000000000000 us\n", "400200 J 1700000010000000 us\n"),
    "memory_energy": ("90010 J 1700000000000000 us\n", "90040 J 1700000010000000 us\n"),
    "accel0_energy": ("300000 J 1700000000000000 us\n", "300150 J 1700000010000000 us\n"),
    "accel1_energy": ("310000 J 1700000000000000 us\n", "310160 J 1700000010000000 us\n"),
    "power": ("812 W 1700000000000000 us\n", "50 W 1700000010000000 us\n"),
    "energy_budget": ("7 J 1700000000000000 us\n", "9 J 1700000010000000 us\n"),
    "version": ("2\n", "2\n"),
}


def write_rapl(root, end):
    for zone, (name, largest, *energies) in RAPL.items():
        (root / zone).mkdir(parents=True, exist_ok=True)
        for file, value in {
            "name": name,
            "max_energy_range_uj": largest,
            "energy_uj": energies[end],
        }.items():
            (root / zone / file).write_text(f"{value}\n")


def write_cray(root, end):
    root.mkdir(exist_ok=True)
    for file, texts in CRAY.items():
        (root / file).write_text(texts[end])


class Nvml(SimpleNamespace):
    """The functions of pynvml that are used, with two GPUs; the second is of an older kind."""

    millijoules, milliwatts = 5_000_000, 100_000

    def nvmlInit(self):
        pass

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, n):
        return n

    def nvmlDeviceGetUUID(self, handle):
        return (b"GPU-aa11", "GPU-bb22")[handle]  # older modules return bytes

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        if handle == 1:
            raise RuntimeError("Not Supported")
        return self.millijoules

    def nvmlDeviceGetPowerUsage(self, handle):
        return self.milliwatts


def test_energy_of_rapl_is_that_of_packages_and_memory(tmp_path):
    write_rapl(tmp_path, 0)
    with Usage(rapl_zones(tmp_path), period=LONG) as usage:
        write_rapl(tmp_path, 1)
    # 328850 + 1671150 and 3500000; 1250000 and 0 + 249999
    expected = {"RAPL package": 5.5, "RAPL DRAM": 1.5, "RAPL platform": 9.0}
    usage._ended = usage._began + 2.0
    facts = usage.of_job()
    assert facts["energy [J]"] == pytest.approx(expected, abs=1e-3)
    assert whole(facts["energy [J]"]) == pytest.approx(7.0, abs=1e-3)
    assert facts["mean power [W]"] == pytest.approx(3.5, abs=1e-3)


def test_wraps_between_readings_are_each_counted(tmp_path):
    """A counter goes round three times; a reading falls into each round."""
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    for file, value in {"name": "package-0", "max_energy_range_uj": 1000}.items():
        (zone / file).write_text(f"{value}\n")
    (zone / "energy_uj").write_text("900\n")
    (counter,) = rapl_zones(tmp_path)
    read, readings = counter.read, iter([200, 700, 100, 600, 50])

    def next_reading():
        (zone / "energy_uj").write_text(f"{next(readings, 50)}\n")
        return read()

    counter.read = next_reading
    with Usage([counter], period=0.01) as usage:
        limit = time.monotonic() + 10
        while counter.last != pytest.approx(50e-6):
            assert time.monotonic() < limit
            time.sleep(0.01)
        usage._sample()
    # from 200: 500, then 400, 500, 450 microjoules
    assert counter.energy == pytest.approx(1850e-6)


def test_energy_of_a_cray_is_that_of_its_node(tmp_path):
    write_cray(tmp_path, 0)
    with Usage(cray_files(tmp_path), period=LONG) as usage:
        write_cray(tmp_path, 1)
    energy = usage.of_job()["energy [J]"]
    assert energy == {
        "Cray node": 500.0,
        "part of Cray node: CPU": 100.0,
        "part of Cray node: memory": 30.0,
        "part of Cray node: accelerators": 310.0,
    }
    assert whole({**energy, "RAPL package": 90.0, "NVML": 300.0}) == 500.0
    assert whole({"RAPL package": 90.0, "NVML": 300.0, "RAPL platform": 450.0}) == 390.0
    assert whole({"RAPL platform": 450.0}) is None


def test_energy_of_gpus_by_counter_and_by_power():
    nvml, now = Nvml(), [0.0]
    counters = gpus(nvml, {})
    assert [isinstance(each.read, PowerIntegral) for each in counters] == [False, True]
    counters[1].read.clock = lambda: now[0]
    with Usage(counters, period=LONG) as usage:
        now[0], nvml.milliwatts = 2.0, 300_000  # 2 s of 200 W in the mean
        usage._sample()
        now[0], nvml.milliwatts, nvml.millijoules = 3.0, 100_000, 5_042_500  # 1 s of 200 W
    assert usage.of_job()["energy [J]"] == {"NVML": 642.5}


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [(None, [0, 1]), ("", []), ("1", [1]), ("1,0", [1, 0]), ("0,-1,1", [0]), ("GPU-bb", [1]),
     ("MIG-bb22/1/0", []), ("7", [])],
)  # fmt: skip
def test_gpus_are_those_that_cuda_shows(chosen, expected):
    names = ["GPU-aa11", "GPU-bb22"]
    env = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    assert [counter.name for counter in gpus(Nvml(), env)] == [names[n] for n in expected]


def rank_of(root, local_rank, nvml, chosen):
    """A rank's usage, that has begun: counters of the host on the first of two, and its GPUs."""
    of_host = rapl_zones(root) if local_rank == 0 else []
    here = RankEnvironment(local_rank, 2, local_rank, 2, "mpirun")
    found = [*of_host, *gpus(nvml, {"CUDA_VISIBLE_DEVICES": chosen})]
    return Usage(found, here, period=LONG).__enter__()


def gathered(ranks):
    """What gathers these facts of ranks, as vectors of one length."""

    def allgather(own):
        return np.array(
            [np.frombuffer(json.dumps(each).encode().ljust(len(own)), np.uint8) for each in ranks]
        )

    return allgather


def test_hosts_are_added_and_a_gpu_of_two_ranks_is_counted_once(tmp_path):
    roots, nvml = [tmp_path / "one", tmp_path / "two"], [Nvml(), Nvml()]
    nvml[1].nvmlDeviceGetUUID = lambda handle: f"GPU-cc{handle}"
    for root in roots:
        write_rapl(root, 0)
    ranks = [rank_of(roots[n], m, nvml[n], "0") for n in range(2) for m in range(2)]
    for root in roots:
        write_rapl(root, 1)
    nvml[0].millijoules += 2000
    nvml[1].millijoules += 3000
    for usage in ranks:
        usage._sample()
    memory = [1000, 3000, 2000, 500]
    each_rank = [u._of_rank() | {"memory": m} for u, m in zip(ranks, memory, strict=True)]
    facts = ranks[0].of_job(gathered(each_rank))
    assert facts[MEMORY] == 3000
    expected = {"RAPL package": 11.0, "RAPL DRAM": 3.0, "RAPL platform": 18.0, "NVML": 5.0}
    assert facts["energy [J]"] == pytest.approx(expected, abs=1e-3)
    for each in ranks:
        each.__exit__(None, None, None)
    assert facts["mean power [W]"] > 0
    # One host of two does not make the job's energy, and a GPU need not be known by all its ranks.
    spoilt = [{**each, "host": each["host"] and dict(each["host"])} for each in each_rank]
    for unknown in ({"RAPL package": math.nan}, {}):
        spoilt[2]["host"] = unknown
        assert "RAPL package" not in ranks[0].of_job(gathered(spoilt))["energy [J]"]
    spoilt[1]["gpus"] = {}
    assert ranks[0].of_job(gathered(spoilt))["energy [J]"]["NVML"] == pytest.approx(5.0)


def test_what_a_rank_tells_others_has_one_length():
    """Of a rank with no counter, and of one with all GPUs that are counted."""
    nvml, lengths = Nvml(), set()
    nvml.nvmlDeviceGetCount = lambda: MOST_GPUS + 1
    nvml.nvmlDeviceGetUUID = lambda n: f"GPU-{n:08x}-0000-0000-0000-{n:012x}"
    nvml.nvmlDeviceGetTotalEnergyConsumption = lambda n: nvml.millijoules
    for counters in ([], gpus(nvml, {})):
        with Usage(counters, period=LONG) as usage:
            nvml.millijoules += 1234567
        facts = usage.of_job(lambda own: lengths.add(len(own)) or own[np.newaxis])
    assert len(lengths) == 1
    assert facts["energy [J]"] == {"NVML": pytest.approx(MOST_GPUS * 1234.567)}


def locked(readings):
    """A counter that root alone may read, from the start or later."""
    left = iter([1.0] * readings)

    def read():
        for joules in left:
            return joules
        raise PermissionError(13, "Permission denied")

    return Counter("RAPL package", "locked", read)


@pytest.mark.parametrize("readings", [0, 1])
def test_a_source_that_cannot_be_read_is_absent(tmp_path, readings):
    write_rapl(tmp_path, 0)
    with Usage([*rapl_zones(tmp_path), locked(readings)], period=LONG) as usage:
        write_rapl(tmp_path, 1)
    assert set(usage.of_job()["energy [J]"]) == {"RAPL DRAM", "RAPL platform"}


def test_without_counters_there_is_memory_alone(tmp_path):
    (tmp_path / "intel-rapl:0").mkdir()
    (tmp_path / "intel-rapl:0/name").write_text("package-0\n")
    (tmp_path / "energy").write_text("no number\n")
    found = [*rapl_zones(tmp_path), *cray_files(tmp_path), *rapl_zones(tmp_path / "none")]
    before = threading.active_count()
    with Usage(found) as usage:
        assert threading.active_count() == before
    assert set(usage.of_job()) == {MEMORY}
    assert gpus(environment={}) == [] or "pynvml" in sys.modules


def test_the_thread_ends_with_its_context(tmp_path):
    write_rapl(tmp_path, 0)
    counters = rapl_zones(tmp_path)
    before = {*threading.enumerate()}
    with pytest.raises(ZeroDivisionError), Usage(counters, period=0.01) as usage:
        (own,) = {*threading.enumerate()} - before
        assert own.daemon and own.name == WITHOUT_RANKS
        _ = 1 / 0
    assert not own.is_alive()
    first = usage.of_job()
    write_rapl(tmp_path, 1)
    assert usage.of_job() == {**first, MEMORY: usage.of_job()[MEMORY]}


def test_peak_memory_is_that_of_this_process():
    """It grows with what is allocated, and does not include the parent process."""
    script = (
        "import subprocess, sys\n"
        "from flowpm_dist.jobs.usage import peak_memory, np\n"
        "print(peak_memory(), flush=True)\n"
        "if sys.argv[1:]:\n"
        "    block = np.ones(2**25)\n"
        "    print(peak_memory(), flush=True)\n"
        "    subprocess.run([sys.executable, '-c', sys.argv[1]])\n"
    )
    done = subprocess.run([sys.executable, "-c", script, script], capture_output=True, text=True)
    before, with_block, of_child = map(int, done.stdout.split())
    assert 0 < before < 2**28 <= with_block < before + 2**28 + 2**24
    assert of_child < 2**28
