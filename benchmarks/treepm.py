"""TreePM runs of the universes that corrections learn from, are tuned on, and are judged by.

    python benchmarks/treepm.py SET FOLDER --program PATH/MP-Gadget [--only 4 2 1] [--jobs 1]
        [--times 0.33 0.5 0.67 1.0]

A universe is third-order LPT at a = 0.1 by this project, and MP-Gadget's run from it to a = 1, on
one core. FOLDER/treepm_NAME.npz holds the first particles and those at the times, in the form of
tests/data/README.md; what is there already is not made again. 32^3 particles take one to three
minutes, 64^3 half an hour or more.

The sets are apart in cosmology and noise. "train" is what is learned from, and "develop" chooses
between what was learned, together with P1 and P2 of tests/data/README.md, which guided earlier
choices. "sealed" is opened once, when nothing more is changed. "opened" and "opened2" are sealed
sets that judged the corrections before the present ones, which learned from them, too. "next" will
judge the corrections that come after these. Networks
that learned from cheap universes are "asked" about universes within their priors.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from scipy.stats import qmc

import flowpm_dist as fpm

TIMES = (0.33, 0.5, 0.67, 1.0)
"""Scale factors of the outputs that corrections are learned from."""
START = 0.1
CELLS = (4, 2, 1)
"""Spacings of the particles [Mpc/h]."""
RANGES = {"Omega_m": (0.2, 0.4), "sigma8": (0.7, 1.0), "n_s": (0.9, 1.0)}
PRIORS = {"Omega_m": (0.25, 0.35), "sigma8": (0.78, 0.95), "n_s": (0.9, 1.0)}
"""The priors of the networks that benchmarks/corrected_training.py trains."""
FIXED = {"Omega_b": 0.049, "h": 0.677}


@dataclass(frozen=True)
class UniverseSet:
    """What makes a set of universes.

    Attributes:
        cosmologies: their number.
        seed: for the cosmologies.
        noise: comes before the seeds of the universes' white noise, of which no two may be equal.
        spacings: the distances of the particles [Mpc/h].
        everywhere: whether each cosmology has particles of each spacing, with other noise; else
            the spacings take turns.
        ranges: the lowest and the highest value of each parameter.
    """

    cosmologies: int
    seed: int
    noise: int
    spacings: tuple[int, ...] = CELLS
    everywhere: bool = False
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=lambda: RANGES)


SETS = {
    "train": UniverseSet(24, 5100, 5101),
    "develop": UniverseSet(12, 5200, 5201),
    "opened": UniverseSet(8, 5300, 105301, everywhere=True),
    "opened2": UniverseSet(8, 5400, 205401, everywhere=True),
    "sealed": UniverseSet(8, 5500, 405501, everywhere=True),
    "next": UniverseSet(8, 5700, 505701, everywhere=True),
    "asked": UniverseSet(56, 5600, 305601, spacings=(2,), ranges=PRIORS),
}
PARAMETERS = {
    **dict.fromkeys(
        [
            *("CoolingOn", "StarformationOn", "RadiationOn", "BlackHoleOn", "MetalReturnOn"),
            *("DensityIndependentSphOn", "DensityOn", "HydroOn", "WindOn", "MassiveNuLinRespOn"),
            *("SnapshotWithFOF", "OutputPotential"),
        ],
        0,
    ),
    "TimeLimitCPU": 1000000,
    "TimeMax": 1.0,
    "MaxMemSizePerNode": 1500,
    "MaxDomainTimeBinDepth": 8,
    "GravitySoftening": 0.05,
    "ErrTolIntAccuracy": 0.025,
    "ErrTolForceAcc": 0.002,
    "MaxSizeTimestep": 0.02,
    "MaxRMSDisplacementFac": 0.1,
    "Asmth": 1.5,
    "TreeRcut": 6,
    "SplitGravityTimestepsOn": 1,
}
"""MP-Gadget's parameters; the softening is Plummer-equivalent, in mean separations."""
MESH = 3
"""Cells of its mesh per particle and side."""


@dataclass(frozen=True)
class Universe:
    """A universe of a set: parameters, particles a side, their spacing [Mpc/h], seed."""

    name: str
    cosmology: dict[str, float]
    grid: int
    spacing: int
    seed: int


def universes(name: str) -> list[Universe]:
    """Returns the universes of a set; sealed ones have two more, of 64^3 particles."""
    made = SETS[name]
    sampler = qmc.LatinHypercube(len(made.ranges), rng=np.random.default_rng(made.seed))
    low, high = np.transpose(list(made.ranges.values()))
    cosmologies = [
        {**dict(zip(made.ranges, np.round(row, 4).tolist(), strict=True)), **FIXED}
        for row in low + sampler.random(made.cosmologies) * (high - low)
    ]
    found = []
    for n, cosmology in enumerate(cosmologies):
        in_turn = (made.spacings[n % len(made.spacings)],)
        for spacing in made.spacings if made.everywhere else in_turn:
            seed = made.noise + 10 * n + spacing
            found.append(Universe(f"{name}-{n:02d}-{spacing}", cosmology, 32, spacing, seed))
    if name in ("sealed", "next"):
        for n, spacing in ((0, 2), (1, 1)):
            seed = made.noise + 500 + n
            found.append(Universe(f"{name}-64-{spacing}", cosmologies[n], 64, spacing, seed))
    return found


