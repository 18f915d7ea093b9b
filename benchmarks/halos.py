"""Halos of fast runs against a tree code's, by their settings; and the time of the finder.

    python benchmarks/halos.py [--runs DIR] [--output halos]
    python benchmarks/halos.py --time [--peers PYTHON] [--grid 128]

The truth are TreePM runs (treepm_*.npz as tests/data/README.md describes them, in FLOWPM_REFERENCE
or DIR). Every setting begins with the particles of such a run at a = 0.1 and makes ten BullFrog
steps to a = 1. Both sides' halos are friends of friends with a linking length of 0.2, but where a
setting has relaxed lengths. OUTPUT.csv has, for each setting and range of particle numbers, the
number of halos over that of the tree code, with errors from a jackknife over the octants of all
runs: pairs of the same initial conditions have little cosmic variance. Halos are matched to those
of the tree code by centre and mass.

With --time, the seconds and the memory of the finder on particles of a run of our own; those of
kdcount and pyfof on the same particles, if PYTHON has these packages.
"""

from __future__ import annotations

import argparse
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
from scipy.spatial import cKDTree

import flowpm_dist as fpm
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
    Setting("filter", {**SHARP, "correction": "default"}),
    Setting("network", {**SHARP, "correction": "network"}),
    Setting("B = 2", FINER),
    Setting("B = 2, relaxed", FINER, RELAXED),
    Setting("B = 2, deconvolve", {**FINER, **SHARP}),
    Setting("B = 2, filter", {**FINER, **SHARP, "correction": "default-2"}),
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


def halos_of_tree_code(run: dict[str, np.ndarray]) -> Catalogue:
    """The halos of the last state of a run."""
    displacement, velocity = run["displacement_final"][-1], run["velocity_final"][-1]
    side, n = float(run["box_size"]), displacement.shape[0]
    lattice = np.stack(np.meshgrid(*[np.arange(n) * side / n] * 3, indexing="ij"), axis=-1)
    about = {"a": 1.0, "grid": [n] * 3, "box_size": [side] * 3}
    about["cosmology"] = cosmology_of(run).numbers()
    space = Space((side,) * 3, ProcessMesh(""))
    particles = Particles(
        space,
        (lattice + displacement).reshape(-1, 3),
        100.0 * velocity.reshape(-1, 3).astype(np.float64),
        np.arange(n**3),
    )
    return find_halos(particles, about)


def halos_of_setting(run: dict[str, np.ndarray], setting: Setting) -> tuple[Catalogue, float]:
    """The halos of a fast run from the same particles, and the seconds of its steps."""
    n, side = run["displacement_initial"].shape[0], float(run["box_size"])
    steps = fpm.scale_factor_steps(float(run["a_initial"]), 1.0, 10)
    options = {"integrator": fpm.BullFrog(), "deconvolve": False, **setting.solver}
    sim = fpm.Simulation(cosmology_of(run), n, side, steps, **options)
    particles = run["displacement_initial"], run["velocity_initial"]
    begin = tuple(np.asarray(x, np.float32) for x in particles)
    sim.run(particles=begin)  # compiled
    state = sim.run(particles=begin)
    return fpm.halos(state, **setting.finder), float(np.sum(state.timings["steps"]))


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


def compare(folder: Path) -> list[dict[str, Any]]:
    """Returns a row for each setting."""
    runs = list(runs_of(folder))
    truths = [halos_of_tree_code(run) for _, run in runs]
    rows = []
    for setting in SETTINGS:
        found = [halos_of_setting(run, setting) for _, run in runs]
        row: dict[str, Any] = {"setting": setting.label}
        for low, high in [*zip(BINS[:-1], BINS[1:], strict=True), (ABOVE, BINS[-1])]:
            counts = [
                np.concatenate([octants(halos, low, high) for halos in each])
                for each in ([halos for halos, _ in found], truths)
            ]
            name = f"{low} to {high}" if high < BINS[-1] else f"above {low}"
            if low == ABOVE and high == BINS[-1]:
                row["pairs"] = int(counts[1].sum())
            row[name], row[f"error {name}"] = ratio_of(*counts)
        pairs = np.concatenate(
            [matched(halos, truth) for (halos, _), truth in zip(found, truths, strict=True)]
        )
        kept = pairs[np.isfinite(pairs[:, 0])]
        row |= {
            "found again": len(kept) / len(pairs),
            "median of mass ratio": float(np.exp(np.median(kept[:, 0]))),
            "scatter of ln mass": float(kept[:, 0].std()),
            "median distance [Mpc/h]": float(np.median(kept[:, 1])),
            "seconds": float(np.median([seconds for _, seconds in found])),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
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
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--grid", type=int, default=128)
    parser.add_argument("--peers")
    chosen = parser.parse_args(arguments)
    if chosen.time:
        times(chosen.grid, chosen.peers)
        return
    if chosen.runs is None:
        raise SystemExit(f"set {REFERENCE}, or give --runs")
    write_rows(chosen.output.with_suffix(".csv"), compare(Path(chosen.runs)))


if __name__ == "__main__":
    main()
