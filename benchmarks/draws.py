"""Gradients for each effective draw of the samplers, with moves of several lengths.

    python benchmarks/draws.py [--grid 32] [--ranks 1] [--gradients 2048] [--structure pm]
                               [--seed 1] [--length 2]

float32, cells of 8 Mpc/h, by default 2LPT and three particle-mesh steps, noise of two mean
densities. Two chains start at the truth, which is a draw from the posterior. A quarter of the
gradients tunes the step size. ArviZ counts the effective draws of the modes of the largest scales,
and of their squares, which say how well widths are known; the gradients of both chains count. With
--structure gaussian the posterior is a unit normal in numpy, of as many unknowns, on which the same
samplers move. The mean and the variance are known there, so the errors of the chains' own means and
variances, over all unknowns, give a second count. Compare each sampler at its best setting:
`--leaps` sets the length of a move of "hmc", and `--length` the length for the others. The leaps of
"microcanonical" only set how far apart draws are.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from common import report, start_worker

from meshimpl import launch

CHAINS = 2
LEAPS = {
    "hmc": (8, 16, 32, 64, 128),
    "adjusted-microcanonical": (128,),
    "microcanonical": (4,),
}
"""Numbers of leaps of a move that are tried; the largest number, where it varies."""


WATCHED = 32
"""Number of unknowns of the unit normal whose effective draws ArviZ counts."""


@dataclass(frozen=True)
class Vectors:
    """A vector of unknowns for each chain [chain, n], float64."""

    values: np.ndarray

    def __neg__(self) -> Vectors:
        return Vectors(-self.values)

    def __sub__(self, other: Vectors) -> Vectors:
        return Vectors(self.values - other.values)

    def plus(self, factor: float, other: Vectors) -> Vectors:
        """Returns self + factor x other."""
        return Vectors(self.values + factor * other.values)


class UnitNormal:
    """A unit normal posterior in numpy, with what samplers ask of a posterior and its space.

    Args:
        unknowns: their number.
    """

    names: tuple[str, ...] = ()
    held = False

    def __init__(self, unknowns: int) -> None:
        self.space, self.box = self, SimpleNamespace(cells=unknowns)
        self.scaling = SimpleNamespace(to_even=lambda x: x, from_even=lambda x: x)

    def evaluate(self, x: Vectors) -> Any:
        """Returns minus the log density and its gradient."""
        from flowpm_dist.reconstruction.posterior import Evaluation

        gradient: Any = x
        return Evaluation(0.5 * self.dot(x, x), np.zeros(CHAINS), gradient, 0.0)

    def normal(self, seed: int, use: int = 0, *number: int) -> Vectors:
        """Returns a draw for each chain."""
        from flowpm_dist.reconstruction.unknowns import random_numbers

        return Vectors(random_numbers(seed, use, *number).normal(size=(CHAINS, self.box.cells)))

    def dot(self, x: Vectors, y: Vectors) -> np.ndarray:
        """Returns the inner product for each chain."""
        return np.sum(x.values * y.values, axis=-1)

    def norm(self, x: Vectors) -> np.ndarray:
        """Returns the norm for each chain."""
        return np.sqrt(self.dot(x, x))

    def times(self, x: Vectors, factor: np.ndarray) -> Vectors:
        """Returns x multiplied by a number for each chain."""
        return Vectors(x.values * factor[:, np.newaxis])

    def chosen(self, which: np.ndarray, x: Vectors, y: Vectors) -> Vectors:
        """Returns x where a chain is chosen and y elsewhere."""
        return Vectors(np.where(which[:, np.newaxis], x.values, y.values))


def of_fields(grid: int, structure: str) -> tuple[Any, Any, Callable[[Any], np.ndarray]]:
    """Returns a posterior of fields, where chains begin, and what is watched of a point."""
    import tensorflow as tf

    import flowpm_dist as fpm
    from flowpm_dist import reconstruction as rec
    from flowpm_dist.observables import ForwardModel

    edges = fpm.scale_factor_steps(0.1, 1.0, 3)
    sim = fpm.Simulation(fpm.Cosmology.planck18(), grid, 8.0 * grid, edges, deconvolve=False)
    model = ForwardModel(sim, structure)
    model.hold_halo()
    mock = rec.Universe.mock(model, 42)
    data = tf.constant(mock.expected.numpy() + 2 * mock.unit_normal(0), sim.box.dtype)
    box = sim.box_of(CHAINS)
    posterior = rec.Posterior(model, rec.Gaussian(box, data, 2.0))
    truth = tf.stack([mock.state.white_noise.block] * CHAINS)
    begin = rec.Unknowns(truth, posterior.space.zeros().parameters)
    return rec.EvenPosterior(posterior), begin, lambda x: rec.large_modes(x.field, box)


def worker(
    method: str,
    leaps: int,
    grid: int,
    gradients: int,
    structure: str,
    seed: int,
    length: float | None = None,
) -> None:
    """Draw on this job's ranks, and report the price."""
    launch.configure_threads()
    from flowpm_dist import reconstruction as rec
    from flowpm_dist.reconstruction.sampler_options import METHODS

    is_gaussian = structure == "gaussian"
    objective: Any
    if is_gaussian:
        objective = UnitNormal(grid**3)
        point, watched = objective.normal(seed), lambda x: x.values
    else:
        objective, point, watched = of_fields(grid, structure)
    given = {} if length is None else {"length": length}
    sampler = METHODS[method](leaps=leaps, seed=seed, **given).sampler()
    sampler.start(objective, point)
    spent = 0
    while spent < gradients // 4:
        spent += sampler.draw(learn=True).evaluations
    learnt, begin, drawn, errors = spent, time.perf_counter(), [], []
    while spent < gradients:
        draw = sampler.draw(learn=False)
        spent += draw.evaluations
        drawn.append(watched(draw.point))
        errors.append(draw.energy_error)
    modes, paid = np.array(drawn), (spent - learnt) * CHAINS
    known = {}
    if is_gaussian:  # of mean 0 and variance 1
        means, variances = modes.mean(0), (modes**2).mean(0)
        known["known mean"] = paid / CHAINS * float(np.mean(means**2))
        known["known variance"] = paid / CHAINS * float(np.mean((variances - 1) ** 2)) / 2
        modes = modes[..., :WATCHED]
    price = paid / rec.convergence(modes).ess
    squares = paid / rec.convergence((modes - modes.mean((0, 1))) ** 2).ess
    report(
        {
            "step": draw.step,
            "energy error": float(np.mean(errors)),
            "gradients a draw": float(np.median(price)),
            "at most": float(np.max(price)),
            "of squares": float(np.median(squares)),
            "at most ": float(np.max(squares)),
            **known,
            "s/gradient": (time.perf_counter() - begin) / (spent - learnt) / CHAINS,
        }
    )


