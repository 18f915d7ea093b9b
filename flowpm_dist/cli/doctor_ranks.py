"""What `flowpm-dist doctor` finds on the ranks of a job: hosts, versions, messages, folders."""

from __future__ import annotations

import json
import socket
import statistics
import timeit
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowpm_dist.cli.checks import Check, print_checks
from flowpm_dist.cli.common import ENDS, begin_job, refuse_after
from flowpm_dist.io.files import versions
from meshimpl import launch
from meshimpl.imports import import_tensorflow
from meshimpl.pulse import reporter

if TYPE_CHECKING:
    from meshimpl import ProcessMesh

SHORT, LONG = 4 * 2**10, 16 * 2**20
"""Messages of a rank that show the latency and the bandwidth [bytes]."""
PULSE_SECONDS = 20.0
"""Time in which the pulse of a rank should find the pulse of rank 0 [s]."""


def run_on_ranks(folders: Sequence[Path]) -> int:
    """Check the ranks of a job, and print what was found on rank 0.

    Args:
        folders: folders that all hosts should see.

    Returns:
        The exit status: 1 if a check has failed, otherwise 0.
    """
    begin_job(None)
    try:
        launch.configure_threads()
        import_tensorflow()
        import numpy as np

        from flowpm_dist.jobs.session import VISIBLE, visibility
        from meshimpl import ProcessMesh

        mesh = ProcessMesh(f"row:{launch.detect().size}")
        mine = facts() | _connections(mesh)
        rows = mesh.gather_to_root(np.frombuffer(json.dumps(mine).encode(), np.uint8))
        checks = judge([json.loads(bytes(row)) for row in rows]) if rows is not None else []
        checks += _messages(mesh)
        for folder in folders:
            missing = sorted({host for host, code in visibility(folder, mesh) if code != VISIBLE})
            value = f"not on {', '.join(missing)}" if missing else "seen by all hosts"
            remedy = "results need a folder on a file system that all hosts share"
            checks.append(Check(f"folder {folder.absolute()}", value, not missing, remedy))
    except ENDS as error:
        refuse_after(error)
    ok = mesh.rank != 0 or print_checks(checks)
    mesh.barrier()  # a rank that exits with a status ends the others
    return 0 if ok else 1


def facts() -> dict[str, Any]:
    """Returns what this rank knows of itself, its host and its libraries."""
    import tensorflow as tf

    here = launch.detect()
    return {
        "rank": here.rank,
        "host": socket.gethostname(),
        "launcher": here.launcher,
        "threads": launch.threads_per_rank(),
        "cores": launch.available_cores(),
        "memory": launch.host_memory().limit,
        "gpus": len(tf.config.list_physical_devices("GPU")),
        "mine": [gpu.name.rpartition("device:")[2] for gpu in tf.config.get_visible_devices("GPU")],
        "versions": versions(),
    }


def _connections(mesh: ProcessMesh) -> dict[str, Any]:
    """Returns the numbers that this rank has received from all, and whether its pulse is heard."""
    import numpy as np

    received = mesh.world.alltoall(np.full(mesh.size, mesh.rank)).numpy()
    return {"received": received.tolist(), "heard": reporter.is_heard(PULSE_SECONDS)}


def judge(ranks: Sequence[dict[str, Any]]) -> list[Check]:
    """Returns the checks of what all ranks have found; see `facts` and `_connections`."""
    hosts: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in ranks:
        hosts[one["host"]].append(one)
    count = f"{len(ranks)} ranks on {len(hosts)} host{'s' * (len(hosts) > 1)}"
    checks = [Check("launcher", f"{ranks[0]['launcher']}, {count}"), *map(_host, hosts.values())]
    for name in dict.fromkeys(name for one in ranks for name in one["versions"]):
        where: dict[str, list[str]] = defaultdict(list)
        for one in ranks:
            where[one["versions"].get(name, "none")].append(one["host"])
        different = [f"{v} on {' '.join(dict.fromkeys(there))}" for v, there in where.items()]
        value = ", ".join(different if len(where) > 1 else where)
        remedy = "all hosts must have the same: use one environment on a shared file system"
        checks.append(Check(name, value, len(where) == 1, remedy))
    wrong = [
        f"rank {one['rank']} received {', '.join(map(str, one['received']))}"
        for one in ranks
        if one["received"] != list(range(len(ranks)))
    ]
    value = "; ".join(wrong) or f"each of {len(ranks)} received the numbers of all"
    remedy = "messages are lost or mixed: MPI or the network is at fault"
    return [*checks, Check("ranks reach each other", value, not wrong, remedy), _watched(hosts)]


