"""Judges corrections by TreePM runs that they were not trained on.

    python benchmarks/emulator.py [--correction default network] [--output emulator] [--repeat 3]
    python benchmarks/emulator.py --universes FILES [--steps 10]
    python benchmarks/emulator.py --reconstruct 200 --universes FILE
    python benchmarks/emulator.py --light-cone

The truth is the same as in benchmarks/accuracy.py: MP-Gadget's runs from the same particles, 64^3
in 128 Mpc/h, at a = 0.5 and 1; or other runs in files of the same kind. Each row is BullFrog's
steps: plain, with `deconvolve`, with `deconvolve` and a correction, and on finer force meshes. The
cost is the median of runs in turns, divided by the plain run's. The results are OUTPUT.csv,
OUTPUT.md and OUTPUT.png. Of several universes the table has the mean, and in brackets the value
that is furthest from the truth. Velocities are compared on the particles' lattice, where they have
a spectrum: "v2" is their power over TreePM's, "1 - rv" is 1 minus their correlation. "P0s" and
"P2s" are the errors of the monopole and the quadrupole in redshift space, both over TreePM's
monopole; means of three lines of sight. On one rank.

With --reconstruct, each kind of steps fits the density of a TreePM run at a = 1 in so many
gradients. The density is on the particles' lattice and has noise of a tenth of the mean. The
model's error is 0.3 as in benchmarks/other_universes.py. The script prints r(k) and T(k) of the
linear fields.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from accuracy import near
from common import treepm_runs

import flowpm_dist as fpm
from flowpm_dist import reconstruction as rec
from flowpm_dist.cosmology.nonlinear import Halofit
from flowpm_dist.evolution.corrections import load_correction
from flowpm_dist.grid.field import Field
from flowpm_dist.io.figures import (
    COLOURS,
    MUTED,
    new_figure,
    plain_log_ticks,
    save_figure,
    style_axes,
)
from flowpm_dist.observables import ForwardModel
from flowpm_dist.observables.lensing import SourcePlane, convergence_power
from flowpm_dist.observables.light_cone import FlatField, LightCone
from flowpm_dist.statistics import (
    Comparison,
    bispectrum,
    compare,
    density_histogram,
    multipoles,
)
from flowpm_dist.statistics.angular_spectra import angular_power

AT = np.array([0.4, 1.0, 2.0, 3.0])
"""Wavenumbers of the tables [1 / particle spacing]; the Nyquist wavenumber is pi."""
AT_VELOCITIES = AT[1:3]
WIDTH = 1.1
"""Ratio of the edges of a bin of velocities to its wavenumber."""
TIMES = (0.5, 1.0)
DENSITIES = np.geomspace(0.2, 10.0, 9)
TRIANGLES = np.array([0.4, 1.0, 1.6])
"""Edges of the bins of the bispectrum [1 / particle spacing]."""
EDGES = [200, 400, 700, 850, 1180, 1700, 2350, 3000]
"""Edges of bins of multipoles; two of them lie around 1000 and 2000."""
CONES = 4
"""Light cones of each row, of two seeds in turns; the first compiles and is not timed."""
MEASURES = ("P ", "1 - r ", "P0s ", "P2s ", "v2 ", "1 - rv ")
"""Beginnings of the columns of the table that belong to a wavenumber."""
PERCENTAGES = ("histogram", "bispectrum")
SIGMA = 0.1
"""Noise of a density that is reconstructed [mean density]."""
NAMES = ("Omega_m", "Omega_b", "h", "n_s", "sigma8")


class Universe:
    """A TreePM run at two times, and runs from its particles.

    Args:
        path: file of the reference data.
        steps: the number of steps of runs from its particles.
    """

    def __init__(self, path: Path, steps: int) -> None:
        self.name = path.stem.removeprefix("treepm_")
        self._edges = fpm.scale_factor_steps(0.1, 1.0, steps)
        with np.load(path, allow_pickle=False) as data:
            self.cosmology = fpm.Cosmology(**{name: float(data[name]) for name in NAMES})
            self.size = float(data["box_size"])
            self.start = (data["displacement_initial"], data["velocity_initial"])
            finals = list(zip(data["displacement_final"], data["velocity_final"], strict=True))
            self._seed = int(data["white_noise_seed"])
        self._grid = len(finals[0][0])
        self.spacing = self.size / self._grid
        self.states = [
            replace(
                state,
                displacement=Field(tf.constant(displacement), state.box),
                velocity=Field(tf.constant(velocity), state.box),
            )
            for state, (displacement, velocity) in zip(self.run({}), finals, strict=True)
        ]

    def simulation(self, options: Mapping[str, Any]) -> fpm.Simulation:
        """Returns the simulation of a row."""
        more = {"integrator": "bullfrog", "lpt_order": 3, **options}
        return fpm.Simulation(self.cosmology, self._grid, self.size, self._edges, **more)

    def run(self, options: Mapping[str, Any]) -> list[fpm.State]:
        """Returns the states at the times of the truth."""
        return self.simulation(options).run(particles=self.start, outputs=TIMES)

    def first(self) -> fpm.State:
        """Returns a state with the white noise and the linear overdensity from which it began."""
        return self.simulation({}).lpt(seed=self._seed)

    def seconds(self, options: Mapping[str, Any]) -> float:
        """Returns the duration of the steps of a run [s]."""
        return float(sum(self.simulation(options).run(particles=self.start).timings["steps"]))


class Measured:
    """Densities of a state, and what is measured of them."""

    def __init__(self, state: fpm.State) -> None:
        self.densities = state.density(4), state.density(4, shift=0.5)
        coarse = state.density(1)
        self.histogram = density_histogram(coarse, DENSITIES).counts / coarse.box.cells
        spacing = coarse.box.cell[0]
        found = bispectrum(coarse, bins=(TRIANGLES / spacing).tolist())
        self.bispectrum = np.asarray(found.bispectrum)
        self._seen = [
            multipoles(state.density(2, redshift_space=axis), axis=axis, orders=(0, 2))
            for axis in ("x", "y", "z")
        ]
        self._velocity = np.fft.fftn(state.velocity.numpy(), axes=(0, 1, 2))
        sides = [2 * np.pi * np.fft.fftfreq(n) for n in self._velocity.shape[:3]]
        self._k = np.sqrt(sum(k**2 for k in np.meshgrid(*sides, indexing="ij")))

    def against(self, truth: Measured) -> Comparison:
        """Returns P(k) and r(k) of this and of the truth."""
        both = (self.densities[1], truth.densities[1])
        return compare(self.densities[0], truth.densities[0], window="cic", interlaced=both)

    def redshift_space_against(self, truth: Measured, k: float) -> tuple[float, float]:
        """Returns P0 in redshift space over the truth's, and the change of P2 over its P0.

        Args:
            k: the middle of the bin [h/Mpc].
        """
        own, true = (np.mean([m.power for m in seen], axis=0) for seen in (self._seen, truth._seen))
        here = (self._seen[0].k > k / WIDTH) & (self._seen[0].k < k * WIDTH)
        (p0, p2), (true0, true2) = own[:, here].mean(axis=1), true[:, here].mean(axis=1)
        return p0 / true0, (p2 - true2) / true0

    def velocities_against(self, truth: Measured, k: float) -> tuple[float, float]:
        """Returns the power of the velocities over the truth's, and their correlation.

        Args:
            k: the middle of the bin [1 / particle spacing].
        """
        here = (self._k > k / WIDTH) & (self._k < k * WIDTH)
        own, true = self._velocity[here], truth._velocity[here]
        powers = [float(np.sum(np.abs(v) ** 2)) for v in (own, true)]
        both = float(np.sum(own * true.conj()).real)
        return powers[0] / powers[1], both / np.sqrt(powers[0] * powers[1])


def reconstruct(universe: Universe, rows: Mapping[str, Mapping[str, Any]], gradients: int) -> None:
    """Prints r(k) and T(k) of the linear field that each kind of steps finds for a universe."""
    density = universe.states[-1].density().numpy()
    noisy = density + SIGMA * np.random.default_rng(0).normal(size=density.shape)
    truth = universe.first().linear_delta
    for number, (name, options) in enumerate(rows.items()):
        model = ForwardModel(universe.simulation(options), "pm")
        model.hold_halo()
        data = tf.constant(noisy, model.box.dtype)
        likelihood = rec.Gaussian(model.box, data, sigma=SIGMA, error=0.3)
        posterior = rec.Posterior(model, likelihood)
        stages = rec.default_stages(posterior, evaluations=gradients)
        search = rec.Search(posterior, rec.LBFGS(), stages)
        found = search.run(lambda row, point: None)
        both = compare(model.run(found.field, {}).linear_delta, truth)
        if number == 0:
            print("k [h/Mpc] | | " + " | ".join(f"{k:.2f}" for k in both.k))
        print(f"{name}: {search.outcome}, left {search.progress.left:.2g}")
        for sign, values in (("r", both.correlation), ("T", both.transfer)):
            print(f"{name} | {sign} | " + " | ".join(f"{x:.3f}" for x in values), flush=True)


CONVERGED: dict[str, Any] = {"mesh_factor": 3, "deconvolve": True}
"""The force of runs that stand for converged ones."""


def corrected(name: str) -> dict[str, Any]:
    """Returns the options of runs with a correction."""
    trained = load_correction(name).trained
    return {"correction": name, "mesh_factor": 1 if trained is None else trained.mesh_factor}


def truth_over_runs(
    paths: Sequence[Path], options: Mapping[str, Any], steps: int, sources: Sequence[SourcePlane]
) -> np.ndarray:
    """Returns an estimate of TreePM's C_l divided by C_l in runs [source, ell].

    Halofit's power is multiplied by the mean ratio of powers in snapshots, interpolated in k and a.
    """
    universes = [Universe(path, steps) for path in paths]
    found = [
        [run.against(truth) for run, truth in zip(*map(measured, both), strict=True)]
        for both in ((universe.run(options), universe.states) for universe in universes)
    ]
    k = np.asarray(found[0][0].k)
    ratios = np.mean([[np.asarray(x.transfer) ** -2 for x in each] for each in found], axis=0)
    cosmology = universes[0].cosmology
    halofit = Halofit(fpm.LinearPower(cosmology))

    def power(k_there: Any, a: Any) -> tf.Tensor:
        early, late = (np.interp(k_there, k, ratio) for ratio in ratios)
        share = np.clip((np.asarray(a) - TIMES[0]) / (TIMES[1] - TIMES[0]), 0.0, 1.0)
        return halofit(k_there, a) * (early + share * (late - early))

    ell = 0.5 * (np.array(EDGES[1:]) + EDGES[:-1])
    spectra = [np.asarray(convergence_power(ell, sources, cosmology, p)) for p in (power, halofit)]
    return np.einsum("iil->il", spectra[0] / spectra[1])


def measured(states: Sequence[fpm.State]) -> list[Measured]:
    return [Measured(state) for state in states]


def light_cone(corrections: Sequence[str], paths: Sequence[Path]) -> None:
    """Prints C_l of the light cone of examples/lensing.toml, over a converged run's, and its time.

    The ratios are means of two seeds, for sources at z = 0.5 and 1. The first row is what TreePM
    would have.
    """
    cosmology = fpm.Cosmology(Omega_m=0.31, Omega_b=0.049, h=0.68, n_s=0.97, sigma8=0.81)
    cone = LightCone(FlatField(field_of_view=6.0, pixels=240, z_max=1.0))
    sources = [SourcePlane(0.5), SourcePlane(1.0)]
    rows: dict[str, dict[str, Any]] = {
        "converged": {**CONVERGED, "steps": 40},
        "plain": {"deconvolve": False},
        "`deconvolve`": {},
        **{Path(correction).stem: corrected(correction) for correction in corrections},
        "B = 2, `deconvolve`, 20 steps": {"mesh_factor": 2, "deconvolve": True, "steps": 20},
    }
    expected = truth_over_runs(paths, CONVERGED, 40, sources)
    print("TreePM, estimated:", np.round(expected, 3).tolist(), flush=True)
    found: dict[str, np.ndarray] = {}
    for name, options in rows.items():
        steps = fpm.scale_factor_steps(0.1, 1.0, options.pop("steps", 10))
        more = {"integrator": "bullfrog", **options}
        simulation = fpm.Simulation(cosmology, 128, 256.0, steps, **more)
        spectra, laps = [], []
        for cone_number in range(CONES):
            begin = time.perf_counter()
            maps = cone.convergence(simulation, sources, seed=1 + cone_number % 2)
            laps.append(time.perf_counter() - begin)
            spectra.append(angular_power(maps.kappa, maps.sky.fov, EDGES, window="bilinear"))
        found[name] = np.array([np.asarray(spectrum.power) for spectrum in spectra[:2]])
        ratio = (found[name] / found["converged"]).mean(axis=0)
        print(f"{name}, {np.median(laps[1:]):.2f} s:", np.round(ratio, 3).tolist(), flush=True)
    print("at l =", np.round(spectra[0].ell))


def main() -> None:
    """Measure, and write tables and figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--correction",
        nargs="+",
        default=["default", "network", "default-2"],
        help="names or files",
    )
    parser.add_argument("--output", type=Path, default=Path("emulator"), help="stem of the files")
    parser.add_argument("--repeat", type=int, default=3, help="runs that are timed")
    parser.add_argument("--steps", type=int, default=10, help="steps of each run")
    parser.add_argument(
        "--universes",
        type=Path,
        nargs="+",
        help="files of TreePM runs, of one particle spacing; by default those of FLOWPM_REFERENCE",
    )
    parser.add_argument("--light-cone", action="store_true", help="C_l of maps instead")
    parser.add_argument("--reconstruct", type=int, default=0, metavar="GRADIENTS")
    parser.add_argument("--meshes", type=float, nargs="+", default=[2], help="finer meshes")
    arguments = parser.parse_args()
    arguments.universes = arguments.universes or treepm_runs()
    if arguments.light_cone:
        return light_cone(arguments.correction, arguments.universes)
    rows: dict[str, dict[str, Any]] = {"plain": {"deconvolve": False}, "`deconvolve`": {}}
    for correction in arguments.correction:
        rows[Path(correction).stem] = corrected(correction)
    universes = [Universe(path, arguments.steps) for path in arguments.universes]
    if arguments.reconstruct:
        return reconstruct(universes[0], rows, arguments.reconstruct)
    for mesh in arguments.meshes:
        whole = int(mesh) if mesh == int(mesh) else mesh
        rows[f"B = {mesh:g}"] = {"mesh_factor": whole}
        rows[f"B = {mesh:g}, `deconvolve`"] = {"mesh_factor": whole, "deconvolve": True}
    truths = {u.name: [Measured(state) for state in u.states] for u in universes}
    found: list[dict[str, Any]] = []
    for name, options in rows.items():
        for universe in universes:
            for a, state, truth in zip(
                TIMES, universe.run(options), truths[universe.name], strict=True
            ):
                measured = Measured(state)
                spectra = measured.against(truth)
                row: dict[str, Any] = {"run": name, "universe": universe.name, "a": a}
                for k in AT / universe.spacing:
                    row[f"P {k:g}"] = near(spectra, spectra.transfer**2, k)
                    row[f"1 - r {k:g}"] = 1 - near(spectra, spectra.correlation, k)
                for k in AT[:3] / universe.spacing:
                    row[f"P0s {k:g}"], change = measured.redshift_space_against(truth, k)
                    row[f"P2s {k:g}"] = 1 + change
                for k in AT_VELOCITIES:
                    power, correlation = measured.velocities_against(truth, k)
                    row[f"v2 {k / universe.spacing:g}"] = power
                    row[f"1 - rv {k / universe.spacing:g}"] = 1 - correlation
                row["histogram"] = float(np.abs(measured.histogram / truth.histogram - 1).max())
                row["bispectrum"] = float(
                    np.nanmedian(np.abs(measured.bispectrum / truth.bispectrum - 1))
                )
                row["curves"] = spectra.k, spectra.transfer**2, 1 - spectra.correlation
                found.append(row)
                print({k: v for k, v in row.items() if k != "curves"}, flush=True)
    seconds = {name: [] for name in rows}
    for _ in range(arguments.repeat):
        for name, options in rows.items():
            seconds[name].append(universes[0].seconds(options))
    cost = {name: float(np.median(each)) for name, each in seconds.items()}
    relative = {name: each / cost["plain"] for name, each in cost.items()}
    write(found, relative, universes[0].spacing, arguments.output)


