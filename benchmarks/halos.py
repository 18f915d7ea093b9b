"""Halos of fast runs against a tree code's, by their settings; and the time of the finder.

    python benchmarks/halos.py [--runs DIR] [--output halos]
    python benchmarks/halos.py --abundance 256,512 [--peers PYTHON] [--grid 256]
    python benchmarks/halos.py --time [--peers PYTHON] [--grid 128]

The truth are TreePM runs (treepm_*.npz as tests/data/README.md describes them, in FLOWPM_REFERENCE
or DIR). Every setting begins with the particles of such a run at a = 0.1 and makes ten BullFrog
steps to a = 1, or 20 with particles 1 Mpc/h apart. Both sides' halos are friends of friends with a
linking length of 0.2, but where a setting has relaxed lengths. OUTPUT.csv has, for each setting,
distance of particles, scale factor and range of particle numbers, the number of halos over that of
the tree code, with errors from a jackknife over the octants of all runs: pairs of the same initial
conditions have little cosmic variance. Halos are matched to those of the tree code by centre and
mass. --only has a part of the settings.

With --abundance, the numbers of halos of runs in boxes of these sizes (ten BullFrog steps, B = 2),
each over what Warren 2006 and Watson 2013 predict for friends of friends of 0.2, corrected for the
number of particles N by N (1 - N^-0.6) (Warren); and masses within 200 times the mean density over
the emulator emu_hmf, if PYTHON has it. OUTPUT_abundance.csv has ratios with Poisson errors.

With --time, the seconds and the memory of the finder on particles of a run of our own; those of
kdcount and pyfof on the same particles, if PYTHON has these packages.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
from common import REFERENCE, median_seconds
from emulator import CLOSE, options_of
from scipy.spatial import cKDTree

import flowpm_dist as fpm
from flowpm_dist.catalogues.abundance import FITS, MassFunction, mass_function, predicted
from flowpm_dist.catalogues.catalogue import Catalogue
from flowpm_dist.catalogues.finder import Particles, find_halos
from flowpm_dist.catalogues.friends import friends_of_friends
from flowpm_dist.grid.space import Space
from flowpm_dist.jobs.results import write_rows
from meshimpl.process_mesh import ProcessMesh

BINS = (20, 50, 100, 200, 500, 1000, 10**9)
ABOVE = 100
"""Particles of halos that are counted together, and matched."""
OCTANTS = 8
A = (0.5, 1.0)
"""Scale factors at which halos are compared, if all runs have them."""


@dataclass(frozen=True)
class Setting:
    """Options of the run and of the finder."""

    label: str
    solver: dict[str, Any] = field(default_factory=dict)
    finder: dict[str, Any] = field(default_factory=dict)


SHARP = {"deconvolve": True}
FINER = {"mesh_factor": 2}
RELAXED = {"relaxed": ((100, 0.23), (400, 0.215))}
SETTINGS = [
    Setting("B = 1"),
    Setting("B = 1, relaxed", {}, RELAXED),
    Setting("deconvolve", SHARP),
    Setting("deconvolve, relaxed", SHARP, RELAXED),
    Setting("filter", options_of("default")),
    Setting("network", options_of("network")),
    Setting("B = 2", FINER),
    Setting("B = 2, relaxed", FINER, RELAXED),
    Setting("B = 2, deconvolve", {**FINER, **SHARP}),
    Setting("B = 2, filter", options_of("default-2")),
    Setting("B = 2, network", options_of("network-2")),
    Setting("B = 2, network, relaxed", options_of("network-2"), RELAXED),
    Setting("B = 3", {"mesh_factor": 3}),
]


def runs_of(folder: Path) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Yields the tree code's runs in a folder."""
    paths = sorted(folder.glob("treepm_*.npz"))
    if not paths:
        raise SystemExit(f"{folder} has no treepm_*.npz; see tests/data/README.md")
    for path in paths:
        with np.load(path) as data:
            yield path.stem, dict(data)


def cosmology_of(run: dict[str, np.ndarray]) -> fpm.Cosmology:
    names = ("Omega_m", "Omega_b", "h", "n_s", "sigma8")
    return fpm.Cosmology(**{name: float(run[name]) for name in names})


