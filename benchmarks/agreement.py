"""One question answered in four ways: sigma8 and Omega_m of one mock universe.

    python benchmarks/agreement.py chains FOLDER [--grid 32] [--chains 4] [--draws 60] [--minutes 9]
    python benchmarks/agreement.py simulate FOLDER [--train 2048] [--minutes 9]
    python benchmarks/agreement.py heads FOLDER [--head flow]
    python benchmarks/agreement.py sbi FOLDER
    python benchmarks/agreement.py network FOLDER [--ranks 2] [--reuse 6]
    python benchmarks/agreement.py report FOLDER [--figure agreement.png]

The mock has cells of 8 Mpc/h at z = 1, 2LPT, Gaussian noise of half the mean density in each cell,
and uniform priors.

chains: draws the initial conditions and both parameters from the posterior given the field. The
    chains start at the corners of the prior. A second call continues them.
simulate: draws universes from the prior, observes them with the same noise, and measures their
    statistics.
heads: fits our normalising flow, or another head, to the statistics as they are and compressed.
sbi: fits neural posterior estimation of the package sbi to the statistics as they are, in its own
    environment in ~/.cache/flowpm-dist; the first call installs it from the package registry.
network: trains a network on as many universes of the same observation by `flowpm-dist train`;
    `evaluate` fits the flow to it and `predict` answers. A second call continues.
report: compares means and widths. The posterior given the field should not be wider than the
    others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import flowpm, of_mean

from meshimpl import launch

HERE = Path(__file__).resolve().parent
CELL, NOISE, STEPS = 8.0, 0.5, (0.1, 0.5)
"""Side of a cell [Mpc/h], standard deviation of its noise [mean density], scale factors."""
RANGES = {"Omega_m": (0.1, 0.5), "sigma8": (0.6, 1.0)}
CORNER = 1.5
"""Where chains begin, in widths of the normal unknowns of the parameters."""
BATCH, TEST = 8, 256
STATISTICS = ("power", "histograms", "bispectrum")
SETS = {"P(k)": ("power",), "P(k), histograms": STATISTICS[:2]}
SETS |= {"P(k), histograms, bispectrum": STATISTICS}
SAMPLES = 4000
TRAINING = """
[box]
grid = {grid}
size = {size}
[cosmology]
Omega_b = 0.04897
h = 0.6766
n_s = 0.96822
[priors]
Omega_m = [0.1, 0.5]
sigma8 = [0.6, 1.0]
[evolution]
a_stop = 0.5
[observation]
structure = "2lpt"
sigma = {noise}
[network]
name = "sc18-periodic"
loss = "likelihood"
[training]
batch = 8
learning_rate = 2e-4
warmup = 25
validate_every = 100
checkpoint_every = 100
[data]
simulations = {train}
reuse = {reuse}
fill = 64
validation = {validation}
test = {test}
"""
"""What the network is trained on: the cosmology and the ranges of the mock."""


def model_of(grid: int) -> Any:
    """Returns the forward model, whose own cosmology is the mock's."""
    import flowpm_dist as fpm
    from flowpm_dist.observables import ForwardModel

    sim = fpm.Simulation(fpm.Cosmology.planck18(), grid, CELL * grid, STEPS, lpt_order=2)
    return ForwardModel(sim, "2lpt")


def mock_of(model: Any, seed: int) -> np.ndarray:
    """Returns the observed density of the mock [x, y, z]."""
    from flowpm_dist.reconstruction import Universe

    mock = Universe.mock(model, seed)
    return mock.expected.numpy() + NOISE * mock.unit_normal(seed)


