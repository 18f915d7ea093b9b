"""One theory of a universe: what is put into one of its parts reaches all that follows from it."""

import functools
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from scipy.integrate import quad, solve_ivp
from scipy.optimize import brentq

import flowpm_dist as fpm
from flowpm_dist.cosmology import (
    Background,
    Cosmology,
    Distances,
    Fluid,
    Growth,
    Halofit,
    LinearPower,
    Theory,
)
from flowpm_dist.cosmology.growth_equations import EINSTEIN_DE_SITTER, TERMS
from flowpm_dist.cosmology.parameters import AMPLITUDES, PARAMETERS, SHAPE, affecting
from flowpm_dist.jobs.run_file import ConfigError
from flowpm_dist.observables.lensing import (
    IntrinsicAlignment,
    LensPlanes,
    SourcePlane,
    convergence_power,
)
from flowpm_dist.simulate.options import SimulationOptions

PLANCK = Cosmology.planck18()
A = np.array([0.02, 0.1, 0.5, 1.0, 1.5])


def with_fluid(Omega):
    """Returns the theory of a universe with a fluid of w = -1/3 besides: from here, not from it."""

    class WithFluid(Background):
        def others(self):
            return (*super().others(), Fluid(Omega, w0=-1.0 / 3.0))

    class FluidTheory(Theory):
        @functools.cached_property
        def background(self):
            return WithFluid(self.cosmology)

    return FluidTheory


def expansion(a, fluid, w0=-1.0, wa=0.0, Omega_m=PLANCK.Omega_m):
    """Returns E^2 and Omega_m(a), from the densities as on paper."""
    dark = (1 - Omega_m - fluid) * a ** (-3 * (1 + w0 + wa)) * np.exp(-3 * wa * (1 - a))
    e2 = Omega_m / a**3 + fluid / a**2 + dark
    return e2, Omega_m / a**3 / e2


def solved(fluid, w0, wa, a):
    """Returns D1 and dD1/dlna at scale factors by a Runge-Kutta solver.

    Early D = a (1 - 4/7 x) with x the fluid over matter, as with curvature (Peebles 1980).
    """

    def slope(x, y):
        e2, matter = expansion(np.exp(x), fluid, w0, wa)
        low, high = (expansion(np.exp(x + d), fluid, w0, wa)[0] for d in (-1e-5, 1e-5))
        friction = 2 + np.log(high / low) / 4e-5
        return [y[1], 1.5 * matter * y[0] - friction * y[1]]

    first, times = 1e-5, np.log(a)
    x = fluid / PLANCK.Omega_m * first
    early = [first * (1 - 4 / 7 * x), first * (1 - 8 / 7 * x)]
    settings = dict(method="DOP853", rtol=1e-12, atol=1e-18, t_eval=times)
    return solve_ivp(slope, (np.log(first), times[-1]), early, **settings).y


@pytest.mark.parametrize("fluid", [0.1, -0.05])
@pytest.mark.parametrize(("w0", "wa"), [(-1.0, 0.0), (-0.9, 0.2)])
def test_a_fluid_changes_background_growth_and_distances(fluid, w0, wa):
    theory = with_fluid(fluid)(PLANCK.replace(w0=w0, wa=wa))
    e2, matter = expansion(A, fluid, w0, wa)
    np.testing.assert_allclose(theory.background.e2(A), e2, rtol=1e-13)
    np.testing.assert_allclose(theory.background.omega_m(A), matter, rtol=1e-13)
    step = 1e-5
    ends = [np.log(expansion(A * np.exp(d), fluid, w0, wa)[0]) / 2 for d in (-step, step)]
    slope = (ends[1] - ends[0]) / (2 * step)
    np.testing.assert_allclose(theory.background.dlne_dlna(A), slope, atol=1e-9)
    d1, rate = solved(fluid, w0, wa, A)
    np.testing.assert_allclose(theory.growth.d1(A), d1, rtol=1e-9)
    np.testing.assert_allclose(theory.growth.f1(A), rate / d1, rtol=1e-9)
    for z in (0.5, 2.0):
        chi, _ = quad(
            lambda z: 2997.92458 / np.sqrt(expansion(1 / (1 + z), fluid, w0, wa)[0]), 0, z
        )
        assert float(theory.distances.comoving(1 / (1 + z))) == pytest.approx(chi, rel=1e-10)
    today = float(theory.power.sigma8())
    assert today == pytest.approx(PLANCK.sigma8, rel=1e-12)  # normalised with this growth
    ratio = theory.power(0.1, 0.2) / theory.power(0.1)
    assert float(ratio) == pytest.approx(float(theory.growth.d1(0.2) / theory.growth.d1(1)) ** 2)


