"""Small runs, where Python decides: single operations, steps in one graph, and whole functions.

    python benchmarks/small_runs.py [--grids 16,32,64] [--steps 10] [--repeats 15] [--threads 2]

Milliseconds on one rank, in float32, 2LPT and BullFrog, 2 Mpc/h a cell. Each is the median of
`--repeats` calls after a first one; the ways take turns in each repetition. A gradient is the value
and the gradient of the sum of the squared density, by the white noise alone and with Omega_m; or of
the sum of ln P in bins at three scale factors; or of the squared convergence of two planes of
sources up to z = 0.3, with cells of 8 Mpc/h and as many pixels as particles a side.

    single    each operation of a step calls its own graphs
    pairs     the steps are one graph: what `Simulation.run` does
    function  the whole of it, density included, in a `tf.function`

The last rows are an evaluation of a posterior and its gradient, as samplers ask for, and a universe
of a training with its spectrum, one at a time: eagerly, and as one graph. The benchmark also prints
the seconds of the first call of each.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from common import report, start_worker

WAYS = ("single", "pairs", "function")


def worker(grid: int, steps: int, repeats: int) -> None:
    """Measure one size; times by kind and way."""
    import tensorflow as tf

    import flowpm_dist as fpm
    from flowpm_dist.evolution import pairs
    from flowpm_dist.observables.lensing import SourcePlane
    from flowpm_dist.observables.light_cone import FlatField, LightCone
    from flowpm_dist.statistics import binned_power

    sim = fpm.Simulation(
        fpm.Cosmology.planck18(),
        grid,
        2.0 * grid,
        fpm.scale_factor_steps(0.1, 1.0, steps),
        integrator="bullfrog",
    )
    noise = sim.run(seed=1).white_noise.block
    omega = tf.constant(0.31, tf.float64)

    def density(noise: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(sim.run(white_noise=noise).density().block ** 2)

    def of_omega(noise: tf.Tensor, omega: tf.Tensor) -> tf.Tensor:
        cosmology = sim.cosmology.replace(Omega_m=omega)
        state = sim.run(white_noise=noise, cosmology=cosmology)
        return tf.reduce_sum(state.density().block ** 2)

    def of_states(noise: tf.Tensor, omega: tf.Tensor) -> tf.Tensor:
        power = sim.run(
            white_noise=noise,
            cosmology=sim.cosmology.replace(Omega_m=omega),
            outputs=[0.5, 0.7, 1.0],
            on_output=lambda state: binned_power(state.density()),
        )
        return tf.reduce_sum(tf.math.log(tf.stack(power)))

    large = fpm.Simulation(sim.cosmology, grid, 8.0 * grid, sim.edges, integrator="bullfrog")
    degrees = np.degrees(8.0 * grid / float(sim.theory.distances.comoving(1 / 1.3)))
    field = FlatField(field_of_view=0.9 * float(degrees), pixels=grid, z_max=0.3)

    def of_maps(noise: tf.Tensor, omega: tf.Tensor) -> tf.Tensor:
        cosmology, sources = large.cosmology.replace(Omega_m=omega), [0.2, 0.29]
        maps = LightCone(field).convergence(
            large, [SourcePlane(z) for z in sources], white_noise=noise, cosmology=cosmology
        )
        return tf.reduce_sum(maps.kappa**2)

    def gradient(loss: Callable[..., tf.Tensor]) -> Callable[..., Any]:
        def value_and_gradient(*inputs: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(inputs)
                value = loss(*inputs)
            return value, tape.gradient(value, inputs)

        return value_and_gradient

    largest = pairs.LARGEST
    found: dict[str, dict[str, Any]] = {}
    for kind, function, inputs in (
        ("run", density, [noise]),
        ("gradient", gradient(density), [noise]),
        ("with Omega_m", gradient(of_omega), [noise, omega]),
        ("three states", gradient(of_states), [noise, omega]),
        ("maps", gradient(of_maps), [noise, omega]),
    ):
        whole = tf.function(function, autograph=False)
        ways = dict(zip(WAYS, (function, function, whole), strict=True))
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(repeats + 1):
            for way, call in ways.items():
                pairs.LARGEST = 0 if way == "single" else largest
                begin = time.perf_counter()
                np.asarray(call(*inputs)[0] if kind != "run" else call(*inputs))
                times[way].append(time.perf_counter() - begin)
        found[kind] = {way: [t[0], statistics.median(t[1:])] for way, t in times.items()}
    found["posterior"] = posterior(grid, steps, repeats)
    for kind, ways in training(grid, steps, repeats).items():
        found[f"training, {kind}"] = ways
    report(found)


def posterior(grid: int, steps: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of the first call and of the others, of an evaluation in even coordinates."""
    import flowpm_dist as fpm
    from flowpm_dist import reconstruction as rec
    from flowpm_dist.observables.forward_model import ForwardModel
    from flowpm_dist.reconstruction.posterior import EvenPosterior

    edges = fpm.scale_factor_steps(0.1, 1.0, steps)
    sim = fpm.Simulation(fpm.Cosmology.planck18(), grid, 8.0 * grid, edges)
    data = sim.run(seed=3).density().block
    likelihood = rec.Gaussian(sim.box, data, sigma=2.0)
    priors = {"sigma8": (0.7, 0.9), "Omega_m": (0.2, 0.4)}
    target = rec.Posterior(ForwardModel(sim), likelihood, priors)
    point = target.space.normal(1)
    times: dict[str, list[float]] = {"eager": [], "one graph": []}
    objectives = {way: EvenPosterior(target, whole=way == "one graph") for way in times}
    for _ in range(repeats + 1):
        for way, objective in objectives.items():
            begin = time.perf_counter()
            objective.evaluate(point)
            times[way].append(time.perf_counter() - begin)
    return {way: [t[0], statistics.median(t[1:])] for way, t in times.items()}


