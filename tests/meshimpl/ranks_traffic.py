"""What the ranks send in a step: counted as it runs, against the formulas, exactly."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from flowpm_dist.evolution.nbody import NBody
from flowpm_dist.grid.box import Box
from flowpm_dist.grid.decomposition import StepTraffic
from flowpm_dist.particle_mesh.cloud_in_cell import ParticleMesh
from flowpm_dist.particle_mesh.gravity import Gravity
from flowpm_dist.particle_mesh.options import ForceOptions
from meshimpl import ProcessMesh
from meshimpl.compat import mtf
from meshimpl.mesh_function import mesh_function
from meshimpl.traffic import Traffic, added, so_far

pytestmark = pytest.mark.ranks(1, 2, 4)


@pytest.mark.every_split
@pytest.mark.parametrize(
    ("halo", "factor", "force", "dtype", "half"),
    [
        (5, 1, "finite-difference", tf.float32, False),
        (3, 2, "spectral", tf.float64, False),
        (5, 1, "finite-difference", tf.float32, True),
    ],
)
def test_a_step(
    mesh: ProcessMesh, halo: int, factor: int, force: str, dtype: tf.DType, half: bool
) -> None:
    """Also where a halo is wider than a block, and where modes are padded."""
    grid = (16, 12, 8)
    box = Box(grid, tuple(8.0 * n for n in grid), mesh, dtype)
    nbody = NBody(
        Gravity(ParticleMesh(box, factor, halo, half), ForceOptions(force_gradient=force))
    )
    x = tf.zeros([*box.block, 3], dtype)
    for _ in range(2):  # ranks meet when they build
        before = so_far()
        field = nbody.gravity.field(nbody.painted(x, "here"))
        nbody.gravity.kick(field, x, x, tf.ones([2], dtype))
    cells = tuple(factor * n for n in grid)
    axes = mesh.axis_size("row"), mesh.axis_size("col")
    expected = StepTraffic(cells, *axes, factor * halo, force, dtype.size, half).tally
    assert added(so_far(), before, -1) == expected
    assert bool(expected) == (mesh.size > 1)


@pytest.mark.ranks(4)
def test_single_collectives(line: ProcessMesh) -> None:
    """By hand, for four ranks in a line; a small sum goes along with the meeting before it."""
    group, x = line.world, tf.zeros([4, 10_000])
    before = so_far()
    group.allreduce(tf.zeros([3]))
    assert added(so_far(), before, -1) == {"meeting": Traffic(1, 2, 3 * 128)}

    def sent(kind: str) -> Traffic:
        found = added(so_far(), before, -1)
        assert set(found) == {"meeting", kind}
        return found[kind]

    before = so_far()
    group.alltoall(x)
    assert sent("alltoall") == Traffic(1, 3, 3 * 40_000)
    before = so_far()
    group.exchange_neighbours(x, x)
    assert sent("neighbours") == Traffic(1, 2, 2 * 160_000)
    before = so_far()
    group.exchange_neighbours(x, x, 2)  # the same rank before and behind
    assert sent("neighbours") == Traffic(1, 1, 2 * 160_000)
    before = so_far()
    group.shift(x, 1, wrap=False)
    last = group.index == 3
    assert sent("neighbours") == Traffic(1, 0 if last else 1, 0 if last else 160_000)
    before = so_far()
    group.allreduce(x)
    assert sent("allreduce") == Traffic(1, 6, 6 * 40_000)


@pytest.mark.ranks(2)
def test_a_collective_in_a_loop_counts_each_time_it_runs(mesh: ProcessMesh) -> None:
    """Until a sum is reached, as the values given decide; beside one outside the loop."""

    @mesh_function(mesh, "x:row", a=([("x", 4)], tf.float32))
    def function(_: Any, a: Any) -> Any:
        below = lambda v: mtf.less(mtf.reduce_sum(v), 100.0)  # noqa: E731
        (grown,) = mtf.while_loop(below, lambda v: [v * 2.0], [a])
        return mtf.reduce_sum(grown)

    function([100.0] * 4)
    for start, sums in ((20.0, 3), (5.0, 5)):  # 80, 160; 20, 40, 80, 160; and at the end
        before = so_far()
        assert float(function([start] * 4)) == 160.0
        assert added(so_far(), before, -1) == {"allreduce": Traffic(sums, sums, 4 * sums)}


@pytest.mark.ranks(2)
def test_graphs_that_are_not_counted_call_no_python(mesh: ProcessMesh) -> None:
    """So they can be exported, and cost what their collectives do."""
    sums = tf.compat.v1.wrap_function(mesh.world.allreduce, [tf.TensorSpec([3])])
    kinds = {operation.type for operation in sums.graph.get_operations()}
    assert "HorovodAllreduce" in kinds and not any("PyFunc" in kind for kind in kinds)


@pytest.mark.ranks(1)
def test_a_step_on_many_ranks() -> None:
    """By hand: 1024^3 cells on 32 x 32 ranks, blocks of 32 x 32 cells, a halo of 8."""
    found = StepTraffic((1024, 1024, 1024), 32, 32, 8).tally
    plane = 4 * 1024  # bytes along z
    reduced = 2 * 8 * plane * (32 + 48)
    read = 2 * 10 * plane * (32 + 52)
    assert found["neighbours"] == Traffic(4, 8, reduced + read)
    modes = 544  # 513 and padding
    assert found["alltoall"].sent == 2 * 2 * 8 * 32 * 32 * modes * 31 // 32
    assert found["alltoall"].messages == 4 * 31
    assert found["allreduce"] == Traffic(1, 10, 10 * 12)
