"""The parameters of a cosmology as other codes take them.

Each entry of `CODES` is one code. CAMB is imported only to find the A_s that a sigma8 implies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flowpm_dist.cosmology.arrays import plain_numbers
from flowpm_dist.cosmology.background import Background
from flowpm_dist.cosmology.camb_tables import K_MAX, camb_settings, neutrino_density
from flowpm_dist.cosmology.class_tables import class_settings, neutrino_temperature
from flowpm_dist.cosmology.neutrinos import SPECIES
from flowpm_dist.cosmology.parameters import PARAMETERS, SHAPE, Cosmology
from flowpm_dist.cosmology.power import LinearPower

A_S = 2e-9
"""The amplitude for which CAMB's sigma8 is computed."""
CCL_PIVOT = 0.05
"""The pivot wavenumber of CCL's A_s [1/Mpc]."""
CCL_TRANSFER = {
    "eisenstein-hu": "eisenstein_hu",
    "camb": "boltzmann_camb",
    "class": "boltzmann_class",
}
SAME_SHARE = 1e-6
"""Shares of the neutrinos' mass that differ by less are equal for CAMB."""
COOLER = 1 - 1e-12
"""What CCL's neutrinos are cooled by: rounding may not make their number exceed its Neff."""
K_SIGMA8 = 20.0
"""Largest wavenumber of the power from which CLASS computes sigma8 [h/Mpc]."""


def parameters_for(cosmology: Cosmology, code: str) -> dict[str, Any]:
    """Returns the keyword arguments with which another code makes a universe.

    They are for `camb.set_params`, `pyccl.Cosmology`, `classy.Class().set`,
    `colossus.cosmology.cosmology.Cosmology` or `jax_cosmo.Cosmology`. CAMB and CLASS always have
    radiation, also where the universe has none, and so has CCL where its power is theirs: our power
    is, too. Where CAMB needs A_s and the universe has sigma8, CAMB is run once to find it. Where
    colossus, jax-cosmo and CCL's own transfer function need sigma8 and the universe has A_s, its
    theory gives it. `Cosmology.to_astropy` is for astropy.

    Args:
        cosmology: the universe, of plain numbers or of tensors that have values.
        code: "camb", "ccl", "class", "colossus" or "jax-cosmo".

    Raises:
        ValueError: no such code; or the code cannot have this universe: its table of power, its
            f_NL, its neutrinos, or its radiation.
        ImportError: camb is needed, and is not installed.
    """
    if code not in CODES:
        raise ValueError(f"code = {code!r}: must be one of {', '.join(CODES)}")
    numbers = {"m_nu": 0.0} | plain_numbers(cosmology.values(), code)
    if cosmology.power is not None:
        raise ValueError(f"{code} does not take {cosmology.power}: it has a power of its own")
    if not cosmology.is_gaussian:
        raise ValueError(f"{code} does not take f_NL: leave it out by replace(f_NL=0.0)")
    return CODES[code](cosmology, numbers)


def _for_camb(cosmology: Cosmology, p: dict[str, float]) -> dict[str, Any]:
    masses = {share for share in cosmology.m_nu_shares if share > 0}
    if masses and max(masses) - min(masses) > SAME_SHARE:
        raise ValueError(
            "camb.set_params does not take different masses of neutrinos: "
            f"replace(m_nu={p['m_nu']:g}, m_nu_shares=())"
        )
    settings = camb_settings(p.get("A_s", A_S), **{name: p[name] for name in SHAPE})
    if masses:
        settings["num_massive_neutrinos"] = round(1 / max(masses))
    if "A_s" not in p:
        settings["As"] *= (p["sigma8"] / _sigma8_by_camb(settings)) ** 2
    return settings


def _sigma8_by_camb(settings: dict[str, Any]) -> float:
    """Returns CAMB's sigma8 of all matter today [1]."""
    import camb

    run = camb.set_params(**settings)
    run.set_matter_power(redshifts=[0.0], kmax=K_MAX)
    return float(camb.get_results(run).get_sigma8_0())


