"""Cosmologies from and for astropy. Only here astropy is imported, and TensorFlow is not."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from flowpm_dist.cosmology.arrays import plain_numbers
from flowpm_dist.cosmology.camb_tables import neutrino_density
from flowpm_dist.cosmology.neutrinos import SPECIES, Neutrinos

if TYPE_CHECKING:
    from astropy.cosmology import FLRW

    from flowpm_dist.cosmology.parameters import Cosmology

FLATNESS = 1e-10
"""|Omega_k| below this counts as flat: rounding, not physics."""


def parameters_from_astropy(
    cosmology: Any, replaced: Collection[str], *, radiation: bool = False
) -> dict[str, Any]:
    """Parameters of an astropy cosmology as keywords of `Cosmology`.

    Args:
        cosmology: see `Cosmology.from_astropy`.
        replaced: names of parameters that the caller gives, which are not read from astropy.
        radiation: whether to take its radiation and neutrinos, too.

    Returns:
        Omega_m, Omega_b, h, w0, wa and, where they are not 0, Omega_k and T_cmb [K]; plain floats.
        With radiation also N_eff and m_nu.

    Raises:
        TypeError, ValueError: see `Cosmology.from_astropy`.
    """
    w0, wa = _dark_energy(cosmology)
    parameters = {
        "Omega_m": float(cosmology.Om0),
        "h": float(cosmology.H0.to_value("km / (s Mpc)")) / 100.0,
        "w0": w0,
        "wa": wa,
    }
    # LambdaCDM(Om0=0.3, Ode0=0.7) with radiation is curved by exactly the radiation left out here.
    matter_and_dark_energy = float(cosmology.Om0) + float(cosmology.Ode0)
    if abs(float(cosmology.Ok0)) > FLATNESS and abs(matter_and_dark_energy - 1.0) > FLATNESS:
        parameters["Omega_k"] = float(cosmology.Ok0)
    if "Omega_b" not in replaced:
        if not cosmology.Ob0:
            raise ValueError(
                f"{_name(cosmology)} has no baryon density: give it Ob0, or pass Omega_b=..."
            )
        parameters["Omega_b"] = float(cosmology.Ob0)
    temperature = float(cosmology.Tcmb0.to_value("K"))
    if radiation and not temperature:
        raise ValueError(f"{_name(cosmology)} has no radiation: its Tcmb0 is 0")
    if temperature > 0:
        parameters["T_cmb"] = temperature
    photons, neutrinos = float(cosmology.Ogamma0), float(cosmology.Onu0)
    if radiation:
        parameters |= _radiation(cosmology, parameters)
    elif photons + neutrinos > 0:
        kind = "massive neutrinos" if cosmology.has_massive_nu else "massless neutrinos"
        warnings.warn(
            f"{_name(cosmology)}: left out photons (Omega = {photons:.2g}) and {kind} "
            f"(Omega = {neutrinos:.2g}); dark energy takes their share",
            stacklevel=3,
        )
    return parameters


def to_astropy(cosmology: Cosmology, name: str | None = None) -> FLRW:
    """Returns the expansion of a universe as an astropy cosmology, see `Cosmology.to_astropy`."""
    import astropy.cosmology as models
    from astropy.units import Quantity

    p = {"m_nu": 0.0} | plain_numbers(cosmology.values(), "astropy")
    common: dict[str, Any] = {"H0": 100 * p["h"], "Om0": p["Omega_m"], "Ob0": p["Omega_b"]}
    common |= {"Tcmb0": Quantity(0.0, "K"), "name": name}
    if cosmology.radiation:
        common |= {"Tcmb0": Quantity(p["T_cmb"], "K"), "Neff": p["N_eff"]}
        if p["m_nu"] > 0:
            if math.floor(p["N_eff"]) != SPECIES:
                raise ValueError(
                    f"astropy has as many neutrinos as the whole part of N_eff = {p['N_eff']:g}: "
                    f"{SPECIES} with a mass need N_eff from {SPECIES} to below {SPECIES + 1}"
                )
            shares = cosmology.m_nu_shares or (1 / SPECIES,) * SPECIES
            common["m_nu"] = Quantity([p["m_nu"] * share for share in shares], "eV")
            common["Om0"] -= neutrino_density(p) / p["h"] ** 2
    kind = "LambdaCDM"
    if p["wa"] != 0:
        kind, common = "w0waCDM", common | {"w0": p["w0"], "wa": p["wa"]}
    elif p["w0"] != -1:
        kind, common = "wCDM", common | {"w0": p["w0"]}
    flat = getattr(models, f"Flat{kind}")(**common)
    if p["Omega_k"] == 0:
        return flat
    return getattr(models, kind)(**common, Ode0=float(flat.Ode0) - p["Omega_k"])


def _radiation(cosmology: Any, parameters: dict[str, Any]) -> dict[str, Any]:
    """Returns Omega_m with neutrinos, Omega_k, N_eff and m_nu [eV]."""
    masses = [] if not cosmology.has_massive_nu else cosmology.m_nu.to_value("eV").tolist()
    total, effective = float(sum(masses)), float(cosmology.Neff)
    three = len(masses) == SPECIES
    if masses and not three:
        shown = ", ".join(f"{mass:g}" for mass in masses)
        warnings.warn(
            f"{_name(cosmology)} has neutrinos of {shown} eV; here each of three has a third of "
            "the sum",
            stacklevel=4,
        )
    names = {name: parameters[name] for name in ("h", "Omega_m", "T_cmb")}
    matter = Neutrinos(m_nu=total, N_eff=effective, **names).Omega_matter
    curvature = float(cosmology.Ok0)
    return {
        "Omega_m": parameters["Omega_m"] + float(matter),
        "Omega_k": curvature if abs(curvature) > FLATNESS else 0.0,
        "N_eff": effective,
        "m_nu": masses if three else total,
    }


def _dark_energy(cosmology: Any) -> tuple[float, float]:
    try:
        from astropy import cosmology as models
    except ImportError:
        raise TypeError(
            f"not an astropy cosmology (astropy is not installed): {cosmology!r}"
        ) from None
    if isinstance(cosmology, models.w0waCDM):
        return float(cosmology.w0), float(cosmology.wa)
    if isinstance(cosmology, models.wCDM):
        return float(cosmology.w0), 0.0
    if isinstance(cosmology, models.LambdaCDM):
        return -1.0, 0.0
    raise TypeError(
        "from_astropy takes LambdaCDM, wCDM, w0waCDM or their flat forms, got "
        f"{type(cosmology).__name__}"
    )


def _name(cosmology: Any) -> str:
    kind = type(cosmology).__name__
    return f"{kind} {cosmology.name!r}" if cosmology.name else kind
