"""The rules between the sections of a training's run file, and with the files that it names.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flowpm_dist.cosmoflow.planning.completion import dataset_of, read_dataset, recorded_observation
from flowpm_dist.cosmoflow.planning.data_options import (
    ArrayData,
    DummyData,
    FileData,
    SimulatedData,
    StoredData,
)
from flowpm_dist.cosmoflow.planning.options import DERIVED
from flowpm_dist.cosmoflow.volumes.arrays import TableError, arrays_of
from flowpm_dist.cosmoflow.volumes.record_files import (
    DATASET,
    NOTHING,
    SPLITS,
    DatasetHeader,
    RecordError,
    listed_files,
    read_header,
    split_files,
    splits_of,
)
from flowpm_dist.cosmology.options import REQUIRED
from flowpm_dist.cosmology.parameters import AMPLITUDES, PARAMETERS, VARIABLE
from flowpm_dist.observables.observations import file_problems
from flowpm_dist.options import Problem, three

if TYPE_CHECKING:
    from flowpm_dist.cosmoflow.planning.plan import TrainingPlan

OF_DENSITIES = ("log1p", "log1p-counts")
"""Inputs of a network that do not allow values below 0."""
FEWEST_PIXELS = 6
"""Pixels along a side of maps whose statistics are measured, also at half the resolution."""
MAP_NETWORK = "flowpm_dist.cosmoflow.network.keras_network:map_convolutions"
"""A network of maps, see `map_convolutions`."""


def plan_problems(plan: TrainingPlan) -> Iterator[Problem]:
    """Yields the problems between the sections of a run file, then those with its files."""
    header, samples = dataset_of(plan)
    channels = header.channels if header else None
    yield from _of_parameters(plan)
    yield from _of_the_network(plan, channels or 1)
    yield from _of_the_observation(plan, channels)
    yield from _of_maps(plan)
    yield from _of_the_steps(plan, samples)
    if isinstance(plan.data, SimulatedData):
        for problem in plan.data.batch_problems(plan.training.batch):
            yield Problem(f"data.{problem.key}", problem.what)
    yield from _of_the_data(plan)


def _of_parameters(plan: TrainingPlan) -> Iterator[Problem]:
    """Checks that each parameter has either one value for all universes, or a prior."""
    if isinstance(plan.data, StoredData):
        return
    varied = plan.priors.drawn
    if not set(varied) & set(VARIABLE):
        known = ", ".join(VARIABLE)
        yield Problem("priors", f"is empty: give [low, high] to at least one of {known}")
    for name in VARIABLE:
        fixed = plan.is_given(f"cosmology.{name}")
        if name not in AMPLITUDES and fixed and name in varied:
            twice = f"is given, and cosmology.{name}, too: fix it, or give it a prior"
            yield Problem(f"priors.{name}", twice)
        elif name in REQUIRED and not fixed and name not in varied:
            missing = f"is missing: fix it at {PARAMETERS[name].range_text}, or give it a range in "
            yield Problem(f"cosmology.{name}", f"{missing}[priors]")
    fixed_or_varied = [f"cosmology.{name}" for name in reversed(AMPLITUDES)]
    fixed_or_varied += [f"priors.{name}" for name in AMPLITUDES if name in VARIABLE]
    if plan.cosmology.power is None or sum(map(plan.is_given, fixed_or_varied)) > 1:
        yield from plan.exactly_one(*fixed_or_varied)


def _of_the_network(plan: TrainingPlan, channels: int) -> Iterator[Problem]:
    """Checks that the network takes volumes of this shape and number of channels."""
    if plan.observation.layout == "cells":
        for key in ("grid", "size"):
            if len(set(getattr(plan.box, key))) > 1:
                cubes = "a network's volumes are cubes: give one number, or three equal ones"
                yield plan.problem(f"box.{key}", cubes)
        width = plan.box.grid[0]
        if misfit := plan.declaration.misfit(width, channels):
            wider = range(width + 2, 4 * width + 256, 2)
            fits = next((n for n in wider if not plan.declaration.misfit(n, 1)), None)
            hint = f"; the next side that fits is {fits}" if fits else ""
            yield plan.problem("box.grid", f"{misfit}{hint}")
    if plan.declaration.is_keras and plan.training.calibrate not in (DERIVED, 0):
        scales = f"the Keras model {plan.network.name} scales its features itself"
        yield plan.problem("training.calibrate", f"must be 0 or left out: {scales}")


def _of_the_observation(plan: TrainingPlan, channels: int | None) -> Iterator[Problem]:
    """Checks [observation] with the other sections.

    Args:
        plan: the plan.
        channels: the channels of volumes on disk, if they are known.
    """
    observation, chosen = plan.observation, plan.network.input
    redshifts = observation.value("redshifts")
    if redshifts and channels not in (None, len(redshifts)):
        counts = f"{channels} channels, but there are {len(redshifts)} redshifts"
        yield plan.problem("observation.redshifts", f"the volumes have {counts}")
    nuisances = {name: ends for name, ends in plan.priors.drawn.items() if name not in VARIABLE}
    yield from observation.prior_problems(nuisances)
    yield from observation.light_cone_problems(plan.lightcone)
    if plan.simulates:
        files = {f"observation.{key}": path for key, path in observation.files.items()}
        yield from file_problems(files, plan.box.grid, plan.box.size)
        if (finder := observation.value("halos")) is not None:
            yield from finder.grid_problems("observation.halos", plan.box.grid)
        steps, order = plan.evolution, observation.lpt_order
        uses_lpt = steps.integrator.uses_lpt
        yield from observation.step_problems(steps.first, steps.last, uses_lpt=uses_lpt)
        fixes_order = observation.structure in ("1lpt", "2lpt")
        if fixes_order and plan.is_given("initial.lpt_order") and plan.initial.lpt_order != order:
            structure = f'observation.structure = "{observation.structure}"'
            yield plan.problem("initial.lpt_order", f"{structure} needs {order}")
    if chosen is not None and (chosen == "convergence") != (observation.kind == "convergence"):
        misfit = f'does not go with observation.kind = "{observation.kind}"'
        yield plan.problem("network.input", misfit)
    elif chosen in OF_DENSITIES and not observation.is_positive:
        negative = 'the observed values may be below 0; give "asinh" or "density"'
        yield plan.problem("network.input", negative)
    if observation.files and plan.data.augment:
        turns = f"would turn the {' and '.join(observation.files)} of [observation] with the volume"
        yield Problem("data.augment", f"{turns}: give false, or leave it out")


def _of_maps(plan: TrainingPlan) -> Iterator[Problem]:
    """Checks the rules for maps: a Keras model learns from simulated maps without shifts."""
    cone = plan.lightcone
    if plan.observation.kind != "convergence":
        return
    if not plan.simulates:
        simulated = 'maps are simulated while the network learns; must be "simulate"'
        yield plan.problem("data.source", simulated)
    if not plan.declaration.is_keras:
        keras = f'works on volumes; for maps give a Keras model, such as "{MAP_NETWORK}"'
        yield plan.problem("network.name", keras)
    if cone is not None and cone.pixels < FEWEST_PIXELS:
        yield plan.problem("lightcone.pixels", f"must be at least {FEWEST_PIXELS}")
    if cone is not None and cone.shape_noise and cone.shape_noise.is_given("seed"):
        seeded = "is given, but data.seed sets the noise of each universe: leave it out"
        yield Problem("lightcone.shape_noise.seed", seeded)
    if plan.data.augment is True:
        seam = 'maps have edges, where a shift leaves a seam: give "symmetries" or false'
        yield plan.problem("data.augment", seam)
    if plan.cosmology.transfer != "eisenstein-hu":
        batched = 'maps are simulated for many cosmologies at once: use "eisenstein-hu"'
        yield plan.problem("cosmology.transfer", batched)


def _of_the_steps(plan: TrainingPlan, samples: int | None) -> Iterator[Problem]:
    options = plan.training
    if isinstance(plan.data, StoredData):
        if problems := list(plan.exactly_one("training.steps", "training.epochs")):
            yield from problems
            return
    elif isinstance(plan.data, DummyData) and options.steps == DERIVED:
        missing = 'is missing: with data.source = "dummy" it must be a whole number of at least 1'
        yield Problem("training.steps", missing)
    total = options.epochs if options.by_epochs else plan.steps_with(samples)
    if total is not None and options.warmup >= total:
        unit = "epochs" if options.by_epochs else "steps"
        yield plan.problem("training.warmup", f"must be below the {total} {unit} of the training")


def _of_the_data(plan: TrainingPlan) -> Iterator[Problem]:
    """Yields the problems of a run file with the files or arrays that it names."""
    data = plan.data
    try:
        if isinstance(data, ArrayData):
            yield from _of_arrays(plan)
        elif isinstance(data, FileData):
            if not data.folder.is_dir():
                yield plan.problem("data.folder", "there is no such folder")
            elif (data.folder / DATASET).exists():
                yield from _of_dataset(plan, data)
            else:
                yield from _of_public_files(plan, data)
    except TableError as error:
        yield plan.problem("data.table", str(error))
    except RecordError as error:
        key = "data.folder" if isinstance(data, FileData) else "data.volumes"
        yield plan.problem(key, str(error))


def _of_arrays(plan: TrainingPlan) -> Iterator[Problem]:
    arrays, batch = arrays_of(plan), plan.training.batch
    arrays.check_unit()
    numbers = {split: len(arrays.rows(split)) for split in SPLITS}
    small = next((split for split, number in numbers.items() if number < batch), None)
    if small is not None:
        counts = ", ".join(f"{number} for {split}" for split, number in numbers.items())
        divided = f"{len(arrays.parameters)} volumes are divided into {counts}"
        key = "validation" if small == "train" else small
        yield plan.problem(
            f"data.{key}", f"{divided}: each must have at least training.batch = {batch}"
        )


def _of_public_files(plan: TrainingPlan, data: FileData) -> Iterator[Problem]:
    """Checks a run file with the public files, which are parts of boxes in a folder per split."""
    if data.parameters is None:
        missing = f"is missing: without a {DATASET}, files do not name their parameters"
        yield Problem("data.parameters", missing)
    splits = splits_of(data.folder)
    if absent := [repr(split) for split in ("train", "validation") if split not in splits]:
        has = f"it has record files in {', '.join(splits)}" if splits else "it has none at all"
        folders = f"has neither a {DATASET} nor TFRecord files in a folder {' and '.join(absent)}"
        yield plan.problem("data.folder", f"{folders}; {has}")
    if data.augment is True:
        seam = 'public files hold parts of boxes, where a shift leaves a seam: give "symmetries" '
        yield plan.problem("data.augment", f"{seam}or false")
    if plan.training.epochs and "train" in splits and read_dataset(plan)[1] is None:
        several = "is given, but files hold several samples each, which are not counted: give steps"
        yield Problem("training.epochs", several)


def _of_dataset(plan: TrainingPlan, data: FileData) -> Iterator[Problem]:
    folder, batch = data.folder, plan.training.batch
    header, splits = read_header(folder)
    volumes, sides = f"the volumes in {folder}", header.box_size
    if plan.box.grid != header.grid:
        yield plan.problem("box.grid", f"{volumes} have {list(header.grid)} cells")
    if sides is not None and not np.allclose(plan.box.size, sides, rtol=1e-6, atol=0.0):
        stated = f"{volumes} have sides of {list(three(sides))} Mpc/h"
        yield plan.problem("box.size", f"{stated}: give that, or leave it out")
    if data.parameters not in (None, header.parameters):
        names = f"the parameters in {folder} are {list(header.parameters)}"
        yield plan.problem("data.parameters", names)
    yield from _of_priors(plan, folder, header)
    files = split_files(folder)
    for split in SPLITS:
        if split == "test" and split not in splits:
            continue  # networks are judged on the volumes of validation
        in_header = splits.get(split, NOTHING)
        count, samples = len(files.get(split, ())), in_header["samples"]
        listed = listed_files(header, in_header)
        if count != listed:
            lists = f"has {count} files of split {split!r}, {DATASET} lists {listed}"
            advice = "copy or write the missing ones again, or remove others"
            yield plan.problem("data.folder", f"{lists}: {advice}")
        if samples < batch:
            few = f"its split {split!r} has {samples} samples; must have at least training.batch"
            yield plan.problem("data.folder", f"{few} = {batch}")
    yield from _of_observation(plan, folder, header)


def _of_priors(plan: TrainingPlan, folder: Path, header: DatasetHeader) -> Iterator[Problem]:
    """Checks that the run file's priors, if it has any, agree with the dataset's."""
    priors = {name: ends for name, ends in plan.priors.drawn.items() if name in VARIABLE}
    learned = [name for name in header.parameters if name in VARIABLE]  # others: [observation]
    drawn = header.priors or {}
    if priors and set(priors) != set(learned):
        names = f"are of {', '.join(priors)}, the parameters in {folder} are {', '.join(learned)}"
        yield Problem("priors", f"{names}: give those, or leave [priors] out")
    for name, limits in priors.items():
        if drawn.get(name, limits) != limits:
            ranges = f"the volumes in {folder} were drawn from {list(drawn[name])}"
            yield plan.problem(f"priors.{name}", f"{ranges}: give that, or leave [priors] out")
    if not priors and header.priors is None:
        empty = f"is empty, and the dataset in {folder} has no priors: give [low, high] for each"
        yield Problem("priors", f"{empty} of {', '.join(header.parameters)}")


def _of_observation(plan: TrainingPlan, folder: Path, header: DatasetHeader) -> Iterator[Problem]:
    """Checks that [observation] agrees with the dataset's header, if both are given."""
    record = recorded_observation(header)
    if record is None or plan.record is None:
        return
    if differences := plan.record.differences(record):
        differs = f"differs from the dataset in {folder}: {'; '.join(differences)}"
        yield Problem("observation", f"{differs}; give the same, or leave it out")
        return
    for name, ends in plan.record.nuisances.items():
        drawn = record.nuisances.get(name)
        if drawn != ends:
            how = "all have the same value" if drawn is None else f"were drawn from {list(drawn)}"
            yield plan.problem(
                f"priors.{name}", f"the volumes in {folder} {how}: give that, or leave it out"
            )
