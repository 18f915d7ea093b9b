"""Networks that learned from cheap universes, asked about TreePM universes.

    python benchmarks/corrected_training.py FOLDER --universes FILES [--seeds 2] [--ranks 1]

The cheap universes have 32^3 particles in 64 Mpc/h and make ten BullFrog steps: plain, with
`deconvolve`, and with the filter and the network of the package. For each of these kinds, networks
with several seeds learn Omega_m, sigma8 and n_s from the density of 512 universes. Then each is
asked about the TreePM runs in FILES (the files of benchmarks/emulator.py), and about cheap runs of
its own kind that start from TreePM's particles.

The table has means over the seeds. The RMSE is measured with 256 test universes of the network's
own kind. A pair is the answer for TreePM and the answer for the cheap run from the same particles.
The bias is their mean difference in units of that RMSE, with the standard error of the pairs.
Trainings that FOLDER has are not made again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from common import flowpm, of_mean
from emulator import Universe

import flowpm_dist as fpm
from flowpm_dist.cosmoflow.training.saved import read_training, trained_network

RUN_FILE = """
[box]
grid = 32
size = 64.0
[cosmology]
Omega_b = 0.049
h = 0.677
[initial]
lpt_order = 3
[priors]
Omega_m = [0.25, 0.35]
sigma8 = [0.78, 0.95]
n_s = [0.9, 1.0]
[evolution]
integrator = "bullfrog"
steps = {steps}
{more}
[network]
name = "sc18-periodic"
loss = "likelihood"
[training]
seed = {seed}
batch = 16
learning_rate = 1e-4
validate_every = 32
checkpoint_every = 64
[data]
simulations = 512
reuse = 8
fill = 128
validation = 128
test = 256
"""
STEPS = 10
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"deconvolve": False},
    "deconvolve": {},
    "filter": {"correction": "default"},
    "network": {"correction": "network"},
}
"""Kind of the cheap universes -> options of their runs."""
PARAMETERS = ("Omega_m", "sigma8", "n_s")


def train(folder: Path, kind: str, seed: int, ranks: int) -> Path:
    """Trains a network on universes of a kind and evaluates it; returns the training's folder."""
    more = "\n".join(f"{key} = {json.dumps(value)}" for key, value in KINDS[kind].items())
    found, text = folder / f"{kind}-{seed}", folder / f"{kind}-{seed}.toml"
    folder.mkdir(parents=True, exist_ok=True)
    text.write_text(RUN_FILE.format(steps=STEPS, more=more, seed=seed))
    if not (found / "evaluation" / "scores.json").exists():
        words = ["train", text, "--output", found, "--ranks", ranks]
        words += ["--resume"] if found.exists() else []
        subprocess.run(flowpm(*words), check=True)
        subprocess.run(flowpm("evaluate", found, "--ranks", ranks), check=True)
    return found


def answers(training: Path, universes: list[Universe], options: dict[str, Any]) -> np.ndarray:
    """Returns what a network says of TreePM and of cheap runs [2, universe, parameter]."""
    trained = trained_network(read_training(training), universes[0].states[-1].box.mesh, batch=1)
    assert tuple(trained.standardiser.names) == PARAMETERS

    def ask(state: fpm.State) -> np.ndarray:
        outputs = trained.network.predict(state.density().block[None])
        return np.asarray(trained.in_physical_units(outputs.numpy())[0][0])

    both = [(u.states[-1], u.run(options)[-1]) for u in universes]
    return np.array([[ask(state) for state in states] for states in zip(*both, strict=True)])


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
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()
    trainings = {
        kind: [train(options.folder, kind, seed, options.ranks) for seed in range(options.seeds)]
        for kind in KINDS
    }
    universes = [Universe(path, STEPS) for path in options.universes]
    true = np.array([[getattr(u.cosmology, name) for name in PARAMETERS] for u in universes])
    heads = [f"{name}: RMSE | bias | RMSE of TreePM" for name in PARAMETERS]
    print(f"| universes of the training | {' | '.join(heads)} |")
    print("|---" * (3 * len(PARAMETERS) + 1) + "|")
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
