"""Decides from the reports of the ranks whether a job can continue."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshimpl.launch.ending import HOST_LOST
from meshimpl.pulse.state import ABORTING, FINISHED, RUNNING, Connection, RankState, Report

GRACE = {RUNNING: 5.0, ABORTING: 10.0}
"""Time in which a launcher ends the others after a rank has ended [s], by the rank's last word, or
in which a rank whose pulse alone has ended starts another one."""

PROOF = 6.0
"""Time, of two beats or more, in which ranks that wait for each other have not moved [s]."""

IDLE_SECONDS = 30.0
"""Time without any work after which a rank is reported [s]."""


class Cause(NamedTuple):
    """Why a job ends.

    Attributes:
        reason: what the user reads.
        status: exit status of its ranks.
    """

    reason: str
    status: int = HOST_LOST


@dataclass
class Peer:
    """A rank as its pulse's reports describe it.

    Times are counted in beats: a job that is suspended as a whole has not been silent.

    Attributes:
        rank, host, process: the rank, its host and its process.
        connection: connection to its pulse; None for this pulse's own rank.
        state: its last known state.
        is_heard: whether it was heard since the last beat.
        fresh: whether its state is newer than the last table.
        silent, stopped: how long it has been so [s].
        gone: time since it has ended [s]; None before.
        is_reported: whether a warning that it does no work was printed.
    """

    rank: int
    host: str
    process: int
    connection: Connection | None = None
    state: RankState = RankState()
    is_heard: bool = True
    fresh: bool = False
    silent: float = 0.0
    stopped: float = 0.0
    gone: float | None = None
    is_reported: bool = False

    def hear(self, state: RankState) -> None:
        """Stores a state that its pulse has sent."""
        self.state, self.is_heard, self.fresh = state, True, True

    def beat(self, seconds: float) -> None:
        """Counts the time since the last beat."""
        self.silent = 0.0 if self.is_heard or self.connection is None else self.silent + seconds
        self.is_heard = False
        self.stopped = self.stopped + seconds if self.state.stopped else 0.0
        if self.gone is not None:
            self.gone += seconds

    def send(self, report: Report) -> None:
        """Sends a report to its pulse, if that can hear it."""
        if self.connection is not None and self.gone is None:
            self.connection.send(report)

    def news(self) -> str:
        """Returns a message when the rank has stopped working, or works again; otherwise ""."""
        if self.gone is not None or bool(self.state.idle) == self.is_reported:
            return ""
        self.is_reported = bool(self.state.idle)
        if not self.is_reported:
            return f"rank {self.rank} works again"
        cause = {
            "T": f"it is stopped, and `kill -CONT {self.process}` lets it continue",
            "D": "it waits for a disk or a file system",
        }.get(self.state.idle, "it may wait for a device, or be swapped out")
        return (
            f"{who([self])} has done nothing for {IDLE_SECONDS:.0f} s, and the others wait for it: "
            f"{cause}"
        )


def trouble(peers: Collection[Peer], limit: float, name: str) -> Cause | None:
    """Returns why a job cannot continue; None if it can.

    A job may be started again after the loss of a rank or a host, but not after a rank's error.

    Args:
        peers: the ranks to judge.
        limit: time without a sign of life after which a job must end [s].
        name: the environment variable that sets `limit`.
    """
    watched = [peer for peer in peers if peer.state.ending != FINISHED]
    for peer in watched:
        if peer.gone is not None and peer.gone >= GRACE[peer.state.ending]:
            reason = f"{who([peer])} has ended, and the launcher has not ended the others"
            return Cause(reason, 1 if peer.state.ending == ABORTING else HOST_LOST)
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


def is_stuck(tables: Sequence[Sequence[RankState]], proof: int, beats: int) -> bool:
    """Returns whether ranks wait for each other and cannot continue.

    Args:
        tables: states of all ranks in the beats so far, the last one last.
        proof: beats without a change of state before a deadlock is reported.
        beats: number of beats after which ranks count as stuck although they may be computing: they
            are at different places of the program where all must come, and no state changes.
    """
    if len(tables) > proof and is_deadlock(tables[-proof - 1 :]):
        return True
    last = tables[-1]
    if not all(state.is_collective for state in last) or any(state.ending for state in last):
        return False
    if len({state.text for state in last}) == 1:
        return False
    recent = tables[-beats - 1 :]
    return len(recent) > beats and all(table == recent[0] for table in recent)


def is_deadlock(tables: Sequence[Sequence[RankState]]) -> bool:
    """Returns whether some ranks wait for each other in different meetings forever.

    A meeting is blocked by a rank of its group that has not begun it and waits in another one that
    is blocked itself. What the other ranks do does not matter. A meeting that all of its group have
    begun is not blocked, however late a rank leaves it.

    The proof needs no common time. A rank that waits begins no meeting before the one it is in has
    been begun by all. The first of the blocked ranks to continue would have to wait for another of
    them, which would have continued before it.

    Args:
        tables: states of all ranks in some beats, the last one last.
    """
    last = tables[-1]
    waiting = {
        rank: state
        for rank, state in enumerate(last)
        if state.wait
        and not (state.ending or state.stopped)
        and all(table[rank] == state for table in tables)
    }
    while waiting:
        blocked = {
            (state.wait, state.text): any(
                rank in waiting and not waiting[rank].has_begun(state) for rank in state.wait.ranks
            )
            for state in waiting.values()
            if state.wait
        }
        if all(blocked.values()):
            return True
        waiting = {
            r: state
            for r, state in waiting.items()
            if state.wait and blocked[state.wait, state.text]
        }
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
