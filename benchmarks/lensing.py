"""Light cones and lensing compared with theory, and their cost.

    python benchmarks/lensing.py linear   [--grid 128] [--box 400] [--seeds 100] [--painted 4]
                                          [--cones 4] [--keep FOLDER]
    python benchmarks/lensing.py halofit  [--grid 256] [--box 400] [--seeds 4] [--cones 4]
                                          [--mesh-factor 1] [--steps 10]
    python benchmarks/lensing.py cost     [--grid 128] [--box 512]

linear: the universe keeps the linear field of z = 0. There are sources at z = 1 and a distribution
of sources up to there. The field of view is as wide as the box at z = 1, and there are several
lines of sight. The convergence is the Born integral over the linear density, read at each layer by
splines in numpy. Its mean over the seeds is divided by Limber's integral over linear power, and
over the power measured in the boxes. The light cone then paints frozen Zel'dovich universes of
small amplitudes. Their correlation with the first convergence is divided by its power. Half the
difference of a pair with opposite noise is free of the lattice and of second order, and third order
is removed by extrapolation. With --keep, FOLDER stores the results of each seed, and a second call
continues.

halofit: whole runs, compared with Limber's integral over halofit (Takahashi and others 2012) of the
runs' own linear power, and over the power measured in the runs. Modes start with their expected
amplitudes, which are the same on any grid.
Every second universe is the pair of the one before. There are several lines of sight through each.

cost: a run with and without a light cone of four sources, and value and gradient of a loss on C_l.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from lensing_resolution import COSMOLOGY, SOURCE, interlaced_power, scaled
from scipy.ndimage import map_coordinates
from scipy.signal.windows import tukey

import flowpm_dist as fpm
from flowpm_dist.cosmology.background import Distances
from flowpm_dist.cosmology.growth import Growth
from flowpm_dist.cosmology.line_of_sight import lensing_weight
from flowpm_dist.cosmology.nonlinear import Halofit
from flowpm_dist.evolution.integrators import Operation, Schedule
from flowpm_dist.observables.lensing import (
    SourcePlane,
    Sources,
    TabulatedDistribution,
    convergence_power,
    lensing_efficiency,
)
from flowpm_dist.observables.light_cone import FlatField, LightCone
from flowpm_dist.observables.light_cone.geometry import farthest
from flowpm_dist.observables.light_cone.layers import Layers
from flowpm_dist.statistics import angular_power, binned_angular_power, theory_in_bins

_REDSHIFTS = np.linspace(0.0, SOURCE, 41)
SOURCES = [
    SourcePlane(SOURCE),
    TabulatedDistribution(_REDSHIFTS, _REDSHIFTS**2 * (SOURCE - _REDSHIFTS)),
]
AMPLITUDES = (0.1, 0.2)  # of painted universes; (0.2, 0.4) has half the noise, and 1 % of bias


class Frozen(fpm.FastPM):
    """No evolution: particles stay where first-order theory has them at a = 1."""

    def schedule(self, growth: Growth, edges: Sequence[float]) -> Schedule:
        """See `Integrator.schedule`: a kick by nothing, and a drift of nothing."""
        operations = (
            Operation("kick", float(edges[0]), 1),
            Operation("drift", float(edges[-1]), 1, ends_step=True),
        )
        return Schedule(operations, tf.constant([[1.0, 0, 0, 0]] * 2, tf.float64))

    def initial(self, growth: Growth, a: float, order: int) -> tf.Tensor:
        """See `Integrator.initial`."""
        return super().initial(growth, 1.0, order)

    def since_kick(
        self, growth: Growth, edges: Sequence[float], times: tf.Tensor
    ) -> tuple[tuple[int, ...], tf.Tensor]:
        """See `Integrator.since_kick`."""
        return (0,) * len(times), tf.zeros([len(times), 4], tf.float64)


def bands(low: float, high: float, number: int) -> np.ndarray:
    """Returns edges of multipoles, equal in log l."""
    return np.geomspace(low, high, number + 1)


def cone_of(box: float, pixels: int, tiles: int) -> LightCone:
    """Returns the light cone to z = 1 whose field is as wide as the box there."""
    end = float(Distances(COSMOLOGY).comoving(1 / (1 + SOURCE)))
    degrees = float(np.degrees(box / end)) * (1 - 1e-9)
    return LightCone(FlatField(field_of_view=degrees, pixels=pixels, z_max=SOURCE, tiles=tiles))


def linear_convergence(delta: np.ndarray, box: Any, cone: LightCone) -> np.ndarray:
    """Returns the convergence [source, x, y] of a density that stays, by splines in its layers."""
    distances = Distances(COSMOLOGY)
    layers = Layers.of(box, farthest(cone.sky, COSMOLOGY), cone.sky.tiles)
    efficiency = lensing_efficiency(SOURCES, layers.distances, distances)
    weights = (lensing_weight(COSMOLOGY, layers.distances) * efficiency).numpy() * layers.depths
    theta = ((np.arange(cone.sky.pixels) + 0.5) / cone.sky.pixels - 0.5) * cone.sky.fov
    kappa = np.zeros([len(SOURCES), cone.sky.pixels, cone.sky.pixels])
    for m, chi in enumerate(layers.distances):
        tile = layers.tiles[layers.tile[m]]
        (ax, ay, az), (sx, sy, _) = tile.axes, tile.senses
        plane = np.take(delta, layers.index[m], axis=az)
        if ax > ay:  # np.take left the axes in the order of the box
            plane = plane.T
        x = sx * (theta * chi - tile.shifts[0]) / box.cell[ax]
        y = sy * (theta * chi - tile.shifts[1]) / box.cell[ay]
        places = np.meshgrid(x, y, indexing="ij")
        results = map_coordinates(plane, places, order=3, mode="grid-wrap")
        kappa += weights[:, m, np.newaxis, np.newaxis] * results
    return kappa


def tapered(
    maps: np.ndarray, fov: float, edges: np.ndarray, other: np.ndarray | None = None, **options: Any
) -> np.ndarray:
    """Returns the power of maps that end at their borders, with less leakage between multipoles."""
    along = tukey(maps.shape[-1], 0.5)
    taper = np.outer(along, along)
    taper /= np.sqrt(np.mean(taper**2))
    second = None if other is None else other * taper
    return binned_angular_power(maps * taper, fov, edges, other=second, **options).numpy()


def expected(
    power: Any, cone: LightCone, edges: np.ndarray, sources: Sequence[Sources]
) -> np.ndarray:
    """Returns Limber's C_l [source, bin] of a power P(k, a), the mean over modes of each bin."""
    return np.stack(
        [
            theory_in_bins(
                lambda ell, one=source: convergence_power(ell, [one], COSMOLOGY, power).numpy()[
                    0, 0
                ],
                cone.sky.pixels,
                cone.sky.fov,
                edges,
            )
            for source in sources
        ]
    )


