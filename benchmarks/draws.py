"""Gradients for each effective draw of the samplers, with moves of several lengths.

    python benchmarks/draws.py [--grid 32] [--ranks 1] [--gradients 2048] [--structure pm]
                               [--seed 1]

float32, cells of 8 Mpc/h, by default 2LPT and three particle-mesh steps, noise of two mean
densities. Two chains start at the truth, which is a draw from the posterior. A quarter of the
gradients tunes the step size. ArviZ counts the effective draws of the modes of the largest scales,
and of their squares, which say how well widths are known; the gradients of both chains count. With
--structure gaussian the posterior is a unit normal, the prior of the field. Compare the samplers at
the length of moves that is best for each.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import numpy as np
from common import report, start_worker

from meshimpl import launch

CHAINS = 2
LEAPS = {
    "hmc": (32, 64, 128),
    "adjusted-microcanonical": (16, 32, 64),
    "microcanonical": (8, 16, 32),
}
"""Numbers of leaps of a move that are tried; the largest number, where it varies."""


def worker(method: str, leaps: int, grid: int, gradients: int, structure: str, seed: int) -> None:
    """Draw on this job's ranks, and report the price."""
    launch.configure_threads()
    import tensorflow as tf

    import flowpm_dist as fpm
    from flowpm_dist import reconstruction as rec
    from flowpm_dist.observables import ForwardModel
    from flowpm_dist.reconstruction.sampler_options import METHODS

    edges = fpm.scale_factor_steps(0.1, 1.0, 3)
    sim = fpm.Simulation(fpm.Cosmology.planck18(), grid, 8.0 * grid, edges)
    is_gaussian = structure == "gaussian"
    model = ForwardModel(sim, "linear" if is_gaussian else structure)
    model.hold_halo()
    mock = rec.Universe.mock(model, 42)
    data = tf.constant(mock.expected.numpy() + 2 * mock.unit_normal(0), sim.box.dtype)
    box = sim.box_of(CHAINS)
    nothing = tf.zeros(box.block, box.dtype) if is_gaussian else None  # is observed
    posterior = rec.Posterior(model, rec.Gaussian(box, data, 2.0, nothing))
    objective = rec.EvenPosterior(posterior)
    sampler = METHODS[method](leaps=leaps, seed=seed).sampler()
    truth = tf.stack([mock.state.white_noise.block] * CHAINS)
    sampler.start(objective, rec.Unknowns(truth, posterior.space.zeros().parameters))
    spent = 0
    while spent < gradients // 4:
        spent += sampler.draw(learn=True).evaluations
    learnt, begin, drawn, errors = spent, time.perf_counter(), [], []
    while spent < gradients:
        draw = sampler.draw(learn=False)
        spent += draw.evaluations
        drawn.append(rec.large_modes(draw.point.field, box))
        errors.append(draw.energy_error)
    modes, paid = np.array(drawn), (spent - learnt) * CHAINS
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
    parser.add_argument("--structure", default="pm", choices=["pm", "2lpt", "1lpt", "gaussian"])
    parser.add_argument("--grid", type=int, default=32)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--gradients", type=int, default=2048, help="gradients of each chain")
    parser.add_argument("--seed", type=int, default=1, help="seed of the moves")
    options = parser.parse_args()
    given = {name: getattr(options, name) for name in ("grid", "gradients", "structure", "seed")}
    if options.role == "worker":
        worker(options.method, options.leaps, **given)
        return
    threads = max(1, len(os.sched_getaffinity(0)) // options.ranks)
    print(f"{options.grid}^3, {options.ranks} ranks x {threads} threads, {CHAINS} chains\n")
    methods = [options.method] if options.method else list(LEAPS)
    settings = [(m, n) for m in methods for n in ([options.leaps] if options.leaps else LEAPS[m])]
    for number, (method, leaps) in enumerate(settings):
        arguments = [f"--{key}={value}" for key, value in given.items()]
        arguments += [f"--method={method}", f"--leaps={leaps}"]
        found = start_worker(sys.argv[0], arguments, options.ranks, threads)
        if number == 0:
            print(f"{'sampler':>24s} " + " ".join(f"{name:>17s}" for name in ("leaps", *found)))
        values = " ".join(f"{value:17.3g}" for value in (leaps, *found.values()))
        print(f"{method:>24s} {values}", flush=True)


if __name__ == "__main__":
    main()
