"""Linear power from CAMB as a smooth TensorFlow function."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.camb_spline import SHAPE, camb_spline
from flowpm_dist.cosmology.parameters import Cosmology, as_float64

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
        parameters = {name: getattr(cosmology, name) for name in SHAPE}
        values = {name: known_number(name, parameter) for name, parameter in parameters.items()}
        start, step, coefficients = camb_spline(**values)
        self._start, self._step = start, step
        self._coefficients = tf.constant(coefficients)
        self._tilt = as_float64(cosmology.n_s) - values["n_s"]  # 0, with a derivative
        self._ln_pivot = np.log(values["k_pivot"] / values["h"])
        self._guard = without_gradient(
            {name: parameters[name] for name in SHAPE if name not in _DIFFERENTIABLE}
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


def known_number(name: str, parameter: object) -> float:
    """Returns a parameter as a number, or raises ValueError if only a graph knows it."""
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


def without_gradient(
    parameters: dict[str, object],
    power: str = "linear power",
    instead: str = 'transfer="eisenstein-hu"',
) -> tf.Tensor:
    """Returns 1, which refuses to be differentiated by those parameters that are tensors.

    Args:
        parameters: by name.
        power: what CAMB computes, for the message.
        instead: what has the gradients.
    """
    guard = tf.constant(1.0, tf.float64)
    for name, parameter in parameters.items():
        if isinstance(parameter, (tf.Tensor, tf.Variable)):
            message = (
                f"CAMB gives no derivative of the {power} by {name}: use {instead} for gradients "
                "by it"
            )
            barrier = tf.raw_ops.PreventGradient(input=as_float64(parameter), message=message)
            guard += 0.0 * barrier
    return guard
