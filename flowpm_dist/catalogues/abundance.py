"""The abundance of halos by mass, measured and predicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from typing_extensions import override

from flowpm_dist.catalogues.catalogue import Catalogue
from flowpm_dist.cosmology.theory import Theory
from flowpm_dist.io.drawing import Axes, draw_curves
from flowpm_dist.io.labelled import Labelled, LabelledArray
from flowpm_dist.io.particles import CRITICAL_DENSITY
from flowpm_dist.statistics.bins import sum_over_universe

DECADE = 5
"""Bins for a factor of ten in mass."""


@dataclass(frozen=True)
class MassFunction(Labelled):
    """The number of halos by mass.

    Attributes:
        edges: edges of the bins [bin + 1] [Msun/h].
        mass: mean mass of the halos, or the middle of an empty bin, in ln M [bin] [Msun/h].
        count: number of halos [bin].
        abundance: dn / dlnM [bin] [(h/Mpc)^3].
        error: Poisson error of the abundance [bin] [(h/Mpc)^3]; in an empty bin, as for one halo.
    """

    edges: np.ndarray
    mass: np.ndarray
    count: np.ndarray
    abundance: np.ndarray
    error: np.ndarray

    @override
    def labelled(self) -> dict[str, LabelledArray]:
        density = "(h/Mpc)^3"
        about = {
            "mass": (self.mass, "Msun/h", "mean mass of the halos"),
            "low": (self.edges[:-1], "Msun/h", "lower edge of the bin"),
            "high": (self.edges[1:], "Msun/h", "upper edge of the bin"),
            "count": (self.count, "1", "number of halos"),
            "abundance": (self.abundance, density, "dn / dlnM"),
            "error": (self.error, density, "Poisson error of the abundance"),
        }
        return {
            name: LabelledArray(values, ("bin",), units, meaning)
            for name, (values, units, meaning) in about.items()
        }

    def plot(self, axes: Axes | None = None, label: str = "") -> Axes:
        """Draws the abundance by mass with its errors; see `PowerSpectrum.plot`."""
        held = self.count > 0
        return draw_curves(
            axes,
            self.mass[held],
            self.abundance[held],
            (r"$M$  [$M_\odot/h$]", r"$dn/d\ln M$  [$(h/\mathrm{Mpc})^3$]"),
            scatter=self.error[held],
            labels=(label,),
            logarithmic="xy",
        )


def mass_function(halos: Catalogue, edges: np.ndarray | None = None) -> MassFunction:
    """Returns the number of halos by mass. On all ranks together.

    Args:
        halos: all halos of a box.
        edges: edges of the bins, increasing [Msun/h]; by default from the smallest mass that a
            halo can have, about `DECADE` for a factor of ten, midway between whole particles.

    Raises:
        ValueError: the edges do not increase, or the catalogue has no masses.
    """
    halos.check_one_time("a mass function")
    if edges is None:
        edges = _default_edges(halos)
    edges = np.asarray(edges, np.float64)
    if edges.ndim != 1 or len(edges) < 2 or not (np.diff(edges) > 0).all():
        raise ValueError(f"edges of bins of mass must increase, got {edges}")
    mass = halos["mass"]
    # A halo of exactly the smallest mass is within, however its mass was rounded.
    rows = np.searchsorted(edges * (1 - 1e-9), mass, side="right") - 1
    inside = (rows >= 0) & (rows < len(edges) - 1)
    number = len(edges) - 1
    sums = np.stack(
        [
            np.bincount(rows[inside], minlength=number).astype(np.float64),
            np.bincount(rows[inside], np.log(mass[inside]), minlength=number),
        ]
    )
    count, logarithms = sums if halos.is_whole else sum_over_universe(halos.mesh, sums)
    middle = np.log(edges[1:] * edges[:-1]) / 2
    per_count = 1 / (np.prod(halos.box_size) * np.diff(np.log(edges)))
    return MassFunction(
        edges,
        np.exp(np.where(count > 0, logarithms / np.maximum(count, 1), middle)),
        count.astype(np.int64),
        count * per_count,
        np.sqrt(np.maximum(count, 1)) * per_count,
    )


def _default_edges(halos: Catalogue) -> np.ndarray:
    particle, minimum = halos.header.mass * 1e10, halos.about["minimum"]
    most = max(_largest_mass(halos) / particle, minimum)
    bins = max(1, int(np.ceil(DECADE * np.log10((most + 1) / minimum))))
    # Between whole numbers of particles.
    numbers = np.ceil(minimum * 10 ** (np.arange(bins + 1) / DECADE) - 1e-9) - 0.5
    return particle * np.unique(numbers)


def _largest_mass(halos: Catalogue) -> float:
    """Returns the largest mass of all ranks' halos [Msun/h]; 0 without halos."""
    largest = np.array(halos["mass"].max(initial=0.0))
    return float(largest if halos.is_whole else halos.mesh.world.allreduce(largest, "max"))


def warren(sigma: np.ndarray) -> np.ndarray:
    """Returns f(sigma) of friends of friends with 0.2 (Warren and others 2006, equation 8)."""
    return 0.7234 * (sigma**-1.625 + 0.2538) * np.exp(-1.1982 / sigma**2)


def watson(sigma: np.ndarray) -> np.ndarray:
    """Returns f(sigma) of friends of friends with 0.2 (Watson and others 2013, equation 12)."""
    return 0.282 * ((1.406 / sigma) ** 2.163 + 1) * np.exp(-1.210 / sigma**2)


FITS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Warren 2006": warren,
    "Watson 2013": watson,
}
"""Fits to the abundance of friends of friends with a linking length of 0.2, by name."""


def predicted(
    theory: Theory, mass: Any, a: float = 1.0, fit: Callable[[np.ndarray], np.ndarray] = watson
) -> np.ndarray:
    """Returns the abundance dn / dlnM of halos, f(sigma) rho / M |dln sigma / dlnM| [(h/Mpc)^3].

    sigma is the rms of the linear density of cold dark matter and baryons in spheres of mass M, rho
    their comoving density.

    Args:
        theory: the theory of a universe.
        mass: [...] [Msun/h].
        a: scale factor.
        fit: a function f(sigma), such as one of `FITS`.
    """
    mass = np.asarray(mass, np.float64)
    density = float(theory.background.Omega_cb) * CRITICAL_DENSITY * 1e10
    radius = np.cbrt(3 * mass / (4 * np.pi * density))
    step = 1e-3
    low, high = (sigma_of(theory, radius * np.exp(sign * step / 3), a) for sign in (-1, 1))
    slope = np.log(low / high) / (2 * step)
    return fit(sigma_of(theory, radius, a)) * density / mass * slope


def sigma_of(theory: Theory, radius: np.ndarray, a: float) -> np.ndarray:
    """Returns the rms of the linear density of cb in spheres of some radii [Mpc/h], at a."""
    k = np.geomspace(1e-4, 1e3, 4096)
    power = np.asarray(theory.power.cb(k, a))
    x = np.asarray(radius)[..., np.newaxis] * k
    window = 3 * (np.sin(x) - x * np.cos(x)) / x**3
    # Where this is rounding, the window is 1 - x^2 / 10.
    window = np.where(x < 1e-2, 1 - x**2 / 10, window)
    return np.sqrt(np.trapezoid(power * k**3 / (2 * np.pi**2) * window**2, np.log(k), axis=-1))
