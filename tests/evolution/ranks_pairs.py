"""Steps in one graph: to the bit what single operations give, with gradients and messages."""

from __future__ import annotations

import functools
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import tensorflow as tf
from ranks import SHAPES, SIZE

import flowpm_dist as fpm
from flowpm_dist.evolution import nbody, pairs
from flowpm_dist.evolution.adjoints import ReversibleAdjoint, backward_pass
from flowpm_dist.evolution.integrators import FastPM
from flowpm_dist.evolution.operations import kicked, undo_drift
from flowpm_dist.evolution.pairs import Pairs
from flowpm_dist.grid.field import Field
from flowpm_dist.particle_mesh.cloud_in_cell import HaloError
from flowpm_dist.particle_mesh.gravity import Gravity

pytestmark = [
    pytest.mark.ranks(1, 2),
    pytest.mark.grappler,
    pytest.mark.timeout(180, method="thread"),
]
N = 8
KEEPING = {keep: ReversibleAdjoint(keep_fields=keep) for keep in (True, False)}
STEPS = fpm.scale_factor_steps(0.1, 1.0, 5)
MESH = SHAPES[SIZE][-1]


@functools.cache
def simulation(integrator="bullfrog", **options):
    more = {"precision": "float64", "mesh": MESH, **options}
    return fpm.Simulation(
        fpm.Cosmology.planck18(), N, 4.0 * N, STEPS, integrator=integrator, **more
    )


