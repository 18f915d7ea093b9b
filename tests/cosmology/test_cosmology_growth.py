"""Expansion and growth: known answers, other codes' tables, an independent integrator."""

import numpy as np
import pytest
import tensorflow as tf
from derivatives import check_derivative
from pmwd_tables import InterpolatedGrowth
from reference import reference
from scipy.integrate import solve_ivp

from flowpm_dist.cosmology import Background, Cosmology, Growth
from flowpm_dist.cosmology import growth as growth_module
from flowpm_dist.cosmology.growth import growth_of
from flowpm_dist.cosmology.growth_equations import TERMS

ORDERS = {1: 1, 2: 2, "3a": 3, "3b": 3, "3c": 3}
EINSTEIN_DE_SITTER = {1: 1.0, 2: 3 / 7, "3a": 1 / 3, "3b": 10 / 21, "3c": 1 / 7}

# The relative tolerance of the integrator behind pmwd's tables, with its accumulation.
PMWD_TOLERANCE = 5e-8


def universe(Omega_m, w0=-1.0, wa=0.0, Omega_b=0.01):
    return Cosmology(Omega_m, Omega_b, 0.7, 0.96, A_s=2.1e-9, w0=w0, wa=wa)


def pmwd_universe(run):
    return universe(run["cosmo_Omega_m"], run.get("cosmo_w_0_", -1), run.get("cosmo_w_a_", 0))


def test_known_answers_normalised_today():
    growth = Growth(universe(0.307494))
    early, today = 0.1, 1.0
    assert growth.background.e(early).numpy() == pytest.approx(17.5552, rel=1e-5)
    d1, d2 = growth.d1(today), growth.d2(today)
    assert (growth.d1(early) / d1).numpy() == pytest.approx(0.127589, rel=1e-5)
    assert (growth.d2(early) / d2).numpy() == pytest.approx(0.0161427, rel=1e-5)
    assert growth.f1(early).numpy() == pytest.approx(0.998774, rel=1e-5)
    assert (growth.d2_dlna(early) / growth.d2(early)).numpy() == pytest.approx(1.9976, rel=1e-5)


def test_known_answers_normalised_early():
    growth = Growth(universe(0.3))
    assert growth.d1(1.0).numpy() == pytest.approx(0.778981, rel=1e-5)
    assert (growth.d1(0.5) / growth.d1(1.0)).numpy() == pytest.approx(0.611806, rel=1e-5)
    assert growth.f1(1.0).numpy() == pytest.approx(0.512796, rel=1e-5)


def test_known_answers_of_evolving_dark_energy():
    assert Background(universe(0.307494, -1.1, 0.1)).e(2 / 3).numpy() == pytest.approx(
        1.290115, rel=1e-6
    )
    assert Background(universe(0.307494)).e(2 / 3).numpy() == pytest.approx(1.31541, rel=1e-5)


def test_einstein_de_sitter_is_exact():
    growth, a = Growth(universe(1.0)), np.array([0.0, 0.01, 0.3, 1.0])
    for term in growth_module.TERMS:
        n, expected = ORDERS[term], EINSTEIN_DE_SITTER[term] * a ** ORDERS[term]
        np.testing.assert_allclose(growth.factor(a, term), expected, rtol=1e-13)
        for derivative in (1, 2):
            found = growth.factor(a, term, derivative)
            np.testing.assert_allclose(found, n**derivative * expected, rtol=1e-12)
    np.testing.assert_allclose(growth.g_drift(a), a**1.5, rtol=1e-13)
    np.testing.assert_allclose(growth.g_kick(a), 1.5 * a, rtol=1e-12)


