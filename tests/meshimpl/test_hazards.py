"""Hazards as jobs of their own: without a guard ranks hang, and one that leaves ends the job."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_jobs import run_two

UNGUARDED = """
from meshimpl.imports import import_tensorflow
import_tensorflow()
from meshimpl import engine
import tensorflow as tf
hvd = engine.import_horovod()
hvd.init()

@tf.function
def fn(x):
    total = hvd.allreduce(x, op=hvd.Sum, name="total")
    return x if hvd.rank() == 0 else total

print("started", flush=True)
fn(tf.ones([4]))
"""


ONE_LEAVES = """
import sys, time
from meshimpl import ProcessMesh
mesh = ProcessMesh("row:2")
time.sleep(5 * mesh.rank)
mesh.barrier()
print("waited", flush=True)
if mesh.rank == 0:
    sys.exit(0)
mesh.barrier()
print("after the barrier", flush=True)
"""

ONE_CALLS_A_FUNCTION = """
import tensorflow as tf
from meshimpl import MeshFunction, ProcessMesh
from meshimpl.compat import mtf
mesh = ProcessMesh("row:2")
build = lambda _, a: mtf.reduce_sum(a)
total = MeshFunction(build, mesh, "x:row", {"a": ([("x", 2)], tf.float32)})
total([1.0, 2.0])
total([1.0, 2.0]) if mesh.rank == 0 else mesh.barrier()
"""


@pytest.mark.timeout(180)
def test_an_output_ignored_on_one_rank_hangs_without_a_guard(tmp_path: Path) -> None:
    """Horovod's operation is pruned on rank 0; rank 1 waits until the stall check ends the job."""
    limits = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "2", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "4"}
    job = run_two(tmp_path, UNGUARDED, **limits)
    assert job.stdout.count("started") == 2, job.stderr
    assert job.returncode != 0


@pytest.mark.timeout(180)
def test_a_rank_that_leaves_does_not_satisfy_a_barrier(tmp_path: Path) -> None:
    """The job ends at once and says where each rank was; one that was only slow is waited for."""
    job = run_two(tmp_path, ONE_LEAVES, MESHIMPL_STALL_LIMIT="4")
    assert job.stdout.count("waited") == 2, job.stderr
    assert "after the barrier" not in job.stdout
    assert job.returncode != 0
    assert "rank 0: the end of the program\n  rank 1: barrier at __main__:10" in job.stderr


@pytest.mark.timeout(180)
def test_ranks_that_wait_for_each_other_end(tmp_path: Path) -> None:
    """Long before the limit, since each counts its calls and its meetings."""
    job = run_two(tmp_path, ONE_CALLS_A_FUNCTION, MESHIMPL_STALL_LIMIT="600")
    assert job.returncode != 0
    assert "wait for each other at different places of the program" in job.stderr
    assert "rank 0: the mesh function <lambda>\n  rank 1: barrier at __main__:9" in job.stderr
