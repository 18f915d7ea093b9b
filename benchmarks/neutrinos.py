"""What massive neutrinos do to a run: their dip in the power, and what a step costs with them.

    python benchmarks/neutrinos.py [--grid 128] [--size 256] [--steps 10] [--turns 5]

Runs with and without neutrinos begin with the same noise and A_s. The table has the ratio of their
power at z = 0, of cold matter and baryons (which the particles are) and of all matter, and the
same of linear theory, averaged over bins. A step is timed in turns, each with and without
neutrinos; the median ratio is printed.
"""

from __future__ import annotations

import argparse

import numpy as np

import flowpm_dist as fpm

PLANCK = fpm.Cosmology.planck18().replace(radiation=True, A_s=2.1e-9)
BINS = np.array([0.03, 0.06, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.3])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("grid", 128), ("size", 256.0), ("steps", 10), ("turns", 5)):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--m-nu", type=float, default=0.3, help="sum of the masses [eV]")
    args = parser.parse_args()
    steps = fpm.scale_factor_steps(0.1, 1.0, args.steps)
    sims = [
        fpm.Simulation(PLANCK.replace(m_nu=mass), args.grid, args.size, steps)
        for mass in (0.0, args.m_nu)
    ]
    spectra = [fpm.power_spectrum(sim.run(seed=1).density()) for sim in sims]
    k, ratio = np.asarray(spectra[0].k), np.asarray(spectra[1].power / spectra[0].power)
    powers = [sim.theory.power for sim in sims]
    neutrinos = sims[1].theory.background.neutrinos
    fraction = float(neutrinos.fraction(np.ones([])))
    of_all = np.asarray(neutrinos.matter(k, 1.0)) ** 2
    linear = np.asarray(powers[1].cb(k) / powers[0](k))
    print(f"f_nu = {fraction:.5f}; ratios less 1, over f_nu")
    print("| k [h/Mpc] | cb | all matter | linear, cb | linear, all |\n|---|---|---|---|---|")
    for low, high in zip(BINS[:-1], BINS[1:], strict=True):
        here = (k >= low) & (k < high)
        rows = [ratio, ratio * of_all, linear, linear * of_all]
        cells = " | ".join(f"{(np.mean(row[here]) - 1) / fraction:.2f}" for row in rows)
        print(f"| {low:g} to {high:g} | {cells} |")
    times = [[], []]
    for _ in range(args.turns):
        for sim, each in zip(sims, times, strict=True):
            each.append(np.median(sim.run(seed=1).timings["steps"][1:]))
    pairs = np.divide(times[1], times[0])
    print(f"a step with neutrinos over one without: {np.median(pairs):.3f} ({pairs.round(3)})")


if __name__ == "__main__":
    main()
