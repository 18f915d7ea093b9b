"""Worker of peers.py: flowpm_dist, 2LPT, FastPM leapfrog, finite-difference force, 1 rank."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import numpy as np
import worker

from meshimpl import launch

WHOLE = 64
"""Largest grid whose run is one `tf.function`."""


def main() -> None:
    options = worker.arguments()
    launch.configure_threads()
    import tensorflow as tf

    import flowpm_dist as fpm
    from flowpm_dist.cosmology import LinearPower
    from flowpm_dist.cosmology.background import Distances
    from flowpm_dist.observables.lensing import SourcePlane
    from flowpm_dist.observables.light_cone import FlatField, LightCone

    cosmology = fpm.Cosmology(**options.cosmology)
    steps = fpm.scale_factor_steps(worker.A_START, worker.A_STOP, options.steps)
    sim = fpm.Simulation(
        cosmology,
        options.grid,
        worker.CELL * options.grid,
        steps,
        **{
            "integrator": "fastpm",
            "force_gradient": "finite-difference",
            "deconvolve": False,
            **options.scheme,
        },
    )
    power = LinearPower(cosmology)
    noise, weight = tf.constant(options.noise), tf.constant(options.weight)

    begin = [tf.constant(each) for each in options.begin]

    def simulate(noise: tf.Tensor, *begin: tf.Tensor) -> tuple[Any, Any]:
        state = sim.run(particles=begin) if begin else sim.run(white_noise=noise)
        return state.displacement.block, state.density().block

    def differentiate(noise: tf.Tensor) -> tuple[Any, Any]:
        with tf.GradientTape() as tape:
            tape.watch(noise)
            loss = tf.reduce_sum(weight * simulate(noise)[1])
        return loss, tape.gradient(loss, noise)

    # Small runs are whole functions, as in the other codes; large ones would take more memory.
    whole = options.grid <= WHOLE
    run, slope = (
        tf.function(f, autograph=False) if whole else f for f in (simulate, differentiate)
    )

    def forward() -> tuple[Any, Any]:
        displacement, density = run(noise, *begin)
        return displacement.numpy(), density.numpy()

    def gradient() -> tuple[Any, Any]:
        loss, to_noise = slope(noise)
        return loss.numpy(), to_noise.numpy()

    side = np.degrees(worker.CELL * options.grid / Distances(cosmology).comoving(0.5))
    field, farthest = float(side) * (1 - 1e-9), worker.SOURCES[-1]
    cone = LightCone(FlatField(field_of_view=field, pixels=options.grid, z_max=farthest))
    sources = [SourcePlane(z) for z in worker.SOURCES]

    def lensing() -> tuple[Any, Any]:
        return len(sources), cone.convergence(sim, sources, white_noise=noise).kappa.numpy()

    def lensing_gradient() -> tuple[Any, Any]:
        with tf.GradientTape() as tape:
            tape.watch(noise)
            loss = tf.reduce_sum(cone.convergence(sim, sources, white_noise=noise).kappa ** 2)
        return loss.numpy(), tape.gradient(loss, noise).numpy()

    k = np.geomspace(1e-3, 20, 400)
    has_maps = options.task.startswith("lensing")
    worker.serve(
        options,
        lensing if has_maps else forward,
        lensing_gradient if has_maps else gradient,
        version=version("flowpm-dist"),
        beside=f"tensorflow {tf.__version__}",
        scheme=f"2LPT, FastPM leapfrog, finite-difference force, {options.steps + 1} forces",
        sigma8=float(power.sigma8()),
        k=k.tolist(),
        power=power(k).numpy().tolist(),
    )


if __name__ == "__main__":
    main()
