"""The angular power spectrum of maps of the flat sky."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.flat_sky import FlatSky

Spacing = Literal["linear", "log"]

MapWindow = Literal["pixel", "bilinear"] | None
"""The window that is divided out of the modes: means over pixels, or bilinear painting."""

BINS_PER_OCTAVE = 2
"""Logarithmic bins for each factor of 2 in l: with more, some would have no mode."""

_WINDOWS = {None: 0, "pixel": 1, "bilinear": 2}
_TIE = 1e-9  # relative, so that rounding does not decide of a mode on an edge


@dataclass(frozen=True)
class AngularPower:
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
    maps = tf.convert_to_tensor(maps)
    sky = FlatSky.of(maps, fov)
    bins_of = _bins(sky, _edges(sky, bins, spacing), _powers(window))
    modes = bins_of.modes
    first = tf.signal.rfft2d(maps)
    second = first
    if other is not None:
        other = tf.convert_to_tensor(other)
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
        window: what is divided out of the modes: "pixel", sinc(l_x p / 2) sinc(l_y p / 2) with p
            the side of a pixel, for means over pixels; "bilinear", its square, for particles
            painted bilinearly.
        noise: power of the noise, which is subtracted; broadcasts with [..., bin].

    Raises:
        ValueError: maps, field of view, edges, spacing or window as they should not be; a bin in
            which there is no mode.
    """
    maps = tf.convert_to_tensor(maps)
    options: dict[str, Any] = {"spacing": spacing, "other": other, "window": window}
    power = binned_angular_power(maps, fov, bins, **options).numpy()
    sky = FlatSky.of(maps, fov)
    edges = _edges(sky, bins, spacing)
    found = _bins(sky, edges, _powers(window))
    return AngularPower(found.ell, power - noise, found.modes, np.array(edges))


def octave_edges(fov: float, pixels: int) -> np.ndarray:
    """Returns the edges of logarithmic bins from the lowest to the Nyquist multipole [bin + 1].

    Args:
        fov: field of view [rad].
        pixels: pixels along a side of the map, at least 3.
    """
    count = max(1, int(BINS_PER_OCTAVE * np.log2(pixels / 2) + 1e-9))
    return 2 * np.pi / fov * np.geomspace(1.0, pixels / 2, count + 1)


def theory_in_bins(
    power: Callable[[np.ndarray], Any],
    pixels: int | tuple[int, int],
    fov: Any,
    bins: Any = None,
    *,
    spacing: Spacing = "linear",
) -> np.ndarray:
    """Returns the mean of a spectrum of theory over the modes of each bin, as maps would have it.

    In a wide bin this is not the value at the mean l: a spectrum of l^-2 is 7 % higher in a bin
    whose upper edge is 1.7 times the lower one.

    Args:
        power: multipoles [ell] to C_l [..., ell], smooth and above 0.
        pixels: pixels of the maps, one number or one each along x and y.
        fov, bins, spacing: as for `angular_power`.

    Returns:
        [..., bin], float64.

    Raises:
        ValueError: as `angular_power`.
    """
    n_x, n_y = (int(n) for n in np.broadcast_to(pixels, [2]))
    sky = FlatSky.of(tf.zeros([n_x, n_y]), fov)
    found = _bins(sky, _edges(sky, bins, spacing), 0)
    x, y = sky.wavenumbers()
    ell = np.sqrt(x**2 + y**2).ravel()
    used = found.number < found.modes.size
    number, ell, weights = found.number[used], ell[used], found.weights.ravel()[used]
    nodes = np.geomspace(ell.min(), ell.max() * (1 + _TIE), 256)
    values = np.asarray(power(nodes), np.float64)
    rows = [
        np.bincount(number, weights * np.exp(np.interp(np.log(ell), np.log(nodes), np.log(row))))
        for row in values.reshape(-1, nodes.size)
    ]
    return (np.array(rows) / found.modes).reshape(*values.shape[:-1], found.modes.size)


def _powers(window: MapWindow) -> int:
    if window not in _WINDOWS:
        raise ValueError(f"window {window!r}: 'pixel', 'bilinear' or None")
    return _WINDOWS[window]


def _edges(sky: FlatSky, bins: Any, spacing: Spacing) -> tuple[float, ...]:
    lowest, highest = 2 * np.pi / max(sky.fov), np.pi / max(sky.pixel)
    if spacing not in ("linear", "log"):
        raise ValueError(f"spacing {spacing!r}: 'linear' or 'log'")
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
    return _Bins(number.astype(np.int32), multiplicity / window, mean, modes)
