"""How many gradients an effective draw costs: Hamiltonian and microcanonical Monte Carlo.

    python benchmarks/draws.py [--grid 32] [--ranks 1] [--gradients 2048]

float32, 8 Mpc/h a cell, 2LPT and three steps of the particle mesh, noise of two mean densities. Two
chains begin at the truth, which is a draw of the posterior; a quarter of the gradients go into the
step size. Effective draws as ArviZ counts them, of the modes of the largest scales; gradients of
both chains.
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
"""Of a move, at most."""


def worker(method: str, grid: int, gradients: int) -> None:
    """Draw on this job's ranks, and report the price."""
    launch.configure_threads()
    import tensorflow as tf

    import flowpm_dist as fpm
    from flowpm_dist import reconstruction as rec
    from flowpm_dist.observables import ForwardModel
    from flowpm_dist.reconstruction.mock import Mock

    edges = fpm.scale_factor_steps(0.1, 1.0, 3)
    sim = fpm.Simulation(fpm.Cosmology.planck18(), grid, 8.0 * grid, edges)
    model = ForwardModel(sim)
    model.hold_halo()
    mock = Mock.of(model, 42)
    everywhere = np.ones(sim.box.block)
    data = tf.constant(mock.noisy_density(2 * everywhere, everywhere, 0), sim.box.dtype)
    box = sim.box_of(CHAINS)
    posterior = rec.Posterior(model, rec.Gaussian(box, data, 2.0))
    objective = rec.EvenPosterior(posterior, posterior.curvature().scaling())
    kind = {"hmc": rec.HMC, "microcanonical": rec.Microcanonical}[method]
    sampler = kind(leaps=LEAPS[method], seed=1)
    truth = tf.stack([mock.white_noise.block] * CHAINS)
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
    parser.add_argument("--gradients", type=int, default=2048, help="of each chain")
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
