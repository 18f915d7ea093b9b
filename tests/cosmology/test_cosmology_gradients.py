"""Derivatives by every parameter against central differences, and no NaN at the special points."""

import numpy as np
import pytest
import tensorflow as tf
from derivatives import slope_at_zero
from pmwd_tables import InterpolatedGrowth, PmwdPower

from flowpm_dist.cosmology import Cosmology, Growth, LinearPower

K = np.array([0.0, 1e-3, 0.02, 0.1, 0.5, 3.0])
A = np.array([0.1, 0.145, 0.6, 1.0])
WEIGHTS = np.random.default_rng(1).normal(size=100)


def observables(cosmology, as_pmwd=False):
    """A vector of order 1 that everything a simulation needs enters."""
    growth = Growth(cosmology)
    power = (PmwdPower if as_pmwd else LinearPower)(cosmology, growth)
    if as_pmwd:
        growth = InterpolatedGrowth(growth, [0.1, 0.19, 0.55, 1.0])
    parts = [
        growth.background.e(A) / 10,
        growth.background.dlne_dlna(A),
        growth.d1(A),
        growth.d1_dlna(A),
        growth.d2(A),
        growth.d2_dlna(A),
        growth.g_drift(A),
        growth.g_kick(A),
        growth.f1(A),
        growth.d2_dlna(A) / growth.d2(A),
        power(K) / 1e4,
        power.without_growth(K) / 1e4,
        power.sigma8()[tf.newaxis],
        power.potential(K) * K**3 * 1e8,
    ]
    return tf.concat(parts, axis=0)


def scalar(cosmology, as_pmwd):
    vector = observables(cosmology, as_pmwd)
    return tf.reduce_sum(vector * WEIGHTS[: vector.shape[0]])


def gradient(cosmology, function):
    parameters = cosmology.parameters()
    del parameters["f_NL"]  # which changes none of this
    with tf.GradientTape() as tape:
        tape.watch(parameters)
        value = function(cosmology.replace(**parameters))
    return tape.gradient(value, parameters, unconnected_gradients="zero")


LCDM = Cosmology.planck18().replace(A_s=2.1064e-9)
MASSIVE = LCDM.replace(radiation=True, m_nu=0.2)
EVOLVING = Cosmology(0.28, 0.045, 0.7, 0.95, sigma8=0.75, w0=-0.9, wa=0.2)


@pytest.mark.parametrize(
    ("cosmology", "as_pmwd"),
    [(LCDM, False), (EVOLVING, False), (EVOLVING, True), (MASSIVE, False)],
    ids=["A_s, w = -1", "sigma8, w0wa", "sigma8, w0wa, as pmwd", "massive neutrinos"],
)
def test_gradient_by_each_parameter_is_the_difference(cosmology, as_pmwd):
    gradients = gradient(cosmology, lambda c: scalar(c, as_pmwd))
    assert len(gradients) == (12 if cosmology.radiation else 11)
    for name, derivative in gradients.items():
        value = getattr(cosmology, name)
        step = 1e-3 * (abs(value) or 1.0)
        if name in ("T_cmb", "k_pivot", "m_nu"):
            step *= 3

        def at(shift, name=name, value=value, step=step):
            return float(scalar(cosmology.replace(**{name: value + shift * step}), as_pmwd))

        # Fourth-order central difference: errors of 1e-12 from the step, 1e-12 from rounding, of
        # which the integrals over neutrinos have more.
        difference = slope_at_zero(at, 1) / step
        rounding = 5e-9 if cosmology.radiation else 1e-9
        assert derivative.numpy() == pytest.approx(difference, rel=1e-7, abs=rounding), name


@pytest.mark.parametrize(
    "special",
    [
        LCDM,
        LCDM.replace(Omega_b=0.0),
        LCDM.replace(Omega_m=1.0),
        LCDM.replace(w0=-0.2),
        LCDM.replace(w0=-3.0, wa=-2.0),
    ],
    ids=["w = -1", "no baryons", "no dark energy", "w = -0.2", "phantom"],
)
def test_values_and_gradients_are_finite_at_special_points(special):
    assert np.all(np.isfinite(observables(special)))
    k = tf.constant(K)
    with tf.GradientTape() as tape:
        tape.watch(k)
        power = tf.reduce_sum(LinearPower(special)(k))
    assert np.all(np.isfinite(tape.gradient(power, k)))
    for name, derivative in gradient(special, lambda c: scalar(c, False)).items():
        assert np.isfinite(derivative), name


def test_gradient_in_a_graph_is_the_eager_one():
    eager = gradient(LCDM, lambda c: scalar(c, False))
    graph = tf.function(lambda: gradient(LCDM, lambda c: scalar(c, False)))()
    for name in eager:
        assert graph[name].numpy() == pytest.approx(eager[name].numpy(), rel=1e-9), name


def test_second_derivative_of_growth_exists():
    Omega_m = tf.constant(0.3, tf.float64)
    with tf.GradientTape() as outer:
        outer.watch(Omega_m)
        with tf.GradientTape() as inner:
            inner.watch(Omega_m)
            d1 = Growth(LCDM.replace(Omega_m=Omega_m)).d1(1.0)
        slope = inner.gradient(d1, Omega_m)
    curvature = outer.gradient(slope, Omega_m)

    def at(value):
        return float(Growth(LCDM.replace(Omega_m=value)).d1(1.0))

    difference = (at(0.301) - 2 * at(0.3) + at(0.299)) / 1e-6
    assert curvature.numpy() == pytest.approx(difference, rel=1e-4)


@pytest.mark.parametrize("name", ["A_s", "n_s", "sigma8"])
def test_camb_gradient_by_amplitude_and_tilt(name):
    cosmology = LCDM.replace(transfer="camb")
    if name == "sigma8":
        cosmology = cosmology.replace(sigma8=0.8)
    start, step = getattr(cosmology, name), 1e-3 * getattr(cosmology, name)
    value = tf.Variable(start, dtype=tf.float64)

    def total(parameter):
        return tf.reduce_sum(LinearPower(cosmology.replace(**{name: parameter}))(K))

    with tf.GradientTape() as tape:
        power = total(value)
    difference = (total(start + step) - total(start - step)) / (2 * step)
    # CAMB chooses its own steps anew for another n_s: its noise is the limit.
    assert tape.gradient(power, value).numpy() == pytest.approx(float(difference), rel=1e-4)


def test_camb_refuses_a_gradient_by_the_shape():
    Omega_m = tf.constant(LCDM.Omega_m, tf.float64)
    with tf.GradientTape() as tape:
        tape.watch(Omega_m)
        power = LinearPower(LCDM.replace(Omega_m=Omega_m, transfer="camb"))(0.1)
    with pytest.raises(LookupError, match="CAMB gives no derivative .* by Omega_m"):
        tape.gradient(power, Omega_m)
