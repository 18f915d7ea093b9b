"""A rank's reports of its meetings: enough to prove that it waits, or nothing."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from meshimpl.launch import WITHOUT_RANKS
from meshimpl.pulse import Meeting, rank
from meshimpl.pulse.state import RankState

ROW, WORLD = (0, 1), (0, 1, 2, 3)


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> list[RankState]:
    """All states that a new rank with a single thread publishes."""
    noted: list[RankState] = []
    reporter = rank.RankReporter()
    reporter.shared_state = type("", (), {"write": lambda _, state: noted.append(state)})()  # type: ignore
    monkeypatch.setattr(rank, "reporter", reporter)
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.main_thread()])
    return noted


def meet(ranks: tuple[int, ...]) -> None:
    with rank.at("a meeting", meetings=[ranks]):
        pass


def test_meetings_are_counted_for_each_group(states: list[RankState]) -> None:
    """When they begin; after one, nothing is waited for."""
    for ranks in (WORLD, ROW, WORLD):
        meet(ranks)
    assert [state.wait for state in states[::2]] == [
        Meeting(1, 0, 4, 1),
        Meeting(1, 0, 2, 1),
        Meeting(2, 0, 4, 1),
    ]
    assert states[-2].begun == (Meeting(2, 0, 4, 1), Meeting(1, 0, 2, 1))
    assert all(state.wait is None for state in states[1::2])
    assert [state.changes for state in states] == list(range(1, 7))


def test_where_another_thread_might_meet_nothing_is_proven(
    states: list[RankState], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[Any] = [threading.main_thread(), threading.Thread(name=WITHOUT_RANKS)]
    monkeypatch.setattr(threading, "enumerate", lambda: threads)
    meet(WORLD)
    threads.append(threading.Thread())
    meet(WORLD)
    threads.pop()
    meet(WORLD)
    waits = [state.wait and state.wait.ordinal for state in states[::2]]
    assert waits == [1, None, 3] and all(state.is_collective for state in states[::2])


def test_after_a_meeting_of_another_thread_nothing_is_proven(states: list[RankState]) -> None:
    thread = threading.Thread(target=meet, args=[ROW])
    thread.start()
    thread.join()
    meet(WORLD)
    assert [state.wait for state in states] == [None, None]
