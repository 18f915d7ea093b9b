"""The results of a light cone of the whole sky: maps, angular power beside theory, and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.io.files import LIGHT_CONE, WriteError
from flowpm_dist.io.light_cone_file import LightConeFiles
from flowpm_dist.io.light_cone_maps import CONVENTIONS_OF_SPHERE, MapArray, write_light_cone
from flowpm_dist.jobs.convergence_spectra import (
    ConvergenceSpectra,
    Theory,
    attributes_of,
    spectra_figure,
    spectra_of_pairs,
    write_convergence_power,
)
from flowpm_dist.jobs.full_sky import FullSkyLensingOptions, FullSkyWork
from flowpm_dist.observables.light_cone.full_sky import FullSkyLightCone
from flowpm_dist.observables.light_cone.maps import DensityShells, SphericalConvergence
from flowpm_dist.observables.light_cone.options import FullSkyOptions
from flowpm_dist.simulation.simulation import ObserverOf
from flowpm_dist.statistics.angular_power import AngularPower
from flowpm_dist.statistics.spherical_power import (
    harmonic_power,
    spherical_harmonics,
    spherical_theory_in_bins,
)

LOWEST = 2
"""Multipole at which the first bin begins."""
HIGHEST = 2
"""Multipole, over nside, at which the last bin ends."""
BINS_PER_OCTAVE = 2


def observers_of(
    options: FullSkyLensingOptions, files: LightConeFiles | None = None
) -> list[ObserverOf]:
    """Returns what looks at a run: painters of convergence and, where asked for, of shells.

    Args:
        options: of the light cone.
        files: of this rank, for particles; None for none.
    """
    sky = FullSkyLightCone(**options.part(FullSkyOptions).model_dump())
    found = [sky.convergence_observer(*options.population())]
    if options.shells:
        found.append(sky.shells_observer(options.shell_width))
    return found if files is None else [*found, sky.particles_observer(files)]


def write_full_sky_results(
    folder: Path,
    work: FullSkyWork,
    seen: list[Any],
    cosmology: Cosmology,
    about: dict[str, Any],
) -> None:
    """Write maps, spectra and figures. On rank 0.

    Args:
        folder: to write into.
        work: what was asked for.
        seen: what `observers_of` made of the run.
        cosmology: of the run.
        about: further attributes of the maps.

    Raises:
        WriteError: they cannot be written.
    """
    options = work.options
    maps = next(each for each in seen if isinstance(each, SphericalConvergence))
    kappa = maps.kappa.numpy()
    arrays = {"kappa": MapArray(kappa, ("source", "pixel"), "1", "convergence")}
    for shells in (each for each in seen if isinstance(each, DensityShells)):
        arrays["shells"] = MapArray(
            shells.delta.numpy(), ("shell", "pixel"), "1", "overdensity of the matter of shells"
        )
        arrays["shell_edges"] = MapArray(
            np.asarray(shells.planes.edges), ("edge",), "Mpc/h",
            "comoving distances between which the shells lie",
        )  # fmt: skip
    attributes = {
        **attributes_of(options, work.end, cosmology, work.warnings),
        "ordering": "RING",
        "observer": list(work.observer),
        "approximation": "Born",
        **about,
    }
    write_light_cone(folder / LIGHT_CONE, arrays, attributes, CONVENTIONS_OF_SPHERE)
    spectra = measure(kappa, options, cosmology)
    try:
        write_convergence_power(folder / "convergence_power.csv", spectra)
        _draw(folder, options, kappa[-1], spectra, cosmology)
    except OSError as error:
        raise WriteError.of(Path(error.filename or folder), error) from error


def measure(
    kappa: np.ndarray, options: FullSkyLensingOptions, cosmology: Cosmology
) -> ConvergenceSpectra:
    """Returns the spectra of maps of convergence, and theory.

    Args:
        kappa: [source, pixel] [1].
        options: of the light cone; the painting of its particles is divided out.
        cosmology: of the run.
    """
    edges, harmonics = bin_edges(options.nside), spherical_harmonics(kappa)

    def spectrum(i: int, j: int) -> AngularPower:
        return harmonic_power(harmonics[i], harmonics[j], options.nside, edges, window="bilinear")

    def in_bins(theory: Theory, _: AngularPower) -> np.ndarray:
        return spherical_theory_in_bins(theory, edges, options.nside)

    return spectra_of_pairs(options, cosmology, spectrum, in_bins)


def bin_edges(nside: int) -> np.ndarray:
    """Returns the edges of bins in l, whole numbers, a logarithmic step apart or one."""
    highest = HIGHEST * nside + 1
    count = max(1, round(BINS_PER_OCTAVE * np.log2(highest / LOWEST)))
    return np.unique(np.round(np.geomspace(LOWEST, max(highest, LOWEST + 1), count + 1)))


def _draw(
    folder: Path,
    options: FullSkyLensingOptions,
    kappa: np.ndarray,
    spectra: ConvergenceSpectra,
    cosmology: Cosmology,
) -> None:
    from flowpm_dist.io.figure_style import save_figure
    from flowpm_dist.io.sky_pictures import sky_figure

    told = f"convergence of sources: {options.sources[-1].name}"
    figure = sky_figure(kappa, r"convergence $\kappa$", told)
    save_figure(figure, folder / "convergence.png")
    figure = spectra_figure(options, spectra, cosmology)
    save_figure(figure, folder / "convergence_power.png")
