"""The results of a light cone: maps, angular power spectra compared with theory, and figures."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.line_of_sight import Power
from flowpm_dist.cosmology.nonlinear import Halofit
from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.cosmology.theory import theory_of
from flowpm_dist.io.drawing import drawing
from flowpm_dist.io.files import LIGHT_CONE, WriteError
from flowpm_dist.io.labelled import LabelledArray
from flowpm_dist.io.light_cone import LightConeFiles, write_light_cone
from flowpm_dist.observables.lensing.planes import convergence_power
from flowpm_dist.observables.lensing.ray_tracing import ray_trace
from flowpm_dist.observables.light_cone.light_cone import LightCone
from flowpm_dist.observables.light_cone.observers import ConvergenceMaps, DensityPlanes
from flowpm_dist.observables.light_cone.plan import LightConePlan
from flowpm_dist.observables.light_cone.section import (
    FlatLensingOptions,
    FullSkyLensingOptions,
    LensedSky,
    LensingOptions,
)
from flowpm_dist.simulation.simulation import ObserverOf
from flowpm_dist.statistics.angular_spectra import (
    AngularPower,
    angular_power,
    harmonic_power,
    octave_edges,
    spherical_harmonics,
    spherical_octave_edges,
    spherical_theory_in_bins,
    theory_in_bins,
)

Theory = Callable[[Any], np.ndarray]
"""Multipoles [ell] to the power of convergence [source, source, ell] [1]."""

KAPPA = "convergence against the mean of the universe"
PLANES = "overdensity of the matter between two distances, against the mean of the universe"
FLAT_CONVENTIONS = {
    "kappa": KAPPA,
    "axes": "a map is [y, x], as pictures are; maps in Python are [x, y]",
    "angles": "x and y are the centres of the pixels [deg], from a corner of the field",
    "shear": "kappa +- |gamma| along and across a stick at the angle atan2(gamma2, gamma1) / 2 "
    "from x to y; gamma1 > 0 stretches images along x",
    "rotation": "(A21 - A12) / 2 of the Jacobian A = d beta / d theta",
    "planes": PLANES,
}
RAY_KAPPA = "convergence without the mean of each plane, which deflects no ray"
FULL_SKY_CONVENTIONS = {
    "kappa": KAPPA,
    "axes": "a map is [pixel], HEALPix of nside in the order of rings",
    "directions": "colatitude is from the z axis of the box, longitude from x to y",
    "shells": PLANES,
}


def observers_of(options: LensingOptions, files: LightConeFiles | None = None) -> list[ObserverOf]:
    """Returns the observers of a run: painters of convergence and of matter, and a recorder.

    Args:
        options: the light cone.
        files: this rank's files of particles; None for none.
    """
    cone, observers = LightCone(options), []
    if not options.ray_tracing:
        observers.append(cone.convergence_observer(*options.population()))
    if options.matter_width is not None:
        observers.append(cone.planes_observer(options.matter_width))
    return observers if files is None else [*observers, cone.particles_observer(files)]


def write_light_cone_results(
    folder: Path,
    plan: LightConePlan,
    results: list[Any],
    cosmology: Cosmology,
    about: dict[str, Any],
    *,
    subtract: bool = False,
) -> ShownLightCone:
    """Writes maps and spectra, and returns the input of `draw_light_cone`. On rank 0.

    Args:
        folder: the folder to write into.
        plan: the plan of the run's light cone.
        results: results of the observers of `observers_of`.
        cosmology: cosmology of the run.
        about: further attributes of the maps.
        subtract: whether to subtract the particles' noise from the spectra.

    Raises:
        WriteError: they cannot be written.
    """
    options = plan.options
    born = next((each for each in results if isinstance(each, ConvergenceMaps)), None)
    planes = next((each for each in results if isinstance(each, DensityPlanes)), None)
    attributes = {
        **attributes_of(options, plan.chi_max, cosmology, plan.warnings),
        "approximation": "ray tracing" if options.ray_tracing else "Born",
        **about,
    }
    if isinstance(options, FullSkyLensingOptions):
        assert born is not None
        maps = {"kappa": LabelledArray(born.kappa.numpy(), ("source", "pixel"), "1", "convergence")}
        if planes is not None:
            maps |= _matter(planes, planes.delta.numpy(), "shell", ("pixel",))
        attributes |= {"ordering": "RING"}
        conventions = FULL_SKY_CONVENTIONS
        kappa = maps["kappa"].values
        drawn = ["kappa"]
    else:
        maps = _flat_maps(options, born, planes, cosmology)
        if planes is not None and options.planes:
            maps |= _matter(planes, _transposed(planes.delta.numpy()), "plane", ("y", "x"))
        attributes["field_of_view_units"] = "deg"
        of_rays = {"kappa": RAY_KAPPA} if options.ray_tracing else {}
        conventions = FLAT_CONVENTIONS | of_rays
        kappa = _transposed(maps["kappa"].values)
        drawn = ["kappa", "gamma1", "gamma2"]
    write_light_cone(folder / LIGHT_CONE, maps, attributes, conventions)
    spectra = measure(kappa, options, cosmology, plan.particle_volume)
    if subtract:
        spectra = replace(spectra, power=spectra.power - spectra.noise)
    try:
        write_convergence_power(folder / "convergence_power.csv", spectra)
    except OSError as error:
        raise WriteError.of(Path(error.filename or folder), error) from error
    return ShownLightCone(options, [maps[key].values[-1].copy() for key in drawn], spectra)


@dataclass(frozen=True)
class ShownLightCone:
    """The data that the figures of a light cone show.

    Attributes:
        options: the light cone.
        maps: the convergence of the last sources and, on the flat sky, both components of their
            shear, [y, x] or [pixel] [1] each.
        spectra: the spectra of all sources.
    """

    options: LensingOptions
    maps: list[np.ndarray]
    spectra: ConvergenceSpectra


def draw_light_cone(folder: Path, shown: ShownLightCone, warn: Callable[[str], None]) -> None:
    """Draws convergence.png and convergence_power.png into a folder. On rank 0.

    Args:
        folder: the folder of the results, which are complete.
        shown: see `write_light_cone_results`.
        warn: shows a warning, about a figure that cannot be drawn.
    """
    options, names = shown.options, [source.name for source in shown.options.sources]
    with drawing(folder / "convergence.png", warn) as save:
        from flowpm_dist.observables.light_cone import pictures

        if isinstance(options, FullSkyLensingOptions):
            figure = pictures.sky_figure(shown.maps[0], names[-1])
        else:
            figure = pictures.field_figure(shown.maps, options.field_of_view, names[-1])
        save(figure)
    with drawing(folder / "convergence_power.png", warn) as save:
        from flowpm_dist.observables.light_cone.pictures import power_figure

        save(power_figure(shown.spectra, names))


def attributes_of(
    options: LensedSky, end: float, cosmology: Cosmology, warnings: Sequence[str]
) -> dict[str, Any]:
    """Returns the attributes that the maps of any light cone have.

    Args:
        options: the light cone.
        end: comoving distance of z_max [Mpc/h].
        cosmology: cosmology of the run.
        warnings: what a user should know.
    """
    return {
        **options.to_table(),
        "sources": [{"name": each.name, **each.to_table()} for each in options.sources],
        "distance_of_z_max": end,
        "length_units": "Mpc/h",
        "cosmology": cosmology.numbers(),
        "warnings": list(warnings),
    }


def _flat_maps(
    options: FlatLensingOptions,
    born: ConvergenceMaps | None,
    planes: DensityPlanes | None,
    cosmology: Cosmology,
) -> dict[str, LabelledArray]:
    """Returns maps of lensing on the flat sky, with noise, and the angles of their pixels."""
    if born is not None:
        maps = dict(zip(("kappa", "gamma1", "gamma2"), (born.kappa, *born.shear()), strict=True))
    else:
        assert planes is not None
        sources, _ = options.population()
        rays = ray_trace(planes.delta, planes.planes, sources, cosmology, options.fov)
        maps = {key: getattr(rays, key) for key in ("kappa", "gamma1", "gamma2", "rotation")}
    noisy = ""
    if options.shape_noise is not None:
        drawn = options.noise(options.shape_noise.seed, 2, maps["kappa"].dtype)
        maps["gamma1"] += drawn[:, 0]
        maps["gamma2"] += drawn[:, 1]
        noisy = ", with the noise of shapes"
    meanings = {
        "kappa": ("1", "convergence"),
        "gamma1": ("1", f"shear along the axes{noisy}"),
        "gamma2": ("1", f"shear along the diagonals{noisy}"),
        "rotation": ("rad", "rotation of images"),
    }
    centres = np.array(options.centres)
    return {
        key: LabelledArray(_transposed(values.numpy()), ("source", "y", "x"), *meanings[key])
        for key, values in maps.items()
    } | {
        axis: LabelledArray(centres, (axis,), "deg", "centres of the pixels") for axis in ("x", "y")
    }


def _matter(
    planes: DensityPlanes, delta: np.ndarray, name: str, axes: tuple[str, ...]
) -> dict[str, LabelledArray]:
    """Returns the overdensity of planes or shells, each of which is a `name`, and their edges."""
    edges, parts = np.asarray(planes.planes.edges), "shells" if name == "shell" else "slabs"
    between = f"comoving distances between which the {parts} lie"
    return {
        f"{name}s": LabelledArray(
            delta, (name, *axes), "1", f"overdensity of the matter of {parts}"
        ),
        f"{name}_edges": LabelledArray(edges, ("edge",), "Mpc/h", between),
    }


def _transposed(maps: np.ndarray) -> np.ndarray:
    """Returns maps [..., x, y] as [..., y, x]."""
    return np.ascontiguousarray(np.swapaxes(maps, -1, -2))


@dataclass(frozen=True)
class ConvergenceSpectra:
    """The angular power spectra of all pairs of sources, and theory.

    Attributes:
        pairs: numbers of two sources each.
        ell: mean |l| in each bin [bin].
        modes: number of modes in each bin [bin].
        power: measured power [pair, bin] [1].
        noise: the power of particles that are placed at random [pair, bin] [1]; the same in all
            bins without massive neutrinos, which do not follow them at small scales.
        linear, halofit: Limber's approximation, means over the same modes [pair, bin] [1].
        fine: multipoles of a curve [ell].
        curves: Limber's approximation there, of linear power and of halofit [2, source, ell] [1].
    """

    pairs: list[tuple[int, int]]
    ell: np.ndarray
    modes: np.ndarray
    power: np.ndarray
    noise: np.ndarray
    linear: np.ndarray
    halofit: np.ndarray
    fine: np.ndarray
    curves: np.ndarray


def measure(
    kappa: Any, options: LensingOptions, cosmology: Cosmology, particle_volume: float
) -> ConvergenceSpectra:
    """Returns the spectra of maps of convergence, their noise and theory.

    The noise is the sum of the squares of the particles' weights in the maps, divided by the solid
    angle. Its mean is Limber's integral of the power V / N of particles that are placed at random.

    Args:
        kappa: [source, x, y] or [source, pixel] [1].
        options: the light cone; the painting of its particles is divided out.
        cosmology: cosmology of the run.
        particle_volume: the volume for each particle, V / N [(Mpc/h)^3].
    """
    count = len(options.sources)
    pairs = list(itertools.combinations_with_replacement(range(count), 2))
    measured, edges = _measured(kappa, options, pairs)
    ell = measured[0].ell

    def in_bins(theory: Theory) -> np.ndarray:
        """Returns means of theory over the modes of bins, for each pair of sources."""
        if isinstance(options, FullSkyLensingOptions):
            means = spherical_theory_in_bins(theory, edges, options.nside)
        else:
            with np.errstate(invalid="ignore", divide="ignore"):
                means = theory_in_bins(theory, options.pixels, options.fov, edges)
            # Where alignments make theory negative, it has no logarithm: take it at the mean l.
            means = np.where(np.isfinite(means), means, theory(ell))
        return means[tuple(zip(*pairs, strict=True))]

    sources, alignment = options.population()
    universe = theory_of(cosmology)

    def spectra(power: Power, ell: Any) -> np.ndarray:
        return convergence_power(ell, sources, universe, power, alignment=alignment).numpy()

    theories = [
        functools.partial(spectra, power) for power in (universe.power, Halofit(universe.power))
    ]
    neutrinos = universe.background.neutrinos

    def white(k: Any, a: Any) -> Any:
        volume = tf.fill(tf.shape(k * a), tf.cast(particle_volume, k.dtype))
        return volume if neutrinos is None else volume * neutrinos.matter(k, a) ** 2

    fine, each = np.geomspace(ell[0], ell[-1], 100), np.arange(count)
    return ConvergenceSpectra(
        pairs,
        ell,
        measured[0].modes,
        np.stack([spectrum.power for spectrum in measured]),
        in_bins(functools.partial(spectra, white)),
        in_bins(theories[0]),
        in_bins(theories[1]),
        fine,
        np.stack([theory(fine)[each, each] for theory in theories]),
    )


def _measured(
    kappa: Any, options: LensingOptions, pairs: Sequence[tuple[int, int]]
) -> tuple[list[AngularPower], np.ndarray]:
    """Returns the power of each pair of maps, and the edges of its bins.

    Args:
        kappa, options: see `measure`.
        pairs: the numbers of two sources each.
    """
    if isinstance(options, FullSkyLensingOptions):
        nside, harmonics = options.nside, spherical_harmonics(kappa)
        edges = spherical_octave_edges(nside)
        return [
            harmonic_power(harmonics[i], harmonics[j], nside, edges, window="bilinear")
            for i, j in pairs
        ], edges
    fov, edges = options.fov, octave_edges(options.fov, options.pixels)
    return [
        angular_power(kappa[i], fov, edges, other=kappa[j], window="bilinear") for i, j in pairs
    ], edges


def write_convergence_power(path: Path, spectra: ConvergenceSpectra) -> None:
    """Writes a table of comma-separated values, a line for each pair of sources and bin."""
    count = len(spectra.ell)
    columns = {
        "i,j": np.repeat(spectra.pairs, count, axis=0),
        "ell": np.tile(spectra.ell, len(spectra.pairs)),
        "C_ell": spectra.power.ravel(),
        "modes": np.tile(spectra.modes, len(spectra.pairs)),
        "limber_linear": spectra.linear.ravel(),
        "limber_halofit": spectra.halofit.ravel(),
        "particle_noise": spectra.noise.ravel(),
    }
    table, formats = np.column_stack(list(columns.values())), "%d,%d,%.8e,%.8e,%d,%.8e,%.8e,%.8e"
    np.savetxt(path, table, formats, header=",".join(columns), comments="")
