"""The light cone of a simulation as options, and what it takes; nothing here imports TensorFlow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field, ValidationInfo

from flowpm_dist.io.light_cone_file import NUMBERS, ROWS
from flowpm_dist.observables.lensing.options import (
    AlignmentOptions,
    ShapeNoiseOptions,
    SourceOptions,
)
from flowpm_dist.observables.light_cone.options import LightConeOptions, plane_of_layers
from flowpm_dist.options import Options, constructed

if TYPE_CHECKING:
    from flowpm_dist.observables.lensing.alignment import IntrinsicAlignment
    from flowpm_dist.observables.lensing.sources import Sources
    from flowpm_dist.observables.light_cone.light_cone import LightCone

# Values of a pixel that lie in memory together, measured.
SPECTRA = 30
"""Of one spectrum, whatever the number of maps."""
MAPS = 18
"""Of each source: what is seen, added up and measured."""
PLANES = 4
"""Of each plane."""
RAYS = 70
"""While rays are traced, besides 6 for each source."""
THEORY = 110 * 2**20
"""Memory of theory and figures [bytes]."""
COMPILED = 64 * 2**20
"""Memory of what is compiled for ray tracing [bytes]."""
FEWEST_PIXELS = 4
"""Along a side of a map whose spectrum is measured."""
RECORDED = 160 * 2**20
"""Memory of the particles that are written, while they are found [bytes]."""


def particle_bytes(count: float, itemsize: int, files: int) -> int:
    """Returns the size of particles in files, an upper estimate [bytes].

    Args:
        count: of the particles.
        itemsize: size of a value [bytes].
        files: their number at most; the last chunk of each may be nearly empty.
    """
    return int((count + ROWS * min(files, count)) * NUMBERS * itemsize)


def _tables(model: type[Options], *, one: bool = False) -> BeforeValidator:
    """Returns the validator of a table, or of a list of tables, that names what is wrong in it."""

    def made(value: Any, where: str, info: ValidationInfo) -> Any:
        if not isinstance(value, dict):
            return value
        try:
            return constructed(model, value, info.context)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}{error}") from None

    def read(value: Any, info: ValidationInfo) -> Any:
        if one or not isinstance(value, list | tuple):
            return made(value, "", info)
        return tuple(made(each, f"sources[{n}]: ", info) for n, each in enumerate(value))

    return BeforeValidator(read)


class PopulationOptions(Options):
    """The sources of lensing.

    Attributes:
        sources: the populations of sources.
        alignment: intrinsic alignments.
    """

    sources: Annotated[tuple[SourceOptions, ...], Field(min_length=1), _tables(SourceOptions)] = (
        Field(
            description="a list of tables such as { redshift = 1.0 }, { smail = [0.3, 2.0, 1.5], "
            'z_max = 1.5 } or { file = "nz.txt" }, each with a shift if need be'
        )
    )
    alignment: Annotated[AlignmentOptions | None, _tables(AlignmentOptions, one=True)] = Field(
        default=None, description="a table such as { amplitude = 1.0, eta = 0.0, z_pivot = 0.62 }"
    )

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


class ConvergenceOptions(PopulationOptions, LightConeOptions):
    """Maps of convergence on the light cone of the flat sky, in the Born approximation.

    Attributes:
        shape_noise: noise of the shapes of galaxies.
    """

    shape_noise: Annotated[ShapeNoiseOptions | None, _tables(ShapeNoiseOptions, one=True)] = Field(
        default=None, description="a table such as { sigma_e = 0.26, n_eff = 5.0, seed = 0 }"
    )

    def light_cone(self) -> LightCone:
        """Returns the light cone."""
        from flowpm_dist.observables.light_cone.light_cone import LightCone

        return LightCone(**self.part(LightConeOptions).model_dump())

    def pixel_sigma(self) -> float:
        """Returns the standard deviation of the shape noise of a pixel, which must be given [1]."""
        from flowpm_dist.observables.lensing.noise import shape_noise_sigma

        asked = self.shape_noise
        assert asked is not None
        return float(shape_noise_sigma(asked.sigma_e, asked.n_eff, (self.fov / self.pixels) ** 2))

    def noise(self, seed: int) -> np.ndarray:
        """Returns shape noise, which must be given, in maps [source, x, y] [1], float64.

        Args:
            seed: in place of the one that is given.
        """
        from flowpm_dist.observables.lensing.noise import shape_noise

        asked, sides = self.shape_noise, (self.pixels, self.pixels)
        assert asked is not None
        each = np.full(len(self.sources), asked.sigma_e)
        drawn = shape_noise(sides, self.fov, each, asked.n_eff, seed, 1, np.float64)
        return np.asarray(drawn[:, 0])


class LensingOptions(ConvergenceOptions):
    """What is seen of a simulation on the light cone, and the lensing by it.

    Attributes:
        sky: that it is flat.
        particles: whether the particles that are seen are written, too.
        ray_tracing: whether rays are followed through planes; otherwise the Born approximation.
        plane_width: of planes [Mpc/h].
        planes: whether planes of matter are written.
        shape_noise: noise of the shear.
    """

    sky: Literal["flat"] = Field(default="flat", description='"flat" or "full"')
    particles: bool = Field(default=False, description="true or false")
    ray_tracing: bool = Field(default=False, description="true or false")
    plane_width: Annotated[float, Field(gt=0)] = Field(
        default=100.0, description="a length above 0 in Mpc/h"
    )
    planes: bool = Field(default=False, description="true or false")

    @property
    def needs_planes(self) -> bool:
        """Whether the matter is painted on planes."""
        return self.ray_tracing or self.planes


@dataclass(frozen=True)
class LightConeWork:
    """What a run sees on its light cone of the flat sky.

    Attributes:
        options: of the run file.
        end: comoving distance of z_max [Mpc/h].
        layer: depth of a layer of particles [Mpc/h].
        warnings: of what a user should know; they are kept with the maps.
        particles: number of those that are written, about.
    """

    options: LensingOptions
    end: float
    layer: float
    warnings: tuple[str, ...] = ()
    particles: float = 0.0

    @property
    def planes(self) -> int:
        """The number of planes that are painted."""
        return 1 + int(self._plane_of_layers[-1]) if self.options.needs_planes else 0

    @property
    def plane_width(self) -> float:
        """The width of the first of them [Mpc/h], and of all others but the last."""
        return self.layer * int(np.sum(self._plane_of_layers == 0))

    @property
    def _plane_of_layers(self) -> np.ndarray:
        layers = max(1, math.ceil(self.end / self.layer - 0.5))
        return plane_of_layers(layers, self.layer, self.options.plane_width)

    def coarser(self) -> Iterator[tuple[str, LightConeWork]]:
        """Yields the same with fewer pixels, and their key and number."""
        pixels = self.options.pixels // 2
        while pixels >= FEWEST_PIXELS:
            options = self.options.model_copy(update={"pixels": pixels})
            yield f"lightcone.pixels = {pixels}", replace(self, options=options)
            pixels //= 2

    def memory(self, itemsize: int) -> int:
        """Returns the memory of the maps on a rank, an upper estimate [bytes].

        Args:
            itemsize: size of a value [bytes].
        """
        cone = self.options
        values = SPECTRA + MAPS * len(cone.sources) + PLANES * self.planes
        if cone.ray_tracing:
            values += RAYS + 6 * len(cone.sources)
        others = THEORY + (COMPILED if cone.ray_tracing else 0)
        return self._bytes(values, itemsize) + others + (RECORDED if cone.particles else 0)

    def results(self, itemsize: int, files: int) -> int:
        """Returns the size of all that is written [bytes].

        Args:
            itemsize: size of a value [bytes].
            files: of particles, at most.
        """
        each = 4 if self.options.ray_tracing else 3
        values = each * len(self.options.sources) + (self.planes if self.options.planes else 0)
        return self._bytes(values, itemsize) + particle_bytes(self.particles, itemsize, files)

    def checkpoint(self, itemsize: int) -> int:
        """Returns the size of the maps in a checkpoint [bytes]; argument as for `memory`."""
        born = 0 if self.options.ray_tracing else len(self.options.sources)
        return self._bytes(born + self.planes, itemsize)

    def _bytes(self, values: int, itemsize: int) -> int:
        return values * self.options.pixels**2 * itemsize
