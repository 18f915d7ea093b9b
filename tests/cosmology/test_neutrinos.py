"""Radiation and massive neutrinos: CAMB's expansion and growth, exact limits, gradients, runs."""

import functools
import tomllib
from pathlib import Path

import astropy.cosmology
import astropy.units as u
import numpy as np
import pytest
import tensorflow as tf
from reference import reference
from scipy.integrate import quad, solve_ivp

import flowpm_dist as fpm
from flowpm_dist.cosmology import Background, Growth, Halofit, PowerTable, Theory
from flowpm_dist.cosmology.camb_tables import camb_power_table
from flowpm_dist.cosmology.growth import GrowthByScale, growth_of
from flowpm_dist.cosmology.growth_equations import A_MIN
from flowpm_dist.cosmology.neutrinos import SPECIES, Neutrinos
from flowpm_dist.cosmology.parameters import SHAPE
from flowpm_dist.evolution.corrections import CorrectionWarning
from flowpm_dist.io.particles import Header
from flowpm_dist.jobs.run_file import ConfigError
from flowpm_dist.simulate.options import SimulationOptions

WITHOUT = fpm.Cosmology.planck18().replace(A_s=2.1e-9)
PLANCK = WITHOUT.replace(radiation=True)
MASSES = (0.0, 0.06, 0.15, 0.4)


@functools.cache
def theory(mass, transfer="camb"):
    return Theory(PLANCK.replace(m_nu=mass, transfer=transfer))


@pytest.mark.parametrize("number", range(len(MASSES)))
def test_the_expansion_is_cambs(number):
    camb = reference("camb_neutrinos")
    mass, a = float(camb["m_nu"][number]), camb["a"]
    here = theory(mass)
    np.testing.assert_allclose(here.background.e(a), camb["E"][number], rtol=1e-5)
    np.testing.assert_allclose(here.distances.comoving(a), camb["chi"][number], rtol=1e-5)
    chi = here.distances.comoving(a)
    np.testing.assert_allclose(here.distances.scale_factor(chi), a, rtol=1e-10)
    graph = tf.function(here.distances.scale_factor)(chi[1:])  # which does not know its values
    np.testing.assert_allclose(graph, a[1:], rtol=1e-10)


@pytest.mark.parametrize("number", range(len(MASSES)))
def test_power_is_scaled_back_as_cambs(number):
    """Of cb and of all matter, to z = 39 for k of at least 0.02 h/Mpc, to z = 9 for all."""
    camb = reference("camb_neutrinos")
    mass, k, z = float(camb["m_nu"][number]), camb["k"], camb["z"]
    a = 1 / (1 + z[:, np.newaxis])
    small = (k >= 0.02) | (z[:, np.newaxis] <= 9)
    power = theory(mass).power
    of_cb = np.asarray(power.cb(k, a)) / camb["power_cb"][number] - 1
    assert np.abs(of_cb[small]).max() < (2.3e-3 if mass else 5e-4)
    of_all = np.asarray(power(k, a)) / camb["power_m"][number] - 1
    late = small & (z[:, np.newaxis] <= 19)
    assert np.abs(of_all[late]).max() < (4e-3 if mass else 4e-4)
    assert np.abs(of_all[small]).max() < 5e-3


@pytest.mark.parametrize("number", range(1, len(MASSES)))
def test_the_fits_suppression_is_cambs(number):
    camb = reference("camb_neutrinos")
    mass, k = float(camb["m_nu"][number]), camb["k"]
    ratio = theory(mass, "eisenstein-hu").power.cb(k) / theory(0.0, "eisenstein-hu").power(k)
    expected = camb["power_cb"][number, 0] / camb["power_cb"][0, 0]
    np.testing.assert_allclose(ratio, expected, rtol=0.01 * mass + 1e-3)


@pytest.mark.parametrize("number", range(len(MASSES)))
def test_halofit_is_cambs(number):
    """To what our linear power of all matter differs by, for k of at least 0.02 h/Mpc."""
    camb = reference("camb_neutrinos")
    mass, k = float(camb["m_nu"][number]), camb["k"]
    halofit = np.asarray(Halofit(theory(mass).power)(k, [[1.0], [0.5]]))
    expected, used = camb["power_halofit"][number], k >= 0.02
    np.testing.assert_allclose(halofit[:, used], expected[:, used], rtol=8e-3 * mass + 3e-4)


