"""Linear power as a table: from arrays, files, functions, and objects of CAMB and CLASS."""

from __future__ import annotations

import functools
import pickle
import re
import types
import warnings

import numpy as np
import pytest
import tensorflow as tf

from flowpm_dist.cosmology import Cosmology, Halofit, LinearPower, PowerTable
from flowpm_dist.cosmology.boltzmann_tables import boltzmann_spline
from flowpm_dist.cosmology.nonlinear import NonlinearPower
from flowpm_dist.cosmology.power_table import unit_doubt
from flowpm_dist.simulate.options import SimulationOptions
from flowpm_dist.simulation.simulation import Simulation
from flowpm_dist.simulation.state import State

UNIVERSE = dict(Omega_m=0.31, Omega_b=0.049, h=0.68, n_s=0.96)
MASSES = dict(radiation=True, m_nu=0.3)
K = np.geomspace(1e-4, 20.0, 800)
BETWEEN = np.geomspace(2e-4, 15.0, 333)


@pytest.fixture(scope="module")
def fit():
    return LinearPower(Cosmology(**UNIVERSE, sigma8=0.8))


@pytest.fixture(scope="module")
def table(fit):
    return PowerTable(K, fit(K))


def power_of(table, **more):
    return LinearPower(Cosmology(**UNIVERSE, power=table, **more))


def test_the_power_between_rows_and_beyond_the_ends(fit, table):
    power = power_of(table)
    np.testing.assert_allclose(power(BETWEEN), fit(BETWEEN), rtol=3e-5)  # wiggles, 65 rows a decade
    np.testing.assert_allclose(power(K, 0.3), fit(K, 0.3), rtol=1e-7)
    k = np.array([K[-1], 40.0, 80.0])
    ratios = np.diff(np.log(power(k))) / np.diff(np.log(k))
    slope = np.diff(np.log(fit(K[-2:]))) / np.diff(np.log(K[-2:]))
    np.testing.assert_allclose(ratios, [*slope, *slope], rtol=1e-3)
    assert power(0.0) == 0


def test_the_amplitude_is_the_tables_unless_sigma8_is_given(fit, table):
    np.testing.assert_allclose(power_of(table).sigma8(), 0.8, rtol=1e-7)
    sigma8 = tf.constant(0.7, tf.float64)
    with tf.GradientTape() as tape:
        tape.watch(sigma8)
        power = power_of(table, sigma8=sigma8)
        value = power(0.1)
    np.testing.assert_allclose(power.sigma8(), 0.7, rtol=1e-12)
    np.testing.assert_allclose(value, (0.7 / 0.8) ** 2 * fit(0.1), rtol=1e-6)
    np.testing.assert_allclose(tape.gradient(value, sigma8), 2 * value / 0.7, rtol=1e-12)


@pytest.mark.parametrize("name", UNIVERSE)
def test_no_other_parameter_has_a_derivative(table, name):
    value = tf.constant(UNIVERSE[name], tf.float64)
    with tf.GradientTape() as tape:
        tape.watch(value)
        result = LinearPower(Cosmology(**{**UNIVERSE, name: value}, power=table))(0.1)
    with pytest.raises(LookupError, match=f"a table of power gives no derivative .* by {name}"):
        tape.gradient(result, value)


@pytest.mark.parametrize("of", ["matter", "cb"])
def test_a_table_of_another_time_of_all_matter_or_of_cb(of):
    """Its growth to other times is by scale, where neutrinos have a mass."""
    whole = LinearPower(Cosmology(**UNIVERSE, **MASSES, sigma8=0.8))
    early = (whole if of == "matter" else whole.cb)(K, 0.1)
    power = power_of(PowerTable(K, early, 9.0, of=of), **MASSES)
    for a in (0.02, 1.0):
        np.testing.assert_allclose(power(K, a), whole(K, a), rtol=1e-6)
        np.testing.assert_allclose(power.cb(K, a), whole.cb(K, a), rtol=1e-6)


