"""Tables of CAMB's matter power. It imports camb only when needed, and never TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flowpm_dist.cosmology.neutrinos import SPECIES, Neutrinos, Shares

K_MAX = 20.0
"""Largest wavenumber that is computed [1/Mpc]."""

PART = "delta_nonu"
"""CAMB's name of the overdensity of cold dark matter and baryons."""


def camb_power_table(
    redshifts: tuple[float, ...],
    model: str,
    A_s: float,
    of: str | None = None,
    shares: Shares = (),
    **parameters: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the power at several redshifts, with CAMB's own growth.

    Args:
        redshifts: redshifts that increase from 0.
        model: "linear", or one of CAMB's versions of halofit, such as "takahashi".
        A_s: amplitude of the primordial spectrum [1].
        of: CAMB's name of an overdensity, such as `PART`; None for all matter.
        shares: see `Cosmology.m_nu_shares`.
        **parameters: all parameters in `SHAPE`.

    Returns:
        Wavenumbers [k] [h/Mpc] and power [redshift, k] [(Mpc/h)^3].

    Raises:
        ImportError: the package camb is missing.
    """
    try:
        import camb
    except ImportError:
        raise ImportError(
            'transfer="camb" needs the package camb: pip install camb, or use '
            'transfer="eisenstein-hu"'
        ) from None
    p = parameters
    run = camb.set_params(**camb_settings(A_s, **p))
    massive = p["m_nu"] > 0
    if massive and shares:
        _set_masses(run, [share for share in shares if share > 0], p["N_eff"])
    run.NonLinear = camb.model.NonLinear_none
    run.set_matter_power(redshifts=redshifts[::-1], kmax=K_MAX)
    nonlinear = model != "linear"
    if nonlinear:
        run.NonLinear = camb.model.NonLinear_both
        run.NonLinearModel.set_params(halofit_version=model)
    parts = (of, of) if massive else ()
    results = camb.get_results(run)
    k, _, power = results.get_linear_matter_power_spectrum(*parts, nonlinear=nonlinear)
    return k, power


def camb_settings(A_s: float, **parameters: float) -> dict[str, Any]:
    """Returns the universe as `camb.set_params` takes it, with neutrinos of equal mass.

    Args:
        A_s: amplitude of the primordial spectrum [1].
        **parameters: all parameters in `SHAPE`.
    """
    p = parameters
    omnuh2 = neutrino_density(p) if p["m_nu"] > 0 else 0.0
    massive = {"num_massive_neutrinos": SPECIES, "standard_neutrino_neff": p["N_eff"]}
    return {
        "dark_energy_model": "ppf",
        "w": p["w0"],
        "wa": p["wa"],
        "H0": 100 * p["h"],
        "ombh2": p["Omega_b"] * p["h"] ** 2,
        "omch2": (p["Omega_m"] - p["Omega_b"]) * p["h"] ** 2 - omnuh2,
        "omk": p["Omega_k"],
        "mnu": p["m_nu"],
        "nnu": p["N_eff"],
        "TCMB": p["T_cmb"],
        "As": A_s,
        "ns": p["n_s"],
        "pivot_scalar": p["k_pivot"],
        **(massive if omnuh2 > 0 else {}),
    }


def _set_masses(run: Any, shares: list[float], N_eff: float) -> None:
    """Sets the species that have a mass, in place of three equal ones."""
    run.nu_mass_eigenstates = run.num_nu_massive = len(shares)
    run.nu_mass_numbers = [1] * len(shares)
    run.nu_mass_degeneracies = [N_eff / SPECIES] * len(shares)
    run.nu_mass_fractions = shares
    run.num_nu_massless = N_eff * (1 - len(shares) / SPECIES)


def neutrino_density(parameters: Mapping[str, Any]) -> float:
    """Returns Omega h^2 of massive neutrinos."""
    names = ("m_nu", "N_eff", "T_cmb", "h", "Omega_m")
    neutrinos = Neutrinos(**{name: parameters[name] for name in names})
    return float(neutrinos.Omega_matter * parameters["h"] ** 2)
