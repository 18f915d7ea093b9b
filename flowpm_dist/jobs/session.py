"""What the ranks of a job do together: check its folder, agree to stop, and write checkpoints.

Checkpoints of fields are zarr groups to which each rank writes its block. They can be resumed on a
mesh of any shape.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box
from flowpm_dist.grid.field import Field
from flowpm_dist.io.files import (
    UnreadableError,
    WriteError,
    check_regular_files,
    reading,
    snapshot_attributes,
)
from flowpm_dist.io.labelled import LabelledArray
from flowpm_dist.io.light_cone import add_array
from flowpm_dist.io.opening import check_numbers
from flowpm_dist.io.snapshot import DIMENSIONS, mark_complete, write_snapshot
from flowpm_dist.jobs.checkpoints import CheckpointStore
from flowpm_dist.jobs.folder import JobFolder, OutputError, existing_part, no_permission
from meshimpl import launch
from meshimpl.process_mesh import ProcessMesh

VISIBLE_SECONDS = 10.0
"""Time within which one host must see what another has written [s]."""
VISIBLE, NOT_VISIBLE, NOT_WRITABLE = 0, 1, 2


class StopRequest:
    """A request to stop, which all ranks agree on after each step.

    Args:
        mesh: the ranks of the job.
        folder: the folder of the job; a job ends that has lost it.
        step: what a step of the job is called, such as "iteration".
        say: shows the user a line; it is called from another thread.
    """

    def __init__(
        self, mesh: ProcessMesh, folder: JobFolder, step: str, say: Callable[[str], None]
    ) -> None:
        self._mesh, self._folder, self._received = mesh, folder, 0
        self._step, self._say = step, say

    @contextmanager
    def heard(self) -> Iterator[StopRequest]:
        """A context in which signals are remembered and do not end the process.

        The first one is answered at once with a line. A second SIGINT raises SystemExit where there
        is one rank; where there are several, the process that started them ends them.
        """

        def note(number: int, frame: FrameType | None) -> None:
            if number == self._received == signal.SIGINT and self._mesh.size == 1:
                raise SystemExit(128 + number)
            launch.leave_terminal(number)
            self._received = number

        # Python calls a signal's handler only between two of its own instructions, and a step of
        # TensorFlow is one of them. What the interpreter writes to the wakeup file, it writes at
        # once.
        reader, writer = os.pipe()
        os.set_blocking(writer, False)

        def answer() -> None:
            while number := os.read(reader, 1):
                launch.leave_terminal(number[0])
                if number[0] in launch.STOP_SIGNALS:
                    self._say(f"stopping after this {self._step} ...")
                    break

        before = {number: signal.signal(number, note) for number in launch.STOP_SIGNALS}
        woken_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        thread = threading.Thread(target=answer, name=launch.WITHOUT_RANKS, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            signal.set_wakeup_fd(woken_before)
            os.close(writer)
            thread.join()
            os.close(reader)
            for number, handler in before.items():
                signal.signal(number, handler)

    def name(self) -> str | None:
        """Returns the name of a signal that some rank has received, or None. On all ranks.

        Every rank returns the same.

        Raises:
            WriteError: on rank 0; the folder of the job was removed.
        """
        self._folder.check_held()
        received = int(self._mesh.world.allreduce(tf.constant(self._received), "max"))
        return signal.Signals(received).name if received else None


def check_shared(path: Path, mesh: ProcessMesh, option: str = "--output") -> None:
    """Check that all hosts see a folder and can write there. On all ranks.

    Args:
        path: path of the folder; it may still have to be made.
        mesh: the ranks.
        option: the option that names the folder.

    Raises:
        OutputError: some do not; on all ranks. Rank 0 names the hosts.
        WriteError: rank 0 cannot write there; on rank 0 alone.
    """
    if launch.detect().local_size >= mesh.size:
        return
    codes = visibility(path, mesh)
    wrong = {host: code for host, code in codes if code != VISIBLE}
    if not wrong:
        return
    missing = sorted(host for host, code in wrong.items() if code == NOT_VISIBLE)
    if missing:
        shown = ", ".join(missing[:8]) + ", ..." * (len(missing) > 8)
        raise OutputError(
            f"{existing_part(path)} is not the same folder on all hosts: {shown} "
            f"{'does' if len(missing) == 1 else 'do'} not see what {codes[0][0]} writes there; "
            f"give an {option} on a file system that all hosts share"
        )
    raise no_permission(path, ", ".join(sorted(wrong)), option)


def visibility(path: Path, mesh: ProcessMesh) -> list[tuple[str, int]]:
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
    code = VISIBLE if _appears(mark) else NOT_VISIBLE
    if code == VISIBLE and not os.access(ground, os.W_OK | os.X_OK):
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


def gather(mesh: ProcessMesh) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function that gathers the arrays of all ranks, [...] to [ranks, ...]."""

    def gathered(values: np.ndarray) -> np.ndarray:
        return mesh.world.allgather(tf.constant(values), stack=True).numpy()

    return gathered