def linear_of_seed(
    small: Sequence[fpm.Simulation], seed: int, cones: int, edges: np.ndarray, *, painted: bool
) -> dict[str, np.ndarray]:
    """Returns what one universe adds to the frozen linear test: powers [source, bin], spectrum."""
    box, grid = small[0].box.size[0], small[0].box.grid[0]
    views = [cone_of(box, grid, cones * seed + number) for number in range(cones)]
    delta = small[0].lpt(seed=seed, a=1.0).linear_delta / AMPLITUDES[0]
    spectrum = fpm.power_spectrum(delta)
    whole = delta.numpy()
    exact = [linear_convergence(whole, small[0].box, view) for view in views]
    auto = [tapered(each, view.sky.fov, edges) for each, view in zip(exact, views, strict=True)]
    result = {"power": np.mean(auto, 0), "k": spectrum.k, "spectrum": spectrum.power}
    if painted:
        found = []
        for sim, size in zip(small, AMPLITUDES, strict=True):
            plus, minus = (observed(sim, views, seed, paired) for paired in (False, True))
            cross = [
                # One is painted; its bilinear window equals two pixel windows.
                tapered((one - other) / (2 * size), view.sky.fov, edges, linear, window="pixel")
                for one, other, view, linear in zip(plus, minus, views, exact, strict=True)
            ]
            found.append(np.mean(cross, 0) / result["power"])
        first, second = AMPLITUDES[0] ** 2, AMPLITUDES[1] ** 2
        result["transfer"] = (second * found[0] - first * found[1]) / (second - first)
    return result


