"""The angular power spectrum of maps of the whole sky."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from flowpm_dist.statistics.angular_power import BINS_PER_OCTAVE, AngularPower

Window = Literal["bilinear"] | None
"""What painted the maps, which is divided out of their spectra."""

LOWEST = 2
"""Multipole at which the first of `spherical_octave_edges` lies."""
HIGHEST = 2
"""Multipole, divided by nside, at which the last one lies."""

_NODES = np.linspace(0.0, 3.0, 151)  # of sqrt(l (l + 1)) / nside


def spherical_power(
    maps: Any, edges: Any, *, other: Any = None, window: Window = None
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
    first = np.asarray(maps, np.float64)
    if other is None:
        harmonics = spherical_harmonics(first)
        return harmonic_power(harmonics, harmonics, _nside(first), edges, window=window)
    second = np.asarray(other, np.float64)
    nside = _nside(first)
    if _nside(second) != nside:
        raise ValueError(f"maps of {first.shape[-1]} and {second.shape[-1]} pixels")
    one, two = np.broadcast_arrays(*(spherical_harmonics(each) for each in (first, second)))
    return harmonic_power(one, two, nside, edges, window=window)


def spherical_harmonics(maps: Any) -> np.ndarray:
    """Returns the harmonics of maps of the whole sky up to l = 3 nside - 1, in healpy's order.

    Args:
        maps: [..., pixel], in HEALPix's order of rings.

    Raises:
        ValueError: maps that are not of a whole sky.
    """
    import healpy

    maps = np.asarray(maps)
    last = 3 * _nside(maps) - 1
    rows = maps.reshape(-1, maps.shape[-1])
    found = np.array([healpy.map2alm(row.astype(np.float64), lmax=last) for row in rows])
    return found.reshape(*maps.shape[:-1], -1)


def harmonic_power(
    first: np.ndarray, second: np.ndarray, nside: int, edges: Any, *, window: Window = None
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
    ell = np.arange(3 * nside)
    by_bin = _modes(ell, edges)
    rows = (each.reshape(-1, each.shape[-1]) for each in (first, second))
    spectra = np.array([healpy.alm2cl(one, two) for one, two in zip(*rows, strict=True)])
    if window is not None:
        spectra /= painting_window(ell, nside, power=2)
    modes = by_bin.sum(axis=1)
    power = (spectra @ by_bin.T / modes).reshape(*first.shape[:-1], len(modes))
    return AngularPower(by_bin @ ell / modes, power, modes, np.array(edges))


def painting_window(ell: Any, nside: int, *, power: int = 1) -> np.ndarray:
    """Returns what is left of a harmonic of the density after bilinear painting [ell] [1].

    The window belongs to a cloud in a cell, as wide as two rings and two pixels of a ring are
    apart. It depends on the direction of the wave and the place on the sky; this is its mean.

    Args:
        ell: multipoles, up to 3 nside.
        nside: resolution of the maps.
        power: power of the window before the mean: 1 for the spectrum of painted maps with others,
            2 for painted maps with each other.
    """
    ell = np.asarray(ell, np.float64)
    return np.interp(np.sqrt(ell * (ell + 1)) / nside, _NODES, _window_at_nodes(power))


@functools.cache
def _window_at_nodes(power: int) -> np.ndarray:
    z, direction = (np.arange(96) + 0.5) / 96, (np.arange(64) + 0.5) / 64 * np.pi / 2
    ring = np.where(z < 2 / 3, 1.0, np.sqrt(3 * (1 - z)))  # pixels of a ring over 4 nside
    along = np.sqrt(1 - z**2)
    apart = ring[:, np.newaxis] * 2 / 3 / along[:, np.newaxis]  # rings, times nside
    beside = np.pi / 2 * (along / ring)[:, np.newaxis]  # pixels of a ring, likewise
    waves = _NODES[:, np.newaxis, np.newaxis] / (2 * np.pi)
    first, second = waves * apart * np.cos(direction), waves * beside * np.sin(direction)
    window = (np.sinc(first) * np.sinc(second)) ** 2
    return np.mean(window**power, axis=(1, 2))


def spherical_octave_edges(nside: int) -> np.ndarray:
    """Returns edges of bins in l, whole numbers a logarithmic step apart or one [bin + 1]."""
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
    ell = np.arange(3 * nside)
    by_bin = _modes(ell, edges)
    inside = by_bin.any(axis=0)
    values = np.asarray(power(ell[inside].astype(np.float64)), np.float64)
    return values @ by_bin[:, inside].T / by_bin.sum(axis=1)


def _nside(maps: np.ndarray) -> int:
    """Returns the resolution of maps [..., pixel].

    Raises:
        ValueError: they are not of a whole sky.
    """
    pixels = maps.shape[-1] if maps.ndim else 0
    nside = round((pixels / 12) ** 0.5)
    if not pixels or 12 * nside**2 != pixels:
        raise ValueError(f"maps of shape {maps.shape} have not the pixels of a whole sky")
    return nside


def _modes(ell: np.ndarray, edges: Any) -> np.ndarray:
    """Returns the number of modes of each multipole in each bin [bin, ell]."""
    limits = np.asarray(edges, np.float64)
    if limits.ndim != 1 or limits.size < 2 or not (np.diff(limits) > 0).all():
        raise ValueError("edges in l: at least two numbers, increasing, are needed")
    inside = (ell >= limits[:-1, np.newaxis]) & (ell < limits[1:, np.newaxis]) & (ell > 0)
    empty = np.flatnonzero(~inside.any(axis=1))
    if empty.size:
        low, high = limits[empty[0]], limits[empty[0] + 1]
        raise ValueError(
            f"no multipole of the maps, up to {ell[-1]}, lies in the bin from {low:g} to {high:g}"
        )
    return inside * (2.0 * ell + 1.0)