@pytest.mark.parametrize("name", ["pmwd_lcdm_32", "pmwd_lcdm_32_mesh2", "pmwd_w0wa_32"])
def test_growth_is_pmwds(name):
    run = reference(name)
    growth, a, edges = Growth(pmwd_universe(run)), run["a"], run["a_nbody"]
    np.testing.assert_allclose(growth.background.e2(a), run["E2"], rtol=1e-14)
    # Its nodes: the steps of an LPT light cone up to the start, then the step edges.
    nodes = np.concatenate([np.linspace(0, edges[0], 14)[1:], edges[1:]])
    as_pmwd = InterpolatedGrowth(growth, nodes)
    at_edges = np.isclose(a[:, np.newaxis], edges).any(axis=1)
    assert at_edges.sum() >= 2
    for method, key in [
        ("d1", "D1"),
        ("d1_dlna", "dD1_dlna"),
        ("d2", "D2"),
        ("d2_dlna", "dD2_dlna"),
    ]:
        exact = getattr(growth, method)(a).numpy()
        np.testing.assert_allclose(exact[at_edges], run[key][at_edges], rtol=PMWD_TOLERANCE)
        np.testing.assert_allclose(
            getattr(as_pmwd, method)(a), run[key], rtol=PMWD_TOLERANCE, err_msg=key
        )


def test_growth_and_step_factors_are_fastpms():
    run = reference("fastpm_fd4_64")
    growth, a = Growth(universe(run["Omega_m"])), run["growth_a"]
    np.testing.assert_allclose(growth.background.e(a), run["E"], rtol=1e-14)
    np.testing.assert_allclose(growth.d1(a) / growth.d1(1.0), run["D1"], rtol=5e-8)
    np.testing.assert_allclose(growth.f1(a), run["f1"], rtol=5e-8)
    kind, start, middle, stop, factor = run["step_factors"].T
    drift = (growth.d1(stop) - growth.d1(start)) / growth.g_drift(middle)
    kick = (growth.g_drift(stop) - growth.g_drift(start)) / growth.g_kick(middle)
    # A difference of two growths loses a digit or so of fastpm-python's own accuracy.
    np.testing.assert_allclose(np.where(kind == 0, kick, drift), factor, rtol=3e-7)


def integrated(cosmology, start, a, atol):
    """The growth of each term, then their derivatives, [10, a], by scipy from early times."""
    Omega_m, w0, wa = cosmology.Omega_m, cosmology.w0, cosmology.wa

    def equations(ln_a, y):
        dark = (1 - Omega_m) * np.exp(-3 * (w0 + wa) * ln_a - 3 * wa * (1 - np.exp(ln_a)))
        share, w = dark / (Omega_m + dark), w0 + wa * (1 - np.exp(ln_a))
        friction, source = 2 - 1.5 * (1 + w * share), 1.5 * (1 - share)
        (d1, d2, d3a, d3b, _), v = y[:5], y[5:]
        pull = [d1, d2 + d1**2, d3a + 2 * d1**3, d3b + 2 * d1 * (d2 + d1**2), d1**3]
        return np.concatenate([v, -friction * v + source * np.array(pull)])

    early = [
        ORDERS[t] ** derivative * EINSTEIN_DE_SITTER[t] * start ** ORDERS[t]
        for derivative in (0, 1)
        for t in growth_module.TERMS
    ]
    span, at = (np.log(start), np.log(max(a))), np.log(a)
    ode = solve_ivp(equations, span, early, method="DOP853", t_eval=at, rtol=1e-12, atol=atol)
    return ode.y


@pytest.mark.parametrize(
    "parameters", [(0.3,), (0.05,), (0.31, -0.9, 0.2), (0.25, -0.6, -1.5), (0.3, -1.4, 0.6)]
)
def test_growth_is_that_of_an_independent_integrator(parameters):
    growth, a = Growth(universe(*parameters)), np.array([0.01, 0.1, 0.5, 0.9, 1.0])
    terms = growth_module.TERMS
    ours = [growth.factor(a, t, derivative) for derivative in (0, 1) for t in terms]
    np.testing.assert_allclose(ours, integrated(universe(*parameters), 1e-6, a, 1e-30), rtol=1e-9)


def test_second_derivatives_satisfy_the_growth_equations():
    growth, a = Growth(universe(0.31, -0.9, 0.2)), np.linspace(0.02, 1.2, 30)
    np.testing.assert_allclose(
        growth.g_kick(a), 1.5 * growth.background.Omega_m * growth.d1(a), rtol=1e-11
    )
    friction = 2.0 + growth.background.dlne_dlna(a)
    source = 1.5 * growth.background.omega_m(a)
    np.testing.assert_allclose(
        growth.factor(a, 2, 2) + friction * growth.d2_dlna(a),
        source * (growth.d2(a) + growth.d1(a) ** 2),
        rtol=1e-11,
    )


