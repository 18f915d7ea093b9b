"""The run file of `flowpm-dist reconstruct`.

Nothing here imports TensorFlow, Horovod or MPI: a wrong file is refused within a second, under any
launcher, before work begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowpm_dist.config import observation_rules
from flowpm_dist.config.checks import (
    ParsedRunFile,
    Problem,
    Rule,
    check_sections,
    exactly_one,
    fitting_mesh,
    models_of,
    read_table,
    to_toml,
)
from flowpm_dist.config.dependent_keys import DependentKeys, idle_key_problems, idle_keys
from flowpm_dist.config.light_cone import SECTION, light_cone_rules, maps_fit, pixel_warnings
from flowpm_dist.config.objects import simulation_plan
from flowpm_dist.config.observation_rules import (
    files_fit,
    fitting_file,
    given_priors,
    model_fits,
    needed_noise,
    nuisances_fit,
)
from flowpm_dist.config.sections import ROUNDED, DifferentiatedEvolutionSection
from flowpm_dist.config.settings import Settings
from flowpm_dist.config.simulation import (
    amplitude_rule,
    check_mesh,
    evolution_rules,
    universe_rules,
)
from flowpm_dist.cosmology.options import CosmologyOptions
from flowpm_dist.cosmology.time_steps import StepOptions
from flowpm_dist.evolution.options import RunOptions
from flowpm_dist.grid.decomposition import misfits, parse_mesh
from flowpm_dist.grid.options import BatchedMeshOptions, BoxOptions
from flowpm_dist.initial.options import InitialOptions
from flowpm_dist.io.errors import UserError
from flowpm_dist.jobs.light_cone import ConvergenceOptions
from flowpm_dist.observables.map_files import read_convergence
from flowpm_dist.observables.options import ObservationOptions
from flowpm_dist.options import Options, three
from flowpm_dist.reconstruction.options import (
    FittedOptions,
    LikelihoodOptions,
    ObservedOptions,
    SamplerOptions,
    SearchOptions,
)
from flowpm_dist.reconstruction.plan import ReconstructionPlan, search_mesh

OF_VOLUMES = ("data.noise_seed", "likelihood.name")
"""Goes with densities and counts, not with maps, whose noise has the seed of its shape_noise."""

GOES_WITH = (
    *observation_rules.GOES_WITH,
    DependentKeys("run.precision", ("float32",), ROUNDED, default_may_stand=True),
    DependentKeys("observation.kind", ("density", "convergence"), ("data.add_noise",)),
    DependentKeys("observation.kind", ("density",), ("likelihood.error",)),
    DependentKeys("observation.kind", ("density", "counts"), OF_VOLUMES),
    DependentKeys(
        "likelihood.name",
        (None,),
        ("likelihood.error",),
        goes_with="the likelihood of observation.kind, not with a likelihood.name",
    ),
    DependentKeys(
        "data.mock_seed", (), ("data.noise_seed", "data.add_noise"), goes_with="mock_seed"
    ),
    DependentKeys("data.add_noise", (True,), ("data.noise_seed",)),
    DependentKeys("search.optimiser", ("lbfgs",), ("search.history",)),
    DependentKeys("search.optimiser", ("adam",), ("search.rate",)),
    DependentKeys("sampler.method", ("hmc", "adjusted-microcanonical"), ("sampler.target",)),
    DependentKeys(
        "sampler.method", ("microcanonical", "adjusted-microcanonical"), ("sampler.length",)
    ),
    DependentKeys("sampler.method", ("microcanonical",), ("sampler.energy_error",)),
)
"""Keys that have no meaning beside some values of others."""

BY_CAMB = ("Omega_m", "Omega_b", "h", "w0", "wa")
"""Parameters that CAMB gives no derivative by."""


class ReconstructionConfig(Options):
    """A whole run file of a reconstruction, checked: see `load_reconstruction`."""

    box: BoxOptions
    cosmology: CosmologyOptions
    evolution: DifferentiatedEvolutionSection
    observation: ObservationOptions
    data: ObservedOptions
    likelihood: LikelihoodOptions
    priors: FittedOptions
    search: SearchOptions
    sampler: SamplerOptions
    mesh: BatchedMeshOptions
    run: RunOptions
    lightcone: ConvergenceOptions | None = None

    @property
    def plan(self) -> ReconstructionPlan:
        """What the run file asks for, without the ranks."""
        initial = InitialOptions(lpt_order=self.observation.lpt_order)
        simulation = simulation_plan(self.box, initial, self.evolution, self.run)
        return ReconstructionPlan(
            simulation=replace(simulation, adjoint=self.evolution.adjoint),
            cosmology=self.cosmology,
            observation=self.observation,
            data=self.data,
            likelihood=self.likelihood,
            priors=self.priors,
            search=self.search,
            sampler=self.sampler,
            lightcone=self.lightcone,
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user should know before the work begins."""
        if self.lightcone is None:
            return ()
        size = three(self.box.size)
        cells = [self.evolution.mesh_factor * n for n in self.box.grid]
        return pixel_warnings(self.lightcone, self.cosmology, size, cells)

    def resolved(self) -> str:
        """The run as TOML with all defaults and full paths; `load_reconstruction` reads it back.

        Keys that have no meaning beside the others are left out.
        """
        idle = idle_keys(self, GOES_WITH)
        if self.search.stages is not None:
            idle.setdefault("search", []).append("evaluations")
        if not self.sampler.draws:
            idle["sampler"] = list(SamplerOptions.model_fields)
        return to_toml(self, idle)

    def with_mesh(self, shape: str | None) -> ReconstructionConfig:
        """The same reconstruction on a mesh of another shape; None leaves it open."""
        return self.model_copy(update={"mesh": BatchedMeshOptions(shape=shape)})


