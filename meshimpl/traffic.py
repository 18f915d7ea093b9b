"""The traffic of a rank: counted while graphs are built, added up whenever they are evaluated.

`so_far` is what this rank has sent since it began; the difference of two is what was sent between
them. A collective in a loop counts each time it runs. Graphs that are lowered without
`MeshFunction` are not counted. Imports no TensorFlow.

The engine decides how a reduction or a gather travels. Counted is what the usual algorithms send:
recursive doubling for short tensors, a ring for long ones (Thakur, Rabenseifner and Gropp 2005).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

SHORT = 10_000
"""Size of a tensor up to which it is reduced by recursive doubling [bytes]."""


@dataclass(frozen=True)
class Traffic:
    """The traffic from one rank to the others.

    Attributes:
        collectives: number of them.
        messages: number of messages from this rank.
        sent: their size [bytes].
    """

    collectives: int = 0
    messages: int = 0
    sent: int = 0

    def plus(self, other: Traffic, times: int) -> Traffic:
        """Returns this traffic plus `times` times the other."""
        return Traffic(
            self.collectives + times * other.collectives,
            self.messages + times * other.messages,
            self.sent + times * other.sent,
        )


Tally = dict[str, Traffic]
"""By kind of collective: alltoall, neighbours, allreduce, allgather, broadcast, meeting."""


def alltoall(size: int, ranks: int) -> Traffic:
    """Returns a rank's traffic in an even all-to-all of a tensor [bytes]."""
    return Traffic(1, ranks - 1, size * (ranks - 1) // ranks)


def to_each(sizes: Sequence[int], this_rank: int) -> Traffic:
    """Returns what rank number `this_rank` sends, of so many bytes for each rank of its group."""
    others = [int(size) for rank, size in enumerate(sizes) if rank != this_rank and size]
    return Traffic(1, len(others), sum(others))


def allreduce(size: int, ranks: int) -> Traffic:
    """Returns a rank's traffic in an allreduce of a tensor [bytes]."""
    rounds = (ranks - 1).bit_length()
    if size <= SHORT:
        return Traffic(1, rounds, size * rounds)
    return Traffic(1, 2 * (ranks - 1), 2 * size * (ranks - 1) // ranks)


def allgather(size: int, ranks: int) -> Traffic:
    """Returns a rank's traffic in an allgather of tensors of `size` bytes each [bytes]."""
    return Traffic(1, (ranks - 1).bit_length(), size * (ranks - 1))


def broadcast(size: int, ranks: int) -> Traffic:
    """Returns the first rank's traffic in a broadcast of a tensor [bytes]; the others send less."""
    rounds = (ranks - 1).bit_length()
    return Traffic(1, rounds, size * rounds)


def added(one: Mapping[str, Traffic], other: Mapping[str, Traffic], times: int = 1) -> Tally:
    """Returns one tally and another, some times, without the kinds that add up to nothing."""
    nothing = Traffic()
    kinds = [*one, *(kind for kind in other if kind not in one)]
    total = {k: one.get(k, nothing).plus(other.get(k, nothing), times) for k in kinds}
    return {kind: traffic for kind, traffic in total.items() if traffic != nothing}


_so_far: Tally = {}
_built: Tally | None = None


def so_far() -> Tally:
    """Returns this rank's traffic since its start."""
    return dict(_so_far)


def count(tally: Mapping[str, Traffic]) -> None:
    """Adds to this rank's traffic."""
    _so_far.update(added(_so_far, tally))


def record(tally: Mapping[str, Traffic]) -> None:
    """Adds to the traffic of each evaluation of the graph that is being built."""
    if _built is not None:
        _built.update(added(_built, tally))


@contextlib.contextmanager
def recorded(into: Tally | None) -> Iterator[None]:
    """Lets the collectives of a graph that is built inside add to a tally; None counts none."""
    global _built
    outer, _built = _built, into
    try:
        yield
    finally:
        _built = outer
