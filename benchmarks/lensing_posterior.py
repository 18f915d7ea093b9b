"""Posteriors of Omega_m and sigma8 from statistics of maps of weak lensing.

    python benchmarks/lensing_posterior.py draw FOLDER [--universes 768] [--pixels 16]
    python benchmarks/lensing_posterior.py fit FOLDER [--head gaussian]

`draw` takes the light cone of examples/lensing_reconstruct.toml and draws universes of the priors;
it goes on where it was ended. `fit` adds the noise of shapes, fits a head to each statistic and to
all together, and judges them on the last eighth of the universes, which nothing was fitted to.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

EXAMPLE = Path(__file__).parents[1] / "examples" / "lensing_reconstruct.toml"
PRIORS = {"Omega_m": (0.2, 0.45), "sigma8": (0.5, 1.1)}
BATCH = 8
"""Universes that are simulated together, and kept in one file."""
SETS = (("power",), ("peaks",), ("histograms",), ("power", "peaks", "histograms"))
SAMPLES = 1000


def plan_of(pixels: int):
    """Returns the plan of the example, with other pixels."""
    from flowpm_dist.config.checks import read_table
    from flowpm_dist.config.reconstruction import check_reconstruction

    table = read_table(EXAMPLE)
    table["lightcone"]["pixels"] = pixels
    table["priors"] = {name: list(ends) for name, ends in PRIORS.items()}
    return check_reconstruction(table, EXAMPLE).plan


def draw(folder: Path, universes: int, pixels: int) -> None:
    """Write the maps of universes without noise, a file for each batch."""
    from meshimpl import ProcessMesh, launch

    launch.configure_threads()
    import tensorflow as tf

    from flowpm_dist.initial.white_noise import noise_function
    from flowpm_dist.reconstruction.parts import model_of

    plan = plan_of(pixels)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "about.json").write_text(json.dumps({"pixels": pixels}))
    model = model_of(plan, ProcessMesh("row:1"))
    noise = noise_function(model.simulation.box_of(BATCH))
    low, high = np.array(list(PRIORS.values())).T
    begin = time.perf_counter()
    for number in range(universes // BATCH):
        path = folder / f"maps-{number:05d}.npz"
        if path.exists():
            continue
        shares = np.random.default_rng([1, number]).random((BATCH, len(PRIORS)))
        truth = low + (high - low) * shares
        values = dict(zip(PRIORS, map(tf.constant, truth.T), strict=True))
        white = noise(np.arange(BATCH) + 10_000 + number * BATCH)
        maps = model.with_room(lambda: model(white, values))  # noqa: B023 - called at once
        np.savez(path, kappa=maps.numpy(), truth=truth)
        if number % 8 == 7:
            print(
                f"{(number + 1) * BATCH} universes, {time.perf_counter() - begin:.0f} s", flush=True
            )


def noisy_maps(folder: Path):
    """Returns the maps of a folder with noise, and their parameters."""
    from flowpm_dist.statistics.map_summaries import NoisyMaps

    cone = plan_of(json.loads((folder / "about.json").read_text())["pixels"]).lightcone
    files = [np.load(path) for path in sorted(folder.glob("maps-*.npz"))]
    kappa, truth = (np.concatenate([file[name] for file in files]) for name in ("kappa", "truth"))
    sigma = cone.pixel_sigma()
    kappa = kappa + sigma * np.random.default_rng(2).normal(size=kappa.shape)
    return NoisyMaps(kappa, cone.fov, sigma), truth


def fit(folder: Path, head: str) -> None:
    """Fit heads, and print a table of how good they are."""
    from flowpm_dist.cosmology.uniform_priors import UniformPriors
    from flowpm_dist.posteriors import Answers, Summaries, calibration_of, fit_posterior
    from flowpm_dist.statistics.map_summaries import MAP_STATISTICS, measured_maps
    from flowpm_dist.statistics.summaries import joined

    maps, truth = noisy_maps(folder)
    parts, priors = measured_maps(tuple(MAP_STATISTICS), maps), UniformPriors(PRIORS)
    eighth = len(truth) // 8
    train, validation, test = np.split(np.arange(len(truth)), [6 * eighth, 7 * eighth])
    print(
        f"{len(train)} universes to fit to, {len(validation)} to choose on, {len(test)} to judge on"
    )
    columns = [f"{what} {name}" for name in PRIORS for what in ("rmse", "width", "in 68 %")]
    print(
        "| statistics | gain [nat] | " + " | ".join(columns) + " |\n|" + "---|" * (2 + len(columns))
    )
    for names in SETS:
        features = joined(parts, names)
        train_set, chosen_on = (Summaries(features[n], truth[n]) for n in (train, validation))
        posterior = fit_posterior(head, priors, train_set, chosen_on)
        samples = posterior.sample(features[test], SAMPLES)
        answers = Answers(priors, truth[test], samples, posterior.gain(truth[test], features[test]))
        found = calibration_of(answers, np.arange(len(test)))
        numbers = [
            f"{value:.3f}"
            for n in range(len(PRIORS))
            for value in (found.rmse[n], found.width[n], found.coverage[0][n])
        ]
        gain = f"{found.gain:.2f} ± {found.gain_error:.2f}"
        print(f"| {', '.join(names)} | {gain} | " + " | ".join(numbers) + " |", flush=True)


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("draw", "fit"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--universes", type=int, default=768)
    parser.add_argument("--pixels", type=int, default=16)
    parser.add_argument("--head", default="gaussian")
    asked = parser.parse_args()
    if asked.what == "draw":
        draw(asked.folder, asked.universes, asked.pixels)
    else:
        fit(asked.folder, asked.head)


if __name__ == "__main__":
    main()