def test_lengths_without_h(fit, table):
    h = UNIVERSE["h"]
    columns = K * h, fit(K) / h**3
    with warnings.catch_warnings(action="error"):
        power = power_of(PowerTable(*columns, unit="Mpc"))
        for universe in (power.cosmology, Cosmology(**UNIVERSE, power=table)):
            Simulation(universe, 8, 64.0, [0.1, 1.0])
    np.testing.assert_allclose(power(K), fit(K), rtol=1e-7)
    with pytest.warns(UserWarning, match=r"largest at k = 0.01118 .* near 0.01653, .* at 0.01644"):
        Simulation(Cosmology(**UNIVERSE, power=columns), 8, 64.0, [0.1, 1.0])
    wrong = Cosmology(**UNIVERSE, power=PowerTable(K, fit(K), unit="Mpc"))
    with pytest.warns(UserWarning, match='unit = "Mpc/h"'):
        Simulation(wrong, 8, 64.0, [0.1, 1.0])


@pytest.mark.parametrize("Omega_m", [0.15, 0.3, 0.45])
@pytest.mark.parametrize("h", [0.55, 0.68, 0.75])
@pytest.mark.parametrize("n_s", [0.88, 1.02])
@pytest.mark.parametrize("fraction", [0.05, 0.2])
def test_the_unit_is_told_by_the_peak(Omega_m, h, n_s, fraction):
    on_peak = dict(Omega_m=Omega_m, Omega_b=fraction * Omega_m, h=h, n_s=n_s)
    values = LinearPower(Cosmology(**on_peak, sigma8=0.8))(K)
    assert unit_doubt(PowerTable(K, values), **on_peak) == ""
    assert 'unit = "Mpc"' in unit_doubt(PowerTable(K * h, values), **on_peak)
    assert unit_doubt(PowerTable(K[400:], values[400:]), **on_peak) == ""  # no peak
    assert unit_doubt(PowerTable(K, values), **{**on_peak, "h": 1.0}) == ""  # both units are one


def test_pairs_functions_and_numbers(fit, table):
    given = {"pair": (K, fit(K)), "function": fit, "numbers": table.numbers()}
    for name, power in given.items():
        np.testing.assert_allclose(power_of(power)(BETWEEN), fit(BETWEEN), rtol=3e-5, err_msg=name)
    universe = Cosmology(**UNIVERSE, power=table)
    again = Cosmology(**universe.numbers())
    assert again == universe and hash(again) == hash(universe)
    assert pickle.loads(pickle.dumps(universe)) == universe
    assert again != Cosmology(**UNIVERSE, power=(K, 1.01 * table.power))
    assert len(repr(universe)) < 400 and universe.facts()["power"] == repr(table)


@functools.cache
def with_neutrinos(number: int):
    """Results of camb with 0.15 eV in a number of neutrinos."""
    import camb

    p, h2 = UNIVERSE, UNIVERSE["h"] ** 2
    ombh2, omnuh2 = p["Omega_b"] * h2, 0.15 / 93.14
    run = camb.set_params(
        H0=100 * p["h"], ombh2=ombh2, omch2=p["Omega_m"] * h2 - ombh2 - omnuh2, mnu=0.15, nnu=3.046,
        num_massive_neutrinos=number, As=2e-9, ns=p["n_s"], redshifts=[0.0], kmax=2.0,
    )  # fmt: skip
    run.WantCls = False
    return camb.get_results(run)


@pytest.mark.parametrize("number, masses", [(3, 0.15), (3, [0.05, 0.05, 0.05]), (1, [0.15, 0, 0])])
def test_masses_of_neutrinos_are_those_of_camb(number, masses):
    made = Cosmology(**UNIVERSE, radiation=True, m_nu=masses, power=with_neutrinos(number))
    assert made.power.of == "cb"


