"""The options of lensing: sources, intrinsic alignments, noise. Nothing here imports TensorFlow."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Annotated, Any, Self

import numpy as np
from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from flowpm_dist.io.checksums import checksum
from flowpm_dist.observables.lensing.tables import (
    check_total,
    quadrature,
    read_distribution,
    smail,
    smail_edges,
)
from flowpm_dist.options import A_SEED, AnyPath, Options, Seed, listed

if TYPE_CHECKING:
    from flowpm_dist.observables.lensing.alignment import IntrinsicAlignment
    from flowpm_dist.observables.lensing.sources import Sources

KINDS = ("redshift", "smail", "file")
"""Keys of which a population of sources has exactly one."""

GOES_WITH = {"z_max": "smail", "column": "file"}
"""Keys that have a meaning only beside another one."""

Positive = Annotated[float, Field(gt=0)]


class SourceOptions(Options):
    """A population of sources.

    Attributes:
        redshift: of all sources; or
        smail: z0, alpha and beta of n(z) ~ z^alpha exp(-(z / z0)^beta); or
        file: text file of n(z).
        z_max: the redshift beyond which `smail` has no sources.
        column: of `file` that has n(z), counted from 0, which is that of z.
        shift: of all redshifts: n(z) becomes n(z - shift).
    """

    redshift: Positive | None = Field(default=None, description="a redshift above 0")
    smail: Annotated[tuple[Positive, Positive, Positive], BeforeValidator(listed)] | None = Field(
        default=None, description="[z0, alpha, beta], each above 0"
    )
    file: AnyPath | None = Field(default=None, description="a text file with columns z, n")
    z_max: Positive = Field(default=3.0, description="a redshift above 0")
    column: int = Field(default=1, ge=1, description="a whole number of at least 1")
    shift: float = Field(default=0.0, description="a number")

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> Self:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"{' and '.join(given) or 'none of them'} given: give exactly one of "
                f"{', '.join(KINDS)}"
            )
        for name, other in GOES_WITH.items():
            if name in self.model_fields_set and other not in given:
                raise ValueError(f"{name} = {getattr(self, name)}: goes with {other}")
        if self.redshift is not None and self.redshift + self.shift <= 0:
            raise ValueError(f"shift = {self.shift}: redshift plus shift must be above 0")
        if self.smail is not None and self.z_max + self.shift <= 0:
            raise ValueError(f"shift = {self.shift}: z_max plus shift must be above 0")
        return self

    @model_serializer(mode="wrap")
    def _dump_what_has_a_meaning(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        idle = {name for name, other in GOES_WITH.items() if getattr(self, other) is None}
        dumped = {name: value for name, value in handler(self).items() if name not in idle}
        return dumped if self.file is None else {**dumped, "file": str(self.file)}

    @functools.cached_property
    def table(self) -> tuple[np.ndarray, np.ndarray]:
        """Redshifts and n(z) of the file [row], float64, as they were when first asked for.

        Raises:
            UserError: the file has no n(z).
        """
        assert self.file is not None
        return read_distribution(self.file, self.column)

    @property
    def checksum(self) -> str:
        """The checksum of `table`."""
        return checksum(np.stack(self.table))

    @property
    def farthest(self) -> float:
        """The redshift beyond which there are no sources, after the shift.

        Raises:
            UserError: the file has no n(z).
        """
        if self.file is not None:
            return float(self.table[0][-1]) + self.shift
        return (self.z_max if self.redshift is None else self.redshift) + self.shift

    def check_members(self) -> None:
        """Check that there are sources above z = 0, after the shift.

        Raises:
            ValueError: there are none; or the file has no n(z), a UserError.
        """
        if self.redshift is not None:
            return
        edges = smail_edges(self.z_max) if self.smail else self.table[0]
        z, weights = quadrature(edges, self.shift)
        n = smail(z, *self.smail) if self.smail else np.interp(z, *self.table)
        check_total(n, weights, self.shift)

    @property
    def name(self) -> str:
        """What the sources are, in a few words for figures and tables."""
        moved = f" {self.shift:+g}" if self.shift else ""
        if self.redshift is not None:
            return f"z = {self.redshift:g}{moved}"
        if self.smail is not None:
            return f"Smail, z0 = {self.smail[0]:g}{moved}"
        column = f", column {self.column}" if self.column > 1 else ""
        return f"{self.file.name if self.file else ''}{column}{moved}"

    def sources(self) -> Sources:
        """Returns the population."""
        from flowpm_dist.observables.lensing import sources

        if self.redshift is not None:
            return sources.SourcePlane(self.redshift, self.shift)
        if self.smail is not None:
            return sources.SmailDistribution(*self.smail, shift=self.shift, z_max=self.z_max)
        return sources.TabulatedDistribution(*self.table, shift=self.shift)


class AlignmentOptions(Options):
    """Intrinsic alignments of galaxies, see `IntrinsicAlignment`.

    Attributes:
        amplitude: A_IA.
        eta: the power of 1 + z.
        z_pivot: the redshift at which A_IA is the whole amplitude.
    """

    amplitude: float = Field(description="A_IA, a number")
    eta: float = Field(default=0.0, description="a number")
    z_pivot: float = Field(default=0.62, ge=0, description="a redshift of at least 0")

    def alignment(self) -> IntrinsicAlignment:
        """Returns the alignments."""
        from flowpm_dist.observables.lensing.alignment import IntrinsicAlignment

        return IntrinsicAlignment(**self.model_dump())


class ShapeNoiseOptions(Options):
    """Noise of the shapes of galaxies, see `shape_noise`.

    Attributes:
        sigma_e: rms ellipticity of a galaxy, per component.
        n_eff: galaxies of each population per square minute of arc.
        seed: of the noise.
    """

    sigma_e: Positive = Field(description="a number above 0")
    n_eff: Positive = Field(description="a number of galaxies per square arcmin, above 0")
    seed: Seed = Field(default=0, description=A_SEED)