def main() -> None:
    """Print the price with each sampler and length."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("role", nargs="?", default="driver", choices=["driver", "worker"])
    parser.add_argument("--method", choices=list(LEAPS), help="only this sampler")
    parser.add_argument("--leaps", type=int, help="only moves of this length")
    parser.add_argument("--length", type=float, help="of a move, in widths; not of hmc")
    parser.add_argument("--structure", default="pm", choices=["pm", "2lpt", "gaussian"])
    parser.add_argument("--grid", type=int, default=32)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--gradients", type=int, default=2048, help="gradients of each chain")
    parser.add_argument("--seed", type=int, default=1, help="seed of the moves")
    options = parser.parse_args()
    given = {name: getattr(options, name) for name in ("grid", "gradients", "structure", "seed")}
    if options.role == "worker":
        worker(options.method, options.leaps, **given, length=options.length)
        return
    threads = max(1, len(os.sched_getaffinity(0)) // options.ranks)
    print(f"{options.grid}^3, {options.ranks} ranks x {threads} threads, {CHAINS} chains\n")
    methods = [options.method] if options.method else list(LEAPS)
    settings = [(m, n) for m in methods for n in ([options.leaps] if options.leaps else LEAPS[m])]
    for number, (method, leaps) in enumerate(settings):
        arguments = [f"--{key}={value}" for key, value in given.items()]
        arguments += [f"--method={method}", f"--leaps={leaps}"]
        if options.length is not None and method != "hmc":
            arguments.append(f"--length={options.length}")
        found = start_worker(sys.argv[0], arguments, options.ranks, threads)
        if number == 0:
            print(f"{'sampler':>24s} " + " ".join(f"{name:>17s}" for name in ("leaps", *found)))
        values = " ".join(f"{value:17.3g}" for value in (leaps, *found.values()))
        print(f"{method:>24s} {values}", flush=True)


if __name__ == "__main__":
    main()