def test_one_heavy_neutrino_is_not_three():
    """Which is camb's default."""
    with pytest.raises(ValueError, match="neutrinos of 0, 0, 0.15 eV, the cosmology of 0.05, 0.05"):
        Cosmology(**UNIVERSE, radiation=True, m_nu=0.15, power=with_neutrinos(1))
    for name, value in (("N_eff", 2.0), ("T_cmb", 2.6)):
        others = {"m_nu": 0.15, name: value}
        with pytest.raises(ValueError, match=f"object of camb has {name} = "):
            Cosmology(**UNIVERSE, radiation=True, **others, power=with_neutrinos(3))


def test_what_camb_has_computed(monkeypatch):
    import camb

    p, h2 = UNIVERSE, UNIVERSE["h"] ** 2
    run = camb.set_params(
        H0=100 * p["h"], ombh2=p["Omega_b"] * h2, omch2=(p["Omega_m"] - p["Omega_b"]) * h2,
        mnu=0, nnu=3.046, As=2e-9, ns=p["n_s"], redshifts=[3.0, 0.5], kmax=2.0,
    )  # fmt: skip
    run.WantCls = False
    results = camb.get_results(run)
    power, theirs = power_of(results), results.get_matter_power_interpolator(nonlinear=False)
    assert (power.cosmology.power.redshift, power.cosmology.power.of) == (0.5, "cb")
    k = np.geomspace(1e-3, 2.0, 100)
    np.testing.assert_allclose(power(k, 1 / 1.5), theirs.P(0.5, k), rtol=1e-4)
    others = dict(h=0.7, n_s=0.97, w0=-0.9, wa=0.1, Omega_k=0.1)
    others |= dict(Omega_m=0.32, m_nu=0.06, radiation=True)
    for name, value in {k: v for k, v in others.items() if k != "radiation"}.items():
        of_name = {name: value, **({"radiation": True} if name == "m_nu" else {})}
        with pytest.raises(ValueError, match=f"object of camb has {name} = .*cosmology {value:g}"):
            Cosmology(**{**p, **of_name}, power=results)
    monkeypatch.setattr(camb.CAMBdata, "get_linear_matter_power_spectrum", lambda *_: 1 / 0)
    with pytest.raises(ValueError, match="object of camb has no matter power: division"):
        power_of(results)


class Class:
    """What `classy.Class` gives, at z = 0 and 1 [Mpc]."""

    def __init__(self, power):
        self.power = power

    def h(self):
        return UNIVERSE["h"]

    def Omega0_m(self):
        return UNIVERSE["Omega_m"]

    def Omega_b(self):
        return UNIVERSE["Omega_b"]

    def Omega0_k(self):
        return 0.0

    def n_s(self):
        return UNIVERSE["n_s"]

    def T_cmb(self):
        return 2.7255

    def Neff(self):
        return 3.046

    Omega_nu, pars = 0.0, {}

    def get_pk_and_k_and_z(self, *, nonlinear, only_clustering_species):
        assert not nonlinear and only_clustering_species
        if self.power is None:
            raise RuntimeError("no P(k)")
        h = self.h()
        values = np.transpose([self.power(K, 0.5), self.power(K, 1.0)])
        return values / h**3, K * h, np.array([1.0, 0.0])


def test_what_class_has_computed(fit, monkeypatch):
    monkeypatch.setattr(Class, "__module__", "classy._classy")
    np.testing.assert_allclose(power_of(Class(fit))(K), fit(K), rtol=1e-7)
    with pytest.raises(ValueError, match=r"z_max_pk above 0: no P\(k\)"):
        power_of(Class(None))
    with pytest.raises(ValueError, match=r"object of classy has Omega_m = 0.31, the cosmology 0.3"):
        Cosmology(**{**UNIVERSE, "Omega_m": 0.3}, power=Class(fit))
    monkeypatch.setattr(Class, "h", lambda self: 0.0)
    with pytest.raises(ValueError, match="has not been computed"):
        power_of(Class(fit))


