"""Gradients for each effective draw of Hamiltonian and microcanonical Monte Carlo.

    python benchmarks/draws.py [--grid 32] [--ranks 1] [--gradients 2048]

float32, cells of 8 Mpc/h, 2LPT and three particle-mesh steps, noise of two mean densities. Two
chains start at the truth, which is a draw from the posterior. A quarter of the gradients tunes the
step size. ArviZ counts the effective draws of the modes of the largest scales; the
gradients of both chains count.
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
LEAPS = {"hmc": 64, "microcanonical": 32}
"""Largest number of leaps of a move."""


def worker(method: str, grid: int, gradients: int) -> None:
    """Draw on this job's ranks, and report the price."""
    launch.configure_threads()
    import tensorflow as tf

    import flowpm_dist as fpm
    from flowpm_dist import reconstruction as rec
    from flowpm_dist.observables import ForwardModel

    edges = fpm.scale_factor_steps(0.1, 1.0, 3)
    sim = fpm.Simulation(fpm.Cosmology.planck18(), grid, 8.0 * grid, edges)
    model = ForwardModel(sim)
    model.hold_halo()
    mock = rec.Universe.mock(model, 42)
    data = tf.constant(mock.expected.numpy() + 2 * mock.unit_normal(0), sim.box.dtype)
    box = sim.box_of(CHAINS)
    posterior = rec.Posterior(model, rec.Gaussian(box, data, 2.0))
    objective = rec.EvenPosterior(posterior)
    kind = {"hmc": rec.HMC, "microcanonical": rec.Microcanonical}[method]
    sampler = kind(leaps=LEAPS[method], seed=1)
    truth = tf.stack([mock.state.white_noise.block] * CHAINS)
    sampler.start(objective, rec.Unknowns(truth, posterior.space.zeros().parameters))
    spent = 0
    while spent < gradients // 4:
        spent += sampler.draw(learn=True).evaluations
    learnt, begin, modes, errors = spent, time.perf_counter(), [], []
    while spent < gradients:
        draw = sampler.draw(learn=False)
        spent += draw.evaluations
        modes.append(rec.large_modes(draw.point.field, box))
        errors.append(draw.energy_error)
    effective = rec.convergence(np.array(modes)).ess
    price = (spent - learnt) * CHAINS / effective
    report(
        {
            "step": draw.step,
            "energy error": float(np.mean(errors)),
            "gradients a draw": float(np.median(price)),
            "at most": float(np.max(price)),
            "s/gradient": (time.perf_counter() - begin) / (spent - learnt) / CHAINS,
        }
    )


def main() -> None:
    """Print the price with each sampler."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("role", nargs="?", default="driver", choices=["driver", "worker"])
    parser.add_argument("--method", choices=list(LEAPS))
    parser.add_argument("--grid", type=int, default=32)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--gradients", type=int, default=2048, help="gradients of each chain")
    options = parser.parse_args()
    if options.role == "worker":
        worker(options.method, options.grid, options.gradients)
        return
    threads = max(1, len(os.sched_getaffinity(0)) // options.ranks)
    print(f"{options.grid}^3, {options.ranks} ranks x {threads} threads, {CHAINS} chains\n")
    for number, method in enumerate(LEAPS):
        given = {"method": method, "grid": options.grid, "gradients": options.gradients}
        arguments = [f"--{key}={value}" for key, value in given.items()]
        found = start_worker(sys.argv[0], arguments, options.ranks, threads)
        if number == 0:
            print(" ".join(f"{name:>18s}" for name in ("sampler", *found)))
        print(" ".join([f"{method:>18s}", *(f"{value:18.3g}" for value in found.values())]))


if __name__ == "__main__":
    main()
