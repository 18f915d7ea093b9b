"""The memory that a job may use: the host's, or what control groups of either version leave."""

import pytest

from meshimpl.launch import host_memory, ranks_on_host

GIB = 2**30


@pytest.fixture
def host(tmp_path):
    """A function that describes a host of 64 GiB, of which 48 are free, and its control groups."""

    def describe(own, files):
        proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
        (proc / "self").mkdir(parents=True)
        message = f"MemTotal: {64 * 2**20} kB\nMemFree: 7 kB\nMemAvailable: {48 * 2**20} kB\n"
        (proc / "meminfo").write_text(message)
        if own is not None:
            (proc / "self" / "cgroup").write_text(own)
        for name, text in files.items():
            path = cgroups / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        return host_memory(proc, cgroups)

    return describe


UNLIMITED = 9223372036854771712  # as version 1 tells it
CASES = {
    "no groups": (None, {}, (64, 48)),
    "version 2, unlimited": ("0::/job\n", {"job/memory.max": "max"}, (64, 48)),
    "version 2": (
        "0::/job\n",
        {"job/memory.max": 16 * GIB, "job/memory.current": 4 * GIB},
        (16, 12),
    ),
    "a group around it is smaller": (
        "0::/batch/job\n",
        {"batch/job/memory.max": 16 * GIB, "batch/memory.max": 8 * GIB},
        (8, 8),
    ),
    "a container that shows the host's path": (
        "0::/docker/abc\n",
        {"memory.max": 6 * GIB, "memory.current": GIB},
        (6, 5),
    ),
    "version 1": (
        "4:memory:/job\n1:cpu:/other\n0::/\n",
        {
            "memory/job/memory.limit_in_bytes": 10 * GIB,
            "memory/job/memory.usage_in_bytes": 9 * GIB,
            "memory/job/memory.stat": f"cache 1\ntotal_inactive_file {2 * GIB}",
            "memory/memory.limit_in_bytes": UNLIMITED,
        },
        (10, 3),
    ),
    "version 1, unlimited": (
        "4:cpu,memory:/job\n",
        {"memory/job/memory.limit_in_bytes": UNLIMITED},
        (64, 48),
    ),
    "more than there is": ("0::/job\n", {"job/memory.max": 100 * GIB}, (64, 48)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_limit_is_the_least_of_host_and_groups(host, case):
    own, files, (limit, free) = CASES[case]
    memory = host(own, files)
    assert (memory.limit, memory.free) == (limit * GIB, free * GIB)
    assert memory.is_container == (limit < 64)


def test_ranks_that_share_a_host():
    assert ranks_on_host(4, {}) == 4
    assert ranks_on_host(5, {"SLURM_JOB_NUM_NODES": "2"}) == 3
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    numbers = zip(names, "5814", strict=True)
    assert ranks_on_host(8, {f"OMPI_COMM_WORLD_{name}": n for name, n in numbers}) == 4
