"""The front door: from a cosmology and a seed to an evolved universe, or a batch of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, overload

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.growth import Growth, GrowthFunctions
from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.cosmology.power import LinearPower
from flowpm_dist.evolution.clock import Clock
from flowpm_dist.evolution.integrators import FastPM
from flowpm_dist.evolution.observers import Observer, Observers
from flowpm_dist.evolution.options import HaloOptions
from flowpm_dist.evolution.plan import StepCallback
from flowpm_dist.grid.box import Box
from flowpm_dist.grid.decomposition import default_mesh
from flowpm_dist.initial.linear_field import linear_amplitude
from flowpm_dist.options import constructed
from flowpm_dist.simulation.arguments import check_edges, three
from flowpm_dist.simulation.compiled_solver import compiled_solver
from flowpm_dist.simulation.inputs import Given, Inputs, particles_of, source_of
from flowpm_dist.simulation.local_cosmologies import CosmologyFactory, GrowthOf, PowerOf
from flowpm_dist.simulation.options import SolverOptions
from flowpm_dist.simulation.outputs import OnOutput, Outputs, check_outputs
from flowpm_dist.simulation.stages import (
    AfterStep,
    Resume,
    evolve_particles,
    first_particles,
    halo_for,
    lpt_particles,
)
from flowpm_dist.simulation.state import State
from meshimpl import launch
from meshimpl.graph_guards import check_eager
from meshimpl.process_mesh import MeshShape, ProcessMesh

ObserverOf = Callable[[Inputs, int], Observer]
"""What makes an observer from the inputs of a run and its halo."""


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
            mesh_factor, deconvolve, exchange, integrator, adjoint, precision, halo.

    Attributes:
        options: the `SolverOptions`.
        edges: scale factors at which steps begin and end, float64 [steps + 1].
        halo: "auto" or a number of particle spacings; may be changed between runs.
        box_of_replicas: the box of one universe; if the mesh has several replicas, of one universe
            for each.

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
        cells, size = three(grid, int, "grid"), three(box_size, float, "box_size")
        self.options = constructed(SolverOptions, options)
        self.halo = self.options.halo
        self.edges = check_edges(steps, self.options.integrator)
        if mesh is None:
            mesh = default_mesh(launch.detect().size, cells)
        if not isinstance(mesh, ProcessMesh):
            mesh = ProcessMesh(mesh)
        self._grid, self._box_size, self._mesh = cells, size, mesh
        replicas = mesh.axis_size("replica")
        self.box_of_replicas = self.box_of(None if replicas == 1 else replicas)
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
    def spacing(self) -> float:
        """The largest side of a cell of the particles' lattice [Mpc/h]."""
        return max(length / n for length, n in zip(self._box_size, self._grid, strict=True))

    @property
    def box(self) -> Box:
        """The box of one universe.

        Raises:
            ValueError: a mesh whose replica axis only a batch can use.
        """
        return self.box_of(None)

    def box_of(self, batch: int | None) -> Box:
        """Returns the box of a batch of universes; of a single one for None.

        Raises:
            ValueError: the mesh's replicas do not divide it.
        """
        dtype = tf.as_dtype(self.options.precision)
        return Box(self._grid, self._box_size, self._mesh, dtype, batch)

    def with_steps(self, steps: Sequence[float] | np.ndarray) -> Simulation:
        """Returns the same simulation over other steps.

        Args:
            steps: edges in scale factor, increasing.
        """
        other = copy.copy(self)
        other.edges = check_edges(steps, self.options.integrator)
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

    @overload
    def run(
        self,
        seed: int | Sequence[int] | None = None,
        *,
        white_noise: Any = None,
        particles: State | tuple[Any, Any] | None = None,
        cosmology: Cosmology | Sequence[Cosmology] | None = None,
        paired: bool = False,
        progress: StepCallback | None = None,
        outputs: None = None,
    ) -> State: ...

    @overload
    def run(
        self,
        seed: int | Sequence[int] | None = None,
        *,
        white_noise: Any = None,
        particles: State | tuple[Any, Any] | None = None,
        cosmology: Cosmology | Sequence[Cosmology] | None = None,
        paired: bool = False,
        progress: StepCallback | None = None,
        outputs: Sequence[float] | np.ndarray,
        on_output: OnOutput | None = None,
    ) -> list[Any]: ...

    def run(
        self,
        seed: int | Sequence[int] | None = None,
        *,
        white_noise: Any = None,
        particles: State | tuple[Any, Any] | None = None,
        cosmology: Cosmology | Sequence[Cosmology] | None = None,
        paired: bool = False,
        progress: StepCallback | None = None,
        outputs: Sequence[float] | np.ndarray | None = None,
        on_output: OnOutput | None = None,
    ) -> State | list[Any]:
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
            outputs: scale factors between the first and the last of the steps, at which states are
                wanted; at edges of the steps or between them, where a part of the integrator's own
                kick and drift is made. The run goes on as without them.
            on_output: called with each of these states, in the order of time, on every rank; they
                are not kept. Under a tape, gradients flow through the tensors and fields it
                returns, for which it is called once more: memory does not grow with the number of
                outputs. By the state, and what it came from, alone: other tensors that are watched
                are refused.

        Returns:
            The last state; with `outputs`, a list of the states at these times, in their order, or
            of what `on_output` returned.

        Raises:
            ValueError: not exactly one of seed, white_noise and particles, or what does not fit.
            HaloError: a particle left the halo; says which halo would do. Raised on every rank.
        """
        if outputs is None and on_output is not None:
            raise ValueError("on_output goes with outputs: give the scale factors, too")
        given = Given(seed, white_noise, particles, cosmology, paired)
        if outputs is None:
            return self._run(given, progress, None)[0]
        return self._run(given, progress, self._outputs(outputs, on_output))[1]

    def observe(
        self,
        observer: ObserverOf,
        seed: int | Sequence[int] | None = None,
        *,
        white_noise: Any = None,
        particles: State | tuple[Any, Any] | None = None,
        cosmology: Cosmology | Sequence[Cosmology] | None = None,
        paired: bool = False,
        progress: StepCallback | None = None,
    ) -> Any:
        """Simulates as `run` does, and returns what an observer makes of what it sees on the way.

        Args:
            observer: makes an `evolution.Observer` from the inputs of the run and its halo.
            seed, white_noise, particles, cosmology, paired, progress: as for `run`.

        Raises:
            ValueError, HaloError: as `run` does.
        """
        given = Given(seed, white_noise, particles, cosmology, paired)
        return self._run(given, progress, observer)[1]

    def run_resumably(
        self,
        seed: int | Sequence[int] | None = None,
        *,
        white_noise: Any = None,
        cosmology: Cosmology | Sequence[Cosmology] | None = None,
        paired: bool = False,
        progress: StepCallback | None = None,
        outputs: Sequence[float] | np.ndarray | None = None,
        on_output: OnOutput | None = None,
        observers: Sequence[ObserverOf] = (),
        on_seen: Callable[[list[Any]], None] | None = None,
        after_step: AfterStep | None = None,
        resume: Resume | None = None,
    ) -> State:
        """Simulates as `run` does, in sessions of which each goes on where another has ended.

        Args:
            seed, white_noise, cosmology, paired, progress: as for `run`.
            outputs, on_output: likewise; what `on_output` returns is dropped. Of a run that goes
                on, those times that `on_output` has not been called with before.
            observers: as for `observe`, side by side; the same in each session.
            on_seen: called at the end, on every rank, with what each made of what it saw.
            after_step: called on every rank after each step and `progress`, with a `MidRun` that
                the same run can go on from. An exception from it ends the run.
            resume: returns such a `MidRun`, of this rank's blocks in the box that it is given; the
                run goes on from there, on the same mesh to the same bits.

        Returns:
            The last state.

        Raises:
            ValueError, HaloError: as `run`.
        """
        given = Given(seed, white_noise, None, cosmology, paired)
        every = list(observers)
        if outputs is not None:
            every.append(self._outputs(outputs, on_output))

        def side_by_side(inputs: Inputs, halo: int) -> Observer:
            return Observers([make(inputs, halo) for make in every])

        observer = side_by_side if every else None
        state, found = self._run(given, progress, observer, after_step, resume)
        if on_seen is not None:
            on_seen([] if found is None else found[: len(observers)])
        return state

    def _outputs(
        self, outputs: Sequence[float] | np.ndarray, on_output: OnOutput | None
    ) -> ObserverOf:
        times = check_outputs(outputs, self.edges)
        return lambda inputs, halo: Outputs(inputs, times, halo, on_output)

    def _run(
        self,
        given: Given,
        progress: StepCallback | None,
        observer_of: ObserverOf | None,
        after_step: AfterStep | None = None,
        resume: Resume | None = None,
    ) -> tuple[State, Any]:
        """Returns the last state, and what an observer made of what it saw."""
        clock = Clock()
        inputs = self._read(given)
        start, lpt = first_particles(inputs, resume)
        halo = halo_for(start[0], inputs)
        observer = None if observer_of is None else observer_of(inputs, halo)
        done, timings = evolve_particles(
            start, lpt, inputs, halo, clock, progress, observer, after_step
        )
        end, provenance = float(self.edges[-1]), inputs.provenance(halo)
        state = State.of(done.particles, inputs.box, end, provenance, timings)
        return state, None if observer is None else observer.results(done.seen)

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
        inputs = self._read(Given(seed, white_noise, None, cosmology, paired))
        found, _ = lpt_particles(inputs, a, FastPM())  # its velocity is the canonical one
        halo = inputs.solver.suggested_halo(found) if inputs.halo == "auto" else inputs.halo
        return State.of(found, inputs.box, a, inputs.provenance(halo))

    def _read(self, given: Given) -> Inputs:
        """Reads and checks all that a run is given."""
        check_eager("a simulation")
        if isinstance(given.particles, State):
            granted = self.cosmology if given.cosmology is None else None
            begin, box = float(self.edges[0]), self.box_of_replicas
            given = replace(given, particles=given.particles.particles_for(begin, box, granted))
        if given.particles is not None and self.options.integrator.uses_lpt:
            raise ValueError("this integrator follows LPT: it needs a seed or white_noise")
        box = self.box_of(given.batch(self.box_of_replicas))
        return Inputs(
            solver=compiled_solver(box, self.options),
            options=self.options,
            edges=self.edges,
            halo=constructed(HaloOptions, {"halo": self.halo}).halo,
            cosmologies=self._cosmologies.local(given.cosmology, box),
            source=source_of(given, box),
            given=particles_of(given, box),
        )
