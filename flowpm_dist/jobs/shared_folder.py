"""Whether all hosts of a job see a folder, before anything is written there."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from flowpm_dist.io.files import WriteError
from flowpm_dist.jobs.folder import OutputError, existing_part
from meshimpl import launch
from meshimpl.process_mesh import ProcessMesh

PATIENCE = 10.0
"""Time after which what one host has written counts as not seen by another [s]."""
SEEN, NOT_SEEN, NOT_WRITABLE = 0, 1, 2


def check_seen_by_all(path: Path, mesh: ProcessMesh, option: str = "--output") -> None:
    """Check that all hosts see a folder and can write there. On all ranks.

    Args:
        path: of the folder; it may still have to be made.
        mesh: the ranks.
        option: that names the folder.

    Raises:
        OutputError: some do not; on all ranks. That of rank 0 names the hosts.
        WriteError: rank 0 cannot write there; on rank 0 alone.
    """
    if launch.detect().local_size >= mesh.size:
        return
    found = seen_by(path, mesh)
    wrong = {host: code for host, code in found if code != SEEN}
    if not wrong:
        return
    unseen = sorted(host for host, code in wrong.items() if code == NOT_SEEN)
    if unseen:
        raise OutputError(
            f"{existing_part(path)} is not the same folder on all hosts: {_list(unseen)} "
            f"not see what {found[0][0]} writes there; give an {option} on a file system that "
            "all hosts share"
        )
    hosts = ", ".join(sorted(wrong))
    raise OutputError(f"no permission to write in {existing_part(path)} on {hosts}")


def _list(hosts: Sequence[str]) -> str:
    shown = ", ".join(hosts[:8]) + ", ..." * (len(hosts) > 8)
    return f"{shown} {'does' if len(hosts) == 1 else 'do'}"


def seen_by(path: Path, mesh: ProcessMesh) -> list[tuple[str, int]]:
    """Returns the host of each rank and whether it sees a folder. On all ranks, the same on each.

    Args:
        path: of the folder; if it is missing, its nearest parent on rank 0 is tried.
        mesh: the ranks.

    Raises:
        WriteError: rank 0 cannot write there; on rank 0 alone.
    """
    path = path.absolute()
    above = len(path.parts) - len(existing_part(path).parts)
    chosen = tf.constant([above, secrets.randbits(62)], tf.int64)
    above, number = (int(n) for n in mesh.world.broadcast(chosen).numpy())
    ground = Path(*path.parts[: len(path.parts) - above])
    mark = ground / f".flowpm-dist-{number:016x}"
    if mesh.rank == 0:
        try:
            mark.touch()
        except OSError as error:
            raise WriteError.of(ground, error) from error
    mesh.barrier("the folder of the results is tried")
    code = SEEN if _appears(mark) else NOT_SEEN
    if code == SEEN and not os.access(ground, os.W_OK | os.X_OK):
        code = NOT_WRITABLE
    row = np.frombuffer(socket.gethostname().encode()[:63].ljust(63, b"\0"), np.uint8)
    rows = mesh.world.allgather(tf.constant([*row, code], tf.uint8), stack=True).numpy()
    if mesh.rank == 0:
        with contextlib.suppress(OSError):
            mark.unlink()
    return [(bytes(r[:-1]).rstrip(b"\0").decode(errors="replace"), int(r[-1])) for r in rows]


def _appears(path: Path) -> bool:
    limit = time.monotonic() + PATIENCE
    while not path.exists():
        if time.monotonic() > limit:
            return False
        time.sleep(0.2)
    return True
