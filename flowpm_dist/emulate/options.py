"""The run file of `flowpm-dist emulate`, which is its plan. Nothing here imports TensorFlow."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field
from typing_extensions import override

from flowpm_dist.corrections.options import FINER, LearningOptions
from flowpm_dist.cosmology.options import CosmologyOptions, ParameterRanges
from flowpm_dist.cosmology.steps import StepOptions
from flowpm_dist.evolution.corrections import (
    LPT_ONLY,
    Correction,
    CorrectionFileError,
    PotentialFilter,
    ResidualNetwork,
    load_correction,
)
from flowpm_dist.grid.decomposition import Grid, MeshFactor, mesh_factor_problem
from flowpm_dist.grid.options import A_SIZE, Sides
from flowpm_dist.io.snapshot import VECTORS, snapshot_bytes
from flowpm_dist.jobs.folder import FIGURES_AND_TABLES
from flowpm_dist.options import (
    A_SEED,
    MOST_SEED,
    AnyPath,
    OneOrMore,
    Options,
    Problem,
    Seed,
    Unit,
    count,
    table_of,
)
from flowpm_dist.simulate.options import SimulatedRun
from flowpm_dist.simulation.cost import (
    STATE,
    field_bytes,
    gradient_bytes,
    process_bytes,
    simulation_bytes,
)
from flowpm_dist.simulation.demand import Demand
from flowpm_dist.simulation.options import RunOptions

KINDS: dict[str, type[Correction]] = {"filter": PotentialFilter, "network": ResidualNetwork}
"""What can be learned."""
Size = tuple[float, float, float]
MOST_SIZES = 8
"""Most box sizes in an emulation: caches hold the compiled functions of 16 boxes."""
SAME_TIMES = 1e-3
"""Least difference of two scale factors at which runs are compared."""


class PairFiles(Options):
    """The states of one universe from another code, see `State.from_snapshot`.

    Attributes:
        initial: the snapshot from which the cheap run begins.
        final: the snapshots that it is compared with.
        cosmology: the universe's parameters.
        size: the box of the snapshots [Mpc/h]; by default box.size.
    """

    initial: AnyPath = Field(description="a snapshot: Gadget-4's HDF5, bigfile, or a zarr folder")
    final: OneOrMore[AnyPath] = Field(description="a list of snapshots")
    cosmology: CosmologyOptions = Field(description="a table of parameters")
    size: Annotated[Sides | None, Unit("Mpc/h")] = Field(default=None, description=A_SIZE)

    @override
    def problems(self) -> Iterator[Problem]:
        for key, paths in (("initial", (self.initial,)), ("final", self.final)):
            for path in paths:
                if not path.exists():
                    yield Problem(key, f"there is no {path}")


class TruthOptions(Options):
    """The section [truth]: the converged runs that the cheap ones are compared with.

    They have the white noise of the cheap runs, and BullFrog's steps between the same ends.

    Attributes:
        pairs: universes of another code, instead of runs made here.
        universes: the number of universes to learn from.
        mesh_factor, steps: the force mesh and the number of steps of the converged runs.
        sizes: boxes [Mpc/h], which the universes have in turn; by default all have box.size.
        a: the scale factors at which runs are compared; by default the end of the steps.
        seed: the seed of the cosmologies and of the first universe's white noise; each universe has
            the next seed.
    """

    pairs: Annotated[tuple[PairFiles, ...], table_of(PairFiles)] = Field(
        default=(),
        description="a list of tables with initial, final, cosmology and, if need be, size",
    )
    universes: int = count(8)
    mesh_factor: MeshFactor = Field(default=3, description="a number from 1 to 4")
    steps: int = count(40)
    sizes: Annotated[OneOrMore[Sides] | None, Unit("Mpc/h")] = Field(
        default=None, description=f"a list: each {A_SIZE}"
    )
    a: OneOrMore[Annotated[float, Field(gt=0, le=2)]] | None = Field(
        default=None, description="a list of scale factors above 0, at most 2"
    )
    seed: Seed = Field(default=0, description=A_SEED)

    @override
    def idle(self) -> dict[str, str]:
        made_here = ("universes", "mesh_factor", "steps", "sizes", "a", "seed")
        return dict.fromkeys(made_here, "runs made here, not with pairs") if self.pairs else {}

    @override
    def problems(self) -> Iterator[Problem]:
        if self.sizes and not self.pairs and len(self.sizes) > self.universes:
            reason = f"has more boxes than the {self.universes} truth.universes to learn from"
            yield Problem("sizes", reason)


class EmulateOptions(LearningOptions):
    """The section [emulate]: how the correction is learned. See `LearningOptions`.

    Attributes:
        kind: a filter of the potential, in every step, or a network that moves the particles of
            states.
        validation: the number of universes that are held out; of pairs, the last ones.
        checkpoint_every: the number of iterations between checkpoints.
        start_from: a correction to begin with.
    """

    kind: Literal["filter", "network"] = Field(
        default="filter", description='"filter" or "network"'
    )
    validation: int = count(2)
    checkpoint_every: int = count(25)
    start_from: AnyPath | None = Field(default=None, description="the file of a correction")

    @override
    def to_table(self) -> dict[str, Any]:
        # the only default of a kind that older folders, which `younger` is about, do not share
        return {**super().to_table(), "histogram": self.completed(KINDS[self.kind]).histogram}

    @override
    def problems(self) -> Iterator[Problem]:
        if self.structure == LPT_ONLY and self.kind == "filter":
            yield self.problem("structure", 'makes no steps; must be "pm" for a filter')
        if self.start_from is None:
            return
        try:
            correction, kind = load_correction(self.start_from), KINDS[self.kind]
        except CorrectionFileError as error:
            yield Problem("start_from", str(error))
            return
        if not isinstance(correction, kind):
            holds = f"{self.start_from} holds another kind, {correction.name}"
            yield Problem("start_from", f"{holds}: kind = {self.kind!r} needs {kind.name}")


class EmulationOptions(SimulatedRun):
    """The run file of an emulation: cheap runs, the truth, and how to learn."""

    priors: ParameterRanges
    run: RunOptions
    truth: TruthOptions
    emulate: EmulateOptions

    may_differ = ("emulate.checkpoint_every", "run.halo", "evolution.keep_fields")
    younger = {**SimulatedRun.younger, "emulate.histogram": 0.0}

    @property
    def parameter_ranges(self) -> ParameterRanges:
        """The section [priors]."""
        return self.priors

    @property
    @override
    def box_sizes(self) -> list[tuple[float, ...]]:
        return [tuple(self.of_size(size).box.size) for size in dict.fromkeys(self.sizes())]

    def idle(self) -> dict[str, str]:
        """The cosmology and priors, if there are pairs: their tables have the cosmologies."""
        sections = {"cosmology": self.cosmology, "priors": self.priors} if self.truth.pairs else {}
        keys = [
            f"{name}.{key}" for name, part in sections.items() for key in type(part).model_fields
        ]
        return dict.fromkeys(keys, "runs made here, not with truth.pairs")

    @override
    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        truth, steps, held = self.truth, self.evolution, self.emulate.validation
        if (several := len(set(self.sizes()))) > MOST_SIZES:
            key = "truth.pairs" if truth.pairs else "truth.sizes"
            yield Problem(key, f"has boxes of {several} sizes: at most {MOST_SIZES} are possible")
        solver = self.solver
        made = solver.correction if self.emulate.kind == "filter" else solver.state_correction
        if made is not None:
            yield Problem(
                "evolution.correction", "is what this job makes: give it as emulate.start_from"
            )
        if self.emulate.structure == LPT_ONLY and steps.correction is not None:
            reason = f'corrects the force, which emulate.structure = "{LPT_ONLY}" does not have'
            yield Problem("evolution.correction", reason)
        if steps.pyramid != "off":
            reason = 'must be "off": corrections are learned for the force of the whole mesh'
            yield self.problem("evolution.pyramid", reason)
        if truth.pairs:
            if self.emulate.structure == LPT_ONLY:
                reason = "needs the white noise: pairs give particles"
                yield self.problem("emulate.structure", reason)
            if held >= len(truth.pairs):
                reason = f"must be below the number of truth.pairs, {len(truth.pairs)}"
                yield self.problem("emulate.validation", reason)
            if steps.integrator.uses_lpt:
                yield Problem("evolution.integrator", "follows LPT: pairs give particles")
            return
        outside = [a for a in truth.a or () if not steps.first < a <= steps.last]
        if outside:
            reason = f"has {outside[0]:g}: must be above {steps.first:g}, at most {steps.last:g}"
            yield Problem("truth.a", reason)
        if any(b - a < SAME_TIMES for a, b in itertools.pairwise(self.times)):
            yield self.problem("truth.a", f"two times must differ by {SAME_TIMES:g}")
        if wrong := mesh_factor_problem(truth.mesh_factor, self.box.grid, {}):
            yield Problem("truth.mesh_factor", wrong)
        if truth.seed + truth.universes + held > MOST_SEED:
            yield self.problem("truth.seed", f"the seeds after it must be at most {MOST_SEED}")
        try:
            self.cosmology_of({k: v[0] for k, v in self.ranges.items()})
        except ValueError as error:
            yield Problem("cosmology", str(error))

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """The lowest and the highest value of each parameter that varies."""
        limits: dict[str, tuple[float, float]] = self.priors.model_dump(exclude_none=True)
        return limits

    def cosmology_of(self, values: Mapping[str, float]) -> CosmologyOptions:
        """Returns the parameters of a universe, given the values of those that vary.

        Raises:
            ValueError: parameters are missing.
        """
        return CosmologyOptions(**{**{k: v for k, v in self.cosmology if v is not None}, **values})

    def cosmologies(self) -> list[CosmologyOptions]:
        """Returns the parameters of the universes: first those to learn from, then those held out.

        Those that are made here lie on a Latin hypercube, and on another one where held out.
        """
        if self.truth.pairs:
            return [pair.cosmology for pair in self.truth.pairs]
        from scipy.stats import qmc  # takes long to import

        drawn: list[CosmologyOptions] = []
        for part, number in enumerate((self.truth.universes, self.emulate.validation)):
            places = np.zeros((number, 0))
            if self.ranges:
                generator = np.random.default_rng([self.truth.seed, part])
                places = qmc.LatinHypercube(len(self.ranges), rng=generator).random(number)
            for row in places:
                ends = zip(self.ranges.items(), row, strict=True)
                values = {name: low + float(u) * (high - low) for (name, (low, high)), u in ends}
                drawn.append(self.cosmology_of(values))
        return drawn

    def sizes(self) -> list[Size]:
        """Returns the boxes of the universes [Mpc/h]: first those to learn from, then held out."""
        truth, side = self.truth, self.box.size
        if truth.pairs:
            return [pair.size or side for pair in truth.pairs]
        each = truth.sizes or (side,)
        numbers = (truth.universes, self.emulate.validation)
        return [each[n % len(each)] for number in numbers for n in range(number)]

    def of_size(self, size: Size) -> Self:
        """Returns the same run file with another box [Mpc/h]."""
        return self.model_copy(update={"box": self.box.model_copy(update={"size": size})})

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings of `SimulatedRun.warnings` for all boxes."""
        each = (super(EmulationOptions, self.of_size(size)).warnings for size in self.sizes())
        return tuple(dict.fromkeys(itertools.chain.from_iterable(each)))

    @property
    def universes(self) -> int:
        """The number of universes, those that are held out included."""
        return len(self.truth.pairs) or self.truth.universes + self.emulate.validation

    @property
    def times(self) -> tuple[float, ...]:
        """The scale factors at which universes made here are compared, increasing."""
        return tuple(sorted(self.truth.a or (self.evolution.last,)))

    @property
    def truth_steps(self) -> StepOptions:
        """The steps of the converged runs."""
        first, last = self.evolution.first, self.evolution.last
        return StepOptions(a_start=first, a_stop=last, steps=self.truth.steps)

    def memory(self, grid: Grid, axes: Mapping[str, int]) -> int:
        """Returns the memory of a rank [bytes]."""
        pairs, network = self.truth.pairs, self.emulate.kind == "network"
        solver = self.counted_solver(grid)
        truth = solver.model_copy(update={"mesh_factor": self.truth.mesh_factor})
        made = 0 if pairs else simulation_bytes(truth, grid, axes, outputs=True)
        learning = gradient_bytes(
            self.emulate.structure,
            solver,
            grid,
            axes,
            steps=self.evolution.step_count,
            network=network,
        )
        times = sum(len(pair.final) for pair in pairs) or len(self.times) * self.universes
        # The truth, what pairs begin with, and cheap runs that a network moves.
        states = times + len(pairs) + times * network
        # Two of each true state, and six while a cheap run is compared with it.
        densities = 2 * times + 6
        held = STATE * states + FINER**3 * densities
        fields = max(made, learning) + field_bytes(held, grid, axes, self.precision)
        return process_bytes(axes, "emulate") + fields

    def demand(self, mesh: str) -> Demand:
        """Returns the memory that the work needs."""

        def mesh_of(ranks: int) -> str:
            return self.with_mesh(None).mesh_for(ranks, source=Path())

        return Demand(
            "the emulation",
            self.box.grid,
            mesh,
            self.memory,
            mesh_of,
            pyramid=self.evolution.pyramid,
            halo=self.usual_halo,
        )

    @property
    def disk(self) -> int:
        """The size of what is written [bytes]."""
        itemsize = np.dtype(self.precision).itemsize
        each = snapshot_bytes(self.box.grid, itemsize, VECTORS)
        made = 0 if self.truth.pairs else each * len(self.times) * self.universes
        return made + FIGURES_AND_TABLES
