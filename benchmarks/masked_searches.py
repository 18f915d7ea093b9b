"""Searches for initial conditions under masks, with and without the preconditioner.

    python benchmarks/masked_searches.py [--masks quarter slab sphere] [--counts 5 20] [--grid 32]

Mocks of Poisson counts in cells of 8 Mpc/h, through first-order LPT, and 200 gradients of a search:

    quarter   a quarter column is masked, and half of an octant is observed
    slab      a quarter of the box is masked, and half of a corner is observed
    sphere    a sphere of half the box is observed

The script prints how each search ended, and r(k) and T(k) of the white noise in the first bin.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import tensorflow as tf

import flowpm_dist as fpm
from flowpm_dist import reconstruction as rec
from flowpm_dist.observables import ForwardModel
from flowpm_dist.observables.noise import positive_density
from flowpm_dist.reconstruction.preconditioner import Preconditioner

MASKS = ("quarter", "slab", "sphere")
SEED, GRADIENTS = 42, 200


def mask_of(name: str, grid: int) -> np.ndarray:
    """Returns the share of each cell that is observed [x, y, z]."""
    mask, half = np.ones([grid] * 3), grid // 2
    if name == "quarter":
        mask[:half, :half] = 0
        mask[half:, half:, half:] = 0.5
    elif name == "slab":
        mask[:, :, : grid // 4] = 0
        mask[:half, :half, half:] = 0.5
    else:
        x = np.arange(grid) - grid / 2 + 0.5
        mask = (x[:, None, None] ** 2 + x[:, None] ** 2 + x**2 < (0.4924 * grid) ** 2) * 1.0
    return mask


def main() -> None:
    """Search, and print a line for each search."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=MASKS)
    parser.add_argument("--counts", nargs="+", type=int, default=[5, 20], help="in a cell")
    parser.add_argument("--grid", type=int, default=32)
    options = parser.parse_args()
    edges = fpm.scale_factor_steps(0.1, 1.0, 3)
    cosmology, size = fpm.Cosmology.planck18(), 8.0 * options.grid
    model = ForwardModel(fpm.Simulation(cosmology, options.grid, size, edges, lpt_order=1), "1lpt")
    model.hold_halo()
    mock, box = rec.Universe.mock(model, SEED), model.box
    density = positive_density(tf.cast(mock.expected, tf.float64)).numpy()
    ways: dict[str, Any] = {"with": Preconditioner.__call__, "without": lambda _, field: field}
    for count, name in [(count, name) for count in options.counts for name in options.masks]:
        mask = mask_of(name, options.grid)
        counts = np.random.default_rng(SEED).poisson(count * mask * density)
        data, mask = (tf.constant(values, box.dtype) for values in (counts, mask))
        posterior = rec.Posterior(model, rec.Poisson(box, data, count, mask))
        for way, call in ways.items():
            Preconditioner.__call__ = call  # type: ignore[method-assign]
            stages = rec.default_stages(posterior, GRADIENTS)
            search, rows, begin = (
                rec.Search(posterior, rec.LBFGS(), stages),
                [],
                time.process_time(),
            )
            found = search.run(lambda row, _, to=rows: to.append(row))
            spent = time.process_time() - begin
            of_noise = fpm.compare(fpm.Field(found.field, box), mock.state.white_noise)
            print(
                f"{name}, {count} in a cell, {way} the preconditioner: loss {rows[-1].loss:.1f}, "
                f"r({of_noise.k[0]:.3f} h/Mpc) {of_noise.correlation[0]:.4f}, "
                f"T {of_noise.transfer[0]:.3f}, left {search.progress.left:.2g}, "
                f"{search.outcome}, {spent:.0f} s of processor time",
                flush=True,
            )


if __name__ == "__main__":
    main()