def cell(column: str, values: list[float]) -> str:
    """Returns the mean of universes as a table has it; of several, with the worst in brackets."""
    if column.startswith(("P ", "P0s ", "P2s ", "v2 ")):
        errors, form = [100 * (value - 1) for value in values], "{:+.1f}"
    elif column in PERCENTAGES:
        errors, form = [100 * value for value in values], "{:.0f} %"
    else:
        errors, form = values, "{:.1e}"
    text = form.format(np.mean(errors))
    return text if len(errors) < 2 else f"{text} ({form.format(max(errors, key=abs))})"


def write(
    found: list[dict[str, Any]], cost: Mapping[str, float], spacing: float, output: Path
) -> None:
    """Writes the tables and the figure."""
    columns = [name for name in found[0] if name != "curves"]
    with output.with_suffix(".csv").open("w", newline="") as file:
        table = csv.DictWriter(file, [*columns, "cost"], extrasaction="ignore")
        table.writeheader()
        table.writerows([{**row, "cost": cost[row["run"]]} for row in found])
    measures = [name for name in columns if name.startswith(MEASURES)]
    measures.sort(key=lambda name: MEASURES.index(name.rstrip("0123456789.")))
    heads = [", k = ".join(name.rsplit(" ", 1)) for name in measures]
    lines = [f"| | a | cost | {' | '.join(heads)} | histogram | bispectrum |"]
    lines.append("|---" * (len(heads) + 5) + "|")
    for name, factor in cost.items():
        for a in TIMES:
            here = [row for row in found if row["run"] == name and row["a"] == a]
            cells = [cell(column, [row[column] for row in here]) for column in measures]
            cells += [cell(column, [row[column] for row in here]) for column in PERCENTAGES]
            lines.append(f"| {name} | {a:g} | {factor:.2f} | {' | '.join(cells)} |")
    output.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    figure = new_figure(9.6, 6.4)
    panels = figure.subplots(2, 2, sharex=True, sharey="row")
    for column, a in zip(panels.T, TIMES, strict=True):
        for name, colour in zip(cost, (MUTED, *COLOURS), strict=False):
            here = [row["curves"] for row in found if row["run"] == name and row["a"] == a]
            k = here[0][0]
            label = name.replace("`", "")
            column[0].plot(k, np.mean([c[1] for c in here], axis=0), color=colour, label=label)
            column[1].plot(k, np.mean([c[2] for c in here], axis=0), color=colour)
        column[0].set_title(f"a = {a:g}")
        column[0].axhspan(0.99, 1.01, color=MUTED, alpha=0.15, linewidth=0)
        column[0].set_ylim(0.6, 1.1)
        column[0].set_xlim(k[0], 3.2 / spacing)
        column[1].set_yscale("log")
        column[1].set_ylim(1e-6, 0.1)
        column[1].set_xlabel("k [h/Mpc]")
        for panel in column:
            style_axes(panel)
            panel.set_xscale("log")
            plain_log_ticks(panel.xaxis)
    panels[0, 0].set_ylabel("P over TreePM's")
    panels[1, 0].set_ylabel("1 - r with TreePM")
    panels[0, 0].legend(frameon=False, fontsize=9)
    save_figure(figure, output.with_suffix(".png"))


if __name__ == "__main__":
    main()
