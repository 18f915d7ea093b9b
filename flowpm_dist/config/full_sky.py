"""Rules of the section [lightcone] with sky = "full". Nothing here imports TensorFlow."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from flowpm_dist.config.checks import ParsedRunFile, Problem
from flowpm_dist.config.dependent_keys import DependentKeys
from flowpm_dist.config.light_cone import (
    SECTION,
    comoving,
    distance_of,
    source_problems,
    step_problems,
    without_name,
)
from flowpm_dist.cosmology.options import CosmologyOptions
from flowpm_dist.jobs.full_sky import NS_PER_COPY, FullSkyLensingOptions, FullSkyWork
from flowpm_dist.observables.light_cone.options import boxes_within
from flowpm_dist.options import three

OF_SHELLS = DependentKeys(
    f"{SECTION}.shells", (True,), (f"{SECTION}.shell_width",), goes_with="shells = true"
)

MANY = 64
"""Boxes in the sphere that is seen, of which the cost is told."""


def full_sky_rules(file: ParsedRunFile) -> Iterator[Problem]:
    """Yield problems between the keys of [lightcone], and between them and the run."""
    cone = file.sections.get(SECTION)
    if not isinstance(cone, FullSkyLensingOptions):
        return
    yield from step_problems(file, cone)
    yield from source_problems(cone)
    size, end = file.value("box", "size"), distance_of(file, cone)
    if size is not None and cone.observer is not None:
        try:
            cone.place(three(size), (1, 1, 1))
        except ValueError as error:
            yield Problem(f"{SECTION}.observer", without_name(error))
    if size is not None and end is not None:
        try:
            cone.check_boxes(three(size), end)
        except ValueError as error:
            yield Problem(f"{SECTION}.z_max", without_name(error))
    if end is not None and cone.shells is True and isinstance(cone.shell_width, float):
        try:
            cone.shell_count(cone.shell_width, end)
        except ValueError as error:
            yield Problem(f"{SECTION}.shell_width", without_name(error))


def full_sky_work(
    cone: FullSkyLensingOptions,
    cosmology: CosmologyOptions,
    size: tuple[float, float, float],
    cells: Sequence[float],
    grid: Sequence[int],
) -> FullSkyWork:
    """Returns what a run sees on its light cone.

    Args:
        cone: the section.
        cosmology: of the run.
        size: of the box [Mpc/h].
        cells: of the force mesh, along each side of the box.
        grid: of the particles.
    """
    end = comoving(cone.z_max, cosmology)
    half = 0.5 * comoving(max(source.farthest for source in cone.sources), cosmology)
    cell = max(side / n for side, n in zip(size, cells, strict=True))
    fine = cone.too_fine(half, cell)
    warnings = [f"{SECTION}.{fine}"] if fine else []
    boxes = boxes_within(end, size)
    if boxes > MANY:
        seconds = boxes * math.prod(grid) * NS_PER_COPY * 1e-9
        warnings.append(
            f"lightcone.z_max = {cone.z_max:g}: the sphere that is seen holds the box {boxes:.0f} "
            f"times, with the same structure; painting takes about {seconds:.2g} s of processor "
            "time, that of all ranks together; a larger box is repeated less"
        )
    particles = boxes * math.prod(grid) if cone.particles else 0.0
    return FullSkyWork(cone, end, cone.place(size, grid), tuple(warnings), particles)
