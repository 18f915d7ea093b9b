"""The section [lightcone] of run files: sources, maps, and the memory and disk space they need.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from flowpm_dist.cosmology.astropy_bridge import comoving_distance
from flowpm_dist.cosmology.options import CosmologyOptions, PartialCosmologyOptions
from flowpm_dist.io.errors import UserError
from flowpm_dist.io.light_cone import NUMBERS, ROWS
from flowpm_dist.observables.lensing.options import (
    AlignmentOptions,
    ShapeNoiseOptions,
    SourceOptions,
)
from flowpm_dist.observables.light_cone.options import (
    FEWEST_PIXELS,
    FlatField,
    FullSky,
    SkyOptions,
    plane_of_layers,
)
from flowpm_dist.options import Problem, table_of

if TYPE_CHECKING:
    from flowpm_dist.observables.lensing.sources import IntrinsicAlignment, Sources

# Values per pixel that lie in memory together, measured.
SPECTRA = 30
"""Values for one spectrum, whatever the number of maps."""
MAPS = 18
"""Values for each source on the flat sky: what is seen, added up and measured."""
SPHERES = 6
"""Values for each map of the whole sky, likewise."""
PLANES = 4
"""Values for each plane."""
RAYS = 70
"""Values while rays are traced, besides 6 for each source."""
THEORY = 110 * 2**20
"""Memory of theory and figures [bytes]."""
COMPILED = 64 * 2**20
"""Memory of what is compiled for ray tracing [bytes]."""
PAINTING = 128 * 2**20
"""Memory of the particles whose places are held [bytes]: 2^19 of 72, in lists that double."""
RECORDED = 160 * 2**20
"""Memory of the particles that are written, while they are found [bytes]."""
NS_PER_COPY = 120.0
"""Processor time of a copy of a particle on the whole sky, for one source, measured [ns]."""
MANY_BOXES = 64
"""Number of boxes in the sphere from which on a warning gives the cost."""
OTHER_WIDTH = 0.1
"""Relative difference of the planes' width from the option that gives a warning."""
Z_TOLERANCE = 1e-6
"""Relative redshift by which sources may lie behind z_max, for rounding."""


class LensedSky(SkyOptions):
    """A sky with the sources of lensing.

    Attributes:
        sources: the populations of sources.
        alignment: intrinsic alignments.
    """

    sources: Annotated[tuple[SourceOptions, ...], Field(min_length=1), table_of(SourceOptions)] = (
        Field(
            description="a list of tables such as { redshift = 1.0 }, { smail = [0.3, 2.0, 1.5], "
            'z_max = 1.5 } or { file = "nz.txt" }, each with an optional shift'
        )
    )
    alignment: Annotated[AlignmentOptions | None, table_of(AlignmentOptions)] = Field(
        default=None, description="a table such as { amplitude = 1.0, eta = 0.0, z_pivot = 0.62 }"
    )

    def problems(self) -> Iterator[Problem]:
        """See `Options.problems`: n(z) is known, and its sources can be seen."""
        for number, source in enumerate(self.sources):
            key = f"sources[{number}]"
            try:
                farthest = source.farthest
                if 0 < farthest <= self.z_max * (1 + Z_TOLERANCE):
                    source.check_members()
            except (UserError, ValueError) as error:
                yield Problem(key, f"cannot be used: {error}")
                continue
            if farthest <= 0:
                yield Problem(key, f"have no member above z = 0 with shift = {source.shift:g}")
            elif farthest > self.z_max * (1 + Z_TOLERANCE):
                cut = ", or cut them with their own z_max" if source.smail else ""
                cut = ", or end the table there" if source.file else cut
                what = f"reach to z = {farthest:.4g}, beyond z_max = {self.z_max:g}: increase it"
                yield Problem(key, f"{what}{cut}")
            if source.redshift is not None and self.alignment is not None:
                yield Problem(key, "are at one redshift: an alignment needs smail or file")

    @property
    def tables(self) -> dict[str, SourceOptions]:
        """The populations that are read from files, by key of the run file."""
        return {
            f"lightcone.sources[{number}].file": source
            for number, source in enumerate(self.sources)
            if source.file is not None
        }

    def population(self) -> tuple[list[Sources], IntrinsicAlignment | None]:
        """Returns what functions of lensing take: the sources, and their alignment."""
        alignment = None if self.alignment is None else self.alignment.alignment()
        return [each.sources() for each in self.sources], alignment