def test_density_and_pressure_are_integrals_over_momenta():
    m_nu, a = 0.3, np.array([1e-4, 1e-3, 0.02, 1.0])
    here = Neutrinos(m_nu, 3.046, 2.7255, 0.7, 0.3)
    temperature = 8.617333262e-5 * (4 / 11) ** (1 / 3) * (3.046 / 3) ** 0.25 * 2.7255

    def integral(function, x):
        def integrand(q):
            return q**2 * function(q, np.sqrt(q**2 + x**2)) / (np.exp(q) + 1)

        return quad(integrand, 0, 60, epsrel=1e-12)[0]

    massless = integral(lambda q, e: q, 0.0)
    densities, pressures = [], []
    for x in m_nu / SPECIES / temperature * a:
        densities.append(integral(lambda q, e: e, x) / massless)
        pressures.append(integral(lambda q, e: q**2 / e, x) / massless / 3)
    expected = here.Omega_massless * np.array(densities) / a
    np.testing.assert_allclose(here.a3_density(a), expected, rtol=1e-10)
    np.testing.assert_allclose(here.w(a), np.divide(pressures, densities), rtol=1e-9)
    clustering = here.Omega_massless * (np.array(densities) - 3 * np.array(pressures)) / a
    np.testing.assert_allclose(here.a3_clustering(a), clustering, rtol=1e-6)
    assert here.Omega_matter * 0.7**2 == pytest.approx(m_nu / 93.03, rel=1e-3)


def test_the_response_has_its_limits():
    here = Background(PLANCK.replace(m_nu=0.3)).neutrinos
    a = np.array([0.1, 1.0])
    (fraction,), (scale,) = here.fractions(a), here.free_streaming(a)
    assert scale[1] == pytest.approx(1.51 * np.sqrt(PLANCK.Omega_m) * 0.1, rel=5e-3)

    def of_neutrinos(k):
        """delta_nu / delta_cb."""
        return (here.gravity(k, a) - (1 - fraction)) / fraction

    np.testing.assert_allclose(of_neutrinos(1e-9), 1.0, rtol=1e-6)
    k = 1e4 * scale
    np.testing.assert_allclose(of_neutrinos(k), (1 - fraction) * 1e-8, rtol=1e-3)
    one = scale**2 * (1 - fraction) / ((0.1 + scale) ** 2 - fraction * scale**2)
    np.testing.assert_allclose(of_neutrinos(0.1), one, rtol=1e-12)


@pytest.mark.parametrize("k", [1e-3, 0.1])
def test_growth_by_scale_solves_its_equation(k):
    background = Background(PLANCK.replace(m_nu=0.3, Omega_k=0.02))
    growth = growth_of(background)
    assert isinstance(growth, GrowthByScale)

    def factor(a):
        return float(background.neutrinos.gravity(np.array(k), np.array(a)))

    def slopes(x, y):
        a = np.exp(x)
        friction = 2 + float(background.dlne_dlna(a))
        return y[1], 1.5 * float(background.omega_m(a)) * factor(a) * y[0] - friction * y[1]

    equality = A_MIN * (float(background.a3_e2(A_MIN)) - float(background.Omega_cb))
    constant, rising = 2 / 3 * equality / float(background.Omega_cb), factor(A_MIN) * A_MIN
    x = np.log([A_MIN, 0.02, 1.0])
    there = solve_ivp(
        slopes, x[[0, -1]], (constant + rising, rising), "DOP853", x[1:], rtol=1e-8, atol=1e-13
    )
    a = np.exp(x[1:])
    np.testing.assert_allclose(growth.d1(a, k), there.y[0], rtol=1e-6)
    np.testing.assert_allclose(growth.d1_dlna(a, k), there.y[1], rtol=1e-6)
    np.testing.assert_allclose(growth.f1(a, k), there.y[1] / there.y[0], rtol=1e-6)
    assert growth.d1(a, np.ones([5, 1])).shape == (5, 2)
    # at large scales neutrinos cluster
    np.testing.assert_allclose(growth.d1(a, 0.0), growth.d1(a), rtol=1e-2)


