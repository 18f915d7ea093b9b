"""The run file of `flowpm-dist train`: from its text to a `TrainingPlan`.

Nothing here imports TensorFlow, Horovod or MPI: a wrong file is refused within a second, under any
launcher, before work begins.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from flowpm_dist.config.checks import ParsedRunFile, check_sections, models_of, read_table, to_table
from flowpm_dist.config.dataset_tables import with_dataset
from flowpm_dist.config.dependent_keys import idle_keys
from flowpm_dist.config.light_cone import SECTION, pixel_warnings
from flowpm_dist.config.objects import simulation_plan
from flowpm_dist.config.sections import EvolutionSection
from flowpm_dist.config.settings import Settings
from flowpm_dist.config.training_observation import (
    input_of,
    lpt_order_of,
    observation_of,
    record_of,
)
from flowpm_dist.config.training_rules import (
    GOES_WITH,
    ON_DISK,
    RULES,
    dataset_of,
    total_steps,
)
from flowpm_dist.cosmoflow.planning.declarations import declaration
from flowpm_dist.cosmoflow.planning.options import (
    DERIVED,
    DataOptions,
    NetworkOptions,
    PriorOptions,
    TrainingOptions,
)
from flowpm_dist.cosmoflow.planning.plan import WARMUP, TrainingPlan
from flowpm_dist.cosmoflow.planning.presets import with_preset
from flowpm_dist.cosmoflow.volumes.draws import most_filled
from flowpm_dist.cosmology.options import CosmologyOptions, PartialCosmologyOptions
from flowpm_dist.cosmology.ranges import VARIABLE
from flowpm_dist.evolution.options import HaloOptions, RunOptions
from flowpm_dist.grid.options import BatchedMeshOptions, BoxOptions
from flowpm_dist.initial.options import InitialOptions
from flowpm_dist.jobs.light_cone import ConvergenceOptions
from flowpm_dist.observables.options import ObservationOptions
from flowpm_dist.options import Options

CALIBRATE = 64
"""Volumes that set the scale of the features of networks that are calibrated."""
FILL = 64
"""Simulations made before the first step, unless four batches are more."""


class TrainingRunFile(Options):
    """The sections of a training's run file, checked: see `load_training`."""

    box: BoxOptions
    cosmology: PartialCosmologyOptions
    priors: PriorOptions
    initial: InitialOptions
    evolution: EvolutionSection
    network: NetworkOptions
    training: TrainingOptions
    data: DataOptions
    mesh: BatchedMeshOptions
    run: HaloOptions
    observation: ObservationOptions
    lightcone: ConvergenceOptions | None = None

    def plan(self) -> TrainingPlan:
        """Returns the training as one object."""
        fixed = self.cosmology.model_dump(exclude_none=True)
        drawn = {k: v for k, v in self.priors.drawn.items() if k not in VARIABLE}
        double = self.network.precision == "float64"
        run = RunOptions(halo=self.run.halo, precision="float64" if double else "float32")
        return TrainingPlan(
            simulation=simulation_plan(self.box, self.initial, self.evolution, run),
            fixed_parameters={k: v for k, v in fixed.items() if k not in self.priors.drawn},
            priors=self.priors,
            network=self.network,
            training=self.training,
            data=self.data,
            mesh=self.mesh.shape,
            settings=self.settings(),
            observation=record_of(self.observation, drawn, simulates=self.simulates),
            lightcone=self.lightcone,
        )

    @property
    def simulates(self) -> bool:
        """Whether volumes are simulated."""
        return self.data.source == "simulate"

    def settings(self) -> dict[str, dict[str, Any]]:
        """Returns all keys with their defaults and full paths; `load_training` reads them back.

        Keys that have no meaning beside the others are left out.
        """
        idle, on_disk = idle_keys(self, GOES_WITH), self.data.source in ON_DISK
        idle["cosmology"] = [name for name in self.priors.drawn if name in VARIABLE]
        if self.training.epochs is not None:
            idle.setdefault("training", []).append("steps")
        untold = ("cosmology", "priors", "initial", "evolution") if on_disk else ()
        if not self.simulates:
            for section in (*untold, "observation"):
                part = getattr(self, section)
                idle.setdefault(section, []).extend(set(part.model_dump()) - part.model_fields_set)
        table = to_table(self, idle)
        table.get(SECTION, {}).get("shape_noise", {}).pop("seed", None)  # of each universe its own
        return table


