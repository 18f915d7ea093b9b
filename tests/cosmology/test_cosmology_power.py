"""Linear power: pmwd's and CAMB's tables, normalisation, edges of the range, graph mode."""

import re
import sys

import numpy as np
import pytest
import tensorflow as tf
from pmwd_tables import PmwdPower
from reference import reference

from flowpm_dist.cosmology import (
    Cosmology,
    Growth,
    LinearPower,
    boltzmann_tables,
    sigma8,
)

EVOLVING = Cosmology(0.28, 0.045, 0.7, 0.95, A_s=2e-9, w0=-0.9, wa=0.2)
PLANCK = Cosmology.planck18().replace(A_s=2.1064e-9)
UNIVERSES = {"lcdm": PLANCK, "w0wa": EVOLVING}


@pytest.mark.parametrize("name", UNIVERSES)
def test_eisenstein_hu_is_pmwds(name):
    run = reference(f"pmwd_{name}_32")
    as_pmwd = PmwdPower(UNIVERSES[name])
    np.testing.assert_allclose(
        as_pmwd.without_growth(run["k"]), run["linear_power_unscaled"], rtol=1e-12
    )
    np.testing.assert_allclose(as_pmwd(run["k"]), run["linear_power_a1"], rtol=5e-8)
    # pmwd's chords between its nodes lie above the convex transfer function: 7e-4 in power.
    exact = LinearPower(UNIVERSES[name])
    np.testing.assert_allclose(
        exact.without_growth(run["k"]), run["linear_power_unscaled"], rtol=1e-3
    )
    # Its sigma8 uses the nodes alone, through a Hankel transform; ours is tested for convergence.
    assert exact.sigma8().numpy() == pytest.approx(run["sigma8"], rel=5e-6)


@pytest.mark.parametrize("name", UNIVERSES)
def test_camb_is_cambs(name):
    run, cosmology = reference("camb_linear_power"), UNIVERSES[name].replace(transfer="camb")
    power = LinearPower(cosmology)
    np.testing.assert_allclose(power(run[f"{name}_k"]), run[f"{name}_power"], rtol=1e-6)
    # CAMB's own sigma8 moves by 2e-4 with the wavenumbers that its integral stops at.
    assert power.sigma8().numpy() == pytest.approx(run[f"{name}_sigma8"], rel=3e-4)
    half = power(run[f"{name}_k"], 0.5) / power(run[f"{name}_k"])
    growth = Growth(cosmology)
    np.testing.assert_allclose(half, (growth.d1(0.5) / growth.d1(1.0)) ** 2, rtol=1e-12)


def test_eisenstein_hu_over_camb():
    k = [0.01, 0.05, 0.1, 0.2, 1, 5]
    ratio = LinearPower(UNIVERSES["lcdm"])(k) / LinearPower(
        UNIVERSES["lcdm"].replace(transfer="camb")
    )(k)
    # The numbers of tests/data/README.md, whose last digit is not firm.
    np.testing.assert_allclose(ratio, [0.996, 1.019, 1.049, 1.009, 1.003, 1.025], atol=2e-3)


@pytest.mark.parametrize("transfer", ["eisenstein-hu", "camb"])
def test_sigma8_normalises_and_comes_back(transfer):
    by_amplitude = PLANCK.replace(transfer=transfer)
    measured = sigma8(by_amplitude)
    by_sigma8 = LinearPower(by_amplitude.replace(sigma8=float(measured)))
    assert by_sigma8.A_s.numpy() == pytest.approx(by_amplitude.A_s, rel=1e-12)
    assert by_sigma8.sigma8(1.0).numpy() == pytest.approx(float(measured), rel=1e-12)
    k = np.geomspace(1e-3, 10, 20)
    np.testing.assert_allclose(by_sigma8(k), LinearPower(by_amplitude)(k), rtol=1e-12)


def test_sigma8_is_the_converged_integral():
    power = LinearPower(Cosmology.planck18())
    ln_k = np.linspace(np.log(1e-6), np.log(400), 300_001)
    k = np.exp(ln_k)
    x = 8 * k
    top_hat = np.where(x > 0.01, 3 * (np.sin(x) - x * np.cos(x)) / x**3, 1 - x**2 / 10)
    variance = np.trapezoid(power(k) * k**3 / (2 * np.pi**2) * top_hat**2, ln_k)
    assert power.sigma8().numpy() == pytest.approx(np.sqrt(variance), rel=1e-8)


