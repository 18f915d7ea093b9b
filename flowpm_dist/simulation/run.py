"""A run: its start, its inputs and its stages."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.arrays import as_float64, is_tensor
from flowpm_dist.cosmology.background import Background
from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.evolution.corrections import force_cell
from flowpm_dist.evolution.integrators import INTEGRATORS, Integrator, Operation, Schedule
from flowpm_dist.evolution.observers import Measured, Observer
from flowpm_dist.evolution.plan import (
    Clock,
    EvolutionPlan,
    Evolved,
    MidRun,
    Particles,
    StepCallback,
)
from flowpm_dist.grid.box import Box
from flowpm_dist.grid.decomposition import suggested_halo
from flowpm_dist.grid.field import Field
from flowpm_dist.initial.conditions import check_white_noise
from flowpm_dist.io.snapshot import Snapshot
from flowpm_dist.io.white_noise import GraficNoise, WhiteNoiseError, open_white_noise
from flowpm_dist.options import A_SEED, MOST_SEED, in_unit, keep_in_units
from flowpm_dist.simulation.compiled_solver import CompiledSolver, compiled_solver
from flowpm_dist.simulation.options import SolverOptions
from flowpm_dist.simulation.universes import LocalCosmologies
from meshimpl.mesh_function import replicated
from meshimpl.tapes import is_watched

PARTICLES = {"displacement": "Mpc/h", "velocity": "Mpc/h H0"}
"""The fields that a run can begin with, and their units."""

SMALL = 2**18
"""Most cells of a box, or of a batch, whose linear amplitude is kept between runs."""


@dataclass(frozen=True)
class Start:
    """The start of a run, as the user gave it.

    Attributes:
        seed: the seed of the white noise, or one for each universe; or
        white_noise: the noise itself; or
        particles: a `State`, or displacement [Mpc/h] and canonical velocity [Mpc/h H0].
        cosmology: instead of the simulation's own, or one for each universe.
        paired: the opposite of the seed's white noise.

    Raises:
        ValueError: not exactly one of seed, white_noise and particles, or `paired` without a seed.
    """

    seed: int | Sequence[int] | None = None
    white_noise: Any = None
    particles: Any = None
    cosmology: Cosmology | Sequence[Cosmology] | None = None
    paired: bool = False

    def __post_init__(self) -> None:
        sources = (self.seed, self.white_noise, self.particles)
        if sum(source is not None for source in sources) != 1:
            raise ValueError("give either a seed, white_noise or particles: exactly one of them")
        if self.paired and self.seed is None:
            raise ValueError("paired goes with a seed")
        keep_in_units(self, seed="", white_noise="")
        if isinstance(self.white_noise, str | Path):
            object.__setattr__(self, "white_noise", _noise_in(Path(self.white_noise)))
        elif isinstance(self.white_noise, list | tuple):
            object.__setattr__(self, "white_noise", np.asarray(self.white_noise))
        if isinstance(self.particles, tuple | list):
            vectors = zip(self.particles, PARTICLES.items(), strict=True)
            plain = tuple(in_unit(name, vector, unit) for vector, (name, unit) in vectors)
            object.__setattr__(self, "particles", plain)

    def check_gaussian(self, cosmology: Cosmology, held: Cosmology | None = None) -> None:
        """Checks that particles are not combined with another f_NL, which they cannot get.

        Args:
            cosmology: the simulation's own.
            held: the cosmology of a `State`; None for arrays, which are taken to be Gaussian.

        Raises:
            ValueError: they are.
        """
        several = cosmology if self.cosmology is None else self.cosmology
        f_NL = 0.0 if held is None else held.f_NL
        for each in [several] if isinstance(several, Cosmology) else several:
            known = not (is_tensor(each.f_NL) or is_tensor(f_NL))
            same = each.f_NL == f_NL if known else each.f_NL is f_NL
            if self.particles is not None and not same:
                raise ValueError(
                    f"f_NL = {each.facts()['f_NL']} is for initial conditions that the run makes: "
                    "give a seed or white_noise, or particles and their own f_NL"
                )

    def batch(self, box: Box) -> int | None:
        """Returns the number of universes in a batch; None for a single universe.

        Args:
            box: of one universe for each replica of the mesh.

        Raises:
            ValueError: seeds that are not whole numbers, or parts that stand for different numbers.
        """
        counts = {}
        if self.seed is not None:
            seeds = np.asarray(self.seed)
            whole_numbers = np.issubdtype(seeds.dtype, np.integer)
            valid = whole_numbers and (seeds >= 0).all() and (seeds <= MOST_SEED).all()
            if seeds.ndim > 1 or not seeds.size or not valid:
                raise ValueError(f"seed = {self.seed!r}: must be {A_SEED}, or a list of them")
            if seeds.ndim:
                counts["seeds"] = len(seeds)
        if self.cosmology is not None and not isinstance(self.cosmology, Cosmology):
            counts["cosmologies"] = len(self.cosmology)
        field, rank = self.white_noise, 3
        if self.particles is not None:
            field, rank = self.particles[0], 4
        if field is not None and (fields := _batch_of(field, rank, box)) is not None:
            counts["fields"] = fields
        if len(set(counts.values())) > 1:
            numbers = ", ".join(f"{n} {name}" for name, n in counts.items())
            raise ValueError(f"a batch of which size? Given are {numbers}")
        return next(iter(counts.values()), None)


@dataclass(frozen=True)
class WhiteNoiseSource:
    """The source of a universe's white noise; empty if the run begins with given particles.

    Attributes:
        seeds: int64, one for each universe of the box, and
        paired: whether their noise is taken with the opposite sign; or
        white_noise: this rank's block [..., x, y, z], and
        linear_delta: likewise, where a snapshot had it; or
        snapshot: that holds the state.
        recorded_seed: the seed that a snapshot with the noise names; it is not drawn again.
    """

    seeds: np.ndarray | None = None
    paired: bool = False
    white_noise: tf.Tensor | None = None
    linear_delta: tf.Tensor | None = None
    snapshot: Snapshot | None = None
    recorded_seed: int | None = None

    @classmethod
    def of_snapshot(cls, snapshot: Snapshot) -> WhiteNoiseSource:
        """Returns the source of the state that a snapshot holds."""
        about = snapshot.attributes
        paired, seed = bool(about.get("paired", False)), about.get("seed")
        if "white_noise" in snapshot.arrays or seed is None:
            return cls(paired=paired, snapshot=snapshot, recorded_seed=seed)
        return cls(np.asarray(seed, np.int64), paired, snapshot=snapshot)

    @property
    def seed(self) -> int | None:
        """The seed of a single universe, if it has one that is known."""
        return self.recorded_seed if self.seeds is None else int(self.seeds)

    def held(self, name: Literal["white_noise", "linear_delta"], box: Box) -> tf.Tensor | None:
        """Returns this rank's block of a field, read where a snapshot holds it; None if unknown."""
        snapshot, block = self.snapshot, getattr(self, name)
        if snapshot is None or name not in snapshot.arrays:
            return block
        return tf.convert_to_tensor(snapshot.values(name, box.place), box.dtype)

    def of_universe(self, number: int, box: Box) -> WhiteNoiseSource:
        """Returns the source of one of this rank's universes of a batch.

        Args:
            number: the universe's, counted among this rank's universes.
            box: the batch's.
        """
        seeds = None if self.seeds is None else self.seeds[box.batch_offset + number]
        fields = (self.white_noise, self.linear_delta)
        noise, linear = (None if field is None else field[number] for field in fields)
        return replace(self, seeds=seeds, white_noise=noise, linear_delta=linear)

    def without_snapshot(self, box: Box) -> WhiteNoiseSource:
        """Returns the same source, with this rank's blocks instead of the snapshot of them."""
        noise, linear = self.held("white_noise", box), self.held("linear_delta", box)
        return replace(self, white_noise=noise, linear_delta=linear, snapshot=None)