def chains(folder: Path, options: argparse.Namespace) -> None:
    """Draws from the posterior of the field until all is drawn or the time is over."""
    launch.configure_threads()
    import tensorflow as tf

    from flowpm_dist import reconstruction as rec
    from flowpm_dist.jobs.progress import Progress
    from flowpm_dist.jobs.results import Table

    model, count = model_of(options.grid), options.chains
    box = model.simulation.box_of(count)
    data = tf.constant(mock_of(model, options.seed), box.dtype)
    posterior = rec.Posterior(model, rec.Gaussian(box, data, NOISE), RANGES)
    checkpoints = rec.PointCheckpoints(folder / "chains", posterior.space)
    given = {"leaps": options.leaps, "seed": 1}
    kinds = {
        "microcanonical": lambda: rec.Microcanonical(energy_error=options.energy_error, **given),
        "adjusted-microcanonical": lambda: rec.AdjustedMicrocanonical(**given),
    }
    walk = rec.Chains(
        posterior,
        kinds[options.method](),
        warm_up=rec.warm_up(posterior, options.warm_up, easy=True),
        draws=options.draws,
        checkpoints=checkpoints,
        every=1,
    )
    found = checkpoints.restore()
    names = [f"{name} {chain}" for name in (*RANGES, "loss") for chain in range(count)]
    facts = ("move", "drawn", "evaluations", "step", "acceptance", "seconds")
    done = 0 if found is None else found[0].iteration
    table = Table(folder / "draws.csv", (*facts, *names), done + 1)
    progress, begun = Progress(rank=0), time.monotonic()

    def start() -> Any:
        corners = itertools.islice(itertools.cycle(itertools.product((-1, 1), repeat=2)), count)
        field = posterior.space.normal(options.seed, 2).field
        return rec.Unknowns(field, tf.constant(CORNER * np.array(list(corners), float)))

    lap = [begun]

    def report(move: Any) -> None:
        draw, now = move.draw, time.monotonic()
        values = [x.numpy() for x in posterior.parameters(draw.point).values()]
        numbers = (move.number, move.drawn, draw.evaluations, float(draw.step))
        numbers += (float(draw.acceptance.mean()), now - lap[0])
        lap[0] = now
        row = dict(zip(facts, numbers, strict=True))
        values = np.concatenate([*values, draw.evaluation.loss])
        table.add(row | {name: float(x) for name, x in zip(names, values, strict=True)})
        progress("moves", move.number, walk.moves, f"step {draw.step:.3f}")
        if now > begun + 60 * options.minutes and move.number < walk.moves:
            walk.save()
            raise SystemExit(f"{move.number} of {walk.moves} moves; call it again to go on")

    try:
        walk.run(start, report, resume=found is not None)
        walk.save()
    finally:
        table.close()


