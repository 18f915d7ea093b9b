"""Linear power from CAMB as a cubic spline; camb is imported only when asked, TensorFlow never."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from flowpm_dist.cosmology.ranges import K_PIVOT, T_CMB

K_MAX = 20.0
"""Largest wavenumber that CAMB computes [1/Mpc]."""

NEUTRINOS = 3.046
"""Effective number of neutrino species, all massless."""

SHAPE = ("Omega_m", "Omega_b", "h", "n_s", "w0", "wa", "T_cmb", "k_pivot")
"""The parameters that the spectrum depends on, but for its amplitude."""

_A_S = 2e-9  # CAMB's spectrum is proportional to A_s: one table serves all
_SAMPLES = 4096
_DEFAULTS = {"w0": -1.0, "wa": 0.0, "T_cmb": T_CMB, "k_pivot": K_PIVOT}


def camb_spline(**parameters: float) -> tuple[float, float, np.ndarray]:
    """Returns the linear power today over A_s [(Mpc/h)^3] as a spline of its logarithm.

    Args:
        **parameters: those of `SHAPE`; w0, wa, T_cmb and k_pivot have `Cosmology`'s defaults.

    Returns:
        The first ln k of h/Mpc, the step in ln k, and the coefficients, [cells, 4], of u = 0 to 1
        within a cell.

    Raises:
        ImportError: the package camb is missing.
    """
    values = _DEFAULTS | parameters
    return _spline(*(values[name] for name in SHAPE))


@contextlib.contextmanager
def camb_beside(cosmology: Mapping[str, Any]) -> Iterator[None]:
    """CAMB computes in a thread while something else is done, where a cosmology asks for it.

    What fails there fails again, with its message, where the spectrum is used.

    Args:
        cosmology: parameters by name, as `Cosmology` takes them.
    """
    if cosmology.get("transfer") != "camb":
        yield
        return
    with contextlib.suppress(ImportError):
        import camb  # noqa: F401  (two threads that import are asking for trouble)
    given = {name: float(cosmology[name]) for name in SHAPE if cosmology.get(name) is not None}

    def compute() -> None:
        with contextlib.suppress(Exception):
            camb_spline(**given)

    thread = threading.Thread(target=compute, name="CAMB")
    thread.start()
    try:
        yield
    finally:
        thread.join()


@functools.lru_cache(maxsize=16)
def _spline(*values: float) -> tuple[float, float, np.ndarray]:
    k, power = _run_camb(**dict(zip(SHAPE, values, strict=True)))
    from scipy.interpolate import CubicSpline  # comes with camb

    spline = CubicSpline(np.log(k), np.log(power / _A_S))
    ln_k = np.linspace(np.log(k[0]), np.log(k[-1]), _SAMPLES)
    step = ln_k[1] - ln_k[0]
    value, slope = spline(ln_k), spline(ln_k, 1) * step
    left, right, d_left, d_right = value[:-1], value[1:], slope[:-1], slope[1:]
    rise = right - left
    cubic = [left, d_left, 3 * rise - 2 * d_left - d_right, d_left + d_right - 2 * rise]
    return float(ln_k[0]), float(step), np.stack(cubic, axis=1)


def camb_power_table(
    redshifts: tuple[float, ...], model: str, A_s: float, **parameters: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the matter power at several redshifts, with CAMB's own growth.

    Args:
        redshifts: increasing from 0.
        model: "linear", or what CAMB knows as a version of halofit, such as "takahashi".
        A_s: amplitude of the primordial spectrum [1].
        **parameters: as for `camb_spline`.

    Returns:
        Wavenumbers [k] [h/Mpc] and power [redshift, k] [(Mpc/h)^3].

    Raises:
        ImportError: the package camb is missing.
    """
    values = _DEFAULTS | parameters
    run = _camb_parameters(A_s, **{name: values[name] for name in SHAPE})
    import camb

    run.set_matter_power(redshifts=redshifts[::-1], kmax=K_MAX)
    if model != "linear":
        run.NonLinear = camb.model.NonLinear_both
        run.NonLinearModel.set_params(halofit_version=model)
    found = camb.get_results(run)
    nonlinear = model != "linear"
    k, _, power = found.get_linear_matter_power_spectrum(nonlinear=nonlinear)
    return k, power


def _run_camb(**parameters: float) -> tuple[np.ndarray, np.ndarray]:
    """CAMB's own wavenumbers [h/Mpc] and linear power today [(Mpc/h)^3] for A_s = 2e-9."""
    run = _camb_parameters(_A_S, **parameters)
    import camb

    run.set_matter_power(redshifts=[0.0], kmax=K_MAX)
    k, _, power = camb.get_results(run).get_linear_matter_power_spectrum()
    return k, power[0]


def _camb_parameters(
    A_s: float,
    *,
    Omega_m: float,
    Omega_b: float,
    h: float,
    n_s: float,
    w0: float,
    wa: float,
    T_cmb: float,
    k_pivot: float,
) -> Any:
    """Returns the `camb.CAMBparams` of a cosmology, for linear power."""
    try:
        import camb
    except ImportError:
        raise ImportError(
            'transfer="camb" needs the package camb: pip install camb, or use '
            'transfer="eisenstein-hu"'
        ) from None
    if not Omega_b > 0:
        raise ValueError(
            f'Omega_b = {Omega_b:g}: transfer="camb" needs baryons; or use "eisenstein-hu"'
        )
    run = camb.CAMBparams()
    run.set_dark_energy(w=w0, wa=wa, dark_energy_model="ppf")
    run.set_cosmology(
        H0=100 * h,
        ombh2=Omega_b * h**2,
        omch2=(Omega_m - Omega_b) * h**2,
        omk=0,
        mnu=0,
        nnu=NEUTRINOS,
        TCMB=T_cmb,
    )
    run.InitPower.set_params(As=A_s, ns=n_s, pivot_scalar=k_pivot)
    run.NonLinear = camb.model.NonLinear_none
    return run
