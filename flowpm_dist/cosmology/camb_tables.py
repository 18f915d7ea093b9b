"""Tables of CAMB's matter power. It imports camb only when needed, and never TensorFlow."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from flowpm_dist.cosmology.neutrinos import SPECIES, Neutrinos
from flowpm_dist.cosmology.parameters import PARAMETERS, SHAPE, affecting

K_MAX = 20.0
"""Largest wavenumber that CAMB computes [1/Mpc]."""

PART = "delta_nonu"
"""CAMB's name of the overdensity of cold dark matter and baryons."""

TRANSFER = affecting("transfer")
"""The parameters that the transfer function depends on."""

_A_S = 2e-9  # CAMB's spectrum is proportional to A_s, so one table is enough
_SAMPLES = 4096
_DEFAULTS = {name: PARAMETERS[name].default for name in SHAPE if not PARAMETERS[name].required}


def camb_spline(**parameters: float) -> tuple[float, float, np.ndarray]:
    """Returns the linear power today over A_s as a spline of its logarithm, at n_s = 1.

    It is the power of cold dark matter and baryons [(Mpc/h)^3].

    Another n_s multiplies it by (k / k_pivot)^(n_s - 1), whatever the other parameters. So CAMB
    runs once for all cosmologies that differ in n_s, k_pivot and the amplitude alone; the last 16
    splines are kept.

    Args:
        **parameters: the parameters in `SHAPE`, which have the defaults of `Cosmology`.

    Returns:
        The first ln k (k in h/Mpc), the step in ln k, and the coefficients [cells, 4] of the powers
        of u, which runs from 0 to 1 within a cell.

    Raises:
        ImportError: the package camb is missing.
    """
    values = _DEFAULTS | parameters
    return _spline(*(values[name] for name in TRANSFER))


@contextlib.contextmanager
def camb_in_background(cosmology: Mapping[str, Any]) -> Iterator[None]:
    """Runs CAMB in a thread during the `with` block.

    An error in the thread is raised again, with its message, where the spectrum is used.

    Args:
        cosmology: the arguments of a `Cosmology` by name.
    """
    with contextlib.suppress(ImportError):
        import camb  # noqa: F401  (imported here, not in two threads at once)
    parameters = {name: float(cosmology[name]) for name in SHAPE if cosmology.get(name) is not None}

    def compute() -> None:
        with contextlib.suppress(Exception):
            camb_spline(**parameters)

    thread = threading.Thread(target=compute, name="CAMB")
    thread.start()
    try:
        yield
    finally:
        thread.join()


@functools.lru_cache(maxsize=16)
def _spline(*values: float) -> tuple[float, float, np.ndarray]:
    parameters = dict(zip(TRANSFER, values, strict=True))
    k, power = camb_power_table((0.0,), "linear", _A_S, n_s=1.0, of=PART, **parameters)
    from scipy.interpolate import CubicSpline  # comes with camb

    spline = CubicSpline(np.log(k), np.log(power[0] / _A_S))
    ln_k = np.linspace(np.log(k[0]), np.log(k[-1]), _SAMPLES)
    step = ln_k[1] - ln_k[0]
    value, slope = spline(ln_k), spline(ln_k, 1) * step
    left, right, d_left, d_right = value[:-1], value[1:], slope[:-1], slope[1:]
    rise = right - left
    cubic = [left, d_left, 3 * rise - 2 * d_left - d_right, d_left + d_right - 2 * rise]
    return float(ln_k[0]), float(step), np.stack(cubic, axis=1)


def camb_power_table(
    redshifts: tuple[float, ...],
    model: str,
    A_s: float,
    of: str | None = None,
    **parameters: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the power at several redshifts, with CAMB's own growth.

    Args:
        redshifts: redshifts that increase from 0.
        model: "linear", or one of CAMB's versions of halofit, such as "takahashi".
        A_s: amplitude of the primordial spectrum [1].
        of: CAMB's name of an overdensity, such as `PART`; None for all matter.
        **parameters: see `camb_spline`.

    Returns:
        Wavenumbers [k] [h/Mpc] and power [redshift, k] [(Mpc/h)^3].

    Raises:
        ImportError: the package camb is missing.
        ValueError: a universe without baryons.
    """
    try:
        import camb
    except ImportError:
        raise ImportError(
            'transfer="camb" needs the package camb: pip install camb, or use '
            'transfer="eisenstein-hu"'
        ) from None
    p = _DEFAULTS | parameters
    if not p["Omega_b"] > 0:
        raise ValueError(
            f'Omega_b = {p["Omega_b"]:g}: transfer="camb" needs baryons; or use "eisenstein-hu"'
        )
    omnuh2 = _neutrino_density(p) if p["m_nu"] > 0 else 0.0
    run = camb.CAMBparams()
    run.set_dark_energy(w=p["w0"], wa=p["wa"], dark_energy_model="ppf")
    massive = {"num_massive_neutrinos": SPECIES, "standard_neutrino_neff": p["N_eff"]}
    run.set_cosmology(
        H0=100 * p["h"],
        ombh2=p["Omega_b"] * p["h"] ** 2,
        omch2=(p["Omega_m"] - p["Omega_b"]) * p["h"] ** 2 - omnuh2,
        omk=p["Omega_k"],
        mnu=p["m_nu"],
        nnu=p["N_eff"],
        TCMB=p["T_cmb"],
        **(massive if omnuh2 > 0 else {}),
    )
    run.InitPower.set_params(As=A_s, ns=p["n_s"], pivot_scalar=p["k_pivot"])
    run.NonLinear = camb.model.NonLinear_none
    run.set_matter_power(redshifts=redshifts[::-1], kmax=K_MAX)
    nonlinear = model != "linear"
    if nonlinear:
        run.NonLinear = camb.model.NonLinear_both
        run.NonLinearModel.set_params(halofit_version=model)
    parts = (of, of) if omnuh2 > 0 else ()
    results = camb.get_results(run)
    k, _, power = results.get_linear_matter_power_spectrum(*parts, nonlinear=nonlinear)
    return k, power


def _neutrino_density(parameters: Mapping[str, Any]) -> float:
    """Returns Omega h^2 of massive neutrinos."""
    names = ("m_nu", "N_eff", "T_cmb", "h", "Omega_m")
    neutrinos = Neutrinos(**{name: parameters[name] for name in names})
    return float(neutrinos.Omega_matter * parameters["h"] ** 2)
