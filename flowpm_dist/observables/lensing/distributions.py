"""Distributions n(z) of sources as tables and as Smail's formula. Without TensorFlow."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from flowpm_dist.io.errors import UserError
from flowpm_dist.options.regular_files import read_numbers

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
    table = read_distributions(path, column)
    return table[:, 0], table[:, column]


def read_distributions(path: str | Path, column: int = 1) -> np.ndarray:
    """Reads all columns of such a file [row, column]; arguments and errors as above."""
    try:
        table = read_numbers(Path(path))
        if not 1 <= column < table.shape[1]:
            count = "1 column" if table.shape[1] == 1 else f"{table.shape[1]} columns"
            raise ValueError(f"it has {count}: n(z) cannot be column {column}")
        check_redshifts(table[:, 0])
        check_numbers(table[:, column])
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: no n(z) of sources: {reason}") from error
    return table


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