@pytest.fixture
def calls(monkeypatch):
    """The number of pairs of each call of a graph."""
    made = []
    for name in ("forward", "backward"):
        original = getattr(Pairs, name)

        def counted(self, *args, original=original, **kwargs):
            factors = args[2] if original.__name__ == "forward" else args[1]
            if factors.shape[-2] > 2:  # a single pair is made where a run compiles
                made.append((original.__name__, factors.shape[-2] // 2))
            return original(self, *args, **kwargs)

        monkeypatch.setattr(Pairs, name, counted)
    return made


def blocks(state):
    return [state.displacement.block.numpy(), state.velocity.block.numpy()]


SCHEMES = {
    "bullfrog": {},
    "fastpm": {"force_gradient": "spectral"},
    "cola": {},
}


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("integrator", SCHEMES)
def test_the_same_bits_as_single_operations(calls, monkeypatch, integrator):
    """A callback after each step asks for single operations."""
    sim = simulation(integrator, **SCHEMES[integrator])
    sim.run(seed=1, progress=print)  # compiled
    kicks = []
    monkeypatch.setattr(nbody, "kicked", lambda *a, **o: kicks.append(a) or kicked(*a, **o))
    together = sim.run(seed=1)
    assert calls == [("forward", 5)] and not kicks
    seen = []
    apart = sim.run(seed=1, progress=lambda *step: seen.append(step[0]))
    assert seen == [1, 2, 3, 4, 5] and len(calls) == 1
    for one, other in zip(blocks(together), blocks(apart), strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(together.timings["steps"]) == 5


@pytest.mark.parametrize(
    ("integrator", "keep"),
    [
        ("bullfrog", True),
        ("fastpm", False),
        ("cola", True),
        pytest.param("bullfrog", False, marks=pytest.mark.ranks(1)),
        pytest.param("fastpm", True, marks=pytest.mark.ranks(1)),
        pytest.param("cola", False, marks=pytest.mark.ranks(1)),
    ],
)
def test_the_same_gradient(calls, monkeypatch, integrator, keep):
    """By the white noise and a parameter, with neutrinos whose force has coefficients."""
    sim = simulation(integrator, adjoint=KEEPING[keep], **SCHEMES[integrator])
    noise = sim.run(seed=2).white_noise.block
    monkeypatch.setattr(Gravity, "paint", property(paint := Mock(wraps=Gravity.paint.func)))

    def gradient(**options):
        omega = tf.constant(0.31, tf.float64)
        with tf.GradientTape() as tape:
            tape.watch([noise, omega])
            cosmology = fpm.Cosmology.planck18().replace(Omega_m=omega, m_nu=0.1, radiation=True)
            state = sim.run(white_noise=noise, cosmology=cosmology, **options)
            loss = tf.reduce_sum(state.density().block ** 2)
        paint.reset_mock()
        return [x.numpy() for x in tape.gradient(loss, [noise, omega])]

    together = gradient()
    assert {kind for kind, _ in calls} == {"forward", "backward"}
    calls.clear()
    reported = gradient(progress=lambda *_: None)
    assert [kind for kind, _ in calls] == ["backward"]
    monkeypatch.setattr(pairs, "LARGEST", 0)
    calls.clear()
    apart = gradient()
    assert not calls and bool(paint.call_count) != keep
    for one, *others in zip(together, reported, apart, strict=True):
        assert np.abs(one).max() > 0
        for other in others:
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("options", [{}, {"mesh_factor": 2, "force_gradient": "spectral"}])
def test_fields_that_are_kept_or_computed_again(options):
    """The gradient is the same, but for the rounding of positions in the backward pass."""
    found = []
    for keep in KEEPING:
        sim = simulation("fastpm", adjoint=KEEPING[keep], **options)
        noise = sim.run(seed=2).white_noise.block
        with tf.GradientTape() as tape:
            tape.watch(noise)
            loss = tf.reduce_sum(sim.run(white_noise=noise).density().block ** 2)
        found.append(tape.gradient(loss, noise).numpy())
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=1e-10 * np.abs(found[0]).max())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("where", [0, 4])
def test_a_particle_beyond_the_halo_on_the_way_back(monkeypatch, where):
    """Nothing is painted there that would tell it: all ranks raise it at the end."""
    sim = simulation("fastpm", halo=3, adjoint=KEEPING[True])
    noise = sim.run(seed=2).white_noise.block
    monkeypatch.setattr(pairs, "LARGEST", 0)

    drifts = []

    def far(state, *args):
        """A particle of one rank strays once, before the state that the forward pass kept."""
        slopes = undo_drift(state, *args)
        if len(drifts) == where and sim.box.mesh.rank == 0:
            state.x = state.x + 16.0
        drifts.append(state)
        return slopes

    with tf.GradientTape() as tape:
        tape.watch(noise)
        loss = tf.reduce_sum(sim.run(white_noise=noise).displacement.block ** 2)
    monkeypatch.setattr(backward_pass, "undo_drift", far)
    with pytest.raises(HaloError, match="backward pass to step .* halo of 3; halo = 4 would do"):
        tape.gradient(loss, noise)


def test_a_long_run_takes_several_calls(calls, monkeypatch):
    """A call has no more pairs than its graph was made for."""
    batch = 2 * SIZE
    mesh = f"replica:{SIZE}"
    sim = simulation("bullfrog", mesh=mesh)
    whole = sim.run(seed=list(range(batch)))
    monkeypatch.setattr(Pairs, "most", 2)
    parts = sim.run(seed=list(range(batch)))
    assert [count for _, count in calls] == [5, 2, 2]  # the fifth pair by single operations
    for one, other in zip(blocks(whole), blocks(parts), strict=True):
        np.testing.assert_array_equal(one, other)


def test_large_boxes_take_fewer_pairs_a_call(calls, monkeypatch):
    """A call is not longer than a signal, or an error of another rank, may wait."""
    sim = simulation("bullfrog")
    whole = sim.run(seed=1)
    monkeypatch.setattr(pairs, "LARGEST", N**3 // SIZE)
    assert sim.run(seed=1) and calls.pop() == ("forward", 5)
    monkeypatch.setattr(pairs, "OF_LARGEST", 3)
    parts = sim.run(seed=1)
    assert [count for _, count in calls] == [5, 3, 2]
    for one, other in zip(blocks(whole), blocks(parts), strict=True):
        np.testing.assert_array_equal(one, other)
    monkeypatch.setattr(pairs, "LARGEST", N**3 // SIZE - 1)
    calls.clear()
    assert sim.run(seed=1) and not calls


@pytest.mark.ranks(2)
def test_ranks_choose_alike(calls):
    """A bar on one rank alone, and universes of two replicas of which one keeps other states."""
    sim = simulation("fastpm", mesh="replica:2")
    sim.run(seed=[1, 2], progress=print if sim.box_of_replicas.mesh.rank == 0 else None)
    assert not calls
    sim = simulation("fastpm", mesh="replica:2", adjoint=ReversibleAdjoint(max_error_growth=6.0))
    noise = sim.run(seed=[1, 2]).white_noise.block
    omega = tf.constant([0.1, 0.9], tf.float64)
    with tf.GradientTape() as tape:
        tape.watch(noise)
        universes = [sim.cosmology.replace(Omega_m=omega[i]) for i in range(2)]
        state = sim.run(white_noise=Field(noise, sim.box_of(2)), cosmology=universes)
        loss = tf.reduce_sum(state.displacement.block**2)
    assert np.isfinite(tape.gradient(loss, noise)).all()


@pytest.mark.ranks(2)
def test_a_particle_beyond_the_halo_is_named_at_its_step(monkeypatch):
    """As by single operations, though the steps after it have been made."""
    sim = simulation("fastpm", halo=1)
    messages = []
    for largest in (pairs.LARGEST, 0):
        monkeypatch.setattr(pairs, "LARGEST", largest)
        with pytest.raises(HaloError) as raised:
            sim.run(seed=1)
        messages.append(str(raised.value).partition(": ")[2])
    assert messages[0] == messages[1] and "beyond the halo of 1" in messages[0]


def test_what_is_not_finite_is_named():
    """The particles given at the start, and the first step that paints them."""
    sim = simulation("fastpm")
    x = np.zeros([N, N, N, 3])
    x[0, 0, 0, 0] = np.nan
    sim.run(particles=(np.zeros_like(x), np.zeros_like(x)))  # compiled
    with pytest.raises(FloatingPointError, match="not finite"):
        sim.run(particles=(x, np.zeros_like(x)))


@pytest.mark.ranks(1)
def test_a_run_may_go_on_from_its_end():
    """In a process that has compiled nothing for it."""
    sim = fpm.Simulation(fpm.Cosmology.planck18(), N, 37.0, STEPS, precision="float64")
    ends = []
    state = sim.run(seed=1, after_step=ends.append)
    other = fpm.Simulation(fpm.Cosmology.planck18(), N, 37.5, STEPS, precision="float64")
    resumed = other.run(seed=1, resume=lambda box: ends[-1])
    np.testing.assert_array_equal(resumed.displacement.block, state.displacement.block)


class Scaled(FastPM):
    """FastPM whose first kick depends on more than its options."""

    weights: list[float] = [1.0]

    def schedule(self, growth, edges):
        made = super().schedule(growth, edges)
        first = np.arange(made.factors.shape[0])[:, np.newaxis] == 0
        return replace(made, factors=made.factors * tf.where(first, SCALE, 1.0))


SCALE = tf.Variable(1.0, dtype=tf.float64)


@pytest.mark.ranks(1)
def test_a_scheme_may_read_what_it_likes():
    """Its factors are asked for in each run, and have gradients."""
    sim = fpm.Simulation(fpm.Cosmology.planck18(), N, 32.0, STEPS, integrator=Scaled())
    sums = []
    for scale in (1.0, 1.5):
        SCALE.assign(scale)
        with tf.GradientTape() as tape:
            sums.append(tf.reduce_sum(sim.run(seed=1).displacement.block ** 2))
        slope = tape.gradient(sums[-1], SCALE)
        assert slope is not None and slope.numpy() != 0
    assert sums[0].numpy() != sums[1].numpy()
