"""Meetings of ranks outside graphs, where all ranks must announce the same activity.

`check_equal` compares what the ranks were given for it.

The engine knows an eager operation by its type alone, so that a barrier could pair with a sum made
elsewhere in the program. Every eager collective therefore begins with a gather of one row from each
rank: a digest of what the rank is about to do and where, and the data if they fit, which then need
no message of their own. Ranks that do not say the same get a `CollectiveError` that names what each
of them said. A mesh function's first call meets before and after it is built (`build_together`).
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import itertools
import re
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from meshimpl import engine, launch, traffic
from meshimpl.engine import CollectiveError, Ranks
from meshimpl.facts import facts
from meshimpl.graph_guards import NO_GRADIENT, Plan, caller, planned
from meshimpl.launch.gpus import UUID_BYTES
from meshimpl.pulse import at, by_rank, named, reporter
from meshimpl.pulse.rank import MAX_SHARED_BYTES
from meshimpl.tapes import is_watched, not_differentiable

_DIGEST, _LENGTH, _ROW, _TEXT = 8, 8, 128, 512
_ROUNDING = 1e-9  # relative difference between numbers that ranks have computed
MAX_INLINE_BYTES = 2**16
"""Bytes of data, of all ranks together, that travel along with a meeting."""
_next_build = 0


def meet(ranks: Ranks, what: str, data: bytes = b"") -> np.ndarray:
    """Waits for every rank of a group, and returns the data of each of them.

    Args:
        ranks: the group.
        what: what this rank is about to do; the same text on every rank.
        data: bytes that travel along, as many on every rank; for all ranks together at most
            `MAX_INLINE_BYTES`, or few.

    Returns:
        uint8 of shape [ranks, length of the data].

    Raises:
        CollectiveError: another rank said something else; on every rank of the group.
    """
    digest = _digest_of(what)
    group = f"among {len(ranks)} ranks from {ranks[0]} to {ranks[-1]}"
    mine = digest + data
    gathered = _gather(mine, ranks, f"{what}, {group}")
    if gathered.size == len(ranks) * max(_LENGTH + len(mine), _ROW):
        rows = gathered.reshape(len(ranks), -1)[:, : _LENGTH + len(mine)]
        said = np.frombuffer(_with_length(digest, len(mine)), np.uint8)
        if (rows[:, : said.size] == said).all():
            return rows[:, said.size :]
    raise CollectiveError(
        "the ranks are at different places of the program:\n"
        + by_rank(ranks, _gather_texts(what, ranks))
        + "\nEvery rank must make the same collectives, in the same order and at the same line"
    )


def _with_length(text: bytes, length: int) -> bytes:
    return length.to_bytes(_LENGTH, "little") + text


def _gather(mine: bytes, ranks: Ranks, where: str) -> np.ndarray:
    """Returns a row from each rank: the length of its data, and the data, in at least `_ROW` bytes.

    They may be of any length: each rank may be about to do something else.
    """
    row = _with_length(mine, len(mine)).ljust(_ROW, b"\0")
    traffic.count({"meeting": traffic.allgather(len(row), len(ranks))})
    # On the host also where there are GPUs: NCCL would carry these few bytes there and back.
    with tf.device("CPU:0"), at(where, meetings=[ranks]):
        sent = tf.constant(np.frombuffer(row, np.uint8))
        gathered: np.ndarray = engine.current().gather(sent, ranks, "meeting").numpy()
    return gathered


def _gather_texts(text: str, ranks: Ranks) -> list[str]:
    rows = _gather_rows(text.encode()[:_TEXT], ranks)
    return [row.decode(errors="ignore") for row in rows]


def _gather_rows(mine: bytes, ranks: Ranks) -> list[bytes]:
    """Returns the data of each rank, of any length."""
    where = "telling the other ranks where this one is"
    gathered, rows, begin = bytes(_gather(mine, ranks, where)), [], 0
    for _ in ranks:
        end = begin + _LENGTH + int.from_bytes(gathered[begin : begin + _LENGTH], "little")
        rows.append(gathered[begin + _LENGTH : end])
        begin = max(end, begin + _ROW)
    return rows


def eager_collective(
    collective: Callable[[tf.Tensor], tf.Tensor],
    x: tf.Tensor,
    description: str,
    ranks: Ranks,
    combine: Callable[[np.ndarray], np.ndarray] | None = None,
) -> tf.Tensor:
    """Returns `collective(x)` after all ranks of the group have said that they will make it.

    TensorFlow is refused a gradient through it.

    Args:
        collective: makes one operation of the engine.
        x: input of the operation.
        description: such as "allreduce of float32 [3]"; the caller's line is added.
        ranks: the group.
        combine: computes the result from the inputs of all ranks, stacked along a new first axis;
            used in place of `collective` if the input is small.

    Raises:
        CollectiveError: another rank is elsewhere.
    """
    description = f"{description} at {caller()}"

    def run(y: tf.Tensor) -> tf.Tensor:
        size = y.shape.num_elements() * y.dtype.size
        if combine is None or size * len(ranks) > max(MAX_INLINE_BYTES, _ROW * len(ranks)):
            meet(ranks, description)
            return collective(y)
        mine = y.numpy()
        rows = meet(ranks, description, mine.tobytes())
        stacked = np.frombuffer(rows.tobytes(), mine.dtype).reshape(len(ranks), *mine.shape)
        # Read on the host: from a GPU it would have to come back.
        with tf.device("CPU:0"):
            return tf.constant(combine(stacked))

    # A tape would not see what goes through the meeting, and take the gradient for zero.
    return not_differentiable(run, NO_GRADIENT)(x) if is_watched([x]) else run(x)


def build_together(groups: Sequence[Ranks], name: str, build: Callable[[], Any]) -> Any:
    """Returns `build()`, a graph with collectives, once every rank has built the same.

    The collectives get names that no other graph has, the same on every rank whatever each has
    built before.

    Args:
        groups: in which all ranks that build the graph meet, one after the other: one group, or
            the lines of a plane; none for a rank alone.
        name: name of the mesh function, for messages and names.
        build: makes the graph; nothing of it runs before all ranks have agreed.

    Raises:
        CollectiveError: building failed on another rank, or the ranks built different collectives.
            If it failed on this rank, its own exception is raised.
    """
    global _next_build
    if not groups:
        return build()
    activity, number = f"the first call of the mesh function {name}", _next_build
    for ranks in groups:
        numbers = meet(ranks, activity, number.to_bytes(8, "little"))
        number = int(np.frombuffer(numbers.tobytes(), np.uint64).max())
    _next_build = number + 1
    plan = Plan(f"{re.sub(r'[^A-Za-z0-9]+', '_', name).strip('_')}_{number}")
    with planned(plan), at(f"building {name}", alone=True):
        built, failure, trouble = _tried(build, f"{name} could not be built")
    for ranks in groups:
        rows = meet(ranks, f"{activity}, now built", bytes([bool(trouble)]) + plan.digest())
        if rows[:, 0].any():
            trouble = next(filter(None, _gather_texts(trouble, ranks)))
        elif (rows != rows[0]).any():
            trouble = (
                f"{name} has other collectives on one rank than on another:\n"
                + by_rank(ranks, _gather_texts(plan.summary(), ranks))
                + "\nBuild the same on every rank; what depends on the rank is a value, such as "
                "Communicator.per_rank returns"
            )
    if failure is not None:
        raise failure
    if trouble:
        raise CollectiveError(f"the mesh function {trouble}")
    return built


def succeed_together(groups: Sequence[Ranks], what: str, work: Callable[[], Any]) -> Any:
    """Returns `work()`, which makes no collectives, once it has succeeded on every rank.

    Args:
        groups: in which all ranks meet, one after the other, as for `build_together`.
        what: for messages; the same on every rank.
        work: such as reading a file.

    Raises:
        CollectiveError: it failed on another rank. If it failed on this rank, its own exception is
            raised.
    """
    with at(what, alone=True):
        result, failure, trouble = _tried(work, f"{what} failed")
    for ranks in groups:
        if meet(ranks, what, bytes([bool(trouble)])).any():
            trouble = next(filter(None, _gather_texts(trouble, ranks)))
    if failure is not None:
        raise failure
    if trouble:
        raise CollectiveError(trouble)
    return result


def check_equal(groups: Sequence[Ranks], what: str, inputs: Mapping[str, Any]) -> None:
    """Checks that the ranks were given the same inputs.

    They compare one digest; only if it differs do they look for the input.

    Args:
        groups: in which all ranks meet, one after the other, as for `build_together`.
        what: for messages, such as "a run"; the same on every rank.
        inputs: by the names that users know; see `meshimpl.facts`.

    Raises:
        CollectiveError: an input differs; on every rank, with the values.
    """
    mine, trouble = list(facts(inputs)), ""
    digest = _digest_of(repr(mine))
    for ranks in groups:
        rows = meet(ranks, f"comparing the inputs of {what}", bytes([bool(trouble)]) + digest)
        if rows[:, 0].any():
            trouble = next(filter(None, _gather_texts(trouble, ranks)))
        elif (rows != rows[0]).any():
            trouble = _first_difference(mine, ranks)
    if trouble:
        raise CollectiveError(f"{trouble}. All ranks must be given the same for {what}")


def _first_difference(mine: Sequence[tuple[str, str]], ranks: Ranks) -> str:
    """Returns the name of a differing input with each rank's value; "" if rounding explains it."""
    rows = _gather_rows(b"".join(_digest_of(repr(fact)) for fact in mine), ranks)
    digests = [[row[i : i + _DIGEST] for i in range(0, len(row), _DIGEST)] for row in rows]
    for number, column in enumerate(itertools.zip_longest(*digests)):
        if len(set(column)) == 1:
            continue
        name, value = mine[number] if number < len(mine) else (mine[-1][0], "fewer parts")
        values = _gather_texts(value, ranks)
        if not _rounded_alike(values):
            having = defaultdict(list)
            for rank, text in zip(ranks, values, strict=True):
                having[text].append(rank)
            each = (
                f"{named(who)} {'has' if len(who) == 1 else 'have'} {text}"
                for text, who in having.items()
            )
            return f"{name} differs between ranks: {', '.join(each)}"
    return ""