def _for_class(cosmology: Cosmology, p: dict[str, float]) -> dict[str, Any]:
    settings = class_settings(cosmology.m_nu_shares, **{name: p[name] for name in SHAPE})
    if "A_s" in p:
        return settings | {"A_s": p["A_s"]}
    # CLASS finds the amplitude itself, from the power that it then has to compute.
    return settings | {"output": "mPk", "P_k_max_h/Mpc": K_SIGMA8, "sigma8": p["sigma8"]}


def _for_ccl(cosmology: Cosmology, p: dict[str, float]) -> dict[str, Any]:
    massive = p["m_nu"] > 0
    neutrinos = neutrino_density(p) / p["h"] ** 2 if massive else 0.0
    settings: dict[str, Any] = {
        "Omega_c": p["Omega_m"] - p["Omega_b"] - neutrinos,
        **{name: p[name] for name in ("Omega_b", "h", "n_s", "Omega_k", "w0", "wa")},
        "T_CMB": p["T_cmb"],
        "Neff": p["N_eff"],
        "transfer_function": CCL_TRANSFER[cosmology.transfer],
    }
    if not cosmology.radiation and cosmology.transfer == "eisenstein-hu":
        settings |= {"Omega_g": 0.0, "Neff": 0.0}
    if cosmology.transfer == "camb" and (p["w0"], p["wa"]) != (-1.0, 0.0):
        settings["extra_parameters"] = {"camb": {"dark_energy_model": "ppf"}}  # w may cross -1
    if massive:
        shares = cosmology.m_nu_shares or (1 / SPECIES,) * SPECIES
        masses = [p["m_nu"] * share for share in shares if share > 0]
        settings |= {"m_nu": masses, "T_ncdm": COOLER * neutrino_temperature(p["N_eff"])}
    if "sigma8" in p or cosmology.transfer == "eisenstein-hu":
        return settings | {"sigma8": _sigma8(cosmology, p)}  # its own fit needs it
    tilt = (CCL_PIVOT / p["k_pivot"]) ** (p["n_s"] - 1.0)
    return settings | {"A_s": p["A_s"] * tilt}


def _for_colossus(cosmology: Cosmology, p: dict[str, float]) -> dict[str, Any]:
    if p["m_nu"] > 0:
        raise ValueError("colossus has no massive neutrinos: leave them out by replace(m_nu=0.0)")
    settings: dict[str, Any] = {
        "flat": p["Omega_k"] == 0,
        "H0": 100 * p["h"],
        "Om0": p["Omega_m"],
        "Ob0": p["Omega_b"],
        "sigma8": _sigma8(cosmology, p),
        "ns": p["n_s"],
        "relspecies": bool(cosmology.radiation),
        "Tcmb0": p["T_cmb"],
        "Neff": p["N_eff"],
    }
    if p["Omega_k"] != 0:
        settings["Ode0"] = float(Background(cosmology).Omega_de)
    if p["wa"] != 0:
        settings |= {"de_model": "w0wa", "w0": p["w0"], "wa": p["wa"]}
    elif p["w0"] != -1:
        settings |= {"de_model": "w0", "w0": p["w0"]}
    return settings


def _for_jax_cosmo(cosmology: Cosmology, p: dict[str, float]) -> dict[str, Any]:
    if cosmology.radiation:
        raise ValueError("jax-cosmo has no radiation: leave it out by replace(radiation=False)")
    if p["T_cmb"] != PARAMETERS["T_cmb"].default:
        raise ValueError(f"jax-cosmo has T_cmb = {PARAMETERS['T_cmb'].default} K, no other")
    return {
        "Omega_c": p["Omega_m"] - p["Omega_b"],
        "sigma8": _sigma8(cosmology, p),
        **{name: p[name] for name in ("Omega_b", "h", "n_s", "Omega_k", "w0", "wa")},
    }


def _sigma8(cosmology: Cosmology, p: dict[str, float]) -> float:
    return p["sigma8"] if "sigma8" in p else float(LinearPower(cosmology).sigma8())


CODES: dict[str, Callable[[Cosmology, dict[str, float]], dict[str, Any]]] = {
    "camb": _for_camb,
    "ccl": _for_ccl,
    "class": _for_class,
    "colossus": _for_colossus,
    "jax-cosmo": _for_jax_cosmo,
}
"""The codes by name, each with what makes its arguments of a cosmology and of its numbers."""