def training(grid: int, steps: int, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of the first universe of a training and of the others, with a density or maps."""
    import flowpm_dist as fpm
    from flowpm_dist.cosmoflow.volumes.draws import Lanes, Priors
    from flowpm_dist.cosmoflow.volumes.universes import MapMaker, VolumeMaker
    from flowpm_dist.observables.convergence_model import ConvergenceModel
    from flowpm_dist.observables.forward_model import ForwardModel
    from flowpm_dist.observables.light_cone.section import ConvergenceOptions

    def simulation(cell: float) -> fpm.Simulation:
        edges = fpm.scale_factor_steps(0.1, 1.0, steps)
        return fpm.Simulation(
            fpm.Cosmology.planck18(), grid, cell * grid, edges, integrator="bullfrog"
        )

    sim, large = simulation(2.0), simulation(8.0)
    # Not wider than the box for any of the priors.
    degrees = np.degrees(8.0 * grid / float(large.theory.distances.comoving(1 / 1.3)))
    cone = ConvergenceOptions(
        field_of_view=0.9 * float(degrees),
        pixels=grid,
        z_max=0.3,
        sources=[{"redshift": 0.2}, {"redshift": 0.29}],
        shape_noise={"sigma_e": 0.26, "n_eff": 10.0},
    )
    priors = Priors({"Omega_m": (0.2, 0.4), "sigma8": (0.7, 0.9)}, "sobol", 1)
    shared = priors, Lanes(1, 0, 1)
    found: dict[str, dict[str, list[float]]] = {}
    for kind, make in (
        ("density", lambda many: VolumeMaker(ForwardModel(sim), *shared, many=many)),
        (
            "maps",
            lambda many: MapMaker(ConvergenceModel.of(large, cone), *shared, many=many, cone=cone),
        ),
    ):
        makers = {"eager": make(False), "one graph": make(True)}
        times: dict[str, list[float]] = {way: [] for way in makers}
        for generation in range(repeats + 1):
            for way, maker in makers.items():
                begin = time.perf_counter()
                maker.make("train", generation)
                times[way].append(time.perf_counter() - begin)
        found[kind] = {way: [t[0], statistics.median(t[1:])] for way, t in times.items()}
    return found


def main() -> None:
    """Print one table for all sizes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("role", nargs="?", default="driver", choices=["driver", "worker"])
    parser.add_argument("--grids", default="16,32,64")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if options.role == "worker":
        worker(int(options.grids), options.steps, options.repeats)
        return
    head = f"{'':6s}{'':18s}" + "".join(f"{way:>12s}" for way in WAYS) + "   first calls [s]"
    print(f"{options.steps} steps, milliseconds; medians of {options.repeats}\n\n{head}")
    for grid in options.grids.split(","):
        words = [f"--grids={grid}", f"--steps={options.steps}", f"--repeats={options.repeats}"]
        found = start_worker(sys.argv[0], words, 1, options.threads)
        for kind, ways in found.items():
            times = "".join(f"{1e3 * median:12.1f}" for _, median in ways.values())
            times = times if len(ways) == len(WAYS) else f"{'':12s}{times}"
            firsts = " ".join(f"{first:.1f}" for first, _ in ways.values())
            print(f"{grid + '^3':6s}{kind:18s}{times}   {firsts}", flush=True)


if __name__ == "__main__":
    main()
