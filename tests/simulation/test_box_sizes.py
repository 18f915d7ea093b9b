"""Simulations of many box sizes in one process: no size makes TensorFlow trace or compile anew."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from flowpm_dist.grid.box import Box
from flowpm_dist.particle_mesh.cloud_in_cell import ParticleMesh
from flowpm_dist.particle_mesh.gravity import Gravity
from flowpm_dist.particle_mesh.kernels.compiled import load
from flowpm_dist.particle_mesh.options import ForceOptions
from meshimpl import ProcessMesh

REASON = load()[1]
needs_library = pytest.mark.skipif(REASON is not None, reason=str(REASON))

MANY_SIZES = """
import psutil
import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph

import flowpm_dist as fpm
from flowpm_dist import Cosmology, Simulation

traces, plain = 0, FuncGraph.__init__

def counted(self, *args, **kwargs):
    global traces
    traces += 1
    plain(self, *args, **kwargs)

FuncGraph.__init__ = counted

def simulate(size):
    before = traces
    simulation = Simulation(Cosmology.planck18(), 8, size, [0.1, 0.5, 1.0], {options})
    state = simulation.run(seed=1)
    noise = tf.constant(state.white_noise.block)
    with tf.GradientTape() as tape:
        tape.watch(noise)
        density = simulation.run(white_noise=noise).density()
        loss = tf.reduce_sum(density.block**2)
    assert tf.reduce_all(tf.math.is_finite(tape.gradient(loss, noise)))
    fpm.power_spectrum(density)
    simulation.lpt(seed=1)
    return traces - before, psutil.Process().memory_info().rss

results = [simulate(100.0 + 1.5 * number) for number in range(24)]
assert results[0][0] > 10, results
assert not any(new for new, _ in results[2:]), results
assert results[-1][1] < 1.02 * results[10][1], results
"""


@pytest.mark.parametrize(
    ("kernels", "options"),
    [("portable", ""), pytest.param("compiled", "force_gradient='spectral'", marks=needs_library)],
)
def test_a_box_size_costs_no_compilation_and_no_memory(kernels: str, options: str) -> None:
    """After the second size nothing is traced; after the tenth memory grows by less than 2 %."""
    program = MANY_SIZES.replace("{options}", options)
    environment = {**os.environ, "FLOWPM_KERNELS": kernels}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=600)


def test_a_function_for_all_sizes_is_lowered_once():
    """A symmetric force is its own adjoint; boxes of other sizes have the same function."""
    mesh = ProcessMesh("row:1")
    forces = [Gravity(ParticleMesh(Box((8, 8, 8), (size,) * 3, mesh), 1, 2)) for size in (8.0, 9.0)]
    functions = [each._function for g in forces for each in (g.field, g.field_adjoint)]
    assert all(each is functions[0] for each in functions)


def test_a_pyramid_force_refuses_cells_that_are_not_cubic():
    box = Box((32, 32, 32), (32.0, 32.0, 64.0), ProcessMesh("row:1"))
    with pytest.raises(ValueError, match="are not cubic"):
        Gravity(ParticleMesh(box, 1, 2), ForceOptions(pyramid="1%"))
