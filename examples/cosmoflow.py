"""Trains networks on universes that are simulated during the training, and evaluates them.

    python examples/cosmoflow.py --ranks 2

There are trainings with several seeds and numbers of simulations, each in its own folder. The
evaluation compares the networks with regressions on the power spectra of the same volumes. Its
table, the predicted against the true values and the learning curve are in OUTPUT/evaluation. If the
script is interrupted, run it again: it continues.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def command(*words: object) -> list[str]:
    """Returns the command line of `flowpm-dist` with the Python that runs this."""
    return [sys.executable, "-m", "flowpm_dist.cli", *map(str, words)]


def run_file(folder: Path, source: Path, seed: int, simulations: int) -> Path:
    """Writes the run file of a training with this seed and number of simulations; returns it."""
    lines = source.read_text().splitlines()
    lines = [line for line in lines if not line.startswith("simulations = ")]
    place = lines.index("[training]") + 1
    lines.insert(place, f"seed = {seed}")
    place = lines.index("[data]") + 1
    lines.insert(place, f"simulations = {simulations}")
    path = folder / f"{simulations}-simulations-seed-{seed}.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def train(path: Path, ranks: int) -> Path:
    """Starts or resumes a training unless it is complete; returns its folder."""
    folder = path.with_suffix("")
    try:
        mark = json.loads((folder / "training.json").read_text())
    except FileNotFoundError:
        mark = {}
    if not mark.get("complete"):
        options = ["--resume"] if mark else []
        words = command("train", path, "--ranks", ranks, "--output", folder, *options)
        subprocess.run(words, check=True)
    return folder


def main() -> None:
    """Trains all, then judges them together."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run-file", type=Path, default=HERE / "cosmoflow.toml")
    parser.add_argument("--output", type=Path, default=Path("cosmoflow-output"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--simulations", type=int, default=2048)
    parser.add_argument(
        "--fewer", type=int, nargs="*", default=[256, 512, 1024], help="for the learning curve"
    )
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    trainings = [(arguments.simulations, seed) for seed in arguments.seeds]
    trainings += [(count, arguments.seeds[0]) for count in arguments.fewer]
    folders = []
    for count, seed in trainings:
        path = run_file(arguments.output, arguments.run_file, seed, count)
        folders.append(train(path, arguments.ranks))
    evaluation = arguments.output / "evaluation"
    words = command("evaluate", *folders, "--ranks", arguments.ranks, "--output", evaluation)
    subprocess.run(words, check=True)


if __name__ == "__main__":
    main()