@pytest.mark.parametrize("more", [{}, {"w0": -0.9, "wa": 0.1}, {"Omega_k": 0.05}, MASSES])
def test_class_is_near_camb(more):
    pytest.importorskip("classy")
    ours, theirs = (
        LinearPower(Cosmology(**UNIVERSE, A_s=2e-9, transfer=name, **more))
        for name in ("class", "camb")
    )
    k = np.geomspace(1e-3, 5.0, 100)
    np.testing.assert_allclose(ours(k), theirs(k), rtol=4e-3 if "m_nu" in more else 1e-3)


def test_neutrinos_of_class_are_compared(fit, monkeypatch):
    """Its settings are numbers, or texts of several."""
    monkeypatch.setattr(Class, "__module__", "classy._classy")
    monkeypatch.setattr(Class, "Omega_nu", 0.15 / 93.0 / UNIVERSE["h"] ** 2)
    hot = dict(UNIVERSE, radiation=True)
    one, three = [0.15, 0.0, 0.0], 0.15
    for pars, right, wrong in (
        ({"m_ncdm": 0.15, "N_ncdm": 1}, one, three),
        ({"m_ncdm": 0.05, "deg_ncdm": 3}, three, one),
        ({"m_ncdm": "0.05,0.05,0.05", "deg_ncdm": "1,1,1"}, three, one),
        ({"m_ncdm": "0.1, 0.05"}, [0.0, 0.05, 0.1], three),
    ):
        monkeypatch.setattr(Class, "pars", pars)
        Cosmology(**hot, m_nu=right, power=Class(fit))
        with pytest.raises(ValueError, match="object of classy has neutrinos of .* deg_ncdm"):
            Cosmology(**hot, m_nu=wrong, power=Class(fit))
        for name, value in (("N_eff", 2.0), ("T_cmb", 2.6)):
            with pytest.raises(ValueError, match=f"object of classy has {name} = "):
                Cosmology(**hot, m_nu=right, **{name: value}, power=Class(fit))


def test_what_class_is_told(monkeypatch):
    """Curvature, dark energy and neutrinos as `test_class_is_near_camb` found them right."""
    told = {}

    class Recorder(Class):
        def set(self, settings):
            told.update(settings)

        def compute(self):
            self.power = lambda k, a: np.ones_like(k)

        def struct_cleanup(self): ...

        empty = struct_cleanup

    monkeypatch.setattr(Recorder, "__module__", "classy")
    errors = dict.fromkeys(("CosmoSevereError", "CosmoComputationError"), RuntimeError)
    module = types.SimpleNamespace(Class=lambda: Recorder(None), **errors)
    monkeypatch.setitem(__import__("sys").modules, "classy", module)
    boltzmann_spline("class", **UNIVERSE, w0=-0.9, m_nu=0.3, Omega_k=0.1)
    assert told["Omega_cdm"] == pytest.approx(0.31 - 0.049 - 0.3 / 93.0 / 0.68**2, abs=2e-5)
    assert (told["w0_fld"], told["Omega_k"], told["N_ur"]) == (-0.9, 0.1, 0)
    assert told["T_ncdm"] == pytest.approx(0.71649, abs=1e-5)
    assert told["m_ncdm"] == pytest.approx(0.1)
    monkeypatch.setitem(__import__("sys").modules, "classy", None)
    with pytest.raises(ImportError, match="pip install classy"):
        LinearPower(Cosmology(**{**UNIVERSE, "h": 0.6712}, sigma8=0.8, transfer="class"))
    with pytest.raises(ValueError, match='transfer="class" needs baryons'):
        boltzmann_spline("class", **{**UNIVERSE, "Omega_b": 0.0})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(A_s=2e-9), "A_s = 2e-09: goes without power.* sigma8 rescales it"),
        (dict(f_NL=1.0), "f_NL = 1.0: goes without power"),
        (dict(f_NL=tf.constant(0.0)), "f_NL = .*: goes without power"),
        (dict(transfer="camb"), "transfer = camb: goes without power"),
        (dict(A_s=2e-9, sigma8=0.8), "exactly one of A_s and sigma8"),
    ],
)
def test_choices_that_a_table_does_not_tell(table, change, message):
    with pytest.raises(ValueError, match=message):
        Cosmology(**UNIVERSE, power=table, **change)


