"""The front door: from a cosmology and a seed to an evolved universe, or a batch of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, overload

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.growth import Growth, GrowthFunctions
from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.cosmology.power import LinearPower
from flowpm_dist.evolution.clock import Clock
from flowpm_dist.evolution.integrators import FastPM, Integrator
from flowpm_dist.evolution.options import HaloOptions
from flowpm_dist.evolution.plan import Progress
from flowpm_dist.grid.box import Box
from flowpm_dist.grid.decomposition import default_mesh
from flowpm_dist.initial.linear_field import linear_amplitude
from flowpm_dist.options import constructed
from flowpm_dist.simulation.compiled_solver import compiled_solver
from flowpm_dist.simulation.inputs import Given, Inputs, particles_of, source_of
from flowpm_dist.simulation.local_cosmologies import CosmologyFactory, GrowthOf, PowerOf
from flowpm_dist.simulation.options import SolverOptions
from flowpm_dist.simulation.outputs import OnOutput, Outputs, check_outputs
from flowpm_dist.simulation.stages import (
    evolve_particles,
    first_particles,
    halo_for,
    lpt_particles,
)
from flowpm_dist.simulation.state import State
from meshimpl import launch
from meshimpl.graph_guards import check_eager
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
        cells, size = _three(grid, int, "grid"), _three(box_size, float, "box_size")
        self.options = constructed(SolverOptions, options)
        self.halo = self.options.halo
        self.edges = _check_edges(steps, self.options.integrator)
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

    @overload
    def run(
        self,
        seed: int | Sequence[int] | None = None,
        *,
        white_noise: Any = None,
        particles: State | tuple[Any, Any] | None = None,
        cosmology: Cosmology | Sequence[Cosmology] | None = None,
        paired: bool = False,
        progress: Progress | None = None,
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
        progress: Progress | None = None,
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
        progress: Progress | None = None,
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
        clock = Clock()
        if outputs is None and on_output is not None:
            raise ValueError("on_output goes with outputs: give the scale factors, too")
        times = None if outputs is None else check_outputs(outputs, self.edges)
        inputs = self._read(Given(seed, white_noise, particles, cosmology, paired))
        start, lpt = first_particles(inputs)
        halo = halo_for(start[0], inputs)
        observer = None if times is None else Outputs(inputs, times, halo, on_output)
        done, timings = evolve_particles(start, lpt, inputs, halo, clock, progress, observer)
        if observer is not None:
            return observer.results(done.seen)
        end, provenance = float(self.edges[-1]), inputs.provenance(halo)
        return State.of(done.particles, inputs.box, end, provenance, timings)

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
