"""The front door: from a cosmology and a seed to an evolved universe."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from flowpm_dist.blocks import default_mesh
from flowpm_dist.cosmology import Cosmology, Growth, GrowthFunctions, LinearPower
from flowpm_dist.fields import Box, Field
from flowpm_dist.gravity import GRADIENTS
from flowpm_dist.integrators import INTEGRATORS, Integrator
from flowpm_dist.lpt import (
    ORDERS,
    check_white_noise,
    growth_factors,
    linear_amplitude,
    lpt_function,
    white_noise_function,
)
from flowpm_dist.nbody import (
    HALO_MARGIN,
    Clock,
    HaloError,
    NBody,
    Particles,
    Progress,
    needed_halo,
)
from flowpm_dist.painting import Reach
from meshimpl import launch
from meshimpl.process_mesh import MeshShape, ProcessMesh


def scale_factor_steps(a_start: float, a_stop: float, steps: int) -> np.ndarray:
    """Edges of `steps` steps, equal in the scale factor [1], float64 of shape [steps + 1].

    Raises:
        ValueError: unless 0 < a_start < a_stop and steps >= 1.
    """
    if not 0 < a_start < a_stop:
        raise ValueError(f"a_start {a_start} and a_stop {a_stop}: 0 < a_start < a_stop is needed")
    if steps < 1:
        raise ValueError(f"steps {steps}: at least 1 is needed")
    return np.linspace(a_start, a_stop, steps + 1)


@dataclass(frozen=True)
class State:
    """A universe at one scale factor.

    Attributes:
        white_noise: unit normal.
        linear_delta: linear overdensity, extrapolated to a = 1 [1].
        displacement: comoving, from the Lagrangian lattice [Mpc/h].
        velocity: canonical, a^2 dx/dt [Mpc/h H0].
        a: scale factor [1].
        timings: "phases" {name: [seconds per step]}, "steps" [seconds], "compile" and "initial"
            seconds, "ns_per_particle_per_step" over all particles, without compilation, and "halo",
            the planes that were exchanged.
    """

    white_noise: Field
    linear_delta: Field
    displacement: Field
    velocity: Field
    a: float
    timings: dict[str, Any]
    _nbody: NBody

    def density(self) -> Field:
        """Cloud-in-cell density, mean 1."""
        block = self._nbody.density(self.displacement.block, f"density, a = {self.a:.4g}")
        return Field(block, self.displacement.box)


class Simulation:
    """A particle mesh simulation, on one rank or many.

    Args:
        cosmology: parameters.
        grid: cells, and particles, along each side: one even number or three.
        box_size: [Mpc/h], one number or three.
        steps: edges of the steps in scale factor, increasing (see `scale_factor_steps`).
        lpt_order: of the initial conditions, 1 or 2.
        integrator: a name in `INTEGRATORS`, or an `Integrator`.
        gradient: of the potential, "finite-difference" (4 points) or "spectral".
        mesh: the ranks, as a `ProcessMesh` or its shape; by default chosen from their number.
        precision: "float32" or "float64".
        halo: planes exchanged along split axes; "auto" sizes them from the LPT displacement.
        growth, power: instead of the cosmology's own, to repeat another code's tables.

    Raises:
        ValueError: an argument out of its range, or a mesh that does not divide the grid.
    """

    def __init__(
        self,
        cosmology: Cosmology,
        grid: int | Sequence[int],
        box_size: float | Sequence[float],
        steps: Sequence[float] | np.ndarray,
        *,
        lpt_order: int = 2,
        integrator: str | Integrator = "fastpm",
        gradient: Literal["finite-difference", "spectral"] = "finite-difference",
        mesh: ProcessMesh | MeshShape | None = None,
        precision: Literal["float32", "float64"] = "float32",
        halo: int | Literal["auto"] = "auto",
        growth: GrowthFunctions | None = None,
        power: LinearPower | None = None,
    ) -> None:
        cells = _three(grid, int, "grid")
        self.edges = _check_edges(steps)
        self.integrator = _integrator(integrator)
        for value, allowed, name in (
            (gradient, GRADIENTS, "gradient"),
            (precision, ("float32", "float64"), "precision"),
            (lpt_order, ORDERS, "lpt_order"),
        ):
            if value not in allowed:
                choices = ", ".join(map(repr, allowed))
                raise ValueError(f"{name} {value!r} is not one of {choices}")
        if halo != "auto" and (not isinstance(halo, int) or halo < 1):
            raise ValueError(f'halo {halo!r}: "auto" or a number of planes from 1 on')
        if mesh is None:
            mesh = default_mesh(launch.detect().size, cells)
        if not isinstance(mesh, ProcessMesh):
            mesh = ProcessMesh(mesh)
        self.cosmology = cosmology
        self.box = Box(cells, _three(box_size, float, "box_size"), mesh, tf.as_dtype(precision))
        self.gradient, self.lpt_order, self.halo = gradient, lpt_order, halo
        self.growth = Growth(cosmology) if growth is None else growth
        self.power = LinearPower(cosmology, self.growth) if power is None else power
        self._white_noise = white_noise_function(self.box)
        self._lpt = lpt_function(self.box, lpt_order)
        self._reach = Reach(self.box)
        self._nbody: dict[int, NBody] = {}

    def run(
        self,
        seed: int | None = None,
        *,
        white_noise: Any = None,
        progress: Progress | None = None,
    ) -> State:
        """Simulate from the first to the last of the steps.

        Args:
            seed: of the white noise; or
            white_noise: the noise itself, unit normal [x, y, z]: a `Field`, the whole array, or
                this rank's block.
            progress: called on every rank after each step.

        Raises:
            ValueError: not exactly one of seed and white_noise, or noise that does not fit.
            HaloError: a particle left the halo; says which halo would do. Raised on every rank.
        """
        begin = time.perf_counter()
        noise = self._noise(seed, white_noise)
        linear, particles = self._initial(noise)
        halo = self._halo(particles.displacement)
        initial = time.perf_counter() - begin
        steps = self.integrator.steps(self.growth, list(self.edges))
        compile_seconds = 0.0 if halo in self._nbody else self._compile(halo, particles)
        nbody = self._nbody[halo]
        clock, durations = Clock(), []
        begin_evolution = time.perf_counter()

        def after_step(step: int, count: int, a: float, seconds: float) -> None:
            durations.append(seconds)
            if progress is not None:
                progress(step, count, a, seconds)

        # The list gives its only reference away: the first state is not kept while others follow.
        initial_state = [particles]
        del particles
        particles = nbody.evolve(
            initial_state.pop(), steps, clock, after_step, self._growth_left.__getitem__
        )
        evolution = time.perf_counter() - begin_evolution
        timings = {
            "phases": clock.phases,
            "steps": durations,
            "compile": compile_seconds,
            "initial": initial,
            "halo": nbody.halo,
            "ns_per_particle_per_step": evolution * 1e9 / self.box.cells / len(steps),
        }
        return State(
            white_noise=Field(noise, self.box),
            linear_delta=Field(linear, self.box),
            displacement=Field(particles.displacement, self.box),
            velocity=Field(particles.velocity, self.box),
            a=float(self.edges[-1]),
            timings=timings,
            _nbody=nbody,
        )

    def _noise(self, seed: int | None, white_noise: Any) -> tf.Tensor:
        if (seed is None) == (white_noise is None):
            raise ValueError("give either a seed or white_noise")
        if seed is not None:
            return self._white_noise(np.int64(seed))
        value = white_noise.block if isinstance(white_noise, Field) else white_noise
        if not isinstance(value, (tf.Tensor, tf.Variable)):
            value = np.asanyarray(value)
            check_white_noise(value, self.box)
        return self._lpt.block_of("white_noise", value)

    def _initial(self, noise: tf.Tensor) -> tuple[tf.Tensor, Particles]:
        amplitude = linear_amplitude(self.box, self.power)
        factors = growth_factors(self.growth, float(self.edges[0]), self.lpt_order)
        linear, displacement, velocity = self._lpt(
            noise, amplitude, tf.cast(factors, self.box.dtype)
        )
        today = tf.cast(self.growth.d1(1.0), self.box.dtype)
        return linear * today, Particles(displacement, velocity)

    def _halo(self, displacement: tf.Tensor) -> int:
        """Planes that hold linear theory's largest displacement at the end, with a margin."""
        if self.halo != "auto":
            return int(self.halo)
        reach = self._reach(displacement)
        if not math.isfinite(reach):
            raise FloatingPointError("the initial displacement has values that are not finite")
        return needed_halo(HALO_MARGIN * reach * self._growth_left[self.edges[0]]) + 1

    @functools.cached_property
    def _growth_left(self) -> dict[float, float]:
        """Edge of a step -> growth of linear displacements from there to the end of the run."""
        d1 = self.growth.d1(self.edges).numpy()
        return dict(zip(self.edges.tolist(), (d1[-1] / d1).tolist(), strict=True))

    def _compile(self, halo: int, particles: Particles) -> float:
        """Lower and compile every function of a step, once for a halo; the seconds that took."""
        begin = time.perf_counter()
        nbody = NBody(self.box, halo, self.gradient, self.cosmology.Omega_m, self._reach)
        clock = Clock()
        clock.start_step()
        start = f"start of the evolution, a = {self.edges[0]:.4g}"
        still = Particles(  # nothing of this is to be differentiated
            tf.stop_gradient(particles.displacement), tf.stop_gradient(particles.velocity)
        )
        growth = self._growth_left[self.edges[0]]
        force = nbody.force(still.displacement, clock, start, growth)
        nbody.kick(still, force, tf.constant(0.0, tf.float64))
        self._nbody[halo] = nbody
        return time.perf_counter() - begin


def _three(value: Any, kind: type, name: str) -> tuple[Any, Any, Any]:
    values = [value] * 3 if np.ndim(value) == 0 else list(value)
    if len(values) != 3:
        raise ValueError(f"{name} {value!r}: one number or three are needed")
    if kind is int and any(int(v) != v for v in values):
        raise ValueError(f"{name} {value!r}: whole numbers are needed")
    x, y, z = (kind(v) for v in values)
    return x, y, z


def _check_edges(steps: Any) -> np.ndarray:
    edges = np.asarray(steps, dtype=np.float64)
    if edges.ndim != 1 or edges.size < 2 or not (np.diff(edges) > 0).all() or edges[0] <= 0:
        raise ValueError(
            f"steps {steps!r}: at least two scale factors, above 0 and increasing, are needed"
        )
    return edges


def _integrator(integrator: str | Integrator) -> Integrator:
    if isinstance(integrator, Integrator):
        return integrator
    if integrator not in INTEGRATORS:
        raise ValueError(
            f"integrator {integrator!r} is not one of {', '.join(map(repr, INTEGRATORS))}"
        )
    return INTEGRATORS[integrator]()


__all__ = ["HaloError", "Simulation", "State", "scale_factor_steps"]
