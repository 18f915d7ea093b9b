"""Edges of the steps, and kicks and drifts with exact forces: plane waves, second order, EdS.

Nothing here has a mesh. With the state x = c1 psi1 + c2 psi2 the force to second order is
c1 psi1 + (c2 + c1^2) psi2, and LPT, (c1, c2) = (D1, D2), solves the equations of motion.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf

import flowpm_dist as fpm
from flowpm_dist.cosmology import Growth
from flowpm_dist.evolution.adjoints import DirectAdjoint, ReversibleAdjoint
from flowpm_dist.evolution.adjoints.reversible import kicks_to_keep
from flowpm_dist.evolution.integrators import COLA, BullFrog, FastPM, drift_kick_drift, rows
from flowpm_dist.evolution.plan import EvolutionPlan

PLANCK = fpm.Cosmology.planck18()
W0WA = PLANCK.replace(w0=-0.9, wa=0.2)
EDS = PLANCK.replace(Omega_m=1.0)
SCHEMES = {
    "fastpm": FastPM(),
    "fastpm, geometric": FastPM(half_step="geometric"),
    "bullfrog": BullFrog(),
    "cola": COLA(),
    "cola, geometric": COLA(exponent=-1.0, half_step="geometric"),
}
SPACINGS = {
    "a": lambda cosmology, *a: fpm.scale_factor_steps(*a),
    "log a": lambda cosmology, *a: fpm.logarithmic_steps(*a),
    "D": fpm.growth_steps,
}


@functools.cache
def growth_of(cosmology):
    return Growth(cosmology)


@functools.cache
def edges_of(spacing, *arguments):
    return SPACINGS[spacing](*arguments)


def momentum(growth, a):
    """a^2 E: canonical velocity over dx/dlna."""
    return float(a**2 * growth.background.e(a))


def carried(schedule, x, v, force, lpt=(0.0, 0.0)):
    """x and v after a schedule, float64, under a force of x."""
    for operation, c in zip(schedule.operations, schedule.factors.numpy(), strict=True):
        known = c[2] * lpt[0] + c[3] * lpt[1]
        if operation.kind == "drift":
            x = x + c[1] * v + known
        else:
            v = c[0] * v + known + (c[1] * force(x) if operation.kind == "kick" else 0.0)
    return x, v


# Plane wave


SHEETS = 64
SITES = (np.arange(SHEETS) + 0.5) / SHEETS
WAVE = 0.9 / (2 * np.pi) * np.sin(2 * np.pi * SITES)  # crosses at D1 = 1 / 0.9


def sheet_force(x):
    """-phi' of equal sheets in a box of length 1, phi'' = delta, by counting those to the left."""
    place = np.empty(SHEETS)
    place[np.argsort(x)] = SITES
    return x - place - np.mean(x - place)


