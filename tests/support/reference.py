"""Reads reference data: what tests/data has of other codes' results."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import flowpm_dist as fpm

DATA = Path(__file__).resolve().parents[1] / "data"


@functools.cache
def reference(name: str) -> dict[str, np.ndarray]:
    """The arrays of tests/data/NAME.npz, which tests/data/README.md describes."""
    with np.load(DATA / f"{name}.npz", allow_pickle=False) as data:
        return dict(data)


@functools.cache
def recipe(name: str) -> dict[str, Any]:
    """The options with which docs/howto/moving_from_other_codes.md makes the simulation `name`."""
    page = DATA.parents[1] / "docs" / "howto" / "moving_from_other_codes.md"
    first = re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert first is not None
    made: dict[str, Any] = {}
    with patch.object(fpm, "Simulation", lambda cosmology, **options: options):
        exec(first[1], made)
    return {n: v for n, v in made[name].items() if n not in ("grid", "box_size", "steps")}


def parameters_of(data):
    """The cosmology of reference data, as `Cosmology` takes it."""
    return {name: float(data[name]) for name in ("Omega_m", "Omega_b", "h", "n_s", "A_s")}


def pmwd_parameters(data):
    """The cosmology of a pmwd run, as `Cosmology` takes it."""
    parameters = {name: float(data[f"cosmo_{name}"]) for name in ("Omega_m", "Omega_b", "h", "n_s")}
    parameters["A_s"] = float(data["cosmo_A_s_1e9"]) * 1e-9
    if "cosmo_w_0_" in data:
        parameters |= {"w0": float(data["cosmo_w_0_"]), "wa": float(data["cosmo_w_a_"])}
    if "cosmo_Omega_k" in data:
        parameters["Omega_k"] = float(data["cosmo_Omega_k"])
    return parameters


def relative_rms(value, expected):
    """Root mean square of the difference, divided by that of the expected values."""
    return np.sqrt(((value - expected) ** 2).mean() / (expected**2).mean())