@pytest.mark.parametrize("transfer", ["eisenstein-hu", "camb"])
def test_power_laws_at_the_ends_and_zero_at_zero(transfer):
    cosmology = Cosmology.planck18().replace(transfer=transfer)
    power = LinearPower(cosmology)
    assert power(0.0).numpy() == 0.0 and power.without_growth([[0.0, 0.1]]).shape == (1, 2)

    def slope(k):
        return float(tf.math.log(power(1.1 * k) / power(k)) / np.log(1.1))

    assert slope(1e-7) == pytest.approx(cosmology.n_s, abs=1e-3)
    assert slope(300.0) == pytest.approx(cosmology.n_s - 4, abs=0.45)  # logarithms from infall
    k = np.geomspace(1e-9, 1e4, 2000)
    assert np.all(np.isfinite(power(k))) and np.all(power(k) > 0)
    assert np.abs(np.diff(np.log(power(k)))).max() < 0.1  # no step where the table ends


def test_no_baryons_is_a_limit_not_a_hole():
    k = np.geomspace(1e-3, 10, 30)
    none = LinearPower(Cosmology.planck18().replace(Omega_b=0.0))(k)
    few = LinearPower(Cosmology.planck18().replace(Omega_b=1e-7))(k)
    np.testing.assert_allclose(none, few, rtol=1e-5)


def test_in_a_graph_and_in_single_precision_input():
    power = LinearPower(Cosmology.planck18())
    k = tf.constant([0.0, 0.01, 1.0], tf.float32)
    graph = tf.function(power)(k)
    assert graph.dtype == tf.float64
    np.testing.assert_allclose(graph, power(k), rtol=1e-14)


def test_camb_says_what_it_cannot_do(monkeypatch):
    by_camb = Cosmology.planck18().replace(transfer="camb")

    @tf.function
    def in_graph(Omega_m):
        return LinearPower(by_camb.replace(Omega_m=Omega_m))(0.1)

    with pytest.raises(ValueError, match="CAMB needs the number of Omega_m"):
        in_graph(tf.constant(0.3, tf.float64))
    monkeypatch.setitem(sys.modules, "camb", None)
    with pytest.raises(ImportError, match=re.escape("pip install camb")):
        LinearPower(by_camb.replace(h=0.69))


@pytest.mark.parametrize("transfer", ["eisenstein-hu", "camb"])
@pytest.mark.parametrize("amplitude", [{"A_s": 2.4e-9}, {"sigma8": 0.7}])
def test_another_amplitude_of_the_same_shape(transfer, amplitude):
    name, value = next(iter(amplitude.items()))
    first = Cosmology(0.31, 0.049, 0.68, 0.97, transfer=transfer, **{name: 1.1 * value})
    value = tf.constant(value, tf.float64)
    k, slopes, powers = np.array([0.0, 0.01, 0.3]), [], []
    for make in (LinearPower, LinearPower(first).rescaled):
        with tf.GradientTape() as tape:
            tape.watch(value)
            power = make(first.replace(**{name: value}))
            found = power(k)
            whole = tf.reduce_sum(found) + power.sigma8() + power.A_s
        powers.append(found)
        slopes.append(tape.gradient(whole, value))
    np.testing.assert_allclose(powers[1], powers[0], rtol=1e-12)
    np.testing.assert_allclose(slopes[1], slopes[0], rtol=1e-12)


def test_camb_computes_while_something_else_is_done(monkeypatch):
    """The next LinearPower uses its table."""
    parameters = {"Omega_m": 0.3123, "Omega_b": 0.05, "h": 0.7, "n_s": 0.96}
    with boltzmann_tables.power_in_background({**parameters, "sigma8": 0.8, "transfer": "camb"}):
        pass
    monkeypatch.delattr(boltzmann_tables, "camb_power_table")
    camb = Cosmology(**parameters, sigma8=0.8, transfer="camb")
    # Once for all tilts and amplitudes; `test_camb_is_cambs` has the values.
    for other in (camb, camb.replace(n_s=0.9, k_pivot=0.1), camb.replace(A_s=2e-9)):
        LinearPower(other)