def _digest_of(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST).digest()


def _rounded_alike(texts: Sequence[str]) -> bool:
    """Returns whether texts are numbers that differ by rounding, as results of other processors.

    Whole numbers are not rounded.
    """
    if any(text.lstrip("-").isdigit() for text in texts):
        return False
    try:
        numbers = np.array(texts, np.float64)
    except ValueError:
        return False
    return bool(np.allclose(numbers, numbers[0], rtol=_ROUNDING, atol=0.0))


def _tried(work: Callable[[], Any], what: str) -> tuple[Any, Exception | None, str]:
    """Returns the result of a call, its error, and the error as a text."""
    try:
        return work(), None, ""
    except Exception as error:
        cause = traceback.format_exception_only(error)[-1].strip()
        return None, error, f"{what} on rank {launch.detect().rank}: {cause}"


@functools.cache
def check_gpus(ranks: Ranks) -> None:
    """Checks that no two ranks of a job work on one GPU, which NCCL refuses.

    Ranks whose GPUs were chosen by a scheduler see one each, and cannot know whether it is the same
    one. Ranks without a GPU may be among them.

    Args:
        ranks: all ranks of the job, which call this together once their devices are placed.

    Raises:
        LaunchError: two ranks have the same GPU; on every rank.
    """
    mine = tf.config.get_visible_devices("GPU")
    index = int(mine[0].name.rpartition(":")[2]) if mine else 0
    uuid = launch.gpu_identity(index) if mine else bytes(UUID_BYTES)
    having: defaultdict[bytes, list[int]] = defaultdict(list)
    for rank, row in zip(ranks, meet(ranks, "the choice of GPUs", uuid), strict=True):
        having[row.tobytes()].append(rank)
    having.pop(bytes(UUID_BYTES), None)
    if shared := [who for who in having.values() if len(who) > 1]:
        several = "; ".join(f"ranks {', '.join(map(str, who))}" for who in shared)
        raise launch.LaunchError(
            f"{several} have the same GPU, and NCCL wants one for each rank: ask the scheduler for "
            "as many GPUs as ranks on a node (srun --gpus-per-task=1), or hide the GPUs with "
            "CUDA_VISIBLE_DEVICES=''"
        )