def spacing_of(run: dict[str, np.ndarray]) -> float:
    """The mean distance of the particles [Mpc/h]."""
    return float(run["box_size"]) / run["displacement_initial"].shape[0]


def halos_of_tree_code(run: dict[str, np.ndarray], times: Sequence[float]) -> list[Catalogue]:
    """The halos of the states of a run at these times."""
    side, n = float(run["box_size"]), run["displacement_initial"].shape[0]
    lattice = np.stack(np.meshgrid(*[np.arange(n) * side / n] * 3, indexing="ij"), axis=-1)
    about = {"grid": [n] * 3, "box_size": [side] * 3, "cosmology": cosmology_of(run).numbers()}
    space = Space((side,) * 3, ProcessMesh(""))
    catalogues = []
    for a in times:
        at = int(np.argmin(np.abs(run["a_final"] - a)))
        assert abs(run["a_final"][at] - a) < 1e-6
        particles = Particles(
            space,
            (lattice + run["displacement_final"][at]).reshape(-1, 3),
            100.0 / a * run["velocity_final"][at].reshape(-1, 3).astype(np.float64),
            np.arange(n**3),
        )
        catalogues.append(find_halos(particles, {**about, "a": a}))
    return catalogues


def halos_of_setting(
    run: dict[str, np.ndarray], setting: Setting, times: Sequence[float]
) -> tuple[list[Catalogue], float]:
    """The halos of a fast run from the same particles at these times, and its steps' seconds."""
    n, side = run["displacement_initial"].shape[0], float(run["box_size"])
    number = 10 if spacing_of(run) > CLOSE else 20
    steps = fpm.scale_factor_steps(float(run["a_initial"]), 1.0, number)
    options = {"integrator": fpm.BullFrog(), "deconvolve": False, **setting.solver}
    sim = fpm.Simulation(cosmology_of(run), n, side, steps, **options)
    particles = run["displacement_initial"], run["velocity_initial"]
    begin = tuple(np.asarray(x, np.float32) for x in particles)
    sim.run(particles=begin)  # compiled
    seconds = float(np.sum(sim.run(particles=begin).timings["steps"]))
    states = sim.run(particles=begin, outputs=times)
    return [fpm.halos(state, **setting.finder) for state in states], seconds


def octants(halos: Catalogue, low: float, high: float) -> np.ndarray:
    """Returns the number of halos with so many particles, in each octant of the box."""
    chosen = (halos["number"] >= low) & (halos["number"] < high)
    place = (2 * halos["position"][chosen] / np.array(halos.box_size)).astype(int)
    return np.bincount(place @ [4, 2, 1], minlength=OCTANTS)


def ratio_of(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float]:
    """Returns the ratio of the sums, and its error by a jackknife over the pieces."""
    left = (ours.sum() - ours) / np.maximum(theirs.sum() - theirs, 1)
    error = np.sqrt((len(left) - 1) * np.mean((left - left.mean()) ** 2))
    return ours.sum() / max(theirs.sum(), 1), float(error)


def matched(ours: Catalogue, theirs: Catalogue) -> np.ndarray:
    """Returns ln of the mass ratio and the distance [Mpc/h] of the halos found again [n, 2].

    A halo of the tree code is found if the nearest halo within 1 Mpc/h has half to twice its mass.
    """
    side = np.array(ours.box_size)
    tree = cKDTree(ours["position"] % side, boxsize=side)
    large = theirs["number"] >= ABOVE
    distance, at = tree.query(theirs["position"][large] % side)
    at = np.minimum(at, len(ours) - 1)
    ratio = np.log(ours["number"][at] / theirs["number"][large])
    found = (distance < 1.0) & (np.abs(ratio) < np.log(2))
    return np.where(found[:, np.newaxis], np.stack([ratio, distance], axis=1), np.nan)


