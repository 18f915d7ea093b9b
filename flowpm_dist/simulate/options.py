"""The run file of `flowpm-dist simulate`, and what other jobs that simulate share with it.

Nothing here imports TensorFlow, Horovod or MPI.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field
from typing_extensions import override

from flowpm_dist.catalogues.options import HaloSection
from flowpm_dist.cosmology.options import (
    KEYS,
    CosmologyOptions,
    ParameterRanges,
    PartialCosmologyOptions,
    universe_problems,
)
from flowpm_dist.cosmology.parameters import VARIABLE
from flowpm_dist.cosmology.power_table import (
    OF_LENSING,
    OF_SIGMA8,
    ON_THE_PEAK,
    box_problem,
    theory_problem,
    unit_doubt,
)
from flowpm_dist.cosmology.steps import SAME, StepOptions
from flowpm_dist.evolution.corrections import LPT_ONLY, CorrectionWarning, file_of
from flowpm_dist.grid.decomposition import (
    Grid,
    default_mesh,
    finer_grid,
    mesh_factor_problem,
    misfits,
    parse_mesh,
    pyramid_problem,
)
from flowpm_dist.grid.options import BoxOptions, MeshOptions
from flowpm_dist.initial.options import InitialOptions
from flowpm_dist.io.files import checksum
from flowpm_dist.io.particle_formats import FORMAT_NAMES
from flowpm_dist.io.snapshot import (
    DEFAULT_FIELDS,
    FIELDS,
    FieldName,
)
from flowpm_dist.io.white_noise import WhiteNoiseError, check_white_noise_file, open_white_noise
from flowpm_dist.jobs.run_file import ConfigError, RunFile, fitting_mesh
from flowpm_dist.observables.light_cone.plan import LightConePlan
from flowpm_dist.observables.light_cone.section import SKIES, LensedSky, LensingOptions, distance_of
from flowpm_dist.observables.options import ObservationOptions
from flowpm_dist.observables.tracers import A_LINE_OF_SIGHT, LineOfSight
from flowpm_dist.options import (
    A_SEED,
    AnyPath,
    Length,
    OneOrMore,
    Options,
    Problem,
    Seed,
    Unit,
    Variants,
    distinct,
    either,
    listed,
)
from flowpm_dist.options.base import flat_variants
from flowpm_dist.particle_mesh.lattice import LatticeWarning
from flowpm_dist.simulation.cost import statistics_values
from flowpm_dist.simulation.options import (
    DynamicsOptions,
    HaloOptions,
    RunOptions,
    SolverOptions,
)
from flowpm_dist.statistics.register import STATISTICS, StatisticName, twice_named

if TYPE_CHECKING:
    from flowpm_dist.cosmology.parameters import Cosmology
    from flowpm_dist.simulation.simulation import Simulation
    from meshimpl.process_mesh import MeshShape, ProcessMesh

KEEP = 2
"""Checkpoints that are kept: the latest, and an earlier one in case it is damaged."""


class InitialSection(InitialOptions):
    """The section [initial]: what the universe starts from."""

    seed: Seed | None = Field(default=None, description=A_SEED)
    white_noise: AnyPath | None = Field(
        default=None,
        description="a .npy file, or white noise of MUSIC or in GRAFIC's format: real, shaped as "
        "box.grid, unit normal in real space",
    )
    paired: bool = Field(default=False, description="true or false")

    @override
    def problems(self) -> Iterator[Problem]:
        yield from self.exactly_one("seed", "white_noise")
        if self.white_noise is not None and not self.white_noise.exists():
            yield self.problem("white_noise", "there is no such file")

    @override
    def idle(self) -> dict[str, str]:
        if self.white_noise is None or self.seed is not None:
            return {}
        return dict.fromkeys(("noise", "fixed_amplitude", "paired"), "a seed, not with white_noise")


class EvolutionOptions(StepOptions, DynamicsOptions):
    """The section [evolution]: time steps, integrator with its own options, and force."""

    @override
    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if wrong := self.integrator.wrong_start(self.first):
            yield Problem("edges" if self.edges else "a_start", wrong)
        for key, variants in flat_variants(type(self)).items():
            if (name := variants.name_of(getattr(self, key))) not in variants.models:
                yield Problem(key, f"is a {name}: a run file needs {variants.must}")
        if self.correction is not None and self.correction.source is None:
            yield Problem("correction", "was made in Python: save it, and give its file")


class SimulatedRun(RunFile):
    """The sections that define a simulation, in the run files of all jobs that simulate.

    A kind of run file adds its own sections, and [cosmology] and [initial] as it needs them.
    """

    box: BoxOptions
    cosmology: PartialCosmologyOptions
    evolution: EvolutionOptions
    mesh: MeshOptions
    run: HaloOptions
    younger = {
        "cosmology.Omega_k": 0.0,
        "cosmology.N_eff": 3.046,
        "cosmology.m_nu": 0.0,
        "cosmology.radiation": False,
        "cosmology.f_NL": 0.0,
        "evolution.max_error_growth": 32.0,
        "evolution.keep_fields": "auto",
    }

    @property
    def initial_options(self) -> InitialOptions:
        """The options of the initial conditions, besides the white noise."""
        return InitialOptions()

    @property
    def parameter_ranges(self) -> ParameterRanges | None:
        """The section [priors], in run files that have one."""
        return None

    @property
    def observed(self) -> ObservationOptions | None:
        """The section [observation], in run files that have one."""
        return None

    @property
    def cone(self) -> LensedSky | None:
        """The section [lightcone], where there is one."""
        return None

    @property
    def precision(self) -> Literal["float32", "float64"]:
        """The dtype of fields and particles."""
        assert isinstance(self.run, RunOptions)
        return self.run.precision

    @property
    def solver(self) -> SolverOptions:
        """All options of the simulation except its cosmology, box and steps."""
        choices: dict[str, Any] = {}
        for part in (self.initial_options, self.evolution, self.run):
            choices |= {n: getattr(part, n) for n in SolverOptions.model_fields if hasattr(part, n)}
        return SolverOptions.model_construct(**{**choices, "precision": self.precision})

    def simulation(self, cosmology: Cosmology, *, mesh: ProcessMesh | MeshShape) -> Simulation:
        """Returns the simulation of a cosmology.

        Args:
            cosmology: its parameters; they also determine steps that are equal in "D".
            mesh: the ranks.
        """
        from flowpm_dist.simulation.simulation import Simulation

        box, edges = self.box, self.evolution.edges_of(cosmology)
        return Simulation(
            cosmology, box.grid, box.size, edges, mesh=mesh, warn=False, **dict(self.solver)
        )

    @property
    def box_sizes(self) -> list[tuple[float, ...]]:
        """The sides of all boxes that are simulated [Mpc/h]."""
        return [self.box.size]

    @property
    def state_times(self) -> list[float]:
        """Scale factors of the states that a run returns; first the earliest of a light cone."""
        last, observation, cone = self.evolution.last, self.observed, self.cone
        times = [last] if observation is None else observation.scale_factors(last)
        return times if cone is None else [cone.earliest, *times]

    @property
    @override
    def files(self) -> dict[str, Path | None]:
        """Paths of the files that are read, by key; here of the power and the correction."""
        files: dict[str, Path | None] = {}
        if self.cosmology.power is not None:
            files["cosmology.power"] = self.cosmology.power.file
        if (correction := self.evolution.correction) is not None:
            files["evolution.correction"] = file_of(str(correction))
        return files

    @override
    def checksums(self) -> dict[str, str]:
        correction, power = self.evolution.correction, self.cosmology.power
        checksums = {}
        if power is not None:
            columns = np.stack([power.table.k, power.table.power])
            checksums["cosmology.power"] = checksum(columns)
        if correction is not None:
            checksums["evolution.correction"] = checksum(correction.numbers())
        return checksums

    @property
    @override
    def warnings(self) -> tuple[str, ...]:
        """Warnings about a force that is unstable on the lattice, or a correction's range."""
        solver, steps = self.solver, self.evolution
        shared = {name: getattr(self.cosmology, name) for name in (*KEYS, "radiation")}
        values = {name: [value] for name, value in shared.items() if value is not None}
        if (ranges := self.parameter_ranges) is not None:
            values |= {n: v for n in VARIABLE if (v := getattr(ranges, n)) is not None}
        edges = np.linspace(steps.first, steps.last, steps.step_count + 1).tolist()  # about
        shown = [*solver.warnings(self.box.size, self.box.grid, edges, values)]
        shown += solver.time_warnings(self.state_times)
        keys = {LatticeWarning: "deconvolve: ", CorrectionWarning: ""}
        of_power = (f"cosmology.power: {text}" for text in self._power_doubts())
        return (*of_power, *(f"evolution.{keys[type(each)]}{each}" for each in shown))

    def _power_doubts(self) -> Iterator[str]:
        """Yields why a table of power may not be what was meant, or too short for theory."""
        power = self.cosmology.power
        known = {name: getattr(self.cosmology, name) for name in ON_THE_PEAK}
        if power is None or None in known.values():
            return
        if doubt := unit_doubt(power.table, **known):
            yield doubt
        lensing = theory_problem(power.table, OF_LENSING, known["h"])
        if self.cone is not None and lensing:
            yield f"the theory of maps {lensing}; beyond, it is a power law"

    def _power_problems(self) -> Iterator[Problem]:
        """Yields what the boxes, and sigma8, need of a table of power and do not find there."""
        power, h = self.cosmology.power, self.cosmology.h
        if power is None or h is None:
            return
        for size in self.box_sizes:
            if problem := box_problem(power.table, size, self.box.grid, h):
                yield Problem("cosmology.power", f"= {power.file}: {problem}")
                return
        scaled = self.cosmology.sigma8 or getattr(self.parameter_ranges, "sigma8", None)
        if scaled and (problem := theory_problem(power.table, OF_SIGMA8, h)):
            yield Problem("cosmology.power", f"= {power.file}: sigma8 {problem}")

    def _correction_problems(self) -> Iterator[Problem]:
        """Yields the problems of a correction of states with what else is in the file."""
        if (correction := self.solver.state_correction) is None:
            return
        key, source = "evolution.correction", self.evolution.correction
        structure = "pm" if self.observed is None else self.observed.structure
        learned = LPT_ONLY if correction.of_lpt else "pm"
        if structure in ("linear", "1lpt", "2lpt", "pm") and structure != learned:
            reason = f'was learned from {learned}: the structure is "{structure}"'
            yield Problem(key, f"= {str(source)!r} {reason}")

    @property
    def force_cells(self) -> list[int]:
        """Cells of the force mesh along each side of the box."""
        return list(finer_grid(self.box.grid, self.evolution.mesh_factor))

    @property
    def usual_halo(self) -> int:
        """The halo for which a mesh is chosen, see `HaloOptions.usual_halo`."""
        return self.solver.usual_halo(self.box.grid, self.box.size, self.evolution.last)

    def counted_solver(self, grid: Grid) -> SolverOptions:
        """Returns the solver on a grid, with the halo that estimates of memory count."""
        return self.solver.with_usual_halo(grid, self.box.size, self.evolution.last)

    @override
    def mesh_for(self, ranks: int, *, source: Path, shape: str | None = None) -> str:
        """Returns the mesh of ranks, which split one box, see `RunFile.mesh_for`.

        Raises:
            ConfigError: the text is no shape, its sizes do not multiply to `ranks`, or an axis does
                not divide its side of the grid.
        """
        grid, force = self.box.grid, self.evolution
        factor, pyramid = force.mesh_factor, force.pyramid

        def misfits_of(text: str) -> list[str]:
            return misfits(parse_mesh(text), grid, ranks, mesh_factor=factor, pyramid=pyramid)

        if shape or self.mesh.shape:
            return fitting_mesh(shape, self.mesh.shape, misfits_of, source)
        try:
            return default_mesh(ranks, grid, factor, pyramid, self.usual_halo)
        except ValueError as error:
            raise ConfigError(source, [Problem("box.grid", f"= {list(grid)}: {error}")]) from error

    @override
    def problems(self) -> Iterator[Problem]:
        priors = self.parameter_ranges
        yield from universe_problems(self.cosmology, priors)
        yield from self._power_problems()
        yield from self._correction_problems()
        steps, radiation = self.evolution, self.cosmology.radiation
        if late := steps.integrator.wrong_start(steps.first, radiation=True) if radiation else "":
            yield Problem("evolution.edges" if steps.edges else "evolution.a_start", late)
        for problem in self.solver.problems():
            section = "initial" if problem.key == "lpt_order" else "evolution"
            yield Problem(f"{section}.{problem.key}", problem.what)
        grid, factor = self.box.grid, self.evolution.mesh_factor
        # Whether the ranks divide the mesh is checked in `mesh_for`, which knows their number.
        if wrong := mesh_factor_problem(factor, grid, {}):
            axes = parse_mesh(self.mesh.shape, batched=True) if self.mesh.shape else {}
            yield Problem("evolution.mesh_factor", mesh_factor_problem(factor, grid, axes) or wrong)
        elif wrong := pyramid_problem(
            self.evolution.pyramid, finer_grid(grid, factor), {}, self.box.size
        ):
            yield Problem("evolution.pyramid", wrong)
        if (cone := self.cone) is not None:
            known = self.cosmology.Omega_m or getattr(priors, "Omega_m", None)
            try:
                end, across = (
                    distance_of(cone.z_max, self.cosmology, priors, across=way) if known else None
                    for way in (False, True)
                )
            except ValueError as error:
                yield Problem("lightcone", f"cannot be made: {error}")
                return
            yield from cone.run_problems(self.evolution, self.box.size, end, across)


