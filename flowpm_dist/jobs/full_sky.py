"""The whole sky of a simulation as options, and what it takes; nothing here imports TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field

from flowpm_dist.jobs.light_cone import RECORDED, THEORY, PopulationOptions, particle_bytes
from flowpm_dist.observables.light_cone.options import FullSkyOptions

# Values of a pixel that lie in memory together, an upper estimate.
SPECTRA = 30
"""Of one spectrum, whatever the number of maps."""
MAPS = 6
"""Of each map: what is seen, added up and measured."""
PAINTING = 128 * 2**20
"""Memory of the particles whose places are held [bytes]: 2^19 of 72, in lists that double."""
NS_PER_COPY = 120.0
"""Processor time of a copy of a particle that is seen, of one source, measured [ns]."""


class FullSkyLensingOptions(PopulationOptions, FullSkyOptions):
    """What is seen of a simulation on the whole sky, and the lensing by it.

    Attributes:
        sky: that it is whole.
        particles: whether the particles that are seen are written, too.
        shells: whether shells of matter are written.
        shell_width: of shells [Mpc/h].
    """

    sky: Literal["full"] = Field(description='"flat" or "full"')
    particles: bool = Field(default=False, description="true or false")
    shells: bool = Field(default=False, description="true or false")
    shell_width: Annotated[float, Field(gt=0)] = Field(
        default=100.0, description="a length above 0 in Mpc/h"
    )


@dataclass(frozen=True)
class FullSkyWork:
    """What a run sees on its light cone of the whole sky.

    Attributes:
        options: of the run file.
        end: comoving distance of z_max [Mpc/h].
        observer: place in the box [Mpc/h].
        warnings: of what a user should know; they are kept with the maps.
        particles: number of those that are written, about.
    """

    options: FullSkyLensingOptions
    end: float
    observer: tuple[float, float, float]
    warnings: tuple[str, ...] = ()
    particles: float = 0.0

    @property
    def shells(self) -> int:
        """The number of shells of matter."""
        options = self.options
        return options.shell_count(options.shell_width, self.end) if options.shells else 0

    def coarser(self) -> Iterator[tuple[str, FullSkyWork]]:
        """Yields the same with fewer pixels, and their key and number."""
        nside = self.options.nside // 2
        while nside:
            options = self.options.model_copy(update={"nside": nside})
            yield f"lightcone.nside = {nside}", replace(self, options=options)
            nside //= 2

    def memory(self, itemsize: int) -> int:
        """Returns the memory of the maps on a rank, an upper estimate [bytes].

        Args:
            itemsize: size of a value [bytes].
        """
        values = SPECTRA * 8 + MAPS * itemsize * self._maps
        recorded = RECORDED if self.options.particles else 0
        return values * 12 * self.options.nside**2 + PAINTING + THEORY + recorded

    def results(self, itemsize: int, files: int) -> int:
        """Returns the size of all that is written [bytes]; arguments as of `LightConeWork`."""
        return self.checkpoint(itemsize) + particle_bytes(self.particles, itemsize, files)

    def checkpoint(self, itemsize: int) -> int:
        """Returns the size of the maps in a checkpoint [bytes]; argument as for `memory`."""
        return self._maps * 12 * self.options.nside**2 * itemsize

    @property
    def _maps(self) -> int:
        return len(self.options.sources) + self.shells
