"""The light cone of a run before it starts: sizes, memory, disk space and warnings.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flowpm_dist.cosmology.options import CosmologyOptions
from flowpm_dist.io.light_cone import NUMBERS, ROWS
from flowpm_dist.observables.light_cone.options import plane_of_layers
from flowpm_dist.observables.light_cone.section import (
    FullSkyLensingOptions,
    LensingOptions,
    distance_of,
    map_warnings,
)
from flowpm_dist.simulation.cost import RECORDING, THEORY, map_bytes, painting_seconds

BOXES_FOR_WARNING = 64
"""Number of copies of the box in the sphere above which a warning states the cost."""
WIDTH_TOLERANCE = 0.1
"""Relative difference between width of planes and option above which a warning is given."""


def particle_bytes(count: float, itemsize: int, files: int) -> int:
    """Returns an upper estimate of the size of particles in files [bytes].

    Args:
        count: number of particles.
        itemsize: size of a value [bytes].
        files: largest number of files; the last chunk of each may be nearly empty.
    """
    return int((count + ROWS * min(files, count)) * NUMBERS * itemsize)


@dataclass(frozen=True)
class LightConePlan:
    """The sizes of the maps and files of a run's light cone.

    Attributes:
        options: [lightcone] of the run file; on the full sky with the position of the observer.
        chi_max: comoving distance of z_max [Mpc/h].
        planes: number of planes, or shells, of matter that are painted.
        plane_width: width of the first plane or shell [Mpc/h].
        particles: estimated number of particles that are written.
        particle_volume: the volume of the box for each particle [(Mpc/h)^3].
        painted: number of maps that are painted of the sources.
        warnings: warnings for the user; they are stored with the maps.
    """

    options: LensingOptions
    chi_max: float
    planes: int = 0
    plane_width: float = 0.0
    particles: float = 0.0
    particle_volume: float = 0.0
    painted: int = 0
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        cone: LensingOptions,
        cosmology: CosmologyOptions,
        size: Sequence[float],
        cells: Sequence[float],
        grid: Sequence[int],
    ) -> LightConePlan:
        """Returns the plan of a run's light cone.

        Args:
            cone: [lightcone] of the run file.
            cosmology: parameters of the run.
            size: sides of the box [Mpc/h].
            cells: cells of the force mesh along each side of the box.
            grid: particles along each side of the box.
        """
        chi_max = distance_of(cone.z_max, cosmology)
        boxes = cone.volume(chi_max) / math.prod(size)
        warnings = list(map_warnings(cone, cosmology, size, cells))
        planes, width = 0, 0.0
        if isinstance(cone, FullSkyLensingOptions):
            cone = cone.model_copy(update={"observer": cone.place(size, grid)})
            if cone.shells:
                planes = cone.shell_count(cone.shell_width, chi_max)
                width = chi_max / planes
            if boxes > BOXES_FOR_WARNING:
                seconds = painting_seconds(boxes * math.prod(grid))
                warnings.append(
                    f"lightcone.z_max = {cone.z_max:g}: the observed sphere holds the box "
                    f"{boxes:.0f} times, with the same structure; painting takes about "
                    f"{seconds:.2g} s of processor time, summed over ranks; a larger box "
                    "is repeated less"
                )
        elif (plane_width := cone.matter_width) is not None:
            layer = size[2] / grid[2]
            layers = max(1, math.ceil(chi_max / layer - 0.5))
            counts = np.bincount(plane_of_layers(layers, layer, plane_width))
            planes, width = len(counts), layer * int(counts[0])
            if abs(width - plane_width) > WIDTH_TOLERANCE * plane_width:
                warnings.append(
                    f"lightcone.plane_width = {plane_width:g}: planes are {width:g} Mpc/h wide, "
                    f"made of whole layers of particles, {layer:g} Mpc/h apart"
                )
        particles = boxes * math.prod(grid) if cone.particles else 0.0
        volume = math.prod(size) / math.prod(grid)
        painted = cone.painted_maps(cosmology)
        return cls(cone, chi_max, planes, width, particles, volume, painted, tuple(warnings))

    def coarser(self) -> Iterator[tuple[str, LightConePlan]]:
        """Yields plans with fewer and fewer pixels, each with the setting that gives it."""
        key, options = self.options.PIXELS, self.options
        while (pixels := options.enough_pixels(0.5)) < getattr(options, key):
            options = options.model_copy(update={key: pixels})
            yield f"lightcone.{key} = {pixels}", replace(self, options=options)

    def memory(self, precision: str) -> int:
        """Returns an upper estimate of the memory of the maps on a rank [bytes].

        Args:
            precision: dtype of the maps.
        """
        cone = self.options
        full_sky = isinstance(cone, FullSkyLensingOptions)
        massive = self.painted > len(cone.sources)
        copies = 1 if not massive else 2 if full_sky else 3  # measured, see `all_matter`
        maps = map_bytes(
            self._pixels,
            precision,
            sources=len(cone.sources) if cone.ray_tracing else self.painted,
            planes=self.planes * copies,
            full_sky=full_sky,
            rays=cone.ray_tracing,
        )
        return maps + THEORY + (RECORDING if cone.particles else 0)

    def results(self, itemsize: int, files: int) -> int:
        """Returns the size of all that is written [bytes].

        Args:
            itemsize: size of a value [bytes].
            files: largest number of files of particles.
        """
        cone = self.options
        if isinstance(cone, FullSkyLensingOptions):
            maps = len(cone.sources) + self.planes
        else:
            each = 4 if cone.ray_tracing else 3
            maps = each * len(cone.sources) + (self.planes if cone.planes else 0)
        return maps * self._pixels * itemsize + particle_bytes(self.particles, itemsize, files)

    def checkpoint(self, itemsize: int) -> int:
        """Returns the size of the maps in a checkpoint [bytes]; `itemsize` as for `memory`."""
        born = 0 if self.options.ray_tracing else self.painted
        return (born + self.planes) * self._pixels * itemsize

    @property
    def _pixels(self) -> int:
        return math.prod(self.options.map_shape)
