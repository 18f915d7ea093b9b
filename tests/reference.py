"""Reads reference data: other codes' results, kept next to the checkout."""

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
            f"reference data {path} is missing: put the folder shared/reference next to the "
            "checkout, or name it in the environment variable FLOWPM_REFERENCE"
        )
    with np.load(path, allow_pickle=False) as data:
        return {key: data[key] for key in data.files}


def parameters_of(data):
    """The cosmology of reference data, as `Cosmology` takes it."""
    return {name: float(data[name]) for name in ("Omega_m", "Omega_b", "h", "n_s", "A_s")}


def pmwd_parameters(data):
    """The cosmology of a pmwd run, as `Cosmology` takes it."""
    parameters = {name: float(data[f"cosmo_{name}"]) for name in ("Omega_m", "Omega_b", "h", "n_s")}
    parameters["A_s"] = float(data["cosmo_A_s_1e9"]) * 1e-9
    if "cosmo_w_0_" in data:
        parameters |= {"w0": float(data["cosmo_w_0_"]), "wa": float(data["cosmo_w_a_"])}
    return parameters


def relative_rms(value, expected):
    """Root mean square of the difference, divided by that of the expected values."""
    return np.sqrt(((value - expected) ** 2).mean() / (expected**2).mean())
