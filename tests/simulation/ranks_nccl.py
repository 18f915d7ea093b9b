"""A run whose exchanges go through NCCL's functions has the bits of one that Horovod exchanges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from ranks import nccl_engine

import flowpm_dist as fpm
from meshimpl import ProcessMesh, engine, process_mesh

pytestmark = pytest.mark.ranks(2, 4)


def run_and_gradient(mesh: ProcessMesh) -> list[np.ndarray]:
    """On four ranks, which take long to build their graphs, without the gradient."""
    steps = fpm.scale_factor_steps(0.1, 1.0, 3)
    sim = fpm.Simulation(fpm.Cosmology.planck18(), 8, 64.0, steps, mesh=mesh, halo=4)
    noise = sim.run(seed=1).white_noise.block
    with tf.GradientTape() as tape:
        if mesh.size == 2:
            tape.watch(noise)
        density = sim.run(white_noise=noise).density().block
        loss = tf.reduce_sum(density**2)
    slopes = [tape.gradient(loss, noise)] if mesh.size == 2 else []
    return [x.numpy() for x in (density, *slopes)]


def test_a_run_and_its_gradient(mesh: ProcessMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    exchanged: list[str] = []
    for kind in (engine.HorovodEngine, engine.NcclEngine):

        def counted(
            self: engine.HorovodEngine,
            *arguments: Any,
            exchange: Callable[..., tf.Tensor] = kind.exchange,
            name: str = kind.__name__,
        ) -> tf.Tensor:
            exchanged.append(name)
            return exchange(self, *arguments)

        monkeypatch.setattr(kind, "exchange", counted)
    results = []
    for current in (engine.current(), nccl_engine()):
        monkeypatch.setattr(engine, "current", lambda current=current: current)
        monkeypatch.setattr(process_mesh, "_CACHES", {})
        results.append(run_and_gradient(mesh))
        assert {*exchanged} == {type(current).__name__}
        exchanged.clear()
    for found, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(found, expected)