class ConvergenceOptions(LensedSky, FlatField):
    """Maps of convergence on the light cone of the flat sky, in the Born approximation.

    Attributes:
        shape_noise: noise of the shapes of galaxies.
    """

    shape_noise: Annotated[ShapeNoiseOptions | None, table_of(ShapeNoiseOptions)] = Field(
        default=None, description="a table such as { sigma_e = 0.26, n_eff = 5.0, seed = 0 }"
    )

    def pixel_sigma(self) -> float:
        """Returns the standard deviation of the shape noise of a pixel, which must be given [1]."""
        from flowpm_dist.observables.lensing.shapes import shape_noise_sigma

        asked = self.shape_noise
        assert asked is not None
        return float(shape_noise_sigma(asked.sigma_e, asked.n_eff, self.pixel_area))

    def noise(self, seed: int, components: int = 1, dtype: Any = np.float64) -> np.ndarray:
        """Returns maps of shape noise [source, component, x, y] [1]; `shape_noise` must be set.

        Args:
            seed: seed of the noise, in place of the one in the options.
            components, dtype: see `shape_noise`.
        """
        from flowpm_dist.observables.lensing.shapes import shape_noise

        asked = self.shape_noise
        assert asked is not None
        each = np.full(len(self.sources), asked.sigma_e)
        how = each, asked.n_eff, seed, components, dtype
        return np.asarray(shape_noise(self.map_shape, self.fov, *how))


class FlatLensingOptions(ConvergenceOptions):
    """A simulation's light cone on the flat sky, and the lensing by it: [lightcone] of a run file.

    Attributes:
        sky: "flat".
        particles: whether the particles on the light cone are written, too.
        ray_tracing: whether rays are followed through planes; otherwise the Born approximation.
        plane_width: width of planes of matter [Mpc/h].
        planes: whether planes of matter are written.
        shape_noise: noise of the shear.
    """

    pixels: Annotated[int, Field(ge=FEWEST_PIXELS)] = Field(
        description=f"a whole number of at least {FEWEST_PIXELS}, to measure a spectrum"
    )
    sky: Literal["flat"] = Field(default="flat", description='"flat" or "full"')
    particles: bool = Field(default=False, description="true or false")
    ray_tracing: bool = Field(default=False, description="true or false")
    plane_width: Annotated[float, Field(gt=0)] = Field(
        default=100.0, description="a length above 0 in Mpc/h"
    )
    planes: bool = Field(default=False, description="true or false")

    def idle(self) -> dict[str, str]:
        """See `Options.idle`."""
        idle = {"plane_width": "ray_tracing or planes = true"}
        return {} if self.ray_tracing or self.planes else idle

    def problems(self) -> Iterator[Problem]:
        """See `Options.problems`."""
        yield from super().problems()
        if self.alignment is not None and self.ray_tracing:
            what = "cannot be combined with ray_tracing: leave one of them out"
            yield Problem("alignment", what)

    @property
    def matter_width(self) -> float | None:
        """The width of planes of matter [Mpc/h]; None where matter is not painted."""
        return self.plane_width if self.ray_tracing or self.planes else None


class FullSkyLensingOptions(LensedSky, FullSky):
    """A simulation's light cone on the full sky, and the lensing by it: also [lightcone].

    Attributes:
        sky: "full".
        particles: whether the particles on the light cone are written, too.
        shells: whether shells of matter are written.
        shell_width: width of shells of matter [Mpc/h].
    """

    ray_tracing: ClassVar[bool] = False

    sky: Literal["full"] = Field(description='"flat" or "full"')
    particles: bool = Field(default=False, description="true or false")
    shells: bool = Field(default=False, description="true or false")
    shell_width: Annotated[float, Field(gt=0)] = Field(
        default=100.0, description="a length above 0 in Mpc/h"
    )

    def idle(self) -> dict[str, str]:
        """See `Options.idle`."""
        return {} if self.shells else {"shell_width": "shells = true"}

    def box_problems(self, size: Sequence[float], end: float) -> Iterator[Problem]:
        """See `SkyOptions.box_problems`: there are not too many shells, either."""
        yield from super().box_problems(size, end)
        try:
            if self.shells:
                self.shell_count(self.shell_width, end)
        except ValueError as error:
            key, _, what = str(error).partition(" ")
            yield Problem(key, what)

    @property
    def matter_width(self) -> float | None:
        """The width of shells of matter [Mpc/h]; None where matter is not painted."""
        return self.shell_width if self.shells else None


LensingOptions = FlatLensingOptions | FullSkyLensingOptions
"""The section [lightcone] of a simulation."""
SKIES: dict[str, type[LensedSky]] = {"flat": FlatLensingOptions, "full": FullSkyLensingOptions}
"""Its models, by the value of the key `sky`."""


def distance_of(z: float, cosmology: PartialCosmologyOptions, priors: Any = None) -> float:
    """Returns the comoving distance of a redshift [Mpc/h].

    Args:
        z: the redshift.
        cosmology: parameters of the run.
        priors: the lowest and the highest value of each parameter that varies, as attributes. The
            result is then the largest distance.
    """
    names = ("Omega_m", "w0", "wa")
    ends = [getattr(priors, name, None) or (getattr(cosmology, name),) for name in names]
    corners = (dict(zip(names, corner, strict=True)) for corner in itertools.product(*ends))
    return max(comoving_distance(z, **corner) for corner in corners)