def test_what_needs_the_primordial_power_says_so(table):
    power = power_of(table)
    for use in (lambda: power.A_s, lambda: power.potential(0.1)):
        with pytest.raises(ValueError, match="no primordial power"):
            use()
    with pytest.raises(ValueError, match="use Halofit"):
        NonlinearPower(power.cosmology)
    assert Halofit(power)(1.0, 1.0) > power(1.0)


def test_a_table_has_no_derivatives_and_says_so(table):
    values = tf.Variable(table.power)
    PowerTable(K, values)  # no tape
    with tf.GradientTape() as tape:
        tape.watch(redshift := tf.constant(1.0))
        for make in (
            lambda: PowerTable(K, values),
            lambda: Cosmology(**UNIVERSE, power=lambda k: values[0] / k),
            lambda: PowerTable(K, K, redshift=redshift),
        ):
            with pytest.raises(TypeError, match="a table of power has no derivatives"):
                make()


def test_sigma8_needs_the_power_of_its_spheres(fit):
    for rows in (slice(400, None), slice(0, 500)):
        with pytest.raises(ValueError, match=r"sigma8 needs P from k = 0.003 to 1 h/Mpc"):
            power_of((K[rows], fit(K)[rows]), sigma8=0.8)
    within = (K > 3e-3) & (K < 1.03)
    within[np.argmax(within) - 1] = True
    power = power_of((K[within], fit(K[within])), sigma8=0.8)
    np.testing.assert_allclose(power(0.1), fit(0.1), rtol=2e-3)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (([0.1, 0.3, 0.2, 0.4], np.ones(4)), r"row 2 \(from 0\) has k = 0.2 after 0.3"),
        (([0.1, 0.2, 0.3, 0.4], [1, 2, 0, 1]), r"P .* above 0: row 2 \(from 0\) has 0"),
        (([-0.1, 0.2, 0.3, 0.4], np.ones(4)), "k .* row 0"),
        (([0.1, 0.2, 0.3, 0.4], [1, np.nan, 1, 1]), "row 1 .* has nan"),
        (([0.1, 0.2, 0.3], np.ones(3)), "at least 4 rows"),
        (([0.1, 0.2, 0.3, 0.4], np.ones(5)), "got 4 and 5"),
        (([0.1, 0.2, 0.3, 0.4], np.ones(4), -1.0), "redshift = -1"),
        ((np.ones([4, 2]), np.ones([4, 2])), "a column of numbers"),
        ((["1", "2", "3", "4"], np.ones(4)), "a column of numbers"),
        (([0.1, 0.2, np.nextafter(0.2, 1), 0.4], np.ones(4)), "row 2 .* after 0.2"),
    ],
)
def test_tables_that_are_none(rows, message):
    with pytest.raises(ValueError, match=message):
        PowerTable(*rows)
    with pytest.raises(ValueError, match="'pc': must be"):
        PowerTable(K, K, unit="pc")
    with pytest.raises(TypeError, match=r"a file: PowerTable\.read"):
        Cosmology(**UNIVERSE, power="pk.txt")


def test_a_box_beyond_the_table_is_refused_and_a_snapshot_keeps_the_table(fit, tmp_path):
    universe = Cosmology(**UNIVERSE, power=PowerTable(K[400:], fit(K[400:])))
    with pytest.raises(ValueError, match=r"k = 0.04506 to 20 .* needs, 0.01571 to 0.2177 h/Mpc"):
        Simulation(universe, 16, 400.0, [0.1, 1.0])
    with pytest.raises(ValueError, match="does not hold"):
        Simulation(fit.cosmology, 16, 400.0, [0.1, 1.0]).run(seed=1, cosmology=universe)
    options = dict(precision="float64", lpt_order=1)
    states = [
        Simulation(each, 16, 64.0, [0.1, 1.0], **options).lpt(seed=1)
        for each in (universe, fit.cosmology)
    ]
    np.testing.assert_allclose(*(s.displacement.numpy() for s in states), rtol=1e-4, atol=1e-5)
    states[0].save(tmp_path)
    assert State.from_snapshot(tmp_path).cosmology == universe


