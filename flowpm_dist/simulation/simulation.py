"""The front door: from a cosmology and a seed to an evolved universe, or a batch of them."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.growth import Growth, GrowthFunctions
from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.cosmology.power import LinearPower
from flowpm_dist.evolution.clock import Clock
from flowpm_dist.evolution.evolve import evolve
from flowpm_dist.evolution.integrators import FastPM, Integrator, Operation, Schedule
from flowpm_dist.evolution.plan import EvolutionPlan, Particles, Progress
from flowpm_dist.grid.box import Box
from flowpm_dist.grid.decomposition import default_mesh
from flowpm_dist.initial.linear_field import linear_amplitude
from flowpm_dist.options import constructed
from flowpm_dist.simulation.compiled_solver import CompiledSolver, compiled_solver
from flowpm_dist.simulation.inputs import Given, Source
from flowpm_dist.simulation.local_cosmologies import (
    CosmologyFactory,
    GrowthOf,
    LocalCosmologies,
    PowerOf,
)
from flowpm_dist.simulation.options import SolverOptions
from flowpm_dist.simulation.state import Provenance, State
from meshimpl import launch
from meshimpl.process_mesh import MeshShape, ProcessMesh


class Simulation:
    """A particle mesh simulation, on one rank or many.

    Args:
        cosmology: parameters.
        grid: particles along each side: one even number or three.
        box_size: [Mpc/h], one number or three.
        steps: edges of the steps in scale factor, increasing (see `cosmology.time_steps`).
        mesh: the ranks, as a `ProcessMesh` or its shape; by default chosen from their number.
        growth, power: how a cosmology's are made, to repeat another code's tables.
        **options: by name, see `SolverOptions`: lpt_order, noise, fixed_amplitude, force_gradient,
            mesh_factor, deconvolve, integrator, adjoint, precision, halo.

    Attributes:
        options: the `SolverOptions`.
        edges: scale factors at which steps begin and end, float64 [steps + 1].
        halo: "auto" or a number of particle spacings; may be changed between runs.

    Raises:
        TypeError: an option that does not exist.
        ValueError: an argument out of its range, or a mesh that does not divide the grid.
    """

    def __init__(
        self,
        cosmology: Cosmology,
        grid: int | Sequence[int],
        box_size: float | Sequence[float],
        steps: Sequence[float] | np.ndarray,
        *,
        mesh: ProcessMesh | MeshShape | None = None,
        growth: GrowthOf = Growth,
        power: PowerOf = LinearPower,
        **options: Any,
    ) -> None:
        cells = _three(grid, int, "grid")
        self.options = constructed(SolverOptions, options)
        self.halo = self.options.halo
        self.edges = _check_edges(steps, self.options.integrator)
        if mesh is None:
            mesh = default_mesh(launch.detect().size, cells)
        if not isinstance(mesh, ProcessMesh):
            mesh = ProcessMesh(mesh)
        dtype = tf.as_dtype(self.options.precision)
        self._box_arguments = (cells, _three(box_size, float, "box_size"), mesh, dtype)
        self.box_of_replicas  # noqa: B018  (a grid that does not fit is refused now)
        self._cosmologies = CosmologyFactory(cosmology, growth, power)

    @property
    def cosmology(self) -> Cosmology:
        """The simulation's own cosmology."""
        return self._cosmologies.cosmology

    @property
    def growth(self) -> GrowthFunctions:
        """The growth of the simulation's own cosmology."""
        return self._cosmologies.own.growths[0]

    @property
    def power(self) -> LinearPower:
        """The linear power of the simulation's own cosmology."""
        return self._cosmologies.own.powers[0]

    @property
    def box(self) -> Box:
        """The box of one universe.

        Raises:
            ValueError: a mesh whose replica axis only a batch can use.
        """
        return self.box_of(None)

    @functools.cached_property
    def box_of_replicas(self) -> Box:
        """The box of one universe; if the mesh has several replicas, of one universe for each."""
        replicas = self._box_arguments[2].axis_size("replica")
        return self.box_of(None if replicas == 1 else replicas)

    def box_of(self, batch: int | None) -> Box:
        """Returns the box of a batch of universes; of a single one for None.

        Raises:
            ValueError: the mesh's replicas do not divide it.
        """
        return Box(*self._box_arguments, batch=batch)

    def with_steps(self, steps: Sequence[float] | np.ndarray) -> Simulation:
        """Returns the same simulation over other steps.

        Args:
            steps: edges in scale factor, increasing.
        """
        other = copy.copy(self)
        other.edges = _check_edges(steps, self.options.integrator)
        return other

    def linear_amplitude(
        self, cosmology: Cosmology | Sequence[Cosmology] | None = None
    ) -> tf.Tensor:
        """Returns sqrt(P(k) / cell volume) of linear theory at the last of the steps.

        Args:
            cosmology: instead of the simulation's own; one for each universe of a batch gives the
                amplitudes of those of this rank.

        Returns:
            Of this rank's modes [kz, ky, kx] or [universe, kz, ky, kx], in the simulation's
            precision.
        """
        several = cosmology is not None and not isinstance(cosmology, Cosmology)
        box = self.box_of(len(cosmology)) if several else self.box_of_replicas  # type: ignore[arg-type]
        local, a = self._cosmologies.local(cosmology, box), float(self.edges[-1])
        amplitudes = [
            linear_amplitude(box, power) * tf.cast(growth.d1(a), box.dtype)
            for power, growth in zip(local.powers, local.growths, strict=True)
        ]
        return tf.stack(amplitudes) if several else amplitudes[0]

    def run(
        self,
        seed: int | Sequence[int] | None = None,
        *,
        white_noise: Any = None,
        particles: State | tuple[Any, Any] | None = None,
        cosmology: Cosmology | Sequence[Cosmology] | None = None,
        paired: bool = False,
        progress: Progress | None = None,
    ) -> State:
        """Simulates from the first to the last of the steps.

        Several seeds, cosmologies or noise fields make a batch: a universe for each, spread over
        the mesh's replica axis. Whatever is given once then goes for all of them.

        Under a `tf.GradientTape`, gradients go to `white_noise`, to `particles`, and to the
        parameters of `cosmology` that are tensors. Each rank's loss is its part of the sum; a
        parameter's gradient arrives complete on each rank, a field's as this rank's block.

        Args:
            seed: of the white noise; or
            white_noise: the noise itself, unit normal [x, y, z] or [batch, x, y, z]: a `Field` on
                any mesh of the same ranks, the whole array, or this rank's block; or
            particles: a `State` at the first of the steps, of which the cosmology is not taken; or
                displacement [Mpc/h] and canonical velocity [Mpc/h H0], [x, y, z, 3] each, given as
                `white_noise` is.
            cosmology: instead of the simulation's own.
            paired: the opposite of the seed's white noise.
            progress: called on every rank after each step.

        Raises:
            ValueError: not exactly one of seed, white_noise and particles, or what does not fit.
            HaloError: a particle left the halo; says which halo would do. Raised on every rank.
        """
        begin = time.perf_counter()
        if isinstance(particles, State):
            granted = self.cosmology if cosmology is None else None
            particles = particles.particles_for(float(self.edges[0]), self.box_of_replicas, granted)
        given = Given(seed, white_noise, particles, cosmology, paired)
        solver, source, local = self._read(given)
        start, lpt = self._start(solver, source, local)
        schedule = self._schedule(local, from_canonical=source.particles is not None)
        source = replace(source, particles=None)  # so that the first state is not kept
        growth_left = local.growth_between(self.edges)
        from_rest = None if np.isfinite(growth_left[0]) else local.largest_d1(self.edges[-1])
        halo = self.halo
        if halo == "auto":
            halo = solver.suggested_halo(start, float(growth_left[0]), from_rest)
        initial = time.perf_counter() - begin
        nbody, clock = solver.nbody(halo), Clock()
        compile_seconds = solver.compile(nbody, start, float(self.edges[0]))
        plan = EvolutionPlan(
            schedule.operations,
            schedule.factors,
            lpt,
            steps=len(self.edges) - 1,
            growth=lambda a: float(1.0 / np.interp(a, self.edges, 1.0 / growth_left)),
            progress=progress,
        )
        waiting = [start]
        del start, lpt
        begin_evolution = time.perf_counter()
        final = evolve(nbody, waiting, plan, clock, self.options.adjoint)
        evolution = time.perf_counter() - begin_evolution
        work = solver.box.cells * (solver.box.batch or 1) * plan.steps
        timings = {
            "phases": clock.phases,
            "steps": clock.steps,
            "compile": compile_seconds,
            "initial": initial,
            "evolution": evolution,
            "total": time.perf_counter() - begin - compile_seconds,
            "halo": halo,
            "ns_per_particle_per_step": evolution * 1e9 / work,
        }
        provenance = Provenance(self.options, local, halo, source)
        return State.of(final, solver.box, float(self.edges[-1]), provenance, timings)

    def lpt(
        self,
        seed: int | Sequence[int] | None = None,
        *,
        white_noise: Any = None,
        a: float | None = None,
        cosmology: Cosmology | Sequence[Cosmology] | None = None,
        paired: bool = False,
    ) -> State:
        """Returns the universe of Lagrangian perturbation theory alone, of the simulation's order.

        No step is made: one call for the price of the initial conditions, and of the same gradients
        as `run`.

        Args:
            seed, white_noise, cosmology, paired: as for `run`.
            a: scale factor, above 0; by default the last of the steps.

        Raises:
            ValueError: as for `run`, or a scale factor that is not above 0.
        """
        if (seed is None) == (white_noise is None):
            raise ValueError("give either a seed or white_noise: exactly one of them")
        a = float(self.edges[-1]) if a is None else a
        if not a > 0:
            raise ValueError(f"a = {a}: a scale factor above 0 is needed")
        solver, source, local = self._read(Given(seed, white_noise, None, cosmology, paired))
        order, canonical = self.options.lpt_order, FastPM()
        factors = local.of_growths(lambda growth: canonical.initial(growth, a, order))
        noise = _white_noise(solver, source)
        found, _ = solver.particles(noise, local, local.stack(factors))
        halo = solver.suggested_halo(found) if self.halo == "auto" else self.halo
        provenance = Provenance(self.options, local, halo, source)
        return State.of(found, solver.box, a, provenance)

    def _read(self, given: Given) -> tuple[CompiledSolver, Source, LocalCosmologies]:
        """Reads and checks all that a run is given."""
        if given.particles is not None and self.options.integrator.uses_lpt:
            raise ValueError("this integrator follows LPT: it needs a seed or white_noise")
        box = self.box_of(given.batch(self.box_of_replicas))
        local = self._cosmologies.local(given.cosmology, box)
        return compiled_solver(box, self.options), Source.of(given, box), local

    def _start(
        self, solver: CompiledSolver, source: Source, local: LocalCosmologies
    ) -> tuple[Particles, tuple[tf.Tensor, ...]]:
        """Returns the particles at the first of the steps, and the integrator's LPT fields."""
        if source.particles is not None:
            return source.particles, ()
        a, order, integrator = float(self.edges[0]), self.options.lpt_order, self.options.integrator
        factors = local.of_growths(lambda growth: integrator.initial(growth, a, order))
        return solver.particles(_white_noise(solver, source), local, local.stack(factors))

    def _schedule(self, local: LocalCosmologies, *, from_canonical: bool) -> Schedule:
        """Returns the schedule of all universes of this rank; factors [..., operations, 4]."""
        edges, integrator = self.edges.tolist(), self.options.integrator
        schedules = local.of_growths(lambda growth: integrator.schedule(growth, edges))
        operations = schedules[0].operations
        factors = local.stack([schedule.factors for schedule in schedules])
        if from_canonical:
            rows = local.of_growths(lambda growth: integrator.from_canonical(growth, edges[0]))
            if rows[0] is not None:
                first = local.stack(rows)[..., tf.newaxis, :]
                operations = (Operation("velocity", edges[0], 1), *operations)
                factors = tf.concat([first, factors], axis=-2)
        return Schedule(operations, factors)


def _white_noise(solver: CompiledSolver, source: Source) -> tf.Tensor:
    if source.white_noise is not None:
        return source.white_noise
    return solver.initial.white_noise(source.seeds, paired=source.paired)


def _three(value: Any, kind: type, name: str) -> tuple[Any, Any, Any]:
    values = [value] * 3 if np.ndim(value) == 0 else list(value)
    if len(values) != 3:
        raise ValueError(f"{name} {value!r}: one number or three are needed")
    if kind is int and any(int(v) != v for v in values):
        raise ValueError(f"{name} {value!r}: whole numbers are needed")
    x, y, z = (kind(v) for v in values)
    return x, y, z


def _check_edges(steps: Any, integrator: Integrator) -> np.ndarray:
    edges = np.asarray(steps, dtype=np.float64)
    if edges.ndim != 1 or edges.size < 2 or not (np.diff(edges) > 0).all() or edges[0] < 0:
        raise ValueError(
            f"steps {steps!r}: at least two scale factors, not below 0 and increasing, are needed"
        )
    if edges[0] == 0 and not integrator.starts_at_zero:
        raise ValueError(f"steps {steps!r}: this integrator must start later than a = 0")
    return edges