def _host(ranks: Sequence[dict[str, Any]]) -> Check:
    """Returns the check of a host by its ranks: what there is, and whether it is crowded."""
    first = ranks[0]
    numbers = [one["rank"] for one in ranks]
    gpus = f"{max(one['gpus'] for one in ranks) or 'no'} GPUs in sight"
    if any(one["gpus"] for one in ranks):
        taken = [f"rank {one['rank']}: {', '.join(one['mine']) or 'none'}" for one in ranks]
        gpus += f" ({'; '.join(taken)})"
    value = (
        f"{len(ranks)} ranks from {min(numbers)} to {max(numbers)}, {first['threads']} threads "
        f"each; {first['cores']} cores, {first['memory'] / 2**30:.0f} GiB, {gpus}"
    )
    used = sum(one["threads"] for one in ranks)
    # Ranks are bound to cores of their own, or share the cores of the host.
    bound = len(ranks) > 1 and first["threads"] >= first["cores"]
    cores = max(one["cores"] for one in ranks) * (len(ranks) if bound else 1)
    remedy = (
        "more threads than cores: give each rank fewer with --cpus-per-task or MESHIMPL_THREADS"
    )
    # One thread each is the least there can be.
    return Check(f"host {first['host']}", value, used <= max(cores, len(ranks)), remedy)


def _watched(hosts: dict[str, list[dict[str, Any]]]) -> Check:
    """Returns whether ranks would notice the loss of another."""
    ranks = [one for here in hosts.values() for one in here]
    if all(one["heard"] is None for one in ranks):
        return Check("ranks are watched", "switched off: MESHIMPL_STALL_LIMIT is 0")
    lost = []
    for host, here in hosts.items():
        if numbers := [str(one["rank"]) for one in here if not one["heard"]]:
            lost.append(f"rank{'s' * (len(numbers) > 1)} {', '.join(numbers)} on host {host}")
    value = f"rank 0 hears the pulses of all {len(ranks)}"
    if lost:
        value = f"rank 0 does not hear {', '.join(lost)}"
    remedy = (
        "a firewall between the hosts? Jobs run, but the loss of a host is not noticed: let the "
        f"compute nodes reach each other by TCP, at any port of {next(iter(hosts))}"
    )
    return Check("ranks are watched", value, not lost, remedy)


def _messages(mesh: ProcessMesh) -> list[Check]:
    """Returns the latency and the bandwidth of the messages of steps."""
    import tensorflow as tf

    from meshimpl import engine

    ranks = tuple(range(mesh.size))
    collectives = engine.current()

    def allreduce(x: tf.Tensor) -> None:
        total = collectives.reduce(x, "sum", ranks, "doctor.allreduce")
        if float(total[0]) != mesh.size:
            raise ValueError(f"allreduce of {mesh.size} ones returned {float(total[0])}")

    def alltoall(x: tf.Tensor) -> None:
        collectives.exchange(x, None, ranks, "doctor.alltoall").numpy()

    def ones(size: int) -> tf.Tensor:
        return tf.ones([max(1, size // 4 // mesh.size) * mesh.size])  # can be split evenly

    checks = []
    for call in (allreduce, alltoall):
        short, long = _seconds(call, ones(SHORT), 50), _seconds(call, ones(LONG), 5)
        value = f"{1e3 * short:.2f} ms for 4 KiB a rank; {LONG / long / 1e9:.2f} GB/s of 16 MiB"
        checks.append(Check(call.__name__, f"{value} a rank"))
    return checks


def _seconds(call: Callable[[Any], None], x: Any, times: int) -> float:
    """Returns the median duration of a call, without the first [s]."""
    return statistics.median(timeit.repeat(lambda: call(x), number=1, repeat=times + 1)[1:])