def test_third_order_satisfies_its_equations():
    growth, a = Growth(universe(0.31, -0.9, 0.2)), np.linspace(0.02, 1.2, 30)
    friction = 2.0 + growth.background.dlne_dlna(a)
    s, d1, d2 = 1.5 * growth.background.omega_m(a), growth.d1(a), growth.d2(a)
    pull = {
        "3a": growth.factor(a, "3a") + 2 * d1**3,
        "3b": growth.factor(a, "3b") + 2 * d1 * (d2 + d1**2),
        "3c": d1**3,
    }
    for term, expected in pull.items():
        moved = growth.factor(a, term, 2) + friction * growth.factor(a, term, 1)
        np.testing.assert_allclose(moved, s * expected, rtol=1e-11)
        by_d1 = growth.factor(a, term, 1) / growth.d1_dlna(a)
        np.testing.assert_allclose(growth.by_d1(a, term), by_d1, rtol=1e-13)


def test_third_order_has_a_gradient_by_the_parameters():
    def value(parameters):
        growth = Growth(universe(*tf.unstack(tf.convert_to_tensor(parameters)), 0.2))
        terms = zip(("3a", "3b", "3c"), (0.7, 0.8, 0.9), (1, 2, 3), strict=True)
        return sum(weight * growth.factor(a, term) for term, a, weight in terms)

    check_derivative(value, [0.31, -0.9], 1e-5, rtol=1e-7)


def test_derivatives_by_the_scale_factor_agree_with_differentiation():
    growth, a = Growth(universe(0.31, -0.9, 0.2)), tf.constant([0.1, 0.5, 1.0], tf.float64)
    for value, slope in [
        (growth.d1, growth.d1_dlna),
        (growth.d1_dlna, lambda a: growth.factor(a, 1, 2)),
        (growth.d2, growth.d2_dlna),
        (lambda a: tf.math.log(growth.background.e(a)), growth.background.dlne_dlna),
        (growth.g_drift, lambda a: growth.g_kick(a) / (a * growth.background.e(a))),
    ]:
        with tf.GradientTape() as tape:
            tape.watch(a)
            y = value(a)
        np.testing.assert_allclose(a * tape.gradient(y, a), slope(a), rtol=1e-10)


def test_shapes_dtypes_and_limits():
    growth = Growth(universe(0.3))
    assert growth.d1(1).shape == () and growth.d1(1).dtype == tf.float64
    assert growth.d1(np.full((2, 3), 0.5, np.float32)).shape == (2, 3)
    for method in (growth.d1, growth.d2, growth.d1_dlna, growth.g_drift, growth.g_kick):
        assert method(0.0).numpy() == 0.0
    for term, order in ORDERS.items():
        early = growth.ratio(tf.constant(0.0, tf.float64), term, 1) / EINSTEIN_DE_SITTER[term]
        assert early.numpy() == pytest.approx(order, rel=1e-14)
        assert growth.by_d1(0.0, term).numpy() == pytest.approx(float(term == 1), abs=1e-14)
    for a in (-0.1, 2.1, float("nan"), [0.5, 3.0]):
        with pytest.raises(ValueError, match="scale factors must lie between 0 and 2"):
            growth.d1(a)


EXTREMES = [
    (0.3, -3.0, 0.0),
    (0.3, -3.0, -5.0),
    (0.3, -3.0, 2.8),
    (0.3, -0.2, -5.0),
    (0.3, -0.2, 0.0),
    (0.3, -0.001, -0.199),
    (0.0051, -3.0, -5.0),
]


@pytest.mark.parametrize("parameters", EXTREMES)
def test_growth_at_the_limits_of_dark_energy(parameters):
    """Two orders of an independent integrator: dark energy appears all at once, or was early."""
    cosmology, a = universe(*parameters, Omega_b=0.005), np.array([0.1, 0.3, 0.5, 0.7, 0.9, 1, 1.5])
    # From so early that dark energy is nothing even for w = -0.2.
    d1, d2, *third, d1_dlna, d2_dlna, _, _, _ = integrated(cosmology, 1e-16, a, 1e-40)
    growth = Growth(cosmology)
    for term, expected in zip(("3a", "3b", "3c"), third, strict=True):
        np.testing.assert_allclose(growth.factor(a, term), expected, rtol=1e-6)
    np.testing.assert_allclose(growth.d1(a), d1, rtol=1e-7)
    np.testing.assert_allclose(growth.f1(a), d1_dlna / d1, atol=1e-6)
    np.testing.assert_allclose(growth.d2_dlna(a) / growth.d2(a), d2_dlna / d2, atol=1e-6)


