"""Whether a job can go on, by what a pulse knows of its ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshimpl.launch.ending import HOST_LOST
from meshimpl.pulse.page import ABORTS, GOES_ON, LEAVES, Place
from meshimpl.pulse.wire import Line

GRACE = {GOES_ON: 2.0, ABORTS: 10.0}
"""Time in which a launcher ends the others after a rank has ended [s], by what the rank said."""

PROOF = 6.0
"""Time, of two beats or more, in which ranks that wait for each other have not moved [s]."""


class Cause(NamedTuple):
    """Why a job ends.

    Attributes:
        reason: for the user.
        status: with which its ranks exit.
    """

    reason: str
    status: int = HOST_LOST


@dataclass
class Peer:
    """What a pulse knows of a rank.

    Times are counted in beats: a job that is suspended as a whole has not been silent.

    Attributes:
        rank, host, process: which it is.
        line: to its pulse; None for this pulse's own rank.
        place: it has told last.
        heard: whether it was heard since the last beat.
        fresh: whether its place is newer than the last table.
        silent, stopped: for how long it has been so [s].
        gone: time since it has ended [s]; None before.
    """

    rank: int
    host: str
    process: int
    line: Line | None = None
    place: Place | None = None
    heard: bool = True
    fresh: bool = False
    silent: float = 0.0
    stopped: float = 0.0
    gone: float | None = None

    def hear(self, place: Place) -> None:
        """Notes what has come."""
        self.place, self.heard, self.fresh = place, True, True

    def beat(self, seconds: float) -> None:
        """Counts the time since the last beat."""
        self.silent = 0.0 if self.heard or self.line is None else self.silent + seconds
        self.heard = False
        is_stopped = self.place is not None and self.place.stopped
        self.stopped = self.stopped + seconds if is_stopped else 0.0
        if self.gone is not None:
            self.gone += seconds

    def send(self, value: object) -> None:
        """Sends something to its pulse, if that can hear it."""
        if self.line is not None and self.gone is None:
            self.line.send(value)

    @property
    def ending(self) -> int:
        """What it has said of its end."""
        return self.place.ending if self.place else GOES_ON


def trouble(peers: Collection[Peer], limit: float, name: str) -> Cause | None:
    """Returns why a job cannot go on; None if it can.

    After the loss of a rank or a host it may be started again; after an error of a rank it is not.

    Args:
        peers: that are watched.
        limit: time without a sign of life that is too long [s].
        name: of the variable that sets it.
    """
    watched = [peer for peer in peers if peer.ending != LEAVES]
    for peer in watched:
        if peer.gone is not None and peer.gone >= GRACE[peer.ending]:
            reason = f"{who([peer])} has ended, and the launcher has not ended the others"
            return Cause(reason, 1 if peer.ending == ABORTS else HOST_LOST)
    there = [peer for peer in watched if peer.gone is None]
    if hosts := {peer.host for peer in there if peer.silent >= limit}:
        # The others of a host may be due a beat later.
        silent = [peer for peer in there if peer.silent > limit / 2 and peer.host in hosts]
        return Cause(
            f"no sign of life from {who(silent)} for {limit:g} s: the host is cut off or stands "
            f"still. {name} sets another limit"
        )
    stopped = [peer for peer in there if peer.stopped >= limit]
    # A job that is stopped as a whole waits for nobody.
    if stopped and len(stopped) < len(there):
        return Cause(
            f"{who(stopped)} {'was' if len(stopped) == 1 else 'were'} stopped for {limit:g} s, as "
            f"by SIGSTOP. {name} sets another limit"
        )
    return None


def is_stuck(tables: Sequence[Sequence[Place]], proof: int, beats: int) -> bool:
    """Returns whether ranks wait for each other in vain.

    Args:
        tables: places of all ranks in the beats so far, the last one last.
        proof: beats that ranks must not move before a deadlock is believed.
        beats: after which ranks that are where all must be, at different places, and do not move,
            are taken for stuck although they may be computing.
    """
    if len(tables) > proof and is_deadlock(tables[-proof - 1 :]):
        return True
    last = tables[-1]
    if not all(place.inside for place in last) or any(place.ending for place in last):
        return False
    if len({place.text for place in last}) == 1:
        return False
    recent = tables[-beats - 1 :]
    return len(recent) > beats and all(table == recent[0] for table in recent)


def is_deadlock(tables: Sequence[Sequence[Place]]) -> bool:
    """Returns whether some ranks wait for each other in different meetings, and for ever.

    A meeting is blocked by a rank of its group that has not begun it and waits in another one that
    is blocked itself. What the other ranks do does not matter. A meeting that all of its group have
    begun is none of this, however late a rank leaves it.

    The proof needs no common time. A rank that waits begins no meeting before the one it is in has
    been begun by all. The first to go on of those that are found would have to wait for another of
    them, which would have gone on before it.

    Args:
        tables: places of all ranks in some beats, the last one last.
    """
    last = tables[-1]
    waiting = {
        rank: place
        for rank, place in enumerate(last)
        if place.wait
        and not (place.ending or place.stopped)
        and all(table[rank] == place for table in tables)
    }
    while waiting:
        blocked = {
            meeting: any(
                rank in waiting and not waiting[rank].has_begun(meeting) for rank in meeting.ranks
            )
            for meeting in {place.wait for place in waiting.values() if place.wait}
        }
        if all(blocked.values()):
            return True
        waiting = {r: place for r, place in waiting.items() if place.wait and blocked[place.wait]}
    return False


def by_rank(ranks: Sequence[int], texts: Sequence[str]) -> str:
    """Returns one line for each different text that is not empty, after the ranks that said it."""
    said: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        said.setdefault(text, []).append(rank)
    return "\n".join(f"  {named(ranks)}: {text}" for text, ranks in said.items() if text)


def named(ranks: Sequence[int]) -> str:
    """Returns a text such as "ranks 1, 2"; of many, the first."""
    shown = ", ".join(map(str, ranks[:8])) + ", ..." * (len(ranks) > 8)
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def who(peers: Sequence[Peer]) -> str:
    """Returns a text such as "rank 1 (process 4321) on host node2"."""
    if len(peers) == 1:
        return f"rank {peers[0].rank} (process {peers[0].process}) on host {peers[0].host}"
    hosts: dict[str, list[int]] = {}
    for peer in peers:
        hosts.setdefault(peer.host, []).append(peer.rank)
    return ", ".join(f"{named(ranks)} on host {host}" for host, ranks in hosts.items())
