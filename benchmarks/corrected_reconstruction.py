"""Initial conditions of TreePM universes, reconstructed with several forward models.

    python benchmarks/corrected_reconstruction.py FILE [--gradients 60] [--correction network ...]

FILE is a TreePM run of benchmarks/treepm.py, whose density at a = 1 each kind of steps fits in so
many gradients. The density is on the particles' lattice and has noise of a tenth of the mean. The
model's error is 0.3 as in benchmarks/other_universes.py. The script prints r(k) and T(k) of the
linear fields.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from emulator import ROWS, Universe, options_of

from flowpm_dist import reconstruction as rec
from flowpm_dist.evolution.corrections import SHIPPED
from flowpm_dist.observables import ForwardModel
from flowpm_dist.statistics import compare

SIGMA = 0.1
"""Noise of the density [mean density]."""


def main() -> None:
    """Fit, and print r(k) and T(k)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("universe", type=Path)
    parser.add_argument("--gradients", type=int, default=60)
    parser.add_argument("--steps", type=int, help="instead of 10 or 20")
    parser.add_argument("--correction", nargs="*", default=list(SHIPPED))
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=["deconvolve off", "B = 2"])
    arguments = parser.parse_args()
    universe = Universe(arguments.universe, arguments.steps)
    rows: dict[str, dict[str, Any]] = {"plain": {}}
    rows |= {each: options_of(each) for each in arguments.correction}
    rows |= {name: ROWS[name] for name in arguments.rows}
    density = universe.states[-1].density().numpy()
    noisy = density + SIGMA * np.random.default_rng(0).normal(size=density.shape)
    truth = universe.first().linear_delta
    for number, (name, options) in enumerate(rows.items()):
        model = ForwardModel(universe.simulation(options), "pm")
        model.hold_halo()
        data = tf.constant(noisy, model.box.dtype)
        likelihood = rec.Gaussian(model.box, data, sigma=SIGMA, error=0.3)
        posterior = rec.Posterior(model, likelihood)
        stages = rec.default_stages(posterior, evaluations=arguments.gradients)
        search = rec.Search(posterior, rec.LBFGS(), stages)
        found = search.run(lambda row, point: None)
        both = compare(model.run(found.field, {}).linear_delta, truth)
        if number == 0:
            print("k [h/Mpc] | | " + " | ".join(f"{k:.2f}" for k in both.k))
        print(f"{name}: {search.outcome}, left {search.progress.left:.2g}")
        for sign, values in (("r", both.correlation), ("T", both.transfer)):
            print(f"{name} | {sign} | " + " | ".join(f"{x:.3f}" for x in values), flush=True)


if __name__ == "__main__":
    main()
