"""The results of a light cone: maps, angular power spectra beside theory, and figures."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.io.files import LIGHT_CONE, WriteError
from flowpm_dist.io.light_cone_file import LightConeFiles
from flowpm_dist.io.light_cone_maps import (
    CONVENTIONS,
    CONVENTIONS_OF_RAYS,
    MapArray,
    write_light_cone,
)
from flowpm_dist.jobs.convergence_spectra import (
    ConvergenceSpectra,
    Theory,
    attributes_of,
    spectra_figure,
    spectra_of_pairs,
    write_convergence_power,
)
from flowpm_dist.jobs.light_cone import LensingOptions, LightConeWork
from flowpm_dist.observables.lensing.noise import shape_noise
from flowpm_dist.observables.lensing.ray_tracing import ray_trace
from flowpm_dist.observables.light_cone.maps import ConvergenceMaps, DensityPlanes
from flowpm_dist.simulation.simulation import ObserverOf
from flowpm_dist.statistics.angular_power import AngularPower, angular_power, theory_in_bins

BINS_PER_OCTAVE = 2
"""Logarithmic bins in l: of more, some would have no mode."""


@dataclass(frozen=True)
class Lensing:
    """Maps of lensing on the host, [source, x, y] [1].

    Attributes:
        kappa, gamma1, gamma2: convergence and shear.
        rotation: of images [rad]; None in the Born approximation, in which there is none.
    """

    kappa: np.ndarray
    gamma1: np.ndarray
    gamma2: np.ndarray
    rotation: np.ndarray | None = None


def observers_of(options: LensingOptions, files: LightConeFiles | None = None) -> list[ObserverOf]:
    """Returns what looks at a run: painters of convergence, of planes, or of both.

    Args:
        options: of the light cone.
        files: of this rank, for particles; None for none.
    """
    cone = options.light_cone()
    found = []
    if not options.ray_tracing:
        found.append(cone.convergence_observer(*options.population()))
    if options.needs_planes:
        found.append(cone.planes_observer(options.plane_width))
    return found if files is None else [*found, cone.particles_observer(files)]


def write_light_cone_results(
    folder: Path,
    work: LightConeWork,
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
    born = next((each for each in seen if isinstance(each, ConvergenceMaps)), None)
    planes = next((each for each in seen if isinstance(each, DensityPlanes)), None)
    maps = _lensing(options, born, planes, cosmology)
    arrays = _arrays(options, maps, planes if options.planes else None)
    attributes = {
        **attributes_of(options, work.end, cosmology, work.warnings),
        "field_of_view_units": "deg",
        "approximation": "ray tracing" if options.ray_tracing else "Born",
        **about,
    }
    conventions = CONVENTIONS_OF_RAYS if options.ray_tracing else CONVENTIONS
    write_light_cone(folder / LIGHT_CONE, arrays, attributes, conventions)
    spectra = measure(maps.kappa, options, cosmology)
    try:
        write_convergence_power(folder / "convergence_power.csv", spectra)
        _draw(folder, options, maps, spectra, cosmology)
    except OSError as error:
        raise WriteError.of(Path(error.filename or folder), error) from error


def measure(kappa: Any, options: LensingOptions, cosmology: Cosmology) -> ConvergenceSpectra:
    """Returns the spectra of maps of convergence, and theory.

    Args:
        kappa: [source, x, y] [1].
        options: of the light cone; the painting of its particles is divided out.
        cosmology: of the run.
    """
    edges = bin_edges(options.fov, options.pixels)

    def spectrum(i: int, j: int) -> AngularPower:
        return angular_power(kappa[i], options.fov, edges, other=kappa[j], window="bilinear")

    in_bins = functools.partial(_in_bins, options=options)
    return spectra_of_pairs(options, cosmology, spectrum, in_bins)


def bin_edges(fov: float, pixels: int) -> np.ndarray:
    """Returns the edges of logarithmic bins from the lowest mode to the Nyquist multipole.

    Args:
        fov: field of view [rad].
        pixels: along a side of the map, at least 3.
    """
    lowest, octaves = 2 * math.pi / fov, math.log2(pixels / 2)
    count = max(1, int(BINS_PER_OCTAVE * octaves + 1e-9))
    return lowest * np.geomspace(1.0, pixels / 2, count + 1)


def _lensing(
    options: LensingOptions,
    born: ConvergenceMaps | None,
    planes: DensityPlanes | None,
    cosmology: Cosmology,
) -> Lensing:
    if born is not None:
        maps = Lensing(*(each.numpy() for each in (born.kappa, *born.shear())))
    else:
        assert planes is not None
        sources, _ = options.population()
        rays = ray_trace(planes.delta, planes.planes, sources, cosmology, planes.fov)
        every = (rays.kappa, rays.gamma1, rays.gamma2, rays.rotation)
        maps = Lensing(*(each.numpy() for each in every))
    noise = options.shape_noise
    if noise is None:
        return maps
    pixels = maps.kappa.shape[-2:]
    sigma = np.full(len(maps.kappa), noise.sigma_e)
    dtype = tf.as_dtype(maps.kappa.dtype)
    drawn = shape_noise(pixels, options.fov, sigma, noise.n_eff, noise.seed, dtype=dtype).numpy()
    gamma1, gamma2 = maps.gamma1 + drawn[:, 0], maps.gamma2 + drawn[:, 1]
    return Lensing(maps.kappa, gamma1, gamma2, maps.rotation)


def _arrays(
    options: LensingOptions, maps: Lensing, planes: DensityPlanes | None
) -> dict[str, MapArray]:
    noisy = "" if options.shape_noise is None else ", with the noise of shapes"
    meanings = {
        "kappa": ("1", "convergence"),
        "gamma1": ("1", f"shear along the axes{noisy}"),
        "gamma2": ("1", f"shear along the diagonals{noisy}"),
        "rotation": ("rad", "rotation of images"),
    }
    arrays = {
        name: MapArray(_transposed(values), ("source", "y", "x"), *about)
        for name, about in meanings.items()
        if (values := getattr(maps, name)) is not None
    }
    centres = (np.arange(options.pixels) + 0.5) * options.field_of_view / options.pixels
    for axis in ("x", "y"):
        arrays[axis] = MapArray(centres, (axis,), "deg", "centres of the pixels")
    if planes is not None:
        delta, edges = planes.delta.numpy(), np.asarray(planes.planes.edges)
        arrays["planes"] = MapArray(
            _transposed(delta), ("plane", "y", "x"), "1", "overdensity of the matter of slabs"
        )
        arrays["plane_edges"] = MapArray(
            edges, ("edge",), "Mpc/h", "comoving distances between which the slabs lie"
        )
    return arrays


def _transposed(maps: np.ndarray) -> np.ndarray:
    """Returns maps [..., x, y] as [..., y, x]."""
    return np.ascontiguousarray(np.swapaxes(maps, -1, -2))


def _in_bins(theory: Theory, measured: AngularPower, options: LensingOptions) -> np.ndarray:
    """Returns the means of theory over the modes of bins; where alignments make it negative, which
    has no logarithm, that at the mean l."""
    with np.errstate(invalid="ignore", divide="ignore"):
        means = theory_in_bins(theory, options.pixels, options.fov, measured.edges)
    return np.where(np.isfinite(means), means, theory(measured.ell))


def _draw(
    folder: Path,
    options: LensingOptions,
    maps: Lensing,
    spectra: ConvergenceSpectra,
    cosmology: Cosmology,
) -> None:
    from flowpm_dist.io.figure_style import save_figure
    from flowpm_dist.io.lensing_pictures import convergence_figure

    every = (maps.kappa, maps.gamma1, maps.gamma2)
    kappa, gamma1, gamma2 = (_transposed(values[-1]) for values in every)
    name = options.sources[-1].name
    figure = convergence_figure(kappa, gamma1, gamma2, options.field_of_view, name)
    save_figure(figure, folder / "convergence.png")
    figure = spectra_figure(options, spectra, cosmology)
    save_figure(figure, folder / "convergence_power.png")
