"""What gpu_check.py times, on the devices that the ranks have."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmoflow.network.network import Network
from flowpm_dist.initial.conditions import noise_function
from gpu_checks import LAYOUT, cube, simulation_of
from meshimpl import ProcessMesh
from meshimpl.mesh_function import MeshFunction
from meshimpl.operations.fft import irfft3d, rfft3d

MESSAGE = 64 * 2**20
"""Size of a rank's message [bytes]."""


@dataclass(frozen=True)
class Timing:
    """Something that is timed.

    Attributes:
        name: of it, with its size.
        work: does it once, on all ranks together.
        amount: what it does, in `unit`s.
        unit: such as "GB", of which the table shows how many there are in a second.
    """

    name: str
    work: Callable[[], Any]
    amount: float
    unit: str


def all_timings(mesh: ProcessMesh, side: int) -> Iterator[Timing]:
    """Yields what is timed.

    Args:
        mesh: mesh of all ranks.
        side: cells along a side of the universe, and of the volume of the network at most 128.
    """
    grid = f"{side}^3"
    if mesh.size > 1:
        rows = MESSAGE // 4 // mesh.size * mesh.size
        x = tf.ones([rows])
        for name in ("allreduce", "alltoall"):
            call = tf.compat.v1.wrap_function(
                lambda y, name=name: tf.identity(getattr(mesh.world, name)(y)),
                [tf.TensorSpec(x.shape, x.dtype)],
            )
            work = functools.partial(call, x)
            yield Timing(f"{name} of 64 MiB a rank", work, MESSAGE / 1e9, "GB")
    spec = {"x": (cube(side), tf.float32)}
    pair = MeshFunction(lambda _, x: irfft3d(rfft3d(x), cube(side)), mesh, LAYOUT, spec)
    field = tf.random.stateless_normal(pair.impl.slice_shape(cube(side)), [1, 2])
    yield Timing(f"FFT and back, {grid}", functools.partial(pair, field), side**3 / 1e6, "Mcell")
    simulation = simulation_of(mesh, "float32", side, steps=5)
    noise = noise_function(simulation.box)(1)
    amount = 5 * side**3 / 1e6

    def run() -> tf.Tensor:
        return simulation.run(white_noise=noise).density().block

    def gradient() -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(noise)
            loss = tf.reduce_sum(tf.square(run()))
        return tape.gradient(loss, noise)

    unit = "Mparticle steps"
    yield Timing(f"run of 5 steps, {grid}", run, amount, unit)
    yield Timing(f"gradient through 5 steps, {grid}", gradient, amount, unit)
    width = min(side, 128)
    network = Network("sc18-periodic", mesh, width=width, batch=1)
    volume = tf.ones([1, *(width // mesh.axis_size(axis) for axis in ("row", "col")), width])
    step = functools.partial(network.step, volume, np.zeros([1, 3], np.float32), np.arange(1), 0)
    yield Timing(f"training step of sc18-periodic, {width}^3", step, 1.0, "volumes")


def seconds(mesh: ProcessMesh, work: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Returns the seconds of a first call, and the median of those after it."""
    taken = []
    for _ in range(repeats + 1):
        mesh.barrier()
        began = time.perf_counter()
        result = work()
        tf.test.experimental.sync_devices()
        taken.append(time.perf_counter() - began)
        del result
    return taken[0], statistics.median(taken[1:])


def peak_memory(gpus: Sequence[Any]) -> int:
    """Returns the most memory of this rank's GPU that tensors have taken [bytes]; 0 without one."""
    return int(tf.config.experimental.get_memory_info("GPU:0")["peak"]) if gpus else 0