def test_all_orders_grow_as_in_matter_alone_early():
    growth = with_fluid(0.1)(PLANCK).growth
    a = np.array([1e-7, 1e-5, 1e-4])
    for term in TERMS:
        early = growth.ratio(a, term, 0) / EINSTEIN_DE_SITTER[term] - 1
        np.testing.assert_allclose(early, 0, atol=2e-4)
        assert abs(early[0]) <= abs(early[1]) + 1e-12 <= abs(early[2]) + 2e-12


def simulation(theory, **options):
    settings = dict(mesh=[("row", 1), ("col", 1)], precision="float64")
    steps = fpm.scale_factor_steps(0.2, 1.0, 2)
    return fpm.Simulation(PLANCK, 8, 32.0, steps, theory=theory, **settings, **options)


def test_a_theory_reaches_states_and_snapshots(tmp_path):
    """What was given to a simulation is what its states and files are of."""
    fluid = with_fluid(0.1)
    sim = simulation(fluid)
    d1, rate = solved(0.1, -1.0, 0.0, [0.5, 1.0])
    assert float(sim.theory.growth.f1(1.0)) == pytest.approx(rate[1] / d1[1], rel=1e-9)
    apart = (
        sim.run(seed=1).displacement.numpy() - simulation(Theory).run(seed=1).displacement.numpy()
    )
    assert np.abs(apart).max() > 1e-2
    early = sim.lpt(seed=1, a=0.5)
    path = early.save(tmp_path)
    assert float(early.linear_growth) == pytest.approx(d1[0] / d1[1], rel=1e-9)
    moved = early.redshift_space("z").numpy() - early.displacement.numpy()
    speed = early.velocity.numpy()[..., 2] / 0.5**2 / np.sqrt(expansion(0.5, 0.1)[0])
    np.testing.assert_allclose(moved[..., 2], speed, rtol=1e-9)
    again = fpm.State.from_snapshot(path, theory=fluid)
    with pytest.warns(UserWarning, match="theory"):
        plain = fpm.State.from_snapshot(path)
    assert float(again.linear_growth) == float(early.linear_growth)
    there = again.redshift_space("z").numpy() - again.displacement.numpy()
    np.testing.assert_array_equal(there, moved)
    assert float(plain.linear_growth) != float(early.linear_growth)


def test_exported_headers_hold_the_dark_energy_of_the_theory(tmp_path):
    h5py = pytest.importorskip("h5py")
    for number, theory in enumerate((Theory, with_fluid(0.1))):
        path = simulation(theory).lpt(seed=1).save(tmp_path / str(number), format="gadget-hdf5")
        with h5py.File(next(path.glob("*.hdf5"))) as file:
            found = file["Header"].attrs["OmegaLambda"]
        assert found == pytest.approx(1 - PLANCK.Omega_m - 0.1 * number, abs=1e-15)


def test_lensing_takes_a_theory():
    theory, sources = with_fluid(0.1)(PLANCK), [SourcePlane(1.0)]
    planes = LensPlanes(np.linspace(0, 2000.0, 9))
    given = convergence_power([100.0, 1000.0], sources, theory)
    plain = convergence_power([100.0, 1000.0], sources, PLANCK)
    assert np.all(np.abs(given / plain - 1) > 1e-2)
    far = planes.chi.numpy()
    z = np.array([brentq(lambda z, chi: distance(z) - chi, 0, 5, (chi,)) for chi in far])
    strength = 1.5 * PLANCK.Omega_m / 2997.92458**2 * planes.chi * 250 * (1 + z)
    np.testing.assert_allclose(planes.strength(theory), strength, rtol=1e-9)
    alignment = IntrinsicAlignment(1.0)
    ratio = alignment.response(0.5, theory) / alignment.response(1.0, theory)
    growth = theory.growth.d1([0.5, 1.0]).numpy()
    assert float(ratio) == pytest.approx(growth[1] / growth[0], rel=1e-12)


def distance(z):
    return quad(lambda z: 2997.92458 / np.sqrt(expansion(1 / (1 + z), 0.1)[0]), 0, z)[0]


