"""The main entry point: from a cosmology and a seed to an evolved universe, or a batch of them."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, Unpack, overload

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.parameters import Cosmology, known_value
from flowpm_dist.cosmology.power_table import ON_THE_PEAK, unit_doubt
from flowpm_dist.cosmology.steps import StepOptions
from flowpm_dist.cosmology.theory import Theory
from flowpm_dist.evolution.corrections import LPT_ONLY, Correction
from flowpm_dist.evolution.integrators import FastPM, Integrator, name_of
from flowpm_dist.evolution.observers import Observer
from flowpm_dist.evolution.plan import Clock, Particles, StepCallback
from flowpm_dist.grid.box import Box
from flowpm_dist.grid.decomposition import default_mesh, pyramid_problem
from flowpm_dist.grid.options import BoxOptions
from flowpm_dist.initial.conditions import linear_amplitude
from flowpm_dist.options import constructed, in_unit
from flowpm_dist.options.html import as_html
from flowpm_dist.simulation.cost import process_bytes, simulation_bytes
from flowpm_dist.simulation.demand import Estimate
from flowpm_dist.simulation.options import HaloOptions, SolverKeys, SolverOptions
from flowpm_dist.simulation.outputs import (
    ObserverOf,
    OnOutput,
    Outputs,
    check_outputs,
    observers_of,
)
from flowpm_dist.simulation.run import (
    AfterStep,
    Inputs,
    Resume,
    Start,
    evolve_particles,
    first_particles,
    halo_for,
    lpt_particles,
    particles_of,
    source_of,
)
from flowpm_dist.simulation.speeds import Pieces
from flowpm_dist.simulation.state import State
from flowpm_dist.simulation.universes import CosmologyFactory, TheoryOf, check_power
from meshimpl import launch
from meshimpl.mesh_graph import check_place
from meshimpl.process_mesh import MeshShape, ProcessMesh

Seeds: TypeAlias = int | Sequence[int] | None
Cosmologies: TypeAlias = Cosmology | Sequence[Cosmology] | None


class Simulation:
    """A particle mesh simulation, on one rank or many.

    Args:
        cosmology: parameters.
        grid: particles along each side: one even number or three.
        box_size: [Mpc/h], one number or three.
        steps: edges of the steps in scale factor, increasing, from 0 to 2 (see
            `StepOptions`).
        mesh: the ranks, as a `ProcessMesh` or its shape; by default chosen from their number.
        theory: what makes the theory of a cosmology: `Theory`, or a subclass with other physics or
            with another code's tables.
        warn: whether to warn of an unstable force and of runs outside a correction's training; a
            caller that shows these warnings itself gives False.
        **options: the options of `SolverOptions`, by name.

    Attributes:
        options: the `SolverOptions`.
        edges: scale factors at which steps begin and end, float64 [steps + 1].
        box_of_replicas: the box of one universe. If the mesh has several replicas, the box of a
            batch with one universe for each replica.

    Raises:
        TypeError: an option that does not exist.
        ValueError: an argument out of its range, or a mesh that does not divide the grid and the
            force mesh.
    """

    def __init__(
        self,
        cosmology: Cosmology,
        grid: int | Sequence[int],
        box_size: float | Sequence[float],
        steps: Sequence[float] | np.ndarray,
        *,
        mesh: ProcessMesh | MeshShape | None = None,
        theory: TheoryOf = Theory,
        warn: bool = True,
        **options: Unpack[SolverKeys],
    ) -> None:
        cells, box_size = np.asarray(in_unit("grid", grid)), in_unit("box_size", box_size, "Mpc/h")
        if cells.dtype.kind == "f" and (cells % 1 == 0).all():  # whole numbers of any kind
            cells = cells.astype(np.int64)
        sides = {"grid": cells.tolist(), "size": np.asarray(box_size).tolist()}
        lattice = constructed(BoxOptions, sides)
        self.options = constructed(SolverOptions, options)
        self._halo = self.options.halo
        self.edges = _checked_edges(steps, self.options.integrator, cosmology)
        if mesh is None:
            force = self.options
            ranks = launch.detect().size
            halo = force.usual_halo(lattice.grid, lattice.size, float(self.edges[-1]))
            mesh = default_mesh(ranks, lattice.grid, force.mesh_factor, force.pyramid, halo)
        if not isinstance(mesh, ProcessMesh):
            mesh = ProcessMesh(mesh)
        self._grid, self._box_size, self._mesh = lattice.grid, lattice.size, mesh
        check_power(cosmology, lattice.size, lattice.grid)
        replicas = mesh.axis_size("replica")
        self.box_of_replicas = self.box_of(None if replicas == 1 else replicas)
        # refuses a force mesh that does not fit
        finer = self.box_of_replicas.finer(self.options.mesh_factor)
        if problem := pyramid_problem(
            self.options.pyramid, finer.grid, dict(mesh.axes), finer.size
        ):
            raise ValueError(f"pyramid {problem}")
        self._cosmologies = CosmologyFactory(cosmology, theory)
        self._warned: set[str] | None = None
        if warn:
            self._warn()

    def _warn(self) -> None:
        self._warned = set()
        known = {n: known_value(getattr(self.cosmology, n)) for n in self.cosmology.names}
        values = {n: [value] for n, value in known.items() if value is not None}
        values["radiation"] = [self.cosmology.radiation]
        edges = self.edges.tolist()
        if (power := self.cosmology.power) is not None and set(ON_THE_PEAK) <= values.keys():
            if doubt := unit_doubt(power, **{name: values[name][0] for name in ON_THE_PEAK}):
                warnings.warn(f"power: {doubt}", stacklevel=3)
        for warning in self.options.warnings(self._box_size, self._grid, edges, values):
            warnings.warn(warning, stacklevel=3)

    def warn_of_times(self, times: Iterable[float]) -> None:
        """Warns, once each, of states at scale factors outside the training of a correction.

        Args:
            times: scale factors of states that leave a run, or of particles on a light cone. `run`,
                `lpt` and `LightCone` check theirs.
        """
        if self._warned is None:
            return
        for warning in self.options.time_warnings(in_unit("times", times)):
            if str(warning) not in self._warned:
                self._warned.add(str(warning))
                warnings.warn(warning, stacklevel=3)

    def __repr__(self) -> str:
        first, last, integrator = self.edges[0], self.edges[-1], name_of(self.options.integrator)
        steps = f"{len(self.edges) - 1} {integrator} steps from a = {first:.4g} to {last:.4g}"
        return f"Simulation({self.box_of_replicas}, {steps}, {self.cosmology})"

    def _repr_html_(self) -> str:
        return as_html(self, self._facts)

    def _facts(self) -> dict[str, object]:
        options = {name: getattr(self.options, name) for name in self.options.model_fields_set}
        others = {**options, "halo": self.halo, "integrator": name_of(self.options.integrator)}
        first, last, steps = self.edges[0], self.edges[-1], len(self.edges) - 1
        return {
            **self.box_of_replicas.facts(),
            "steps": f"{steps}, from a = {first:.4g} to {last:.4g}",
            **{name: others[name] for name in sorted(others)},
            "cosmology": ", ".join(f"{n} = {text}" for n, text in self.cosmology.facts().items()),
        }

    @property
    def cosmology(self) -> Cosmology:
        """The simulation's own cosmology."""
        return self._cosmologies.cosmology

    @property
    def theory(self) -> Theory:
        """The theory of the simulation's own cosmology: background, growth, power, distances."""
        return self._cosmologies.default.theories[0]

    @property
    def halo(self) -> Literal["auto"] | int:
        """ "auto" or a number of particle spacings; may be changed between runs.

        Raises:
            ValueError: neither of them.
        """
        return self._halo

    @halo.setter
    def halo(self, halo: Literal["auto"] | int) -> None:
        self._halo = constructed(HaloOptions, {"halo": halo}).halo

    @property
    def spacing(self) -> float:
        """The largest side of a cell of the particle lattice [Mpc/h]."""
        return max(length / n for length, n in zip(self._box_size, self._grid, strict=True))

    @property
    def box(self) -> Box:
        """The box of one universe.

        Raises:
            ValueError: the mesh has several replicas, which only a batch can use.
        """
        return self.box_of(None)

    def box_of(self, batch: int | None) -> Box:
        """Returns the box of a batch of universes, or of a single universe if `batch` is None.

        Raises:
            ValueError: the number of the mesh's replicas does not divide the batch.
        """
        dtype = tf.as_dtype(self.options.precision)
        return Box(self._grid, self._box_size, self._mesh, dtype, batch)

    def with_steps(self, steps: Sequence[float] | np.ndarray) -> Simulation:
        """Returns the same simulation over other steps.

        Args:
            steps: edges in scale factor, increasing.
        """
        other = copy.copy(self)
        other.edges = _checked_edges(steps, self.options.integrator, self.cosmology)
        other._warn()
        return other

    def with_correction(self, correction: Correction | str | Path | None) -> Simulation:
        """Returns the same simulation with another correction; see `SolverOptions`.

        A correction brings the force that it was trained with, where this simulation was given
        none. Without a correction the force stays as it is.

        Raises:
            ValueError: it was trained with another force than the one that was given.
        """
        other, options = copy.copy(self), self.options
        if isinstance(correction, Correction) and correction.equal_but_for_theta(
            options.correction
        ):
            other.options = options.model_copy(update={"correction": correction})
            return other
        explicit = options.model_fields_set - options.brought
        if correction is None:
            explicit |= set(options.brought)
        chosen = {name: getattr(options, name) for name in explicit}
        other.options = constructed(SolverOptions, {**chosen, "correction": correction})
        other._warn()
        return other

    def estimate(self, *, outputs: bool = False) -> Estimate:
        """Returns the memory and the time of a run, as `flowpm-dist simulate --check` shows them.

        The memory is for one universe on each replica, without writing. A gradient takes more.
        The time is known where `flowpm-dist simulate` has run on as many ranks of this host before,
        with a similar grid; it leaves out compilation.

        Args:
            outputs: whether states are measured during the run.
        """
        axes, cells = dict(self._mesh.axes), math.prod(self._grid)
        options = self.options.model_copy(update={"halo": self.halo})
        options = options.with_usual_halo(self._grid, self._box_size, float(self.edges[-1]))
        memory = simulation_bytes(options, self._grid, axes, outputs=outputs)
        ranks, steps = self._mesh.size, len(self.edges) - 1
        return Estimate(
            ranks=ranks,
            together=launch.ranks_on_host(ranks),
            memory=process_bytes(axes, "simulate") + memory,
            seconds=Pieces("simulate", cells, steps).seconds(ranks),
        )

    def linear_amplitude(
        self, cosmology: Cosmology | Sequence[Cosmology] | None = None
    ) -> tf.Tensor:
        """Returns sqrt(P(k) / cell volume) of linear theory at the last of the steps.

        Args:
            cosmology: replaces the simulation's own. If there is one for each universe of a batch,
                the result holds the universes of this rank.

        Returns:
            The values for this rank's modes, [kz, ky, kx] or [universe, kz, ky, kx], in the
            simulation's precision.
        """
        several = cosmology is not None and not isinstance(cosmology, Cosmology)
        box = self.box_of(len(cosmology)) if several else self.box_of_replicas  # type: ignore[arg-type]
        local, a = self._cosmologies.local(cosmology, box), float(self.edges[-1])
        amplitudes = [
            linear_amplitude(box, theory.power, a) * tf.cast(theory.growth.d1(a), box.dtype)
            for theory in local.theories
        ]
        return tf.stack(amplitudes) if several else amplitudes[0]

    @overload
    def run(
        self,
        seed: Seeds = None,
        *,
        white_noise: Any = None,
        particles: Any = None,
        cosmology: Cosmologies = None,
        paired: bool = False,
        progress: StepCallback | None = None,
        after_step: AfterStep | None = None,
        resume: Resume | None = None,
    ) -> State: ...

    @overload
    def run(
        self,
        seed: Seeds = None,
        *,
        white_noise: Any = None,
        particles: Any = None,
        cosmology: Cosmologies = None,
        paired: bool = False,
        progress: StepCallback | None = None,
        outputs: Sequence[float] | np.ndarray,
        on_output: OnOutput | None = None,
        after_step: AfterStep | None = None,
        resume: Resume | None = None,
    ) -> list[Any]: ...

    @overload
    def run(
        self,
        seed: Seeds = None,
        *,
        white_noise: Any = None,
        particles: Any = None,
        cosmology: Cosmologies = None,
        paired: bool = False,
        progress: StepCallback | None = None,
        observe: ObserverOf | Sequence[ObserverOf],
        after_step: AfterStep | None = None,
        resume: Resume | None = None,
    ) -> tuple[State, Any]: ...

    def run(
        self,
        seed: Seeds = None,
        *,
        white_noise: Any = None,
        particles: State | tuple[Any, Any] | None = None,
        cosmology: Cosmologies = None,
        paired: bool = False,
        progress: StepCallback | None = None,
        outputs: Sequence[float] | np.ndarray | None = None,
        on_output: OnOutput | None = None,
        observe: ObserverOf | Sequence[ObserverOf] | None = None,
        after_step: AfterStep | None = None,
        resume: Resume | None = None,
    ) -> State | list[Any] | tuple[State, Any]:
        """Simulates from the first to the last of the steps.

        Several seeds, cosmologies or noise fields make a batch with one universe for each, which is
        split over the mesh's replica axis. An argument that is given only once then applies to all
        universes.

        Under a `tf.GradientTape`, gradients exist with respect to `white_noise`, `particles`, and
        the parameters of `cosmology` that are tensors. The loss is the sum of the losses of all
        ranks. Each rank receives the complete gradient of a parameter, and its own block of the
        gradient of a field.

        Args:
            seed: the seed of the white noise; or
            white_noise: the noise itself, unit normal [x, y, z] or [batch, x, y, z]: a `Field` on
                any mesh of the same ranks, the whole array, this rank's block, or the path of a
                file that run files may name; or
            particles: a `State` at the first edge of the steps, whose cosmology the run does not
                use. Or displacement [Mpc/h] and canonical velocity [Mpc/h H0], [x, y, z, 3] each,
                in any form that `white_noise` can have.
            cosmology: replaces the simulation's own.
            paired: whether to reverse the sign of the seed's white noise.
            progress: called on every rank after each step, such as `flowpm_dist.Progress().step`
                within a `with` block, which shows a bar.
            outputs: scale factors, between the first and the last edge of the steps, at which to
                return states. A state between two edges is made with part of the integrator's own
                kick and drift. Outputs do not change the run.
            on_output: called with each of these states, in the order of time, on every rank. The
                states are not kept. Under a tape, gradients flow through the tensors and fields
                that `on_output` returns. For this it is called once more, so memory does not grow
                with the number of outputs. The result may depend only on the state and its inputs;
                other watched tensors are refused.
            observe: what measures the particles during the run: observers of a `LightCone`,
                `states_at`, or functions of the run's `Inputs` that return an
                `evolution.Observer`; one or several. With a correction of states they see
                corrected displacements; what it adds to velocities is `Moment.boost`.
            after_step: called on every rank after each step and `progress`, with a `MidRun` from
                which the same run can continue. An exception from it ends the run.
            resume: a function that is given the box and returns such a `MidRun` with this rank's
                blocks. The run continues from there. On the same mesh the result is identical to
                the bit. Give the same `observe`; states that the run has passed are None.

        Returns:
            The last state. With `outputs`, a list in the order of `outputs`: the states at these
            times or, with `on_output`, what it returned for each of them. With `observe`, the last
            state and the result of the observer, or a list of the results of several.

        Raises:
            ValueError: not exactly one of seed, white_noise and particles is given, or an argument
                does not fit.
            HaloError: a particle left the halo; the message says which halo is wide enough. Raised
                on every rank.
            FloatingPointError: particles are not finite. Raised on every rank.
            CollectiveError: ranks were given different arguments. Raised on every rank.
            RuntimeError: inside a `tf.function` on several ranks, or with anything that looks into
                the run there but `outputs`, `states_at`, and maps of the flat sky.
            tf.errors.InvalidArgumentError: in place of the other errors, where what is wrong shows
                when a `tf.function` runs.
        """
        if outputs is None and on_output is not None:
            raise ValueError("on_output needs outputs: give their scale factors, too")
        if outputs is not None and observe is not None:
            raise ValueError("outputs: with observe, give states_at(outputs, on_output) among them")
        several = isinstance(observe, Sequence)
        makers = list(observe) if isinstance(observe, Sequence) else []
        if callable(observe):
            makers = [observe]
        if outputs is not None:
            chosen = check_outputs(in_unit("outputs", outputs), self.edges)
            makers = [_states_at(chosen, on_output)]
        start = Start(seed, white_noise, particles, cosmology, paired)
        times = self.edges[-1:] if outputs is None else chosen
        leave, results = self._evolved(start, makers, times, progress, after_step, resume)
        if outputs is not None:
            return results[0]
        state = leave()
        if observe is None:
            return state
        return state, results if several else results[0]

    def observed(
        self,
        observe: ObserverOf,
        seed: Seeds = None,
        *,
        white_noise: Any = None,
        particles: State | tuple[Any, Any] | None = None,
        cosmology: Cosmologies = None,
        paired: bool = False,
        progress: StepCallback | None = None,
    ) -> Any:
        """Returns what an observer measures in a run, whose last state is not made.

        So a correction of states does not act on it.

        Args:
            observe, seed, white_noise, particles, cosmology, paired, progress: as for `run`.

        Raises:
            ValueError, HaloError, FloatingPointError, CollectiveError, RuntimeError: as for `run`.
        """
        start = Start(seed, white_noise, particles, cosmology, paired)
        return self._evolved(start, [observe], self.edges[-1:], progress)[1][0]

    def _evolved(
        self,
        start: Start,
        makers: Sequence[ObserverOf],
        times: Sequence[float] | np.ndarray,
        progress: StepCallback | None,
        after_step: AfterStep | None = None,
        resume: Resume | None = None,
    ) -> tuple[Callable[[], State], list[Any]]:
        """Returns a function that makes the last state of a run, and the observers' results.

        Args:
            start, makers, progress, after_step, resume: see `run`.
            times: scale factors of the states that are asked for.
        """
        clock, correction = Clock(), self.options.state_correction
        if correction is not None and correction.of_lpt:
            raise ValueError(
                f"correction: it was learned from {LPT_ONLY}: it corrects lpt, not runs"
            )
        looks: dict[str, object] = {"progress": progress, "after_step": after_step}
        looks["resume"] = resume
        named = [name for name, value in looks.items() if value is not None]
        if named and not tf.executing_eagerly():
            raise RuntimeError(_not_in_graphs(named[0]))
        self.warn_of_times(times)
        inputs, first = self._read(start, observe=list(makers), resume=resume is not None)
        begin, lpt = first_particles(inputs, first, resume)
        inputs = replace(inputs, halo=halo_for(begin[0], inputs, self.halo))
        try:
            observers = observers_of(inputs, makers) if makers else None
            refused = observers and not (tf.executing_eagerly() or observers.in_graphs)
        except (AttributeError, TypeError) as error:
            if tf.executing_eagerly():
                raise
            raise RuntimeError(_not_in_graphs("observe")) from error
        if refused:
            raise RuntimeError(_not_in_graphs("observe"))
        done, timings = evolve_particles(
            begin,
            lpt,
            inputs,
            clock,
            progress,
            observers,
            after_step,
            own=self._cosmologies.default,
        )
        end = float(self.edges[-1])
        leave = functools.partial(State.leaving, done.particles, inputs, end, timings)
        return leave, observers.results(done.measured) if observers else []

    def states_at(
        self, times: Sequence[float] | np.ndarray, on_output: OnOutput | None = None
    ) -> ObserverOf:
        """Returns the observer of states at scale factors, for `run(observe=...)`.

        Args:
            times, on_output: as `outputs` and `on_output` of `run`.

        Raises:
            ValueError: a time that is not between the first and the last edge of the steps.
        """
        chosen = check_outputs(in_unit("times", times), self.edges)
        self.warn_of_times(chosen)
        return _states_at(chosen, on_output)

    def lpt(
        self,
        seed: Seeds = None,
        *,
        a: float | None = None,
        white_noise: Any = None,
        cosmology: Cosmologies = None,
        paired: bool = False,
    ) -> State:
        """Returns the universe of Lagrangian perturbation theory alone, of the simulation's order.

        It makes no time step: it costs as much as the initial conditions of `run` and has the same
        gradients. Without `a` the universe is at the end of the last step, not at the start of the
        first: initial conditions for another code need `a`. A correction that was learned from LPT
        is applied.

        Args:
            seed, white_noise, cosmology, paired: as for `run`.
            a: scale factor, above 0; by default the last of the steps.

        Raises:
            ValueError: as for `run`, or a scale factor that is not above 0.
        """
        a = float(self.edges[-1]) if a is None else in_unit("a", a)
        if not a > 0:
            raise ValueError(f"a = {a}: a scale factor above 0 is needed")
        start = Start(seed, white_noise, None, cosmology, paired)
        inputs, _ = self._read(start, a=a)
        correction = self.options.state_correction
        if correction is not None and not correction.of_lpt:
            correction = None
        if correction is not None:
            self.warn_of_times([a])
        made, _ = lpt_particles(inputs, a, FastPM())  # its velocity is the canonical one
        halo = inputs.solver.suggested_halo(made) if self.halo == "auto" else self.halo
        state = State.of(made, replace(inputs, halo=halo), a)
        return state if correction is None else state.corrected(correction)

    def _read(self, start: Start, **more: Any) -> tuple[Inputs, list[Particles]]:
        """Reads and checks the inputs of a run; `more` must be equal on all ranks, too."""
        check_place("a simulation", self._mesh)
        held = start.particles.cosmology if isinstance(start.particles, State) else None
        start.check_gaussian(self.cosmology, held)
        if isinstance(start.particles, State):
            granted = self.cosmology if start.cosmology is None else None
            begin, box = float(self.edges[0]), self.box_of_replicas
            start = replace(start, particles=start.particles.particles_for(begin, box, granted))
        if start.particles is not None and self.options.integrator.uses_lpt:
            raise ValueError(
                "this integrator follows LPT: give a seed or white_noise, not particles"
            )
        box = self.box_of(start.batch(self.box_of_replicas))
        self._check_equal(start, box, more)
        local = self._cosmologies.local(start.cosmology, box)
        inputs = Inputs(box, self.options, self.edges, local, source_of(start, box))
        return inputs, particles_of(start, box)

    def _check_equal(self, start: Start, box: Box, more: dict[str, Any]) -> None:
        """Checks that all ranks make the same run, before anything is computed.

        The values of given fields are not compared: each rank has its own block.

        Raises:
            CollectiveError: an argument differs between ranks; on every rank.
        """
        options = {**dict(self.options), "halo": self.halo}
        del options["precision"]  # that of the box
        sources = {"white_noise": start.white_noise, "particles": start.particles}
        box.check_equal(
            "a run",
            seed=start.seed,
            paired=start.paired,
            cosmology=self.cosmology if start.cosmology is None else start.cosmology,
            steps=self.edges,
            given=[name for name, field in sources.items() if field is not None],
            **options,
            **more,
        )


def _not_in_graphs(name: str) -> str:
    return (
        f"{name}: only states at several times (outputs, states_at) and maps of the flat sky can "
        "be taken from a run inside a tf.function or another graph; call run eagerly"
    )


def _states_at(times: Sequence[float], on_output: OnOutput | None) -> ObserverOf:
    # Ranks may bind values of their own to it, such as a path: its name alone is compared.
    call = None if on_output is None else lambda state: on_output(state)
    return functools.partial(_at_times, times, call)


# Not a lambda: ranks compare what it is given.
def _at_times(outputs: Sequence[float], on_output: OnOutput | None, inputs: Inputs) -> Observer:
    return Outputs(inputs, outputs, on_output)


def _checked_edges(steps: Any, integrator: Integrator, cosmology: Cosmology) -> np.ndarray:
    """Returns the edges of the steps in scale factor, float64 [steps + 1].

    Raises:
        ValueError: a run file with these edges would be refused.
    """
    edges = np.atleast_1d(in_unit("steps", steps)).tolist()
    options = constructed(StepOptions, {"edges": edges})
    if wrong := integrator.wrong_start(options.first, radiation=cosmology.radiation):
        raise ValueError(f"edges {wrong}")
    return np.array(options.edges, np.float64)
