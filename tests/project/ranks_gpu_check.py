"""The checks of tools/gpu_check.py hold on CPUs, whose answers they ask GPUs for."""

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))
import gpu_checks  # noqa: E402
import gpu_timings  # noqa: E402

pytestmark = pytest.mark.ranks(2)


@pytest.fixture
def world():
    """The mesh of the checks: pencils from four ranks on."""
    return gpu_checks.mesh_of(2)


def test_checks(world):
    """In float64, in which the limits are tight; test_gpu_check.py has float32 and gradients.

    All of it on the device that `tf.device` asks for, as on a GPU.
    """
    stored = {k: np.array(v) for k, v in json.loads((TOOLS / "gpu_check.json").read_text()).items()}
    made = set()
    for check in gpu_checks.all_checks(world, stored):
        if check.precision.startswith("float32") or "gradient" in check.name:
            continue
        with tf.device("CPU:1"):
            found = check.find()
        assert found.error <= check.limit, f"{check.name} in {check.precision}: {found.error}"
        assert found.device == "CPU:1"
        made.add(check.name)
    assert made > {"collectives", "FFT", "compiled particle kernels", "run", "network step"}


def test_small_eager_sums_stay_on_the_host(world):
    """They have come by a meeting of the hosts; larger ones are made where their input lies."""
    with tf.device("CPU:1"):
        small, large = (world.world.allreduce(tf.ones([n])) for n in (3, 40_000))
    assert small.device.endswith("CPU:0") and large.device.endswith("CPU:1")
    np.testing.assert_array_equal(small, [2.0] * 3)


def test_timings(world):
    """Of messages and FFT; the others wait for what the checks have already made."""
    for timing in itertools.islice(gpu_timings.all_timings(world, 8), 3):
        first, then = gpu_timings.seconds(world, timing.work, 1)
        assert first > 0 and then > 0