def test_parts_are_shared_where_no_parameter_of_theirs_differs():
    first = Theory(PLANCK)
    first.prepare()
    for changes, growth, power in (
        (dict(n_s=0.95), True, False),
        (dict(sigma8=0.7), True, True),
        (dict(A_s=2e-9), True, False),  # the other amplitude: the power is made anew
        (dict(Omega_m=0.3), False, False),
        (dict(h=0.7), False, False),
        (dict(f_NL=10.0), True, True),
    ):
        other = Theory(PLANCK.replace(**changes))
        other.share(first)
        assert (other.growth is first.growth) is growth, changes
        shared = other.power.without_growth is not None and other.power._shape is first.power._shape
        assert shared is power, changes
        fresh = Theory(other.cosmology)
        np.testing.assert_array_equal(other.power(0.2, 0.5), fresh.power(0.2, 0.5))


@pytest.mark.parametrize(("transfer", "tolerance"), [("eisenstein-hu", 1e-3), ("camb", 3e-2)])
def test_the_potential_and_poissons_equation(transfer, tolerance):
    """delta = 2/3 k^2 c^2 / (Omega_m H0^2) phi on the largest scales, where T is 1.

    CAMB's radiation and horizon change its growth.
    """
    power, k = Theory(PLANCK.replace(transfer=transfer)).power, np.array([2e-4])
    ratio = np.sqrt(power.without_growth(k) / power.potential(k))
    expected = 2 / 3 * (k * 2997.92458) ** 2 / PLANCK.Omega_m
    np.testing.assert_allclose(ratio, expected, rtol=tolerance)
    np.testing.assert_array_equal(power.potential([0.0]), [0.0])
    of_zeta = 2 * np.pi**2 / k**3 * power.A_s * (k * PLANCK.h / 0.05) ** (PLANCK.n_s - 1)
    np.testing.assert_allclose(power.potential(k), 9 / 25 * of_zeta, rtol=1e-12)


def test_the_table_of_parameters_is_the_cosmology():
    """Each list of parameters follows from the fields of the class."""
    assert (*SHAPE, *AMPLITUDES) == (
        *(n for n in PARAMETERS if n not in (*AMPLITUDES, "f_NL")),
        "A_s",
        "sigma8",
    )
    assert set(PLANCK.names) == set(PARAMETERS) - {"A_s", "m_nu"}
    assert "m_nu" in PLANCK.replace(radiation=True).names
    assert set(affecting("growth")) <= set(affecting("background"))
    for name, row in PARAMETERS.items():
        assert row.required == (name in {"Omega_m", "Omega_b", "h", "n_s"})
        assert row.affects and row.range_text and row.symbol
        assert row.default is None or row.holds(row.default)


def test_a_fluid_is_differentiable():
    """Of what a run reads: a gradient by the fluid, against differences."""

    def run_numbers(Omega):
        theory = with_fluid(Omega)(PLANCK)
        growth, power = theory.growth, theory.power
        numbers = [
            growth.d1(A),
            growth.d2(A),
            growth.f1(A),
            growth.g_kick(A),
            power([0.02, 0.5], 0.3),
        ]
        return tf.concat([tf.reshape(each, [-1]) for each in (*numbers, growth.background.e(A))], 0)

    omega = tf.constant(0.08, tf.float64)
    weights = np.random.default_rng(3).normal(size=int(run_numbers(omega).shape[0]))
    with tf.GradientTape() as tape:
        tape.watch(omega)
        value = tf.reduce_sum(weights * run_numbers(omega) / run_numbers(0.08))
    step = 1e-4
    low, high = (np.sum(weights * run_numbers(0.08 + d) / run_numbers(0.08)) for d in (-step, step))
    assert float(tape.gradient(value, omega)) == pytest.approx(
        float(high - low) / (2 * step), rel=1e-6
    )


