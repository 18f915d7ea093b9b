"""Networks trained on volumes of 64^3 cells, compared with statistics of the same volumes.

    python benchmarks/learning.py train FOLDER [--only 128 256] [--minutes 60] [--ranks 2]
    python benchmarks/learning.py judge FOLDER [--only 128 256]
    python benchmarks/learning.py spikes FOLDER

There are four settings: boxes of 128 and 256 Mpc/h, each with the density itself and with survey
data. Survey data are in redshift space and have noise of 50 (Mpc/h)^3, the shot noise of 0.02
tracers in (Mpc/h)^3. Each setting is trained with three seeds on 2,048 universes with the priors of
the SC18 paper; each universe is used eight times. The box of 128 Mpc/h is also trained on fewer
universes, and with two more seeds.

train: makes the missing trainings, seed by seed. A second call continues.
judge: evaluates all complete trainings on a fresh test set, with posteriors from networks and from
    statistics.
spikes: prints how the losses behave.

FOLDER/minutes.csv has the minutes of each training.
"""

from __future__ import annotations

import argparse
import csv
import json
import operator
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from common import flowpm

RUN_FILE = """
[box]
grid = 64
size = {size}
[cosmology]
Omega_b = 0.049
h = 0.67
[priors]
Omega_m = [0.25, 0.35]
sigma8 = [0.78, 0.95]
n_s = [0.9, 1.0]
[evolution]
steps = 10
deconvolve = false
{observation}
[network]
name = "sc18-periodic"
loss = "likelihood"
precision = "bfloat16"
[training]
seed = {seed}
batch = 16
learning_rate = 1e-4
validate_every = 64
checkpoint_every = 64
[data]
simulations = {simulations}
reuse = 8
fill = 256
validation = 256
test = 512
"""
SURVEY = '[observation]\nredshift_space = "z"\nsigma = {sigma:.4f}'
NOISE_POWER = 50.0
"""Power of the surveys' noise [(Mpc/h)^3]."""
SETTINGS = {"128": (128.0, False), "128-survey": (128.0, True)}
SETTINGS |= {"256": (256.0, False), "256-survey": (256.0, True)}
"""Side of the box [Mpc/h], and whether a survey observes it."""
UNIVERSES, FEWER = 2048, (256, 512, 1024)
SEEDS, MORE_SEEDS = (0, 1, 2), (3, 4)
WARM_UP = 100
"""Steps of the default of `warmup`, in trainings that are ten times as long."""


def run_file(setting: str, seed: int, simulations: int) -> str:
    """Returns the text of the run file of a training."""
    size, survey = SETTINGS[setting]
    sigma = (NOISE_POWER / (size / 64) ** 3) ** 0.5
    observation = SURVEY.format(sigma=sigma) if survey else ""
    return RUN_FILE.format(size=size, observation=observation, seed=seed, simulations=simulations)


def trainings() -> Iterator[tuple[str, int, int]]:
    """Yields setting, seed and universes of each training, in the order in which they are made."""
    yield from ((setting, SEEDS[0], UNIVERSES) for setting in SETTINGS)
    yield from (("128", SEEDS[0], count) for count in FEWER)
    yield from ((setting, seed, UNIVERSES) for seed in SEEDS[1:] for setting in SETTINGS)
    yield from (("128", seed, UNIVERSES) for seed in MORE_SEEDS)


def folder_of(folder: Path, setting: str, seed: int, simulations: int) -> Path:
    """Returns where a training lies."""
    return folder / setting / f"{simulations}-seed-{seed}"


def complete(training: Path) -> bool:
    """Returns whether a training has made its last step."""
    mark = training / "training.json"
    return mark.exists() and bool(json.loads(mark.read_text()).get("complete"))


def train(folder: Path, options: argparse.Namespace) -> None:
    """Trains until all is done or the time is over; the next call resumes a stopped training."""
    begun, minutes = time.monotonic(), folder / "minutes.csv"
    for case in trainings():
        training, left = folder_of(folder, *case), begun + 60 * options.minutes - time.monotonic()
        if case[0] not in options.only or complete(training) or left <= 0:
            continue
        training.parent.mkdir(parents=True, exist_ok=True)
        text = training.with_suffix(".toml")
        text.write_text(run_file(*case))
        words = ["train", text, "--output", training, "--ranks", options.ranks]
        words += ["--resume"] if training.exists() else []
        started = time.monotonic()
        job = subprocess.Popen(flowpm(*words))
        try:
            status = job.wait(left)
        except subprocess.TimeoutExpired:
            job.send_signal(signal.SIGTERM)  # it keeps a checkpoint
            job.wait()
            status = 0
        with minutes.open("a", newline="") as table:
            csv.writer(table).writerow([*case, f"{(time.monotonic() - started) / 60:.1f}"])
        if status:
            raise SystemExit(f"the training {training} failed")


def judge(folder: Path, options: argparse.Namespace) -> None:
    """Evaluates the complete trainings of each setting together."""
    for setting in options.only:
        cases = [case for case in trainings() if case[0] == setting]
        found = [folder_of(folder, *case) for case in cases]
        ready = [str(training) for training in found if complete(training)]
        if ready:
            words = [*ready, "--fresh", "1", "--posteriors", "--head", "gaussian", "--head", "flow"]
            words += ["--ranks", str(options.ranks), "--output", str(folder / setting / "judged")]
            subprocess.run(flowpm("evaluate", *words), check=True)


def spikes(folder: Path, options: argparse.Namespace) -> None:
    """Prints the largest loss after the warm-up, and the largest rise of the validation's."""
    print(
        "| setting | universes | seed | steps above 1 | above 1.5 | largest loss | largest rise |"
    )
    print("|---|---|---|---|---|---|---|")
    for setting, seed, simulations in trainings():
        training = folder_of(folder, setting, seed, simulations)
        if setting not in options.only or not complete(training):
            continue
        with (training / "metrics.csv").open(newline="") as table:
            rows = list(csv.DictReader(table))
        losses = [float(row["loss"]) for row in rows[min(WARM_UP, len(rows) // 10) :]]
        held = [float(row["validation_loss"]) for row in rows if row["validation_loss"]]
        counts = (sum(loss > limit for loss in losses) for limit in (1.0, 1.5))
        figures = [setting, simulations, seed, *counts, f"{max(losses):.2f}"]
        figures += [f"{max(map(operator.sub, held[1:], held)):.2f}"]
        print(f"| {' | '.join(map(str, figures))} |")


def main() -> None:
    """Runs one part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = {"train": train, "judge": judge, "spikes": spikes}
    parser.add_argument("part", choices=parts)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    parts[options.part](options.folder, options)


if __name__ == "__main__":
    main()
