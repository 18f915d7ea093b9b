"""Errors of gradients in float32, by integrator, start, spacing and number of steps.

    python benchmarks/gradient_precision.py [--grid 16] [--integrator bullfrog]

The loss is a sum over the density at a = 1 with random weights; the gradient is with respect to the
white noise. Errors are relative rms differences from the gradient in float64. "Kept" is the number
of states that the reversible adjoint keeps in addition to the last one. The table is Markdown.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import tensorflow as tf

import flowpm_dist as fpm
from flowpm_dist.evolution.adjoints import DirectAdjoint, ReversibleAdjoint
from flowpm_dist.evolution.adjoints.reversible import kicks_to_keep
from flowpm_dist.evolution.integrators import INTEGRATORS
from flowpm_dist.evolution.nbody import NBody
from flowpm_dist.evolution.plan import Clock, EvolutionPlan, Evolved, Particles
from meshimpl import ProcessMesh, launch

CELL = 3.0  # [Mpc/h]
COSMOLOGY = fpm.Cosmology.planck18()
STARTS = (0.0, 0.002, 0.01, 0.1)
STEPS = (5, 30)


def spacings(start: float, steps: int) -> dict[str, np.ndarray]:
    """Returns the edges of steps from `start` to 1, for each spacing that can begin there."""
    edges = {"a": fpm.scale_factor_steps(start, 1.0, steps)}
    if start:
        edges["log a"] = fpm.logarithmic_steps(start, 1.0, steps)
    return edges | {"D": fpm.growth_steps(COSMOLOGY, start, 1.0, steps)}


class Gradients:
    """The gradients of one integrator, each of its two precisions lowered once."""

    def __init__(self, integrator: str, grid: int, mesh: ProcessMesh) -> None:
        random = np.random.default_rng(3)
        self._noise, self._weights = random.normal(size=(2, grid, grid, grid)).astype(np.float32)
        self._simulations = {
            precision: fpm.Simulation(
                COSMOLOGY,
                grid,
                CELL * grid,
                [0.1, 1.0],
                mesh=mesh,
                integrator=integrator,
                precision=precision,
                halo=grid,
            )
            for precision in ("float32", "float64")
        }

    def gradient(self, precision: str, adjoint: Any, edges: np.ndarray) -> np.ndarray:
        """Returns the gradient to the white noise [grid, grid, grid], float64."""
        sim = self._simulations[precision].with_steps(edges)
        sim.options = sim.options.model_copy(update={"adjoint": adjoint})
        noise = tf.constant(self._noise, sim.box.dtype)
        with tf.GradientTape() as tape:
            tape.watch(noise)
            density = sim.run(white_noise=noise).density().block
            loss = tf.reduce_sum(density * tf.constant(self._weights, sim.box.dtype))
        return tape.gradient(loss, noise).numpy().astype(np.float64)

    def errors(self, edges: np.ndarray) -> tuple[float, float, int]:
        """Returns the errors of the adjoint and of plain differentiation, and the states kept."""
        expected = self.gradient("float64", ReversibleAdjoint(), edges)
        counts = []

        class Counted(ReversibleAdjoint):
            def evolve(
                self, nbody: NBody, particles: list[Particles], plan: EvolutionPlan, clock: Clock
            ) -> Evolved:
                counts.append(len(kicks_to_keep(plan, self.max_error_growth)))
                return super().evolve(nbody, particles, plan, clock)

        found = self.gradient("float32", Counted(), edges)
        plain = self.gradient("float32", DirectAdjoint(), edges)
        size = np.sqrt((expected**2).mean())
        adjoint_error, plain_error = (
            float(np.sqrt(((x - expected) ** 2).mean()) / size) for x in (found, plain)
        )
        return adjoint_error, plain_error, counts[0]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--grid", type=int, default=16)
    parser.add_argument("--integrator", choices=list(INTEGRATORS), action="append")
    options = parser.parse_args()
    launch.configure_threads()
    mesh = ProcessMesh("row:1,col:1")
    columns = [f"{n} steps: {what}" for n in STEPS for what in ("adjoint", "plain", "kept")]
    print("| | from a | spacing | " + " | ".join(columns) + " |")
    print("|" + "---|" * (3 + len(columns)))
    for name in options.integrator or INTEGRATORS:
        gradients = Gradients(name, options.grid, mesh)
        for start in STARTS:
            if not start and not INTEGRATORS[name].starts_at_zero:
                continue
            for spacing in spacings(start, 1):
                cells = [name, f"{start:g}", spacing]
                for steps in STEPS:
                    *errors, kept = gradients.errors(spacings(start, steps)[spacing])
                    cells += [f"{error:.1e}" for error in errors] + [str(kept)]
                print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
