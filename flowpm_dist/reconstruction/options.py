"""The run file of `flowpm-dist reconstruct`, which is its plan. Nothing here imports TensorFlow."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field
from typing_extensions import override

from flowpm_dist.cosmology.options import CosmologyOptions, FittedRanges
from flowpm_dist.cosmology.parameters import AMPLITUDES, VARIABLE, affecting
from flowpm_dist.grid.decomposition import Grid, misfits, parse_mesh
from flowpm_dist.grid.options import BatchedMeshOptions
from flowpm_dist.initial.options import InitialOptions
from flowpm_dist.io.errors import UserError
from flowpm_dist.io.files import checksum
from flowpm_dist.io.volume import open_volume
from flowpm_dist.jobs.folder import FIGURES_AND_TABLES
from flowpm_dist.jobs.run_file import fitting_mesh
from flowpm_dist.observables.light_cone.map_files import read_convergence
from flowpm_dist.observables.light_cone.section import ConvergenceOptions, map_warnings
from flowpm_dist.observables.observations import file_problems
from flowpm_dist.observables.options import (
    OBSERVATIONS,
    NuisanceRanges,
    Observation,
    ObservationOptions,
    lacking,
)
from flowpm_dist.options import (
    A_SEED,
    AnyPath,
    Options,
    Pair,
    Problem,
    Seed,
    checked_python_name,
    count,
    rows,
)
from flowpm_dist.reconstruction.sampler_options import SamplerOptions, search_mesh
from flowpm_dist.simulate.options import ObservedSections, SimulatedRun
from flowpm_dist.simulation.cost import field_bytes, gradient_bytes, map_bytes, process_bytes
from flowpm_dist.simulation.options import RunOptions

Radius = Annotated[float, Field(ge=0)]
Inflation = Annotated[float, Field(ge=1)]
Stage = tuple[Radius, Inflation, Annotated[int, Field(ge=1)]]
Stages = Annotated[tuple[Stage, ...], Field(min_length=1), BeforeValidator(rows)]


class LikelihoodOptions(Options):
    """The likelihood of the data.

    Attributes:
        name: a custom likelihood; by default the likelihood of the observation's kind.
        error: the standard deviation of the model's error, as a fraction of a cell's density.
    """

    name: Annotated[str, AfterValidator(checked_python_name)] | None = Field(
        default=None, description='"package.module:object" of a custom likelihood'
    )
    error: float = Field(default=0.0, ge=0, description="a number of at least 0")

    @override
    def idle(self) -> dict[str, str]:
        reason = "the likelihood of observation.kind, not with a likelihood.name"
        return {} if self.name is None else {"error": reason}


class DataOptions(Options):
    """The data: a file, or a mock universe.

    Attributes:
        file: the file of the data.
        mock_seed: the seed of the white noise of a mock universe, instead of a file.
        noise_seed, add_noise: the seed of the noise of a mock, and whether it has noise.
    """

    file: AnyPath | None = Field(
        default=None,
        description="a .npy file, a zarr array or group, or an HDF5 file, shaped as box.grid",
    )
    mock_seed: Seed | None = Field(default=None, description=A_SEED)
    noise_seed: Seed = Field(default=0, description=A_SEED)
    add_noise: bool = Field(default=True, description="true or false")

    @override
    def problems(self) -> Iterator[Problem]:
        yield from self.exactly_one("mock_seed", "file")

    @override
    def idle(self) -> dict[str, str]:
        if self.mock_seed is None:
            return dict.fromkeys(("noise_seed", "add_noise"), "mock_seed")
        return {} if self.add_noise else {"noise_seed": "add_noise = true, not with false"}


class FittedPriors(FittedRanges, NuisanceRanges):
    """The parameters that are fitted besides the white noise, each with a uniform prior.

    Parameters of a custom likelihood have priors under their own names, too.
    """

    __pydantic_extra__: dict[str, Pair[float]] = Field(init=False)

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """The lowest and the highest value of each parameter that is fitted."""
        return self.model_dump(exclude_none=True)


class SearchOptions(Options):
    """The options of the search for the most probable initial conditions, see `Search`.

    Attributes:
        evaluations: the number of gradient evaluations of all default stages.
        stages: the radius [Mpc/h], the inflation of the noise and the evaluations of each stage.
        history: the number of steps that L-BFGS remembers.
        seed: the seed of the small white noise that the search begins with.
        tolerance: see `Search`.
        checkpoint_every: the number of iterations between checkpoints.
        keep: the number of checkpoints that are kept.
    """

    evaluations: int = count(200)
    stages: Stages | None = Field(
        default=None,
        description="a list of [radius in Mpc/h of at least 0, inflation of at least 1, "
        "evaluations of at least 1]",
    )
    history: int = count(10)
    seed: Seed = Field(default=0, description=A_SEED)
    tolerance: float = Field(default=0.5, ge=0, description="a number of at least 0")
    checkpoint_every: int = count(10)
    keep: int = count(2)

    @override
    def idle(self) -> dict[str, str]:
        reason = "default stages; each of search.stages has its own number of evaluations"
        return {} if self.stages is None else {"evaluations": reason}

    @override
    def problems(self) -> Iterator[Problem]:
        if self.stages is not None:
            radius, inflation, evaluations = self.stages[-1]
            if (radius, inflation) != (0, 1):
                reason = (
                    f"ends with [{radius:g}, {inflation:g}, {evaluations}]: the last stage must"
                )
                yield Problem("stages", f"{reason} be [0, 1, {evaluations}], the posterior itself")

    @property
    def total(self) -> int:
        """The largest number of gradients that the search takes, about."""
        return sum(n for *_, n in self.stages) if self.stages else self.evaluations


Kind = ObservationOptions | type[ObservationOptions]

TAKES: dict[str, Callable[[Kind], bool]] = {
    "likelihood.name": lambda kind: kind.layout == "cells",
    "likelihood.error": lambda kind: kind.likelihood == "Gaussian",
    "data.noise_seed": lambda kind: kind.layout == "cells",
    "data.add_noise": lambda kind: kind.likelihood != "Poisson",
}
"""Keys that only some kinds of observations take, each with its rule."""

# Memory and disk, in values of a cell.
OF_PAIR = 2
"""Values for each change that L-BFGS remembers."""
FIELDS = 9
"""Fields of the results, at most."""
OF_CHAIN = 3
"""Fields of a checkpoint of a chain."""


class ReconstructionOptions(ObservedSections, SimulatedRun):
    """The run file of a reconstruction: everything that defines it, except the ranks."""

    cosmology: CosmologyOptions
    observation: Observation
    data: DataOptions
    likelihood: LikelihoodOptions
    priors: FittedPriors
    search: SearchOptions
    sampler: SamplerOptions | None = None
    mesh: BatchedMeshOptions
    run: RunOptions
    lightcone: ConvergenceOptions | None = None

    may_differ = (
        "search.checkpoint_every",
        "search.keep",
        "run.halo",
        "evolution.keep_fields",
    )

    @property
    def initial_options(self) -> InitialOptions:
        """The initial conditions that the observation's structure needs."""
        return InitialOptions(lpt_order=self.observation.lpt_order)

    @property
    def is_mock(self) -> bool:
        """Whether the truth is known."""
        return self.data.mock_seed is not None

    @property
    def own_values(self) -> dict[str, Any]:
        """The values of a mock's parameters, without the parameters of a custom likelihood."""
        return {**self.cosmology.arguments(), **self.observation.own_values}

    @property
    def of_likelihood(self) -> tuple[str, ...]:
        """The fitted parameters that only a custom likelihood can have."""
        of_model = {*FittedPriors.model_fields, *(self.observation.value("bias") or {})}
        of_model.remove("noise_amplitude")
        return tuple(name for name in self.priors.ranges if name not in of_model)

    @override
    def idle(self) -> dict[str, str]:
        kinds, idle = OBSERVATIONS, {}
        for key, takes in TAKES.items():
            if not takes(self.observation):
                names = " or ".join(f'"{name}"' for name in kinds if takes(kinds[name]))
                idle[key] = f'observation.kind = {names}, not with "{self.observation.kind}"'
        return idle

    @override
    def problems(self) -> Iterator[Problem]:
        # [initial] is not in the file: the observation says what goes with its structure.
        yield from (each for each in super().problems() if not each.key.startswith("initial"))
        observation, steps = self.observation, self.evolution
        if not observation.has_gradient:
            reason = "halos have no gradient, which the search needs: take another kind, or train"
            yield self.problem("observation.kind", f"{reason} a network")
            return
        yield from observation.light_cone_problems(self.lightcone)
        uses_lpt = steps.integrator.uses_lpt
        yield from observation.step_problems(steps.first, steps.last, uses_lpt=uses_lpt)
        if observation.value("redshifts") is not None:
            reason = "a reconstruction uses only the universe at the end of the simulation: leave "
            yield self.problem("observation.redshifts", f"{reason}it out, or train a network")
        noise = type(observation).model_fields.get("sigma")
        if noise is not None and observation.value("sigma") is None:
            reason = f'is missing: with kind = "{observation.kind}" it must be {noise.description}'
            yield Problem("observation.sigma", reason)
        smoothed = [radius for radius, *_ in self.search.stages or () if radius]
        if smoothed and observation.layout == "maps":
            reason = f"has radius {smoothed[0]:g}: maps are not smoothed, so each radius must be 0"
            yield Problem("search.stages", reason)
        yield from self._prior_problems()
        yield from self._file_problems()
        shape = self.mesh.shape
        if self.sampler is None and shape and parse_mesh(shape, batched=True).get("replica", 1) > 1:
            reason = "only chains use a replica axis, and without [sampler] there are no chains: "
            yield self.problem("mesh.shape", f"{reason}give [sampler], or leave the axis out")

    def _prior_problems(self) -> Iterator[Problem]:
        """Checks that the model has the fitted parameters, and that priors hold a mock's values."""
        ranges, own_values = self.priors.ranges, self.observation.own_values
        nuisances = [name for name in ranges if name not in (*VARIABLE, *AMPLITUDES)]
        yield from self.observation.prior_problems(nuisances, self.likelihood.name)
        for name, (low, high) in ranges.items():
            value = own_values.get(name) if name in nuisances else getattr(self.cosmology, name)
            if value is None and name not in nuisances:
                other = next((n for n in AMPLITUDES if n != name), None)
                other = None if self.cosmology.power is not None else other
                other = other if name in AMPLITUDES else None
                yield Problem(f"priors.{name}", lacking("cosmology", name, instead_of=other))
            elif value is not None and self.is_mock and not low <= value <= high:
                reason = f"= {[low, high]}: must include the mock's own {name} = {value:g}"
                yield Problem(f"priors.{name}", reason)
            if name in affecting("transfer") and self.cosmology.transfer != "eisenstein-hu":
                code = self.cosmology.transfer.upper()
                reason = f"is given, but with {code} there is no gradient with respect to {name}"
                yield Problem(f"priors.{name}", f'{reason}: use transfer = "eisenstein-hu"')

    def _file_problems(self) -> Iterator[Problem]:
        """Checks that the files exist and that their headers fit; maps are read as a whole."""
        box, data = self.box, self.data.file
        files = {f"observation.{key}": path for key, path in self.observation.files.items()}
        yield from file_problems(files, box.grid, box.size)
        if data is not None and self.observation.layout == "cells":
            yield from file_problems({"data.file": data}, box.grid, box.size, self.evolution.last)
        elif data is not None and self.lightcone is not None:
            try:
                self.read_maps()
            except UserError as error:
                yield Problem("data.file", f": {error}")

    def read_maps(self) -> np.ndarray:
        """Returns the observed maps in the file of the data [source, x, y].

        Raises:
            UserError: they cannot be read, or do not fit.
        """
        cone, file = self.lightcone, self.data.file
        assert cone is not None and file is not None
        return read_convergence(file, cone)

    @property
    @override
    def warnings(self) -> tuple[str, ...]:
        if self.lightcone is None:
            return super().warnings
        of_maps = map_warnings(self.lightcone, self.cosmology, self.box.size, self.force_cells)
        return (*super().warnings, *of_maps)

    @property
    @override
    def files(self) -> dict[str, Path | None]:
        observed = {f"observation.{key}": path for key, path in self.observation.files.items()}
        tables = {} if self.lightcone is None else self.lightcone.tables
        data = {} if self.data.file is None else {"data.file": self.data.file}
        of_tables = {key: source.file for key, source in tables.items()}
        return {**super().files, **observed, **of_tables, **data}

    def checksums(self) -> dict[str, str]:
        """See `SimulatedRun.checksums`.

        Raises:
            UserError: a file cannot be read.
        """
        cone, checksums = self.lightcone, super().checksums()
        if cone is not None:
            checksums |= {key: table.checksum for key, table in cone.tables.items()}
        if cone is not None and self.data.file is not None:
            checksums["data.file"] = checksum(self.read_maps())
        for key, path in self.files.items():
            if key not in checksums and path is not None:
                checksums[key] = checksum(open_volume(path).array)
        return checksums

    def mesh_for(self, ranks: int, *, source: Path, shape: str | None = None) -> str:
        """See `SimulatedRun.mesh_for`.

        Chains can be spread over a replica axis, if all ranks together can hold the box of the
        search.
        """
        grid, force = self.box.grid, self.evolution
        factor, pyramid = force.mesh_factor, force.pyramid
        chains = 1 if self.sampler is None else self.sampler.chains

        def misfits_of(text: str) -> list[str]:
            axes = parse_mesh(text, batched=self.sampler is not None)
            wrong = misfits(axes, grid, ranks, chains, factor, pyramid)
            wrong = [line.replace("volumes of the batch", "chains") for line in wrong]
            search = parse_mesh(search_mesh(text))
            return wrong or misfits(search, grid, ranks, mesh_factor=factor, pyramid=pyramid)

        if shape or self.mesh.shape:
            return fitting_mesh(shape, self.mesh.shape, misfits_of, source)
        return super().mesh_for(ranks, source=source)

    @property
    @override
    def meshes(self) -> tuple[str, ...]:
        mesh = self.mesh.shape or ""
        return search_mesh(mesh), mesh

    def memory(self, grid: Grid, axes: Mapping[str, int]) -> int:
        """Returns the greatest memory of a rank, TensorFlow included [bytes].

        Args:
            grid: cells along each side, instead of the box's.
            axes: the mesh of ranks; the search splits the box over all of them.
        """
        chains = 0 if self.sampler is None else self.sampler.chains
        # A replica's chains go through the model together.
        together = math.ceil(chains / axes.get("replica", 1))
        gradient = functools.partial(
            gradient_bytes,
            self.observation.structure,
            self.counted_solver(grid),
            grid,
            steps=self.evolution.step_count,
            network=self.solver.state_correction is not None,
        )
        rows = axes.get("replica", 1) * axes.get("row", 1)  # as in `search_mesh`
        precision, search = self.run.precision, {**axes, "row": rows}
        remembered = field_bytes(OF_PAIR * self.search.history, grid, search, precision)
        searching, drawing = gradient(search) + remembered, together * gradient(axes)
        maps = 0
        if (cone := self.lightcone) is not None:
            painted = cone.painted_maps(self.cosmology, self.priors)
            maps = map_bytes(cone.pixels**2, precision, sources=painted)
        fields = max(searching, drawing) + max(1, together) * maps
        return process_bytes(axes, "reconstruct") + fields

    @property
    def disk(self) -> int:
        """The size of what a reconstruction writes, an upper estimate [bytes]."""
        field = math.prod(self.box.grid) * np.dtype(self.run.precision).itemsize
        # A new checkpoint is written before the oldest goes.
        fields = (self.search.keep + 1) * (OF_PAIR * self.search.history + 2) + FIELDS
        if self.sampler is not None:
            draws = self.sampler.draws // self.sampler.keep_every
            fields += self.sampler.chains * (3 * OF_CHAIN + 2 + draws)
        cone = self.lightcone  # with maps of data, reconstruction and truth
        maps = 0 if cone is None else 3 * len(cone.sources) * cone.pixels**2 * 8
        return fields * field + maps + FIGURES_AND_TABLES
