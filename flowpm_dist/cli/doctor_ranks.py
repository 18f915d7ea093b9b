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
PULSE_PATIENCE = 20.0
"""Time in which the pulse of a rank should find that of rank 0 [s]."""


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
        checks = [*_places(mesh), *_reached(mesh), *_watched(mesh), *_messages(mesh)]
        checks += _folders(folders, mesh)
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
        gpus = f"{max(one['gpus'] for one in here) or 'no'} GPUs in sight{_taken(here)}"
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


def _taken(ranks: Sequence[dict[str, Any]]) -> str:
    """Returns which GPUs each rank of a host takes; nothing where there are none."""
    if not any(one["gpus"] for one in ranks):
        return ""
    taken = [
        f"rank {one['rank']}: "
        + (", ".join(name.removeprefix("/physical_device:") for name in one["mine"]) or "none")
        for one in ranks
    ]
    return f" ({'; '.join(taken)})"


def _shared(ranks: Sequence[dict[str, Any]]) -> bool:
    """Returns whether the ranks of a host share its cores, and are not bound to their own."""
    return ranks[0]["threads"] < ranks[0]["cores"] or len(ranks) == 1


def _reached(mesh: ProcessMesh) -> list[Check]:
    """Returns whether each rank receives the number of each; on rank 0."""
    import tensorflow as tf

    from meshimpl import engine

    mine = tf.fill([mesh.size], tf.constant(mesh.rank, tf.int64))
    everyone = tuple(range(mesh.size))
    received = engine.current().exchange(mine, None, everyone, "doctor.numbers").numpy()
    tables = mesh.gather_to_root(received)
    return [reached([row.tolist() for row in tables])] if tables is not None else []


def reached(tables: Sequence[Sequence[int]]) -> Check:
    """Returns the check of the numbers that each rank has received, one from each."""
    wrong = [
        f"rank {rank} received {', '.join(map(str, row))}"
        for rank, row in enumerate(tables)
        if list(row) != list(range(len(tables)))
    ]
    value = "; ".join(wrong) or f"each of {len(tables)} received the numbers of all"
    remedy = "messages are lost or mixed: MPI or the network is at fault"
    return Check("ranks reach each other", value, not wrong, remedy)


def _watched(mesh: ProcessMesh) -> list[Check]:
    """Returns whether ranks would notice the loss of another; on rank 0."""
    import numpy as np

    from meshimpl import heartbeat

    heard = heartbeat.is_heard(PULSE_PATIENCE)
    said = json.dumps([socket.gethostname(), -1 if heard is None else int(heard)]).encode()
    gathered = mesh.gather_to_root(np.frombuffer(said, np.uint8))
    if gathered is None:
        return []
    hosts, answers = zip(*(json.loads(bytes(row)) for row in gathered), strict=True)
    return [watched(hosts, answers)]


def watched(hosts: Sequence[str], heard: Sequence[int]) -> Check:
    """Returns the check of the pulses.

    Args:
        hosts: of the ranks.
        heard: of each rank 1 if the pulse of rank 0 hears its own, 0 if not, -1 without pulses.
    """
    name = "ranks are watched"
    if all(answer < 0 for answer in heard):
        return Check(name, "not by wish: MESHIMPL_STALL_LIMIT is 0")
    lost: dict[str, list[str]] = {}
    for rank, (host, answer) in enumerate(zip(hosts, heard, strict=True)):
        if answer != 1:
            lost.setdefault(host, []).append(str(rank))
    where = ", ".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} on host {host}"
        for host, ranks in lost.items()
    )
    value = (
        f"rank 0 does not hear {where}" if lost else f"rank 0 hears the pulses of all {len(heard)}"
    )
    remedy = (
        "a firewall between the hosts? Jobs run, but the loss of a host is not noticed: let the "
        f"compute nodes reach each other by TCP, at any port of {hosts[0]}"
    )
    return Check(name, value, not lost, remedy)


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

    checks = []
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
