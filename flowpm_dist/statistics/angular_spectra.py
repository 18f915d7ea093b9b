"""The angular power spectrum of maps of the flat sky and of the whole sky."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import tensorflow as tf
from typing_extensions import override

from flowpm_dist.grid.flat_sky import FlatSky
from flowpm_dist.io.drawing import Axes, draw_curves
from flowpm_dist.io.labelled import Labelled, LabelledArray, leading_axes
from flowpm_dist.io.labels import MULTIPOLE, POWER_PER_LOG, gaussian_scatter
from flowpm_dist.options import in_unit

Spacing = Literal["linear", "log"]

MapWindow = Literal["pixel", "bilinear"] | None
"""The window that is divided out of the modes: means over pixels, or bilinear painting."""

BINS_PER_OCTAVE = 2
"""Logarithmic bins for each factor of 2 in l: with more, some would have no mode."""

SphereWindow = Literal["bilinear"] | None
"""The painting whose window is divided out of the spectra of maps."""

LOWEST = 2
"""Multipole at which the first of `spherical_octave_edges` lies."""
HIGHEST = 2
"""Multipole, divided by nside, at which the last of `spherical_octave_edges` lies."""

_NODES = np.linspace(0.0, 3.0, 151)  # of sqrt(l (l + 1)) / nside
_WINDOWS = {None: 0, "pixel": 1, "bilinear": 2}
_TIE = 1e-9  # relative, so that rounding does not decide of a mode on an edge


@dataclass(frozen=True)
class AngularPower(Labelled):
    """A measured angular power spectrum; unpacks as `ell, power`.

    Attributes:
        ell: mean |l| of the modes of each bin [bin].
        power: C_l in each bin [..., bin], in the square of the maps' unit [sr].
        modes: the number of modes in each bin [bin], l and -l both counted.
        edges: edges of the bins [bin + 1].
    """

    ell: np.ndarray
    power: np.ndarray
    modes: np.ndarray
    edges: np.ndarray

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter((self.ell, self.power))

    def plot(self, axes: Axes | None = None, label: str = "") -> Axes:
        """Draws l (l + 1) C_l / 2 pi, a curve for each map, with the scatter of a Gaussian field.

        The scatter is for auto spectra without noise; other spectra have more.

        Args:
            axes: what to draw on; by default a new figure of pyplot.
            label: the label of the curve.
        """
        curves = self.ell * (self.ell + 1) / (2 * np.pi) * self.power
        scatter, names = gaussian_scatter(curves, self.modes), (MULTIPOLE, POWER_PER_LOG)
        return draw_curves(
            axes, self.ell, curves, names, scatter=scatter, labels=[label], logarithmic="xy"
        )

    @override
    def labelled(self) -> dict[str, LabelledArray]:
        axes = (*leading_axes(self.power, 1, "map"), "ell")
        return {
            "ell": LabelledArray(self.ell, axes[-1:], "1", "mean multipole"),
            "modes": LabelledArray(self.modes, axes[-1:], "1", "number of modes"),
            "power": LabelledArray(self.power, axes, "sr", "angular power"),
        }


def binned_angular_power(
    maps: Any,
    fov: Any,
    bins: Any = None,
    *,
    spacing: Spacing = "linear",
    other: Any = None,
    window: MapWindow = None,
) -> tf.Tensor:
    """Returns the angular power in each bin [..., bin], differentiable; see `angular_power`.

    It is float64: sums are made so, whatever the dtype of the maps.
    """
    maps = tf.convert_to_tensor(in_unit("maps", maps))
    sky = FlatSky.of(maps, fov)
    bins_of = _bins_of(sky, bins, spacing, window)
    modes = bins_of.modes
    first = tf.signal.rfft2d(maps)
    second = first
    if other is not None:
        other = tf.convert_to_tensor(in_unit("other", other))
        if FlatSky.of(other, fov) != sky or other.dtype != maps.dtype:
            raise ValueError(
                f"maps {maps.shape} of {maps.dtype.name} and {other.shape} of {other.dtype.name}: "
                "a cross spectrum needs the same pixels and dtype"
            )
        second = tf.signal.rfft2d(other)
    products = tf.cast(tf.math.real(first * tf.math.conj(second)), tf.float64) * bins_of.weights
    lead = products.shape[:-2].as_list()
    by_mode = tf.transpose(tf.reshape(products, [-1, bins_of.number.size]))
    sums = tf.math.unsorted_segment_sum(by_mode, bins_of.number, modes.size + 1)[:-1]
    means = tf.transpose(sums) * (sky.area / np.prod(sky.pixels, dtype=float) ** 2 / modes)
    return tf.reshape(means, [*lead, modes.size])


def angular_power(
    maps: Any,
    fov: Any,
    bins: Any = None,
    *,
    spacing: Spacing = "linear",
    other: Any = None,
    window: MapWindow = None,
    noise: Any = 0.0,
) -> AngularPower:
    """Returns the angular power spectrum of maps of the flat sky, or of maps with others.

    C_l = A / N^2 <a_l b_l*>, the mean over the modes of a bin, with a_l the discrete Fourier
    transform of the N pixels over the solid angle A. The map is taken as periodic; l = 0 is left
    out.

    Args:
        maps: [..., x, y], float32 or float64, of any unit.
        fov: field of view [rad], one number or those along x and y.
        bins: the edges of the bins in l [bin + 1], increasing; or the number of bins between the
            lowest mode and the Nyquist multipole of the coarser axis. By default as many as make
            each bin as wide as the lowest mode.
        spacing: "linear" or "log", where a number of bins is given.
        other: maps [..., x, y] for a cross spectrum, which broadcast: all pairs of maps
            [source, x, y] with `maps=m[:, None], other=m`.
        window: what is divided out of the modes. "pixel" is for means over pixels:
            sinc(l_x p / 2) sinc(l_y p / 2) with p the side of a pixel. "bilinear" is its square,
            for particles painted bilinearly.
        noise: power of the noise, which is subtracted; broadcasts with [..., bin].

    Raises:
        ValueError: maps, field of view, edges, spacing or window as they should not be; a bin in
            which there is no mode.
    """
    noise = in_unit("noise", noise, "sr")
    maps = tf.convert_to_tensor(in_unit("maps", maps))
    options: dict[str, Any] = {"spacing": spacing, "other": other, "window": window}
    power = binned_angular_power(maps, fov, bins, **options).numpy()
    binning = _bins_of(FlatSky.of(maps, fov), bins, spacing, window)
    return AngularPower(binning.ell, power - noise, binning.modes, np.array(binning.edges))


def octave_edges(fov: float, pixels: int) -> np.ndarray:
    """Returns the edges of logarithmic bins from the lowest to the Nyquist multipole [bin + 1].

    Args:
        fov: field of view [rad].
        pixels: pixels along a side of the map, at least 3.
    """
    fov, pixels = in_unit("fov", fov, "rad"), in_unit("pixels", pixels)
    count = max(1, int(BINS_PER_OCTAVE * np.log2(pixels / 2) + 1e-9))
    return 2 * np.pi / fov * np.geomspace(1.0, pixels / 2, count + 1)


def theory_in_bins(
    power: Callable[[np.ndarray], Any], pixels: int | tuple[int, int], fov: Any, bins: Any = None
) -> np.ndarray:
    """Returns the mean of a spectrum of theory over the modes of each bin, as maps would have it.

    In a wide bin this is not the value at the mean l: a spectrum of l^-2 is 7 % higher in a bin
    whose upper edge is 1.7 times the lower one.

    Args:
        power: multipoles [ell] to C_l [..., ell], smooth and above 0.
        pixels: pixels of the maps, one number or one each along x and y.
        fov, bins: as for `angular_power`.

    Returns:
        [..., bin], float64.

    Raises:
        ValueError: as `angular_power`.
    """
    n_x, n_y = (int(n) for n in np.broadcast_to(in_unit("pixels", pixels), [2]))
    sky = FlatSky.of(tf.zeros([n_x, n_y]), fov)
    binning = _bins_of(sky, bins, "linear", None)
    x, y = sky.wavenumbers()
    ell = np.sqrt(x**2 + y**2).ravel()
    used = binning.number < binning.modes.size
    number, ell, weights = binning.number[used], ell[used], binning.weights.ravel()[used]
    nodes = np.geomspace(ell.min(), ell.max() * (1 + _TIE), 256)
    values = np.asarray(in_unit("power", power(nodes), "sr"), np.float64)
    rows = [
        np.bincount(number, weights * np.exp(np.interp(np.log(ell), np.log(nodes), np.log(row))))
        for row in values.reshape(-1, nodes.size)
    ]
    return (np.array(rows) / binning.modes).reshape(*values.shape[:-1], binning.modes.size)


def _edges(sky: FlatSky, bins: Any, spacing: Spacing) -> tuple[float, ...]:
    lowest, highest = 2 * np.pi / max(sky.fov), np.pi / max(sky.pixel)
    if spacing not in ("linear", "log"):
        raise ValueError(f"spacing {spacing!r}: 'linear' or 'log'")
    bins = in_unit("bins", bins)
    if bins is None:
        count = max(int(highest / lowest + _TIE), 1)
        return tuple(lowest * (np.arange(count + 1) + 0.5))
    if np.ndim(bins) == 0:
        if bins != int(bins) or bins < 1:
            raise ValueError(f"bins in l: a whole number of at least 1, or edges; got {bins}")
        place = np.linspace if spacing == "linear" else np.geomspace
        return tuple(place(lowest, highest, int(bins) + 1))
    edges = np.asarray(bins, np.float64)
    if edges.ndim != 1 or edges.size < 2 or edges[0] < 0 or not (np.diff(edges) > 0).all():
        raise ValueError("edges in l: at least two numbers, increasing from 0 or more, are needed")
    return tuple(edges)


@dataclass(frozen=True)
class _Bins:
    """The bins of a map's modes."""

    number: np.ndarray  # of the bin of each mode of a real transform [kx * ky]
    weights: np.ndarray  # multiplicity over the squared window [kx, ky]
    ell: np.ndarray  # [bin]
    modes: np.ndarray  # [bin]
    edges: tuple[float, ...]  # [bin + 1]