def compare(folder: Path, only: str) -> list[dict[str, Any]]:
    """Returns rows of each setting whose label contains `only`."""
    runs = [run for _, run in runs_of(folder)]
    times = [a for a in A if all(np.isclose(run["a_final"], a, rtol=1e-6).any() for run in runs)]
    truths = [halos_of_tree_code(run, times) for run in runs]
    spacings = sorted({spacing_of(run) for run in runs})
    rows = []
    for setting in SETTINGS:
        if only not in setting.label:
            continue
        found = [halos_of_setting(run, setting, times) for run in runs]
        for spacing, (time, a) in itertools.product(spacings, enumerate(times)):
            pairs = [
                (ours[time], theirs[time], seconds)
                for run, (ours, seconds), theirs in zip(runs, found, truths, strict=True)
                if spacing_of(run) == spacing
            ]
            row = {"setting": setting.label, "spacing [Mpc/h]": spacing, "a": a}
            rows.append(row | {"universes": len(pairs)} | row_of(pairs))
            print(json.dumps(rows[-1]), flush=True)
    return rows


def row_of(pairs: list[tuple[Catalogue, Catalogue, float]]) -> dict[str, Any]:
    """Returns the numbers of halos, and how well they are found again.

    Args:
        pairs: our halos, the tree code's and the seconds of our steps, of each universe.
    """
    row: dict[str, Any] = {}
    for low, high in [*zip(BINS[:-1], BINS[1:], strict=True), (ABOVE, BINS[-1])]:
        counts = [
            np.concatenate([octants(each[side], low, high) for each in pairs]) for side in (0, 1)
        ]
        name = f"{low} to {high}" if high < BINS[-1] else f"above {low}"
        if low == ABOVE and high == BINS[-1]:
            row["pairs"] = int(counts[1].sum())
        row[name], row[f"error {name}"] = ratio_of(*counts)
    found = np.concatenate([matched(ours, theirs) for ours, theirs, _ in pairs])
    again = found[np.isfinite(found[:, 0])]
    return row | {
        "found again": len(again) / max(len(found), 1),
        "median of mass ratio": float(np.exp(np.median(again[:, 0]))),
        "scatter of ln mass": float(again[:, 0].std()),
        "median distance [Mpc/h]": float(np.median(again[:, 1])),
        "seconds": float(np.median([seconds for *_, seconds in pairs])),
    }


EMULATOR = """
import sys
import numpy as np
from emu_hmf.box import PARAMS
from emu_hmf.model import HmfCorrection
numbers = dict(zip(sys.argv[1::2], map(float, sys.argv[2::2])))
theta = np.array([numbers[name] for name in PARAMS])
sigma = np.geomspace(0.1, 5, 400)
print(*sigma, *np.asarray(HmfCorrection().fsigma(sigma, theta)))
"""


