"""What massive neutrinos do to a run: their dip in the power, and what a step costs with them.

    python benchmarks/neutrinos.py [--grid 128] [--size 256] [--steps 10] [--turns 5]
    python benchmarks/neutrinos.py --against mpgadget [--integrator bullfrog] [--steps 10]
        [--mesh-factor 2]

Runs with and without neutrinos begin with the same noise and A_s. The table has the ratio of their
power at z = 0, of cold matter and baryons (which the particles are) and of all matter, and the
same of linear theory, averaged over bins. A step is timed in turns, each with and without
neutrinos; the median ratio is printed.

`--against mpgadget` compares the ratio of power with to without neutrinos with MP-Gadget's, whose
neutrinos are the linear response of Ali-Haimoud and Bird 2012 (arXiv:1209.0461). Both codes begin
with the same particles; tests/data/README.md describes the runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

import flowpm_dist as fpm
from flowpm_dist.cosmology import Theory

PLANCK = fpm.Cosmology.planck18().replace(radiation=True, A_s=2.1e-9)
BINS = np.array([0.03, 0.06, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.3])
MPGADGET = Path(__file__).parents[1] / "tests" / "data" / "mpgadget_neutrinos.npz"


def compare_with_mpgadget(options: argparse.Namespace) -> None:
    """Prints the largest differences of the ratio of power, of cb and of all matter."""
    with np.load(MPGADGET) as file:
        data = dict(file)
    numbers = {n: float(data[n]) for n in ("Omega_m", "Omega_b", "h", "n_s", "A_s", "N_eff")}
    massless = fpm.Cosmology(**numbers, radiation=True, transfer="camb")
    sim = fpm.Simulation(
        massless,
        int(data["grid"]),
        float(data["box_size"]),
        fpm.scale_factor_steps(float(data["a_initial"]), 1.0, options.steps),
        integrator=options.integrator,
        mesh_factor=options.mesh_factor,
        lpt_order=int(data["lpt_order"]),
        precision="float64",
    )

    def spectrum(state: fpm.State) -> np.ndarray:
        fields = state.density(2), state.density(2, shift=0.5)
        return fpm.power_spectrum(fields[0], bins=data["edges"], interlaced=fields[1]).power

    print(f"{options.integrator}, {options.steps} steps, mesh factor {options.mesh_factor}")
    print("| sum of masses [eV] | z | cb, k < 0.5 | cb, 0.5 to 1 | all, k < 0.5 | all, 0.5 to 1 |")
    print("|---|---|---|---|---|---|")
    k, times, runs = data["k"], data["a"], []
    for mass, power, response in zip(
        data["m_nu"], data["power_cb"], data["neutrinos"], strict=True
    ):
        cosmology = massless.replace(m_nu=float(mass))
        found = sim.run(
            seed=int(data["seed"]), cosmology=cosmology, outputs=times, on_output=spectrum
        )
        runs.append((np.array(found), power))
        if not mass:
            continue
        neutrinos = Theory(cosmology).background.neutrinos
        for n, a in enumerate(times):
            fraction = float(neutrinos.fraction(a))
            theirs = (1 - fraction + fraction * response[n]) ** 2
            of_cb = runs[-1][0][n] / runs[0][0][n] / (runs[-1][1][n] / runs[0][1][n]) - 1
            of_all = (1 + of_cb) * np.asarray(neutrinos.matter(k, a)) ** 2 / theirs - 1
            cells = [
                f"{100 * np.abs(ratio[here]).max():.2f} %"
                for ratio in (of_cb, of_all)
                for here in (k < 0.5, (k >= 0.5) & (k < 1.0))
            ]
            print(f"| {mass:g} | {1 / a - 1:g} | " + " | ".join(cells) + " |", flush=True)


def show_the_dip(options: argparse.Namespace) -> None:
    """Prints the change of the power, and the time of a step."""
    steps = fpm.scale_factor_steps(0.1, 1.0, options.steps)
    sims = [
        fpm.Simulation(PLANCK.replace(m_nu=mass), options.grid, options.size, steps)
        for mass in (0.0, options.m_nu)
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
    for _ in range(options.turns):
        for sim, each in zip(sims, times, strict=True):
            each.append(np.median(sim.run(seed=1).timings["steps"][1:]))
    pairs = np.divide(times[1], times[0])
    print(f"a step with neutrinos over one without: {np.median(pairs):.3f} ({pairs.round(3)})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("grid", 128), ("size", 256.0), ("steps", 10), ("turns", 5)):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--m-nu", type=float, default=0.3, help="sum of the masses [eV]")
    parser.add_argument("--against", choices=["mpgadget"], help="compare with another code")
    parser.add_argument("--integrator", default="bullfrog", help="of the comparison")
    parser.add_argument("--mesh-factor", type=int, default=2, help="of the comparison")
    options = parser.parse_args()
    compare_with_mpgadget(options) if options.against else show_the_dip(options)


if __name__ == "__main__":
    main()
