"""Networks that learned from cheap universes, asked about TreePM universes.

    python benchmarks/corrected_training.py FOLDER --universes FILES [--kinds KIND ...]
        [--seeds 3] [--ranks 1]

The cheap universes have 32^3 particles in 64 Mpc/h and make ten BullFrog steps. They are of several
kinds: plain, with `deconvolve`, with `mesh_factor` 2 (B = 2), and with a correction of the package.
For the last two kinds each universe has one of the corrections, or one of them and 7 to 14 steps at
random. For each kind, networks with several seeds learn Omega_m, sigma8 and n_s from
the density of 512 universes. Then each is asked about the TreePM runs in FILES (the set "asked" of
benchmarks/treepm.py), and about cheap runs of its own kind from TreePM's particles. These make ten
steps, and for the last two kinds they are made with each correction.

The table has means over the seeds. The RMSE is measured with 256 test universes of the network's
own kind. A pair is the answer for TreePM and the answer for the cheap run from the same particles.
The bias is their mean difference in units of that RMSE, with the standard error of the pairs.
Trainings that FOLDER has are not made again.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from common import flowpm, of_mean
from emulator import Universe
from treepm import FIXED, PRIORS

import flowpm_dist as fpm
from flowpm_dist.cosmoflow.training.saved import read_training, trained_network

COUNTS = {"simulations": 512, "validation": 128, "test": 256}
"""Universes of each kind."""
REUSE = 8
"""How often a training uses a universe."""
STEPS = 10
FEWEST, MOST = 7, 14
"""Steps of runs whose number is drawn."""
SIZE = 64.0
CORRECTED: list[dict[str, Any]] = [
    {"correction": "default"},
    {"correction": "network"},
    {"correction": "default-2", "mesh_factor": 2},
    {"correction": "network-2", "mesh_factor": 2},
]
ANY_STEPS = {"steps": [FEWEST, MOST]}
KINDS: dict[str, list[dict[str, Any]]] = {
    "plain": [{"deconvolve": False}],
    "deconvolve": [{}],
    "B = 2": [{"mesh_factor": 2}],
    **{options["correction"]: [options] for options in CORRECTED},
    "corrections drawn": CORRECTED,
    "all drawn": [{**options, **ANY_STEPS} for options in CORRECTED],
}
"""Kind of the cheap universes -> tables of keys; each universe has the keys of one table."""


def train(folder: Path, kind: str, seed: int, ranks: int) -> Path:
    """Trains a network on universes of a kind and evaluates it; returns the training's folder."""
    name = kind.replace(" = ", "").replace(" ", "-").lower()
    found, text = folder / f"{name}-{seed}", folder / f"{name}-{seed}.toml"
    folder.mkdir(parents=True, exist_ok=True)
    table = {
        "box": {"grid": 32, "size": SIZE},
        "cosmology": FIXED,
        "priors": {name: list(ends) for name, ends in PRIORS.items()},
        "initial": {"lpt_order": 3},
        "evolution": {"integrator": "bullfrog", "steps": STEPS, "drawn": KINDS[kind]},
        "network": {"name": "sc18-periodic", "loss": "likelihood"},
        "training": {
            "seed": seed,
            "batch": 16,
            "learning_rate": 1e-4,
            "validate_every": 32,
            "checkpoint_every": 64,
        },
        "data": {**COUNTS, "reuse": REUSE, "fill": 128},
    }
    text.write_text(tomli_w.dumps(table))
    if not (found / "evaluation" / "scores.json").exists():
        words = ["train", text, "--output", found, "--ranks", ranks]
        words += ["--resume"] if found.exists() else []
        subprocess.run(flowpm(*words), check=True)
        subprocess.run(flowpm("evaluate", found, "--ranks", ranks), check=True)
    return found


def answers(training: Path, universes: list[Universe], kinds: list[dict[str, Any]]) -> np.ndarray:
    """Returns what a network says of TreePM and of cheap runs [2, universe, parameter].

    Of several kinds of cheap runs it is the mean.
    """
    trained = trained_network(read_training(training), universes[0].states[-1].box.mesh, batch=1)
    assert tuple(trained.standardiser.names) == tuple(PRIORS)

    def ask(state: fpm.State) -> np.ndarray:
        outputs = trained.network.predict(state.density().block[None])
        return np.asarray(trained.in_physical_units(outputs.numpy())[0][0])

    cases = [{key: value for key, value in each.items() if key != "steps"} for each in kinds]
    cheap = [[ask(u.run(options)[-1]) for options in cases] for u in universes]
    return np.array([[ask(u.states[-1]) for u in universes], np.mean(cheap, axis=1)])


def rms_errors(training: Path) -> np.ndarray:
    """Returns the RMSE of each parameter on the test universes [parameter]."""
    with np.load(training / "evaluation" / "predictions.npz") as found:
        return np.sqrt(np.mean((found["mean"] - found["truth"]) ** 2, axis=0))


def main() -> None:
    """Train what is missing, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--universes", type=Path, nargs="+", required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()
    trainings = {
        kind: [train(options.folder, kind, seed, options.ranks) for seed in range(options.seeds)]
        for kind in options.kinds
    }
    universes = [Universe(path, STEPS) for path in options.universes]
    true = np.array([[getattr(u.cosmology, name) for name in PRIORS] for u in universes])
    heads = [f"{name}: RMSE | bias | RMSE of TreePM" for name in PRIORS]
    print(f"| universes of the training | {' | '.join(heads)} |")
    print("|---" * (3 * len(PRIORS) + 1) + "|")
    for kind, found in trainings.items():
        each = np.array([answers(training, universes, KINDS[kind]) for training in found])
        errors = np.mean([rms_errors(training) for training in found], axis=0)
        shifts = (each[:, 0] - each[:, 1]).mean(axis=0)  # [universe, parameter]
        cells = []
        for number, error in enumerate(errors):
            mean, deviation = (value / error for value in of_mean(shifts[:, number]))
            rms = float(np.sqrt(np.mean((each[:, 0, :, number] - true[:, number]) ** 2)))
            cells.append(f"{error:.4f} | {mean:+.2f} +- {deviation:.2f} | {rms:.4f}")
        print(f"| {kind} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