def _bins_of(sky: FlatSky, bins: Any, spacing: Spacing, window: MapWindow) -> _Bins:
    if window not in _WINDOWS:
        raise ValueError(f"window {window!r}: 'pixel', 'bilinear' or None")
    return _bins(sky, _edges(sky, bins, spacing), _WINDOWS[window])


@functools.lru_cache(maxsize=8)
def _bins(sky: FlatSky, edges: tuple[float, ...], powers: int) -> _Bins:
    x, y = sky.wavenumbers()
    ell, count = np.sqrt(x**2 + y**2), len(edges) - 1
    number = np.searchsorted(np.array(edges) * (1 - _TIE), ell, side="right") - 1
    number = np.where((number < 0) | (number >= count) | (ell == 0), count, number).ravel()
    column = np.arange(y.size)
    once = (column == 0) | (2 * column == sky.pixels[1])
    multiplicity = np.broadcast_to(np.where(once, 1.0, 2.0), ell.shape)
    modes = np.bincount(number, multiplicity.ravel(), count + 1)[:-1]
    if not modes.all():
        empty = int(np.argmin(modes))
        raise ValueError(
            f"no mode of the map lies in the bin of l from {edges[empty]:g} to "
            f"{edges[empty + 1]:g}: wider bins are needed (modes are "
            f"{2 * np.pi / max(sky.fov):g} apart)"
        )
    mean = np.bincount(number, (multiplicity * ell).ravel(), count + 1)[:-1] / modes
    along = (k * side / (2 * np.pi) for k, side in zip((x, y), sky.pixel, strict=True))
    window = np.prod([np.sinc(each) ** (2 * powers) for each in np.broadcast_arrays(*along)], 0)
    return _Bins(number.astype(np.int32), multiplicity / window, mean, modes, edges)