def linear(
    grid: int, box: float, seeds: int, painted: int, cones: int, keep: Path | None = None
) -> None:
    """Print the frozen linear test; what each seed gave is kept in a folder."""
    options: dict[str, Any] = {"integrator": Frozen(), "lpt_order": 1}
    small = [
        fpm.Simulation(COSMOLOGY.replace(A_s=2e-9 * size**2), grid, box, [0.2, 1.0], **options)
        for size in AMPLITUDES
    ]
    edges = bands(100, 400, 2)
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    powers, transfers, spectra = [], [], []
    for seed in range(seeds):
        kept = keep and keep / f"linear-{grid}-{box:g}-{cones}-{seed}.npz"
        found = {} if kept is None or not kept.exists() else dict(np.load(kept))
        if "power" not in found or (seed < painted and "transfer" not in found):
            found = linear_of_seed(small, seed, cones, edges, painted=seed < painted)
            if kept is not None:
                np.savez(kept, **found)
        powers.append(found["power"])
        spectra.append(found["spectrum"])
        if seed < painted:
            transfers.append(found["transfer"])
        if seed % 10 == 9:
            print(f"{seed + 1} of {seeds}", flush=True)
    view = cone_of(box, grid, 0)
    ell = angular_power(np.zeros([view.sky.pixels] * 2), view.sky.fov, edges).ell
    mean, error = mean_and_error(powers)
    (transfer, its_error), k, own = mean_and_error(transfers), found["k"], np.mean(spectra, 0)

    def measured(wavenumber: tf.Tensor, a: tf.Tensor) -> tf.Tensor:
        inside = (wavenumber >= k[0] * 0.75) & (wavenumber <= k[-1])
        return tf.constant(np.where(inside, np.interp(wavenumber, k, own), 0.0))

    today = fpm.LinearPower(COSMOLOGY)
    theory, of_box = (
        expected(power, view, edges, SOURCES)
        for power in (lambda k, a: today(k, tf.ones_like(a)), measured)
    )
    print("| sources | l | linear field / theory | / power of the boxes | painted / linear |")
    for number, name in enumerate(("z = 1", "n(z)")):
        for i in range(len(ell)):
            m, e, here = mean[number, i], error[number, i], (number, i)
            print(
                f"| {name} | {ell[i]:.0f} | {m / theory[here]:.4f} +- {e / theory[here]:.4f} | "
                f"{m / of_box[here]:.4f} +- {e / of_box[here]:.4f} | "
                f"{transfer[here]:.4f} +- {its_error[here]:.4f} |"
            )


def observed(
    sim: fpm.Simulation, views: Sequence[LightCone], seed: int, paired: bool
) -> list[np.ndarray]:
    """Returns the convergence [source, x, y] that light cones have of one universe, float64."""
    observers = [view.convergence_observer(SOURCES) for view in views]
    _, maps = sim.run(seed, paired=paired, observe=observers)
    return [each.kappa.numpy().astype(np.float64) for each in maps]


