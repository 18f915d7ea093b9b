"""Simulation-based calibration of chains: is their posterior of sigma8 right?

    python benchmarks/chains_calibration.py run FOLDER [--grid 8] [--structure 2lpt] [--mocks 64]
        [--method microcanonical] [--energy-error 1e-4] [--draws 60] [--minutes 9]
    python benchmarks/chains_calibration.py report FOLDER... [--figure ranks.png]

Each mock has its own sigma8 and white noise, drawn from the priors, in cells of 16 Mpc/h at z = 1
with Gaussian noise. Two chains of each mock start at universes of the prior, with sigma8 at its 2 %
and 98 % quantiles. All chains of all mocks form one batch with one step size. `run` stops after
some minutes; a second call continues it.

`report` compares several runs. It prints ranks of the truth (Talts and others 2018) for sigma8 and
for a mode of the largest scales, which should be uniform, and R-hat and the effective number of
draws for both. The posterior of sigma8 is known for a linear universe; there it prints how far the
means and widths of the chains are from it. Each mock's draws are thinned by its own effective
number. Runs of the same linear universes are compared with the first, mock by mock. An energy error
64 times smaller halves the steps of "microcanonical".
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import of_mean

from meshimpl import launch

CELL, NOISE = 16.0, 0.5
"""Side of a cell [Mpc/h], and standard deviation of its noise [mean density]."""
RANGE = (0.6, 1.0)
"""Of sigma8, with a uniform prior."""
SETTLED = 1.1
"""R-hat of a mock above which its chains are counted as not settled."""
ENDS = 2.0
"""Where chains begin in sigma8, in widths of its normal unknown."""
MODE = 0
"""Number of the mode of the largest scales that is watched."""
HELD, FREE = 10, 30
"""Moves of the warm-up, with sigma8 held and free."""


def run(folder: Path, request: dict[str, Any], minutes: float) -> None:
    """Moves the chains of all mocks until they are done or the time is over."""
    launch.configure_threads()
    from flowpm_dist import reconstruction as rec
    from flowpm_dist.jobs.progress import Progress
    from flowpm_dist.jobs.results import Table
    from flowpm_dist.reconstruction.chains import Chains, Phase

    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "settings.json"
    if settings.exists() and json.loads(settings.read_text()) != request:
        raise SystemExit(f"{folder} holds another run: {settings.read_text()}")
    settings.write_text(json.dumps(request))
    posterior, start, truth = mocks_of(request)
    np.savez(folder / "truth.npz", **truth)
    sampler: rec.Sampler
    if request["method"] == "microcanonical":
        sampler = rec.Microcanonical(
            leaps=request["leaps"], energy_error=request["energy_error"], seed=1
        )
    else:
        kinds = {"hmc": rec.HMC, "adjusted-microcanonical": rec.AdjustedMicrocanonical}
        sampler = kinds[request["method"]](leaps=request["leaps"], target=request["target"], seed=1)
    checkpoints = rec.PointCheckpoints(folder / "chains", posterior.space)
    warm_up = [Phase(rec.EXACT, HELD, True), Phase(rec.EXACT, FREE)]
    chains = Chains(
        posterior,
        sampler,
        warm_up=warm_up,
        draws=request["draws"],
        checkpoints=checkpoints,
        every=2,
    )
    found = checkpoints.restore()
    done = 0 if found is None else found[0].iteration
    count = 2 * request["mocks"]
    names = [f"{what} {chain}" for what in ("sigma8", "mode") for chain in range(count)]
    facts = ("move", "drawn", "evaluations", "step", "acceptance", "energy_error")
    table = Table(folder / "draws.csv", (*facts, *names), done + 1)
    progress, end = Progress(rank=0), time.monotonic() + 60 * minutes

    def report(move: Any) -> None:
        draw = move.draw
        values = np.concatenate(
            [
                posterior.parameters(draw.point)["sigma8"].numpy(),
                rec.large_modes(draw.point.field, posterior.space.box)[:, MODE],
            ]
        )
        numbers = (move.number, move.drawn, draw.evaluations, float(draw.step))
        numbers += (float(draw.acceptance.mean()), float(draw.energy_error.mean()))
        row = dict(zip(facts, numbers, strict=True))
        table.add(row | {name: float(x) for name, x in zip(names, values, strict=True)})
        progress("moves", move.number, chains.moves, f"step {draw.step:.3f}")
        if time.monotonic() > end and move.number < chains.moves:
            chains.save()
            raise SystemExit(f"{move.number} of {chains.moves} moves; call it again to go on")

    try:
        chains.run(start, report, resume=found is not None)
        chains.save()
    finally:
        table.close()


def mocks_of(request: dict[str, Any]) -> tuple[Any, Any, dict[str, np.ndarray]]:
    """Returns the posterior of all chains, where they begin, and the truth of the mocks."""
    import tensorflow as tf
    from scipy.stats import norm

    import flowpm_dist as fpm
    from flowpm_dist import reconstruction as rec
    from flowpm_dist.observables import ForwardModel

    grid, mocks = request["grid"], request["mocks"]
    order = 2 if request["structure"] == "2lpt" else 1
    sim = fpm.Simulation(fpm.Cosmology.planck18(), grid, CELL * grid, [0.1, 0.5], lpt_order=order)
    model, box = ForwardModel(sim, request["structure"]), sim.box_of(2 * mocks)
    rng, priors = np.random.default_rng([request["seed"], 0]), {"sigma8": RANGE}
    space = rec.Space(box, tuple(priors))
    low, high = RANGE
    sigma8 = low + (high - low) * norm.cdf(rng.standard_normal(mocks))
    twice = np.repeat(np.arange(mocks), 2)
    field = tf.gather(space.normal(request["seed"], 1).field, 2 * twice)
    noise = rng.standard_normal((mocks, grid, grid, grid))[twice]
    given = {"sigma8": tf.constant(sigma8[twice])}
    data = model(field, given) + tf.constant(NOISE * noise, box.dtype)
    posterior = rec.Posterior(model, rec.Gaussian(box, data, NOISE), priors)
    truth = {"sigma8": sigma8, "mode": rec.large_modes(field, box)[::2, MODE]}
    if request["structure"] == "linear":
        one = {"sigma8": tf.constant(1.0, tf.float64)}
        truth |= exact(np.asarray(data)[::2], np.asarray(model.linear_response(one)))

    def start() -> Any:
        away = space.normal(request["seed"], 2)
        ends = np.tile([-ENDS, ENDS], mocks)[:, np.newaxis]
        return rec.Unknowns(away.field, tf.constant(ends))

    return posterior, start, truth


def exact(data: np.ndarray, response: np.ndarray) -> dict[str, np.ndarray]:
    """Returns mean and width of the posterior of sigma8 of linear universes [mock, x, y, z].

    Modes are independent; the variance of each is the sum of the structure's and the noise's.
    """
    grid = data.shape[-1]
    modes = np.abs(np.fft.fftn(data - 1, axes=(1, 2, 3))) ** 2 / grid**3
    n = np.arange(grid)
    kz = np.minimum(n, grid - n)
    power = np.transpose(response[kz][:, :grid], (2, 1, 0)).astype(float) ** 2
    sigma8 = np.linspace(*RANGE, 2001)
    logs = np.empty((len(data), len(sigma8)))
    for i, value in enumerate(sigma8):
        variance = value**2 * power + NOISE**2
        logs[:, i] = -0.5 * np.sum(modes / variance + np.log(variance), axis=(1, 2, 3))
    share = np.exp(logs - logs.max(axis=1, keepdims=True))
    share /= share.sum(axis=1, keepdims=True)
    mean = share @ sigma8
    return {"exact_mean": mean, "exact_width": np.sqrt(share @ sigma8**2 - mean**2)}


def report(folders: list[Path], figure: Path | None) -> None:
    """Prints a table of several runs, and draws the histograms of their ranks."""
    from flowpm_dist.io.figures import save_figure
    from flowpm_dist.posteriors.figures import rank_figure

    found, first = {}, {}
    for folder in folders:
        calibration, facts, away = judged(folder)
        request, step = facts["settings"], facts["step"]
        adjusted = "" if request["method"] == "microcanonical" else f"\n{request['method']}"
        label = f"{request['grid']}³, {request['structure']},\nsteps of {step:.2f}{adjusted}"
        found[label] = calibration
        facts = {"run": folder.name, **facts}
        if away:
            other, known = first.setdefault(away["known"].tobytes(), (folder.name, away))
            if other != folder.name:
                facts["less " + other] = {
                    name: of_mean(away[name] - known[name]) for name in away if name != "known"
                }
        print(json.dumps(facts, indent=1))
    if figure is not None:
        save_figure(rank_figure(found), figure)


def judged(folder: Path) -> tuple[Any, dict[str, Any], dict[str, np.ndarray]]:
    """Returns the calibration of a run, further numbers of its chains, and numbers of each mock.

    The last are for linear universes only: the distance from the known posterior.
    """
    from flowpm_dist.cosmology.options import UniformPriors
    from flowpm_dist.jobs.results import read_rows
    from flowpm_dist.posteriors import Answers, calibration_of
    from flowpm_dist.posteriors.calibration import LEVELS, uniform_p
    from flowpm_dist.reconstruction import convergence

    request = json.loads((folder / "settings.json").read_text())
    rows = [row for row in read_rows(folder / "draws.csv") if int(row["drawn"])]
    truth, mocks = np.load(folder / "truth.npz"), request["mocks"]
    names = ("sigma8", "mode")
    columns = [[f"{name} {chain}" for chain in range(2 * mocks)] for name in names]
    drawn = np.array([[[float(row[c]) for c in group] for group in columns] for row in rows])
    drawn = drawn.reshape(len(rows), len(names), mocks, 2)  # [draw, name, mock, chain]
    of_each = np.moveaxis(drawn, 3, 1).reshape(len(rows), 2, -1)  # [draw, chain, name x mock]
    checked = convergence(of_each)
    ess, rhat = (x.reshape(len(names), mocks) for x in (checked.ess, checked.rhat))
    samples = np.transpose(drawn, (2, 0, 3, 1)).reshape(mocks, -1, len(names))
    # Modes have a normal prior. A wide uniform one does, because TARP is not reported for them.
    priors = UniformPriors({"sigma8": RANGE, "mode": (-6.0, 6.0)})
    true = np.stack([truth[name] for name in names], axis=1)
    answers = Answers(priors, true, samples, np.zeros(mocks))
    ranks, kept = ranks_of(drawn, true, ess)
    found = dataclasses.replace(
        calibration_of(answers, np.arange(mocks)),
        ranks=ranks,
        ranks_p=np.array([uniform_p(column, mocks) for column in ranks.T]),
    )
    settled = rhat.T <= SETTLED
    values = drawn[:, 0].transpose(1, 0, 2).reshape(mocks, -1)
    mean, width = values.mean(axis=1), values.std(axis=1)
    pull = (truth["sigma8"] - mean) / width
    facts: dict[str, Any] = {
        "settings": request,
        "draws": len(rows),
        "ranked of each": {
            n: [float(np.median(x)), int(x.min())] for n, x in zip(names, kept.T, strict=True)
        },
        "step": float(np.mean([float(row["step"]) for row in rows])),
        "acceptance": float(np.mean([float(row["acceptance"]) for row in rows])),
        "gradients of a draw": float(np.mean([float(row["evaluations"]) for row in rows])),
        "P of ranks": dict(zip(names, found.ranks_p.tolist(), strict=True)),
        f"mocks with R-hat above {SETTLED}": dict(
            zip(names, (~settled).sum(axis=0).tolist(), strict=True)
        ),
        "P of ranks of the others": {
            n: uniform_p(x[use], int(use.sum()))
            for n, x, use in zip(names, ranks.T, settled.T, strict=True)
        },
        "rhat": {
            n: [float(np.median(x)), float(x.max())] for n, x in zip(names, rhat, strict=True)
        },
        "ess": {n: [float(np.median(x)), float(x.min())] for n, x in zip(names, ess, strict=True)},
        "coverage 68.3 %": float(np.mean(np.abs(2 * ranks[:, 0] - 1) <= LEVELS[0])),
        "width": float(width.mean()),
        "mean of (truth - mean) / width": of_mean(pull),
        "mean square of that": of_mean(pull**2),
    }
    away = {}
    if "exact_mean" in truth:
        away["mean less the exact one, in widths"] = (mean - truth["exact_mean"]) / truth[
            "exact_width"
        ]
        away["variance over the exact one"] = (width / truth["exact_width"]) ** 2
        facts |= {name: of_mean(x) for name, x in away.items()}
        away["known"] = truth["exact_mean"]
    return found, facts, away


def ranks_of(
    drawn: np.ndarray, truth: np.ndarray, ess: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ranks of the truth among as many draws of each mock as are independent.

    Ranks among correlated draws heap at the ends. With their random part, ranks are uniform among
    any number of draws, so that all mocks can be combined.

    Args:
        drawn: [draw, name, mock, chain].
        truth: [mock, name].
        ess: the effective number of draws of all chains, [name, mock].

    Returns:
        The ranks, from 0 to 1, and the numbers of draws that they are among, [mock, name].
    """
    from flowpm_dist.posteriors.calibration import shares_below

    draws, chains, rng = len(drawn), drawn.shape[-1], np.random.default_rng(0)
    every = np.clip(np.ceil(chains * draws / ess), 1, draws).astype(int)
    ranks = np.empty(truth.shape)
    for mock, name in np.ndindex(truth.shape):
        step = every[name, mock]
        kept = drawn[step - 1 :: step, name, mock].reshape(1, -1, 1)
        ranks[mock, name] = shares_below(kept, truth[mock, name].reshape(1, 1, 1), rng)[0, 0]
    return ranks, chains * (draws // every.T)


def main() -> None:
    """Starts or continues a run, or reports."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run")
    runner.add_argument("folder", type=Path)
    runner.add_argument("--grid", type=int, default=8)
    runner.add_argument("--structure", choices=["linear", "1lpt", "2lpt"], default="2lpt")
    runner.add_argument("--mocks", type=int, default=64)
    runner.add_argument("--seed", type=int, default=1)
    methods = ["microcanonical", "adjusted-microcanonical", "hmc"]
    runner.add_argument("--method", choices=methods, default=methods[0])
    runner.add_argument("--energy-error", type=float, default=1e-4, dest="energy_error")
    runner.add_argument("--target", type=float, default=0.8)
    runner.add_argument("--leaps", type=int, default=32)
    runner.add_argument("--draws", type=int, default=60)
    runner.add_argument("--minutes", type=float, default=9.0)
    teller = commands.add_parser("report")
    teller.add_argument("folders", type=Path, nargs="+")
    teller.add_argument("--figure", type=Path)
    options = vars(parser.parse_args())
    if options.pop("command") == "report":
        report(options["folders"], options["figure"])
    else:
        run(options.pop("folder"), options, options.pop("minutes"))


if __name__ == "__main__":
    main()