def test_growth_that_is_not_resolved_is_refused(monkeypatch):
    """With too few nodes: within the ranges of the parameters there are enough."""
    monkeypatch.setattr(growth_module, "NODES", (24,))
    with pytest.raises(ValueError, match="w0 = -3, wa = -5.*: the expansion changes too steeply"):
        Growth(universe(0.01001, -3.0, -5.0))


def test_equations_of_numbers_are_solved_once():
    """Whatever does not change the expansion; what does, and tensors, are solved anew."""
    own = Cosmology.planck18()
    first = Growth(own)._coefficients
    assert Growth(own.replace(n_s=0.9, h=0.7, A_s=2e-9))._coefficients is first
    for other in ({"Omega_m": 0.3}, {"w0": -0.9}, {"wa": 0.1}):
        assert not np.array_equal(Growth(own.replace(**other))._coefficients, first)
    again = Growth(own.replace(Omega_m=tf.constant(own.Omega_m, tf.float64)))._coefficients
    assert again is not first
    np.testing.assert_allclose(again, first, rtol=0, atol=1e-12)  # NumPy's rounding, TensorFlow's


@pytest.mark.parametrize(("w0", "few"), [(-1.0, True), (-3.0, False)])
@pytest.mark.parametrize("m_nu", [0.0, pytest.param(0.2, marks=pytest.mark.long)])
def test_a_graph_takes_as_many_nodes_as_growth_needs(w0, few, m_nu):
    """It finds out when it runs; values and derivatives are as with tensors outside a graph."""
    a = np.array([0.1, 0.5, 1.0])

    def grown(w):
        own = Cosmology(0.3, 0.05, 0.7, 0.96, A_s=2e-9, w0=w, m_nu=m_nu, radiation=m_nu > 0)
        growth = Growth(own) if m_nu == 0 else growth_of(Background(own))
        parts = [growth.factor(a, term, 1) for term in TERMS]
        parts += [growth.d1(a, 0.2)] if m_nu else []
        return tf.stack(parts), growth._coefficients

    @tf.function(autograph=False)
    def in_graph(w):
        with tf.GradientTape() as tape:
            tape.watch(w)
            values, coefficients = grown(w)
            total = tf.reduce_sum(values)
        return values, tape.gradient(total, w), coefficients

    w = tf.constant(w0, tf.float64)
    values, slope, coefficients = in_graph(w)
    with tf.GradientTape() as tape:
        tape.watch(w)
        expected, own = grown(w)
        total = tf.reduce_sum(expected)
    fewest, most = growth_module.NODES
    assert (own.shape[0], coefficients.shape[0]) == (fewest if few else most, most)
    assert bool(tf.reduce_all(coefficients[fewest:] == 0)) == few
    precision = 1e-7 if m_nu else 1e-11  # rounding grows in the era of radiation
    np.testing.assert_allclose(values, expected, rtol=precision)
    np.testing.assert_allclose(slope, tape.gradient(total, w), rtol=100 * precision)


def test_third_order_belongs_to_the_tape_and_the_graph_of_its_parameters():
    """Though it is asked for elsewhere: it is kept for later."""
    omega = tf.constant(0.3, tf.float64)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(omega)
        growth = Growth(Cosmology.planck18().replace(Omega_m=omega))
        with tape.stop_recording():
            growth.factor(1.0, "3a")
        later = growth.factor(1.0, "3a")
    assert abs(float(tape.gradient(later, omega))) > 1e-3
    outside = Growth(Cosmology.planck18().replace(Omega_m=omega))
    inside = [tf.function(lambda: outside.factor(1.0, "3b"))() for _ in range(2)]
    assert float(inside[0]) == float(inside[1]) == float(outside.factor(1.0, "3b"))
