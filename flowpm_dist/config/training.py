"""The run file of `flowpm-dist train`.

Nothing here imports TensorFlow, Horovod or MPI: a wrong file is told within a second, on every
launcher, before any work begins.
"""

from __future__ import annotations

import math
import operator
from pathlib import Path
from typing import Any

from flowpm_dist.config.checks import (
    ConfigError,
    ParsedRunFile,
    Problem,
    check_sections,
    fitting_mesh,
    models_of,
    read_table,
    to_toml,
)
from flowpm_dist.config.sections import EvolutionSection
from flowpm_dist.config.training_rules import GOES_WITH, RULES, dataset_of, total_steps
from flowpm_dist.config.training_sections import (
    DERIVED,
    DataSection,
    NetworkSection,
    PriorsSection,
    TrainingSection,
)
from flowpm_dist.cosmoflow.declarations import DECLARATIONS, Declaration
from flowpm_dist.cosmology.options import PartialCosmologyOptions
from flowpm_dist.cosmology.ranges import VARIABLE
from flowpm_dist.evolution.options import HaloOptions
from flowpm_dist.grid.decomposition import default_mesh, misfits, parse_mesh
from flowpm_dist.grid.options import BatchedMeshOptions, BoxOptions
from flowpm_dist.initial.options import InitialOptions
from flowpm_dist.options import Options

WARMUP = 100
"""Steps of the warm-up, unless that is more than a tenth of all."""

FILL = 64
"""Simulations made before the first step, unless four batches are more."""


class TrainingConfig(Options):
    """A whole run file of a training, checked: see `load_training`."""

    box: BoxOptions
    cosmology: PartialCosmologyOptions
    priors: PriorsSection
    initial: InitialOptions
    evolution: EvolutionSection
    network: NetworkSection
    training: TrainingSection
    data: DataSection
    mesh: BatchedMeshOptions
    run: HaloOptions

    @property
    def width(self) -> int:
        """Cells along a side of a volume."""
        return self.box.grid[0]

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of what is to be found, in the order of the targets."""
        return self.data.parameters or tuple(self.priors.ranges)

    @property
    def outputs(self) -> int:
        """Of the network: a likelihood also has an error bar for each parameter."""
        return len(self.parameters) * (2 if self.network.loss == "likelihood" else 1)

    @property
    def declaration(self) -> Declaration:
        """The network itself."""
        return DECLARATIONS[self.network.name]

    @property
    def total_steps(self) -> int:
        """Updates in the whole training."""
        return self.training.steps

    @property
    def fixed_parameters(self) -> dict[str, Any]:
        """Arguments of `Cosmology` that are the same in all universes."""
        fixed = self.cosmology.model_dump(exclude_none=True)
        return {name: value for name, value in fixed.items() if name not in self.priors.ranges}

    def resolved(self) -> str:
        """The run as TOML with all defaults and full paths filled in; `load_training` reads it.

        Keys that have no meaning beside the others are left out.
        """
        idle: dict[str, list[str]] = {}
        idle["cosmology"] = [name for name in self.priors.ranges if name in VARIABLE]
        for name, (other, values) in GOES_WITH.items():
            section, _, key = name.partition(".")
            if operator.attrgetter(other)(self) not in values:
                idle.setdefault(section, []).append(key)
        if self.training.epochs is not None:
            idle["training"].append("steps")
        if self.data.source == "files":
            for section in ("cosmology", "priors", "initial", "evolution"):
                part = getattr(self, section)
                idle.setdefault(section, []).extend(set(part.model_dump()) - part.model_fields_set)
        return to_toml(self, idle)

    def with_mesh(self, shape: str) -> TrainingConfig:
        """The same training on a mesh of another shape."""
        return self.model_copy(update={"mesh": BatchedMeshOptions(shape=shape)})


MODELS = models_of(TrainingConfig)


def load_training(path: str | Path) -> TrainingConfig:
    """Read and check the run file of a training.

    Args:
        path: TOML file; paths inside it are relative to its folder.

    Raises:
        ConfigError: with every problem of the file.
    """
    source = Path(path)
    sections = check_sections(read_table(source), source, MODELS, RULES)
    return TrainingConfig.model_validate(_completed(ParsedRunFile(sections, {}, source.parent)))


def _completed(file: ParsedRunFile) -> dict[str, Options]:
    """The sections, with numbers for what follows from others."""
    steps, batch = total_steps(file), file.value("training", "batch")
    assert steps is not None
    training: dict[str, Any] = {"steps": steps}
    if file.value("training", "warmup") == DERIVED:
        training["warmup"] = min(WARMUP, steps // 10)
    data: dict[str, Any] = {}
    buffer, fill = file.value("data", "buffer"), file.value("data", "fill")
    if buffer == DERIVED:
        data["buffer"] = buffer = file.value("data", "simulations")
    if fill == DERIVED:
        data["fill"] = min(buffer, math.ceil(max(4 * batch, FILL) / batch) * batch)
    if file.value("data", "parameters") is None and (dataset := dataset_of(file)):
        data["parameters"] = dataset[0].parameters
    changes = {"training": training, "data": data}
    return {
        name: section.model_copy(update=changes.get(name))
        for name, section in file.sections.items()
    }


def check_training_mesh(
    config: TrainingConfig, ranks: int, *, source: Path, shape: str | None = None
) -> str:
    """The mesh shape to train on: the one asked for, or one chosen from the number of ranks.

    The one chosen has as many replicas as divide the batch, and splits volumes over the ranks that
    remain.

    Args:
        config: the run.
        ranks: number of ranks of the job.
        source: the run file, for messages.
        shape: from the command line; goes before the run file's.

    Returns:
        A text such as `"replica:2,row:2,col:1"`.

    Raises:
        ConfigError: not a mesh, its sizes do not multiply to `ranks`, an axis does not divide the
            batch or its side of the grid, or the network cannot be split.
    """
    grid, batch = config.box.grid, config.training.batch

    def misfits_of(text: str) -> list[str]:
        axes = parse_mesh(text, batched=True)
        wrong = misfits(axes, grid, ranks, batch)
        if axes.get("row", 1) * axes.get("col", 1) > 1 and config.declaration.edges == "valid":
            wrong.append(
                f"{config.network.name} has valid edges, so that its volumes cannot be split: use "
                f"sc18-periodic, or the mesh replica:{ranks}"
            )
        return wrong

    if shape or config.mesh.shape:
        return fitting_mesh(shape, config.mesh.shape, misfits_of, source)
    replicas = math.gcd(ranks, batch)
    if replicas == ranks:
        return f"replica:{ranks}"
    try:
        chosen = f"replica:{replicas},{default_mesh(ranks // replicas, grid)}"
        wrong = misfits_of(chosen)
    except ValueError as error:
        wrong = [str(error)]
    if wrong:
        advice = f"give a batch that {ranks} divides, such as {math.lcm(ranks, batch)}"
        what = f"= {batch}: has volumes for {replicas} of {ranks} ranks, and {wrong[0]}; {advice}"
        raise ConfigError(source, [Problem("training.batch", what)])
    return chosen


def buffer_bytes(config: TrainingConfig, shape: str) -> int:
    """Memory of the kept volumes on each rank [bytes]; 0 where none are kept.

    Args:
        config: the run.
        shape: of the mesh, one that `check_training_mesh` has let pass.
    """
    if config.data.source != "simulate":
        return 0
    ranks = math.prod(parse_mesh(shape, batched=True).values())
    value = 8 if config.network.precision == "float64" else 4
    return value * config.data.buffer * config.width**3 // ranks