class ObservedSections:
    """The sections of run files whose universes have priors and are observed."""

    if TYPE_CHECKING:
        priors: Any
        observation: Any
        lightcone: Any

    @property
    def parameter_ranges(self) -> ParameterRanges:
        """The section [priors]."""
        ranges: ParameterRanges = self.priors
        return ranges

    @property
    def observed(self) -> ObservationOptions:
        """The section [observation]."""
        observation: ObservationOptions = self.observation
        return observation

    @property
    def cone(self) -> LensedSky | None:
        """The section [lightcone]; None without one."""
        cone: LensedSky | None = self.lightcone
        return cone


WITHOUT_GRADIENTS = {
    "evolution.adjoint": "reconstruct and emulate, which need gradients of a run, as its options do"
}
"""The key that has no effect in jobs without gradients."""


class ResultsOptions(Options):
    """The section [results]: what to measure besides the power spectrum."""

    multipoles: LineOfSight | None = Field(default=None, description=A_LINE_OF_SIGHT)
    statistics: Annotated[
        tuple[StatisticName, ...], BeforeValidator(listed), AfterValidator(distinct)
    ] = Field(
        default=(),
        description=f'a list of some of {", ".join(STATISTICS)}, or "package.module:object"',
    )
    line_of_sight: LineOfSight = Field(default="z", description=A_LINE_OF_SIGHT)
    interlaced: bool = Field(default=False, description="true or false")
    window: Literal["cic", "none"] = Field(default="cic", description='"cic" or "none"')
    subtract_shot_noise: bool = Field(default=False, description="true or false")

    @property
    def values(self) -> int:
        """Memory to measure one statistic after another, without the power [values of a cell]."""
        names = [*self.statistics, *(["power"] if self.multipoles or self.interlaced else [])]
        densities = 1 + self.interlaced
        return max((densities + statistics_values([name]) for name in names), default=0)

    @override
    def problems(self) -> Iterator[Problem]:
        if twice := twice_named(self.statistics):
            reason = f"has several named {', '.join(twice)}, which would write the same files"
            yield Problem("statistics", reason)
        if self.window == "none" and self.subtract_shot_noise:
            reason = 'is flat only without the window: leave this out, or window = "none"'
            yield Problem("subtract_shot_noise", reason)

    @override
    def idle(self) -> dict[str, str]:
        return {} if self.statistics else {"line_of_sight": "statistics"}