@dataclass(frozen=True)
class Inputs:
    """The checked inputs that determine a universe. The run and its states hold them.

    Attributes:
        box: the box of one universe, or of a batch.
        options: the simulation's options. A state from a snapshot has only the options of initial
            conditions and force, and the precision.
        edges: scale factors at which steps begin and end, float64 [steps + 1]. A state from a
            snapshot has its own scale factor alone.
        cosmologies: the cosmologies of this rank's universes.
        source: what the white noise comes from.
        halo: the halo of the evolution [particle spacings]; 0 before the initial conditions.
    """

    box: Box
    options: SolverOptions
    edges: np.ndarray
    cosmologies: LocalCosmologies
    source: WhiteNoiseSource
    halo: int = 0

    @functools.cached_property
    def solver(self) -> CompiledSolver:
        """The lowered functions of the box."""
        return compiled_solver(self.box, self.options, neutrinos=self.cosmologies.species)

    @property
    def from_particles(self) -> bool:
        """Whether the run begins with given particles."""
        return self.source.seeds is None and self.source.white_noise is None

    def white_noise(self) -> tf.Tensor:
        """Returns the white noise that was given or is drawn, this rank's block [..., x, y, z].

        Raises:
            ValueError: it is not known.
        """
        noise = self.source.held("white_noise", self.box)
        if noise is not None:
            return noise
        if self.source.seeds is None:
            raise ValueError(
                "the white noise is not known: this universe came from given particles, or "
                "from a snapshot without white_noise and without a seed"
            )
        return self.solver.initial.white_noise(self.source.seeds, paired=self.source.paired)