def map_warnings(
    cone: ConvergenceOptions | FullSkyLensingOptions,
    cosmology: CosmologyOptions,
    size: Sequence[float],
    cells: Sequence[float],
) -> tuple[str, ...]:
    """Returns warnings of pixels finer than the simulation resolves, and of a field not flat.

    Args:
        cone: the light cone.
        cosmology: parameters of the run.
        size: sides of the box [Mpc/h].
        cells: cells of the force mesh along each side of the box.
    """
    half = 0.5 * distance_of(max(source.farthest for source in cone.sources), cosmology)
    cell = max(side / n for side, n in zip(size, cells, strict=True))
    found = cone.fine_pixels_warning(half, cell), cone.wide_field_warning()
    return tuple(f"lightcone.{each}" for each in found if each)


def particle_bytes(count: float, itemsize: int, files: int) -> int:
    """Returns the size of particles in files, an upper estimate [bytes].

    Args:
        count: number of particles.
        itemsize: size of a value [bytes].
        files: largest number of files; the last chunk of each may be nearly empty.
    """
    return int((count + ROWS * min(files, count)) * NUMBERS * itemsize)


@dataclass(frozen=True)
class LightConeWork:
    """What a run sees on its light cone.

    Attributes:
        options: [lightcone] of the run file; the observer's place, where there is one, is known.
        end: comoving distance of z_max [Mpc/h].
        planes: number of planes, or shells, of matter that are painted.
        plane_width: width of the first of them [Mpc/h].
        particles: number of particles that are written, about.
        warnings: warnings for the user; they are stored with the maps.
    """

    options: LensingOptions
    end: float
    planes: int = 0
    plane_width: float = 0.0
    particles: float = 0.0
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        cone: LensingOptions,
        cosmology: CosmologyOptions,
        size: Sequence[float],
        cells: Sequence[float],
        grid: Sequence[int],
    ) -> LightConeWork:
        """Returns what a run sees on its light cone.

        Args:
            cone: [lightcone] of the run file.
            cosmology: parameters of the run.
            size: sides of the box [Mpc/h].
            cells: cells of the force mesh along each side of the box.
            grid: particles along each side of the box.
        """
        end = distance_of(cone.z_max, cosmology)
        boxes = cone.volume(end) / math.prod(size)
        warnings = list(map_warnings(cone, cosmology, size, cells))
        planes, width = 0, 0.0
        if isinstance(cone, FullSkyLensingOptions):
            cone = cone.model_copy(update={"observer": cone.place(size, grid)})
            if cone.shells:
                planes = cone.shell_count(cone.shell_width, end)
                width = end / planes
            if boxes > MANY_BOXES:
                seconds = boxes * math.prod(grid) * NS_PER_COPY * 1e-9
                warnings.append(
                    f"lightcone.z_max = {cone.z_max:g}: the observed sphere holds the box "
                    f"{boxes:.0f} times, with the same structure; painting takes about "
                    f"{seconds:.2g} s of processor time, summed over ranks; a larger box "
                    "is repeated less"
                )
        elif (asked := cone.matter_width) is not None:
            layer = size[2] / grid[2]
            layers = max(1, math.ceil(end / layer - 0.5))
            counts = np.bincount(plane_of_layers(layers, layer, asked))
            planes, width = len(counts), layer * int(counts[0])
            if abs(width - asked) > OTHER_WIDTH * asked:
                warnings.append(
                    f"lightcone.plane_width = {asked:g}: planes are {width:g} Mpc/h wide, made of "
                    f"whole layers of particles, {layer:g} Mpc/h apart"
                )
        particles = boxes * math.prod(grid) if cone.particles else 0.0
        return cls(cone, end, planes, width, particles, tuple(warnings))

    def coarser(self) -> Iterator[tuple[str, LightConeWork]]:
        """Yields the same work with ever fewer pixels, and the setting that gives them."""
        key, options = self.options.PIXELS, self.options
        while (pixels := options.enough_pixels(0.5)) < getattr(options, key):
            options = options.model_copy(update={key: pixels})
            yield f"lightcone.{key} = {pixels}", replace(self, options=options)

    def memory(self, itemsize: int) -> int:
        """Returns the memory of the maps on a rank, an upper estimate [bytes].

        Args:
            itemsize: size of a value [bytes].
        """
        cone, sources = self.options, len(self.options.sources)
        others = THEORY + (RECORDED if cone.particles else 0)
        if isinstance(cone, FullSkyLensingOptions):  # spectra are float64
            values = SPECTRA * 8 + SPHERES * itemsize * (sources + self.planes)
            return values * self._pixels + PAINTING + others
        count = SPECTRA + MAPS * sources + PLANES * self.planes
        if cone.ray_tracing:
            count, others = count + RAYS + 6 * sources, others + COMPILED
        return count * self._pixels * itemsize + others

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
        """Returns the size of the maps in a checkpoint [bytes]; argument as for `memory`."""
        born = 0 if self.options.ray_tracing else len(self.options.sources)
        return (born + self.planes) * self._pixels * itemsize

    @property
    def _pixels(self) -> int:
        return math.prod(self.options.map_shape)