def test_growth_begins_in_the_era_of_radiation():
    """D = a + 2/3 a_eq without dark energy; higher orders as in an Einstein-de Sitter universe."""
    growth = Growth(PLANCK.replace(Omega_m=1.0))
    background = growth.background
    radiation = float(background.a3_e2(1e-5) - background.Omega_m) * 1e-5
    a = np.array([1e-6, 1e-4, 1e-3])
    np.testing.assert_allclose(growth.d1(a), a + 2 / 3 * radiation, rtol=1e-8)
    assert float(growth.d2(1.0)) == pytest.approx(3 / 7 * float(growth.d1(1.0)) ** 2, rel=1e-3)
    with pytest.raises(ValueError, match="with radiation must lie between 1e-06 and 2, got 0"):
        growth.d1(0.0)


def test_gradients_by_each_parameter_are_differences():
    """Of Halofit's power, too, and by a mass of 0, from which one side is allowed."""
    k = np.array([1e-3, 0.05, 2.0])

    def value(mass, **changed):
        here = Theory(PLANCK.replace(sigma8=0.8, m_nu=mass, **changed))
        parts = (
            Halofit(here.power)(k, 0.3),
            here.growth.f1(0.5, k) * np.ones(3),
            [here.distances.comoving(0.3) / 1e3],
        )
        return sum(tf.reduce_sum(tf.math.log(tf.convert_to_tensor(part))) for part in parts)

    values = {"m_nu": 0.2, "h": 0.7, "Omega_m": 0.3, "N_eff": 3.0, "T_cmb": 2.7}
    with tf.GradientTape() as tape:
        tensors = {name: tf.Variable(v, dtype=tf.float64) for name, v in values.items()}
        loss = value(tensors["m_nu"], **{n: t for n, t in tensors.items() if n != "m_nu"})
    for name, slope in tape.gradient(loss, tensors).items():
        step = 1e-4 * values[name]
        low, high = (
            value((changed := values | {name: values[name] + s}).pop("m_nu"), **changed)
            for s in (-step, step)
        )
        assert float(slope) == pytest.approx(float(high - low) / (2 * step), rel=1e-5), name
    with tf.GradientTape() as tape:
        mass = tf.Variable(0.0, dtype=tf.float64)
        loss = value(mass)
    first, second = (float(value(step) - value(0.0)) / step for step in (1e-5, 2e-5))
    assert float(tape.gradient(loss, mass)) == pytest.approx(2 * first - second, rel=1e-3)


@functools.cache
def growth_of_a_wave(mass, integrator, waves, amplitude):
    """The growth of a plane wave from a = 0.1 to 1 in a run."""
    cells, size = 64, 256.0
    sim = fpm.Simulation(
        PLANCK.replace(m_nu=mass),
        (cells, 4, 4),
        (size, size * 4 / cells, size * 4 / cells),
        fpm.scale_factor_steps(0.1, 1.0, 10),
        integrator=integrator,
        lpt_order=2 if integrator == "cola" else 1,
        precision="float64",
    )
    along = amplitude * np.cos(2 * np.pi * waves * np.arange(cells) / cells)
    noise = along[:, np.newaxis, np.newaxis] * np.ones((cells, 4, 4))
    end, begin = sim.run(white_noise=noise), sim.lpt(white_noise=noise, a=0.1)
    waves_of = [np.fft.fft(s.displacement.numpy()[:, 0, 0, 0])[waves] for s in (end, begin)]
    return abs(waves_of[0] / waves_of[1]), 2 * np.pi * waves / size, sim.theory.power


@pytest.mark.parametrize(
    ("integrator", "tolerance"), [("bullfrog", 3e-4), ("fastpm", 4e-4), ("cola", 3e-3)]
)
@pytest.mark.parametrize(("waves", "amplitude"), [(2, 0.06), (4, 0.05)])
def test_waves_grow_by_scale_in_runs(integrator, tolerance, waves, amplitude):
    """Neutrinos slow the growth of a wave by 2.3 %, as linear theory says."""
    masses = (0.0, 0.05, 0.25) if waves == 2 else 0.3
    with_mass, k, power = growth_of_a_wave(masses, integrator, waves, amplitude)
    without, _, massless = growth_of_a_wave(0.0, integrator, waves, amplitude)

    def linear(each):
        return np.sqrt(float(each.cb(k, 1.0)) / float(each.cb(k, 0.1)))

    expected = linear(power) / linear(massless)
    assert expected < 0.983
    assert with_mass / without == pytest.approx(expected, rel=tolerance)


