"""A rank's reports of its meetings: enough to prove that it waits, or nothing."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from meshimpl.launch import WITHOUT_RANKS
from meshimpl.pulse import Wait, rank
from meshimpl.pulse.place import Place

ROW, WORLD = (0, 1), (0, 1, 2, 3)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Place]:
    """All places that a rank has told, which has begun nothing and has no other thread."""
    places: list[Place] = []
    heart = rank.Heart()
    heart.page = type("", (), {"write": lambda _, place: places.append(place)})()  # type: ignore
    monkeypatch.setattr(rank, "heart", heart)
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.main_thread()])
    return places


def meet(ranks: tuple[int, ...]) -> None:
    with rank.at("a meeting", meetings=[ranks]):
        pass


def test_meetings_are_counted_for_each_group(told: list[Place]) -> None:
    """When they begin; after one, nothing is waited for."""
    for ranks in (WORLD, ROW, WORLD):
        meet(ranks)
    assert [place.wait for place in told[::2]] == [
        Wait(1, 0, 4, 1),
        Wait(1, 0, 2, 1),
        Wait(2, 0, 4, 1),
    ]
    assert told[-2].begun == (Wait(2, 0, 4, 1), Wait(1, 0, 2, 1))
    assert all(place.wait is None for place in told[1::2])
    assert [place.moves for place in told] == list(range(1, 7))


def test_where_another_thread_might_meet_nothing_is_proven(
    told: list[Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[Any] = [threading.main_thread(), threading.Thread(name=WITHOUT_RANKS)]
    monkeypatch.setattr(threading, "enumerate", lambda: threads)
    meet(WORLD)
    threads.append(threading.Thread())
    meet(WORLD)
    threads.pop()
    meet(WORLD)
    waits = [place.wait and place.wait.ordinal for place in told[::2]]
    assert waits == [1, None, 3] and all(place.inside for place in told[::2])


def test_after_a_meeting_of_another_thread_nothing_is_proven(told: list[Place]) -> None:
    thread = threading.Thread(target=meet, args=[ROW])
    thread.start()
    thread.join()
    meet(WORLD)
    assert [place.wait for place in told] == [None, None]