MODELS = models_of(ReconstructionConfig)


def load_reconstruction(path: str | Path, settings: Settings | None = None) -> ReconstructionConfig:
    """Read and check the run file of a reconstruction, and the shapes of the files that it names.

    Args:
        path: TOML file; paths inside it are relative to its folder.
        settings: values in place of the file's own.

    Raises:
        ConfigError: with every problem of the file.
    """
    return check_reconstruction(read_table(path, settings), Path(path))


def check_reconstruction(table: Mapping[str, Any], source: Path) -> ReconstructionConfig:
    """Returns a reconstruction from the tables of a TOML file.

    Args:
        table: sections and their keys.
        source: the file, for messages and for the paths inside it.

    Raises:
        ConfigError: with every problem.
    """
    return ReconstructionConfig.model_validate(
        check_sections(table, source, MODELS, RULES, optional=(SECTION,))
    )


def check_reconstruction_mesh(
    config: ReconstructionConfig, ranks: int, *, source: Path, shape: str | None = None
) -> str:
    """Returns the shape of the mesh to run on, see `config.simulation.check_mesh`.

    Chains can be spread over a replica axis, if all ranks together can hold the box of the search.
    """
    grid, chains = config.box.grid, config.sampler.chains if config.sampler.draws else 1

    def misfits_of(text: str) -> list[str]:
        axes = parse_mesh(text, batched=config.sampler.draws > 0)
        wrong = misfits(axes, grid, ranks, chains)
        wrong = [line.replace("volumes of the batch", "chains") for line in wrong]
        return wrong or misfits(parse_mesh(search_mesh(text)), grid, ranks)

    if shape or config.mesh.shape:
        return fitting_mesh(shape, config.mesh.shape, misfits_of, source)
    return check_mesh(config, ranks, source=source)


def _origin(file: ParsedRunFile) -> Iterator[Problem]:
    return exactly_one(file, ("data", "mock_seed"), ("data", "file"))


def _noise(file: ParsedRunFile) -> Iterator[Problem]:
    return needed_noise(file, ("sigma", "density"), ("mean_count", "counts"))


def _stages_of_maps(file: ParsedRunFile) -> Iterator[Problem]:
    """Maps are not smoothed."""
    stages = file.value("search", "stages") or ()
    smoothed = [radius for radius, *_ in stages if radius]
    if smoothed and file.value("observation", "kind") == "convergence":
        what = f"has radius {smoothed[0]:g}: maps are not smoothed; each must be 0"
        yield Problem("search.stages", what)


def _idle(file: ParsedRunFile) -> Iterator[Problem]:
    return idle_key_problems(file, GOES_WITH)


def _one_time(file: ParsedRunFile) -> Iterator[Problem]:
    if file.value("observation", "redshifts") is not None:
        what = f"= {file.given['observation']['redshifts']}: a reconstruction sees the universe at "
        what += "the end of the simulation alone: leave it out, or train a network"
        yield Problem("observation.redshifts", what)


