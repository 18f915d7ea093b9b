"""Messages in float16: their rounding, their adjoints, and a whole run against exact messages."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from reference import relative_rms

import flowpm_dist as fpm
from flowpm_dist.grid.box import Box
from flowpm_dist.particle_mesh.cloud_in_cell import ParticleMesh
from flowpm_dist.particle_mesh.gravity import Gravity
from meshimpl import ProcessMesh
from meshimpl.collectives import SCALE, halved, restored

GRID, SIDES = (8, 12, 10), (16.0, 24.0, 20.0)
HALF_ULP = 2.0**-11  # of float16, relative


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
@pytest.mark.parametrize("size", [1e-28, 1e-6, 1.0, 3e9, 1e37])
def test_pieces_of_any_size_are_rounded_to_eleven_bits(dtype: type, size: float) -> None:
    """Numbers down to 2^-29 of the largest, in each piece with a scale of its own."""
    random = np.random.default_rng(1)
    shape = (3, 4, 50, 2)
    numbers = random.choice([-1, 1], shape) * 2.0 ** random.uniform(-29, 0, shape)
    pieces = (size * numbers / [[[[1]]], [[[7]]], [[[1.3]]]]).astype(np.float32)
    pieces = pieces.view(np.complex64) if dtype is np.complex64 else pieces
    carried = halved(tf.constant(pieces))
    assert carried.dtype == tf.float16 and carried.shape == (3, 400 + SCALE)
    found = restored(carried, pieces.shape, tf.as_dtype(dtype)).numpy()
    error, exact = (x.view(np.float32) for x in (found - pieces, pieces))
    assert (abs(error) <= 1.001 * HALF_ULP * abs(exact)).all()


@pytest.mark.ranks(1)
def test_pieces_of_zeros_and_of_what_is_not_finite() -> None:
    pieces = tf.constant([[0.0, 0.0], [1.0, np.nan], [np.inf, 1.0], [4.0, 8.0]])
    found = restored(halved(pieces), pieces.shape, tf.float32).numpy()
    assert (found[0] == 0).all() and not np.isfinite(found[1:3]).all(axis=1).any()
    np.testing.assert_array_equal(found[3], [4.0, 8.0])
    with pytest.raises(TypeError, match="float32 or complex64, not float64"):
        halved(tf.zeros([2, 2], tf.float64))


def functions(pm: ParticleMesh) -> dict[str, Any]:
    """The potential of a particle mesh, its halos, and their adjoints."""
    box = pm.box
    padded = pm.padded(pm.mesh.shape)
    return {
        "potential": Gravity(pm).field,
        "potential's adjoint": Gravity(pm).field_adjoint,
        "halo": box.function(lambda _, f: pm.with_halo(f), a=box.shape),
        "halo's adjoint": box.function(lambda _, f: pm.without_halo(f, box.shape), a=padded),
    }


@pytest.mark.ranks(1, 4)
def test_operations_and_adjoints(mesh: ProcessMesh) -> None:
    """Rounded as the cotangent is: a gradient is to the bit the adjoint operation applied.

    On one rank nothing is sent, and nothing is rounded, but for the mean that the potential is
    freed of.
    """
    random = np.random.default_rng(2)
    box = Box(GRID, SIDES, mesh)
    half, exact = (functions(ParticleMesh(box, 1, 2, chosen)) for chosen in (True, False))
    for name in ("potential", "halo"):
        density = tf.constant((1 + 0.1 * random.normal(size=GRID))[box.place], tf.float32)
        with tf.GradientTape() as tape:
            tape.watch(density)
            found = half[name](density)
        cotangent = tf.constant(random.normal(size=found.shape), tf.float32)
        gradient = tape.gradient(found, density, cotangent)
        np.testing.assert_array_equal(gradient, half[f"{name}'s adjoint"](cotangent))
        for a, b in (
            (found, exact[name](density)),
            (gradient, exact[f"{name}'s adjoint"](cotangent)),
        ):
            a, b = (mesh.world.allgather(x).numpy() for x in (a, b))
            error = relative_rms(a, b)
            if mesh.size > 1:
                assert 1e-5 < error < 2 * HALF_ULP, name
            else:
                assert error < 1e-5, name


@functools.cache
def simulation(mesh: ProcessMesh, **options: str) -> fpm.Simulation:
    edges = [0.1, 0.4, 0.7, 1.0]
    return fpm.Simulation(
        fpm.Cosmology.planck18(), 16, 48.0, edges, mesh=mesh, halo=8, lpt_order=1, **options
    )


NOISE, WEIGHTS = np.random.default_rng(3).normal(size=(2, 16, 16, 16)).astype(np.float32)


@pytest.mark.ranks(2)
def test_a_run(line: ProcessMesh) -> None:
    """docs/measurements/scaling.md has the errors of longer ones."""
    exact, half = (
        simulation(line, exchange=x).run(white_noise=NOISE).density().numpy()
        for x in ("exact", "float16")
    )
    assert 1e-5 < relative_rms(half, exact) < 1e-3


@pytest.mark.long
@pytest.mark.ranks(2)
def test_gradients_of_a_run(line: ProcessMesh) -> None:
    """Errors of the gradient, by either adjoint, are in docs/measurements/scaling.md."""

    def gradient(**options: str) -> np.ndarray:
        sim = simulation(line, **options)
        block = tf.constant(NOISE[sim.box.place])
        with tf.GradientTape() as tape:
            tape.watch(block)
            density = sim.run(white_noise=block).density().block
            loss = tf.reduce_sum(density * WEIGHTS[sim.box.place])
        return sim.box.whole(tape.gradient(loss, block), sim.box.shape)

    exact = gradient(exchange="exact")
    for adjoint in ("reversible", "direct"):
        found = gradient(exchange="float16", adjoint=adjoint)
        assert 1e-4 < relative_rms(found, exact) < 3e-2, adjoint
