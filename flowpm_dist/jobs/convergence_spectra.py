"""Angular power spectra of convergence as a job writes them: tables, theory and figures."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flowpm_dist.cosmology.halofit import Halofit
from flowpm_dist.cosmology.limber import Power
from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.cosmology.power import LinearPower
from flowpm_dist.jobs.light_cone import PopulationOptions
from flowpm_dist.observables.lensing.theory import convergence_power
from flowpm_dist.statistics.angular_power import AngularPower

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Theory = Callable[[Any], np.ndarray]
"""Multipoles [ell] to the power of convergence [source, source, ell] [1]."""


@dataclass(frozen=True)
class ConvergenceSpectra:
    """The angular power spectra of all pairs of sources, and theory.

    Attributes:
        pairs: of sources.
        ell: mean |l| in each bin [bin].
        modes: in each bin [bin].
        power: measured [pair, bin] [1].
        linear, halofit: by Limber's approximation, means over the same modes [pair, bin] [1].
    """

    pairs: list[tuple[int, int]]
    ell: np.ndarray
    modes: np.ndarray
    power: np.ndarray
    linear: np.ndarray
    halofit: np.ndarray


def write_convergence_power(path: Path, spectra: ConvergenceSpectra) -> None:
    """Write a table of comma-separated values, a line for each pair of sources and bin."""
    rows = [
        (i, j, *values)
        for n, (i, j) in enumerate(spectra.pairs)
        for values in zip(
            spectra.ell,
            spectra.power[n],
            spectra.modes,
            spectra.linear[n],
            spectra.halofit[n],
            strict=True,
        )
    ]
    header = "i,j,ell,C_ell,modes,limber_linear,limber_halofit"
    formats = ["%d", "%d", "%.8e", "%.8e", "%d", "%.8e", "%.8e"]
    np.savetxt(path, rows, fmt=formats, delimiter=",", header=header, comments="")


def theories_of(options: PopulationOptions, cosmology: Cosmology) -> list[Theory]:
    """Returns linear theory and halofit."""
    sources, alignment = options.population()
    linear = LinearPower(cosmology)

    def spectra(power: Power, ell: Any) -> np.ndarray:
        return convergence_power(ell, sources, cosmology, power, alignment=alignment).numpy()

    return [functools.partial(spectra, power) for power in (linear, Halofit(linear))]


def spectra_of_pairs(
    options: PopulationOptions,
    cosmology: Cosmology,
    measure: Callable[[int, int], AngularPower],
    in_bins: Callable[[Theory, AngularPower], np.ndarray],
) -> ConvergenceSpectra:
    """Returns the spectra of all pairs of sources, and theory.

    Args:
        options: the sources.
        cosmology: of theory.
        measure: the spectrum of two sources by their numbers.
        in_bins: theory as means over the modes of a measured spectrum [source, source, bin].
    """
    pairs = list(itertools.combinations_with_replacement(range(len(options.sources)), 2))
    found = [measure(i, j) for i, j in pairs]
    first, second = (list(numbers) for numbers in zip(*pairs, strict=True))
    return ConvergenceSpectra(
        pairs,
        found[0].ell,
        found[0].modes,
        np.stack([spectrum.power for spectrum in found]),
        *(in_bins(t, found[0])[first, second] for t in theories_of(options, cosmology)),
    )


def spectra_figure(
    options: PopulationOptions, spectra: ConvergenceSpectra, cosmology: Cosmology
) -> Figure:
    """Returns a figure of the auto spectra beside theory."""
    from flowpm_dist.io.lensing_pictures import AutoSpectrum, convergence_power_figure

    fine = np.geomspace(spectra.ell[0], spectra.ell[-1], 100)
    linear, halofit = (theory(fine) for theory in theories_of(options, cosmology))
    autos = []
    for i, source in enumerate(options.sources):
        n = spectra.pairs.index((i, i))
        power, expected = spectra.power[n], spectra.halofit[n]
        autos.append(AutoSpectrum(source.name, power, expected, linear[i, i], halofit[i, i]))
    return convergence_power_figure(spectra.ell, spectra.modes, fine, autos)


def attributes_of(
    options: PopulationOptions, end: float, cosmology: Cosmology, warnings: Sequence[str]
) -> dict[str, Any]:
    """Returns what is told of any light cone in the attributes of its maps.

    Args:
        options: of the run file.
        end: comoving distance of z_max [Mpc/h].
        cosmology: of the run.
        warnings: of what a user should know.
    """
    told = options.model_dump(exclude_none=True, exclude={"sources"})
    return {
        **told,
        "sources": [{"name": each.name, **each.model_dump()} for each in options.sources],
        "distance_of_z_max": end,
        "length_units": "Mpc/h",
        "cosmology": cosmology.numbers(),
        "warnings": list(warnings),
    }