def _stages(file: ParsedRunFile) -> Iterator[Problem]:
    stages = file.value("search", "stages")
    if not stages:
        return
    if "evaluations" in file.given["search"]:
        what = "is given beside stages, which tell the evaluations of each: leave it out"
        yield Problem("search.evaluations", what)
    radius, inflation, evaluations = stages[-1]
    if (radius, inflation) != (0, 1):
        what = f"the last is [{radius:g}, {inflation:g}, {evaluations}]; must be [0, 1, "
        yield Problem("search.stages", f"{what}{evaluations}], the posterior itself")


def _fitted(file: ParsedRunFile) -> Iterator[Problem]:
    """What is fitted is a parameter of the model; a mock's own values are possible ones."""
    observation, nuisances = file.sections.get("observation"), given_priors(file)
    own = observation.own_values if isinstance(observation, ObservationOptions) else {}
    for name in file.given.get("priors", {}):
        limits = file.value("priors", name)
        if not isinstance(limits, tuple):
            continue
        where = f"priors.{name}"
        value = own.get(name) if name in nuisances else file.value("cosmology", name)
        if value is None:
            if name not in nuisances and name not in file.given.get("cosmology", {}):
                yield Problem(where, f"is given, but cosmology has no {name}: {_advice(name)}")
        elif file.value("data", "mock_seed") is not None and not limits[0] <= value <= limits[1]:
            what = f"= {list(limits)}: must hold the mock's own {name} = {value:g}"
            yield Problem(where, what)
        if name in BY_CAMB and file.value("cosmology", "transfer") == "camb":
            what = f"is given, but CAMB gives no derivative by {name}"
            yield Problem(where, f'{what}: use transfer = "eisenstein-hu"')


def _chains(file: ParsedRunFile) -> Iterator[Problem]:
    """Keys of [sampler] mean something where draws are asked for."""
    given = file.given.get("sampler", {})
    if file.value("sampler", "draws") == 0:
        others = [key for key in given if key in SamplerOptions.model_fields and key != "draws"]
        if others:
            what = "is missing, or 0: so many draws of each chain as are wanted, or leave out "
            yield Problem("sampler.draws", f"{what}{', '.join(others)}")
        shape = file.value("mesh", "shape")
        if shape and (replicas := parse_mesh(shape, batched=True).get("replica", 1)) > 1:
            what = f'= "{shape}": replica:{replicas} is for chains, and this is one simulation;'
            yield Problem("mesh.shape", f"{what} ask for draws in [sampler], or leave it out")


def _advice(name: str) -> str:
    other = {"A_s": "sigma8", "sigma8": "A_s"}.get(name)
    if other is not None:
        return f"give it there in the place of {other}"
    return "give it there, too: the mock's, or about what is expected"


def _files(file: ParsedRunFile) -> Iterator[Problem]:
    """The file of the data is there, and fits as far as it tells; maps are read."""
    cone, path = file.sections.get(SECTION), file.value("data", "file")
    if file.value("observation", "kind") == "convergence":
        if isinstance(cone, ConvergenceOptions) and isinstance(path, str | Path):
            yield from _file_of_maps(file.folder / path, cone)
        return
    evolution, a = file.sections.get("evolution"), None
    if isinstance(evolution, StepOptions) and None not in (evolution.last, evolution.first):
        a = evolution.last
    yield from fitting_file(file, "data", "file", a)


def _file_of_maps(path: Path, cone: ConvergenceOptions) -> Iterator[Problem]:
    sources = cone.sources if isinstance(cone.sources, tuple) else ()
    if not sources or not isinstance(cone.pixels, int) or cone.field_of_view is None:
        return
    try:
        read_convergence(path, len(sources), cone.pixels, cone.field_of_view)
    except UserError as error:
        yield Problem("data.file", f": {error}")


RULES: list[Rule] = [
    amplitude_rule,
    universe_rules,
    evolution_rules,
    model_fits,
    _origin,
    _noise,
    maps_fit,
    _stages_of_maps,
    light_cone_rules,
    _one_time,
    _idle,
    nuisances_fit,
    _fitted,
    _stages,
    _chains,
    files_fit,
    _files,
]
"""All that must hold between the keys of a reconstruction."""