def _noise_in(path: Path) -> np.ndarray | GraficNoise:
    """Returns the white noise of a file.

    Raises:
        WhiteNoiseError: the file cannot be used; the message names it.
    """
    try:
        return open_white_noise(path)
    except WhiteNoiseError as error:
        raise WhiteNoiseError(f"white_noise = '{path}': {error}") from error


def source_of(start: Start, box: Box) -> WhiteNoiseSource:
    """Returns the checked source of a run in a box.

    Raises:
        ValueError: on every rank; a field of another shape or dtype, or with values that are not
            finite.
    """
    if start.seed is not None:
        batch = box.number_shape.to_integer_list
        seeds = np.broadcast_to(np.asarray(start.seed, np.int64), batch)
        return WhiteNoiseSource(seeds=seeds, paired=start.paired)
    noise = start.white_noise
    if noise is None:
        return WhiteNoiseSource()
    if isinstance(noise, Field):
        noise = noise.on(box).block
    elif not isinstance(noise, (tf.Tensor, tf.Variable)):
        if isinstance(noise, GraficNoise) and noise.shape == box.grid:
            noise = noise[box.place]
        check_white_noise(noise, box)
    return WhiteNoiseSource(white_noise=box.block_of("white_noise", noise, box.shape))


def particles_of(start: Start, box: Box) -> list[Particles]:
    """Returns the particles that a run in a box begins with, if they are given, as a list of one.

    Raises:
        ValueError: a field of another shape or dtype, or of a box of another size.
    """
    if start.particles is None:
        return []
    blocks = []
    for name, vector in zip(PARTICLES, start.particles, strict=True):
        if isinstance(vector, Field):
            if vector.box.size != box.size:
                raise ValueError(
                    f"{name} has a box of {vector.box.size} Mpc/h, the simulation a box of "
                    f"{box.size} Mpc/h"
                )
            vector = vector.on(box).block
        blocks.append(box.block_of(name, vector, box.vector_shape))
    return [Particles(*blocks)]


def _batch_of(field: Any, rank: int, box: Box) -> int | None:
    """Returns how many universes a given field holds; None for one without a batch dimension."""
    if isinstance(field, Field):
        return field.box.batch
    if len(field.shape) != rank + 1:
        return None
    mesh = box.mesh
    replicas = mesh.axis_size("replica")
    whole = tuple(field.shape[1:4]) == box.grid
    tensor = isinstance(field, (tf.Tensor, tf.Variable))
    if tensor and whole and mesh.size == replicas > 1:
        raise ValueError(
            f"a tensor of {field.shape[0]} fields: on the mesh {mesh} they may be all of a "
            "batch or this rank's; give a Field, or all of them as an array"
        )
    return field.shape[0] * (1 if whole else replicas)


AfterStep = Callable[[MidRun], None]
"""Called on every rank after each step, see `Simulation.run`."""
Resume = Callable[[Box], MidRun]
"""Returns the state from which a run in a box continues, see `Simulation.run`."""


def first_particles(
    inputs: Inputs, particles: list[Particles], resume: Resume | None = None
) -> tuple[list[MidRun], tuple[tf.Tensor, ...]]:
    """Returns where the run begins, and the LPT fields of the integrator.

    The velocity is the integrator's own, or canonical where particles were given. The beginning is
    a list of one, from which the evolution takes it.

    Args:
        inputs: the run's inputs.
        particles: those given, as `particles_of` returns them; the list is emptied.
        resume: returns the state from which the run continues; None to begin at the first edge.
    """
    a, integrator = float(inputs.edges[0]), inputs.options.integrator
    if resume is not None:
        particles.clear()
        lpt = lpt_particles(inputs, a, integrator)[1] if integrator.uses_lpt else ()
        return [resume(inputs.box)], lpt
    if particles:
        return [MidRun(0, 0, a, particles.pop())], ()
    begun, lpt = lpt_particles(inputs, a, integrator)
    return [MidRun(0, 0, a, begun)], lpt


