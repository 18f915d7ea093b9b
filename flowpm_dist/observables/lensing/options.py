"""The options of lensing: sources, intrinsic alignments, noise. Nothing here imports TensorFlow."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import BeforeValidator, Field
from typing_extensions import override

from flowpm_dist.io.errors import UserError
from flowpm_dist.io.files import checksum
from flowpm_dist.observables.lensing.distributions import (
    check_total,
    quadrature,
    read_distributions,
    smail,
    smail_edges,
)
from flowpm_dist.options import A_SEED, AnyPath, Options, Problem, Seed, Unit, listed

if TYPE_CHECKING:
    from flowpm_dist.observables.lensing.sources import IntrinsicAlignment, Sources


Positive = Annotated[float, Field(gt=0)]


class SourceOptions(Options):
    """A population of sources.

    Attributes:
        redshift: redshift of all sources; or
        smail: z0, alpha and beta of n(z) ~ z^alpha exp(-(z / z0)^beta); or
        file: text file of n(z).
        z_max: the redshift beyond which `smail` has no sources.
        column: number of the column of `file` with n(z); column 0 has z.
        shift: shift of all redshifts: n(z) becomes n(z - shift).
    """

    redshift: Annotated[Positive | None, Unit("redshift")] = Field(
        default=None, description="a redshift above 0"
    )
    smail: Annotated[tuple[Positive, Positive, Positive], BeforeValidator(listed)] | None = Field(
        default=None, description="[z0, alpha, beta], each above 0"
    )
    file: AnyPath | None = Field(default=None, description="a text file with columns z, n")
    z_max: Annotated[Positive, Unit("redshift")] = Field(
        default=3.0, description="a redshift above 0"
    )
    column: int = Field(default=1, ge=1, description="a whole number of at least 1")
    shift: Annotated[float, Unit("redshift")] = Field(default=0.0, description="a number")

    @override
    def idle(self) -> dict[str, str]:
        goes_with = {"z_max": "smail", "column": "file"}
        return {key: other for key, other in goes_with.items() if getattr(self, other) is None}

    @override
    def problems(self) -> Iterator[Problem]:
        yield from self.exactly_one("redshift", "smail", "file")
        first = "redshift" if self.smail is None else "z_max"
        if not self.file and (getattr(self, first) or math.inf) + self.shift <= 0:
            yield self.problem("shift", f"{first} plus shift must be above 0")

    @property
    def table(self) -> tuple[np.ndarray, np.ndarray]:
        """Redshifts and n(z) of the file [row], float64, as first read.

        Raises:
            UserError: the file has no n(z).
        """
        return self.columns[:, 0], self.columns[:, self.column]

    @functools.cached_property
    def columns(self) -> np.ndarray:
        """The file as first read [row, column]."""
        assert self.file is not None
        return read_distributions(self.file, self.column)

    @property
    def checksum(self) -> str:
        """The checksum of `table`."""
        return checksum(np.stack(self.table))

    @property
    def max_redshift(self) -> float:
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
        """A description of the sources in a few words, for figures and tables."""
        moved = f" {self.shift:+g}" if self.shift else ""
        if self.redshift is not None:
            return f"z = {self.redshift:g}{moved}"
        if self.smail is not None:
            return f"Smail, z0 = {self.smail[0]:g}{moved}"
        assert self.file is not None
        several = self.column > 1
        with contextlib.suppress(UserError):  # a finished work may be shown without its files
            several = self.columns.shape[1] > 2
        return f"{self.file.name}{f', column {self.column}' * several}{moved}"

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
    z_pivot: Annotated[float, Unit("redshift")] = Field(
        default=0.62, ge=0, description="a redshift of at least 0"
    )

    def alignment(self) -> IntrinsicAlignment:
        """Returns the alignments."""
        from flowpm_dist.observables.lensing.sources import IntrinsicAlignment

        return IntrinsicAlignment(**self.model_dump())


class ShapeNoiseOptions(Options):
    """Noise of the shapes of galaxies, see `shape_noise`.

    Attributes:
        sigma_e: rms ellipticity of a galaxy, per component.
        n_eff: galaxies of each population per square minute of arc.
        seed: seed of the noise.
    """

    sigma_e: Positive = Field(description="a number above 0")
    n_eff: Annotated[Positive, Unit("1/arcmin^2")] = Field(
        description="a number of galaxies per square arcmin, above 0"
    )
    seed: Seed = Field(default=0, description=A_SEED)
