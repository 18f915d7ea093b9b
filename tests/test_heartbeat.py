"""What ends a job that is stuck, and what does not, from tables of beats and a silent engine."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from meshimpl import engine, heartbeat

WAITING, COMPUTING, ALONE = (1, 1, 0), (1, 0, 0), (0, 0, 0)


def beats(number: int, *ranks: tuple[int, int, tuple[int, int, int]]) -> list[np.ndarray]:
    """As many equal tables; a rank's place, number of moves, and what it does."""
    return [np.array([(place, moves, *what) for place, moves, what in ranks])] * number


@pytest.mark.parametrize(
    ("first", "second", "after"),
    [
        ((1, 5, WAITING), (2, 5, WAITING), 7),
        ((1, 5, WAITING), (2, 5, COMPUTING), 61),
        ((1, 5, COMPUTING), (2, 5, COMPUTING), 61),
        ((1, 5, WAITING), (2, 5, ALONE), None),
        ((1, 5, WAITING), (1, 5, WAITING), None),
        ((1, 5, COMPUTING), (1, 5, COMPUTING), None),
        ((1, 5, WAITING), (2, 5, (1, 1, 1)), None),
    ],
)
def test_is_stuck(first: Any, second: Any, after: int | None) -> None:
    """After a while at different places, sooner if neither can be computing; never otherwise."""
    if after is None:
        assert not heartbeat.is_stuck(beats(1000, first, second))
        return
    assert heartbeat.is_stuck(beats(after, first, second))
    assert not heartbeat.is_stuck(beats(after - 1, first, second))
    moved = beats(1, (first[0], 4, first[2]), second)
    assert not heartbeat.is_stuck(moved + beats(after - 1, first, second))


@pytest.mark.timeout(60)
def test_a_rank_that_gives_no_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another's beat never comes: the job ends after the limit, and not before."""
    came, ended = threading.Event(), threading.Event()
    said: list[str] = []
    beat = [0]

    class Engine:
        def gather(self, x: tf.Tensor, ranks: Any, name: str) -> tf.Tensor:
            def wait(row: np.ndarray) -> np.ndarray:
                beat[0] += 1
                if beat[0] > 3:
                    came.wait()
                return np.concatenate([row, row])

            return tf.ensure_shape(tf.numpy_function(wait, [x], x.dtype), [2, *x.shape[1:]])

    def end_job(message: str) -> None:
        said.append(message)
        ended.set()
        came.set()

    monkeypatch.setattr(engine, "current", Engine)
    monkeypatch.setattr(heartbeat, "end_job", end_job)
    heart = heartbeat.Heart((0, 1), 0.6)
    assert ended.wait(30)
    heart.stop()
    assert beat[0] >= 4
    assert "no sign of life for 0.6 s" in said[0]
