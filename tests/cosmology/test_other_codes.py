"""Universes given to other codes: their expansion, distances and power are ours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import flowpm_dist as fpm
from flowpm_dist.cosmology import Background, Distances, LinearPower, parameters_for

A = np.array([0.05, 0.2, 0.5, 0.8, 1.0])
Z = 1 / A - 1
K = np.geomspace(1e-3, 1.0, 20)  # [h/Mpc]
BASE: dict[str, Any] = dict(Omega_m=0.31, Omega_b=0.049, h=0.68, n_s=0.965)
PLAIN = fpm.Cosmology(**BASE, sigma8=0.81)
DARK = PLAIN.replace(w0=-0.9, wa=0.2, Omega_k=0.03)
HOT = fpm.Cosmology(**BASE, A_s=2.1e-9, radiation=True)
MASSIVE = HOT.replace(m_nu=[0.0, 0.05, 0.1])
EQUAL = HOT.replace(m_nu=0.3, w0=-0.95)


def expansion(cosmology: fpm.Cosmology) -> tuple[np.ndarray, np.ndarray]:
    """E(a), and comoving distances across the line of sight [Mpc/h]."""
    distances = Distances(cosmology)
    chi = distances.comoving(A[:-1])
    return Background(cosmology).e(A).numpy(), distances.transverse(chi).numpy()


@pytest.mark.parametrize(
    ("cosmology", "tolerance"),
    [
        (PLAIN, 1e-9),
        (DARK, 1e-9),
        (PLAIN.replace(w0=-0.8), 1e-9),
        (PLAIN.replace(Omega_k=-0.05), 1e-9),
        (HOT, 1e-6),  # constants of nature
        (HOT.replace(Omega_k=0.1, w0=-0.9, wa=0.1), 1e-6),
        (HOT.replace(N_eff=0.5), 1e-6),
        (HOT.replace(N_eff=2.0), 1e-6),
        (HOT.replace(N_eff=4.4), 1e-6),
        (EQUAL.replace(N_eff=3.9), 1e-3),
        (MASSIVE, 1e-4),  # astropy has a fit of massive neutrinos' density
        (EQUAL.replace(Omega_k=-0.02), 1e-4),
    ],
)
def test_astropys_expansion_is_ours(cosmology, tolerance):
    theirs = cosmology.to_astropy("ours")
    assert theirs.name == "ours" and theirs.is_flat == (cosmology.Omega_k == 0)
    e, across = expansion(cosmology)
    np.testing.assert_allclose(theirs.efunc(Z), e, tolerance)
    length = theirs.comoving_transverse_distance(Z[:-1]).to_value("Mpc") * float(cosmology.h)
    np.testing.assert_allclose(length, across, max(tolerance, 1e-8))
    spectrum = {"n_s": cosmology.n_s, "A_s": cosmology.A_s, "sigma8": cosmology.sigma8}
    spectrum |= {"T_cmb": cosmology.T_cmb, "radiation": cosmology.radiation}
    again = fpm.Cosmology.from_astropy(theirs, **spectrum)
    for name in cosmology.names:
        # Astropy finds its curvature, and its Omega_m, from rounded densities.
        close = pytest.approx(float(getattr(cosmology, name)), 1e-9, abs=2e-8)
        assert float(getattr(again, name)) == close, name
    np.testing.assert_allclose(again.m_nu_shares, cosmology.m_nu_shares, 1e-12)


def camb_results(cosmology: fpm.Cosmology) -> Any:
    import camb

    run = camb.set_params(**parameters_for(cosmology, "camb"))
    run.set_matter_power(redshifts=[0.0], kmax=20.0)
    return camb.get_results(run)


@pytest.mark.parametrize("cosmology", [HOT, EQUAL, HOT.replace(Omega_k=0.05, w0=-0.9, wa=0.2)])
def test_cambs_expansion_is_ours(cosmology):
    results = camb_results(cosmology)
    e, across = expansion(cosmology)
    np.testing.assert_allclose(results.hubble_parameter(Z) / results.hubble_parameter(0), e, 1e-5)
    h = float(cosmology.h)
    theirs = results.angular_diameter_distance(Z[:-1]) * (1 + Z[:-1]) * h
    np.testing.assert_allclose(theirs, across, 1e-5)


@pytest.mark.parametrize("cosmology", [HOT, EQUAL.replace(A_s=None, sigma8=0.75)])
def test_cambs_power_is_that_of_our_transfer_from_camb(cosmology):
    results = camb_results(cosmology)
    if cosmology.sigma8 is not None:
        assert float(results.get_sigma8_0()) == pytest.approx(cosmology.sigma8, 1e-5)
    ours = LinearPower(cosmology.replace(transfer="camb"))
    theirs = results.get_matter_power_interpolator(nonlinear=False).P(0.0, K)
    # Growth of massive neutrinos is a fit here.
    tolerance = 5e-3 if float(cosmology.m_nu) else 1e-3
    np.testing.assert_allclose(theirs, ours(K, 1.0), tolerance)


@pytest.mark.parametrize("masses", [[0.15, 0.0, 0.0], [0.0, 0.1, 0.1]])
def test_camb_gives_the_mass_to_as_many_neutrinos(masses):
    cosmology = HOT.replace(m_nu=masses, A_s=None, sigma8=0.75)
    results = camb_results(cosmology)
    of = results.Params
    assert of.num_nu_massive == np.count_nonzero(masses)
    assert float(results.get_sigma8_0()) == pytest.approx(0.75, 1e-5)
    e, _ = expansion(cosmology)
    np.testing.assert_allclose(results.hubble_parameter(Z) / results.hubble_parameter(0), e, 1e-5)
    # A table of CAMB's is refused for other masses.
    results.get_linear_matter_power_spectrum()
    cosmology.replace(sigma8=None, power=results)


@pytest.mark.parametrize(
    "cosmology", [PLAIN.replace(transfer="camb"), DARK.replace(transfer="camb")]
)
def test_ccls_power_by_camb_is_ours(cosmology):
    ccl = pytest.importorskip("pyccl")
    theirs = ccl.Cosmology(**parameters_for(cosmology, "ccl"))
    h = float(cosmology.h)
    power = ccl.linear_matter_power(theirs, K * h, 1.0) * h**3
    np.testing.assert_allclose(power, LinearPower(cosmology)(K, 1.0), 1e-3)


def test_what_ccl_is_told():
    """CAMB and CLASS have radiation in the power of a universe without it."""
    for transfer in ("camb", "class"):
        given = parameters_for(PLAIN.replace(transfer=transfer), "ccl")
        assert given["Neff"] == PLAIN.N_eff and "Omega_g" not in given
        assert "extra_parameters" not in given
    given = parameters_for(PLAIN, "ccl")
    assert given["Neff"] == given["Omega_g"] == 0
    dark = PLAIN.replace(transfer="camb", w0=-1.1, wa=0.3)
    ppf = {"camb": {"dark_energy_model": "ppf"}}
    assert parameters_for(dark, "ccl")["extra_parameters"] == ppf
    for N_eff in np.linspace(0.5, 6.0, 200):
        given = parameters_for(EQUAL.replace(N_eff=N_eff), "ccl")
        massless = given["Neff"] - 3 * (given["T_ncdm"] / (4 / 11) ** (1 / 3)) ** 4
        assert 0 <= massless < 1e-10


@pytest.mark.parametrize(
    "cosmology", [PLAIN, DARK, HOT, MASSIVE, EQUAL, HOT.replace(k_pivot=0.02, transfer="camb")]
)
def test_ccl(cosmology):
    ccl = pytest.importorskip("pyccl")
    theirs = ccl.Cosmology(**parameters_for(cosmology, "ccl"))
    e, across = expansion(cosmology)
    np.testing.assert_allclose(ccl.h_over_h0(theirs, A), e, 2e-5)
    h = float(cosmology.h)
    distances = ccl.comoving_angular_distance(theirs, A[:-1]) * h
    np.testing.assert_allclose(distances, across, 2e-5)
    if float(cosmology.m_nu) == 0:  # CCL's Eisenstein and Hu know no neutrinos' masses
        power = ccl.linear_matter_power(theirs, K * h, 1.0) * h**3
        np.testing.assert_allclose(power, LinearPower(cosmology)(K, 1.0), 1e-3)


@pytest.mark.parametrize("cosmology", [HOT, MASSIVE, EQUAL.replace(A_s=None, sigma8=0.75)])
def test_class(cosmology):
    classy = pytest.importorskip("classy")
    run = classy.Class()
    run.set({"output": "mPk", "P_k_max_h/Mpc": 5.0, **parameters_for(cosmology, "class")})
    run.compute()
    e, across = expansion(cosmology)
    h = float(cosmology.h)
    np.testing.assert_allclose([run.Hubble(z) / run.Hubble(0) for z in Z], e, 1e-5)
    theirs = [run.angular_distance(z) * (1 + z) * h for z in Z[:-1]]
    np.testing.assert_allclose(theirs, across, 1e-5)
    if cosmology.sigma8 is not None:
        assert run.sigma8() == pytest.approx(cosmology.sigma8, 1e-3)
    else:
        ours = LinearPower(cosmology.replace(transfer="class"))
        power = [run.pk_lin(k * h, 0.0) * h**3 for k in K]
        np.testing.assert_allclose(power, ours(K, 1.0), 5e-3)


@pytest.mark.parametrize("cosmology", [PLAIN, DARK, HOT, HOT.replace(Omega_k=-0.05, w0=-0.9)])
def test_colossus(cosmology):
    models = pytest.importorskip("colossus.cosmology.cosmology")
    settings = parameters_for(cosmology, "colossus")
    theirs = models.Cosmology(name="ours", persistence="", **settings)
    e, across = expansion(cosmology)
    np.testing.assert_allclose(theirs.Ez(Z), e, 1e-6)
    distances = theirs.comovingDistance(0.0, Z[:-1], transverse=True)
    np.testing.assert_allclose(distances, across, 1e-4)  # colossus interpolates
    power = theirs.matterPowerSpectrum(K, z=0.0)
    np.testing.assert_allclose(power, LinearPower(cosmology)(K, 1.0), 5e-3)


@pytest.mark.parametrize("cosmology", [PLAIN, DARK])
def test_jax_cosmo(cosmology):
    jax_cosmo = pytest.importorskip("jax_cosmo")
    theirs = jax_cosmo.Cosmology(**parameters_for(cosmology, "jax-cosmo"))
    e, across = expansion(cosmology)
    np.testing.assert_allclose(jax_cosmo.background.Esqr(theirs, A) ** 0.5, e, 1e-5)
    distances = jax_cosmo.background.transverse_comoving_distance(theirs, A[:-1])
    np.testing.assert_allclose(distances, across, 3e-3)  # their table of 256 numbers in float32
    power = jax_cosmo.power.linear_matter_power(theirs, K)
    np.testing.assert_allclose(power, LinearPower(cosmology)(K, 1.0), 5e-3)


def test_what_a_code_cannot_have_is_refused_by_name():
    table = fpm.Cosmology(**BASE, power=([0.01, 0.1, 1.0, 10.0], [1e3, 1e3, 1e2, 1.0]))
    wrong = {
        "camb": (MASSIVE, r"different masses .*replace\(m_nu=0.15, m_nu_shares=\(\)\)"),
        "class": (PLAIN.replace(f_NL=10.0), "f_NL"),
        "ccl": (table, "a power of its own"),
        "colossus": (EQUAL, "no massive neutrinos"),
        "jax-cosmo": (HOT, "no radiation"),
        "cosmosis": (PLAIN, "must be one of camb, ccl, class"),
    }
    for code, (cosmology, message) in wrong.items():
        with pytest.raises(ValueError, match=message):
            parameters_for(cosmology, code)
    assert parameters_for(MASSIVE.replace(m_nu=0.15, m_nu_shares=()), "camb")["mnu"] == 0.15
    for N_eff in (2.9, 4.0):
        with pytest.raises(ValueError, match=f"whole part of N_eff = {N_eff:g}: 3 with a mass"):
            EQUAL.replace(N_eff=N_eff).to_astropy()
    with pytest.raises(ValueError, match="2.7255 K"):
        parameters_for(PLAIN.replace(T_cmb=2.7), "jax-cosmo")

    @tf.function
    def inside(sigma8: tf.Tensor) -> tf.Tensor:
        with pytest.raises(ValueError, match="sigma8 has no value yet: ccl"):
            parameters_for(PLAIN.replace(sigma8=sigma8), "ccl")
        with pytest.raises(ValueError, match="sigma8 has no value yet: astropy"):
            PLAIN.replace(sigma8=sigma8).to_astropy()
        return sigma8

    inside(tf.constant(0.8, tf.float64))
    given = parameters_for(PLAIN.replace(sigma8=tf.constant(0.8, tf.float64)), "ccl")
    assert type(given["sigma8"]) is float