@pytest.mark.parametrize("Omega_k", [0.3, 0.02, -0.1])
@pytest.mark.parametrize("w0", [-1.0, -0.8])
def test_curvature_expands_and_grows_as_a_fluid(Omega_k, w0):
    """E, growth and both distances, against astropy and a Runge-Kutta solver."""
    from astropy.cosmology import w0waCDM

    cosmology = PLANCK.replace(Omega_k=Omega_k, w0=w0)
    theory, matter = Theory(cosmology), PLANCK.Omega_m
    there = w0waCDM(H0=100.0, Om0=matter, Ode0=1 - matter - Omega_k, w0=w0, Tcmb0=0.0)
    for z in (0.0, 0.5, 3.0, 20.0):
        a = 1 / (1 + z)
        assert float(theory.background.e(a)) == pytest.approx(there.efunc(z), rel=1e-12)
        chi = theory.distances.comoving(a)
        expected = there.comoving_distance(z).value, there.comoving_transverse_distance(z).value
        found = float(chi), float(theory.distances.transverse(chi))
        np.testing.assert_allclose(found, expected, rtol=1e-8)
    d1, rate = solved(Omega_k, w0, 0.0, A)
    np.testing.assert_allclose(theory.growth.d1(A), d1, rtol=1e-9)
    np.testing.assert_allclose(theory.growth.f1(A), rate / d1, rtol=1e-9)


def test_an_open_universe_of_matter_alone():
    """Its growth is known in closed form (Peebles 1980, equation 11.16)."""
    cosmology = Cosmology(Omega_m=0.5, Omega_b=0.05, h=0.7, n_s=1.0, sigma8=0.8, Omega_k=0.5)
    x = A  # Omega_k / Omega_m = 1
    root = np.sqrt(1 + x)
    known = 1 + 3 / x + 3 * root / x**1.5 * np.log(root - np.sqrt(x))
    np.testing.assert_allclose(Theory(cosmology).growth.d1(A), 2.5 * known, rtol=1e-9)


def test_growth_is_resolved_anywhere_in_the_ranges():
    for Omega_m in (0.005, 0.3, 1.0):
        for Omega_k in (max(-0.5, -Omega_m), min(0.5, 1 - Omega_m)):
            for w0, wa in ((-1.0, 0.0), (-3.0, 1.0), (-0.3, 0.1)):
                cosmology = Cosmology(
                    Omega_m, 0.0, 0.7, 1.0, sigma8=0.8, w0=w0, wa=wa, Omega_k=Omega_k
                )
                assert np.isfinite(Growth(cosmology).f1([0.0, 1.0])).all()


def test_curvature_is_differentiable_at_any_value():
    for value in (0.0, 0.1):
        omega, step = tf.constant(value, tf.float64), 1e-3
        chi = np.array([10.0, 1000.0, 4000.0])

        def numbers(Omega_k, chi=chi):
            theory = Theory(PLANCK.replace(Omega_k=Omega_k))
            parts = theory.growth.d1(A), theory.distances.transverse(chi), theory.power([0.1], 0.5)
            return tf.concat(parts, 0)

        with tf.GradientTape() as tape:
            tape.watch(omega)
            total = tf.reduce_sum(numbers(omega))
        weights = (-1 / 12, 2 / 3, -2 / 3, 1 / 12)
        points = [value + n * step for n in (2, 1, -1, -2)]
        slope = sum(w * np.sum(numbers(p)) for w, p in zip(weights, points, strict=True)) / step
        assert float(tape.gradient(total, omega)) == pytest.approx(slope, rel=1e-8)


def test_curvatures_that_cannot_be_are_refused():
    from astropy.cosmology import LambdaCDM

    with pytest.raises(
        ValueError, match="Omega_k = 0.4: must lie between -Omega_m and 1 - Omega_m"
    ):
        Cosmology(0.7, 0.05, 0.7, 1.0, sigma8=0.8, Omega_k=0.4)
    with pytest.raises(ValueError, match="Omega_k must be a number from -0.5 to 0.5"):
        PLANCK.replace(Omega_k=0.6)
    cosmology = dict(Omega_m=0.3, Omega_b=0.05, h=0.7, n_s=1.0, sigma8=0.8, Omega_k=0.05)
    table = {"box": {"grid": 8, "size": 64.0}, "cosmology": cosmology, "initial": {"seed": 1}}
    assert SimulationOptions.check(table, Path("run.toml")).cosmology.Omega_k == 0.05
    table["lightcone"] = {
        "field_of_view": 2.0,
        "pixels": 8,
        "z_max": 0.1,
        "sources": [{"redshift": 0.1}],
    }
    SimulationOptions.check(table, Path("run.toml"))
    # The transverse distance decides what fits into the box.
    table["lightcone"] |= {"z_max": 3.0, "sources": [{"redshift": 1.0}]}
    for Omega_k in (0.0, -0.3, 0.3):
        table["cosmology"]["Omega_k"] = Omega_k
        there = LambdaCDM(H0=100.0, Om0=0.3, Ode0=0.7 - Omega_k, Tcmb0=0.0)
        wide = np.radians(2.0) * there.comoving_transverse_distance(3.0).value
        with pytest.raises(ConfigError, match=f"the field is {wide:.4g} Mpc/h wide at z = 3, and"):
            SimulationOptions.check(table, Path("run.toml"))