def lpt_particles(
    inputs: Inputs, a: float, integrator: Integrator
) -> tuple[Particles, tuple[tf.Tensor, ...]]:
    """Returns the particles of LPT and the LPT fields of the simulation's integrator.

    Args:
        inputs: the run's inputs.
        a: scale factor.
        integrator: whose velocity the particles have.
    """
    solver, local, order = inputs.solver, inputs.cosmologies, inputs.options.lpt_order

    def of_cosmology() -> list[tf.Tensor]:
        factors = local.of_growths(lambda theory: integrator.initial(theory.growth, a, order))
        return [solver.amplitude(local, a), local.stack(factors), *solver.excess(local, a)]

    noise = solver.primordial_noise(inputs.white_noise(), local)
    if _is_known(integrator) and inputs.box.cells * (inputs.box.batch or 1) <= SMALL:
        name = "lpt", inputs.box, a, integrator, order
        amplitude, factors, *excess = local.remembered(name, of_cosmology)
    else:
        amplitude, factors, *excess = of_cosmology()
    x, v, lpt = solver.initial.particles(noise, amplitude, factors, *excess)
    return Particles(x, v), lpt


def halo_for(start: MidRun, inputs: Inputs, wanted: Literal["auto"] | int) -> int:
    """Returns the halo of a run [particle spacings]: the wanted one, or one that is large enough.

    Args:
        start: where the run begins; a continued run keeps its halo.
        inputs: the run's inputs.
        wanted: "auto", or a number.
    """
    if wanted != "auto":
        return wanted
    if start.halo is not None:
        return start.halo
    local, end = inputs.cosmologies, inputs.edges[-1]
    if not inputs.solver.max_displacement.is_bounded:
        return suggested_halo(0.0)  # the first step finds what is not finite
    growth, from_rest = float(local.growth_between(inputs.edges)[0]), None
    if not np.isfinite(growth):
        from_rest = max(local.of_growths(lambda theory: float(theory.growth.d1(end))))
    return inputs.solver.suggested_halo(start.particles, growth, from_rest)


def evolve_particles(
    start: list[MidRun],
    lpt: tuple[tf.Tensor, ...],
    inputs: Inputs,
    clock: Clock,
    progress: StepCallback | None,
    observer: Observer | None = None,
    after_step: AfterStep | None = None,
    *,
    own: LocalCosmologies,
) -> tuple[Evolved, dict[str, Any]]:
    """Returns the particles at the last of the edges, and the timings of a `State`.

    Args:
        start, lpt: as `first_particles` returns them; `start` is emptied.
        inputs: the run's inputs, with its halo.
        clock: the clock that started with the run; each step adds an entry.
        progress: called after each step.
        observer: measures the particles during the evolution.
        after_step: called after `progress`, with a state from which the run can continue.
        own: the simulation's own cosmology. In a graph, where the run's own numbers are symbols,
            its factors decide which states are kept for a gradient.

    Raises:
        HaloError, FloatingPointError: on every rank.
    """
    solver, edges = inputs.solver, inputs.edges
    schedule, known = _schedule(inputs), inputs
    if not (eager := tf.executing_eagerly()):
        alike = own if inputs.box.batch is None else own.repeated(inputs.box.local_batch[0])
        known = replace(inputs, cosmologies=alike)
    with tf.init_scope():
        growth_left = known.cosmologies.growth_between(edges)
        numbers = None if eager else _schedule(known).factors.numpy()  # it begins at the start
    begin = start.pop()
    before = observer.unpack(begin.measured()) if observer and begin.done else {}
    done, particles = begin.done, [begin.particles]
    clock.go_on(begin.timings, complete=begin.step == len(edges) - 1)
    del begin
    initial = clock.elapsed()
    nbody = solver.nbody(inputs.halo)

    def report(number: int, last: Operation, here: Particles, measured: Measured) -> None:
        assert after_step is not None
        timings = copy.deepcopy({"steps": clock.steps, "phases": clock.phases})
        packed = dict if observer is None else functools.partial(observer.pack, measured)
        after_step(MidRun(done + number, last.step, last.a, here, inputs.halo, timings, packed))

    is_reported = progress is not None or after_step is not None
    if (mesh := inputs.box.mesh).size > 1:
        # A bar may be shown on one rank alone, and replicas have other universes.
        mine = tf.constant([float(is_reported), *growth_left], tf.float64)
        agreed = mesh.world.allreduce(mine, "max").numpy()
        is_reported, growth_left = bool(agreed[0]), agreed[1:]
    plan = EvolutionPlan(
        schedule.operations[done:],
        schedule.factors[..., done:, :],
        lpt,
        numbers=numbers,
        steps=len(edges) - 1,
        growth=lambda a: float(1.0 / np.interp(a, edges, 1.0 / growth_left)),
        progress=progress,
        is_reported=is_reported,
        observer=observer,
        observed=() if observer is None else observer.inputs,
        kicks_before=sum(operation.kind == "kick" for operation in schedule.operations[:done]),
        after_step=None if after_step is None else report,
        measured=before,
    )
    # A graph may be differentiated as a whole, by what it does not know.
    watched = not eager or is_watched(
        [*vars(particles[0]).values(), plan.factors, *lpt, *plan.observed]
    )
    compile_seconds = solver.compile(nbody, plan, particles[0], watched) if eager else 0.0
    ready = clock.elapsed()
    if watched:
        end = inputs.options.adjoint.evolve(nbody, particles, plan, clock)
    else:
        end = nbody.evolve(particles, plan, clock)
    evolution = clock.elapsed() - ready
    return end, {
        "phases": clock.phases,
        "steps": clock.steps,
        "compile": compile_seconds,
        "initial": initial,
        "evolution": evolution,
        "total": clock.elapsed() - compile_seconds,
        "ns_per_particle_per_step": _ns_per_particle_per_step(clock, inputs.box),
    }


