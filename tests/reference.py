"""Finds the reference data: another code's answers, kept beside the checkout."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import numpy as np


@functools.cache
def reference(name: str) -> dict[str, np.ndarray]:
    """The arrays of `<name>.npz` in the folder FLOWPM_REFERENCE, or ../shared/reference.

    Raises:
        FileNotFoundError: no such file, with the two places it may be put.
    """
    default = Path(__file__).resolve().parents[1] / ".." / "shared" / "reference"
    folder = Path(os.environ.get("FLOWPM_REFERENCE", default)).resolve()
    path = folder / f"{name}.npz"
    if not path.is_file():
        raise FileNotFoundError(
            f"reference data {path} is missing: put the folder shared/reference beside the "
            "checkout, or name it in the environment variable FLOWPM_REFERENCE"
        )
    with np.load(path, allow_pickle=False) as data:
        return {key: data[key] for key in data.files}
