"""Parameters: what is accepted, what is refused and in which words; from astropy and back."""

import re
import warnings

import astropy.cosmology
import pytest
import tensorflow as tf

from flowpm_dist.cosmology import Background, Cosmology, LinearPower
from flowpm_dist.cosmology.background import Distances

GOOD = dict(Omega_m=0.3, Omega_b=0.05, h=0.7, n_s=0.96, A_s=2.1e-9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(Omega_m=0.0), "Omega_m must be a number from 0.005 to 1; got 0"),
        (dict(Omega_m=1.2), "Omega_m must be a number from 0.005 to 1; got 1.2"),
        (dict(Omega_m=float("nan")), "Omega_m must be a number from 0.005 to 1; got nan"),
        (dict(Omega_b=-0.01), "Omega_b must be a number of at least 0"),
        (dict(Omega_b=0.4), "Omega_b = 0.4: must be below Omega_m = 0.3"),
        (dict(h=67.66), "h must be H0 / (100 km/s/Mpc), above 0.1, below 3; got 67.66"),
        (dict(h=-0.7), "h must be"),
        (dict(n_s=float("inf")), "n_s must be a number above 0, below 3"),
        (dict(A_s=2.1), "A_s must be a number above 0, below 1e-6, such as 2.1e-9; got 2.1"),
        (dict(A_s=None), "exactly one of A_s and sigma8 must be given, got neither"),
        (dict(sigma8=0.8), "exactly one of A_s and sigma8 must be given, got both"),
        (dict(A_s=None, sigma8=-0.8), "sigma8 must be a number above 0"),
        (dict(w0=-0.5, wa=0.5), "w0 + wa must be at most -0.2"),
        (dict(T_cmb=0.0), "T_cmb must be a temperature in kelvin, above 0"),
        (dict(k_pivot=0.0), "k_pivot must be a wavenumber in 1/Mpc, above 0"),
        (dict(k_pivot=float("inf")), "k_pivot must be a wavenumber in 1/Mpc, above 0"),
        (
            dict(transfer="none"),
            "transfer must be one of 'eisenstein-hu', 'camb', 'class', got 'none'",
        ),
        (dict(Omega_m=tf.constant(1.5)), "Omega_m must be a number from 0.005 to 1; got 1.5"),
        (dict(Omega_m=tf.Variable(1.5)), "Omega_m must be a number from 0.005 to 1; got 1.5"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Cosmology(**{**GOOD, **changes})


@pytest.mark.parametrize("value", ["0.3", None, [0.3], True, tf.constant([0.3]), tf.constant(3)])
def test_a_value_that_is_no_scalar_is_refused(value):
    with pytest.raises(TypeError, match="Omega_m must be"):
        Cosmology(**{**GOOD, "Omega_m": value})


def test_replace_swaps_the_amplitude_and_knows_the_names():
    by_sigma8 = Cosmology(**GOOD).replace(sigma8=0.8)
    assert by_sigma8.A_s is None and by_sigma8.sigma8 == 0.8
    assert by_sigma8.replace(A_s=2.1e-9) == Cosmology(**GOOD)
    with pytest.raises(TypeError, match="no cosmological parameter 'omega_m': one of Omega_m, "):
        Cosmology(**GOOD).replace(omega_m=0.3)
    with pytest.raises(ValueError, match="Omega_m"):
        Cosmology(**GOOD).replace(Omega_m=2)


def test_parameters_come_back_as_float64_tensors_and_rebuild_the_cosmology():
    cosmology = Cosmology.planck18()
    parameters = cosmology.parameters()
    assert "A_s" not in parameters
    assert all(value.dtype == tf.float64 for value in parameters.values())
    rebuilt = cosmology.replace(**parameters)
    assert {name: float(getattr(rebuilt, name)) for name in rebuilt.names} == {
        name: getattr(cosmology, name) for name in cosmology.names
    }


def test_a_cosmology_made_inside_a_graph_works_without_knowing_its_values():
    @tf.function
    def power(Omega_m):
        return LinearPower(Cosmology(**{**GOOD, "Omega_m": Omega_m}))(0.1)

    inside = power(tf.constant(0.3, tf.float64))
    assert inside.numpy() == pytest.approx(LinearPower(Cosmology(**GOOD))(0.1).numpy(), rel=1e-12)


@pytest.mark.parametrize(
    "universe",
    [
        astropy.cosmology.FlatLambdaCDM(70, 0.3, Ob0=0.05),
        astropy.cosmology.FlatwCDM(70, 0.3, w0=-0.9, Ob0=0.05),
        astropy.cosmology.Flatw0waCDM(70, 0.3, w0=-0.9, wa=0.2, Ob0=0.05),
        astropy.cosmology.LambdaCDM(70, 0.3, 0.7, Ob0=0.05),
        astropy.cosmology.w0waCDM(70, 0.3, 0.7, w0=-1.1, wa=0.1, Ob0=0.05),
        astropy.cosmology.LambdaCDM(70, 0.3, 0.6, Ob0=0.05),
        astropy.cosmology.w0waCDM(70, 0.3, 0.75, w0=-0.9, wa=0.2, Ob0=0.05),
    ],
    ids=lambda universe: f"{type(universe).__name__}-{universe.Ode0:g}",
)
def test_astropy_gives_the_same_expansion(universe):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no radiation in these: nothing to warn of
        cosmology = Cosmology.from_astropy(universe, n_s=0.96, A_s=2.1e-9)
    assert cosmology.Omega_b == 0.05 and cosmology.h == pytest.approx(0.7)
    for a in (0.02, 0.5, 1.0):
        expansion = Background(cosmology).e(a).numpy()
        assert expansion == pytest.approx(universe.efunc(1 / a - 1), rel=1e-13)
    distances = Distances(cosmology)
    chi = distances.comoving(1 / 2.5)
    for ours, name in ((chi, "comoving_distance"), (distances.transverse(chi), "transverse")):
        theirs = getattr(universe, name.replace("transverse", "comoving_transverse_distance"))(1.5)
        assert float(ours) / cosmology.h == pytest.approx(theirs.value, rel=1e-8)


def test_astropy_radiation_and_neutrinos_are_left_out_with_a_warning():
    with pytest.warns(
        UserWarning, match=r"left out photons .*5.4e-05.* massive neutrinos .*0.0014"
    ):
        cosmology = Cosmology.from_astropy(astropy.cosmology.Planck18, n_s=0.96822, sigma8=0.8102)
    assert cosmology == Cosmology.planck18()
    curved = astropy.cosmology.LambdaCDM(67.66, 0.31, 0.66, Tcmb0=2.7255, Ob0=0.049)
    with pytest.warns(UserWarning, match="dark energy takes their share"):
        cosmology = Cosmology.from_astropy(curved, n_s=0.96822, sigma8=0.8102)
    assert cosmology.Omega_k == curved.Ok0 != 0.03


def test_astropy_universes_that_do_not_fit_are_refused():
    def convert(universe, **more):
        return Cosmology.from_astropy(universe, n_s=0.96, A_s=2.1e-9, **more)

    with pytest.raises(ValueError, match="no baryon density: give it Ob0, or pass Omega_b"):
        convert(astropy.cosmology.FlatLambdaCDM(70, 0.3))
    assert convert(astropy.cosmology.FlatLambdaCDM(70, 0.3), Omega_b=0.04).Omega_b == 0.04
    for given in ({}, {"n_s": 0.96}, {"sigma8": 0.8}):
        with pytest.raises(ValueError, match="no spectrum .*give n_s, and A_s, sigma8 or power"):
            Cosmology.from_astropy(astropy.cosmology.Planck18, **given)
    with pytest.raises(TypeError, match="got w0wzCDM"):
        convert(astropy.cosmology.w0wzCDM(70, 0.3, 0.7))
    with pytest.raises(TypeError, match="got dict"):
        convert({})