def mean_and_error(samples: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean over the first axis, and its standard error."""
    return np.mean(samples, 0), np.std(samples, 0, ddof=1) / np.sqrt(len(samples))


def halofit(grid: int, box: float, seeds: int, mesh_factor: int, steps: int, cones: int) -> None:
    """Print whole runs against halofit, and against Limber's integral of their own power."""
    sim = fpm.Simulation(
        COSMOLOGY,
        grid,
        box,
        fpm.scale_factor_steps(0.1, 1.0, steps),
        mesh_factor=mesh_factor,
        deconvolve=False,
        fixed_amplitude=True,
        noise="nested",  # the same large scales on any grid
    )
    widest = 2 * np.pi / cone_of(box, 2 * grid, 0).sky.fov  # multipoles are this far apart
    edges = bands(max(100, 1.5 * widest), 3000, 10)
    theory, sources = Halofit(fpm.LinearPower(COSMOLOGY)), SOURCES[:1]
    times = np.linspace(1 / (1 + SOURCE), 1.0, 5)
    powers: list[np.ndarray] = []
    spectra: list[list[np.ndarray]] = []
    wavenumbers = np.zeros(0)

    def measure(state: fpm.State) -> None:
        nonlocal wavenumbers
        found = interlaced_power(state, grid, box)
        wavenumbers = found.k
        spectra[-1].append(found.power / theory(found.k, state.a).numpy())

    def keep(results: list[Any]) -> None:
        for maps in results:
            kappa = maps.kappa[0].numpy().astype(np.float64)
            powers.append(tapered(kappa, maps.sky.fov, edges, window="bilinear"))

    for seed in range(seeds):
        views = [cone_of(box, 2 * grid, cones * seed + number) for number in range(cones)]
        spectra.append([])
        # Of a universe and its pair, with the noise's sign turned, one after the other.
        observers = [view.convergence_observer(sources) for view in views]
        observers.append(sim.states_at(times, measure))
        keep(sim.run(seed // 2, paired=seed % 2 == 1, observe=observers)[1][:-1])
        print(f"{seed + 1} of {seeds}", flush=True)
    view = cone_of(box, 2 * grid, 0)
    ratio = np.mean(spectra, 0)
    own = scaled(theory, times, wavenumbers, ratio)

    def of_box(k: tf.Tensor, a: tf.Tensor) -> tf.Tensor:
        return tf.where(k < 0.75 * wavenumbers[0], tf.zeros_like(k), own(k, a))

    whole, resolved, held = (
        expected(power, view, edges, sources)[0] for power in (theory, own, of_box)
    )
    mean, error = mean_and_error(powers)  # of fields; several fields observe the same universe
    multipoles = angular_power(np.zeros([view.sky.pixels] * 2), view.sky.fov, edges).ell
    half = [wavenumbers[np.argmax(row < 0.5)] if np.any(row < 0.5) else np.inf for row in ratio]
    found = (f"{k:.2f} (a = {a:.2f})" for k, a in zip(half, times, strict=True))
    print("P(k) is half of halofit's at k =", ", ".join(found), "h/Mpc")
    print("| l | Limber of own P / halofit | C_l / halofit | C_l / Limber of own P in the box |")
    for i, ell in enumerate(multipoles):
        print(
            f"| {ell:.0f} | {resolved[i] / whole[i]:.3f} | "
            f"{mean[i] / whole[i]:.3f} +- {error[i] / whole[i]:.3f} | "
            f"{mean[i] / held[i]:.3f} +- {error[i] / held[i]:.3f} |"
        )


def cost(grid: int, box: float) -> None:
    """Print what a light cone costs."""
    cosmology = COSMOLOGY
    noise = None
    sources = [SourcePlane(z) for z in (0.4, 0.6, 0.8, 1.0)]
    cone = cone_of(box, 2 * grid, 1)
    edges = bands(100, 1000, 4)

    def simulation(steps: int) -> fpm.Simulation:
        return fpm.Simulation(cosmology, grid, box, fpm.scale_factor_steps(0.1, 1.0, steps))

    sim = simulation(10)
    noise = sim.lpt(seed=1).white_noise.block

    def timed(function: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        function()
        return time.perf_counter() - begin

    def gradient(of: fpm.Simulation) -> None:
        with tf.GradientTape() as tape:
            tape.watch(noise)
            maps = cone.convergence(of, sources, white_noise=noise)
            power = binned_angular_power(maps.kappa, maps.sky.fov, edges)
            loss = tf.reduce_sum(tf.math.log(power))
        tape.gradient(loss, noise)

    jobs = {
        "run": lambda: sim.run(white_noise=noise),
        "run with a light cone": lambda: cone.convergence(sim, sources, white_noise=noise),
        "value and gradient": lambda: gradient(sim),
    }
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(6):
        for name, job in jobs.items():
            taken = timed(job)
            if turn:
                seconds[name].append(taken)
    medians = {name: float(np.median(values)) for name, values in seconds.items()}
    run, with_cone, both = medians.values()
    for name, value in medians.items():
        print(f"{name}: {value:.2f} s")
    print(f"with a light cone / without: {with_cone / run:.2f}")
    print(f"value and gradient / light cone: {both / with_cone:.2f}")
    for steps in (10, 40):
        gradient(simulation(steps))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"peak memory after {steps} steps with gradient: {peak:.0f} MiB")


def main() -> None:
    """Run one of the three."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["linear", "halofit", "cost"])
    parser.add_argument("--grid", type=int)
    parser.add_argument("--box", type=float)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--painted", type=int, default=4)
    parser.add_argument("--mesh-factor", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--cones", type=int, default=4)
    parser.add_argument("--keep", type=Path, help="folder of the results of each seed")
    options = parser.parse_args()
    if options.what == "linear":
        sizes = options.grid or 128, options.box or 400.0, options.seeds or 100
        linear(*sizes, options.painted, options.cones, options.keep)
    elif options.what == "halofit":
        halofit(
            options.grid or 256,
            options.box or 400.0,
            options.seeds or 4,
            options.mesh_factor,
            options.steps,
            options.cones,
        )
    else:
        cost(options.grid or 128, options.box or 512.0)


if __name__ == "__main__":
    main()