def emulated(peers: str, cosmology: fpm.Cosmology) -> Any:
    """Returns f(sigma) of masses within 200 times the mean density by emu_hmf, at a = 1."""
    c = cosmology
    table = {"Omegab": c.Omega_b, "Omegam": c.Omega_m, "H0": 100 * c.h, "ns": c.n_s, "mnu": 0}
    table |= {"A": 1e9 * c.A_s, "w": -1, "wa": 0}
    words = [str(word) for pair in table.items() for word in pair]
    done = subprocess.run([peers, "-c", EMULATOR, *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    sigma, f = np.array(done.stdout.split(), np.float64).reshape(2, -1)
    return lambda values: np.interp(values, sigma, f)


def compared(label: str, found: MassFunction, expected: np.ndarray) -> list[dict[str, Any]]:
    """Returns a row for each bin with halos: their number over a prediction."""
    rows = []
    for low, count, measured, error, one in zip(
        found.edges, found.count, found.abundance, found.error, expected, strict=False
    ):
        if count:
            row = {"comparison": label, "mass above": float(low), "halos": int(count)}
            rows.append(row | {"ratio": measured / one, "error": error / one})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def abundances(grid: int, sizes: Sequence[float], peers: str | None) -> list[dict[str, Any]]:
    """Returns how many halos there are, over predictions."""
    cosmology = fpm.Cosmology(Omega_m=0.31, Omega_b=0.049, h=0.677, n_s=0.965, A_s=2.1e-9)
    rows = []
    for size in sizes:
        steps = fpm.scale_factor_steps(0.1, 1.0, 10)
        sim = fpm.Simulation(cosmology, grid, size, steps, integrator=fpm.BullFrog(), mesh_factor=2)
        state, theory = sim.run(seed=int(size)), fpm.Theory(cosmology)
        for name, options in (("0.2", {}), ("relaxed", RELAXED)):
            halos = fpm.halos(state, **options)
            number = halos["number"]
            corrected = {**halos.columns, "mass": halos["mass"] * (1 - number**-0.6)}
            ends = np.array([*BINS[:-1], 2000, 5000]) - 0.5
            edges = halos.header.mass * 1e10 * ends * (1 - ends**-0.6)
            found = mass_function(halos.with_columns(corrected), edges)
            for fit, f in FITS.items():
                label = f"{fit}, {size:g} Mpc/h, linking length {name}"
                rows += compared(label, found, predicted(theory, found.mass, 1.0, f))
        if peers is not None:
            halos = fpm.halos(state, minimum=500, overdensities=["200m"])
            spheres = halos.with_columns({**halos.columns, "mass": halos["mass_200m"]})
            edges = halos.header.mass * 1e10 * np.array([1000, 2000, 4000, 8000, 16000])
            found = mass_function(spheres, edges)
            f = emulated(peers, cosmology)
            label = f"emu_hmf, {size:g} Mpc/h, 200m"
            rows += compared(label, found, predicted(theory, found.mass, 1.0, f))
    return rows


PEER = """
import resource, sys, time
import numpy as np
name, file, side, link = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
x = np.load(file)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
begin = time.perf_counter()
if name == "kdcount":
    from kdcount import cluster
    labels = cluster.fof(cluster.dataset(x, boxsize=side), link).labels
    groups = (np.bincount(labels) >= 20).sum()
else:
    import pyfof
    groups = sum(len(group) >= 20 for group in pyfof.friends_of_friends(x, link))
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(groups, time.perf_counter() - begin, memory * 1024)
"""


def times(grid: int, peers: str | None) -> None:
    """Prints seconds and memory of the finder, and of other codes on the same particles."""
    side, count = 2.0 * grid, grid**3
    cosmology = fpm.Cosmology.planck18()
    steps = fpm.scale_factor_steps(0.1, 1.0, 10)
    state = fpm.Simulation(cosmology, grid, side, steps, mesh_factor=1).run(seed=1)
    x = state.positions().block.numpy().reshape(-1, 3).astype(np.float64)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = fpm.halos(state)
    memory = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    seconds = median_seconds(lambda: fpm.halos(state), 5)
    print(
        f"halos: {found.total}, {1e9 * seconds / count:.0f} ns, {memory / count:.0f} B a particle"
    )
    space, numbers = Space((side,) * 3, ProcessMesh("")), np.arange(count)
    places = space.places(x)
    seconds = median_seconds(lambda: friends_of_friends(space, places, numbers, 0.4), 5)
    print(f"groups alone: {1e9 * seconds / count:.0f} ns a particle")
    if peers is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/x.npy", x)
        for name in ("kdcount", "pyfof"):
            command = [peers, "-c", PEER, name, f"{folder}/x.npy", str(side), "0.4"]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode:
                print(f"{name}: {result.stderr.strip().splitlines()[-1]}")
                continue
            groups, seconds, memory = map(float, result.stdout.split())
            each = f"{1e9 * seconds / count:.0f} ns, {memory / count:.0f} B a particle"
            print(f"{name}: {groups:.0f} groups, {each}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=Path, default=os.environ.get(REFERENCE))
    parser.add_argument("--output", type=Path, default=Path("halos"))
    parser.add_argument("--only", default="", help="a part of the names of settings")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--abundance", default="", help="sizes of boxes [Mpc/h], such as 256,512")
    parser.add_argument("--grid", type=int, default=128)
    parser.add_argument("--peers")
    chosen = parser.parse_args(arguments)
    if chosen.time:
        times(chosen.grid, chosen.peers)
        return
    if chosen.abundance:
        sizes = [float(size) for size in chosen.abundance.split(",")]
        path = chosen.output.with_name(f"{chosen.output.name}_abundance.csv")
        write_rows(path, abundances(chosen.grid, sizes, chosen.peers))
        return
    if chosen.runs is None:
        raise SystemExit(f"set {REFERENCE}, or give --runs")
    write_rows(chosen.output.with_suffix(".csv"), compare(Path(chosen.runs), chosen.only))


if __name__ == "__main__":
    main()
