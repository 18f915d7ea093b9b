"""The plan of a reconstruction, as one object without TensorFlow."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowpm_dist.cosmology.options import CosmologyOptions
from flowpm_dist.grid.decomposition import parse_mesh
from flowpm_dist.io.checksums import checksum
from flowpm_dist.io.volume import open_volume
from flowpm_dist.jobs.light_cone import ConvergenceOptions
from flowpm_dist.observables.map_files import read_convergence
from flowpm_dist.observables.options import ObservationOptions
from flowpm_dist.reconstruction.options import (
    FittedOptions,
    LikelihoodOptions,
    ObservedOptions,
    SamplerOptions,
    SearchOptions,
)
from flowpm_dist.simulation.plan import SimulationPlan


@dataclass(frozen=True)
class ReconstructionPlan:
    """Everything that defines a reconstruction, except the ranks.

    Attributes:
        simulation: box, steps, LPT order, integrator, precision.
        cosmology: of the model, and of a mock universe.
        observation: from white noise to what is observed, and its noise.
        data: what is observed.
        likelihood: of the data.
        priors: the parameters that are fitted along.
        search: for the most probable initial conditions.
        sampler: chains after the search.
        lightcone: where maps of the convergence are observed; None for densities.
    """

    simulation: SimulationPlan
    cosmology: CosmologyOptions
    observation: ObservationOptions
    data: ObservedOptions
    likelihood: LikelihoodOptions = field(default_factory=LikelihoodOptions)
    priors: FittedOptions = field(default_factory=FittedOptions)
    search: SearchOptions = field(default_factory=SearchOptions)
    sampler: SamplerOptions = field(default_factory=SamplerOptions)
    lightcone: ConvergenceOptions | None = None

    @property
    def is_mock(self) -> bool:
        """Whether the truth is known."""
        return self.data.mock_seed is not None

    @property
    def a(self) -> float:
        """The scale factor of the data: the last of the evolution."""
        return self.simulation.a_stop

    @property
    def grid(self) -> tuple[int, int, int]:
        """The cells along each side."""
        return self.simulation.box.grid

    @property
    def own_values(self) -> dict[str, Any]:
        """The values of a mock's parameters; those of a user's own likelihood are not known."""
        return {**self.cosmology.model_dump(exclude_none=True), **self.observation.own_values}

    @property
    def files(self) -> dict[str, Path | None]:
        """Paths of the files that are read, by key of the run file."""
        seen = {f"observation.{key}": path for key, path in self.observation.files.items()}
        tables = {} if self.lightcone is None else self.lightcone.tables
        data = {} if self.data.file is None else {"data.file": self.data.file}
        return {**seen, **{key: source.file for key, source in tables.items()}, **data}

    def checksums(self) -> dict[str, str]:
        """Returns the checksums of the values in these files, by key.

        Raises:
            UserError: a file cannot be read.
        """
        cone, maps = self.lightcone, self.data.file
        found = {} if cone is None else {key: table.checksum for key, table in cone.tables.items()}
        if cone is not None and maps is not None:
            read = read_convergence(maps, len(cone.sources), cone.pixels, cone.field_of_view)
            found["data.file"] = checksum(read)
        for key, path in self.files.items():
            if key not in found and path is not None:
                found[key] = checksum(open_volume(path).array)
        return found

    @property
    def of_likelihood(self) -> tuple[str, ...]:
        """The parameters that are fitted along and that the likelihood alone can have."""
        of_model = {*FittedOptions.model_fields, *(self.observation.bias or {})}
        of_model.remove("noise_amplitude")
        return tuple(name for name in self.priors.ranges if name not in of_model)

    @property
    def evaluations(self) -> int:
        """The approximate upper limit of the number of gradients that the search takes."""
        stages = self.search.stages
        return sum(n for *_, n in stages) if stages else self.search.evaluations


def search_mesh(shape: str) -> str:
    """Returns the mesh of the search: ranks of the replica axis work on x, too.

    Args:
        shape: of the whole job, such as "replica:2,row:2".
    """
    axes = parse_mesh(shape, batched=True)
    row = axes.pop("replica", 1) * axes.pop("row", 1)
    return ",".join(f"{name}:{size}" for name, size in {"row": row, **axes}.items())
