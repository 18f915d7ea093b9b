"""Statistics by name, as vectors of numbers that parameters can be inferred from.

A statistic is a function of a density that returns a vector. To add one, write the function and put
it into `STATISTICS`, or name it "package.module:function" where a command asks for statistics.
"""

from __future__ import annotations

import functools
import inspect
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box
from flowpm_dist.grid.caches import cached_on_mesh
from flowpm_dist.grid.field import Field
from flowpm_dist.grid.fourier import Filter, convolve
from flowpm_dist.io.errors import UserError
from flowpm_dist.options import object_named
from flowpm_dist.statistics.bins import Bins
from flowpm_dist.statistics.bispectrum import bispectrum
from flowpm_dist.statistics.cell_values import DENSITIES, CellValues
from flowpm_dist.statistics.power import power_spectrum
from meshimpl.mesh_function import MeshFunction

Statistic = Callable[..., np.ndarray]
"""A function of a density of mean 1, of one universe or of a batch of them: [value] or
[universe, value], the same on every rank that has a part of it. All of these call it together.
One with an argument `values` is also told what the numbers of the density are, see `CellValues`.
"""
SCALES: tuple[tuple[float, np.ndarray], ...] = (
    (0.0, np.linspace(-4.0, 5.0, 28)),
    (1.0, np.linspace(-3.0, 3.0, 28)),
    (2.0, np.linspace(-2.0, 2.0, 28)),
    (4.0, np.linspace(-1.0, 1.0, 28)),
)
"""Radius of the Gaussian [cells], and edges of bins, see `CellValues.histogram`."""


def log_power(density: Field) -> np.ndarray:
    """Returns the logarithm of the power spectrum, divided by the cloud-in-cell window."""
    return np.log(power_spectrum(density, window="cic").power)


def histograms(density: Field, values: CellValues = DENSITIES) -> np.ndarray:
    """Returns the roots of the shares of cells in bins of the density, as it is and smoothed.

    See `SCALES`. The root of a count varies alike in full and in nearly empty bins.

    Args:
        density: or counts; of one universe, or of a batch.
        values: what they are, which decides the bins.
    """
    box = density.box
    smoothed = [density]
    smoothed += [Field(_smoothing(box, radius)(density.block), box) for radius, _ in SCALES[1:]]
    found = [
        values.histogram(field, edges) for field, (_, edges) in zip(smoothed, SCALES, strict=True)
    ]
    return np.concatenate([np.sqrt(one.counts / one.cells) for one in found], axis=-1)


@cached_on_mesh(16)
def _smoothing(box: Box, radius: float) -> MeshFunction:
    length = radius * max(box.cell)

    def gaussian(kx: tf.Tensor, ky: tf.Tensor, kz: tf.Tensor) -> tf.Tensor:
        return tf.exp(-0.5 * length**2 * (kx**2 + ky**2 + kz**2))

    return box.function(lambda _, x: convolve(x, box, Filter(gaussian)), field=box.shape)


SHELLS = 6
"""Of the bispectrum, linear in k up to two thirds of the Nyquist wavenumber."""


def reduced_bispectrum(density: Field) -> np.ndarray:
    """Returns Q = B / (P1 P2 + P2 P3 + P3 P1) of all triangles of `SHELLS` bins.

    The window of the painting is divided out (Fry 1984).
    """
    shells = Bins(SHELLS, k_max=2 / 3 * np.pi / max(density.box.cell))
    found = bispectrum(density, bins=shells, window="cic")
    power = power_spectrum(density, bins=shells, window="cic").power
    first, second, third = (power[..., number] for number in found.shells.T)
    return found.bispectrum / (first * second + second * third + third * first)


_FILES = (
    "summaries.py", "cell_values.py", "map_summaries.py", "angular_power.py", "bins.py",
    "bispectrum.py", "histogram.py", "maps.py", "mode_sums.py", "modes.py", "power.py",
)  # fmt: skip
DEFINITION = zlib.crc32(b"".join(Path(__file__).with_name(n).read_bytes() for n in _FILES))
"""Changes with these files: what was measured otherwise must not be mixed with these."""

STATISTICS: dict[str, Statistic] = {
    "power": log_power,
    "histograms": histograms,
    "bispectrum": reduced_bispectrum,
}
"""Name -> statistic. `STATISTIC_NAMES` of the evaluation has the names for commands."""


def statistic_of(name: str, values: CellValues = DENSITIES) -> Callable[[Field], np.ndarray]:
    """Returns the statistic of a name of `STATISTICS`, or of "package.module:function".

    Args:
        name: of the statistic.
        values: what it will be given, for one that asks.

    Raises:
        ValueError: there is none.
    """
    found: Statistic = object_named(name, STATISTICS, "statistic")
    asks = "values" in inspect.signature(found).parameters
    return functools.partial(found, values=values) if asks else found


def measured(
    names: Sequence[str], density: Field, values: CellValues = DENSITIES
) -> dict[str, np.ndarray]:
    """Returns statistics of a density, float64 [universe, value] each. On all its ranks together.

    Args:
        names: see `statistic_of`.
        density: of a batch of universes, or of one; or counts.
        values: what its numbers are.

    Raises:
        ValueError: there is no such statistic, or it did not return a vector of finite numbers.
    """
    universes = density.box.batch or 1
    found = {}
    for name in names:
        found[name] = vectors_of(name, statistic_of(name, values)(density), universes)
    return found


class StatisticError(UserError, ValueError):
    """A statistic of a user's own that returned what no statistic is."""


def vectors_of(name: str, returned: np.ndarray, universes: int) -> np.ndarray:
    """Returns what a statistic returned as float64 [universe, value].

    Raises:
        StatisticError: that is no vector of finite numbers for each universe.
    """
    vectors = np.asarray(returned, np.float64)
    if vectors.size == 0 or vectors.size % universes or vectors.ndim > 2:
        raise StatisticError(
            f"the statistic {name} returned an array of shape {vectors.shape}; must be a "
            f"vector for each of {universes} universes"
        )
    if not np.isfinite(vectors).all():
        raise StatisticError(f"the statistic {name} has values that are not finite")
    return vectors.reshape(universes, -1)


def joined(parts: Mapping[str, np.ndarray], names: Sequence[str]) -> np.ndarray:
    """Returns several statistics [n, value] as one vector, [n, all values]."""
    return np.concatenate([parts[name] for name in names], axis=1)
