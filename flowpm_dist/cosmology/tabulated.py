"""Matter power from a table, as a smooth TensorFlow function."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.parameters import as_float64


class TabulatedPower:
    """A matter power P(k, a) between the nodes of a table: `power(k, a)`.

    ln P is a bicubic spline in ln k and a. Below and above the table's wavenumbers it goes on as
    the power laws that have the slopes at the two ends. Differentiable by k, a and the table.

    Args:
        k: wavenumbers [k] [h/Mpc], increasing, above 0; at least four.
        a: scale factors [a] [1], increasing; at least four.
        power: P [a, k] [(Mpc/h)^3], above 0; may be a tensor to differentiate by.

    Raises:
        ValueError: nodes that do not increase or are too few, a table of another shape or not above
            0; from a call, a scale factor beyond the table.
    """

    def __init__(self, k: Any, a: Any, power: Any) -> None:
        k, self._a = np.asarray(k, np.float64), np.asarray(a, np.float64)
        table = as_float64(power)
        for name, nodes in (("wavenumbers", k), ("scale factors", self._a)):
            if nodes.ndim != 1 or nodes.size < 4 or not (np.diff(nodes) > 0).all():
                raise ValueError(f"{name} of a table of power: at least four, increasing")
        if k[0] <= 0:
            raise ValueError("wavenumbers of a table of power must be above 0")
        if table.shape != (self._a.size, k.size):
            raise ValueError(
                f"a table of power [a, k] of {self._a.size} scale factors and {k.size} wavenumbers "
                f"has shape {tuple(table.shape)}"
            )
        known = tf.get_static_value(table)
        if known is not None and not (np.isfinite(known) & (known > 0)).all():
            raise ValueError("a table of power must be finite and above 0")
        self._ln_k = np.log(k)
        self._along_a, self._along_k = _Spline(self._a), _Spline(self._ln_k)
        rows = self._along_a.to_coefficients @ tf.math.log(table)
        self._coefficients = rows @ self._along_k.to_coefficients.T

    def __call__(self, k: Any, a: Any = 1.0) -> tf.Tensor:
        """Returns P [(Mpc/h)^3] for k > 0 [h/Mpc] and a [1], which broadcast; float64."""
        k, a = as_float64(k), as_float64(a)
        known, (first, last) = tf.get_static_value(a), self._a[[0, -1]]
        if known is not None and not ((known > first - 1e-9) & (known < last + 1e-9)).all():
            raise ValueError(
                f"the table of power has scale factors from {first:g} to {last:g}: asked for "
                f"{np.min(known):g} to {np.max(known):g}"
            )
        shape = tf.broadcast_dynamic_shape(tf.shape(k), tf.shape(a))
        cell_a, basis_a, _ = self._along_a.basis(tf.clip_by_value(a, first, last))
        ln_k = tf.math.log(k)
        inside = tf.clip_by_value(ln_k, *self._ln_k[[0, -1]])
        cell_k, basis_k, slope_k = self._along_k.basis(inside)
        # From here on [..., 4] of the bases; coefficients are [a, k].
        count = self._along_k.to_coefficients.shape[0]
        rows = (cell_a[..., tf.newaxis] + tf.range(4)) * count
        columns = cell_k[..., tf.newaxis] + tf.range(4)
        places = rows[..., :, tf.newaxis] + columns[..., tf.newaxis, :]
        near = tf.gather(tf.reshape(self._coefficients, [-1]), places)
        along_k = tf.reduce_sum(near * basis_a[..., tf.newaxis], axis=-2)
        beyond = (ln_k - inside)[..., tf.newaxis] * slope_k
        return tf.broadcast_to(tf.exp(tf.reduce_sum(along_k * (basis_k + beyond), axis=-1)), shape)


class _Spline:
    """A cubic spline through values at nodes: B-splines, without knots next to the ends.

    Attributes:
        to_coefficients: the matrix from values to the coefficients of the B-splines [node, node].
    """

    def __init__(self, nodes: np.ndarray) -> None:
        from scipy.interpolate import BSpline, PPoly

        knots = np.concatenate([[nodes[0]] * 4, nodes[2:-2], [nodes[-1]] * 4])
        self.to_coefficients = np.linalg.inv(BSpline.design_matrix(nodes, knots, 3).toarray())
        self._edges = knots[3:-3]
        cells = self._edges.size - 1
        pieces = np.zeros([cells, 4, 4])  # [cell, B-spline, power from the highest]
        for number in range(nodes.size):
            spline = PPoly.from_spline(BSpline(knots, np.eye(nodes.size)[number], 3))
            for cell in range(max(number - 3, 0), min(number + 1, cells)):
                pieces[cell, number - cell] = spline.c[:, cell + 3]
        self._pieces = pieces

    def basis(self, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns the cells of places, which are the first B-splines there, and four values each.

        Returns:
            int32 [...]; the B-splines [..., 4]; their slopes [..., 4].
        """
        flat = tf.searchsorted(self._edges, tf.reshape(x, [-1]), side="right") - 1
        cell = tf.reshape(tf.clip_by_value(flat, 0, self._edges.size - 2), tf.shape(x))
        u = (x - tf.gather(self._edges, cell))[..., tf.newaxis]
        cubic, square, linear, constant = tf.unstack(tf.gather(self._pieces, cell), axis=-1)
        values = ((cubic * u + square) * u + linear) * u + constant
        return cell, values, (3.0 * cubic * u + 2.0 * square) * u + linear
