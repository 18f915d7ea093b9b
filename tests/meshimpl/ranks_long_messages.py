"""Exchanges of more elements than one message can have: they travel in several."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from meshimpl import ProcessMesh, engine
from meshimpl.compat import mtf
from meshimpl.mesh_function import MeshFunction
from meshimpl.operations.fft import rfft3d
from meshimpl.operations.halo import halo_exchange
from meshimpl.traffic import Traffic, added, so_far

pytestmark = pytest.mark.ranks(2, 4)

SHAPE = mtf.Shape([mtf.Dimension(name, size) for name, size in (("x", 8), ("y", 4), ("z", 6))])


def build(_: Any, field: Any) -> list[Any]:
    """Pieces for all ranks, for neighbours, and in half precision with scales at their ends."""
    return [rfft3d(field), *(halo_exchange(field, {"x": 3}, half=half) for half in (False, True))]


def results(line: ProcessMesh) -> tuple[list[np.ndarray], Traffic]:
    """Transforms, halos and their adjoints, and what this rank has sent for them."""
    layout = "x:row;ky:row;x_halo:row"
    function = MeshFunction(build, line, layout, {"a": (SHAPE, tf.float32)})
    random = np.random.default_rng(1)
    block = tf.constant(function.block_of("a", random.normal(size=SHAPE.to_integer_list)))
    before = so_far()
    with tf.GradientTape() as tape:
        tape.watch(block)
        outputs = function(block)
        loss = tf.add_n([tf.reduce_sum(tf.cos(output)) for output in outputs])
    found = [output.numpy() for output in (*outputs, tape.gradient(loss, block))]
    total = Traffic()
    for kind, sent in added(so_far(), before, -1).items():
        total = total.plus(sent, kind != "meeting")
    return found, total


def moves(group: Any) -> list[np.ndarray]:
    """Rank 0's tensor on all ranks but one, and a piece of each rank on each."""
    x = tf.range(24.0) + 100.0 * group.index
    copied = group.permute(x, [0] * (group.size - 1) + [None])
    return [copied.numpy(), group.alltoall(x).numpy()]


@pytest.fixture
def one_message(line: ProcessMesh) -> tuple[list[np.ndarray], Traffic, list[np.ndarray]]:
    """Results by Horovod: no test has chosen another engine yet."""
    return *results(line), moves(line.world)


def test_they_are_those_of_one_message(
    line: ProcessMesh, one_message: Any, each_engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, forward and in the adjoint, with as many bytes in more collectives."""
    whole, once, moved = one_message
    kind = type(engine.current())
    exchange, lengths = kind.exchange, []

    def measured(self: engine.HorovodEngine, x: tf.Tensor, *rest: Any) -> tf.Tensor:
        lengths.append(x.shape.num_elements() or 0)
        return exchange(self, x, *rest)

    monkeypatch.setattr(kind, "exchange", measured)
    monkeypatch.setattr(engine, "MAX_ELEMENTS", 50)
    parts, often = results(line)
    for found, expected in zip([*parts, *moves(line.world)], [*whole, *moved], strict=True):
        np.testing.assert_array_equal(found, expected)
    assert often.sent == once.sent and often.collectives > once.collectives
    assert 25 < max(lengths) <= 50


def test_rows_that_differ_between_ranks_stay_in_one(
    line: ProcessMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "MAX_ELEMENTS", 50)
    counts = [17 if rank == 0 else 0 for rank in range(line.world.size)]
    with pytest.raises(ValueError, match="more than 50 elements.*use more ranks"):
        line.world.alltoallv(tf.zeros([17, 3]), counts)
    line.barrier()
