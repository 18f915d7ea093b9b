"""Snapshots of particles of several types, as AREPO writes them, for what is measured of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from foreign_snapshots import KPC, gadget_hdf5

SIDE, TIME, OMEGA_M, H = 20.0, 0.5, 0.3, 0.7
"""[Mpc/h], scale factor, matter, Hubble constant over 100."""


def points(seed: int = 1, gas: int = 700, dark: int = 1000) -> dict[int, dict[str, np.ndarray]]:
    """Gas and dark matter anywhere in the box: position [Mpc/h], velocity [km/s], mass."""
    rng = np.random.default_rng(seed)
    return {
        kind: {
            "position": rng.uniform(0, SIDE, (count, 3)),
            "velocity": rng.normal(0, 300, (count, 3)),
            "mass": rng.uniform(0.5, 2, count) * scale,
        }
        for kind, count, scale in ((0, gas, 0.2), (1, dark, 1.0))
    }


def write_snapshot(path: Path, types: dict[int, dict[str, np.ndarray]], **header: Any) -> None:
    """Writes one file in kpc/h and sqrt(a) km/s, positions in double precision."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stored = {
        kind: {
            "position": columns["position"] * 1e3,
            "velocity": columns["velocity"] / np.sqrt(TIME),
            "mass": columns["mass"],
            "id": np.arange(len(columns["position"]), dtype=np.uint64),
        }
        for kind, columns in types.items()
    }
    facts = {
        "Time": TIME, "Redshift": 1 / TIME - 1, "BoxSize": SIDE * 1e3, "UnitLength_in_cm": KPC,
        "Omega0": OMEGA_M, "OmegaLambda": 1 - OMEGA_M, "HubbleParam": H, **header,
    }  # fmt: skip
    gadget_hdf5(path.with_suffix(""), [stored], **facts)


def joined(types: dict[int, dict[str, np.ndarray]], name: str) -> np.ndarray:
    """A quantity of the particles of all types."""
    return np.concatenate([columns[name] for columns in types.values()])
