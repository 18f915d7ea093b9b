"""A run whose exchanges go through NCCL's functions has the bits of one that Horovod exchanges."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from ranks import nccl_engine

import flowpm_dist as fpm
from meshimpl import ProcessMesh, engine, process_mesh

pytestmark = pytest.mark.ranks(2)


def run_and_gradient(mesh: ProcessMesh) -> list[np.ndarray]:
    steps = fpm.scale_factor_steps(0.1, 1.0, 3)
    sim = fpm.Simulation(fpm.Cosmology.planck18(), 8, 64.0, steps, mesh=mesh, halo=4)
    with tf.GradientTape() as tape:
        noise = sim.run(seed=1).white_noise.block
        tape.watch(noise)
        density = sim.run(white_noise=noise).density().block
        loss = tf.reduce_sum(density**2)
    return [density.numpy(), tape.gradient(loss, noise).numpy()]


def test_a_run_and_its_gradient(mesh: ProcessMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, exchange = [], engine.HorovodEngine.exchange

    def counted(self: engine.HorovodEngine, *arguments: object) -> tf.Tensor:
        calls.append(arguments)
        return exchange(self, *arguments)  # type: ignore[arg-type]

    nccl = nccl_engine()
    monkeypatch.setattr(engine.HorovodEngine, "exchange", counted)
    monkeypatch.setattr(process_mesh, "_CACHES", {})
    by_horovod = run_and_gradient(mesh)
    assert calls
    calls.clear()
    monkeypatch.setattr(process_mesh, "_CACHES", {})
    monkeypatch.setattr(engine, "current", lambda: nccl)
    for found, expected in zip(run_and_gradient(mesh), by_horovod, strict=True):
        np.testing.assert_array_equal(found, expected)
    assert not calls