class OutputOptions(Options):
    """The options of what a simulation writes to the disk.

    Attributes:
        format: format of the snapshot: "zarr"; or, for other codes, one of `PARTICLE_FORMATS`,
            which hold only the particles.
        fields: names of the fields of a zarr snapshot, which holds attributes alone if there are
            none.
        figures: whether to draw figures.
        a, redshifts: when states are written before the last one, as scale factors or redshifts.
        checkpoint_every: the number of steps between checkpoints. With 0, a checkpoint is written
            only when a signal stops the run.
    """

    format: str = Field(
        default="zarr",
        pattern=f"^({'|'.join(FORMAT_NAMES)})$",
        description=either(FORMAT_NAMES),
        examples=[*FORMAT_NAMES],
    )
    fields: Annotated[tuple[FieldName, ...], BeforeValidator(listed), AfterValidator(distinct)] = (
        Field(default=DEFAULT_FIELDS, description=f"a list of some of {', '.join(FIELDS)}")
    )
    figures: bool = Field(default=True, description="true or false")
    a: OneOrMore[Length] | None = Field(default=None, description="a list of scale factors above 0")
    redshifts: Annotated[OneOrMore[Annotated[float, Field(ge=0)]] | None, Unit("redshift")] = Field(
        default=None, description="a list of redshifts, of at least 0"
    )
    checkpoint_every: int = Field(
        default=0, ge=0, description="a whole number of steps; 0: only when a signal stops the run"
    )

    @override
    def problems(self) -> Iterator[Problem]:
        if self.a is not None and self.redshifts is not None:
            yield Problem("redshifts", "and a are both given: give one of them")
        names = [output_name(a) for a in self._output_times()]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            reason = f"has two times for the folder {', '.join(twice)}: times must differ by 0.0001"
            yield Problem("a" if self.a else "redshifts", reason)

    @override
    def idle(self) -> dict[str, str]:
        if self.format == "zarr":
            return {}
        reason = "zarr; other formats hold only the particles: positions, velocities and ids"
        return {"fields": reason}

    def _output_times(self) -> list[float]:
        return sorted(self.a or [1.0 / (1.0 + z) for z in self.redshifts or ()])

    def times(self, steps: StepOptions) -> list[float]:
        """Returns the scale factors of states before the last one, increasing.

        Args:
            steps: the steps of the run.
        """
        last = steps.last * (1.0 - SAME)
        return [max(a, steps.first) for a in self._output_times() if a < last]

    def times_beyond(self, steps: StepOptions) -> Iterator[Problem]:
        """Yields a problem for each time that lies outside the steps."""
        first, last = steps.first, steps.last
        for a in self._output_times():
            if first * (1 - SAME) <= a <= last * (1 + SAME):
                continue
            time, low, high, name, key = a, first, last, "a", "a"
            if self.a is None:
                time, low, high = (1 / x - 1 if x else math.inf for x in (a, last, first))
                name, key = "z", "redshifts"
            reason = f"has {name} = {time:g}: must be from {low:g} to {high:g}, within the steps"
            yield Problem(f"output.{key}", reason)


