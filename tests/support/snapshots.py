"""Snapshots of particles of several types, as AREPO writes them, made with h5py alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np

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
    counts = np.zeros(6, np.int64)
    for kind, columns in types.items():
        counts[kind] = len(columns["position"])
    facts = {
        "NumPart_ThisFile": counts, "NumPart_Total": counts, "MassTable": np.zeros(6),
        "NumPart_Total_HighWord": np.zeros(6, np.int64), "Time": TIME, "Redshift": 1 / TIME - 1,
        "BoxSize": SIDE * 1e3, "NumFilesPerSnapshot": 1, "Omega0": OMEGA_M, "HubbleParam": H,
        "OmegaLambda": 1 - OMEGA_M, "UnitLength_in_cm": 3.085678e21, "UnitMass_in_g": 1.989e43,
        "UnitVelocity_in_cm_per_s": 1e5, **header,
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file.create_group("Header").attrs.update(facts)
        for kind, columns in types.items():
            group = file.create_group(f"PartType{kind}")
            group["Coordinates"] = columns["position"] * 1e3
            group["Velocities"] = columns["velocity"] / np.sqrt(TIME)
            group["Masses"] = columns["mass"]
            group["ParticleIDs"] = np.arange(len(columns["position"]), dtype=np.uint64)


def joined(types: dict[int, dict[str, np.ndarray]], name: str) -> np.ndarray:
    """A quantity of the particles of all types."""
    return np.concatenate([columns[name] for columns in types.values()])
