"""The options of the halo finder. Nothing here imports TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field
from typing_extensions import override

from flowpm_dist.options import Options, Problem, distinct, listed, rows

Overdensity = Literal["200m", "200c"]
CatalogueFormat = Literal["hdf5", "bigfile"]
LinkingLength = Annotated[float, Field(gt=0, le=1)]


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
            critical density about the densest member.
        members: whether the catalogue has the numbers of the member particles.
    """

    linking_length: LinkingLength = Field(default=0.2, description="a number above 0, at most 1")
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


class HaloSection(FinderOptions):
    """The section [halos]: halos of dark matter at the end of a run, and at its outputs.

    Attributes:
        format: format of the catalogues, "hdf5" or "bigfile".
    """

    format: CatalogueFormat = Field(default="hdf5", description='"hdf5" or "bigfile"')
