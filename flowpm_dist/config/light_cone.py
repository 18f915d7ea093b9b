"""Rules of the section [lightcone] of a run file. Nothing here imports TensorFlow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flowpm_dist.config.checks import ParsedRunFile, Problem
from flowpm_dist.config.dependent_keys import DependentKeys
from flowpm_dist.config.sections import EvolutionSection
from flowpm_dist.cosmology.astropy_bridge import comoving_distance
from flowpm_dist.cosmology.options import CosmologyOptions, PartialCosmologyOptions
from flowpm_dist.io.errors import UserError
from flowpm_dist.jobs.full_sky import FullSkyLensingOptions
from flowpm_dist.jobs.light_cone import (
    FEWEST_PIXELS,
    ConvergenceOptions,
    LensingOptions,
    LightConeWork,
)
from flowpm_dist.observables.lensing.options import SourceOptions
from flowpm_dist.observables.light_cone.options import DepthOptions
from flowpm_dist.options import Options, three

SECTION = "lightcone"

OF_PLANES = DependentKeys(
    f"{SECTION}.needs_planes",
    (True,),
    (f"{SECTION}.plane_width",),
    goes_with="ray_tracing or planes = true",
)

OTHER = 0.1
"""Relative difference of the width of planes from what is asked that is told."""

CLOSE = 1e-6
"""Relative distance that sources may lie behind z_max, for rounding."""


def light_cone_rules(file: ParsedRunFile) -> Iterator[Problem]:
    """Yield problems between the keys of [lightcone], and between them and the run."""
    cone = file.sections.get(SECTION)
    if not isinstance(cone, ConvergenceOptions):
        return
    yield from step_problems(file, cone)
    yield from _field_of_view(file, cone)
    yield from source_problems(cone)
    if isinstance(cone, LensingOptions):
        yield from _combinations(file, cone)


def maps_fit(file: ParsedRunFile) -> Iterator[Problem]:
    """Yield problems of maps without a light cone with noise, and of light cones without maps."""
    cone, kind = file.sections.get(SECTION), file.value("observation", "kind")
    if kind != "convergence":
        if cone is not None and kind is not None:
            what = f'is given, but observation.kind = "{kind}": must be "convergence", or leave it'
            yield Problem(SECTION, f"{what} out")
        return
    if cone is None:
        what = 'is missing: with kind = "convergence" it says what is seen, as of simulate'
        yield Problem(SECTION, what)
        return
    if "shape_noise" not in file.given[SECTION]:
        allowed = ConvergenceOptions.model_fields["shape_noise"].description
        yield Problem(f"{SECTION}.shape_noise", f"is missing: must be {allowed}")
    if (structure := file.value("observation", "structure")) not in (None, "pm"):
        what = f'= "{structure}": a light cone sees the steps of the particle mesh; must be "pm"'
        yield Problem("observation.structure", what)


def light_cone_model(table: Mapping[str, Any]) -> type[Options]:
    """Returns the model of the section [lightcone] of a run file."""
    section = table.get(SECTION)
    full = isinstance(section, Mapping) and section.get("sky") == "full"
    return FullSkyLensingOptions if full else LensingOptions


def step_problems(file: ParsedRunFile, cone: DepthOptions) -> Iterator[Problem]:
    """Yield problems of the run's steps with the light that is seen."""
    evolution = file.sections.get("evolution")
    if not isinstance(evolution, EvolutionSection):
        return
    first, last = evolution.first, evolution.last
    if last is not None and last < 1:
        key = "edges" if evolution.edges else "a_stop"
        what = f"ends the run at a = {last:g}: a light cone to an observer today needs a = 1"
        yield Problem(f"evolution.{key}", what)
    if first and _number(cone, "z_max") is not None:
        try:
            cone.check_begin(first)
        except ValueError as error:
            yield Problem(f"{SECTION}.z_max", without_name(error))


def _field_of_view(file: ParsedRunFile, cone: ConvergenceOptions) -> Iterator[Problem]:
    given = [_number(cone, name) for name in ("field_of_view", "z_max")]
    size, end = file.value("box", "size"), distance_of(file, cone)
    if None in given or size is None or end is None or not isinstance(cone.repeat, bool):
        return
    try:
        cone.check_width(three(size), end)
    except ValueError as error:
        what = str(error).replace("repeat = True", "repeat = true")
        yield Problem(f"{SECTION}.field_of_view", f"= {cone.field_of_view:g}: {what}")