MODELS = models_of(TrainingRunFile)


def load_training(path: str | Path, settings: Settings | None = None) -> TrainingPlan:
    """Returns the training that a run file describes, checked.

    Args:
        path: TOML file; paths inside it are relative to its folder. Of a training on files, grid
            and size of the box may be left out: the dataset tells them.
        settings: values in place of the file's own.

    Raises:
        ConfigError: with every problem of the file.
    """
    source = Path(path)
    dependent = [(key, each.other, each.values) for each in GOES_WITH for key in each.keys]
    table = with_preset(read_table(source, settings), dependent)
    table = with_dataset(table, source.parent)
    sections = check_sections(table, source, MODELS, RULES, optional=(SECTION,))
    completed = _completed(ParsedRunFile(sections, {}, source.parent))
    return TrainingRunFile.model_validate(completed).plan()


def warnings_of(plan: TrainingPlan) -> tuple[str, ...]:
    """Returns what a user should know before a training begins."""
    if plan.lightcone is None:
        return ()
    cosmology = CosmologyOptions(**plan.middle)
    cells = [plan.simulation.force.mesh_factor * n for n in plan.grid]
    return pixel_warnings(plan.lightcone, cosmology, plan.box_size, cells)


def _completed(file: ParsedRunFile) -> dict[str, Options]:
    """Returns the sections with numbers for what follows from others."""
    steps, batch = total_steps(file), file.value("training", "batch")
    assert steps is not None
    training: dict[str, Any] = {"steps": steps}
    by_epochs = file.value("training", "decay") == "epochs"
    if file.value("training", "warmup") == DERIVED:
        training["warmup"] = 0 if by_epochs else min(WARMUP, steps // 10)
    if file.value("training", "calibrate") == DERIVED:
        calibrated = declaration(file.value("network", "name")).calibrated
        training["calibrate"] = CALIBRATE if calibrated else 0
    if by_epochs:
        each = steps // file.value("training", "epochs")
        given = file.sections["training"].model_fields_set
        keys = ("validate_every", "checkpoint_every")
        training |= {key: max(1, each) for key in keys if key not in given}
    data: dict[str, Any] = {}
    buffer, fill = file.value("data", "buffer"), file.value("data", "fill")
    simulations = file.value("data", "simulations")
    if buffer == DERIVED:
        data["buffer"] = buffer = simulations
    if fill == DERIVED:
        most = most_filled(simulations, buffer, batch)
        data["fill"] = min(most, math.ceil(max(4 * batch, FILL) / batch) * batch)
    dataset, network = dataset_of(file), dict[str, Any]()
    if file.value("data", "parameters") is None and dataset:
        data["parameters"] = dataset[0].parameters
    public = file.value("data", "source") == "files" and dataset is None
    if file.value("data", "augment") is None:
        parts = public or file.value("data", "source") == "arrays" or SECTION in file.sections
        stays = bool(observation_of(file).files)
        data["augment"] = not stays and ("symmetries" if parts else True)
    if file.value("network", "input") is None:
        network["input"] = "log1p-counts" if public else input_of(observation_of(file))
    changes = {"training": training, "data": data, "network": network}
    changes |= {"initial": lpt_order_of(file)} if lpt_order_of(file) else {}
    return {
        name: section.model_copy(update=changes.get(name))
        for name, section in file.sections.items()
    }