@pytest.mark.parametrize("cosmology", [PLANCK, W0WA], ids=["LCDM", "w0wa"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_plane_wave_follows_zeldovich_whatever_the_number_of_steps(scheme, cosmology):
    """Before shells cross, with the exact force between sheets, to rounding."""
    integrator, growth = SCHEMES[scheme], growth_of(cosmology)
    rate = momentum(growth, 1.0) * float(growth.d1_dlna(1.0))
    for start in [0.05, 0.0] if integrator.starts_at_zero else [0.05]:
        x, v = (float(c) * WAVE for c in integrator.initial(growth, start, 1)[:, 0])
        spacings = ["a", "D", "a" if start == 0 else "log a"]
        for steps, spacing in zip((1, 3, 7), spacings, strict=True):
            schedule = integrator.schedule(growth, edges_of(spacing, cosmology, start, 1.0, steps))
            place, velocity = carried(schedule, SITES + x, v, sheet_force, (WAVE, 0.0))
            np.testing.assert_allclose(place - SITES, float(growth.d1(1.0)) * WAVE, atol=1e-13)
            np.testing.assert_allclose(velocity, rate * WAVE, atol=1e-13)


@pytest.mark.parametrize("scheme", ["fastpm", "fastpm, geometric", "bullfrog"])
def test_plane_wave_from_a_given_canonical_velocity(scheme):
    """As a run from particles begins: with `from_canonical`, where there is one."""
    integrator, growth = SCHEMES[scheme], growth_of(PLANCK)
    x = float(growth.d1(0.5)) * WAVE
    v = momentum(growth, 0.5) * float(growth.d1_dlna(0.5)) * WAVE
    factors = integrator.from_canonical(growth, 0.5)
    v = v if factors is None else float(factors[0]) * v
    place, _ = carried(integrator.schedule(growth, [0.5, 0.8, 0.9]), SITES + x, v, sheet_force)
    np.testing.assert_allclose(place - SITES, float(growth.d1(0.9)) * WAVE, atol=1e-13)


# Second order


def second_order_force(c):
    return np.array([c[0], c[1] + c[0] ** 2])


LPT = np.eye(2)


def lpt_state(growth, a):
    """Coefficients of psi1 and psi2 in the displacement and in the canonical velocity."""
    x = np.array([growth.d1(a), growth.d2(a)])
    return x, momentum(growth, a) * np.array([growth.d1_dlna(a), growth.d2_dlna(a)])


def second_order_run(integrator, growth, edges, order=2):
    """Coefficients of the displacement and of the canonical velocity, from LPT of an order."""
    x, v = np.zeros((2, 2))
    terms = integrator.initial(growth, float(edges[0]), order).numpy()[:, :2]
    x[: terms.shape[1]], v[: terms.shape[1]] = terms
    schedule = integrator.schedule(growth, edges)
    return carried(schedule, x, v, second_order_force, LPT)


@pytest.mark.parametrize(
    "scheme, start, order, cosmology",
    [
        ("cola", 0.05, 2, PLANCK),
        ("cola", 0.05, 3, W0WA),
        ("cola, geometric", 0.05, 2, PLANCK),
        ("bullfrog", 0.05, 2, EDS),
        ("bullfrog", 0.0, 1, EDS),
        ("bullfrog", 0.0, 2, EDS),
    ],
)
def test_second_order_is_met_at_the_end_of_every_step(scheme, start, order, cosmology):
    """COLA by construction; BullFrog in Einstein-de Sitter, also from first order at a = 0.

    Steps of unequal length; the run is ended after each of them.
    """
    integrator, growth = SCHEMES[scheme], growth_of(cosmology)
    edges = [start, 0.07, 0.2, 0.25, 0.6, 1.0]
    for n in range(2, len(edges) + 1):
        found = second_order_run(integrator, growth, edges[:n], order)
        for value, expected in zip(found, lpt_state(growth, edges[n - 1]), strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-12)


@pytest.mark.parametrize("cosmology", [PLANCK, W0WA], ids=["LCDM", "w0wa"])
@pytest.mark.parametrize("start, order", [(0.0, 1), (0.0, 2), (0.3, 2)])
def test_one_step_of_bullfrog(start, order, cosmology):
    """Its velocity is that of second-order LPT; its displacement D2's by the trapezoidal rule.

    The two drifts of a step can be no better, as D2 is not quadratic in D1.
    """
    growth = growth_of(cosmology)
    (x, v), (end, rate) = (
        second_order_run(BullFrog(), growth, [start, 0.9], order),
        lpt_state(growth, 0.9),
    )
    np.testing.assert_allclose(v, rate, rtol=1e-12)
    slopes = [float(growth.by_d1(a, 2)) for a in (start, 0.9)]
    trapezoid = float(growth.d2(start)) + np.mean(slopes) * float(end[0] - growth.d1(start))
    np.testing.assert_allclose(x, [end[0], trapezoid], rtol=1e-12)
    assert abs(trapezoid / end[1] - 1) > 1e-3


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("scheme", ["fastpm", "fastpm, geometric", "bullfrog"])
def test_second_order_is_met_with_the_square_of_the_step(scheme, spacing):
    growth, errors = growth_of(PLANCK), []
    for steps in (32, 64):
        found = second_order_run(
            SCHEMES[scheme], growth, edges_of(spacing, PLANCK, 0.1, 1.0, steps)
        )
        pairs = zip(found, lpt_state(growth, 1.0), strict=True)
        errors.append([abs(value / expected - 1) for value, expected in pairs])
    coarse, fine = np.array(errors)
    assert coarse[:, 0].max() < 1e-12  # of first order
    assert fine[:, 1].min() > 1e-7
    np.testing.assert_allclose(np.log2(coarse[:, 1] / fine[:, 1]), 2.0, atol=0.1)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_transient_of_first_order_initial_conditions(scheme):
    """In an Einstein-de Sitter universe c2 = 3/7 a^2 + A a + B a^-1.5, from c2 = dc2/da = 0.

    Here COLA's residual is not nothing; the error falls with the square of the step.
    """
    growth, integrator, start = growth_of(EDS), SCHEMES[scheme], 0.2
    modes = [[start, start**-1.5], [1.0, -1.5 * start**-2.5]]
    grows, decays = np.linalg.solve(modes, [-3 / 7 * start**2, -6 / 7 * start])
    truth = 3 / 7 + grows + decays, 6 / 7 + grows - 1.5 * decays
    errors = []
    for steps in (32, 64):
        x = np.array([start, 0.0])
        v = {"fastpm": [start**1.5, 0.0], "bullfrog": [1.0, 0.0]}.get(
            scheme.split(",")[0], [0.0, -(start**1.5) * 6 / 7 * start]
        )
        schedule = integrator.schedule(growth, fpm.logarithmic_steps(start, 1.0, steps))
        found = carried(schedule, x, np.array(v), second_order_force, LPT)
        errors.append([abs(f[1] - t) for f, t in zip(found, truth, strict=True)])
    np.testing.assert_allclose(np.log2(np.divide(*errors)), 2.0, atol=0.15)


# Edges


@pytest.mark.parametrize("a_start, a_stop, steps", [(0.1, 1.0, 1), (0.02, 0.9, 7), (0.5, 2.0, 64)])
def test_equal_steps(a_start, a_stop, steps):
    """Equal in what they are named for, with ends to the bit."""
    of = {"a": lambda a: a, "log a": np.log, "D": lambda a: growth_of(W0WA).d1(a).numpy()}
    for name, function in of.items():
        edges = SPACINGS[name](W0WA, a_start, a_stop, steps)
        assert edges.dtype == np.float64 and edges.shape == (steps + 1,)
        assert edges[0] == a_start and edges[-1] == a_stop
        lengths = np.diff(function(edges))
        np.testing.assert_allclose(lengths, lengths.mean(), rtol=1e-12 * steps)


def test_steps_from_zero():
    np.testing.assert_array_equal(fpm.scale_factor_steps(0.0, 1.0, 4), [0, 0.25, 0.5, 0.75, 1])
    edges = fpm.growth_steps(EDS, 0.0, 1.0, 4)
    np.testing.assert_allclose(edges, [0, 0.25, 0.5, 0.75, 1], atol=1e-13)


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize(
    "arguments, message",
    [
        ((1.0, 0.5, 2), "a_start = 1.0: must be below a_stop = 0.5"),
        ((0.5, 0.5, 2), "a_start = 0.5: must be below a_stop"),
        ((-0.1, 0.5, 2), "a_start = -0.1: must be a scale factor from 0"),
        ((float("nan"), 0.5, 2), "a_start = nan"),
        ((0.1, 2.5, 2), "a_stop = 2.5: must be .* at most 2"),
        ((0.1, 0.5, 0), "steps = 0: must be a whole number of at least 1"),
    ],
)
def test_wrong_steps_are_told(spacing, arguments, message):
    with pytest.raises(ValueError, match=message):
        SPACINGS[spacing](PLANCK, *arguments)


def test_logarithm_of_zero_is_told():
    with pytest.raises(ValueError, match='spacing = "log a": must start later than a_start = 0'):
        fpm.logarithmic_steps(0.0, 1.0, 2)


@pytest.mark.parametrize("edges", [[0.1, 1], (0.02, 0.5, 0.51, 1.2), np.float32([0.25, 0.5])])
def test_simulation_takes_any_increasing_list(edges):
    sim = fpm.Simulation(PLANCK, 8, 32.0, edges)
    np.testing.assert_array_equal(sim.edges, np.asarray(edges, np.float64))


@pytest.mark.parametrize("integrator", ["fastpm", "cola"])
def test_only_bullfrog_starts_at_zero(integrator):
    with pytest.raises(ValueError, match=f"starts at 0: only bullfrog .*; {integrator} must"):
        fpm.Simulation(PLANCK, 8, 32.0, [0, 1], integrator=integrator)
    assert fpm.Simulation(PLANCK, 8, 32.0, [0, 1], integrator="bullfrog").edges[0] == 0


@pytest.mark.parametrize(
    "edges", [0.5, [0.1, 0.1], [0.5, 0.1], [-0.1, 1.0], [0.1, 2.5], [[0.1, 1.0]], [], None]
)
def test_lists_that_are_no_steps(edges):
    with pytest.raises(ValueError, match="edges = .*two or more increasing scale factors from 0"):
        fpm.Simulation(PLANCK, 8, 32.0, edges, integrator="bullfrog")


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: COLA(exponent=0.0), "exponent\n.*has to grow or to decay"),
        (lambda: FastPM(half_step="harmonic"), "half_step\n.*'arithmetic' or 'geometric'"),
        (lambda: COLA(half_step="harmonic"), "half_step\n.*'arithmetic' or 'geometric'"),
        (lambda: BullFrog().from_canonical(growth_of(PLANCK), 0), "later than a = 0"),
    ],
)
def test_wrong_arguments_of_an_integrator(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# Backwards


def plan_of(name, edges):
    growth = growth_of(PLANCK)
    schedule = SCHEMES[name].schedule(growth, edges)
    today = float(growth.d1(edges[-1]))
    return EvolutionPlan(
        schedule.operations, schedule.factors, growth=lambda a: today / float(growth.d1(a))
    )


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("spacing", SPACINGS)
def test_states_kept_for_the_way_back_do_not_grow_with_the_steps(name, spacing):
    """By how far the run goes: in a matter universe errors grow as a^2.5, over the displacement."""
    counts = {
        (start, steps): len(
            kicks_to_keep(plan_of(name, edges_of(spacing, PLANCK, start, 1.0, steps)), 32.0)
        )
        for start in (0.01, 0.1, 0.5)
        for steps in (10, 40)
    }
    for steps in (10, 40):
        assert 1 <= counts[0.01, steps] <= 3
        assert counts[0.1, steps] <= 2
        assert counts[0.5, steps] == 0


def test_no_kick_that_forgets_the_velocity_is_undone():
    """Nothing is divided by 0."""
    tenth = tf.constant([0.1] * 3, tf.float64)
    drift = rows(1.0, tenth, 0.0, 0.0)
    kick = rows(tf.constant([1.0, 0.0, 1.0]), tenth, 0.0, 0.0)
    schedule = drift_kick_drift([0.4, 0.6, 0.8, 1.0], drift, kick, drift)
    forgets = [n for n, c in enumerate(schedule.factors.numpy()) if c[0] == 0]
    plan = EvolutionPlan(schedule.operations, schedule.factors)
    assert kicks_to_keep(plan, 1e6) == forgets


def test_fields_of_forces_are_kept_where_they_take_little():
    """By themselves at most 16 values a particle, or a quarter of a gibibyte; or as one says."""
    value, mib = 4 * 512**3, 2**20
    by_itself, always, never = (ReversibleAdjoint(keep_fields=x) for x in ("auto", True, False))
    assert by_itself.kept_bytes(16, value, value) == 16 * value
    assert by_itself.kept_bytes(17, value, value) == 0
    assert by_itself.kept_bytes(2, 8 * value, value) == 16 * value
    assert by_itself.kept_bytes(32, 8 * mib, mib) == 256 * mib
    assert by_itself.kept_bytes(33, 8 * mib, mib) == 0
    assert always.kept_bytes(17, value, value) == 17 * value
    assert never.kept_bytes(1, value, value) == DirectAdjoint().kept_bytes(1, value, value) == 0
