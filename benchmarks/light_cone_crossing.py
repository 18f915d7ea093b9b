"""The error of a light cone that shows particles when light leaves their lattice sites.

    python benchmarks/light_cone_crossing.py [--grid 128] [--box 256] [--z-max 1] [--times 40]

Our light cones show a particle at the time when light leaves its undisplaced position. This script
also finds, by bisection, the time when light leaves the displaced position. Displacements at either
time are interpolated linearly between the states of one run. The script prints the differences of
the positions, for a line of sight along z on which the box is repeated up to the redshift.
"""

from __future__ import annotations

import argparse

import numpy as np

import flowpm_dist as fpm
from flowpm_dist.cosmology.background import Distances

HALVINGS = 40


def displacements(grid: int, box: float, times: np.ndarray) -> np.ndarray:
    """Returns the displacements of a run of 20 steps [time, x, y, z, component] [Mpc/h]."""
    edges = fpm.scale_factor_steps(0.1, 1.0, 20)
    sim = fpm.Simulation(fpm.Cosmology.planck18(), grid, box, edges)
    found: list[np.ndarray] = []
    sim.run(seed=1, outputs=times, on_output=lambda state: found.append(state.displacement.numpy()))
    return np.stack(found)


def main() -> None:
    """Prints root mean squared differences."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--grid", type=int, default=128)
    parser.add_argument("--box", type=float, default=256.0)
    parser.add_argument("--z-max", type=float, default=1.0)
    parser.add_argument("--times", type=int, default=40)
    options = parser.parse_args()
    grid, box = options.grid, options.box
    times = np.linspace(1 / (1 + options.z_max), 1.0, options.times)
    moved = displacements(grid, box, times)
    distances = Distances(fpm.Cosmology.planck18())
    fine = np.linspace(times[0], 1.0, 4000)
    chi = distances.comoving(fine).numpy()  # decreasing

    def at(plane: int, a: np.ndarray) -> np.ndarray:
        """Returns the displacements of a plane of the lattice, each at its own time."""
        place = np.clip(np.interp(a, times, np.arange(len(times))), 0, len(times) - 1.000001)
        low, share = place.astype(int), (place % 1)[..., None]
        x, y = np.ogrid[:grid, :grid]
        return (1 - share) * moved[low, x, y, plane] + share * moved[low + 1, x, y, plane]

    squares, sizes = [], []
    for number in range(int(chi[0] / box * grid)):
        plane, distance = number % grid, (number + 0.5) * box / grid
        observed = np.full((grid, grid), np.interp(distance, chi[::-1], fine[::-1]))
        early, late = np.full_like(observed, times[0]), np.ones_like(observed)
        for _ in range(HALVINGS):
            middle = (early + late) / 2
            # Light at this time is farther away than the particle: it has yet to be crossed.
            yet = np.interp(middle, fine, chi) > distance + at(plane, middle)[..., 2]
            early, late = np.where(yet, middle, early), np.where(yet, late, middle)
        inside = (early > times[0] + 1e-3) & (late < 1 - 1e-3)
        shown = at(plane, observed)
        off = (shown - at(plane, (early + late) / 2))[inside]
        squares.append(off**2)
        sizes.append(np.sum(shown[inside] ** 2, -1))
    rms = np.sqrt(np.mean(np.concatenate(squares), 0))
    print(f"displacements: {np.sqrt(np.mean(np.concatenate(sizes))):.2f} Mpc/h rms")
    print(
        f"across: {np.hypot(rms[0], rms[1]):.4f} Mpc/h rms; along the line of sight: {rms[2]:.4f}"
    )


if __name__ == "__main__":
    main()
