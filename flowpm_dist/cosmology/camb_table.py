"""Linear power from CAMB as a smooth TensorFlow function; camb is imported only when asked."""

from __future__ import annotations

import functools

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.parameters import Cosmology, as_float64

K_MAX = 20.0
"""Largest wavenumber that CAMB computes [1/Mpc]."""

NEUTRINOS = 3.046
"""Effective number of neutrino species, all massless."""

_A_S = 2e-9  # CAMB's spectrum is proportional to A_s: one table serves all
_SAMPLES = 4096
_SHAPE = ("Omega_m", "Omega_b", "h", "n_s", "w0", "wa", "T_cmb", "k_pivot")
_DIFFERENTIABLE = ("n_s",)


class CambTable:
    """Linear power today over A_s [(Mpc/h)^3], log-log cubic in k.

    Below and above CAMB's range (about 1e-5 h/Mpc to 20/Mpc) it goes on as the power laws that
    have the slopes at the two ends. Dark energy is CAMB's PPF, neutrinos are massless.

    A derivative by n_s is exact. CAMB gives none by Omega_m, Omega_b, h, w0, wa, T_cmb or
    k_pivot: asking for one raises LookupError.

    Raises:
        ImportError: the package camb is missing.
        ValueError: parameters that only a graph knows (inside a tf.function).
    """

    def __init__(self, cosmology: Cosmology) -> None:
        parameters = {name: getattr(cosmology, name) for name in _SHAPE}
        values = {name: _number(name, parameter) for name, parameter in parameters.items()}
        start, step, coefficients = _table(**values)
        self._start, self._step = start, step
        self._coefficients = tf.constant(coefficients)
        self._tilt = as_float64(cosmology.n_s) - values["n_s"]  # 0, with a derivative
        self._ln_pivot = np.log(values["k_pivot"] / values["h"])
        self._guard = _no_gradient(
            {name: parameters[name] for name in _SHAPE if name not in _DIFFERENTIABLE}
        )

    def __call__(self, k: tf.Tensor) -> tf.Tensor:
        """P(k, a = 1) / A_s [(Mpc/h)^3] for k > 0 [h/Mpc], float64, any shape."""
        ln_k = tf.math.log(k)
        cells = self._coefficients.shape[0]
        position = (ln_k - self._start) / self._step
        inside = tf.clip_by_value(position, 0.0, float(cells))
        cell = tf.minimum(tf.cast(inside, tf.int32), cells - 1)
        c = tf.gather(self._coefficients, cell)
        u = inside - tf.cast(cell, tf.float64)
        ln_power = c[..., 0] + u * (c[..., 1] + u * (c[..., 2] + u * c[..., 3]))
        end_slope = c[..., 1] + u * (2.0 * c[..., 2] + 3.0 * u * c[..., 3])
        ln_power += (position - inside) * end_slope
        return tf.exp(ln_power + self._tilt * (ln_k - self._ln_pivot)) * self._guard


def _number(name: str, parameter: object) -> float:
    if isinstance(parameter, (tf.Tensor, tf.Variable)):
        value = parameter.read_value() if isinstance(parameter, tf.Variable) else parameter
        known = tf.get_static_value(value)
        if known is None:
            raise ValueError(
                f"CAMB needs the number of {name}, which is not known inside a tf.function: make "
                'the LinearPower outside of it, or use transfer="eisenstein-hu"'
            )
        return float(known)
    return float(parameter)  # type: ignore[arg-type]


def _no_gradient(parameters: dict[str, object]) -> tf.Tensor:
    """1, which refuses to be differentiated by those of the parameters that are tensors."""
    guard = tf.constant(1.0, tf.float64)
    for name, parameter in parameters.items():
        if isinstance(parameter, (tf.Tensor, tf.Variable)):
            message = (
                f"CAMB gives no derivative of the linear power by {name}: use "
                'transfer="eisenstein-hu" for gradients by it'
            )
            barrier = tf.raw_ops.PreventGradient(input=as_float64(parameter), message=message)
            guard += 0.0 * barrier
    return guard


@functools.lru_cache(maxsize=16)
def _table(**values: float) -> tuple[float, float, np.ndarray]:
    """(first ln k, step in ln k, coefficients [cells, 4] of ln(P/A_s) in u = 0..1 of a cell)."""
    k, power = _run_camb(**values)
    from scipy.interpolate import CubicSpline  # comes with camb

    spline = CubicSpline(np.log(k), np.log(power / _A_S))
    ln_k = np.linspace(np.log(k[0]), np.log(k[-1]), _SAMPLES)
    step = ln_k[1] - ln_k[0]
    value, slope = spline(ln_k), spline(ln_k, 1) * step
    left, right, d_left, d_right = value[:-1], value[1:], slope[:-1], slope[1:]
    rise = right - left
    cubic = [left, d_left, 3 * rise - 2 * d_left - d_right, d_left + d_right - 2 * rise]
    return float(ln_k[0]), float(step), np.stack(cubic, axis=1)


def _run_camb(
    *,
    Omega_m: float,
    Omega_b: float,
    h: float,
    n_s: float,
    w0: float,
    wa: float,
    T_cmb: float,
    k_pivot: float,
) -> tuple[np.ndarray, np.ndarray]:
    """CAMB's own wavenumbers [h/Mpc] and linear power today [(Mpc/h)^3] for A_s = 2e-9."""
    try:
        import camb
    except ImportError:
        raise ImportError(
            'transfer="camb" needs the package camb: pip install camb, or use '
            'transfer="eisenstein-hu"'
        ) from None
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
    run.InitPower.set_params(As=_A_S, ns=n_s, pivot_scalar=k_pivot)
    run.NonLinear = camb.model.NonLinear_none
    run.set_matter_power(redshifts=[0.0], kmax=K_MAX)
    k, _, power = camb.get_results(run).get_linear_matter_power_spectrum()
    return k, power[0]