@functools.cache
def connect(ranks: Ranks) -> None:
    """Lets the engine connect the ranks, if it has ways of its own; see `NcclEngine.connect`.

    Args:
        ranks: all ranks of the job, which call this together once their devices are placed.

    Raises:
        CollectiveError: ranks chose different engines, or one cannot connect; on every rank.
        LaunchError: see `check_gpus`.
    """
    job, what = engine.current(), f"{engine.EXCHANGE} is {engine.exchanges_by()}"
    succeed_together((ranks,), what, job.prepare)
    if job.wants_own_gpus:
        check_gpus(ranks)
    with at(what, meetings=[ranks]):
        job.connect()


@functools.cache
def stay_together(ranks: Ranks) -> None:
    """Lets the ranks of a job watch each other, and wait for each other at their end.

    The first rank to stop the engine stops it for all.

    Args:
        ranks: all ranks of the job.

    Raises:
        LaunchError: a limit in the environment is not a number of seconds.
    """
    stall = launch.time_limit("MESHIMPL_STALL_LIMIT")
    silence = launch.time_limit("MESHIMPL_SILENCE_LIMIT")

    def from_rank_zero(data: bytes) -> bytes:
        row = np.frombuffer(data.ljust(MAX_SHARED_BYTES, b"\0"), np.uint8)
        with tf.init_scope(), tf.device("CPU:0"):
            sent = engine.current().broadcast(tf.constant(row), ranks[0], ranks, "pulse")
        return bytes(sent.numpy()).rstrip(b"\0")

    if stall:
        reporter.start(from_rank_zero, stall=stall, silence=silence or stall)

    @atexit.register
    def leave() -> None:
        if getattr(sys, "last_value", None) is not None:
            return
        if engine.current().is_running:
            try:
                meet(ranks, "the end of the program")
            except CollectiveError as error:
                sys.excepthook(CollectiveError, error, None)
                launch.abort(1)
        reporter.stop()