def test_light_of_a_closed_universe_does_not_come_from_beyond_its_antipode():
    """f_K stays above 0 to the horizon, in all of the ranges; and has its maximum in between."""
    for Omega_m in (0.005, 0.1, 0.3, 0.5, 1.0):
        for w0, wa in ((-1.0, 0.0), (-3.0, 2.8), (-3.0, -5.0), (-0.3, 0.1)):
            Omega_k = max(-0.5, -Omega_m)
            distances = Distances({"Omega_m": Omega_m, "w0": w0, "wa": wa, "Omega_k": Omega_k})
            horizon = float(distances.comoving(1e-12))
            assert np.sqrt(-Omega_k) * horizon < 0.9 * np.pi * 2997.92458
            lengths = distances.transverse(np.linspace(0.0, horizon, 4001)).numpy()
            assert (lengths[1:] > 0).all()
            assert distances.widest(horizon) == pytest.approx(lengths.max(), rel=1e-6)


def test_a_run_is_differentiated_by_a_theory_of_ones_own():
    """Under the tape that the simulation is made in; another simulation's is refused."""

    def loss(sim):
        return tf.reduce_sum(sim.run(seed=1).displacement.block ** 2)

    omega = tf.constant(0.05, tf.float64)
    before = simulation(with_fluid(omega))
    with tf.GradientTape() as tape:
        tape.watch(omega)
        with pytest.raises(ValueError, match="make the simulation under the tape"):
            before.run(seed=1)
        value = loss(simulation(with_fluid(omega)))
    step = 1e-5
    high, low = (loss(simulation(with_fluid(0.05 + s))) for s in (step, -step))
    assert float(tape.gradient(value, omega)) == pytest.approx(
        float(high - low) / (2 * step), rel=1e-6
    )


def test_replaced_parts_reach_what_uses_them():
    class Doubled(LinearPower):
        def without_growth(self, k):
            return 2.0 * super().without_growth(k)

    np.testing.assert_allclose(Doubled(PLANCK)(0.1, 0.5), 2.0 * LinearPower(PLANCK)(0.1, 0.5))

    class Stretched(Distances):
        def comoving(self, a):
            return 1.1 * super().comoving(a)

    class Far(Theory):
        @functools.cached_property
        def distances(self):
            return Stretched(self.background)

    assert float(Far(PLANCK).distances.comoving(0.5)) == pytest.approx(
        1.1 * float(Theory(PLANCK).distances.comoving(0.5))
    )

    class ByScale(Growth):
        by_scale = True

        def d1(self, a, k=None):
            return super().d1(a) * (1.0 if k is None else 1.0 / (1.0 + np.asarray(k)))

    class OfScale(Theory):
        @functools.cached_property
        def growth(self):
            return ByScale(self.background)

    power = OfScale(PLANCK).power
    k = np.geomspace(1e-4, 50.0, 4000)
    window = 3 * (np.sin(8 * k) - 8 * k * np.cos(8 * k)) / (8 * k) ** 3
    variance = np.trapezoid(k**3 * power(k) * window**2 / (2 * np.pi**2), np.log(k))
    assert np.sqrt(variance) == pytest.approx(PLANCK.sigma8, rel=1e-4)
    assert float(power.sigma8()) == pytest.approx(PLANCK.sigma8, rel=1e-12)
    np.testing.assert_allclose(Halofit(power)(1e-3), power(1e-3), rtol=1e-3)
    with pytest.raises(ValueError, match="can be simulated only where massive neutrinos"):
        simulation(OfScale)


def test_a_snapshot_of_another_theory_warns(tmp_path):
    path = simulation(with_fluid(0.1)).lpt(seed=1).save(tmp_path)
    with pytest.warns(UserWarning, match="Omega_de = 0.59.*give State.from_snapshot"):
        fpm.State.from_snapshot(path)
    with pytest.raises(ValueError, match="w0 . wa = 0.3 of a fluid: must be below 0"):
        Fluid(1e-4, 0.3)