def spherical_power(
    maps: Any, edges: Any, *, other: Any = None, window: SphereWindow = None
) -> AngularPower:
    """Returns the angular power spectrum of maps of the whole sky, or of maps with others.

    The harmonics are the same as in `healpy.anafast`.

    Args:
        maps: [..., pixel], in HEALPix's order of rings, of any unit.
        edges: edges of the bins in l [bin + 1], increasing; a multipole on an edge is in the
            bin above.
        other: maps for a cross spectrum, which broadcast.
        window: what is divided out: "bilinear", the square of `painting_window`, of maps that were
            both painted so; None for nothing.

    Returns:
        The means over the 2 l + 1 modes of each multipole in a bin.

    Raises:
        ValueError: maps that are not of a whole sky, edges that do not increase, a bin without a
            multipole up to 3 nside - 1, or another window.
    """
    first = np.asarray(in_unit("maps", maps), np.float64)
    second = first if other is None else np.asarray(in_unit("other", other), np.float64)
    nside = _nside(first)
    if _nside(second) != nside:
        raise ValueError(f"maps of {first.shape[-1]} and {second.shape[-1]} pixels")
    one = spherical_harmonics(first)
    one, two = np.broadcast_arrays(one, one if other is None else spherical_harmonics(second))
    return harmonic_power(one, two, nside, edges, window=window)


