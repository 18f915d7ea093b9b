"""Stores in tests/data what the tests use of other codes' results.

    python tools/store_references.py FOLDER

FOLDER has the complete results, which tests/data/README.md describes. Inputs and tables are stored
as they are. Of an output on a grid, one value in `SHARES` is stored, at places drawn with a fixed
seed. Of the TreePM run's last particles, only the Fourier modes of their density are stored.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import numpy as np

STORE = Path(__file__).resolve().parents[1] / "tests" / "data"
SHARES = {
    "camb_linear_power": 1,
    "camb_neutrinos": 1,
    "fastpm_fd4_64": 16,
    "lensing": 8,
    "mpgadget_neutrinos": 1,
    "pmwd_closed_16": 2,
    "pmwd_lcdm_32": 8,
    "pmwd_lcdm_32_mesh2": 8,
    "pmwd_open_16": 2,
    "pmwd_w0wa_32": 8,
    "treepm_P1": 16,
}
LPT = ("linear_delta", "lpt_disp", "lpt_vel")
INITIAL = ("disp_initial", "vel_initial", "displacement_initial", "velocity_initial")
OUTPUTS = {
    "sites": (*LPT, *INITIAL, "disp_final", "vel_final", "final_disp", "final_vel")
    + ("grad_white_noise",),
    "cells": ("final_density",),
    "pixels": ("ray_position", "ray_jacobian", "born_kappa"),
}
UNUSED = {
    "fastpm_fd4_64": ("force_initial", "pk_final", "h", "Omega_b", "n_s", "sigma8")
    + ("force_mesh", "gradient"),
    "pmwd_lcdm_32_mesh2": LPT,
    "treepm_P1": ("velocity_final", "a_final", "grid", "meta")
    + ("softening_plummer_mpch", "softening_spline_h_mpch"),
}
MODES = 22
"""The largest wavenumber of the modes along an axis, in fundamental ones: above 1 h/Mpc."""

Arrays = dict[str, np.ndarray]


def in_part(data: Arrays, share: int) -> Arrays:
    """The arrays with one in `share` of the outputs' values, and the indices of these places."""
    kept = dict(data)
    for places, outputs in OUTPUTS.items():
        for name in set(outputs) & set(data):
            first = 1 if name == "born_kappa" else 0  # after its planes
            axes = 2 if places == "pixels" else 3
            shape = data[name].shape[first : first + axes]
            count = int(np.prod(shape))
            drawn = np.random.default_rng(count).choice(count, count // share, replace=False)
            index = np.unravel_index(np.sort(drawn), shape)
            kept[name] = data[name][(slice(None),) * first + index]
            kept[places] = np.array(index, np.uint8)
    return kept


def density_modes(displacement: np.ndarray, box_size: float) -> np.ndarray:
    """The Fourier modes of a density of mean 1, painted by cloud-in-cell on twice as many cells."""
    grid = displacement.shape[0]
    shape = (2 * grid,) * 3
    lattice = np.moveaxis(2.0 * np.indices((grid,) * 3), 0, -1)
    place = (lattice + displacement.astype(float) / box_size * 2 * grid).reshape(-1, 3)
    below, beyond = np.divmod(place, 1)
    density = np.zeros(np.prod(shape))
    for corner in itertools.product((0, 1), repeat=3):
        weight = np.where(corner, beyond, 1 - beyond).prod(axis=-1)
        cell = np.ravel_multi_index((below + corner).astype(int).T, shape, mode="wrap")
        density += np.bincount(cell, weight, density.size)
    modes = np.fft.rfftn(density.reshape(shape)) / grid**3
    both, half = np.arange(-MODES, MODES + 1), np.arange(MODES + 1)
    return modes[np.ix_(both, both, half)].astype(np.complex64)


def main() -> None:
    """Stores all files, and prints their sizes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    folder = parser.parse_args().folder
    for name, share in SHARES.items():
        path = STORE / f"{name}.npz"
        with np.load(folder / path.name, allow_pickle=False) as file:
            data = {key: file[key] for key in file.files if key not in UNUSED.get(name, ())}
        if "displacement_final" in data:
            last = data.pop("displacement_final")[-1]
            data["density_modes"] = density_modes(last, float(data["box_size"]))
        np.savez_compressed(path, allow_pickle=False, **in_part(data, share))
        print(f"{path.stat().st_size / 1e6:6.2f} MB  {path.name}")


if __name__ == "__main__":
    main()
