"""What the ranks of a job decide together: whether to stop, and whether all see its folder."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import numpy as np
import tensorflow as tf

from flowpm_dist.io.files import WriteError
from flowpm_dist.jobs.folder import OutputError, existing_part
from meshimpl import launch
from meshimpl.process_mesh import ProcessMesh

VISIBLE_SECONDS = 10.0
"""Time within which one host must see what another has written [s]."""
SEEN, NOT_SEEN, NOT_WRITABLE = 0, 1, 2


class StopError(Exception):
    """A signal stopped a job; what was done is saved.

    Attributes:
        signal: name of the signal.
        place: where it was stopped, such as "after step 3 of 10".
    """

    def __init__(self, signal: str = "", place: str = "") -> None:
        super().__init__(signal, place)
        self.signal, self.place = signal, place


class StopRequest:
    """A request to stop, which all ranks agree on after each step.

    Args:
        mesh: the ranks of the job.
        step: what a step of the job is called, such as "iteration".
        say: shows the user a line; it is called from another thread.
    """

    def __init__(self, mesh: ProcessMesh, step: str, say: Callable[[str], None]) -> None:
        self._mesh, self._received = mesh, 0
        self._step, self._say = step, say

    @contextmanager
    def heard(self) -> Iterator[StopRequest]:
        """Inside, signals are remembered and do not end the process.

        The first one is answered at once with a line. A second SIGINT raises SystemExit where there
        is one rank; where there are several, the process that started them ends them.
        """

        def note(number: int, frame: FrameType | None) -> None:
            if number == self._received == signal.SIGINT and self._mesh.size == 1:
                raise SystemExit(128 + number)
            self._received = number

        before = {number: signal.signal(number, note) for number in launch.STOP_SIGNALS}
        try:
            with _answered(f"stopping after this {self._step} ...", self._say):
                yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def name(self) -> str | None:
        """Returns the name of a signal that some rank has received, or None. On all ranks.

        Every rank returns the same.
        """
        received = int(self._mesh.world.allreduce(tf.constant(self._received), "max"))
        return signal.Signals(received).name if received else None


@contextmanager
def _answered(line: str, say: Callable[[str], None]) -> Iterator[None]:
    """Inside, the first of `launch.STOP_SIGNALS` is answered with a line.

    Python calls a signal's handler only between two of its own instructions, and a step of
    TensorFlow is one of them. What the interpreter writes to the wakeup file, it writes at once.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def answer() -> None:
        while number := os.read(reader, 1):
            if number[0] in launch.STOP_SIGNALS:
                say(line)
                break

    thread = threading.Thread(target=answer, name=launch.WITHOUT_RANKS, daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
        thread.join()
        os.close(reader)


def check_seen_by_all(path: Path, mesh: ProcessMesh, option: str = "--output") -> None:
    """Check that all hosts see a folder and can write there. On all ranks.

    Args:
        path: of the folder; it may still have to be made.
        mesh: the ranks.
        option: that names the folder.

    Raises:
        OutputError: some do not; on all ranks. Rank 0 names the hosts.
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
        path: path of the folder; if it is missing, its nearest parent on rank 0 is tried.
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
    limit = time.monotonic() + VISIBLE_SECONDS
    while not path.exists():
        if time.monotonic() > limit:
            return False
        time.sleep(0.2)
    return True