def _ns_per_particle_per_step(clock: Clock, box: Box) -> float:
    """Returns the time of a step for each particle [ns], without measurements."""
    work = box.cells * (box.batch or 1) * max(1, len(clock.steps))
    moving = sum(clock.steps) - sum(clock.phases.get("observe", ()))
    return moving * 1e9 / work


def _schedule(inputs: Inputs) -> Schedule:
    """Returns the schedule of all universes of this rank; factors [..., operations, 4].

    The coefficients of the force's response are further columns of the factors.
    """
    edges, integrator, local = inputs.edges.tolist(), inputs.options.integrator, inputs.cosmologies

    def schedules_of() -> list[Schedule]:
        return local.of_growths(lambda theory: integrator.schedule(theory.growth, edges))

    known = _is_known(integrator)
    name = "schedule", integrator, tuple(edges)
    schedules = local.remembered(name, schedules_of) if known else schedules_of()
    operations = schedules[0].operations
    factors = local.stack([as_float64(schedule.factors) for schedule in schedules])
    if inputs.from_particles:
        rows = local.of_growths(lambda theory: integrator.from_canonical(theory.growth, edges[0]))
        if rows[0] is not None:
            first = local.stack(rows)[..., tf.newaxis, :]
            operations = (Operation("velocity", edges[0], 1), *operations)
            factors = tf.concat([first, factors], axis=-2)
    correction = inputs.options.force_correction
    if correction is None and not local.by_scale:
        return Schedule(operations, factors)
    mesh = inputs.box.finer(inputs.options.mesh_factor)
    cell, a = force_cell(mesh.size, mesh.grid), np.array([operation.a for operation in operations])
    if correction is not None:
        theta = replicated(inputs.box.mesh, as_float64(correction.theta))
        of = local.of_powers(lambda theory: correction.coefficients(theta, theory.power, cell, a))
        factors = tf.concat([factors, local.stack(of)], axis=-1)
    if local.by_scale:
        count = local.species
        of = local.of_growths(lambda theory: _of_neutrinos(theory.background, a, cell, count))
        factors = tf.concat([factors, local.stack(of)], axis=-1)
    return Schedule(operations, factors)


def _is_known(integrator: Integrator) -> bool:
    """Whether its factors depend on its options alone; who knows what a user's scheme reads."""
    return type(integrator) in INTEGRATORS.values()


def _of_neutrinos(background: Background, a: np.ndarray, cell: float, count: int) -> tf.Tensor:
    """Returns the coefficients of `NeutrinoResponse` at scale factors, float64 [times, 2 count].

    Args:
        background: the universe's background; without massive neutrinos the coefficients are 0.
        a: scale factors [times].
        cell: the side of a cell of the force mesh [Mpc/h].
        count: the number of kinds, see `Neutrinos.species`.
    """
    neutrinos = background.neutrinos
    if neutrinos is None:
        return tf.zeros([len(a), 2 * count], tf.float64)
    scales = [scale * cell / np.pi for scale in neutrinos.free_streaming(a)]
    return tf.stack([as_float64(each) for each in (*neutrinos.fractions(a), *scales)], axis=-1)