def simulate(folder: Path, options: argparse.Namespace) -> None:
    """Keeps statistics of universes of the prior, a file for each batch of them."""
    launch.configure_threads()
    import tensorflow as tf

    from flowpm_dist.grid.field import Field
    from flowpm_dist.posteriors import measured
    from flowpm_dist.statistics.histogram import CellValues

    model, noisy = model_of(options.grid), CellValues(positive=False)
    box = model.simulation.box_of(BATCH)
    kept, begun = folder / "summaries", time.monotonic()
    kept.mkdir(exist_ok=True)
    if not (folder / "observed.npz").exists():
        single = model.simulation.box
        data = tf.constant(mock_of(model, options.seed), single.dtype)
        np.savez(folder / "observed.npz", **measured(STATISTICS, Field(data, single), noisy))
    total = -(-(options.train + options.train // 8 + TEST) // BATCH)
    for number in range(total):
        path = kept / f"{number:05d}.npz"
        if path.exists():
            continue
        if time.monotonic() > begun + 60 * options.minutes:
            raise SystemExit(f"{number} of {total} batches; call it again to go on")
        rng = np.random.default_rng([options.seed, 3, number])
        truth = {name: rng.uniform(low, high, BATCH) for name, (low, high) in RANGES.items()}
        white = tf.constant(rng.standard_normal(box.shape.to_integer_list), box.dtype)
        observed = model(white, {name: tf.constant(x) for name, x in truth.items()})
        observed += tf.constant(NOISE * rng.standard_normal(observed.shape), box.dtype)
        found = measured(STATISTICS, Field(observed, box), noisy)
        values = np.stack([truth[name] for name in RANGES], axis=1)
        aside = kept / f"aside-{number}.npz"
        np.savez(aside, truth=values, **found)
        aside.rename(path)
        if number % 10 == 0:
            print(f"{number + 1} of {total} batches", flush=True)


def summaries_of(folder: Path, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Returns features and truth of training, validation and test, and the mock's features.

    Features that are the same in all of the training set are left out.
    """
    parts = [np.load(path) for path in sorted((folder / "summaries").glob("[0-9]*.npz"))]
    features = np.concatenate([np.concatenate([p[n] for n in names], axis=1) for p in parts])
    truth = np.concatenate([p["truth"] for p in parts])
    mock = np.load(folder / "observed.npz")
    observed = np.concatenate([mock[n] for n in names], axis=1)
    train = (len(truth) - TEST) * 8 // 9
    varied = features[:train].std(axis=0) > 1e-9
    features, observed = features[:, varied], observed[:, varied]
    ends = {"train": slice(train), "validation": slice(train, -TEST), "test": slice(-TEST, None)}
    found = {f"{name}_features": features[part] for name, part in ends.items()}
    found |= {f"{name}_truth": truth[part] for name, part in ends.items()}
    ranges = np.array(list(RANGES.values()))
    return found | {"observed": observed, "low": ranges[:, 0], "high": ranges[:, 1]}


def heads(folder: Path, options: argparse.Namespace) -> None:
    """Fits a head to each set of statistics, and keeps samples for the mock."""
    launch.configure_threads()
    from flowpm_dist.cosmology.options import UniformPriors
    from flowpm_dist.posteriors import Answers, Summaries, calibration_of, compressed, fit_posterior

    priors, parts = UniformPriors(RANGES), ("train", "validation", "test")
    for number, names in enumerate(SETS.values()):
        data, gains = summaries_of(folder, names), []
        raw = [Summaries(data[f"{part}_features"], data[f"{part}_truth"]) for part in parts]
        *few, observed = compressed(
            priors, raw[0], [*(one.features for one in raw[1:]), data["observed"]]
        )
        kinds = {"as they are": [one.features for one in raw], "compressed": few}
        for kind, features in kinds.items():
            sets = [Summaries(x, one.truth) for x, one in zip(features, raw, strict=True)]
            posterior = fit_posterior(options.head, priors, *sets[:2])
            gains.append(posterior.gain(sets[2].truth, sets[2].features))
            samples = posterior.sample(sets[2].features, 1000)
            found = calibration_of(
                Answers(priors, sets[2].truth, samples, gains[-1]), np.arange(len(samples))
            )
            print(json.dumps({"of": names, "are": kind, **found.as_dict()}, indent=1), flush=True)
        print(
            json.dumps({"of": names, "compressed less as they are": of_mean(gains[1] - gains[0])})
        )
        samples = posterior.sample(observed, SAMPLES)[0]
        np.savez(folder / f"flow_{number}.npz", samples=samples, gain=gains[-1])
        np.savez(folder / f"features_{number}.npz", **data)


def sbi(folder: Path, options: argparse.Namespace) -> None:
    """Lets the package sbi answer, from the features that `heads` kept."""
    sys.path.append(str(HERE / "peers"))
    from environments import environment

    python = environment(HERE / "requirements-sbi.txt", "sbi")
    for number in range(len(SETS)):
        script = [str(python), str(HERE / "peers" / "run_sbi.py")]
        files = [f"{name}_{number}.npz" for name in ("features", "sbi")]
        subprocess.run([*script, *files, str(SAMPLES)], check=True, cwd=folder)


def network(folder: Path, options: argparse.Namespace) -> None:
    """Trains a network on universes of the same observation, and asks it about the mock."""
    launch.configure_threads()
    size = CELL * options.grid
    counts = {"train": options.train, "validation": options.train // 8, "test": TEST}
    run_file, training, volume = (folder / n for n in ("network.toml", "network", "mock.npy"))
    run_file.write_text(
        TRAINING.format(grid=options.grid, size=size, noise=NOISE, reuse=options.reuse, **counts)
    )
    np.save(volume, mock_of(model_of(options.grid), options.seed))
    ranks = ["--ranks", str(options.ranks)]
    again = ["--resume"] if training.exists() else []
    judge = ["--head", "flow", "--baseline", "power"]
    for words in (
        ["train", run_file, "--output", training, *ranks, *again],
        ["evaluate", training, *judge, *ranks],
        ["predict", training, volume, "--box-size", size, "--output", folder / "answer"],
    ):
        subprocess.run(flowpm(*words), check=True)


def report(folder: Path, options: argparse.Namespace) -> None:
    """Prints means and widths side by side, and draws the contours."""
    from agreement_report import report

    report(folder, list(RANGES), list(SETS), options.figure)


def main() -> None:
    """Does one stage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    stages = {f.__name__: f for f in (chains, simulate, heads, sbi, network, report)}
    parser.add_argument("stage", choices=stages)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--grid", type=int, default=32)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--method", default="microcanonical")
    parser.add_argument("--energy-error", type=float, default=1e-4)
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--leaps", type=int, default=16)
    parser.add_argument("--warm-up", type=int, default=40)
    parser.add_argument("--draws", type=int, default=60, help="draws of each chain")
    parser.add_argument("--train", type=int, default=2048)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--reuse", type=int, default=6, help="uses of each universe by the network")
    parser.add_argument("--head", default="flow")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.stage in ("chains", "simulate"):
        keep_settings(options)
    stages[options.stage](options.folder, options)


def keep_settings(options: argparse.Namespace) -> None:
    """Keeps what the mock is, or ends where the folder is of another one."""
    path = options.folder / f"{options.stage}.json"
    text = json.dumps({k: str(v) for k, v in vars(options).items() if k not in ("minutes",)})
    if path.exists() and path.read_text() != text:
        sys.exit(f"{options.folder} holds another run: {path.read_text()}")
    path.write_text(text)


if __name__ == "__main__":
    main()