def output_name(a: float) -> str:
    """Returns the name of the folder of the state at a scale factor."""
    return f"a_{a:.4f}"


class SimulationOptions(SimulatedRun):
    """The run file of a simulation, which is its plan."""

    box: BoxOptions
    cosmology: CosmologyOptions
    initial: InitialSection
    evolution: EvolutionOptions
    mesh: MeshOptions
    run: RunOptions
    results: ResultsOptions
    output: OutputOptions
    lightcone: Annotated[LensingOptions | None, Variants("sky", SKIES, "flat")] = None
    halos: HaloSection | None = None

    may_differ = (
        "output.checkpoint_every", "output.format", "output.fields", "output.figures",
        "results.interlaced", "results.line_of_sight", "results.multipoles", "results.statistics",
        "results.subtract_shot_noise", "results.window",
        "run.halo",
    )  # fmt: skip

    @override
    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        yield from self.output.times_beyond(self.evolution)
        if self.halos is not None:
            yield from self.halos.grid_problems("halos", self.box.grid)
        if (noise := self.initial.white_noise) is not None:
            try:
                check_white_noise_file(noise, self.box.grid)
            except WhiteNoiseError as error:
                yield Problem("initial.white_noise", f"= '{noise}': {error}")

    @override
    def idle(self) -> dict[str, str]:
        return WITHOUT_GRADIENTS

    @override
    def mesh_for(self, ranks: int, *, source: Path, shape: str | None = None) -> str:
        """Returns the mesh of ranks, whose blocks no linking length spans."""
        mesh = super().mesh_for(ranks, source=source, shape=shape)
        if self.halos is not None:
            problem = self.halos.mesh_problem(
                "halos", self.box.grid, self.box.size, parse_mesh(mesh)
            )
            if problem:
                raise ConfigError(source, [problem])
        return mesh

    @property
    def initial_options(self) -> InitialOptions:
        """The section [initial]."""
        return self.initial

    @property
    def cone(self) -> LensingOptions | None:
        """The section [lightcone]; None without one."""
        return self.lightcone

    @property
    def light_cone(self) -> LightConePlan | None:
        """The plan of the run's light cone; None without one."""
        if self.lightcone is None:
            return None
        box = self.box
        return LightConePlan.of(
            self.lightcone, self.cosmology, box.size, self.force_cells, box.grid
        )

    @property
    def output_times(self) -> list[float]:
        """The scale factors of states that are written before the last one, increasing."""
        return self.output.times(self.evolution)

    @property
    @override
    def state_times(self) -> list[float]:
        return [*self.output_times, *super().state_times]

    @property
    @override
    def warnings(self) -> tuple[str, ...]:
        cone = self.light_cone
        return (*super().warnings, *(() if cone is None else cone.warnings))

    @property
    @override
    def files(self) -> dict[str, Path | None]:
        noise, cone = self.initial.white_noise, self.lightcone
        tables = {} if cone is None else {key: each.file for key, each in cone.tables.items()}
        noises = {} if noise is None else {"initial.white_noise": noise}
        return {**super().files, **noises, **tables}

    @override
    def checksums(self) -> dict[str, str]:
        cone, noise = self.lightcone, self.initial.white_noise
        checksums = super().checksums()
        if cone is not None:
            checksums |= {key: each.checksum for key, each in cone.tables.items()}
        if noise is not None:
            checksums["initial.white_noise"] = checksum(open_white_noise(noise))
        return checksums