def start(universe: Universe, times: Sequence[float], folder: Path) -> None:
    """Writes the first particles and MP-Gadget's parameters into a folder."""
    size, cosmology = float(universe.grid * universe.spacing), universe.cosmology
    simulation = fpm.Simulation(
        fpm.Cosmology(**cosmology),
        universe.grid,
        size,
        fpm.scale_factor_steps(START, 1.0, 10),
        lpt_order=3,
        precision="float64",
    )
    state = simulation.lpt(seed=universe.seed, a=START)
    path = state.save(folder, format="bigfile")
    values = {
        "InitCondFile": path,
        "OutputDir": folder / "output",
        "OutputList": ", ".join(map(str, times)),
        "Omega0": cosmology["Omega_m"],
        "OmegaLambda": 1 - cosmology["Omega_m"],
        "OmegaBaryon": cosmology["Omega_b"],
        "HubbleParam": cosmology["h"],
        "Nmesh": MESH * universe.grid,
        **PARAMETERS,
    }
    text = "".join(f"{key} = {value}\n" for key, value in values.items())
    (folder / "paramfile.gadget").write_text(text)
    np.savez(folder / "start.npz", *(field.numpy() for field in particles(state)))


def particles(state: fpm.State) -> tuple[fpm.Field, fpm.Field]:
    """Returns displacement [Mpc/h] and canonical velocity [Mpc/h H0] of a state."""
    return state.displacement, state.velocity


def run(program: Path, folder: Path) -> None:
    """Runs MP-Gadget in a folder, on one core."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMPI_MCA_btl": "self"}
    allowed = dict.fromkeys(["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"], "1")
    with (folder / "log").open("w") as log:
        command = [str(program), "paramfile.gadget"]
        done = subprocess.run(
            command, cwd=folder, env={**environment, **allowed}, stdout=log, stderr=log
        )
    if done.returncode:
        raise SystemExit(f"MP-Gadget failed: see {folder / 'log'}")


def collect(universe: Universe, times: Sequence[float], folder: Path, path: Path) -> None:
    """Writes the first and the later particles of a finished run into one file."""
    cosmology = fpm.Cosmology(**universe.cosmology)
    parts = sorted((folder / "output").glob("PART_*"))
    states = [fpm.State.from_snapshot(part, cosmology=cosmology) for part in parts]
    # MP-Gadget always writes the end of its run, too
    states = [state for state in states if np.isclose(state.a, times, rtol=1e-5).any()]
    states.sort(key=lambda state: state.a)
    outputs = [state.a for state in states]
    if len(outputs) != len(times) or not np.allclose(outputs, times, rtol=1e-5):
        raise SystemExit(f"{folder}: found outputs at a = {outputs}")
    found = [np.float32([field.numpy() for field in particles(state)]) for state in states]
    with np.load(folder / "start.npz") as begin:
        first = [np.float32(begin[name]) for name in begin.files]
    displacement, velocity = np.moveaxis(np.stack(found), 1, 0)
    aside = path.with_suffix(".part.npz")
    np.savez_compressed(
        aside,
        displacement_initial=first[0],
        velocity_initial=first[1],
        displacement_final=displacement,
        velocity_final=velocity,
        a_initial=START,
        a_final=np.array(times),
        box_size=float(universe.grid * universe.spacing),
        white_noise_seed=universe.seed,
        **universe.cosmology,
        meta=json.dumps({"name": universe.name, "code": "MP-Gadget", "parameters": PARAMETERS}),
    )
    aside.replace(path)


def main() -> None:
    """Make the universes of a set that are missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("set", choices=list(SETS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--program", type=Path, required=True, help="the program MP-Gadget")
    parser.add_argument("--only", type=int, nargs="+", default=CELLS, help="spacings [Mpc/h]")
    parser.add_argument("--times", type=float, nargs="+", default=TIMES, help="of the outputs")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    arguments = parser.parse_args()
    folder: Path = arguments.folder.absolute()
    times = sorted(arguments.times)
    seeds = [u.seed for name in SETS for u in universes(name)]
    assert len(set(seeds)) == len(seeds)
    wanted = [u for u in universes(arguments.set) if u.spacing in arguments.only]

    def run_one(universe: Universe, inside: Path) -> None:
        run(arguments.program.absolute(), inside)
        print(universe.name, "is run", flush=True)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        left = []
        for universe in wanted:
            inside = folder / "runs" / universe.name
            path = folder / f"treepm_{universe.name}.npz"
            if path.exists():
                continue
            shutil.rmtree(inside, ignore_errors=True)
            inside.mkdir(parents=True)
            start(universe, times, inside)
            left.append((universe, inside, path, pool.submit(run_one, universe, inside)))
        for universe, inside, path, done in left:
            done.result()
            collect(universe, times, inside, path)
            shutil.rmtree(inside)


if __name__ == "__main__":
    main()