THREE = (0.0, 0.05, 0.25)


def test_three_masses_grow_as_in_camb():
    """As near as equal ones, which would be off by 0.9 % of power at z = 9."""
    here = PLANCK.replace(m_nu=THREE)
    numbers = {name: float(getattr(here, name)) for name in SHAPE}
    shares = here.m_nu_shares
    k, power = camb_power_table((0.0, 9.0), "linear", 2.1e-9, "delta_nonu", shares, **numbers)
    used, table = (k > 0.02) & (k < 10), PowerTable(k, power[0], of="cb")
    ratios = [
        np.asarray(fpm.LinearPower(each.replace(A_s=None, power=table)).cb(k, 0.1))[used]
        / power[1, used]
        for each in (here, here.replace(m_nu_shares=()))
    ]
    np.testing.assert_allclose(ratios[0], 1.0, rtol=2.3e-3)
    assert np.abs(ratios[1] - 1).max() > 0.008


def test_three_masses_as_arguments():
    three = PLANCK.replace(m_nu=THREE)
    assert three.m_nu == pytest.approx(0.3) and three.m_nu_shares == pytest.approx(
        (0, 1 / 6, 5 / 6)
    )
    assert fpm.Cosmology(**three.numbers()) == three and "m_nu_shares" in three.facts()
    assert PLANCK.replace(m_nu=(0.1, 0.1, 0.1)).m_nu_shares == ()
    assert PLANCK.replace(m_nu=[0.0, 0.0, 0.0]) == PLANCK
    assert three.replace(m_nu=0.6).m_nu_shares == three.m_nu_shares
    assert three.replace(m_nu=(0.0, 0.0, 0.1)).m_nu_shares == (0, 0, 1)
    np.testing.assert_allclose(
        Background(three).e(0.02),
        Background(three.replace(m_nu_shares=(3, 0, 15))).e(0.02),
        rtol=1e-15,
    )
    for wrong in (dict(m_nu=(0.1, 0.2)), dict(m_nu=(-0.1, 0.1, 0.2)), dict(m_nu_shares=(1, 2))):
        with pytest.raises(ValueError, match=r"m_nu(_shares)? must be 3 numbers of at least 0"):
            PLANCK.replace(**wrong)
    with pytest.raises(ValueError, match="go with the sum of the masses"):
        PLANCK.replace(m_nu=THREE, m_nu_shares=(1, 1, 2))
    with pytest.raises(TypeError, match="give the sum of the masses as a tensor"):
        PLANCK.replace(m_nu=(tf.constant(0.1), 0.1, 0.2))


def test_the_sum_of_three_masses_has_a_gradient():
    sim = fpm.Simulation(PLANCK, 8, 32.0, [0.1, 0.5, 1.0], precision="float64")

    def size(total):
        universe = PLANCK.replace(m_nu=total, m_nu_shares=(0, 1, 5))
        return tf.reduce_sum(sim.run(seed=1, cosmology=universe).displacement.block ** 2)

    total = tf.Variable(0.3, dtype=tf.float64)
    with tf.GradientTape() as tape:
        value = size(total)
    low, high = size(0.2999), size(0.3001)
    assert float(tape.gradient(value, total)) == pytest.approx(float(high - low) / 2e-4, rel=1e-6)


def test_three_masses_in_a_run_file():
    cosmology = dict(Omega_m=0.3, Omega_b=0.05, h=0.7, n_s=1.0, sigma8=0.8, radiation=True)
    table = {"box": {"grid": 8, "size": 64.0}, "initial": {"seed": 1}}

    def universe(**more):
        options = SimulationOptions.check(table | {"cosmology": cosmology | more}, Path("run.toml"))
        again = SimulationOptions.check(tomllib.loads(options.resolved()), Path("run.toml"))
        assert again == options
        return fpm.Cosmology(**options.cosmology.arguments())

    assert universe(m_nu=list(THREE)) == fpm.Cosmology(**cosmology, m_nu=THREE)
    of_sum = universe(m_nu=0.3, m_nu_shares=[0.0, 1.0, 5.0])
    assert of_sum.m_nu_shares == pytest.approx((0, 1 / 6, 5 / 6))
    for wrong in ([0.1, 0.2], [-0.1, 0.1, 0.1], ["a", 0.1, 0.1]):
        with pytest.raises(ConfigError, match="cosmology.m_nu = .*a sum of masses, or three"):
            universe(m_nu=wrong)
    with pytest.raises(ConfigError, match="cosmology.m_nu_shares .*not all 0"):
        universe(m_nu=0.3, m_nu_shares=[0.0, 0.0, 0.0])
    with pytest.raises(ConfigError, match="cosmology.m_nu_shares goes with the sum of the masses"):
        universe(m_nu=list(THREE), m_nu_shares=[1.0, 1.0, 2.0])


