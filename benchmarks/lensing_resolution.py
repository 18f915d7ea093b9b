"""The cell, force mesh and steps that C_l of lensing needs.

    python benchmarks/lensing_resolution.py [--box 100] [--universes 1]

The runs have one box and the same large scales on every grid. P(k, a) is measured at five times and
divided by the finest run's, which removes chance and the waves that the box lacks. Limber's
integral of halofit (Takahashi and others 2012) over the runs' own linear power, for sources at
z = 1, is computed with and without this factor. The ratio shows the error of the resolution at each
multipole. The last rows compare the finest run with halofit: the mean and scatter of its universes,
and the P(k) of all of them at a = 1.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from scipy.interpolate import RegularGridInterpolator

import flowpm_dist as fpm
from flowpm_dist.cosmology.nonlinear import Halofit
from flowpm_dist.observables.lensing import SourcePlane, convergence_power

COSMOLOGY = fpm.Cosmology(Omega_m=0.31, Omega_b=0.049, h=0.677, n_s=0.965, A_s=2e-9)
SOURCE = 1.0  # redshift
MULTIPOLES = np.array([250.0, 500, 700, 1000, 1400, 2000, 2800])
WAVENUMBERS = (0.5, 1.0, 2.0, 3.0, 5.0)
"""At which P(k) of a = 1 is printed [h/Mpc]."""
TIMES = np.linspace(1 / (1 + SOURCE), 1.0, 5)
CASES = [
    (64, 1, 10, False),
    (64, 2, 10, False),
    (64, 2, 20, True),
    (128, 1, 10, False),
    (128, 2, 10, False),
    (128, 2, 20, False),
    (128, 2, 20, True),
    (128, 2, 40, True),
    (128, 2, 80, True),
    (256, 1, 10, False),
    (256, 1, 20, True),
    (256, 2, 20, False),
    (256, 2, 40, True),
]
"""Particles a side, `mesh_factor`, steps and `deconvolve`, the finest last."""
Case = tuple[int, int, int, bool]
Power = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def interlaced_power(state: fpm.State, grid: int, box: float) -> Any:
    """Returns the spectrum of a state, up to 0.8 times the waves of as many cells as particles."""
    densities = [state.density(2, shift=shift).delta() for shift in (0.0, 0.5)]
    bins = np.arange(0.5, 0.8 * grid) * (2 * np.pi / box)  # the mesh resolves grid
    return fpm.power_spectrum(densities[0], interlaced=densities[1], window="cic", bins=bins)


def scaled(power: Power, times: np.ndarray, k: np.ndarray, ratio: np.ndarray) -> Power:
    """Returns `power` times a ratio [time, k], which is held beyond the last wavenumbers."""
    read = RegularGridInterpolator((times, k), ratio, bounds_error=False, fill_value=None)

    def product(wavenumber: tf.Tensor, a: tf.Tensor) -> tf.Tensor:
        held = np.clip(wavenumber.numpy(), k[0], k[-1])
        return power(wavenumber, a) * read(np.stack(np.broadcast_arrays(a.numpy(), held), -1))

    return product


def spectra(case: Case, box: float, seed: int) -> tuple[Any, Any]:
    """Returns the wavenumbers [h/Mpc] and P(k) [(Mpc/h)^3] at each of TIMES, [time, k]."""
    grid, mesh_factor, steps, deconvolve = case
    edges = fpm.scale_factor_steps(0.1, 1.0, steps)
    options: dict[str, Any] = {"mesh_factor": mesh_factor, "deconvolve": deconvolve}
    options |= {"noise": "nested"}
    sim = fpm.Simulation(COSMOLOGY, grid, box, edges, fixed_amplitude=True, **options)
    found = []

    def measure(state: fpm.State) -> None:
        found.append(interlaced_power(state, grid, box))

    sim.run(seed // 2, paired=seed % 2 == 1, outputs=TIMES, on_output=measure)
    return found[0].k, np.stack([np.asarray(one.power) for one in found])


def convergence(power: Power) -> np.ndarray:
    """Returns Limber's C_l of sources at z = 1."""
    return convergence_power(MULTIPOLES, [SourcePlane(SOURCE)], COSMOLOGY, power).numpy()[0, 0]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--box", type=float, default=100.0)
    parser.add_argument("--universes", type=int, default=1)
    parser.add_argument("--cases", type=int, nargs="+", help="by number; the last is the measure")
    options = parser.parse_args()
    halofit = Halofit(fpm.LinearPower(COSMOLOGY))  # the runs' own transfer function
    whole = convergence(halofit)
    cases = CASES if options.cases is None else [CASES[i] for i in options.cases]
    titles = [f"l = {ell:.0f}" for ell in MULTIPOLES] + [f"P({k:g})" for k in WAVENUMBERS]
    print(f"| cell [Mpc/h] | B | steps | deconvolved | {' | '.join(titles)} | universe | minutes |")

    def row(case: Case, k: np.ndarray, ratio: np.ndarray, name: str) -> None:
        ratios = convergence(scaled(halofit, TIMES, k, ratio)) / whole
        ratios = np.append(ratios, np.interp(WAVENUMBERS, k, ratio[-1]))
        figures = " | ".join(f"{value:.3f}" for value in ratios)
        cell = f"{options.box / case[0]:.2f} | {case[1]} | {case[2]} | {case[3]}"
        print(f"| {cell} | {figures} | {name} |", flush=True)

    for seed in range(options.universes):
        fine_k, fine = spectra(cases[-1], options.box, seed)
        absolute = [halofit(fine_k, np.full_like(fine_k, a)).numpy() for a in TIMES]
        row(cases[-1], fine_k, fine / np.stack(absolute), f"{seed}, over halofit")
        for case in cases[:-1]:
            begun = time.monotonic()
            k, power = spectra(case, options.box, seed)
            minutes = (time.monotonic() - begun) / 60
            row(case, k, power / fine[:, : len(k)], f"{seed} | {minutes:.1f}")


if __name__ == "__main__":
    main()
