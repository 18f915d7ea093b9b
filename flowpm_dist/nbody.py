"""The evolution of the particles: paint, potential, read, kick and drift, step by step.

Each phase is a mesh function of its own, lowered once and called in turn: a run of any number of
steps holds one copy of the state, reports progress after each step, and knows where its time goes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from flowpm_dist.fields import Box
from flowpm_dist.gravity import force_field, read_force
from flowpm_dist.integrators import Step
from flowpm_dist.painting import Reach, paint
from meshimpl.compat import mtf

Progress = Callable[[int, int, float, float], None]
"""Called on every rank after each step: step, number of steps, scale factor, seconds."""

PHASES = ("paint", "force", "read", "update")

HALO_MARGIN = 1.2
"""How much further than linear theory's largest displacement a suggested halo reaches."""


class HaloError(RuntimeError):
    """A particle strayed beyond the halo. Raised on every rank; nothing was lost."""


class Clock:
    """Seconds of each phase, step by step."""

    def __init__(self) -> None:
        self.phases: dict[str, list[float]] = {phase: [] for phase in PHASES}

    def start_step(self) -> None:
        """Begin a new entry of every phase."""
        for seconds in self.phases.values():
            seconds.append(0.0)

    def measure(self, phase: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call, and add the time it took to a phase."""
        begin = time.perf_counter()
        result = function(*args)
        self.phases[phase][-1] += time.perf_counter() - begin
        return result


def check_reach(reach: float, halo: int, label: str, growth: float = 1.0) -> None:
    """Raise unless particles that stray `reach` cells are all within a halo.

    Args:
        reach: largest displacement [cells].
        halo: planes.
        label: of this moment of the run, for the message.
        growth: of linear displacements from here to the end of the run, for the halo to suggest.

    Raises:
        FloatingPointError: the displacement is not finite.
        HaloError: names the step, the reach and the halo that would do.
    """
    if not math.isfinite(reach):
        raise FloatingPointError(f"{label}: the displacement has values that are not finite")
    if reach >= halo:
        raise HaloError(
            f"{label}: a particle is {reach:.2f} cells from its lattice site, beyond the halo of "
            f"{halo}; halo = {needed_halo(reach)} would do for this step, "
            f"halo = {needed_halo(HALO_MARGIN * reach * growth) + 1} should for the whole run"
        )


def needed_halo(reach: float) -> int:
    """The smallest halo [planes] for particles that stray up to `reach` cells."""
    return math.floor(reach) + 1


@dataclass(frozen=True)
class Particles:
    """Displacement [Mpc/h] and canonical velocity a^2 dx/dt [Mpc/h H0], blocks [x, y, z, 3]."""

    displacement: tf.Tensor
    velocity: tf.Tensor


class NBody:
    """Particle mesh evolution in a box.

    Args:
        box: grid, size, ranks and dtype.
        halo: planes of halo along split axes.
        gradient: "finite-difference" or "spectral".
        Omega_m: matter today over the critical density [1].
        reach: of the box, where there is one already.
    """

    def __init__(
        self, box: Box, halo: int, gradient: str, Omega_m: tf.Tensor, reach: Reach | None = None
    ) -> None:
        self.box, self.halo = box, halo
        self.reach = reach or Reach(box)
        self._omega = 1.5 * tf.cast(Omega_m, tf.float64)
        scalar, field, vector = mtf.Shape([]), box.shape, box.vector_shape
        read_from = vector if gradient == "spectral" else field
        self.paint = box.function(lambda _, s: paint(s, box, halo), displacement=vector)
        self._force_field = box.function(
            lambda _, density: force_field(density, box, gradient), density=field
        )
        self._read = box.function(
            lambda _, f, s: read_force(f, s, box, halo, gradient),
            field=read_from,
            displacement=vector,
        )
        self._add = box.function(
            lambda _, x, y, factor: x + y * factor, x=vector, y=vector, factor=scalar
        )

    def _scale(self, factor: tf.Tensor) -> tf.Tensor:
        return tf.cast(factor, self.box.dtype)

    def density(
        self, displacement: tf.Tensor, label: str = "density", growth: float = 1.0
    ) -> tf.Tensor:
        """Cloud-in-cell density [x, y, z], mean 1, after checking the halo; see `check_reach`."""
        check_reach(self.reach(displacement), self.halo, label, growth)
        return self.paint(displacement)

    def force(
        self, displacement: tf.Tensor, clock: Clock, label: str, growth: float = 1.0
    ) -> tf.Tensor:
        """-grad phi / (1.5 Omega_m) at the particles [x, y, z, 3] [Mpc/h]; see `check_reach`."""
        density = clock.measure("paint", self.density, displacement, label, growth)
        field = clock.measure("force", self._force_field, density)
        return clock.measure("read", self._read, field, displacement)

    def kick(self, p: Particles, force: tf.Tensor, factor: tf.Tensor) -> Particles:
        """velocity += 1.5 Omega_m factor force."""
        scale = self._scale(self._omega * factor)
        return Particles(p.displacement, self._add(p.velocity, force, scale))

    def drift(self, p: Particles, factor: tf.Tensor) -> Particles:
        """displacement += factor velocity."""
        return Particles(self._add(p.displacement, p.velocity, self._scale(factor)), p.velocity)

    def evolve(
        self,
        particles: Particles,
        steps: Sequence[Step],
        clock: Clock,
        progress: Progress | None = None,
        growth: Callable[[float], float] = lambda a: 1.0,
    ) -> Particles:
        """Carry the particles through the steps.

        Args:
            particles: at the start of the first step.
            steps: their factors.
            clock: gets an entry a step.
            progress: called after each step.
            growth: of linear displacements from scale factor a to the end, see `check_reach`.

        Raises:
            HaloError, FloatingPointError: on every rank, naming the step.
        """
        force = None
        for number, step in enumerate(steps, start=1):
            begin = time.perf_counter()
            clock.start_step()
            label = f"step {number} of {len(steps)}, a = {step.stop:.4g}"
            if force is None:
                at_start = f"start of the evolution, a = {step.start:.4g}"
                force = self.force(particles.displacement, clock, at_start, growth(step.start))
            particles = clock.measure("update", self.kick, particles, force, step.opening)
            particles = clock.measure("update", self.drift, particles, step.drift)
            force = self.force(particles.displacement, clock, label, growth(step.stop))
            particles = clock.measure("update", self.kick, particles, force, step.closing)
            if progress is not None:
                progress(number, len(steps), step.stop, time.perf_counter() - begin)
        return particles
