"""The hazard of tests/ranks/test_hazards.py is real: without a guard, ranks hang."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rank_jobs import needs_horovod

from meshimpl.launch import mpirun_command

UNGUARDED = """
import horovod.tensorflow as hvd, tensorflow as tf
hvd.init()

@tf.function
def fn(x):
    total = hvd.allreduce(x, op=hvd.Sum, name="total")
    return x if hvd.rank() == 0 else total

print("started", flush=True)
fn(tf.ones([4]))
"""


@pytest.mark.timeout(90)
def test_an_output_ignored_on_one_rank_hangs_without_a_guard(tmp_path: Path) -> None:
    """Horovod's operation is pruned on rank 0; rank 1 waits until the stall check ends the job."""
    needs_horovod(2)
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED)
    command, environment = mpirun_command(2, [sys.executable, str(script)])
    limits = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "2", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "4"}
    job = subprocess.run(
        command,
        env={**os.environ, **environment, **limits},
        timeout=60,
        text=True,
        capture_output=True,
    )
    assert job.stdout.count("started") == 2, job.stderr
    assert job.returncode != 0
