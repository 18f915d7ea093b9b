"""Mesh TensorFlow's own tests pass on today's TensorFlow, with what `meshimpl.compat` puts back."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

PROGRAM = """
import meshimpl.compat
import tensorflow as tf
import mesh_tensorflow.ops_test as tests
globals().update(vars(tests))
tf.test.main()
"""


@pytest.mark.timeout(240)
def test_ops_test() -> None:
    job = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=220
    )
    assert job.returncode == 0, job.stderr[-4000:]
    ran = re.search(r"Ran (\d+) tests", job.stderr)
    assert ran and int(ran.group(1)) >= 63, job.stderr[-2000:]
    assert "OK (skipped=5)" in job.stderr
