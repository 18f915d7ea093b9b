"""Tables of CLASS's matter power. It imports classy only when needed, and never TensorFlow."""

from __future__ import annotations

from typing import Any

import numpy as np

from flowpm_dist.cosmology.camb_tables import K_MAX, neutrino_density
from flowpm_dist.cosmology.neutrinos import SPECIES, Shares
from flowpm_dist.cosmology.power_table import power_table


def class_power_table(
    A_s: float, shares: Shares = (), **parameters: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the linear power of cold dark matter and baryons today, with CLASS's own growth.

    Args:
        A_s: amplitude of the primordial spectrum [1].
        shares: see `Cosmology.m_nu_shares`.
        **parameters: all parameters in `SHAPE`.

    Returns:
        Wavenumbers [k] [h/Mpc] and power [k] [(Mpc/h)^3].

    Raises:
        ImportError: the package classy is missing.
        ValueError: CLASS refuses the universe.
    """
    try:
        import classy
    except ImportError:
        raise ImportError(
            'transfer="class" needs the package classy: pip install classy, or use '
            'transfer="eisenstein-hu"'
        ) from None
    p = parameters
    settings = class_settings(shares, **p)
    settings |= {"output": "mPk", "P_k_max_1/Mpc": K_MAX, "z_max_pk": 0.1, "A_s": A_s}
    run = classy.Class()
    try:
        run.set(settings)
        run.compute()
        table = power_table(run)
        return table.k, table.power
    except (classy.CosmoSevereError, classy.CosmoComputationError) as error:
        raise ValueError(
            f"CLASS cannot compute this universe, {p}: {str(error).strip()}"
        ) from error
    finally:
        run.struct_cleanup()
        run.empty()


def class_settings(shares: Shares = (), **parameters: float) -> dict[str, Any]:
    """Returns the universe as `classy.Class().set` takes it, without an amplitude.

    Args:
        shares: see `Cosmology.m_nu_shares`.
        **parameters: all parameters in `SHAPE`.
    """
    p = parameters
    massive = p["m_nu"] > 0
    neutrinos = neutrino_density(p) / p["h"] ** 2 if massive else 0.0
    settings: dict[str, Any] = {
        "h": p["h"],
        "Omega_b": p["Omega_b"],
        "Omega_cdm": p["Omega_m"] - p["Omega_b"] - neutrinos,
        "Omega_k": p["Omega_k"],
        "T_cmb": p["T_cmb"],
        "n_s": p["n_s"],
        "k_pivot": p["k_pivot"],
        "N_ur": p["N_eff"],
    }
    if (p["w0"], p["wa"]) != (-1.0, 0.0):
        settings |= {"Omega_Lambda": 0.0, "w0_fld": p["w0"], "wa_fld": p["wa"], "use_ppf": "yes"}
    return settings | (_of_masses(p["m_nu"], p["N_eff"], shares) if massive else {})


def neutrino_temperature(N_eff: float) -> float:
    """Returns the temperature of neutrinos over the photons' [1], see `neutrinos`."""
    return (4 / 11) ** (1 / 3) * (N_eff / SPECIES) ** 0.25


def _of_masses(m_nu: float, N_eff: float, shares: Shares) -> dict[str, Any]:
    """Returns the settings of the species that have a mass."""
    temperature = neutrino_temperature(N_eff)
    if not shares:
        one = {"N_ncdm": 1, "deg_ncdm": SPECIES, "T_ncdm": temperature}
        return {"N_ur": 0.0, **one, "m_ncdm": m_nu / SPECIES}
    masses = [m_nu * share for share in shares if share > 0]
    lists: dict[str, list[Any]] = {
        "deg_ncdm": [1] * len(masses),
        "T_ncdm": [temperature] * len(masses),
    }
    texts = {k: ",".join(map(str, v)) for k, v in {**lists, "m_ncdm": masses}.items()}
    return {"N_ur": N_eff * (1 - len(masses) / SPECIES), "N_ncdm": len(masses), **texts}
