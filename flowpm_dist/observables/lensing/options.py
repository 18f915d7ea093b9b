"""The options of lensing: sources, intrinsic alignments, noise. Nothing here imports TensorFlow."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import BeforeValidator, Field

from flowpm_dist.io.errors import UserError
from flowpm_dist.io.files import checksum, read_text
from flowpm_dist.options import A_SEED, AnyPath, Options, Problem, Seed, Unit, listed

if TYPE_CHECKING:
    from flowpm_dist.observables.lensing.sources import IntrinsicAlignment, Sources


NODES, WEIGHTS = np.polynomial.legendre.leggauss(8)
"""Quadrature between each two edges of n(z)."""
Z_MIN = 1e-9
"""Lowest redshift of sources: at 0 the inverse of their distance is infinite."""
CELLS = 48
"""Cells in which a formula is integrated."""


def read_distribution(path: str | Path, column: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Reads n(z) from a text file with columns z, n; `#` begins a comment.

    Args:
        path: the file; blanks or commas separate its columns.
        column: number of the column with n(z); column 0 has z.

    Returns:
        Redshifts and n(z) [row], float64.

    Raises:
        UserError: no such file or column, or what `check_distribution` refuses.
    """
    try:
        text = read_text(Path(path)).replace(",", " ")
        with warnings.catch_warnings(action="ignore"):  # of an empty file, refused below
            table = np.loadtxt(text.splitlines(), ndmin=2)
        if not table.size:
            raise ValueError("it has no rows of numbers")
        if not 1 <= column < table.shape[1]:
            count = "1 column" if table.shape[1] == 1 else f"{table.shape[1]} columns"
            raise ValueError(f"it has {count}: n(z) cannot be column {column}")
        z, n = table[:, 0], table[:, column]
        check_redshifts(z)
        check_numbers(n)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: no n(z) of sources: {reason}") from error
    return z, n


def check_redshifts(z: np.ndarray) -> None:
    """Check the redshifts of a table [row].

    Raises:
        ValueError: they do not increase from 0 or more, are infinite, or fewer than two.
    """
    if z.ndim != 1 or z.size < 2:
        raise ValueError(f"at least two rows of redshifts are needed: got shape {z.shape}")
    if np.isinf(z).any():
        raise ValueError(f"the redshifts of a source distribution must be finite: got {z[-1]:g}")
    if not (np.diff(z) > 0).all() or z[0] < 0:
        raise ValueError("the redshifts of a source distribution must increase from 0 or more")


def check_numbers(n: np.ndarray) -> None:
    """Check the numbers of sources of a table [row], of any normalisation.

    Raises:
        ValueError: they are negative, not finite, or 0 everywhere.
    """
    if not (np.isfinite(n) & (n >= 0)).all():
        raise ValueError("n(z) of a source distribution must be finite and not negative")
    if not n.any():
        raise ValueError("n(z) of a source distribution is 0 everywhere: it has no sources")


def smail_edges(z_max: float) -> np.ndarray:
    """Returns the edges of the quadrature of Smail's formula [cell + 1]."""
    return np.linspace(0.0, z_max, CELLS + 1)


def smail(z: np.ndarray, z0: float, alpha: float, beta: float) -> np.ndarray:
    """Returns z^alpha exp(-(z / z0)^beta), of any normalisation."""
    x = np.maximum(z, 1e-12) / z0
    with np.errstate(over="ignore", invalid="ignore"):
        return x**alpha * np.exp(-(x**beta))


def quadrature(edges: np.ndarray, shift: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns nodes and weights for the integral of n(z) over all redshifts above 0.

    Args:
        edges: edges of redshift cells, before the shift [cell + 1]. n(z) is smooth in each cell.
        shift: shift of all redshifts.

    Returns:
        Redshifts before the shift and weights [cell, node].
    """
    limits = np.maximum(edges + shift, Z_MIN)
    half = 0.5 * np.diff(limits)[:, np.newaxis]
    return limits[:-1, np.newaxis] + half * (1.0 + NODES) - shift, half * WEIGHTS


def check_total(n: np.ndarray, weights: np.ndarray, shift: float) -> None:
    """Check that there are sources above z = 0 after a shift.

    Args:
        n: n(z) at the nodes of `quadrature`.
        weights: weights of the nodes.
        shift: shift of all redshifts, for the message.

    Raises:
        ValueError: the integral of n(z) is not above 0, or not finite.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        total = float((weights * n).sum())
    if not 0 < total < np.inf:
        raise ValueError(
            f"n(z) of a source distribution integrates to {total:g} above z = 0 with shift = "
            f"{shift:g}: it must be above 0 and finite"
        )


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

    def idle(self) -> dict[str, str]:
        """See `Options.idle`."""
        goes_with = {"z_max": "smail", "column": "file"}
        return {key: other for key, other in goes_with.items() if getattr(self, other) is None}

    def problems(self) -> Iterator[Problem]:
        """See `Options.problems`."""
        yield from self.exactly_one("redshift", "smail", "file")
        first = "redshift" if self.smail is None else "z_max"
        if not self.file and (getattr(self, first) or math.inf) + self.shift <= 0:
            yield self.problem("shift", f"{first} plus shift must be above 0")

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