def spherical_harmonics(maps: Any) -> np.ndarray:
    """Returns the harmonics of maps of the whole sky up to l = 3 nside - 1, in healpy's order.

    Args:
        maps: [..., pixel], in HEALPix's order of rings.

    Raises:
        ValueError: maps that are not of a whole sky.
    """
    import healpy

    maps = np.asarray(in_unit("maps", maps))
    last = 3 * _nside(maps) - 1
    rows = maps.reshape(-1, maps.shape[-1])
    harmonics = np.array([healpy.map2alm(row.astype(np.float64), lmax=last) for row in rows])
    return harmonics.reshape(*maps.shape[:-1], -1)


def harmonic_power(
    first: np.ndarray, second: np.ndarray, nside: int, edges: Any, *, window: SphereWindow = None
) -> AngularPower:
    """Returns the power spectrum of maps with others, by their harmonics.

    Args:
        first, second: of `spherical_harmonics` [..., harmonic].
        nside: resolution of the maps.
        edges, window: as for `spherical_power`.

    Raises:
        ValueError: as `spherical_power`.
    """
    import healpy

    if window not in ("bilinear", None):
        raise ValueError(f"window {window!r}: 'bilinear' or None")
    ell, edges = np.arange(3 * nside), in_unit("edges", edges)
    by_bin = _modes_of_bins(ell, edges)
    rows = (each.reshape(-1, each.shape[-1]) for each in (first, second))
    spectra = np.array([healpy.alm2cl(one, two) for one, two in zip(*rows, strict=True)])
    if window is not None:
        spectra /= painting_window(ell, nside, power=2)
    modes = by_bin.sum(axis=1)
    power = (spectra @ by_bin.T / modes).reshape(*first.shape[:-1], len(modes))
    return AngularPower(by_bin @ ell / modes, power, modes, np.array(edges))


