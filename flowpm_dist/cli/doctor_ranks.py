"""What `flowpm-dist doctor` finds on the ranks of a job: hosts, versions, messages, folders."""

from __future__ import annotations

import json
import platform
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowpm_dist.cli.check import Check, print_checks
from flowpm_dist.cli.common import ENDS, begin_job, refuse_after
from meshimpl import launch
from meshimpl.quiet import import_tensorflow

if TYPE_CHECKING:
    from meshimpl import ProcessMesh

VERSIONS = ("flowpm-dist", "tensorflow-cpu", "tensorflow", "horovod", "mpi4py")
SHORT, LONG = 4 * 2**10, 16 * 2**20
"""Messages of a rank that show the latency and the bandwidth [bytes]."""


def run_on_ranks(folders: Sequence[Path]) -> int:
    """Check the ranks of a job, and print what was found on rank 0.

    Args:
        folders: that all hosts should see.

    Returns:
        The exit status: 1 if a check has failed, otherwise 0.
    """
    begin_job(None)
    try:
        launch.configure_threads()
        import_tensorflow()
        from meshimpl import ProcessMesh

        mesh = ProcessMesh(f"row:{launch.detect().size}")
        checks = [*_places(mesh), *_messages(mesh), *_folders(folders, mesh)]
    except ENDS as error:
        refuse_after(error)
    if mesh.rank == 0:
        print_checks(checks)
    ok = all(check.ok for check in checks)
    mesh.barrier()  # a rank that exits with a status ends the others
    return 0 if ok else 1


def facts() -> dict[str, Any]:
    """Returns what this rank says of itself."""
    import tensorflow as tf

    here = launch.detect()
    found = {}
    for name in VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "rank": here.rank,
        "host": socket.gethostname(),
        "launcher": here.launcher,
        "threads": launch.threads_per_rank(),
        "cores": launch.available_cores(),
        "memory": launch.host_memory().limit,
        "gpus": len(tf.config.list_physical_devices("GPU")),
        "mine": [device.name for device in tf.config.get_visible_devices("GPU")],
        "versions": {"python": platform.python_version(), **found},
    }


def _places(mesh: ProcessMesh) -> list[Check]:
    """Returns where the ranks are; on rank 0."""
    import numpy as np

    row = np.frombuffer(json.dumps(facts()).encode(), np.uint8)
    gathered = mesh.gather_to_root(row)
    return places([json.loads(bytes(r)) for r in gathered]) if gathered is not None else []


def places(ranks: Sequence[dict[str, Any]]) -> list[Check]:
    """Returns the checks of what each rank has said of itself, see `facts`."""
    hosts: dict[str, list[dict[str, Any]]] = {}
    for one in ranks:
        hosts.setdefault(one["host"], []).append(one)
    count = f"{len(ranks)} ranks on {len(hosts)} host{'s' * (len(hosts) > 1)}"
    checks = [Check("launcher", f"{ranks[0]['launcher']}, {count}")]
    for host, here in hosts.items():
        numbers = [one["rank"] for one in here]
        gpus = f"{max(one['gpus'] for one in here)} GPUs in sight"
        value = (
            f"{len(here)} ranks from {min(numbers)} to {max(numbers)}, "
            f"{here[0]['threads']} threads each; {here[0]['cores']} cores, "
            f"{here[0]['memory'] / 2**30:.0f} GiB, {gpus}"
        )
        used = sum(one["threads"] for one in here)
        whole = max(one["cores"] for one in here) * (1 if _shared(here) else len(here))
        remedy = (
            "more threads than cores: give each rank fewer with --cpus-per-task or MESHIMPL_THREADS"
        )
        # One thread each is the least there can be.
        crowded = used > whole and used > len(here)
        checks.append(Check(f"host {host}", value, not crowded, remedy))
    for name in dict.fromkeys(name for one in ranks for name in one["versions"]):
        said: dict[str, list[str]] = {}
        for one in ranks:
            said.setdefault(one["versions"].get(name, "none"), []).append(one["host"])
        value = ", ".join(
            version if len(said) == 1 else f"{version} on {' '.join(dict.fromkeys(where))}"
            for version, where in said.items()
        )
        remedy = "all hosts must have the same: use one environment on a shared file system"
        checks.append(Check(name, value, len(said) == 1, remedy))
    return checks


def _shared(ranks: Sequence[dict[str, Any]]) -> bool:
    """Returns whether the ranks of a host share its cores, and are not bound to their own."""
    return ranks[0]["threads"] < ranks[0]["cores"] or len(ranks) == 1


def _messages(mesh: ProcessMesh) -> list[Check]:
    """Returns the latency and the bandwidth of the messages of steps."""
    import tensorflow as tf

    from meshimpl import engine

    ranks = tuple(range(mesh.size))
    collectives = engine.current()

    def allreduce(x: tf.Tensor) -> None:
        total = collectives.reduce(x, "sum", ranks, "doctor.allreduce")
        if float(total[0]) != mesh.size:
            raise ValueError(f"the sum of {mesh.size} ones is {float(total[0])}")

    def alltoall(x: tf.Tensor) -> None:
        collectives.exchange(x, None, ranks, "doctor.alltoall").numpy()

    checks = [Check("ranks reach each other", f"all {mesh.size}")]
    for name, call in (("allreduce", allreduce), ("alltoall", alltoall)):
        short = _seconds(call, tf.ones([_rows(SHORT, mesh.size)]), 50)
        long = _seconds(call, tf.ones([_rows(LONG, mesh.size)]), 5)
        gigabytes = LONG / long / 1e9
        value = f"{1e3 * short:.2f} ms for 4 KiB a rank; {gigabytes:.2f} GB/s of 16 MiB a rank"
        checks.append(Check(name, value))
    return checks


def _rows(size: int, ranks: int) -> int:
    """Returns the number of float32 of a message that can be split evenly."""
    return max(1, size // 4 // ranks) * ranks


def _seconds(call: Callable[[Any], None], x: Any, times: int) -> float:
    """Returns the median duration of a call [s]."""
    call(x)
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        call(x)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def _folders(folders: Sequence[Path], mesh: ProcessMesh) -> list[Check]:
    """Returns whether all hosts see some folders."""
    from flowpm_dist.jobs.shared_folder import SEEN, seen_by

    checks = []
    for folder in folders:
        missing = sorted({host for host, code in seen_by(folder, mesh) if code != SEEN})
        value = f"not on {', '.join(missing)}" if missing else "seen by all hosts"
        remedy = "results need a folder on a file system that all hosts share"
        checks.append(Check(f"folder {folder.absolute()}", value, not missing, remedy))
    return checks
