"""The run file of `flowpm-dist train`, which is the plan of the training.

Nothing here imports TensorFlow, Horovod or MPI: a wrong file is refused within a second, under any
launcher, before work begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from typing_extensions import override

from flowpm_dist.cosmoflow.planning.checks import plan_problems
from flowpm_dist.cosmoflow.planning.completion import dataset_of, with_dataset, with_preset
from flowpm_dist.cosmoflow.planning.data_options import (
    SOURCES,
    AnyData,
    ArrayData,
    FileData,
    SimulatedData,
    StoredData,
)
from flowpm_dist.cosmoflow.planning.declarations import Declaration, declaration
from flowpm_dist.cosmoflow.planning.drawn_runs import EvolutionRanges, RunDraw
from flowpm_dist.cosmoflow.planning.memory import check_training_mesh
from flowpm_dist.cosmoflow.planning.options import (
    DERIVED,
    NetworkOptions,
    PriorOptions,
    TrainingOptions,
)
from flowpm_dist.cosmoflow.volumes.draws import most_filled
from flowpm_dist.cosmology.options import CosmologyOptions, PartialCosmologyOptions
from flowpm_dist.cosmology.parameters import VARIABLE
from flowpm_dist.grid.options import BatchedMeshOptions, BoxOptions
from flowpm_dist.initial.options import InitialOptions
from flowpm_dist.observables.light_cone.section import ConvergenceOptions, map_warnings
from flowpm_dist.observables.options import Observation
from flowpm_dist.observables.record import ObservationRecord
from flowpm_dist.options import Problem, Variants
from flowpm_dist.options.base import flat_variants
from flowpm_dist.simulate.options import (
    WITHOUT_GRADIENTS,
    ObservedSections,
    SimulatedRun,
)
from flowpm_dist.simulation.options import HaloOptions

Value = TypeVar("Value")
WARMUP = 100
"""Steps of the warm-up, unless that is more than a tenth of all."""

OF_UNIVERSES = ("box", "cosmology", "priors", "initial", "evolution", "observation", "lightcone")
"""Sections that the simulations depend on."""

CALIBRATE = 64
"""Volumes that set the scale of the features of networks that are calibrated."""
FILL = 64
"""Simulations made before the first step, unless four batches are more."""


class TrainingPlan(ObservedSections, SimulatedRun):
    """A training: its universes, its network, and how the network learns.

    The sections [cosmology] and [priors] share the parameters: each is fixed, or has a prior.
    `load` returns a complete plan, in which every option that follows from others has its value.
    """

    box: BoxOptions
    cosmology: PartialCosmologyOptions
    priors: PriorOptions
    initial: InitialOptions
    evolution: EvolutionRanges
    network: NetworkOptions
    training: TrainingOptions
    data: Annotated[AnyData, Variants("source", SOURCES, "simulate")]
    mesh: BatchedMeshOptions
    run: HaloOptions
    observation: Observation
    lightcone: ConvergenceOptions | None = None

    may_differ = (
        "training.validate_every", "training.checkpoint_every", "training.keep", "data.staging",
    )  # fmt: skip
    may_grow = ("training.steps", "training.epochs")

    @classmethod
    def check(cls, table: Mapping[str, Any], source: Path) -> Self:
        """Check the tables of a run file, and return the complete plan.

        Grid and size of the box may be left out where the dataset's header has them.
        """
        filled = with_dataset(with_preset(table), source.parent)
        return super().check(filled, source)._completed()

    # The simulation and what is observed of it

    @property
    def initial_options(self) -> InitialOptions:
        """The section [initial]."""
        return self.initial

    @property
    def precision(self) -> Literal["float32", "float64"]:
        """Precision of the simulations: it is float32 for a network in bfloat16."""
        return "float64" if self.network.precision == "float64" else "float32"

    @property
    def run_plans(self) -> list[list[Self]]:
        """The plan of each run of each table of evolution.drawn; this plan if there are none."""
        return [
            [self.model_copy(update={"evolution": run}) for run in draw.runs]
            for draw in self.evolution.drawn or ()
        ] or [[self]]

    def _tables(self) -> Iterator[tuple[RunDraw, list[Self]]]:
        """Returns each table of evolution.drawn with the plans of its runs."""
        return zip(self.evolution.drawn or (), self.run_plans, strict=False)

    @property
    def fixed_parameters(self) -> dict[str, Any]:
        """Arguments of `Cosmology` that are the same in all universes."""
        values = self.cosmology.arguments().items()
        return {name: value for name, value in values if name not in self.priors.drawn}

    @property
    def middle(self) -> dict[str, Any]:
        """Arguments of `Cosmology` of the universe in the middle of the priors."""
        drawn = self.priors.drawn.items()
        varied = {name: sum(ends) / 2 for name, ends in drawn if name in VARIABLE}
        return {**self.fixed_parameters, **varied}

    @property
    def record(self) -> ObservationRecord | None:
        """The observation of the universes; None if the files do not record one."""
        if not self.simulates and not self.observation.model_fields_set:
            return None
        drawn = {name: ends for name, ends in self.priors.drawn.items() if name not in VARIABLE}
        return ObservationRecord(self.observation, drawn)

    @property
    def simulates(self) -> bool:
        """Whether volumes are simulated while the network learns."""
        return isinstance(self.data, SimulatedData)

    @property
    def simulated(self) -> SimulatedData:
        """The options of the simulations, in a training that simulates."""
        assert isinstance(self.data, SimulatedData)
        return self.data

    @property
    def dataset_folder(self) -> Path | None:
        """The folder of the files to train on; None for simulations and for arrays."""
        return self.data.folder if isinstance(self.data, FileData) else None

    def simulations(self, split: str) -> int:
        """Returns how many universes are simulated for a split: whole batches of the training.

        Args:
            split: "train", "validation" or "test".
        """
        data, batch = self.simulated, self.training.batch
        count = data.simulations if split == "train" else getattr(data, split)
        return -(-count // batch) * batch

    def universes(self) -> dict[str, Any]:
        """Returns all settings that simulated volumes depend on."""
        return universes_of(self.to_table()) | {"precision of the simulation": self.precision}

    # The network

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Cells along each side of the network's input: a volume, or maps as one layer."""
        if self.lightcone is None:
            return self.box.grid
        return self.lightcone.pixels, self.lightcone.pixels, 1

    @property
    def width(self) -> int:
        """Cells along each side of a cubic volume, or pixels along each side of maps."""
        return self.input_shape[0]

    @property
    def cells(self) -> int:
        """Cells of the network's input."""
        return math.prod(self.input_shape)

    @property
    def channels(self) -> int:
        """The number of values in a cell: one for each redshift, or for each source of lensing.

        Files that record no observation may have more.
        """
        if self.lightcone is not None:
            return len(self.lightcone.sources)
        return 1 if self.record is None else self.observation.channels

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that the network finds, in the order of its outputs."""
        stored = self.data.parameters if isinstance(self.data, StoredData) else None
        return stored or tuple(self.priors.ranges)

    @property
    def outputs(self) -> int:
        """Number of the network's outputs."""
        return self.network.outputs_of(len(self.parameters))

    @property
    def declaration(self) -> Declaration:
        """The layers of the network."""
        return declaration(self.network.name)

    # The steps

    def steps_with(self, samples: int | None) -> int | None:
        """Returns the number of updates; None if it is neither given nor known.

        Args:
            samples: the number of volumes on disk to train on, if it is known.
        """
        options, data = self.training, self.data
        if options.steps != DERIVED:
            return options.steps
        if isinstance(data, SimulatedData):
            return data.simulations * data.reuse // options.batch
        if options.epochs is None or samples is None:
            return None
        return options.epochs * samples // options.batch

    def is_due(self, number: int, every: int) -> bool:
        """Returns whether a repeated action, such as a validation, is due after a step.

        If learning rates follow epochs and `every` is the number of whole steps in an epoch, the
        action is due at the end of each epoch. So it is even if the batch does not divide the
        samples.

        Args:
            number: the number of steps made.
            every: the number of steps between two times.
        """
        steps, epochs = self.training.steps, self.training.epochs
        if self.training.by_epochs and epochs and every == max(1, steps // epochs):
            return number * epochs // steps != (number - 1) * epochs // steps
        return number % every == 0

    # The file

    def to_table(self) -> dict[str, Any]:
        """Returns all sections; those that a dataset replaces have only the keys of the file."""
        table = super().to_table()
        for name in self.priors.drawn:
            table.get("cosmology", {}).pop(name, None)
        if self.training.epochs is not None:
            table["training"].pop("steps", None)
        stored = isinstance(self.data, StoredData)
        replaced = ("cosmology", "priors", "initial", "evolution") if stored else ()
        for section in () if self.simulates else (*replaced, "observation"):
            part = getattr(self, section)
            of_variants = [getattr(part, name) for name in flat_variants(type(part))]
            set_keys = set().union(*(each.model_fields_set for each in (part, *of_variants)))
            table[section] = {k: v for k, v in table.get(section, {}).items() if k in set_keys}
        # Each universe has a seed of its noise.
        table.get("lightcone", {}).get("shape_noise", {}).pop("seed", None)
        return {name: keys for name, keys in table.items() if keys}

    @property
    @override
    def files(self) -> dict[str, Path | None]:
        return dict(super().files) | self._of_tables(lambda plan: plan.files)

    @override
    def checksums(self) -> dict[str, str]:
        return super().checksums() | self._of_tables(lambda plan: plan.checksums())

    def _of_tables(self, of: Callable[[Self], Mapping[str, Value]]) -> dict[str, Value]:
        """Returns what `of` gives for the keys of each table of evolution.drawn."""
        return {
            in_table: value
            for number, (draw, plans) in enumerate(self._tables())
            for key, value in of(plans[0]).items()
            if (in_table := draw.key_in_table(key, number)) != key
        }

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user should know about the simulations and the maps before the work begins."""
        if self.evolution.drawn is not None:  # for the fewest and the most steps of each table
            return tuple(
                dict.fromkeys(
                    draw.key_in_table(text, number)
                    for number, (draw, plans) in enumerate(self._tables())
                    for plan in (plans[0], plans[-1])
                    for text in plan.warnings
                )
            )
        if self.lightcone is None:
            return super().warnings
        middle = CosmologyOptions.model_construct(**self.middle)
        of_maps = map_warnings(self.lightcone, middle, self.box.size, self.force_cells)
        return (*super().warnings, *of_maps)

    @override
    def mesh_for(self, ranks: int, *, source: Path, shape: str | None = None) -> str:
        return check_training_mesh(self, ranks, source=source, shape=shape)

    def _completed(self) -> Self:
        """Returns the plan with a value for every option that follows from others."""
        (header, samples), options, data = dataset_of(self), self.training, self.data
        steps = self.steps_with(samples)
        assert steps is not None
        public = isinstance(data, FileData) and header is None
        derived: dict[str, dict[str, Any]] = {"training": {"steps": steps}, "data": {}}
        if options.warmup == DERIVED:
            warmup = 0 if options.by_epochs else min(WARMUP, steps // 10)
            derived["training"]["warmup"] = warmup
        if options.calibrate == DERIVED:
            derived["training"]["calibrate"] = CALIBRATE if self.declaration.calibrated else 0
        if options.by_epochs and options.epochs:
            keys = [k for k in ("validate_every", "checkpoint_every") if not options.is_given(k)]
            derived["training"] |= dict.fromkeys(keys, max(1, steps // options.epochs))
        if isinstance(data, SimulatedData):
            buffer = data.simulations if data.buffer == DERIVED else data.buffer
            derived["data"]["buffer"] = buffer
            if data.fill == DERIVED:
                most = most_filled(data.simulations, buffer, options.batch)
                batches = math.ceil(max(4 * options.batch, FILL) / options.batch)
                derived["data"]["fill"] = min(most, batches * options.batch)
        elif isinstance(data, StoredData) and data.parameters is None and header:
            derived["data"]["parameters"] = header.parameters
        if data.augment is None:
            parts = public or isinstance(data, ArrayData) or self.lightcone is not None
            fixed = bool(self.observation.files)
            derived["data"]["augment"] = not fixed and ("symmetries" if parts else True)
        if self.network.input is None:
            network_input = "log1p-counts" if public else self.observation.network_input
            derived["network"] = {"input": network_input}
        of_lpt = self.observation.structure in ("1lpt", "2lpt")
        if of_lpt and not self.is_given("initial.lpt_order"):
            derived["initial"] = {"lpt_order": self.observation.lpt_order}
        sections = {
            section: getattr(self, section).model_copy(update=values)
            for section, values in derived.items()
        }
        return self.model_copy(update=sections)

    # Rules between the sections

    def idle(self) -> dict[str, str]:
        """Returns the keys without effect on this source of data, and what each goes with."""
        idle = dict(WITHOUT_GRADIENTS)
        if self.simulates and self.priors.sampling != "sobol":
            idle["data.balanced"] = 'priors.sampling = "sobol"'
        if self.observation.structure in ("linear", "1lpt", "2lpt"):
            idle["evolution.drawn"] = 'observation.structure = "pm"'
        if not isinstance(self.data, StoredData):
            idle["training.epochs"] = 'data.source = "files" or "arrays"'
        return idle

    def problems(self) -> Iterator[Problem]:
        """Yields the problems between sections, and those with the files that the plan names."""
        problems = [*super().problems(), *plan_problems(self)]
        yield from problems
        if "evolution.drawn" in self.idle():
            return
        for number, (draw, plans) in enumerate(self._tables()):
            for problem in plans[0].problems():
                if problem in problems:
                    continue
                key = draw.key_in_table(problem.key, number)
                where = "" if key != problem.key else f" (with evolution.drawn[{number}])"
                yield Problem(key, f"{problem.what}{where}")


def universes_of(table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings in the tables of a run file that simulated universes depend on."""
    sections = {section: table.get(section) for section in OF_UNIVERSES}
    return {**sections, "data.seed": table.get("data", {}).get("seed")}


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Returns the names of the settings that differ between two nested tables."""
    names = []
    for key in dict.fromkeys([*one, *other]):
        a, b = one.get(key), other.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            names += [f"{key}.{name}" for name in differences(a, b)]
        elif a != b:
            names.append(key)
    return names