def painting_window(ell: Any, nside: int, *, power: int = 1) -> np.ndarray:
    """Returns the factor that bilinear painting leaves of harmonics of the density [ell] [1].

    The window belongs to a cloud in a cell, as wide as two rings and two pixels of a ring are
    apart. It depends on the direction of the wave and the place on the sky; this is its mean.

    Args:
        ell: multipoles, up to 3 nside.
        nside: resolution of the maps.
        power: power of the window before the mean: 1 for the spectrum of painted maps with others,
            2 for painted maps with each other.
    """
    nside, power = in_unit("nside", nside), in_unit("power", power)
    ell = np.asarray(in_unit("ell", ell), np.float64)
    return np.interp(np.sqrt(ell * (ell + 1)) / nside, _NODES, _window_at_nodes(power))


@functools.cache
def _window_at_nodes(power: int) -> np.ndarray:
    z, direction = (np.arange(96) + 0.5) / 96, (np.arange(64) + 0.5) / 64 * np.pi / 2
    ring = np.where(z < 2 / 3, 1.0, np.sqrt(3 * (1 - z)))  # pixels of a ring over 4 nside
    along = np.sqrt(1 - z**2)
    apart = ring[:, np.newaxis] * 2 / 3 / along[:, np.newaxis]  # rings, times nside
    across = np.pi / 2 * (along / ring)[:, np.newaxis]  # pixels of a ring, likewise
    waves = _NODES[:, np.newaxis, np.newaxis] / (2 * np.pi)
    first, second = waves * apart * np.cos(direction), waves * across * np.sin(direction)
    window = (np.sinc(first) * np.sinc(second)) ** 2
    return np.mean(window**power, axis=(1, 2))


def spherical_octave_edges(nside: int) -> np.ndarray:
    """Returns edges of logarithmic bins in l; the edges are whole numbers [bin + 1]."""
    highest = HIGHEST * nside + 1
    count = max(1, round(BINS_PER_OCTAVE * np.log2(highest / LOWEST)))
    return np.unique(np.round(np.geomspace(LOWEST, max(highest, LOWEST + 1), count + 1)))


def spherical_theory_in_bins(
    power: Callable[[np.ndarray], Any], edges: Any, nside: int
) -> np.ndarray:
    """Returns the mean of a spectrum of theory over the modes of each bin [..., bin].

    Args:
        power: multipoles [ell] to C_l [..., ell].
        edges: as for `spherical_power`.
        nside: resolution of the maps.
    """
    ell = np.arange(3 * in_unit("nside", nside))
    by_bin = _modes_of_bins(ell, edges)
    inside = by_bin.any(axis=0)
    spectra = in_unit("power", power(ell[inside].astype(np.float64)), "sr")
    values = np.asarray(spectra, np.float64)
    return values @ by_bin[:, inside].T / by_bin.sum(axis=1)


def _nside(maps: np.ndarray) -> int:
    """Returns the resolution of maps [..., pixel].

    Raises:
        ValueError: they are not of a whole sky.
    """
    pixels = maps.shape[-1] if maps.ndim else 0
    nside = round((pixels / 12) ** 0.5)
    if not pixels or 12 * nside**2 != pixels:
        raise ValueError(f"maps of shape {maps.shape} do not have the pixels of a full sky")
    return nside


def _modes_of_bins(ell: np.ndarray, edges: Any) -> np.ndarray:
    """Returns the number of modes of each multipole in each bin [bin, ell]."""
    limits = np.asarray(in_unit("edges", edges), np.float64)
    if limits.ndim != 1 or limits.size < 2 or not (np.diff(limits) > 0).all():
        raise ValueError("edges in l: at least two numbers, increasing, are needed")
    inside = (ell >= limits[:-1, np.newaxis]) & (ell < limits[1:, np.newaxis]) & (ell > 0)
    empty = np.flatnonzero(~inside.any(axis=1))
    if empty.size:
        low, high = limits[empty[0]], limits[empty[0] + 1]
        raise ValueError(
            f"the bin from {low:g} to {high:g} holds no multipole of the maps (l up to {ell[-1]})"
        )
    return inside * (2.0 * ell + 1.0)
