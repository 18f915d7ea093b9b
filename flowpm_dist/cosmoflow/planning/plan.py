"""The run file of `flowpm-dist train`, which is the plan of the training.

Nothing here imports TensorFlow, Horovod or MPI: a wrong file is refused within a second, under any
launcher, before work begins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from flowpm_dist.cosmoflow.planning.datasets import (
    Dataset,
    dataset_of,
    dataset_problems,
    samples_to_train_on,
    with_dataset,
)
from flowpm_dist.cosmoflow.planning.declarations import Declaration, declaration
from flowpm_dist.cosmoflow.planning.options import (
    DERIVED,
    SOURCES,
    AnyData,
    ArrayData,
    DummyData,
    FileData,
    NetworkOptions,
    PriorOptions,
    SimulatedData,
    TrainingOptions,
)
from flowpm_dist.cosmoflow.planning.presets import with_preset
from flowpm_dist.cosmoflow.volumes.draws import most_filled
from flowpm_dist.cosmology.options import REQUIRED, CosmologyOptions, PartialCosmologyOptions
from flowpm_dist.cosmology.parameters import AMPLITUDES, PARAMETERS, VARIABLE
from flowpm_dist.grid.options import BatchedMeshOptions, BoxOptions
from flowpm_dist.initial.options import InitialOptions
from flowpm_dist.observables.light_cone.section import ConvergenceOptions, map_warnings
from flowpm_dist.observables.observations import file_problems
from flowpm_dist.observables.options import Observation
from flowpm_dist.observables.record import ObservationRecord
from flowpm_dist.options import Problem, Variants
from flowpm_dist.options.base import flat_variants
from flowpm_dist.simulate.options import (
    WITHOUT_GRADIENTS,
    EvolutionOptions,
    ObservedSections,
    SimulatedRun,
)
from flowpm_dist.simulation.options import HaloOptions

WARMUP = 100
"""Steps of the warm-up, unless that is more than a tenth of all."""

OF_UNIVERSES = ("box", "cosmology", "priors", "initial", "evolution", "observation", "lightcone")
"""Sections that the simulations depend on."""

CALIBRATE = 64
"""Volumes that set the scale of the features of networks that are calibrated."""
FILL = 64
"""Simulations made before the first step, unless four batches are more."""

OF_DENSITIES = ("log1p", "log1p-counts")
"""Inputs of a network that do not allow values below 0."""
FEWEST_PIXELS = 6
"""Pixels along a side of maps whose statistics are measured, also at half the resolution."""
MAP_NETWORK = "flowpm_dist.cosmoflow.network.keras_network:map_convolutions"
"""A network of maps, see `map_convolutions`."""


class TrainingPlan(ObservedSections, SimulatedRun):
    """A training: its universes, its network, and how the network learns.

    The sections [cosmology] and [priors] share the parameters: each is fixed, or has a prior.
    `load` returns a complete plan, in which every option that follows from others has its value.
    """

    box: BoxOptions
    cosmology: PartialCosmologyOptions
    priors: PriorOptions
    initial: InitialOptions
    evolution: EvolutionOptions
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
        """See `RunFile.check`.

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
    def grid(self) -> tuple[int, int, int]:
        """Cells along each side of the box."""
        return self.box.grid

    @property
    def box_size(self) -> tuple[float, float, float]:
        """Sides of the box [Mpc/h]."""
        return self.box.size

    @property
    def precision(self) -> Literal["float32", "float64"]:
        """See `SimulatedRun`; a network in bfloat16 learns from simulations in float32."""
        return "float64" if self.network.precision == "float64" else "float32"

    @property
    def fixed_parameters(self) -> dict[str, Any]:
        """Arguments of `Cosmology` that are the same in all universes."""
        given = self.cosmology.model_dump(exclude_none=True).items()
        return {name: value for name, value in given if name not in self.priors.drawn}

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
        table = self.to_table()
        found: dict[str, Any] = {section: table.get(section) for section in OF_UNIVERSES}
        found |= {"data.seed": self.simulated.seed, "precision of the simulation": self.precision}
        return found

    # The network

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Cells along each side of the network's input: a volume, or maps as one layer."""
        if self.lightcone is None:
            return self.grid
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
        stored = self.data.parameters if isinstance(self.data, FileData | ArrayData) else None
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

    def _steps(self, dataset: Dataset | None) -> int | None:
        """Returns the number of updates; None if it is neither given nor known."""
        options, data = self.training, self.data
        if options.steps != DERIVED:
            return options.steps
        if isinstance(data, SimulatedData):
            return data.simulations * data.reuse // options.batch
        samples = samples_to_train_on(self, dataset)
        if options.epochs is None or samples is None:
            return None
        return options.epochs * samples // options.batch

    def is_due(self, number: int, every: int) -> bool:
        """Returns whether a repeated action, such as a validation, is due after a step.

        The action is due at the end of each epoch if learning rates follow epochs and `every` is
        the number of whole steps in an epoch, even if the batch does not divide the samples.

        Args:
            number: the number of steps made.
            every: the number of steps between two times.
        """
        steps, epochs = self.training.steps, self.training.epochs
        if self.training.by_epochs and epochs and every == max(1, steps // epochs):
            return number * epochs // steps != (number - 1) * epochs // steps
        return number % every == 0

    # The mesh, and the file

    def with_mesh(self, shape: str | None) -> Self:
        """Returns the same training on a mesh of another shape."""
        return self.model_copy(update={"mesh": BatchedMeshOptions(shape=shape)})

    def to_table(self) -> dict[str, Any]:
        """See `RunFile.to_table`; sections that a dataset replaces have only the given keys."""
        table = super().to_table()
        for name in self.priors.drawn:
            table.get("cosmology", {}).pop(name, None)
        if self.training.epochs is not None:
            table["training"].pop("steps", None)
        stored = isinstance(self.data, FileData | ArrayData)
        replaced = ("cosmology", "priors", "initial", "evolution") if stored else ()
        for section in () if self.simulates else (*replaced, "observation"):
            part = getattr(self, section)
            of_variants = [getattr(part, name) for name in flat_variants(type(part))]
            given = set().union(*(each.model_fields_set for each in (part, *of_variants)))
            table[section] = {k: v for k, v in table.get(section, {}).items() if k in given}
        # Each universe has a seed of its noise.
        table.get("lightcone", {}).get("shape_noise", {}).pop("seed", None)
        return {name: keys for name, keys in table.items() if keys}

    @property
    def warnings(self) -> tuple[str, ...]:
        """See `SimulatedRun.warnings`."""
        if self.lightcone is None:
            return super().warnings
        middle = CosmologyOptions.model_construct(**self.middle)
        of_maps = map_warnings(self.lightcone, middle, self.box_size, self.force_cells)
        return (*super().warnings, *of_maps)

    def _completed(self) -> Self:
        """Returns the plan with a value for every option that follows from others."""
        dataset, options, data = dataset_of(self), self.training, self.data
        steps = self._steps(dataset)
        assert steps is not None
        training: dict[str, Any] = {"steps": steps}
        if options.warmup == DERIVED:
            training["warmup"] = 0 if options.by_epochs else min(WARMUP, steps // 10)
        if options.calibrate == DERIVED:
            training["calibrate"] = CALIBRATE if self.declaration.calibrated else 0
        if options.by_epochs and options.epochs:
            keys = [k for k in ("validate_every", "checkpoint_every") if not options.is_given(k)]
            training |= dict.fromkeys(keys, max(1, steps // options.epochs))
        public = isinstance(data, FileData) and dataset is None
        changes: dict[str, Any] = {}
        if isinstance(data, SimulatedData):
            if data.buffer == DERIVED:
                changes["buffer"] = data.simulations
            buffer = changes.get("buffer", data.buffer)
            if data.fill == DERIVED:
                most = most_filled(data.simulations, buffer, options.batch)
                wanted = math.ceil(max(4 * options.batch, FILL) / options.batch) * options.batch
                changes["fill"] = min(most, wanted)
        elif isinstance(data, FileData | ArrayData) and data.parameters is None and dataset:
            changes["parameters"] = dataset.header.parameters
        if data.augment is None:
            parts = public or isinstance(data, ArrayData) or self.lightcone is not None
            fixed = bool(self.observation.files)
            changes["augment"] = not fixed and ("symmetries" if parts else True)
        network: dict[str, Any] = {}
        if self.network.input is None:
            network["input"] = "log1p-counts" if public else self.observation.network_input
        initial: dict[str, Any] = {}
        of_lpt = self.observation.structure in ("1lpt", "2lpt")
        if of_lpt and not self.is_given("initial.lpt_order"):
            initial["lpt_order"] = self.observation.lpt_order
        return self.model_copy(
            update={
                "training": options.model_copy(update=training),
                "data": data.model_copy(update=changes),
                "network": self.network.model_copy(update=network),
                "initial": self.initial.model_copy(update=initial),
            }
        )

    # Rules between the sections

    def idle(self) -> dict[str, str]:
        """See `Options.idle`."""
        found = dict(WITHOUT_GRADIENTS)
        if isinstance(self.data, SimulatedData) and self.priors.sampling != "sobol":
            found["data.balanced"] = 'priors.sampling = "sobol"'
        if not isinstance(self.data, FileData | ArrayData):
            found["training.epochs"] = 'data.source = "files" or "arrays"'
        return found

    def problems(self) -> Iterator[Problem]:
        """See `Options.problems`."""
        yield from super().problems()
        dataset = dataset_of(self)
        yield from self._of_the_box()
        yield from self._of_parameters()
        yield from self._of_the_network(dataset)
        yield from self._of_the_observation(dataset)
        yield from self._of_maps()
        yield from self._of_the_steps(dataset)
        if isinstance(self.data, SimulatedData):
            for problem in self.data.batch_problems(self.training.batch):
                yield Problem(f"data.{problem.key}", problem.what)
        yield from dataset_problems(self)

    def _of_the_box(self) -> Iterator[Problem]:
        cubes = self.observation.layout == "cells"
        for key in ("grid", "size"):
            if cubes and len(set(getattr(self.box, key))) > 1:
                what = "a network's volumes are cubes: give one number, or three equal ones"
                yield self.problem(f"box.{key}", what)

    def _of_parameters(self) -> Iterator[Problem]:
        """Checks that each parameter has either one value for all universes, or a prior."""
        if isinstance(self.data, FileData | ArrayData):
            return
        varied = self.priors.drawn
        if not set(varied) & set(VARIABLE):
            known = ", ".join(VARIABLE)
            yield Problem("priors", f"is empty: give [low, high] to at least one of {known}")
        for name in VARIABLE:
            fixed = self.is_given(f"cosmology.{name}")
            if name not in AMPLITUDES and fixed and name in varied:
                what = f"is given, and cosmology.{name}, too: fix it, or give it a prior"
                yield Problem(f"priors.{name}", what)
            elif name in REQUIRED and not fixed and name not in varied:
                what = f"is missing: fix it at {PARAMETERS[name].what}, or give it a range in "
                yield Problem(f"cosmology.{name}", f"{what}[priors]")
        fixed_or_varied = [f"cosmology.{name}" for name in reversed(AMPLITUDES)]
        fixed_or_varied += [f"priors.{name}" for name in AMPLITUDES if name in VARIABLE]
        yield from self.exactly_one(*fixed_or_varied)

    def _of_the_network(self, dataset: Dataset | None) -> Iterator[Problem]:
        channels = dataset.header.channels if dataset else 1
        of_cells, width = self.observation.layout == "cells", self.grid[0]
        if of_cells and (wrong := self._misfit(width, channels)):
            wider = range(width + 2, 4 * width + 256, 2)
            fits = next((n for n in wider if not self._misfit(n, 1)), None)
            hint = f"; the next side that fits is {fits}" if fits else ""
            yield self.problem("box.grid", f"{wrong}{hint}")
        if self.network.is_keras and self.training.calibrate not in (DERIVED, 0):
            name = self.network.name
            what = f"must be 0 or left out: the Keras model {name} scales its features itself"
            yield self.problem("training.calibrate", what)

    def _misfit(self, width: int, channels: int) -> str:
        """Returns why the network cannot take volumes of this width; empty where it can."""
        try:
            self.declaration.stages(width, channels, 1)
        except ValueError as error:
            return str(error)
        return ""

    def _of_the_observation(self, dataset: Dataset | None) -> Iterator[Problem]:
        observation, chosen = self.observation, self.network.input
        redshifts = observation.value("redshifts")
        if redshifts and dataset and dataset.header.channels != len(redshifts):
            what = f"the volumes have {dataset.header.channels} channels, but there are "
            yield self.problem("observation.redshifts", f"{what}{len(redshifts)} redshifts")
        yield from observation.prior_problems([n for n in self.priors.drawn if n not in VARIABLE])
        yield from observation.light_cone_problems(self.lightcone)
        if self.simulates:
            files = {f"observation.{key}": path for key, path in observation.files.items()}
            yield from file_problems(files, self.grid, self.box_size)
            steps = self.evolution
            uses_lpt = steps.integrator.uses_lpt
            yield from observation.step_problems(steps.first, steps.last, uses_lpt=uses_lpt)
        order = self.initial.lpt_order
        needs_order = self.simulates and observation.structure in ("1lpt", "2lpt")
        if needs_order and self.is_given("initial.lpt_order") and order != observation.lpt_order:
            structure = f'observation.structure = "{observation.structure}"'
            what = f"{structure} needs {observation.lpt_order}"
            yield self.problem("initial.lpt_order", what)
        if chosen is not None and (chosen == "convergence") != (observation.kind == "convergence"):
            what = f'does not go with observation.kind = "{observation.kind}"'
            yield self.problem("network.input", what)
        elif chosen in OF_DENSITIES and not observation.is_positive:
            what = 'the observed values may be below 0; give "asinh" or "density"'
            yield self.problem("network.input", what)
        if observation.files and self.data.augment:
            names = " and ".join(observation.files)
            what = f"would turn the {names} of [observation] with the volume: give false, or leave"
            yield Problem("data.augment", f"{what} it out")

    def _of_maps(self) -> Iterator[Problem]:
        """Checks the rules for maps: a Keras model learns from simulated maps without shifts."""
        cone = self.lightcone
        if self.observation.kind != "convergence":
            return
        if not self.simulates:
            what = 'maps are simulated while the network learns; must be "simulate"'
            yield self.problem("data.source", what)
        if not self.network.is_keras:
            what = f'works on volumes; for maps give a Keras model, such as "{MAP_NETWORK}"'
            yield self.problem("network.name", what)
        if cone is not None and cone.pixels < FEWEST_PIXELS:
            yield self.problem("lightcone.pixels", f"must be at least {FEWEST_PIXELS}")
        if cone is not None and cone.shape_noise and cone.shape_noise.is_given("seed"):
            what = "is given, but data.seed sets the noise of each universe: leave it out"
            yield Problem("lightcone.shape_noise.seed", what)
        if self.data.augment is True:
            what = 'maps have edges, where a shift leaves a seam: give "symmetries" or false'
            yield self.problem("data.augment", what)
        if self.cosmology.transfer == "camb":
            what = 'maps are simulated for many cosmologies at once: use "eisenstein-hu"'
            yield self.problem("cosmology.transfer", what)

    def _of_the_steps(self, dataset: Dataset | None) -> Iterator[Problem]:
        options = self.training
        if isinstance(self.data, FileData | ArrayData):
            if wrong := list(self.exactly_one("training.steps", "training.epochs")):
                yield from wrong
                return
        elif isinstance(self.data, DummyData) and options.steps == DERIVED:
            what = 'is missing: with data.source = "dummy" it must be a whole number of at least 1'
            yield Problem("training.steps", what)
        total = options.epochs if options.by_epochs else self._steps(dataset)
        if total is not None and options.warmup >= total:
            unit = "epochs" if options.by_epochs else "steps"
            what = f"must be below the {total} {unit} of the training"
            yield self.problem("training.warmup", what)


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Returns the names of the settings that differ between two nested tables."""
    found = []
    for key in dict.fromkeys([*one, *other]):
        a, b = one.get(key), other.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += [f"{key}.{name}" for name in differences(a, b)]
        elif a != b:
            found.append(key)
    return found
