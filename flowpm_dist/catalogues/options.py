"""The options of the halo finder. Nothing here imports TensorFlow."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field
from typing_extensions import override

from flowpm_dist.grid.decomposition import parts_of, reach_problem
from flowpm_dist.options import (
    A_SEED,
    Options,
    Problem,
    Seed,
    checked_python_name,
    distinct,
    listed,
    rows,
    table_of,
)

Overdensity = Literal["200m", "200c"]
CatalogueFormat = Literal["hdf5", "bigfile"]
FINDER, SPHERES = 36, 16
"""Memory of the halo finder, and of its spheres [float64 values of a particle]."""
LinkingLength = Annotated[float, Field(ge=0.01, le=1)]


class FinderOptions(Options):
    """The options of the halo finder, friends of friends.

    Attributes:
        linking_length: the largest distance of two friends [mean distance of particles].
        minimum: the number of particles that make a halo.
        relaxed: longer linking lengths for small halos, in the order of rising numbers: pairs of a
            number and a linking length. Groups of the first length that have fewer particles than
            its number are halos. The particles of larger groups are linked again with the next
            length, and at last with `linking_length` (Dai and others 2020, arXiv:1908.05276).
        overdensities: "200m" and "200c": masses within spheres of 200 times the mean or the
            critical density about the densest member. They take several times as long as to find
            the halos.
        members: whether the catalogue has the numbers of the member particles.
    """

    linking_length: LinkingLength = Field(default=0.2, description="a number from 0.01 to 1")
    minimum: int = Field(default=20, ge=2, description="a whole number of particles, at least 2")
    relaxed: Annotated[tuple[tuple[int, LinkingLength], ...], BeforeValidator(rows)] = Field(
        default=(), description="a list of pairs [particles, linking length], such as [[40, 0.25]]"
    )
    overdensities: Annotated[
        tuple[Overdensity, ...], BeforeValidator(listed), AfterValidator(distinct)
    ] = Field(default=(), description=f"a list of some of {', '.join(get_args(Overdensity))}")
    members: bool = Field(default=False, description="true or false")

    @override
    def problems(self) -> Iterator[Problem]:
        if not self.relaxed:
            return
        numbers, lengths = zip(*self.relaxed, strict=True)
        if any(b <= a for a, b in zip((self.minimum, *numbers), numbers, strict=False)):
            reason = f"must have rising numbers, above minimum = {self.minimum}"
            yield Problem("relaxed", f"= {self._pairs}: {reason}")
        later = (*lengths[1:], self.linking_length)
        if any(b >= a for a, b in zip(lengths, later, strict=True)):
            reason = f"must have falling linking lengths, above linking_length = {later[-1]:g}"
            yield Problem("relaxed", f"= {self._pairs}: {reason}")

    @property
    def _pairs(self) -> list[list[float]]:
        return [list(pair) for pair in self.relaxed]

    def mesh_problem(
        self, section: str, grid: Sequence[int], size: Sequence[float], axes: Mapping[str, int]
    ) -> Problem | None:
        """Returns the problem of a linking length that spans a rank's block; None if there is none.

        Args:
            section: the name of these options in a run file.
            grid: the particles along each side.
            size: the sides of the box [Mpc/h].
            axes: the axes of the mesh of ranks.
        """
        spacing = (math.prod(size) / math.prod(grid)) ** (1 / 3)
        problem = reach_problem(size, parts_of(axes), self.longest * spacing)
        key = "relaxed" if self.relaxed else "linking_length"
        return Problem(f"{section}.{key}", f"a link of {problem}") if problem else None

    def grid_problems(self, section: str, grid: Sequence[int]) -> Iterator[Problem]:
        """Yields the problem of halos that have more particles than a grid, see `mesh_problem`."""
        if self.minimum > math.prod(grid):
            reason = f"= {self.minimum}: there are {math.prod(grid)} particles"
            yield Problem(f"{section}.minimum", reason)

    @property
    def values(self) -> int:
        """The memory of the finder [float64 values of a particle]."""
        return FINDER + SPHERES * bool(self.overdensities)

    @property
    def longest(self) -> float:
        """The longest of all linking lengths [mean distance of particles]."""
        return self.relaxed[0][1] if self.relaxed else self.linking_length

    @property
    def stages(self) -> list[tuple[float, float]]:
        """Pairs of a linking length and the number of particles of which no halo has so many."""
        return [(length, below) for below, length in self.relaxed] + [
            (self.linking_length, float("inf"))
        ]


MOST_SATELLITES = 10**6
"""The largest mean number of satellites in a halo."""
LogMass = Annotated[float, Field(ge=0, le=20)]
A_LOG_MASS = "a number from 0 to 20"
Concentration = Annotated[float, Field(gt=0, le=100)]
A_CONCENTRATION = "a number above 0, at most 100"


class HOD(Options):
    """A halo occupation distribution: how many galaxies halos have, by mass.

    The mean numbers of central and satellite galaxies in halos of mass M are N_c = (1 + erf((log M
    - log_M_min) / sigma_log_M)) / 2 and N_s = N_c ((M - M_0) / M_1)^alpha, with logarithms of base
    10 (Zheng, Coil and Zehavi 2007, ApJ 667, 760, arXiv:astro-ph/0703457, equations 2 and 5). The
    defaults are their fit to galaxies of SDSS brighter than M_r = -21 (their table 1).

    Attributes:
        log_M_min: log of the mass where half of all halos have a central galaxy [Msun/h].
        sigma_log_M: width of this transition in log M.
        log_M_0: log of the mass below which halos have no satellites [Msun/h].
        log_M_1: log of M_1 [Msun/h].
        alpha: slope of the number of satellites.
        concentration: concentration of NFW profiles within 200 times the mean density: a number, or
            "duffy2008" (Duffy and others 2008, MNRAS 390, L64, arXiv:0804.2486, table 1, full
            sample).
        seed: seed of the random numbers, which depend on it, the halo's id and the galaxy's number.
        occupation: a function of a catalogue of halos and of this `HOD`, as
            "package.module:object", which returns the mean numbers of centrals and of satellites
            [n] in place of those above; for assembly bias, for example.
    """

    log_M_min: LogMass = Field(default=12.79, description=A_LOG_MASS)
    sigma_log_M: float = Field(default=0.39, gt=0, description="a number above 0")
    log_M_0: LogMass = Field(default=11.92, description=A_LOG_MASS)
    log_M_1: LogMass = Field(default=13.94, description=A_LOG_MASS)
    alpha: float = Field(default=1.15, ge=0, description="a number of at least 0")
    concentration: Concentration | Literal["duffy2008"] = Field(
        default="duffy2008", description=f'"duffy2008", or {A_CONCENTRATION}'
    )
    seed: Seed = Field(default=0, description=A_SEED)
    occupation: Annotated[Any, AfterValidator(checked_python_name)] | None = Field(
        default=None, description="a function, as package.module:object"
    )


class HaloSection(FinderOptions):
    """The section [halos]: halos of dark matter at the end of a run, and at its outputs.

    Attributes:
        format: format of the catalogues, "hdf5" or "bigfile".
        galaxies: the halo occupation of galaxies; None for no galaxies.
        line_of_sight: the axis of the multipoles of galaxies in redshift space.
    """

    format: CatalogueFormat = Field(default="hdf5", description='"hdf5" or "bigfile"')
    galaxies: Annotated[HOD | None, table_of(HOD)] = Field(
        default=None, description="a table such as { log_M_min = 12.8, seed = 0 }"
    )
    line_of_sight: Literal["x", "y", "z"] = Field(default="z", description='"x", "y" or "z"')

    @override
    def idle(self) -> dict[str, str]:
        return {} if self.galaxies is not None else {"line_of_sight": "galaxies"}