def source_problems(cone: ConvergenceOptions | FullSkyLensingOptions) -> Iterator[Problem]:
    """Yield problems of sources with the redshift that is seen, and with alignments."""
    z_max, sources = _number(cone, "z_max"), getattr(cone, "sources", None) or ()
    if not all(isinstance(each, SourceOptions) for each in sources):
        return
    for number, source in enumerate(sources):
        where = f"{SECTION}.sources[{number}]"
        try:
            farthest = source.farthest
        except UserError as error:
            yield Problem(f"{where}:", str(error))
            continue
        if farthest <= 0:
            what = f"have no member above z = 0 with shift = {source.shift:g}"
            yield Problem(where, what)
        elif z_max is not None and farthest > z_max * (1 + CLOSE):
            cut = ", or cut them with their own z_max" if source.smail else ""
            cut = ", or end the table there" if source.file else cut
            what = f"reach to z = {farthest:.4g}, behind z_max = {z_max:g}: see farther"
            yield Problem(where, f"{what}{cut}")
        else:
            try:
                source.check_members()
            except ValueError as error:
                yield Problem(f"{where}:", str(error))
        if source.redshift is not None and cone.alignment is not None:
            what = "are at one redshift: alignments need smail or file"
            yield Problem(where, what)


def _combinations(file: ParsedRunFile, cone: LensingOptions) -> Iterator[Problem]:
    if "alignment" in file.given.get(SECTION, {}) and cone.ray_tracing is True:
        what = "is given beside ray_tracing, which has none: leave one of them out"
        yield Problem(f"{SECTION}.alignment", what)
    pixels = _number(cone, "pixels")
    if pixels is not None and 2 <= pixels < FEWEST_PIXELS:
        what = f"= {pixels}: must be at least {FEWEST_PIXELS}, to measure a spectrum"
        yield Problem(f"{SECTION}.pixels", what)


def light_cone_work(
    cone: LensingOptions,
    cosmology: CosmologyOptions,
    size: Sequence[float],
    cells: Sequence[float],
    grid: Sequence[int],
) -> LightConeWork:
    """Returns what a run sees on its light cone.

    Args:
        cone: the section.
        cosmology: of the run.
        size: of the box [Mpc/h].
        cells: of the force mesh, along each side of the box.
        grid: of the particles.
    """
    warnings = pixel_warnings(cone, cosmology, size, cells)
    end = comoving(cone.z_max, cosmology)
    seen = cone.fov**2 * end**3 / 3 * math.prod(grid) / math.prod(size)
    particles = seen if cone.particles else 0.0
    work = LightConeWork(cone, end, size[2] / grid[2], warnings, particles)
    asked, width = cone.plane_width, work.plane_width
    if cone.needs_planes and abs(width - asked) > OTHER * asked:
        told = (
            f"{SECTION}.plane_width = {asked:g}: planes are {width:g} Mpc/h wide, made of whole "
            f"layers of particles, {work.layer:g} Mpc/h apart"
        )
        return replace(work, warnings=(*warnings, told))
    return work


def pixel_warnings(
    cone: ConvergenceOptions,
    cosmology: CosmologyOptions,
    size: Sequence[float],
    cells: Sequence[float],
) -> tuple[str, ...]:
    """Returns a warning where pixels are finer than what is simulated; see `light_cone_work`."""
    half = 0.5 * comoving(max(source.farthest for source in cone.sources), cosmology)
    cell = max(side / n for side, n in zip(size, cells, strict=True))
    fine = cone.too_fine(half, cell)
    return (f"{SECTION}.{fine}",) if fine else ()


def comoving(z: float, cosmology: CosmologyOptions) -> float:
    """Returns the comoving distance of a redshift [Mpc/h]."""
    return comoving_distance(z, Omega_m=cosmology.Omega_m, w0=cosmology.w0, wa=cosmology.wa)


def distance_of(file: ParsedRunFile, cone: DepthOptions) -> float | None:
    """Returns the distance of z_max [Mpc/h]; None if keys that it depends on are wrong.

    Where parameters have priors, it is the greatest that it may be.
    """
    cosmology, z = file.sections.get("cosmology"), _number(cone, "z_max")
    if not isinstance(cosmology, PartialCosmologyOptions) or z is None:
        return None
    ends = {}
    for name in ("Omega_m", "w0", "wa"):
        value, prior = _number(cosmology, name), file.value("priors", name)
        ends[name] = prior if isinstance(prior, tuple) else (value,)
    if any(None in values for values in ends.values()):
        return None
    corners = (dict(zip(ends, corner, strict=True)) for corner in itertools.product(*ends.values()))
    return max(comoving_distance(z, **corner) for corner in corners)


def _number(options: Any, name: str) -> Any:
    """Returns the value of a key; None if it is wrong or missing."""
    value = getattr(options, name, None)
    return value if isinstance(value, int | float) else None


def without_name(error: ValueError) -> str:
    """Returns a message that begins with its key, without that."""
    return str(error).partition(" ")[2]
