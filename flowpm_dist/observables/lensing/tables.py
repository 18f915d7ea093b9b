"""Tables of n(z), the distribution of sources in redshift; nothing here imports TensorFlow."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np

from flowpm_dist.io.errors import UserError


def read_distribution(path: str | Path, column: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Reads n(z) from a text file with columns z, n; `#` begins a comment.

    Args:
        path: of the file, columns separated by blanks or commas.
        column: the number of the column that has n(z), counted from 0, which is that of z.

    Returns:
        Redshifts and n(z) [row], float64.

    Raises:
        UserError: no such file or column, or what `check_distribution` refuses.
    """
    try:
        text = Path(path).read_text(encoding="utf-8").replace(",", " ")
        with warnings.catch_warnings(action="ignore"):  # of an empty file, refused below
            table = np.loadtxt(text.splitlines(), ndmin=2)
        if not 1 <= column < table.shape[1]:
            raise ValueError(f"it has {table.shape[1]} columns: n(z) cannot be column {column}")
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
        ValueError: they do not increase from 0 or more, or there are fewer than two.
    """
    if z.ndim != 1 or z.size < 2:
        raise ValueError(f"at least two rows of redshifts are needed: got shape {z.shape}")
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
