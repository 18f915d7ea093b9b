"""A run as a part of a `tf.function` on one rank, with what follows from it and its gradient."""

import numpy as np
import pytest
import tensorflow as tf

import flowpm_dist as fpm
from flowpm_dist.evolution.observers import Observer
from flowpm_dist.statistics import binned_power
from meshimpl.tapes import reaches_arguments

N = 8
STEPS = fpm.scale_factor_steps(0.1, 1.0, 3)
PLANCK = fpm.Cosmology.planck18()


def simulation(size=32.0, **options):
    return fpm.Simulation(PLANCK, N, size, STEPS, precision="float64", **options)


KINDS = {"inside": {}, "around": {"integrator": "bullfrog", "mesh_factor": 2}}


@pytest.mark.parametrize("tape", KINDS)
def test_value_and_gradient_are_those_of_eager_calls(tape):
    """By the white noise and parameters; the tape inside the function, or around it and a batch."""
    sim = simulation(**KINDS[tape])
    shape = [N, N, N] if tape == "inside" else [2, N, N, N]
    noise = tf.random.stateless_normal(shape, [1, 2], dtype=tf.float64)
    omega, sigma8 = tf.constant(0.3, tf.float64), tf.constant(0.8, tf.float64)

    def loss(noise, omega, sigma8):
        cosmology = PLANCK.replace(Omega_m=omega, sigma8=sigma8)
        state = sim.run(white_noise=noise, cosmology=cosmology)
        return tf.reduce_sum(state.density().block ** 2)

    def gradient(function, *inputs):
        with tf.GradientTape() as watching:
            watching.watch(inputs)
            value = function(*inputs)
        return value, *watching.gradient(value, inputs)

    inputs = noise, omega, sigma8
    if tape == "inside":
        found = tf.function(lambda *inputs: gradient(loss, *inputs), autograph=False)(*inputs)
    else:
        found = gradient(tf.function(loss, autograph=False), *inputs)
    for one, other in zip(found, gradient(loss, *inputs), strict=True):
        assert np.abs(other).max() > 0
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-11 * np.abs(other).max())


def test_neutrinos_that_the_simulation_does_not_have():
    """Its own universe says which states are kept; the run's force has other coefficients."""
    sim, massive = simulation(), PLANCK.replace(m_nu=0.2, radiation=True)
    noise = tf.random.stateless_normal([N, N, N], [7, 8], dtype=tf.float64)

    def gradient(noise):
        with tf.GradientTape() as tape:
            tape.watch(noise)
            state = sim.run(white_noise=noise, cosmology=massive)
            loss = tf.reduce_sum(state.displacement.block**2)
        return tape.gradient(loss, noise)

    found = tf.function(gradient, autograph=False)(noise)
    np.testing.assert_allclose(found, gradient(noise), rtol=0, atol=1e-10)


@pytest.mark.parametrize("pyramid", ["off", "1%"])
def test_one_function_may_hold_boxes_of_two_sizes(pyramid):
    """Each with its own wavenumbers and cells; and what is not traced is as before."""
    n = N if pyramid == "off" else 16
    small, large = (
        fpm.Simulation(PLANCK, n, size, STEPS, precision="float64", pyramid=pyramid)
        for size in (32.0, 64.0)
    )
    noise = tf.random.stateless_normal([n, n, n], [3, 4], dtype=tf.float64)

    def both(noise):
        return [sim.run(white_noise=noise).displacement.block for sim in (small, large, small)]

    traced = tf.function(both, autograph=False)(noise)
    expected = both(noise)
    for one, other in zip(traced, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
    assert np.abs(traced[0] - traced[1]).max() > 0.1


@pytest.mark.parametrize("integrator", ["fastpm", "bullfrog", "cola"])
def test_states_at_several_times(integrator):
    """Their power in bins, its gradients by noise and parameter, and states with the last one."""
    sim = simulation(integrator=integrator)
    noise = tf.random.stateless_normal([N, N, N], [1, 2], dtype=tf.float64)
    times = [0.73, 0.4, 1.0]
    inputs = [noise, *([tf.constant(0.3, tf.float64)] if integrator == "bullfrog" else [])]

    def gradient(noise, *omega):
        cosmology = PLANCK.replace(**dict(zip(["Omega_m"], omega, strict=False)))
        start = {"white_noise": noise, "cosmology": cosmology}
        with tf.GradientTape() as tape:
            tape.watch([noise, *omega])
            power = sim.run(
                **start, outputs=times, on_output=lambda state: binned_power(state.density())
            )
            loss = tf.reduce_sum(tf.math.log(tf.stack(power)))
        return [tf.stack(power), *tape.gradient(loss, [noise, *omega])]

    def states(noise):
        last, (early, late) = sim.run(white_noise=noise, observe=sim.states_at(times[:2]))
        return [state.displacement.block for state in (last, early, late)]

    for function, given in ((gradient, inputs), (states, [noise])):
        found = tf.function(function, autograph=False)(*given)
        for one, other in zip(found, function(*given), strict=True):
            assert np.abs(other).max() > 0
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-11 * np.abs(other).max())


