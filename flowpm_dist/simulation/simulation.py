"""The front door: from a cosmology and a seed to an evolved universe, or a batch of them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.growth import Growth, GrowthFunctions
from flowpm_dist.cosmology.parameters import AMPLITUDES, Cosmology
from flowpm_dist.cosmology.power import LinearPower
from flowpm_dist.evolution import adjoint
from flowpm_dist.evolution.integrators import INTEGRATORS, FastPM, Integrator, Operation, Schedule
from flowpm_dist.evolution.nbody import (
    HALO_MARGIN,
    Clock,
    EvolutionPlan,
    HaloError,
    NBody,
    Particles,
    Progress,
    needed_halo,
)
from flowpm_dist.grid.box import Box
from flowpm_dist.grid.decomposition import default_mesh
from flowpm_dist.grid.field import Field
from flowpm_dist.initial.linear_field import linear_amplitude
from flowpm_dist.initial.lpt import ORDERS
from flowpm_dist.initial.white_noise import NOISES, check_white_noise
from flowpm_dist.particle_mesh.gravity import FORCE_GRADIENTS
from flowpm_dist.simulation.compiled_solver import CompiledSolver, SolverOptions
from flowpm_dist.simulation.local_cosmologies import (
    GrowthOf,
    LocalCosmologies,
    PowerOf,
    of_this_rank,
)
from flowpm_dist.simulation.state import Provenance, State
from meshimpl import launch
from meshimpl.mesh_function import is_watched
from meshimpl.process_mesh import MeshShape, ProcessMesh

DIFFERENTIATIONS = ("adjoint", "plain")
WITHOUT_GROWTH = ("Omega_b", "n_s", *AMPLITUDES)
"""Parameters that the growth of structure on large scales does not depend on."""
PAIRED = "paired goes with a seed"


class Simulation:
    """A particle mesh simulation, on one rank or many.

    Args:
        cosmology: parameters.
        grid: particles along each side: one even number or three.
        box_size: [Mpc/h], one number or three.
        steps: edges of the steps in scale factor, increasing (see the module `steps`).
        lpt_order: of the initial conditions, 1, 2 or 3.
        integrator: a name in `INTEGRATORS`, or an `Integrator`.
        force_gradient: of the potential, "finite-difference" (4 points) or "spectral".
        mesh_factor: cells of the force mesh per particle spacing, along each side.
        deconvolve: divide the force by the squared cloud-in-cell window.
        noise: "cells" or "nested" (the same large scales on a finer grid), see `noise_function`.
        fixed_amplitude: initial modes with the amplitude of their rms, and random phases.
        mesh: the ranks, as a `ProcessMesh` or its shape; by default chosen from their number.
        precision: "float32" or "float64".
        halo: exchanged along split axes [particle spacings]; "auto" sizes it from the LPT
            displacement.
        differentiation: of a run under a `tf.GradientTape`: "adjoint" (memory flat in the number
            of steps) or "plain".
        growth, power: how a cosmology's are made, to repeat another code's tables.

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
        force_gradient: Literal["finite-difference", "spectral"] = "finite-difference",
        mesh_factor: int = 1,
        deconvolve: bool = False,
        noise: Literal["cells", "nested"] = "cells",
        fixed_amplitude: bool = False,
        mesh: ProcessMesh | MeshShape | None = None,
        precision: Literal["float32", "float64"] = "float32",
        halo: int | Literal["auto"] = "auto",
        differentiation: Literal["adjoint", "plain"] = "adjoint",
        growth: GrowthOf = Growth,
        power: PowerOf = LinearPower,
    ) -> None:
        cells = _three(grid, int, "grid")
        self.integrator = _integrator(integrator)
        self.edges = _check_edges(steps, self.integrator)
        for value, allowed, name in (
            (force_gradient, FORCE_GRADIENTS, "force_gradient"),
            (precision, ("float32", "float64"), "precision"),
            (lpt_order, ORDERS, "lpt_order"),
            (noise, NOISES, "noise"),
            (differentiation, DIFFERENTIATIONS, "differentiation"),
        ):
            if value not in allowed:
                choices = ", ".join(map(repr, allowed))
                raise ValueError(f"{name} {value!r} is not one of {choices}")
        if self.integrator.uses_lpt and lpt_order < 2:
            raise ValueError(f"lpt_order {lpt_order}: this integrator follows LPT of order 2")
        if not isinstance(mesh_factor, int) or mesh_factor < 1:
            raise ValueError(f"mesh_factor {mesh_factor!r}: a whole number of at least 1 is needed")
        if halo != "auto" and (not isinstance(halo, int) or halo < 1):
            raise ValueError(f'halo {halo!r}: "auto" or a number of cells from 1 on')
        if mesh is None:
            mesh = default_mesh(launch.detect().size, cells)
        if not isinstance(mesh, ProcessMesh):
            mesh = ProcessMesh(mesh)
        self.cosmology = cosmology
        self.halo, self.differentiation = halo, differentiation
        self.options = SolverOptions(
            lpt_order,
            self.integrator,
            force_gradient,
            mesh_factor,
            deconvolve,
            noise,
            fixed_amplitude,
        )
        self._boxes = (
            cells,
            _three(box_size, float, "box_size"),
            mesh,
            tf.as_dtype(precision),
        )
        self._pipelines: dict[int | None, CompiledSolver] = {}
        self.box_of_replicas  # noqa: B018  (a grid that does not fit is told now)
        self._growth_of, self._power_of = growth, power
        self._own = LocalCosmologies.of([cosmology], False, growth, power)

    @property
    def box(self) -> Box:
        """Of one universe.

        Raises:
            ValueError: a mesh whose replica axis only a batch can use.
        """
        return Box(*self._boxes)

    @property
    def box_of_replicas(self) -> Box:
        """Of one universe; where the mesh has several replicas, of one universe for each."""
        replicas = self._boxes[2].axis_size("replica")
        return self.box_of(None if replicas == 1 else replicas)

    def box_of(self, batch: int | None) -> Box:
        """Of a batch of universes.

        Raises:
            ValueError: the mesh's replicas do not divide it.
        """
        return self._pipeline(batch).box

    @property
    def growth(self) -> Any:
        """Of the simulation's own cosmology."""
        return self._own.growths[0]

    @property
    def power(self) -> LinearPower:
        """Of the simulation's own cosmology."""
        return self._own.powers[0]

    def linear_amplitude(
        self, cosmology: Cosmology | Sequence[Cosmology] | None = None
    ) -> tf.Tensor:
        """sqrt(P(k) / cell volume) of linear theory at the last of the steps.

        Args:
            cosmology: instead of the simulation's own; one for each universe of a batch gives the
                amplitudes of those of this rank.

        Returns:
            Of this rank's modes [kz, ky, kx] or [universe, kz, ky, kx], in the simulation's
            precision.
        """
        several = cosmology is not None and not isinstance(cosmology, Cosmology)
        box = self.box_of(len(cosmology)) if several else self.box_of_replicas  # type: ignore[arg-type]
        universes, a = self._universes(cosmology, box), float(self.edges[-1])
        amplitudes = [
            linear_amplitude(box, power) * tf.cast(growth.d1(a), box.dtype)
            for power, growth in zip(universes.powers, universes.growths, strict=True)
        ]
        return tf.stack(amplitudes) if several else amplitudes[0]

    def _pipeline(self, batch: int | None) -> CompiledSolver:
        if batch not in self._pipelines:
            self._pipelines[batch] = CompiledSolver(Box(*self._boxes, batch=batch), self.options)
        return self._pipelines[batch]

    def run(
        self,
        seed: int | Sequence[int] | None = None,
        *,
        white_noise: Any = None,
        particles: tuple[Any, Any] | None = None,
        cosmology: Cosmology | Sequence[Cosmology] | None = None,
        paired: bool = False,
        progress: Progress | None = None,
    ) -> State:
        """Simulate from the first to the last of the steps.

        Several seeds, cosmologies or noise fields make a batch: a universe for each, spread over
        the mesh's replica axis. Whatever is given once then goes for all of them.

        Under a `tf.GradientTape`, gradients go to `white_noise`, to `particles`, and to the
        parameters of `cosmology` that are tensors. Each rank's loss is its part of the sum; a
        parameter's gradient arrives complete on each rank, a field's as this rank's block.

        Args:
            seed: of the white noise; or
            white_noise: the noise itself, unit normal [x, y, z] or [batch, x, y, z]: a `Field`, the
                whole array, or this rank's block; or
            particles: displacement [Mpc/h] and canonical velocity [Mpc/h H0] at the first of the
                steps, [x, y, z, 3] each, likewise.
            cosmology: instead of the simulation's own.
            paired: the opposite of the seed's white noise.
            progress: called on every rank after each step.

        Raises:
            ValueError: not exactly one of seed, white_noise and particles, or what does not fit.
            HaloError: a particle left the halo; says which halo would do. Raised on every rank.
        """
        begin = time.perf_counter()
        _exactly_one({"a seed": seed, "white_noise": white_noise, "particles": particles})
        pipeline = self._pipeline(self._batch(seed, white_noise, particles, cosmology))
        universes = self._universes(cosmology, pipeline.box)
        origin = Provenance(pipeline, universes, 0, paired=paired)
        if particles is None:
            noise, origin = self._noise(origin, seed, white_noise)
            start, lpt = pipeline.initial(noise, universes, self._first_factors(universes))
            del noise
            schedule = self._schedule(universes, given=False)
        else:
            if paired:
                raise ValueError(PAIRED)
            start, lpt = self._given_particles(pipeline, particles), ()
            schedule = self._schedule(universes, given=True)
        growth_left = universes.growth_between(self.edges)
        halo = self._halo(pipeline, start, universes, float(growth_left[0]))
        origin = replace(origin, halo=halo)
        initial = time.perf_counter() - begin
        compile_seconds = self._compile(pipeline.nbody(halo), start)
        clock, durations = Clock(), []
        begin_evolution = time.perf_counter()

        def after_step(step: int, count: int, a: float, seconds: float) -> None:
            durations.append(seconds)
            if progress is not None:
                progress(step, count, a, seconds)

        course = EvolutionPlan(
            schedule.operations,
            schedule.factors,
            lpt,
            steps=len(self.edges) - 1,
            growth=lambda a: float(np.interp(a, self.edges, growth_left)),
            progress=after_step,
        )
        waiting = [start]
        del start, lpt
        final = self._evolve(pipeline.nbody(halo), waiting, course, clock)
        evolution = time.perf_counter() - begin_evolution
        universes_count = pipeline.box.batch or 1
        work = pipeline.box.cells * universes_count * course.steps
        timings = {
            "phases": clock.phases,
            "steps": durations,
            "compile": compile_seconds,
            "initial": initial,
            "evolution": evolution,
            "total": time.perf_counter() - begin - compile_seconds,
            "halo": halo,
            "ns_per_particle_per_step": evolution * 1e9 / work,
        }
        return State(
            displacement=Field(final.displacement, pipeline.box),
            velocity=Field(final.velocity, pipeline.box),
            a=float(self.edges[-1]),
            timings=timings,
            _origin=origin,
        )

    def lpt(
        self,
        seed: int | Sequence[int] | None = None,
        *,
        white_noise: Any = None,
        a: float | None = None,
        cosmology: Cosmology | Sequence[Cosmology] | None = None,
        paired: bool = False,
    ) -> State:
        """The universe of Lagrangian perturbation theory alone, of the simulation's order.

        No step is made: one call for the price of the initial conditions, and of the same gradients
        as `run`.

        Args:
            seed, white_noise, cosmology, paired: as for `run`.
            a: scale factor, above 0; by default the last of the steps.

        Raises:
            ValueError: as for `run`, or a scale factor that is not above 0.
        """
        a = float(self.edges[-1]) if a is None else a
        if not a > 0:
            raise ValueError(f"a = {a}: a scale factor above 0 is needed")
        _exactly_one({"a seed": seed, "white_noise": white_noise})
        pipeline = self._pipeline(self._batch(seed, white_noise, None, cosmology))
        universes = self._universes(cosmology, pipeline.box)
        noise, origin = self._noise(
            Provenance(pipeline, universes, 1, paired=paired), seed, white_noise
        )
        order, canonical = self.options.lpt_order, FastPM()
        factors = universes.of_growths(lambda growth: canonical.initial(growth, a, order))
        found, _ = pipeline.initial(noise, universes, universes.stack(factors))
        halo = self._halo(pipeline, found, universes, 1.0)
        return State(
            displacement=Field(found.displacement, pipeline.box),
            velocity=Field(found.velocity, pipeline.box),
            a=a,
            timings={},
            _origin=replace(origin, halo=halo),
        )

    def _noise(self, origin: Provenance, seed: Any, given: Any) -> tuple[tf.Tensor, Provenance]:
        """This rank's block of the white noise, and an origin that knows where it is from."""
        pipeline = origin.pipeline
        if seed is None:
            if origin.paired:
                raise ValueError(PAIRED)
            noise = _given(pipeline.lpt, "white_noise", given, pipeline.box)
            return noise, replace(origin, noise=noise)
        batch = pipeline.box.number_shape.to_integer_list
        seeds = np.broadcast_to(np.asarray(seed, np.int64), batch)
        return pipeline.noise(origin.paired)(seeds), replace(origin, seed=seeds)

    def _first_factors(self, universes: LocalCosmologies) -> tf.Tensor:
        """LPT factors of the start, of the integrator's own velocity, [..., 2, terms]."""
        a, order = float(self.edges[0]), self.options.lpt_order
        initial = self.integrator.initial
        return universes.stack(universes.of_growths(lambda g: initial(g, a, order)))

    def _batch(self, seed: Any, noise: Any, particles: Any, cosmology: Any) -> int | None:
        """How many universes what was given stands for; None where it is a single one."""
        counts = {}
        if seed is not None:
            seeds = np.asarray(seed)
            whole_numbers = np.issubdtype(seeds.dtype, np.integer)
            if seeds.ndim > 1 or not seeds.size or not whole_numbers:
                raise ValueError(f"seed {seed!r}: a whole number, or a list of them, is needed")
            if seeds.ndim:
                counts["seeds"] = len(seeds)
        if cosmology is not None and not isinstance(cosmology, Cosmology):
            counts["cosmologies"] = len(cosmology)
        field = noise if particles is None else particles[0]
        rank = 3 if particles is None else 4
        if isinstance(field, Field):
            if field.box.batch is not None:
                counts["fields"] = field.box.batch
        elif field is not None and len(field.shape) == rank + 1:
            cells, _, mesh, _ = self._boxes
            replicas = mesh.axis_size("replica")
            whole = tuple(field.shape[1:4]) == cells
            tensor = isinstance(field, (tf.Tensor, tf.Variable))
            if tensor and whole and mesh.size == replicas > 1:
                raise ValueError(
                    f"a tensor of {field.shape[0]} fields: on the mesh {mesh} they may be all of a "
                    "batch or this rank's; give a Field, or all of them as an array"
                )
            counts["fields"] = field.shape[0] * (1 if whole else replicas)
        if len(set(counts.values())) > 1:
            given = ", ".join(f"{n} {name}" for name, n in counts.items())
            raise ValueError(f"a batch of which size? Given are {given}")
        return next(iter(counts.values()), None)

    def _universes(self, cosmology: Any, box: Box) -> LocalCosmologies:
        if cosmology is None:
            own = [getattr(self.cosmology, name) for name in self.cosmology.names]
            if is_watched([p for p in own if isinstance(p, (tf.Tensor, tf.Variable))]):
                raise ValueError(
                    "to differentiate by a cosmology, give it to run(cosmology=...): the "
                    "simulation's own was evaluated when it was made"
                )
            return self._own if box.batch is None else self._own.repeated(box.local_batch[0])
        given = [cosmology] if isinstance(cosmology, Cosmology) else list(cosmology)
        local = of_this_rank(given, box)
        return LocalCosmologies.of(local, box.batch is not None, self._growth, self._power)

    def _growth(self, cosmology: Cosmology) -> GrowthFunctions:
        """Of a cosmology; that of the simulation's own where both have the same background."""
        if self._differs_only_in(WITHOUT_GROWTH, cosmology):
            return self._own.growths[0]
        return self._growth_of(cosmology)

    def _power(self, cosmology: Cosmology, growth: GrowthFunctions) -> LinearPower:
        """Of a cosmology; that of the simulation's own with another amplitude where that is all."""
        own = self.cosmology
        same = (cosmology.names, cosmology.transfer) == (own.names, own.transfer)
        if same and self._differs_only_in(AMPLITUDES, cosmology):
            return self._own.powers[0].rescaled(cosmology)
        return self._power_of(cosmology, growth)

    def _differs_only_in(self, names: tuple[str, ...], cosmology: Cosmology) -> bool:
        """From the simulation's own cosmology in no others than these.

        A cosmology that has passed `of_this_rank` holds the same numbers, but no tensors that are
        the simulation's own: what is differentiated by is never taken for the same.
        """
        own = self.cosmology
        others = [n for n in {*own.names, *cosmology.names} if n not in names]
        return all(getattr(own, n, None) is getattr(cosmology, n, None) for n in others)

    def _schedule(self, universes: LocalCosmologies, *, given: bool) -> Schedule:
        """Of all universes of this rank; factors [..., operations, 4]."""
        edges = self.edges.tolist()
        schedules = universes.of_growths(lambda g: self.integrator.schedule(g, edges))
        operations = schedules[0].operations
        factors = universes.stack([schedule.factors for schedule in schedules])
        if given and (first := self._from_canonical(universes)) is not None:
            operations = (Operation("velocity", edges[0], 1), *operations)
            factors = tf.concat([first[..., tf.newaxis, :], factors], axis=-2)
        return Schedule(operations, factors)

    def _from_canonical(self, universes: LocalCosmologies) -> tf.Tensor | None:
        a = float(self.edges[0])
        rows = universes.of_growths(lambda g: self.integrator.from_canonical(g, a))
        return None if rows[0] is None else universes.stack(rows)

    def _given_particles(self, pipeline: CompiledSolver, particles: tuple[Any, Any]) -> Particles:
        if self.integrator.uses_lpt:
            raise ValueError("this integrator follows LPT: it needs a seed or white_noise")
        reader = pipeline.nbody(1).kick
        box = pipeline.box
        return Particles(
            *(
                _given(reader, name, x, box)
                for name, x in zip(("displacement", "velocity"), particles, strict=True)
            )
        )

    def _evolve(
        self, nbody: NBody, particles: list[Particles], course: EvolutionPlan, clock: Clock
    ) -> Particles:
        start = particles[0]
        watched = is_watched([start.displacement, start.velocity, course.factors, *course.lpt])
        del start
        if not watched:
            return nbody.evolve(particles, course, clock)
        if self.differentiation == "plain":
            return nbody.evolve(particles, course, clock, fused=False)
        return adjoint.evolve(nbody, particles, course, clock)

    def _halo(
        self, pipeline: CompiledSolver, start: Particles, universes: LocalCosmologies, growth: float
    ) -> int:
        """Planes that hold linear theory's largest displacement at the end, with a margin."""
        if self.halo != "auto":
            return int(self.halo)
        if math.isfinite(growth):
            reach = pipeline.reach(start.displacement)
        else:  # at a = 0 nothing has moved, and the velocity is dx/dD1
            reach = pipeline.reach(start.velocity)
            growth = max(universes.of_growths(lambda g: float(g.d1(self.edges[-1]))))
        if not math.isfinite(reach):
            raise FloatingPointError("the initial displacement has values that are not finite")
        halo = needed_halo(HALO_MARGIN * reach * growth) + 1
        return int(self._boxes[2].world.allreduce(tf.constant(halo), "max"))

    def _compile(self, nbody: NBody, particles: Particles) -> float:
        """Lower and compile every function of a step, once; the seconds that took."""
        if "kick" in vars(nbody):
            return 0.0
        begin = time.perf_counter()
        # nothing of this is to be differentiated
        x, v = tf.stop_gradient(particles.displacement), tf.stop_gradient(particles.velocity)
        field = nbody.field(nbody.painted(x, f"start of the evolution, a = {self.edges[0]:.4g}"))
        shape = [*nbody.box.local_batch, 2]
        nbody.kick(field, x, v, tf.zeros(shape, nbody.box.dtype))
        return time.perf_counter() - begin


def _exactly_one(sources: dict[str, Any]) -> None:
    if sum(source is not None for source in sources.values()) != 1:
        raise ValueError(f"give either {', '.join(sources)}: exactly one of them")


def _given(reader: Any, name: str, value: Any, box: Box) -> tf.Tensor:
    """This rank's block of a given field, checked."""
    value = value.block if isinstance(value, Field) else value
    if not isinstance(value, (tf.Tensor, tf.Variable)):
        value = np.asanyarray(value)
        if name == "white_noise":
            check_white_noise(value, box)
    return reader.block_of(name, value)


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


def _integrator(integrator: str | Integrator) -> Integrator:
    if isinstance(integrator, Integrator):
        return integrator
    if integrator not in INTEGRATORS:
        raise ValueError(
            f"integrator {integrator!r} is not one of {', '.join(map(repr, INTEGRATORS))}"
        )
    return INTEGRATORS[integrator]()


__all__ = ["HaloError", "Simulation", "State"]
