"""The non-linear matter power: halofit, CAMB's tables, or a user's table.

Halofit: Smith and others (2003, astro-ph/0207664), with the fit of Takahashi and others (2012,
arXiv:1208.2701), and massive neutrinos as in CAMB, after Bird and others (2012, arXiv:1109.4416).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.arrays import as_float64
from flowpm_dist.cosmology.camb_tables import camb_power_table
from flowpm_dist.cosmology.parameters import AMPLITUDES, SHAPE, Cosmology
from flowpm_dist.cosmology.power import LinearPower, known_number, without_gradient
from flowpm_dist.options import in_unit

_LN_K = np.linspace(np.log(1e-4), np.log(3e3), 1024)
_SMALLEST, _LARGEST = np.log(3e-3), np.log(100.0)  # ln of the radii that are tried [Mpc/h]
_EXPONENTS = (-0.0732, -0.0307), (-0.1423, -0.0585), (0.0725, 0.0743)  # open and flat
_HALVINGS = 24  # of that range: Newton's method does the rest

MODELS = ("takahashi", "mead2020", "mead2016", "linear")
"""Halofit of Takahashi and others (2012, arXiv:1208.2701), HMcode, and CAMB's own linear power."""


class Halofit:
    """The non-linear power P(k, a) for a linear power: `halofit(k, a)` can replace `LinearPower`.

    It has gradients with respect to k, a and every quantity for which the linear power has
    gradients. CAMB's halofit (`NonlinearPower`) is the same fit with CAMB's growth, which includes
    radiation. CAMB's halofit has no gradients.

    In a curved universe powers of Omega_m(a) are interpolated, as in CAMB, between open universes
    without dark energy and flat universes (Smith and others 2003, equation C17 and before).

    If the fluctuations are below 1 on all scales above 3 kpc/h, the result is the linear power.

    Args:
        linear: the linear power; its cosmology is used.

    """

    def __init__(self, linear: LinearPower) -> None:
        self.linear, self.growth = linear, linear.growth
        k = np.exp(_LN_K)
        step = _LN_K[1] - _LN_K[0]
        self._k = tf.constant(k)
        self._weights = step * k**3 / (2 * np.pi**2)
        self._variance = None  # for D1 = 1, where growth does not depend on the wavenumber
        if not self.growth.by_scale:
            self._variance = self._weights * linear.without_growth(k)

    def __repr__(self) -> str:
        return f"Halofit({self.linear})"

    def __call__(self, k: Any, a: Any = 1.0) -> tf.Tensor:
        """Returns P [(Mpc/h)^3] for k > 0 [h/Mpc] and a [1], which broadcast; float64."""
        k, a = as_float64(k, "k", "h/Mpc"), as_float64(a, "a")
        (scale, n, c, exists), power = self._scales(a), self.linear(k, a)
        volume = k**3 / (2 * np.pi**2)
        dimensionless = volume * power
        y = k / scale
        background = self.growth.background
        matter, dark, w = (f(a) for f in (background.omega_m, background.omega_de, background.w))
        n2, n3, n4, stiff = n**2, n**3, n**4, dark * (1 + w)
        # Takahashi and others 2012, appendix.
        a_n = 1.5222 + 2.8553 * n + 2.3706 * n2 + 0.9903 * n3 + 0.2250 * n4
        a_n = 10 ** (a_n - 0.6038 * c + 0.1749 * stiff)
        b_n = 10 ** (-0.5642 + 0.5864 * n + 0.5716 * n2 - 1.5474 * c + 0.2279 * stiff)
        c_n = 10 ** (0.3698 + 2.0404 * n + 0.8161 * n2 + 0.5869 * c)
        gamma = 0.1971 - 0.0843 * n + 0.8460 * c
        alpha = tf.abs(6.0835 + 1.3373 * n - 0.1959 * n2 - 5.5274 * c)
        beta = 2.0379 - 0.7354 * n + 0.3157 * n2 + 1.2490 * n3 + 0.3980 * n4 - 0.1682 * c
        nu = 10 ** (5.2105 + 3.6902 * n)
        # Terms of massive neutrinos with their fraction of matter today, as in CAMB.
        fraction = 1 - background.Omega_cb / background.Omega_m
        beta += fraction * (1.081 + 0.395 * n2)
        boosted = dimensionless * (1 + 47.48 * fraction * k**2 / (1 + 1.5 * k**2))
        quasi = (1 + boosted) ** beta / (1 + alpha * boosted)
        quasi *= dimensionless * tf.exp(-y / 4 - y**2 / 8)
        f1, f2, f3 = self._powers_of_matter(matter, dark)
        halo = a_n * y ** (3 * f1)
        halo /= 1 + b_n * y**f2 + (c_n * f3 * y) ** (3 - gamma)
        halo *= (1 + 0.977 * fraction) / (1 + nu / y**2)
        return tf.where(exists, (quasi + halo) / volume, power)

    def _powers_of_matter(self, matter: tf.Tensor, dark: tf.Tensor) -> list[tf.Tensor]:
        """Returns f1, f2 and f3 of the fit for Omega_m(a) and Omega_de(a) [...].

        They are matter^open + dark (matter^flat - matter^open) / (1 - matter). The quotient has no
        pole: matter may pass 1 in a closed universe.
        """
        if self.growth.background.is_flat:
            return [matter**flat for _, flat in _EXPONENTS]
        logarithm = tf.math.log(matter)
        far = tf.abs(logarithm) > 1e-3
        away = tf.where(far, logarithm, tf.ones_like(logarithm))

        def quotient(power: float) -> tf.Tensor:
            """Returns (matter^power - 1) / (matter - 1)."""

            def series(x: tf.Tensor) -> tf.Tensor:
                return 1 + x / 2 * (1 + x / 3 * (1 + x / 4))

            near = power * series(power * logarithm) / series(logarithm)
            return tf.where(far, tf.math.expm1(power * away) / tf.math.expm1(away), near)

        return [matter**alone * (1 - dark * quotient(flat - alone)) for alone, flat in _EXPONENTS]

    def _scales(self, a: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns the quantities that the fit depends on, at scale factors [...].

        The first is the wavenumber at which the density, smoothed by a Gaussian, has the variance 1
        [h/Mpc]. The next are the slope n_eff and the curvature C of the power there. The last is
        whether there is such a scale.
        """
        if self._variance is None:
            ln_growth = tf.zeros_like(a)
            weighted = self._weights * self.linear(self._k, a[..., tf.newaxis])
        else:
            ln_growth, weighted = 2.0 * tf.math.log(self.growth.d1(a)), self._variance

        def excess(ln_r: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            """Returns ln sigma^2(R), and its first two derivatives by ln R."""
            x2 = tf.square(self._k * tf.exp(ln_r)[..., tf.newaxis])
            terms = weighted * tf.exp(-x2)
            sigma2 = tf.reduce_sum(terms, axis=-1)
            first = tf.reduce_sum(-2.0 * x2 * terms, axis=-1) / sigma2
            second = tf.reduce_sum(4.0 * x2 * (x2 - 1.0) * terms, axis=-1) / sigma2
            return ln_growth + tf.math.log(sigma2), first, second - first**2

        variance, unit = tf.stop_gradient(weighted), tf.exp(-tf.stop_gradient(ln_growth))

        def exceeds(ln_r: tf.Tensor) -> tf.Tensor:
            x2 = tf.square(self._k * tf.exp(ln_r)[..., tf.newaxis])
            return tf.reduce_sum(tf.exp(-x2) * variance, axis=-1) > unit

        low = tf.fill(tf.shape(a), tf.constant(_SMALLEST, tf.float64))
        exists = exceeds(low)
        high = tf.fill(tf.shape(a), tf.constant(_LARGEST, tf.float64))
        for _ in range(_HALVINGS):
            middle = 0.5 * (low + high)
            above = exceeds(middle)
            low, high = tf.where(above, middle, low), tf.where(above, high, middle)
        ln_r = tf.stop_gradient(low)
        for _ in range(2):  # with derivatives
            value, slope, _ = excess(ln_r)
            ln_r -= tf.where(exists, value / slope, tf.zeros_like(value))
        _, slope, curvature = excess(ln_r)
        return tf.exp(-ln_r), -3.0 - slope, -curvature, exists


class NonlinearPower:
    """The non-linear power P(k, a) of CAMB as a table: `power(k, a)`, for 0 <= z <= 4.

    CAMB includes radiation, which slows the growth by about 1e-3. There are no gradients by the
    cosmology, and computing one raises LookupError; `Halofit` has gradients.

    Args:
        cosmology: the parameters; its `transfer` is ignored.
        model: one of `MODELS`.

    Raises:
        ValueError: the model is unknown, the cosmology has a table of power, or the parameters have
            no values yet (inside a tf.function).
        ImportError: the package camb is missing.
    """

    def __init__(self, cosmology: Cosmology, model: str = "takahashi") -> None:
        if model not in MODELS:
            raise ValueError(f"model {model!r}: one of {', '.join(map(repr, MODELS))}")
        if cosmology.power is not None:
            raise ValueError(f"CAMB does not take {cosmology.power}: use Halofit")
        self.cosmology, self.model = cosmology, model
        numbers: dict[str, Any] = {
            name: known_number(name, getattr(cosmology, name)) for name in SHAPE
        }
        amplitude = LinearPower(cosmology.replace(transfer="camb")).A_s
        redshifts = np.expm1(np.linspace(0.0, np.log1p(4.0), 33))
        k, power = camb_power_table(
            tuple(redshifts),
            model,
            known_number("A_s", amplitude),
            shares=cosmology.m_nu_shares,
            **numbers,
        )
        self._table = TabulatedPower(k, 1.0 / (1.0 + redshifts[::-1]), power[::-1])
        self._guard = without_gradient(
            {name: getattr(cosmology, name) for name in (*SHAPE, *AMPLITUDES)},
            power="non-linear power",
            instead="Halofit",
        )

    def __repr__(self) -> str:
        return f"NonlinearPower({self.cosmology}, {self.model!r})"

    def __call__(self, k: Any, a: Any = 1.0) -> tf.Tensor:
        """Returns P [(Mpc/h)^3] for k > 0 [h/Mpc] and a [1], which broadcast; float64."""
        return self._table(k, a) * self._guard


class TabulatedPower:
    """A matter power P(k, a) between the nodes of a table: `power(k, a)`.

    ln P is a bicubic spline in ln k and a. Below and above the table's wavenumbers P is a power law
    with the slope at that end. Differentiable by k, a and the table.

    Args:
        k: wavenumbers [k] [h/Mpc], increasing, above 0; at least four.
        a: scale factors [a] [1], increasing; at least four.
        power: P [a, k] [(Mpc/h)^3], above 0; may be a tensor to differentiate by.

    Raises:
        ValueError: nodes that do not increase or are too few, a table of another shape or not above
            0; from a call, a scale factor beyond the table.
    """

    def __init__(self, k: Any, a: Any, power: Any) -> None:
        k, self._a = np.asarray(in_unit("k", k, "h/Mpc"), float), np.asarray(in_unit("a", a), float)
        table = as_float64(power, "power", "(Mpc/h)^3")
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

    def __repr__(self) -> str:
        (low, high), (first, last) = np.exp(self._ln_k[[0, -1]]), self._a[[0, -1]]
        return f"TabulatedPower(k {low:.4g} to {high:.4g} h/Mpc, a {first:.4g} to {last:.4g})"

    def __call__(self, k: Any, a: Any = 1.0) -> tf.Tensor:
        """Returns P [(Mpc/h)^3] for k > 0 [h/Mpc] and a [1], which broadcast; float64."""
        k, a = as_float64(k, "k", "h/Mpc"), as_float64(a, "a")
        known, (first, last) = tf.get_static_value(a), self._a[[0, -1]]
        if known is not None and not ((known > first - 1e-9) & (known < last + 1e-9)).all():
            raise ValueError(
                f"the table of power has scale factors from {first:g} to {last:g}, but "
                f"{np.min(known):g} to {np.max(known):g} were requested"
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
        """Returns for each place its cell, the number of the first B-spline there, and four values.

        Returns:
            int32 [...]; the B-splines [..., 4]; their slopes [..., 4].
        """
        flat = tf.searchsorted(self._edges, tf.reshape(x, [-1]), side="right") - 1
        cell = tf.reshape(tf.clip_by_value(flat, 0, self._edges.size - 2), tf.shape(x))
        u = (x - tf.gather(self._edges, cell))[..., tf.newaxis]
        cubic, square, linear, constant = tf.unstack(tf.gather(self._pieces, cell), axis=-1)
        values = ((cubic * u + square) * u + linear) * u + constant
        return cell, values, (3.0 * cubic * u + 2.0 * square) * u + linear
