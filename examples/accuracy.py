"""Compares each integrator with a converged run: P(k) and r(k), by number of steps and force mesh.

    python examples/accuracy.py [--grid 128] [--spacing 2.0] [--output accuracy]
    mpirun -np 2 python examples/accuracy.py

The script runs FastPM, BullFrog and COLA from one white noise, with 5, 10, 20 and 40 steps
(BullFrog also with 6), on force meshes as fine as the particle lattice and twice as fine. The runs
start from third-order LPT at a = 0.1. The converged run has 100 BullFrog steps from a = 0.02 on a
mesh three times as fine. A FastPM run with the same settings shows how well it is converged. Steps
are equal in a. The results are OUTPUT.csv, OUTPUT.md and OUTPUT.png. The script takes about ten
minutes on two cores.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import numpy as np

import flowpm_dist as fpm
from flowpm_dist.statistics import compare
from meshimpl import launch

AT = (0.1, 0.2, 0.5, 1.0)  # [h/Mpc]
STEPS = (5, 10, 20, 40)
SEED = 2026
COSMOLOGY = fpm.Cosmology.planck18().replace(A_s=2.1064e-9)


def densities(state: Any) -> tuple[Any, Any]:
    """Returns the density on a mesh twice as fine as the lattice, and shifted by half a cell."""
    return state.density(2), state.density(2, shift=0.5)


def measure(state: Any, truth: tuple[Any, Any] | None, size: float) -> Any:
    """Returns power and correlation with the truth (with itself where there is none)."""
    plain, shifted = densities(state)
    other, other_shifted = truth or (plain, shifted)
    return compare(plain, other, size, window="cic", interlaced=(shifted, other_shifted))


def halofit(k: np.ndarray) -> np.ndarray:
    """Returns CAMB's non-linear power at a = 1 [(Mpc/h)^3]."""
    import camb

    c = COSMOLOGY
    run = camb.CAMBparams()
    run.set_cosmology(
        H0=100 * c.h,
        ombh2=c.Omega_b * c.h**2,
        omch2=(c.Omega_m - c.Omega_b) * c.h**2,
        mnu=0,
        nnu=3.046,
    )
    run.InitPower.set_params(As=c.A_s, ns=c.n_s)
    run.set_matter_power(redshifts=[0.0], kmax=20.0)
    run.NonLinear = camb.model.NonLinear_both
    return camb.get_results(run).get_matter_power_interpolator().P(0.0, k)


def near(k: np.ndarray, values: np.ndarray, at: float) -> float:
    """Returns the mean over the bins within 5 % of a wavenumber, or the nearest bin."""
    inside = np.abs(k / at - 1) < 0.05
    inside[np.argmin(np.abs(k - at))] = True
    return float(values[inside].mean())


def draw(results: dict[tuple[str, int, int], Any], guide: np.ndarray, path: Path) -> None:
    """Draws P(k) over the converged one, and 1 - r(k)."""
    from matplotlib.figure import Figure

    names = sorted({name for name, _, _ in results})
    figure = Figure(figsize=(11, 9), layout="constrained")
    axes = figure.subplots(len(names), 2, sharex=True)
    colours = {5: "#d1495b", 6: "#b07aa1", 10: "#edae49", 20: "#00798c", 40: "#1f3a5f"}
    for row, name in zip(axes, names, strict=True):
        for (scheme, steps, mesh), found in results.items():
            if scheme != name:
                continue
            style = {1: "--", 2: "-"}[mesh]
            label = f"{steps} steps, B = {mesh}"
            ratio = found.power_a / found.power_b
            row[0].plot(found.k, ratio, style, color=colours[steps], label=label, lw=1.2)
            lost = np.maximum(1 - found.correlation, 1e-7)
            row[1].plot(found.k, lost, style, color=colours[steps], lw=1.2)
        found = next(iter(results.values()))
        row[0].plot(found.k, guide / found.power_b, ":", color="0.5", label="halofit", lw=1)
        row[0].axhspan(0.99, 1.01, color="0.9", zorder=0)
        row[0].set(ylim=(0.8, 1.08), ylabel="P / P converged", title=name)
        row[1].set(yscale="log", ylim=(1e-6, 0.3), ylabel="1 - r", title=name)
        row[0].legend(fontsize=6.5, ncols=2, loc="lower left")
    for axis in axes[-1]:
        axis.set(xscale="log", xlabel="k [h/Mpc]")
    figure.savefig(path, dpi=130)


def main() -> None:
    """Runs everything, and writes on rank 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--grid", type=int, default=128, help="particles along each side")
    parser.add_argument("--spacing", type=float, default=2.0, help="between them [Mpc/h]")
    parser.add_argument("--output", type=Path, default=Path("accuracy"), help="stem of the files")
    options = parser.parse_args()
    size = options.grid * options.spacing
    first = launch.detect().rank == 0

    def run(integrator: str, steps: int, mesh: int) -> Any:
        a = fpm.scale_factor_steps(0.02 if mesh == 3 else 0.1, 1.0, steps)
        sim = fpm.Simulation(
            COSMOLOGY,
            options.grid,
            size,
            a,
            integrator=integrator,
            mesh_factor=mesh,
            lpt_order=3,
        )
        state = sim.run(seed=SEED)
        if first:
            seconds = state.timings["total"]
            print(f"{integrator:9s} {steps:3d} steps, B = {mesh}: {seconds:6.1f} s", flush=True)
        return state

    truth = densities(run("bullfrog", 100, 3))
    results = {("fastpm, converged", 100, 3): measure(run("fastpm", 100, 3), truth, size)}
    for integrator in ("fastpm", "bullfrog", "cola"):
        for mesh in (1, 2):
            for steps in STEPS if integrator != "bullfrog" else sorted({*STEPS, 6}):
                state = run(integrator, steps, mesh)
                results[integrator, steps, mesh] = measure(state, truth, size)
    if not first:
        return
    rows = []
    for (integrator, steps, mesh), found in results.items():
        ratio = found.power_a / found.power_b - 1
        errors = [100 * near(found.k, ratio, k) for k in AT]
        lost = [near(found.k, 1 - found.correlation, k) for k in AT]
        rows.append([integrator, steps, mesh, *errors, *lost])
    header = ["integrator", "steps", "B"]
    header += [f"P error at {k} [%]" for k in AT] + [f"1 - r at {k}" for k in AT]
    with options.output.with_suffix(".csv").open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for integrator, steps, mesh, *numbers in rows:
        texts = [f"{x:+.2f}" for x in numbers[:4]] + [f"{x:.1e}" for x in numbers[4:]]
        lines.append("| " + " | ".join([integrator, str(steps), str(mesh), *texts]) + " |")
    options.output.with_suffix(".md").write_text("\n".join(lines) + "\n")
    shown = {key: found for key, found in results.items() if key[2] < 3}
    found = next(iter(shown.values()))
    draw(shown, halofit(found.k), options.output.with_suffix(".png"))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
