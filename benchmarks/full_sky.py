"""Full-sky light cones compared with theory, and the cost of painting them.

    python benchmarks/full_sky.py theory [--grid 128] [--box 512] [--seeds 4] [--near 200]
    python benchmarks/full_sky.py cost   [--grid 128] [--box 512] [--turns 3]

theory: the universe keeps the linear field of z = 0 at a small amplitude. The sky has sources at
z = 0.4 and shells of matter beyond a given distance. Half the difference of a universe and its pair
with opposite noise is free of the lattice and of second order. Its power is divided by Limber's
integral over linear power, and over the power measured in the boxes.

cost: processor time and peak memory of three runs of ten steps, which take turns. The first has no
light cone. The second has a full-sky light cone of four sources up to z = 0.17. The third also
takes value and gradient of a loss on its maps.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from lensing import COSMOLOGY, Frozen

import flowpm_dist as fpm
from flowpm_dist.cosmology.background import Distances
from flowpm_dist.cosmology.line_of_sight import lensing_weight, limber_power
from flowpm_dist.observables.lensing import SourcePlane, born, lensing_efficiency
from flowpm_dist.observables.light_cone import FullSky, LightCone
from flowpm_dist.statistics import spherical_power, spherical_theory_in_bins


def measure(grid: int, box: float, seeds: int, near: float) -> None:
    """Print the frozen linear test on the whole sky."""
    size, z, nside = 0.03, 0.4, 128
    # Between particles: one that lies at the observer is on another side in the pair.
    middle = 0.5 * box + 0.5 * box / grid
    sky = LightCone(FullSky(nside=nside, z_max=z, observer=(middle, middle, middle)))
    options: dict[str, Any] = {"integrator": Frozen(), "lpt_order": 1}
    sim = fpm.Simulation(COSMOLOGY.replace(A_s=2e-9 * size**2), grid, box, [0.2, 1.0], **options)
    # Far from the observer, because the response of particles near the observer is not linear.
    distances, source = Distances(COSMOLOGY), [SourcePlane(z)]
    shells = np.arange(near, float(distances.comoving(1 / (1 + z))), 25.0)
    chi = shells[0] + (np.arange(256) + 0.5) / 256 * (shells[-1] - shells[0])
    a = distances.scale_factor(chi)
    kernel = lensing_weight(COSMOLOGY, chi, a=a) * lensing_efficiency(source, chi, distances)
    edges = [20, 40, 64, 96, 128, 192, 256]
    powers, spectra = [], []
    end = float(Distances(COSMOLOGY).comoving(1 / (1 + z)))
    copies = sky.sky.volume(end) / sim.box.volume * sim.box.cells
    for seed in range(seeds):
        begin = time.process_time()
        plus, minus = (sky.planes(sim, shells, seed=seed, paired=side) for side in (False, True))
        spent = time.process_time() - begin
        delta = 0.5 * (plus.delta - minus.delta).numpy().astype(np.float64) / size
        kappa = born(delta, plus.planes, source, COSMOLOGY)[0].numpy()
        powers.append(spherical_power(kappa, edges, window="bilinear").power)
        spectrum = fpm.power_spectrum(sim.lpt(seed=seed, a=1.0).linear_delta / size)
        spectra.append(spectrum.power)
        print(f"{seed + 1} of {seeds}: {spent / copies / 2 * 1e9:.0f} ns a copy", flush=True)
    mean, error = np.mean(powers, 0), np.std(powers, 0, ddof=1) / np.sqrt(seeds)
    today, k, own = fpm.LinearPower(COSMOLOGY), spectrum.k, np.mean(spectra, 0)

    def measured(wavenumber: tf.Tensor, a: tf.Tensor) -> tf.Tensor:
        inside = (wavenumber >= k[0] * 0.75) & (wavenumber <= k[-1])
        return tf.constant(np.where(inside, np.interp(wavenumber, k, own), 0.0))

    def theory(power: Any) -> np.ndarray:
        def spectrum(ell: np.ndarray) -> np.ndarray:
            return limber_power(ell, chi, a, np.full(256, chi[1] - chi[0]), kernel, power)[0, 0]

        return spherical_theory_in_bins(spectrum, edges, nside)

    linear, of_box = theory(lambda k, a: today(k, tf.ones_like(a))), theory(measured)
    print("| l | C_l / theory | C_l / theory with the power of the boxes |")
    for low, high, m, e, t, b in zip(edges, edges[1:], mean, error, linear, of_box, strict=False):
        print(f"| {low} to {high} | {m / t:.3f} +- {e / t:.3f} | {m / b:.3f} +- {e / b:.3f} |")


def cost(grid: int, box: float, turns: int) -> None:
    """Print what a light cone of the whole sky costs."""
    sim = fpm.Simulation(COSMOLOGY, grid, box, fpm.scale_factor_steps(0.1, 1.0, 10))
    sky = LightCone(FullSky(nside=128, z_max=0.17))
    sources = [SourcePlane(z) for z in (0.05, 0.09, 0.13, 0.17)]
    noise = sim.lpt(seed=1).white_noise.block

    def gradient() -> None:
        with tf.GradientTape() as tape:
            tape.watch(noise)
            kappa = sky.convergence(sim, sources, white_noise=noise).kappa
            loss = tf.reduce_sum(kappa**2)
        tape.gradient(loss, noise)

    jobs: dict[str, Callable[[], Any]] = {
        "run": lambda: sim.run(white_noise=noise),
        "run with a light cone": lambda: sky.convergence(sim, sources, white_noise=noise),
        "value and gradient": gradient,
    }
    spent: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(turns + 1):
        for name, job in jobs.items():
            begin = time.process_time()
            job()
            if turn:
                spent[name].append(time.process_time() - begin)
            else:
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
                print(f"peak memory after the first {name}: {peak:.0f} MiB", flush=True)
    end = float(Distances(COSMOLOGY).comoving(1 / 1.17))
    print(f"{sky.sky.volume(end) / sim.box.volume:.2f} boxes in the sphere")
    medians = {name: float(np.median(values)) for name, values in spent.items()}
    run, with_cone, both = medians.values()
    for name, value in medians.items():
        print(f"{name}: {value:.2f} s of processor time ({min(spent[name]):.2f} at least)")
    print(f"with a light cone / without: {with_cone / run:.2f}")
    print(f"value and gradient / light cone: {both / with_cone:.2f}")


def main() -> None:
    """Run one of the two."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["theory", "cost"])
    parser.add_argument("--grid", type=int, default=128)
    parser.add_argument("--box", type=float, default=512.0)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--near", type=float, default=200.0)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    if options.what == "theory":
        measure(options.grid, options.box, options.seeds, options.near)
    else:
        cost(options.grid, options.box, options.turns)


if __name__ == "__main__":
    main()
