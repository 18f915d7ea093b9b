"""What must hold between the keys of a training's run file."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flowpm_dist.config import observation_rules, training_observation
from flowpm_dist.config.checks import ParsedRunFile, Problem, Rule, exactly_one
from flowpm_dist.config.dependent_keys import DependentKeys, idle_key_problems
from flowpm_dist.config.sections import ROUNDED
from flowpm_dist.config.simulation import evolution_rules, universe_rules
from flowpm_dist.cosmoflow.network.schedules import scaled_rate
from flowpm_dist.cosmoflow.planning.declarations import declaration
from flowpm_dist.cosmoflow.planning.options import (
    DERIVED,
    DataOptions,
    NetworkOptions,
    TrainingOptions,
)
from flowpm_dist.cosmoflow.volumes.arrays import SPLITS, ArraySet
from flowpm_dist.cosmoflow.volumes.draws import most_filled
from flowpm_dist.cosmoflow.volumes.parameter_table import TableError
from flowpm_dist.cosmoflow.volumes.public_files import samples_of_names
from flowpm_dist.cosmoflow.volumes.record_files import (
    DATASET,
    DatasetHeader,
    RecordError,
    public_splits,
    read_header,
)
from flowpm_dist.cosmology.ranges import RANGES, VARIABLE
from flowpm_dist.options import three

MUST_BE_KNOWN = ("Omega_m", "Omega_b", "h", "n_s")
"""Parameters that have no default: fixed, or with a prior."""

OF_SIMULATIONS = (
    "data.simulations", "data.reuse", "data.buffer", "data.fill", "data.balanced",
)  # fmt: skip
OF_SPLITS = ("data.validation", "data.test", "data.seed")
ON_DISK = ("files", "arrays")
OF_ARRAYS = ("volumes", "table", "dtype", "unit")

GOES_WITH = (
    *observation_rules.GOES_WITH,
    DependentKeys("network.precision", ("float32", "bfloat16"), ROUNDED, default_may_stand=True),
    DependentKeys("training.optimiser", ("sgd",), ("training.momentum",)),
    DependentKeys("training.decay", ("polynomial",), ("training.power",)),
    DependentKeys("training.decay", ("polynomial", "cosine"), ("training.end_rate",)),
    DependentKeys("training.decay", ("steps", "epochs"), ("training.milestones",)),
    DependentKeys("training.rate_rule", ("sqrt", "linear"), ("training.reference_batch",)),
    DependentKeys("data.source", ("simulate",), OF_SIMULATIONS),
    DependentKeys("data.source", ("simulate", "arrays"), OF_SPLITS),
    DependentKeys("priors.sampling", ("sobol",), ("data.balanced",)),
    DependentKeys("data.source", ON_DISK, ("training.epochs", "data.parameters")),
    DependentKeys("data.source", ("files",), ("data.folder", "data.staging")),
    DependentKeys("data.source", ("arrays",), tuple(f"data.{k}" for k in (*OF_ARRAYS, "columns"))),
)
"""Keys that have no meaning beside some values of others."""


def _from(file: ParsedRunFile) -> Any:
    return file.value("data", "source")


def _cubic(file: ParsedRunFile) -> Iterator[Problem]:
    if file.value("observation", "kind") == "convergence":
        return
    for key in ("grid", "size"):
        sides = file.value("box", key)
        if sides is not None and len(set(three(sides))) > 1:
            what = "a network's volumes are cubes: give one number, or three equal ones"
            yield Problem(f"box.{key}", f"= {list(sides)}: {what}")


def _fixed_or_prior(file: ParsedRunFile) -> Iterator[Problem]:
    """Each parameter has one value for all universes, or a prior."""
    if not {"cosmology", "priors"} <= set(file.given) or _from(file) in (None, *ON_DISK):
        return
    fixed, varied = file.given["cosmology"], file.given["priors"]
    if not set(varied) & set(VARIABLE):
        known = ", ".join(VARIABLE)
        yield Problem("priors", f"is empty: give [low, high] to at least one of {known}")
    for name in VARIABLE:
        if name != "sigma8" and name in fixed and name in varied:
            what = f"is given beside cosmology.{name}: either it is fixed, or it has a prior"
            yield Problem(f"priors.{name}", what)
        elif name in MUST_BE_KNOWN and name not in fixed and name not in varied:
            what = f"is missing: fix it at {RANGES[name].what}, or give it a range in [priors]"
            yield Problem(f"cosmology.{name}", what)
    amplitudes = ("cosmology", "sigma8"), ("cosmology", "A_s"), ("priors", "sigma8")
    yield from exactly_one(file, *amplitudes)


def _network_fits(file: ParsedRunFile) -> Iterator[Problem]:
    grid, name = file.value("box", "grid"), file.value("network", "name")
    if grid is None or name is None:
        return
    width = three(grid)[0]
    dataset = dataset_of(file)
    channels = dataset[0].channels if dataset else 1
    if wrong := _too_small(name, width, channels):
        fits = (n for n in range(width + 2, 4 * width + 256, 2) if not _too_small(name, n, 1))
        hint = f"; the next side that fits is {n}" if (n := next(fits, None)) else ""
        yield Problem("box.grid", f"= {file.given['box']['grid']}: {wrong}{hint}")


def _channels(file: ParsedRunFile) -> Iterator[Problem]:
    """Volumes in files have a channel for each redshift that [observation] tells."""
    asked, dataset = file.value("observation", "redshifts"), dataset_of(file)
    if asked is None or dataset is None or dataset[0].channels == len(asked):
        return
    what = f"= {file.given['observation']['redshifts']}: the volumes have {dataset[0].channels} "
    yield Problem("observation.redshifts", f"{what}channels, of {len(asked)} redshifts")


def _too_small(name: str, width: int, channels: int) -> str:
    """Why a network cannot take volumes of this width; empty when it can."""
    try:
        declaration(name).stages(width, channels, 1)
    except ValueError as error:
        return str(error)
    return ""


def _of_keras(file: ParsedRunFile) -> Iterator[Problem]:
    """What a Keras model decides by itself, or cannot have."""
    name = file.value("network", "name")
    if name is None or not declaration(name).is_keras:
        return
    for key in ("dropout", "gather_below"):
        if file.value("network", key) not in (None, NetworkOptions.model_fields[key].default):
            yield Problem(f"network.{key}", f"has no meaning for the Keras model {name}")
    if file.value("training", "calibrate") not in (None, DERIVED, 0):
        what = f"must be 0 or left out: the Keras model {name} scales its features itself"
        yield Problem("training.calibrate", what)


def _idle(file: ParsedRunFile) -> Iterator[Problem]:
    return idle_key_problems(file, GOES_WITH)


def _schedule(file: ParsedRunFile) -> Iterator[Problem]:
    def value(key: str) -> Any:
        return file.value("training", key)

    if value("decay") in ("steps", "epochs") and "milestones" not in file.given.get("training", {}):
        allowed = TrainingOptions.model_fields["milestones"].description
        what = f'is missing: with decay = "{value("decay")}" it must be {allowed}'
        yield Problem("training.milestones", what)
    by_epochs = value("decay") == "epochs"
    if by_epochs and "epochs" not in file.given.get("training", {}):
        what = 'is missing: with decay = "epochs" it must be a whole number of at least 1'
        yield Problem("training.epochs", what)
    total = value("epochs") if by_epochs else total_steps(file)
    if total is not None and value("warmup") is not None and value("warmup") >= total:
        unit = "epochs" if by_epochs else "steps"
        what = f"= {value('warmup')}: must be below the {total} {unit} of the training"
        yield Problem("training.warmup", what)
    keys = ("learning_rate", "end_rate", "batch", "reference_batch", "rate_rule")
    rate, end, batch, reference, rule = map(value, keys)
    if None in (rate, end, batch, reference, rule):
        return
    if end > (start := scaled_rate(rate, batch, reference, rule=rule)):
        yield Problem("training.end_rate", f"= {end}: must be at most the rate before, {start:g}")


def _length(file: ParsedRunFile) -> Iterator[Problem]:
    """What tells the length of the training."""
    if _from(file) in ON_DISK and "training" in file.given:
        yield from exactly_one(file, ("training", "steps"), ("training", "epochs"))
    elif _from(file) == "dummy" and "steps" not in file.given.get("training", {"steps": 0}):
        what = 'is missing: with data.source = "dummy" it must be a whole number of at least 1'
        yield Problem("training.steps", what)


def total_steps(file: ParsedRunFile) -> int | None:
    """Updates in the whole training; None where a key they follow from was not understood."""
    steps, batch = file.value("training", "steps"), file.value("training", "batch")
    if steps != DERIVED or batch is None:
        return None if steps == DERIVED else steps
    if _from(file) == "simulate":
        simulations, reuse = file.value("data", "simulations"), file.value("data", "reuse")
        return None if None in (simulations, reuse) else simulations * reuse // batch
    epochs, samples = file.value("training", "epochs"), samples_to_train_on(file)
    return None if None in (epochs, samples) else epochs * samples // batch


def samples_to_train_on(file: ParsedRunFile) -> int | None:
    """Volumes in files to train on; None where that is not known before they are indexed."""
    if (dataset := dataset_of(file)) is not None:
        return dataset[1].get("train", {}).get("samples", 0)
    folder = file.value("data", "folder")
    if _from(file) != "files" or folder is None:
        return None
    return samples_of_names(file.folder / folder, "train")


def _of_simulations(file: ParsedRunFile) -> Iterator[Problem]:
    """Numbers of simulations fit the batch, and each other."""
    batch = file.value("training", "batch")
    if _from(file) != "simulate" or batch is None:
        return

    def problem(key: str, what: str) -> Problem:
        default = "" if key in file.given["data"] else ", the default"
        return Problem(f"data.{key}", f"= {numbers[key]}{default}: must be {what}")

    keys = ("simulations", "buffer", "fill", "validation", "test")
    values = {key: file.value("data", key) for key in keys}
    numbers = {key: value for key, value in values.items() if value not in (None, DERIVED)}
    for key, number in numbers.items():
        if key in ("validation", "test"):
            if number < batch:
                yield problem(key, f"at least training.batch = {batch}")
        elif number % batch:
            below = number // batch * batch
            near = f"{below} or {below + batch}" if below else f"{batch}"
            yield problem(key, f"a multiple of training.batch = {batch}: {near}")
    simulations, fill = numbers.get("simulations"), numbers.get("fill", 0)
    if simulations is None:
        return
    buffer = numbers.get("buffer", simulations)
    if buffer > simulations:
        yield problem("buffer", f"at most data.simulations = {simulations}")
    elif fill > simulations:
        yield problem("fill", f"at most data.simulations = {simulations}")
    elif fill > (most := most_filled(simulations, buffer, batch)):
        what = f"at most {most} with data.buffer = {buffer}, where half makes room for new ones"
        yield problem("fill", what)


def dataset_of(file: ParsedRunFile) -> tuple[DatasetHeader, dict[str, dict[str, int]]] | None:
    """The dataset of a training on files; None where there is none of our own layout."""
    folder = file.value("data", "folder")
    try:
        if (arrays := arrays_of_file(file)) is not None:
            return arrays.header, {name: {"samples": len(arrays.rows(name))} for name in SPLITS}
        if _from(file) != "files" or folder is None:
            return None
        return read_header(file.folder / folder)
    except RecordError:
        return None


def arrays_of_file(file: ParsedRunFile) -> ArraySet | None:
    """Returns the arrays of a training; None if it is none on arrays, or keys are missing.

    Raises:
        RecordError: arrays that cannot serve.
    """
    data, grid = file.sections.get("data"), file.value("box", "grid")
    if _from(file) != "arrays" or grid is None or not isinstance(data, DataOptions):
        return None
    if any(getattr(data, key) is None for key in OF_ARRAYS):
        return None
    names = [name for name in file.given.get("priors", {}) if name in VARIABLE]
    priors = {name: file.value("priors", name) for name in names}
    if None in priors.values():
        return None
    return ArraySet(data, three(grid), file.value("box", "size"), priors)


def _of_arrays(file: ParsedRunFile) -> Iterator[Problem]:
    """Arrays and table are there, and are what the rest of the file says."""
    if _from(file) != "arrays" or "data" not in file.given:
        return
    for key in OF_ARRAYS:
        if key not in file.given["data"]:
            allowed = DataOptions.model_fields[key].description
            what = f'is missing: with source = "arrays" it must be {allowed}'
            yield Problem(f"data.{key}", what)
    try:
        if (arrays := arrays_of_file(file)) is not None:
            arrays.check_unit()
    except TableError as error:
        yield Problem("data.table", f"= '{file.given['data']['table']}': {error}")
        return
    except RecordError as error:
        yield Problem("data.volumes", f"= '{file.given['data']['volumes']}': {error}")
        return
    batch = file.value("training", "batch")
    if arrays is None or batch is None:
        return
    numbers = {split: len(arrays.rows(split)) for split in SPLITS}
    for split, number in numbers.items():
        if number < batch:
            told = ", ".join(f"{n} for {name}" for name, n in numbers.items())
            what = f"of {len(arrays.parameters)} volumes there are {told}: each must have at least "
            value = file.value("data", key := "validation" if split == "train" else split)
            yield Problem(f"data.{key}", f"= {value}: {what}training.batch = {batch}")
            return


def _sides(header: DatasetHeader) -> tuple[float, ...]:
    return three(header.box_size)


def _of_files(file: ParsedRunFile) -> Iterator[Problem]:
    """The dataset is there, and is what the rest of the file says."""
    if _from(file) != "files" or "data" not in file.given:
        return
    keys = file.given["data"]
    if "folder" not in keys:
        what = 'is missing: with source = "files" it must be the folder of a dataset'
        yield Problem("data.folder", what)
    if (named := file.value("data", "folder")) is None:
        return
    folder = file.folder / named
    if not folder.is_dir():
        yield Problem("data.folder", f"= '{keys['folder']}': there is no such folder")
    elif (folder / DATASET).exists():
        yield from _of_dataset(file, folder)
    else:
        if "parameters" not in keys:
            what = f"is missing: without a {DATASET}, files do not tell the names of parameters"
            yield Problem("data.parameters", what)
        yield from _of_public_files(file, folder)


def _of_public_files(file: ParsedRunFile, folder: Path) -> Iterator[Problem]:
    """Two folders with files, of parts of boxes."""
    told, there = file.given["data"]["folder"], public_splits(folder)
    for split in ("train", "validation"):
        if split not in there:
            has = f"it has record files in {', '.join(there)}" if there else "it has none at all"
            what = f"has neither a {DATASET} nor TFRecord files in a folder {split!r}"
            yield Problem("data.folder", f"= '{told}': {what}; {has}")
    if file.value("data", "augment") is True:
        what = "= true: public files hold parts of boxes, where a shift leaves a seam: give "
        yield Problem("data.augment", f'{what}"symmetries" or false')
    epochs = "epochs" in file.given.get("training", {})
    if epochs and "train" in there and samples_to_train_on(file) is None:
        what = "is given, but files hold several samples each, which are not counted: give steps"
        yield Problem("training.epochs", what)


def _of_dataset(file: ParsedRunFile, folder: Path) -> Iterator[Problem]:
    try:
        header, splits = read_header(folder)
    except RecordError as error:
        yield Problem("data.folder", f"= '{folder}': {error}")
        return
    grid, names = file.value("box", "grid"), file.value("data", "parameters")
    if grid is not None and tuple(three(grid)) != header.grid:
        what = f"the volumes in {folder} have {list(header.grid)} cells"
        yield Problem("box.grid", f"= {file.given['box']['grid']}: {what}")
    size = file.value("box", "size")
    if None not in (size, header.box_size) and not all(
        math.isclose(asked, told, rel_tol=1e-6)
        for asked, told in zip(three(size), _sides(header), strict=True)
    ):
        what = f"the volumes in {folder} have sides of {list(_sides(header))} Mpc/h: give that, or "
        yield Problem("box.size", f"= {file.given['box']['size']}: {what}leave it out")
    found = list(header.parameters)
    if names is not None and list(names) != found:
        yield Problem("data.parameters", f"= {list(names)}: those in {folder} are {found}")
    priors = [key for key in file.given.get("priors", {}) if key in VARIABLE]
    learned = [name for name in found if name in VARIABLE]  # others are those of [observation]
    if priors and set(priors) != set(learned):
        what = f"are of {', '.join(priors)}, the parameters in {folder} are {', '.join(learned)}"
        yield Problem("priors", f"{what}: give those, or leave [priors] out")
    for name in priors:
        limits, drawn = file.value("priors", name), (header.priors or {}).get(name)
        if limits is not None and drawn is not None and tuple(limits) != drawn:
            what = f"the volumes in {folder} were drawn from {list(drawn)}: give that, or leave"
            yield Problem(f"priors.{name}", f"= {list(limits)}: {what} [priors] out")
    if not priors and header.priors is None:
        what = f"is empty, and the dataset in {folder} tells no priors: give [low, high] for each"
        yield Problem("priors", f"{what} of {', '.join(found)}")
    batch = file.value("training", "batch")
    for split in ("train", "validation", "test"):
        if split == "test" and split not in splits:
            continue  # networks are judged on those of validation
        samples = splits.get(split, {}).get("samples", 0)
        if batch is not None and samples < batch:
            what = f"its split {split!r} has {samples} samples; must have at least training.batch"
            yield Problem("data.folder", f"= '{folder}': {what} = {batch}")


RULES: list[Rule] = [
    _cubic,
    _fixed_or_prior,
    universe_rules,
    evolution_rules,
    _network_fits,
    _channels,
    _of_keras,
    _idle,
    _schedule,
    _length,
    _of_simulations,
    _of_files,
    _of_arrays,
    *training_observation.RULES,
]
"""All that must hold between the keys of a training."""
