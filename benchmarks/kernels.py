"""Particle kernels: nanoseconds per particle, compiled and portable, on one thread and on all.

    python benchmarks/kernels.py [--grid 128] [--rms 4] [--repeats 5]

float32, one rank, a periodic box with as many cells as particles, and a smooth random displacement.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from common import report, start_worker

from meshimpl import launch


def smooth_displacement(grid: int, rms: float) -> np.ndarray:
    """Gradient of a random potential, [1, x, y, z, 3], `rms` along each axis [cells]."""
    noise = np.random.default_rng(1).normal(size=(grid,) * 3).astype(np.float32)
    k = [2 * np.pi * np.fft.fftfreq(grid)] * 2 + [2 * np.pi * np.fft.rfftfreq(grid)]
    waves = np.meshgrid(*k, indexing="ij", sparse=True)
    square = sum(wave**2 for wave in waves)
    square[0, 0, 0] = np.inf
    potential = np.fft.rfftn(noise) * np.exp(-np.minimum(square, 99)) * square**-1.75
    parts = [np.fft.irfftn(1j * wave * potential, s=noise.shape) for wave in waves]
    s = np.stack(parts, axis=-1)[np.newaxis]
    return (s * (rms / np.sqrt(np.mean(s**2)))).astype(np.float32)


def calls(displacement: np.ndarray) -> Callable[[Any], dict[str, functools.partial[Any]]]:
    """Returns the function that gives the calls of a set of kernels, by name.

    Args:
        displacement: [1, grid, grid, grid, 3] [cells].
    """
    import tensorflow as tf

    from flowpm_dist.particle_mesh.kernels import Lattice

    grid = displacement.shape[1]
    g = Lattice((grid,) * 3, 1, (0, 0, 0), (1.0, 1.0, 1.0))
    s = tf.constant(displacement)
    v, dv, ds = 0.9 * s, 0.3 * s, 0.2 * s
    field = tf.random.stateless_normal([1, grid, grid, grid], seed=[1, 2])
    vector = tf.stack([field] * 3, axis=-1)
    factors = tf.constant([[0.9, 0.1]])
    places = tf.random.stateless_uniform([grid**3, 3], [3, 4], 1, grid + 1, tf.float64)
    mesh = tf.zeros([grid + 3] * 3, tf.float64)
    call = functools.partial
    return lambda k: {
        "paint": call(k.paint, g, s),
        "paint_vjp": call(k.paint_vjp, g, s, None, field),
        "kick": call(k.kick, g, field, s, v, factors),
        "kick_vjp": call(k.kick_vjp, g, field, s, v, dv, ds, factors),
        "kick, spectral": call(k.kick, g, vector, s, v, factors),
        "kick_vjp, spectral": call(k.kick_vjp, g, vector, s, v, dv, ds, factors),
        "linear": call(k.linear, s, v, factors[:, 0]),
        "drift_vjp": call(k.drift_vjp, s, v, dv, ds, factors[:, 0]),
        "points anywhere, cic": call(k.paint_points, mesh, places, None, 2),
        "points anywhere, pcs": call(k.paint_points, mesh, places, None, 4),
    }


def worker(grid: int, rms: float, repeats: int) -> None:
    """Medians of `repeats` calls after a first one, in this process."""
    launch.configure_threads()
    import tensorflow as tf

    from flowpm_dist.particle_mesh.kernels import Portable, compiled

    of = calls(smooth_displacement(grid, rms))

    def measure(call: Any) -> float:
        call()
        seconds = []
        for _ in range(repeats):
            started = time.perf_counter()
            results = [t for t in tf.nest.flatten(call()) if t is not None]
            # One number of each waits for all of it.
            for t in results:
                tf.reshape(t, [-1])[0].numpy()
            seconds.append(time.perf_counter() - started)
        return float(np.median(seconds)) * 1e9 / grid**3

    sets = [Portable()] + ([compiled.Compiled()] if compiled.load()[1] is None else [])
    report({k.name: {name: measure(call) for name, call in of(k).items()} for k in sets})


def main() -> None:
    """Print a line for each kernel."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("role", nargs="?", default="driver", choices=["driver", "worker"])
    parser.add_argument("--grid", type=int, default=128)
    parser.add_argument("--rms", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if options.role == "worker":
        worker(options.grid, options.rms, options.repeats)
        return
    arguments = [f"--{k}={getattr(options, k)}" for k in ("grid", "rms", "repeats")]
    threads = sorted({1, launch.available_cores()})
    found = {n: start_worker(sys.argv[0], arguments, 1, n) for n in threads}
    print(f"{options.grid}^3 particles, float32, ns per particle, medians of {options.repeats}")
    columns = [(kind, n) for kind in found[1] for n in threads]
    print(" " * 20 + "".join(f"{f'{kind} x {n}':>16}" for kind, n in columns))
    for name in found[1]["portable"]:
        print(f"{name:20}" + "".join(f"{found[n][kind][name]:16.1f}" for kind, n in columns))


if __name__ == "__main__":
    main()