def on_root(mesh: ProcessMesh, work: Callable[[], Any], error: type[Exception]) -> Any:
    """Calls a function on rank 0 alone, and returns its result on all ranks.

    Rank 0 decides for all, because a file system may show files to other ranks later.

    Args:
        mesh: the ranks.
        work: it returns what JSON can hold.
        error: the error that it may raise, which is made of a message alone.

    Raises:
        error: on all ranks, with the same message.
    """
    result, problem = None, ""
    if mesh.rank == 0:
        try:
            result = work()
        except error as raised:
            problem = str(raised)
    message = np.frombuffer(json.dumps([result, problem]).encode(), np.uint8)
    result, problem = json.loads(mesh.array_from_root(message).tobytes())
    if problem:
        raise error(problem)
    return result


class CheckpointError(UnreadableError):
    """A checkpoint that is missing, damaged, or of other work."""


class FieldCheckpoints:
    """The latest checkpoints of a job's fields.

    Args:
        store: the checkpoints in a folder.
        box: the box of the fields.
        keep: the number of checkpoints that are kept.
    """

    def __init__(self, store: CheckpointStore, box: Box, keep: int) -> None:
        self._store, self._box, self._keep = store, box, keep

    def save(
        self,
        number: int,
        fields: Mapping[str, Field],
        attributes: Mapping[str, Any],
        dimensions: tuple[str, ...] = DIMENSIONS,
        maps: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Writes a checkpoint. Must be called on all ranks together.

        Args:
            number: number of the iteration or step that it follows.
            fields: the fields by name.
            attributes: what else the work depends on; they can be written as JSON.
            dimensions: see `write_snapshot`.
            maps: arrays by name that rank 0 writes, whole.

        Raises:
            WriteError: on a rank that cannot write. Earlier checkpoints are not changed.
        """
        import zarr

        mesh, store = self._box.mesh, self._store
        path = store.aside(number) / self._path(number).name
        about = {"grid": list(self._box.grid), **attributes}
        with store.written(number, self._keep) if mesh.rank == 0 else contextlib.nullcontext():
            write_snapshot(path, fields, about, meanings={}, dimensions=dimensions)
            if mesh.rank == 0:
                group = zarr.open_group(path, mode="r+")
                for name, values in (maps or {}).items():
                    axes = tuple(f"axis_{n}" for n in range(values.ndim))
                    add_array(group, name, LabelledArray(values, axes, "1", name))
                mark_complete(path)
        mesh.barrier()

    def _path(self, number: int) -> Path:
        return self._store.path / f"{self._store.unit}-{number:06d}.zarr"

    def latest(self, **ours: Any) -> tuple[Path, Mapping[str, Any]] | None:
        """Returns path and attributes of the latest checkpoint; None if there is none.

        Must be called on all ranks together.

        Args:
            **ours: attributes, besides the grid, that must equal this work's.

        Raises:
            CheckpointError: it is of other work, or its writing was interrupted.
        """
        if self._box.mesh.rank == 0:
            self._store.remove_unfinished()
        # Rank 0 decides: a file system may show the folder to other ranks later.
        last = on_root(self._box.mesh, lambda: self._store.last, OSError)
        if last is None:
            return None
        path = self._path(last)
        attributes = snapshot_attributes(path)
        if attributes is None or not attributes.get("complete"):
            raise CheckpointError(self._damaged(path, "it is not complete"))
        for key, expected in {"grid": list(self._box.grid), **ours}.items():
            if (written := attributes.get(key)) != expected:
                raise CheckpointError(f"{path} is of {key} {written}; here it is {expected}")
        return path, attributes

    def block(self, path: Path, name: str) -> tf.Tensor:
        """Returns this rank's block of a field of a checkpoint, in the dtype of the box.

        Raises:
            CheckpointError: it cannot be read, or values are missing.
        """
        return self._read(path, name, self._box.place)

    def whole(self, path: Path, name: str) -> tf.Tensor:
        """Returns a whole array of a checkpoint; otherwise as `block`."""
        return self._read(path, name, ...)

    def _read(self, path: Path, name: str, place: Any) -> tf.Tensor:
        import zarr

        try:
            with reading(path / name):
                check_regular_files(path / name)
                array = zarr.open_array(path / name, mode="r", zarr_format=3)
                check_numbers(array, f"{path / name}", "f")
                block = np.asarray(array[place])
        except UnreadableError as error:
            reason = str(error).removeprefix(f"{path / name} cannot be read: ")
            raise CheckpointError(self._damaged(path, f"{name}: {reason}")) from error
        if not np.isfinite(block).all():
            raise CheckpointError(self._damaged(path, f"{name}: values are missing"))
        return tf.constant(block, self._box.dtype)

    def _damaged(self, path: Path, reason: str) -> str:
        """Returns the message about a damaged checkpoint, with what can be done."""
        before = [other for other in self._store.numbered().values() if other.name < path.name]
        advice = "there is none before it: begin anew with --overwrite"
        if before:
            advice = f"move it away, and --resume uses {before[-1].name}, the one before it"
        return f"{path} is damaged ({reason}); {advice}"