def test_what_outputs_must_not_depend_on():
    """A tape around the function may watch its arguments, which an evolution knows nothing of."""
    sim, noise = simulation(), tf.random.stateless_normal([N, N, N], [1, 2], dtype=tf.float64)
    bias = tf.constant(2.0, tf.float64)

    def inside(noise, bias):
        made = sim.run(
            white_noise=noise,
            outputs=[0.5],
            on_output=lambda state: bias * binned_power(state.density()),
        )
        return tf.reduce_sum(made[0])

    def afterwards(noise, bias):
        made = sim.run(
            white_noise=noise,
            outputs=[0.5],
            on_output=lambda state: binned_power(state.density()),
        )
        return bias * tf.reduce_sum(made[0])

    def gradient(function):
        with tf.GradientTape() as tape:
            tape.watch([noise, bias])
            value = function(noise, bias)
        return [value, *tape.gradient(value, [noise, bias])]

    with pytest.raises(ValueError, match="would be lost; use them on what run returns"):
        gradient(tf.function(inside, autograph=False))
    captured = tf.function(lambda noise, _: inside(noise, bias), autograph=False)
    with pytest.raises(ValueError, match="gradients to those would be lost"):
        gradient(captured)
    np.testing.assert_allclose(captured(noise, bias), afterwards(noise, bias), rtol=1e-12)
    found = gradient(tf.function(afterwards, autograph=False))
    for one, other in zip(found, gradient(afterwards), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-11 * np.abs(other).max())


def test_which_tensors_reach_arguments():
    """By a branch and a captured symbol as well; not by what has no gradient."""
    outside = tf.constant(3.0)
    found = []

    def trace(w, own):
        with tf.init_scope():
            known = tf.constant(1.0)
        spectrum = tf.math.real(tf.signal.fft(tf.complex(w, w)[tf.newaxis]))
        for tensors in (
            [w * 2.0],
            [spectrum],
            [own * 2.0, known],
            [tf.stop_gradient(w)],
            [outside + own],
        ):
            found.append(reaches_arguments(tensors, [own]))
        mask = tf.cast(w > 0, tf.float32)
        found.append(reaches_arguments([mask * own], [own]))

        def branch():
            found.append(reaches_arguments([w * outside], []))
            return w

        return tf.cond(own > 0, branch, lambda: own)

    tf.function(trace, autograph=False)(outside, outside)
    assert found == [True, True, False, False, False, False, True]


def test_statistics_that_are_arrays_are_refused():
    sim = simulation()

    def power():
        made = sim.run(seed=1, outputs=[0.5], on_output=lambda s: fpm.power_spectrum(s.density()))
        return made[0].power

    with pytest.raises(RuntimeError, match="a statistic whose result is an array was called while"):
        tf.function(power, autograph=False)()


def test_little_else_looks_into_a_run_in_a_graph():
    """But a state may be where it begins."""
    sim = simulation()

    class Own(Observer):
        inputs, kicks = (), frozenset([1])

        def measurements(self, kick):
            return []

        def results(self, measured):
            return None

    def own(inputs):
        return Own()

    later = sim.with_steps([1.0, 1.1])
    state = sim.run(seed=1)

    def go_on():
        return later.run(particles=state).displacement.block

    expected = go_on()
    np.testing.assert_allclose(tf.function(go_on)(), expected, rtol=0, atol=1e-12)
    states = sim.states_at([0.5])
    for words in (
        {"progress": print},
        {"observe": print},
        {"observe": own},
        {"observe": [states, own]},
    ):
        traced = tf.function(lambda words=words: sim.run(seed=1, **words), autograph=False)
        with pytest.raises(RuntimeError, match=f"{next(iter(words))}: only states at several"):
            traced()


@pytest.mark.parametrize("name", ["run", "lpt"])
def test_what_is_not_finite_ends_the_function(name):
    """With the message that an eager call has; the next call works again."""
    sim = simulation()
    make = getattr(sim, name)
    traced = tf.function(lambda noise: make(white_noise=noise).displacement.block, autograph=False)
    noise = tf.random.stateless_normal([N, N, N], [5, 6], dtype=tf.float64)
    traced(noise)
    message = "the displacement has values that are not finite"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        traced(noise * np.nan)
    np.testing.assert_allclose(
        traced(noise), make(white_noise=noise).displacement.block, rtol=0, atol=1e-12
    )