def test_sigma8_is_of_all_matter():
    power = Theory(PLANCK.replace(m_nu=0.3, sigma8=0.8)).power
    assert float(power.sigma8()) == pytest.approx(0.8, rel=1e-12)
    assert 0.81 < float(power.sigma8_cb()) < 0.82


def test_wrong_masses_are_named():
    with pytest.raises(ValueError, match="m_nu must be a sum of masses in eV, from 0 to 2; got -0"):
        PLANCK.replace(m_nu=-0.1)
    with pytest.raises(ValueError, match="m_nu = 0.1: needs radiation = true"):
        WITHOUT.replace(m_nu=0.1)
    for wrong in (dict(Omega_b=0.27), dict(N_eff=10.0, Omega_b=0.2)):
        with pytest.raises(ValueError, match="m_nu = 2: with Omega_b, neutrinos are more than"):
            PLANCK.replace(m_nu=2.0, **wrong)
    with pytest.raises(ValueError, match="N_eff = 0: must be above 0 with massive neutrinos"):
        PLANCK.replace(m_nu=0.1, N_eff=0.0)
    with pytest.raises(TypeError, match="radiation must be True or False, got 1"):
        WITHOUT.replace(radiation=1)
    with pytest.raises(ValueError, match="with radiation a run must start later"):
        fpm.Simulation(PLANCK, 4, 16.0, [0.0, 1.0], integrator="bullfrog")
    cosmology = dict(Omega_m=0.3, Omega_b=0.05, h=0.7, n_s=1.0, sigma8=0.8, m_nu=0.06)
    table = {"box": {"grid": 8, "size": 64.0}, "cosmology": cosmology, "initial": {"seed": 1}}
    with pytest.raises(ConfigError, match=r"cosmology.m_nu = 0.06: needs radiation = true"):
        SimulationOptions.check(table, Path("run.toml"))
    table["cosmology"]["radiation"] = True
    table["evolution"] = {"integrator": "bullfrog", "a_start": 0.0}
    with pytest.raises(ConfigError, match="evolution.a_start starts at 0: with radiation a run"):
        SimulationOptions.check(table, Path("run.toml"))
    cone = {"pixels": 8, "z_max": 0.1, "sources": [{"redshift": 0.1}], "field_of_view": 2.0}
    accepted = table | {"evolution": {"a_start": 0.1}, "lightcone": cone}
    options = SimulationOptions.check(accepted, Path("run.toml"))
    assert options.cone.painted_maps(options.cosmology) == 4


def test_astropys_radiation_is_taken():
    numbers = dict(H0=68.0, Om0=0.3, Ode0=0.68, Ob0=0.05, Tcmb0=2.7255, Neff=3.0)
    there = astropy.cosmology.LambdaCDM(**numbers, m_nu=[0.1, 0.1, 0.1] * u.eV)
    here = fpm.Cosmology.from_astropy(there, n_s=0.96, sigma8=0.8, radiation=True)
    a = np.array([0.02, 0.3, 1.0])
    # its neutrinos are a fit
    np.testing.assert_allclose(Background(here).e(a), there.efunc(1 / a - 1), rtol=3e-4)
    assert here.m_nu == pytest.approx(0.3)
    assert here.Omega_m == pytest.approx(there.Om0 + there.Onu0, rel=1e-4)
    massless = astropy.cosmology.LambdaCDM(**numbers)
    here = fpm.Cosmology.from_astropy(massless, n_s=0.96, sigma8=0.8, radiation=True)
    np.testing.assert_allclose(Background(here).e(a), massless.efunc(1 / a - 1), rtol=1e-7)
    spectrum = dict(n_s=0.96, sigma8=0.8, radiation=True)
    here = fpm.Cosmology.from_astropy(astropy.cosmology.Planck18, **spectrum)
    assert here.m_nu_shares == (0, 0, 1) and here.m_nu == 0.06
    four = astropy.cosmology.LambdaCDM(**numbers | {"Neff": 4.1}, m_nu=[0, 0, 0, 0.06] * u.eV)
    with pytest.warns(UserWarning, match="0, 0, 0, 0.06 eV; here each of three has a third"):
        fpm.Cosmology.from_astropy(four, **spectrum)


