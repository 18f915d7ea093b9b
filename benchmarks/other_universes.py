"""Reconstructions of universes that the model did not make.

    python benchmarks/other_universes.py FOLDER [--only NAME ...] [--grid 64] [--ranks 2]

The model makes five steps, with forces on the grid of the particles, as in
examples/reconstruct.toml. It is fitted to universes with the same white noise, in cells of 2 Mpc/h,
observed without noise:

    same      made by the model itself
    steps     made with 40 steps
    force     made with 40 steps, with deconvolved forces on a mesh twice as fine
    biased    as `force`, for tracers with Lagrangian bias; the model's bias is linear in the final
              density, and is fitted as well

Results that FOLDER already has are not made again. The script prints r(k) and T(k) of the linear
fields.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import flowpm, report, start_worker

from meshimpl import launch

RUN_FILE = """
[box]
grid = {grid}
size = {size}
[cosmology]
Omega_m = 0.30966
Omega_b = 0.04897
h = 0.6766
n_s = 0.96822
sigma8 = 0.81
[evolution]
a_start = 0.1
steps = 5
deconvolve = false
[observation]
structure = "pm"
kind = "density"
sigma = 0.1
{bias}
[data]
file = "density.npy"
[likelihood]
error = 0.3
{priors}
[search]
evaluations = {evaluations}
"""
SEED, CELL = 42, 2.0
"""Seed of the white noise; side of a cell [Mpc/h]."""


@dataclass(frozen=True)
class Universe:
    """How a universe is made and observed.

    Attributes:
        steps: of its evolution.
        options: of its simulation.
        bias: of its tracers; none for matter.
    """

    steps: int
    options: dict[str, Any]
    bias: dict[str, float] | None = None


FINE = {"mesh_factor": 2, "deconvolve": True}
UNIVERSES = {
    "same": Universe(5, {"deconvolve": False}),
    "steps": Universe(40, {"deconvolve": False}),
    "force": Universe(40, FINE),
    "biased": Universe(40, FINE, {"b1": 0.5, "b2": 0.1}),
}


def worker(name: str, grid: int, folder: Path) -> None:
    """Makes a universe; writes its linear field and what is observed."""
    launch.configure_threads()
    import flowpm_dist as fpm
    from flowpm_dist.observables import ForwardModel

    made = UNIVERSES[name]
    edges = fpm.scale_factor_steps(0.1, 1.0, made.steps)
    cosmology = fpm.Cosmology(Omega_m=0.30966, Omega_b=0.04897, h=0.6766, n_s=0.96822, sigma8=0.81)
    sim = fpm.Simulation(cosmology, grid, CELL * grid, edges, **made.options)
    state = sim.run(seed=SEED)
    observed = fpm.Field(ForwardModel(sim, "pm", bias=made.bias).observe(state, {}), sim.box)
    arrays = {"linear": state.linear_delta.numpy(), "density": observed.numpy()}
    if launch.detect().rank == 0:
        for key, values in arrays.items():
            np.save(folder / "aside.npy", values)
            (folder / "aside.npy").rename(folder / f"{key}.npy")
    report({"deviation": float(arrays["density"].std())})


def reconstruct(name: str, folder: Path, options: argparse.Namespace) -> None:
    """Makes a universe and finds its initial conditions, unless both are there."""
    grid, bias = options.grid, UNIVERSES[name].bias
    if not (folder / "density.npy").exists():
        folder.mkdir(parents=True, exist_ok=True)
        arguments = [f"--name={name}", f"--grid={grid}", f"--folder={folder}"]
        start_worker(sys.argv[0], arguments, options.ranks, 1)
    text = RUN_FILE.format(
        grid=grid,
        size=CELL * grid,
        evaluations=options.evaluations,
        bias="bias = {b = 1.5}" if bias else "",
        priors="[priors]\nb = [0.8, 2.5]" if bias else "",
    )
    (folder / "run.toml").write_text(text)
    words = ["reconstruct", folder / "run.toml", "--output", folder / "found"]
    words += ["--ranks", options.ranks]
    words += ["--resume"] if (folder / "found").exists() else []
    subprocess.run(flowpm(*words), check=True)


def folder_of(name: str, options: argparse.Namespace) -> Path:
    """Returns where a universe lies, with what was found of it."""
    return Path(options.where) / f"{options.grid}-{options.evaluations}" / name


def main() -> None:
    """Makes, reconstructs and compares all universes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("where", type=str, help="FOLDER; in a worker its role")
    parser.add_argument("--only", nargs="+", choices=UNIVERSES, default=list(UNIVERSES))
    parser.add_argument("--grid", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--evaluations", type=int, default=200)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.where == "worker":
        worker(options.name, options.grid, options.folder)
        return
    for name in options.only:
        reconstruct(name, folder_of(name, options), options)
    compare([folder_of(name, options) for name in options.only], CELL * options.grid)


def compare(folders: list[Path], size: float) -> None:
    """Prints r(k) and T(k) of the reconstructed linear fields, compared with the true ones."""
    import flowpm_dist as fpm
    from flowpm_dist.io import load_snapshot

    for number, folder in enumerate(folders):
        found = load_snapshot(folder / "found" / "reconstruction.zarr")["linear_delta"]
        pair = fpm.compare(np.asarray(found), np.load(folder / "linear.npy"), size)
        if number == 0:
            print("k [h/Mpc] | " + " | ".join(f"{x:.2f}" for x in pair.k))
        print(f"r, {folder.name} | " + " | ".join(f"{x:.3f}" for x in pair.correlation))
        print(f"T, {folder.name} | " + " | ".join(f"{x:.3f}" for x in pair.transfer))


if __name__ == "__main__":
    main()