RUN = """
[box]
grid = 16
size = 64.0
[cosmology]
Omega_m = 0.31
Omega_b = 0.049
h = 0.68
n_s = 0.96
{power}
[initial]
seed = 1
[evolution]
a_start = 0.1
a_stop = 1.0
steps = 2
"""


@pytest.fixture
def write(tmp_path, fit):
    def written(power, factor=1.0, rows=slice(None)):
        columns = np.transpose([np.zeros_like(K), factor * K, fit(K) / factor**3])
        np.savetxt(tmp_path / "pk.txt", columns[rows], header="0, k, P", delimiter=",")
        (tmp_path / "run.toml").write_text(RUN.format(power=power))
        return tmp_path / "run.toml"

    return written


def test_a_file_in_a_run_file(fit, write, tmp_path):
    text = '{ file = "pk.txt", columns = [1, 2], unit = "Mpc", redshift = 1, of = "cb" }'
    options = SimulationOptions.load(write(f"power = {text}", factor=UNIVERSE["h"]))
    made = Cosmology(**options.cosmology.arguments()).power
    assert (made.unit, made.redshift, made.of, made.k.size) == ("Mpc", 1.0, "cb", K.size)
    np.testing.assert_allclose(made.power, fit(K) / UNIVERSE["h"] ** 3)
    assert options.files == {"cosmology.power": tmp_path / "pk.txt"} and not options.warnings
    (tmp_path / "resolved.toml").write_text(options.resolved())
    assert SimulationOptions.load(tmp_path / "resolved.toml") == options
    before = options.checksums()
    columns = np.loadtxt(tmp_path / "pk.txt", delimiter=",") * [1, 1, 1.1]
    np.savetxt(tmp_path / "pk.txt", columns)
    assert SimulationOptions.load(tmp_path / "run.toml").checksums() != before


@pytest.mark.parametrize(
    ("power", "message"),
    [
        ('power = "none.txt"', 'cosmology.power = .*none.txt": No such file'),
        ('power = "run.toml"', "cosmology.power = .*could not convert"),
        ('power = "pk.txt"', "cosmology.power = .*k of a table of power .* row 0"),
        ('power = { file = "pk.txt", columns = [1, 3] }', "has 3 columns: .* cannot be 1 and 3"),
        ('power = { file = "pk.txt", unit = "pc" }', "cosmology.power = .*unit = 'pc': must be"),
        ("power = { columns = [1, 2] }", "cosmology.power = .*file is missing"),
        ('{0}\ntransfer = "camb"', 'transfer = "camb": goes with parameters, not with power'),
        ("{0}\nA_s = 2e-9", "cosmology.A_s goes without power, which has its own amplitude"),
        ("{0}\nf_NL = 2.0", "cosmology.f_NL goes without power"),
        ("", "A_s, cosmology.sigma8 neither is given"),
    ],
)
def test_mistakes_in_a_run_file(write, power, message):
    path = write(power.replace("{0}", 'power = { file = "pk.txt", columns = [1, 2] }'))
    with pytest.raises(ValueError, match=message):
        SimulationOptions.load(path)


def test_a_table_that_is_short_or_in_another_unit_is_told_before_work(write):
    power = 'power = { file = "pk.txt", columns = [1, 2] }'
    with pytest.raises(ValueError, match=re.escape("cosmology.power = ") + ".*does not hold"):
        SimulationOptions.load(write(power, rows=slice(500, None)))
    (warning,) = SimulationOptions.load(write(power, factor=UNIVERSE["h"])).warnings
    assert warning.startswith("cosmology.power: P is largest at k = 0.01118")