def test_universes_of_a_batch_with_and_without_masses():
    sim = fpm.Simulation(PLANCK, 8, 64.0, fpm.scale_factor_steps(0.1, 1.0, 2))
    masses = (0.0, 0.3)
    universes = [PLANCK.replace(m_nu=mass) for mass in masses]
    together = sim.run(seed=[1, 1], cosmology=universes).displacement.numpy()
    for each, universe in zip(together, universes, strict=True):
        alone = sim.run(seed=1, cosmology=universe).displacement.numpy()
        np.testing.assert_allclose(each, alone, atol=2e-5)
    three = [PLANCK, PLANCK.replace(m_nu=(0.0, 0.05, 0.25))]
    together = sim.run(seed=[1, 1], cosmology=three).displacement.numpy()
    for each, universe in zip(together, three, strict=True):
        alone = sim.run(seed=1, cosmology=universe).displacement.numpy()
        np.testing.assert_allclose(each, alone, atol=2e-5)
    with pytest.raises(ValueError, match="the same m_nu_shares"):
        sim.run(seed=[1, 1], cosmology=[three[1], universes[1]])
    with pytest.raises(ValueError, match="must have radiation, or none of them"):
        sim.run(seed=[1, 1], cosmology=[PLANCK, WITHOUT])


def test_a_mass_that_is_a_tensor():
    zero = tf.constant(0.0, tf.float64)
    power = fpm.LinearPower(PLANCK.replace(m_nu=zero))
    np.testing.assert_allclose(power([0.0, 0.1]), fpm.LinearPower(PLANCK)([0.0, 0.1]), rtol=1e-9)
    k = np.array([0.0, 0.1])
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(zero)
        factors = tf.unstack(Background(PLANCK.replace(m_nu=zero)).neutrinos.matter(k, 1.0))
    slopes = [float(tape.gradient(factor, zero)) for factor in factors]
    step = Background(PLANCK.replace(m_nu=1e-5)).neutrinos.matter(k[1], 1.0)
    assert slopes == [0.0, pytest.approx((float(step) - 1) / 1e-5, rel=1e-3)]
    with pytest.raises(ValueError, match="m_nu, a tensor: needs radiation = true"):
        WITHOUT.replace(m_nu=zero)


def test_more_neutrinos_lower_the_power_as_in_camb():
    """At a fixed A_s they delay equality; the fit is within a quarter of what CAMB says."""
    k = np.array([0.02, 0.1, 1.0])
    changes = []
    for transfer in ("eisenstein-hu", "camb"):
        few, many = (
            np.asarray(fpm.LinearPower(PLANCK.replace(N_eff=n, transfer=transfer))(k))
            for n in (2.5, 3.5)
        )
        changes.append(np.log(many / few))
    assert (changes[1] < -0.05).all()
    np.testing.assert_allclose(changes[0], changes[1], rtol=0.25)


def test_particles_have_the_mass_of_cb_and_linear_fields_no_single_growth():
    massive = PLANCK.replace(m_nu=0.3)
    sim = fpm.Simulation(massive, 8, 64.0, [0.1, 0.5])
    state = sim.lpt(seed=1)
    header, light = (
        Header.of(each.header()) for each in (state, sim.lpt(seed=1, cosmology=PLANCK))
    )
    fraction = float(Background(massive).Omega_cb) / PLANCK.Omega_m
    assert header.mass / light.mass == pytest.approx(fraction, rel=1e-12) != 1.0
    with pytest.raises(ValueError, match="m_nu: linear fields before a = 1"):
        state.linear_growth  # noqa: B018


def test_a_correction_knows_no_radiation():
    with pytest.warns(CorrectionWarning, match="radiation = 1, where it was trained with 0"):
        fpm.Simulation(
            PLANCK, 32, 64.0, fpm.scale_factor_steps(0.1, 1.0, 10), integrator="bullfrog",
            correction="default",
        )  # fmt: skip
