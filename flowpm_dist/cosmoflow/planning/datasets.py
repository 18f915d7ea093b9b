"""The dataset of a training on files or arrays, and the checks of its run file against it.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowpm_dist.cosmoflow.planning.options import ArrayData, FileData
from flowpm_dist.cosmoflow.volumes.arrays import TableError, arrays_of
from flowpm_dist.cosmoflow.volumes.public_files import samples_of_names
from flowpm_dist.cosmoflow.volumes.record_files import (
    DATASET,
    SPLITS,
    DatasetHeader,
    RecordError,
    public_splits,
    read_header,
    split_files,
)
from flowpm_dist.cosmology.parameters import VARIABLE
from flowpm_dist.observables.record import ATTRIBUTE, ObservationRecord
from flowpm_dist.options import Problem, three

if TYPE_CHECKING:
    from flowpm_dist.cosmoflow.planning.plan import TrainingPlan


@dataclass(frozen=True)
class Dataset:
    """The properties of a dataset that are known without reading its volumes.

    Attributes:
        header: the properties of all volumes.
        samples: the number of volumes of each split.
    """

    header: DatasetHeader
    samples: Mapping[str, int]


def read_dataset(plan: TrainingPlan) -> Dataset | None:
    """Returns a training's dataset; None for simulations and for public files.

    Raises:
        RecordError: the dataset cannot be read.
    """
    data = plan.data
    if isinstance(data, ArrayData):
        arrays = arrays_of(plan)
        return Dataset(arrays.header, {name: len(arrays.rows(name)) for name in SPLITS})
    if isinstance(data, FileData):
        header, splits = read_header(data.folder)
        return Dataset(header, {name: counts["samples"] for name, counts in splits.items()})
    return None


def dataset_of(plan: TrainingPlan) -> Dataset | None:
    """Returns the same as `read_dataset`, but None if the dataset cannot be read."""
    with contextlib.suppress(RecordError):
        return read_dataset(plan)
    return None


def samples_to_train_on(plan: TrainingPlan, dataset: Dataset | None) -> int | None:
    """Returns the number of volumes in files; None if only an index of the files would show it.

    Args:
        plan: the training.
        dataset: its dataset, see `dataset_of`.
    """
    if dataset is not None:
        return dataset.samples.get("train", 0)
    data = plan.data
    return samples_of_names(data.folder, "train") if isinstance(data, FileData) else None


def recorded_observation(header: DatasetHeader) -> ObservationRecord | None:
    """Returns the observation that a dataset's header records; None if it records none.

    Raises:
        ObservationError: the record cannot be read.
    """
    record = header.attributes.get(ATTRIBUTE)
    return None if record is None else ObservationRecord.of_table(record, DATASET)


def with_dataset(table: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """Returns the tables of a run file, completed from the dataset's header.

    The header may provide the grid and the size of the box, and the observation with its priors.

    Args:
        table: the sections of the run file, not checked yet.
        folder: the run file's folder.

    Raises:
        ObservationError: the dataset's observation cannot be read.
    """
    data, box, priors = (table.get(name, {}) for name in ("data", "box", "priors"))
    if not isinstance(data, Mapping) or data.get("source") != "files":
        return table
    if not isinstance(named := data.get("folder"), str):
        return table
    try:
        header, _ = read_header(folder / Path(named).expanduser())
    except RecordError:
        return table
    found = dict(table)
    if isinstance(box, Mapping):
        size = {} if header.box_size is None else {"size": list(three(header.box_size))}
        found["box"] = {"grid": list(header.grid), **size, **box}
    if "observation" in table or not isinstance(priors, Mapping):
        return found
    if (record := recorded_observation(header)) is not None:
        keys = record.keys()
        found["priors"] = {**keys.pop("nuisances", {}), **priors}
        found["observation"] = keys
    return found


def dataset_problems(plan: TrainingPlan) -> Iterator[Problem]:
    """Yields the problems of a run file with the files or arrays that it names."""
    data = plan.data
    if isinstance(data, ArrayData):
        yield from _of_arrays(plan, data)
    elif isinstance(data, FileData):
        if not data.folder.is_dir():
            yield plan.problem("data.folder", "there is no such folder")
        elif (data.folder / DATASET).exists():
            yield from _of_dataset(plan, data.folder)
        else:
            yield from _of_public_files(plan, data)


def _of_arrays(plan: TrainingPlan, data: ArrayData) -> Iterator[Problem]:
    try:
        arrays = arrays_of(plan)
        arrays.check_unit()
    except TableError as error:
        yield plan.problem("data.table", str(error))
        return
    except RecordError as error:
        yield plan.problem("data.volumes", str(error))
        return
    batch, numbers = plan.training.batch, {split: len(arrays.rows(split)) for split in SPLITS}
    for split, number in numbers.items():
        if number < batch:
            counts = ", ".join(f"{n} for {name}" for name, n in numbers.items())
            what = f"{len(arrays.parameters)} volumes are divided into {counts}: each must have at "
            key = "validation" if split == "train" else split
            yield plan.problem(f"data.{key}", f"{what}least training.batch = {batch}")
            return


def _of_public_files(plan: TrainingPlan, data: FileData) -> Iterator[Problem]:
    """Checks a run file with the public files, which are parts of boxes in a folder per split."""
    if data.parameters is None:
        what = f"is missing: without a {DATASET}, files do not name their parameters"
        yield Problem("data.parameters", what)
    there = public_splits(data.folder)
    if missing := [repr(split) for split in ("train", "validation") if split not in there]:
        has = f"it has record files in {', '.join(there)}" if there else "it has none at all"
        what = f"has neither a {DATASET} nor TFRecord files in a folder {' and '.join(missing)}"
        yield plan.problem("data.folder", f"{what}; {has}")
    if data.augment is True:
        what = 'public files hold parts of boxes, where a shift leaves a seam: give "symmetries" '
        yield plan.problem("data.augment", f"{what}or false")
    if plan.training.epochs and "train" in there and samples_to_train_on(plan, None) is None:
        what = "is given, but files hold several samples each, which are not counted: give steps"
        yield Problem("training.epochs", what)


def _of_dataset(plan: TrainingPlan, folder: Path) -> Iterator[Problem]:
    try:
        header, splits = read_header(folder)
    except RecordError as error:
        yield plan.problem("data.folder", str(error))
        return
    if plan.grid != header.grid:
        what = f"the volumes in {folder} have {list(header.grid)} cells"
        yield plan.problem("box.grid", what)
    sides = three(header.box_size)
    if header.box_size is not None and not all(
        math.isclose(side, wanted, rel_tol=1e-6)
        for side, wanted in zip(plan.box_size, sides, strict=True)
    ):
        what = f"the volumes in {folder} have sides of {list(sides)} Mpc/h: give that, or leave it"
        yield plan.problem("box.size", f"{what} out")
    names = plan.data.parameters if isinstance(plan.data, FileData) else None
    if names is not None and names != header.parameters:
        what = f"the parameters in {folder} are {list(header.parameters)}"
        yield plan.problem("data.parameters", what)
    yield from _of_priors(plan, folder, header)
    batch = plan.training.batch
    there = split_files(folder)
    for split in SPLITS:
        if split == "test" and split not in splits:
            continue  # networks are judged on the volumes of validation
        listed = splits.get(split, {}).get("files", 0) * math.prod(header.blocks)
        if (found := len(there.get(split, ()))) != listed:
            what = f"has {found} files of split {split!r}, {DATASET} lists {listed}: copy or write"
            yield plan.problem("data.folder", f"{what} the missing ones again, or remove others")
        samples = splits.get(split, {}).get("samples", 0)
        if samples < batch:
            what = f"its split {split!r} has {samples} samples; must have at least training.batch"
            yield plan.problem("data.folder", f"{what} = {batch}")
    yield from _of_observation(plan, folder, header)


def _of_priors(plan: TrainingPlan, folder: Path, header: DatasetHeader) -> Iterator[Problem]:
    """Checks that the run file's priors, if it has any, agree with the dataset's."""
    priors = {name: ends for name, ends in plan.priors.drawn.items() if name in VARIABLE}
    learned = [name for name in header.parameters if name in VARIABLE]  # others: [observation]
    if priors and set(priors) != set(learned):
        what = f"are of {', '.join(priors)}, the parameters in {folder} are {', '.join(learned)}"
        yield Problem("priors", f"{what}: give those, or leave [priors] out")
    for name, limits in priors.items():
        drawn = (header.priors or {}).get(name)
        if drawn is not None and limits != drawn:
            what = f"the volumes in {folder} were drawn from {list(drawn)}: give that, or leave"
            yield plan.problem(f"priors.{name}", f"{what} [priors] out")
    if not priors and header.priors is None:
        what = f"is empty, and the dataset in {folder} has no priors: give [low, high] for each"
        yield Problem("priors", f"{what} of {', '.join(header.parameters)}")


def _of_observation(plan: TrainingPlan, folder: Path, header: DatasetHeader) -> Iterator[Problem]:
    """Checks that [observation] agrees with the dataset's header, if both are given."""
    record = recorded_observation(header)
    if record is None or plan.record is None:
        return
    drawn = plan.record.nuisances
    differences = plan.record.differences(record)
    if differences:
        found = "; ".join(differences)
        what = f"differs from the dataset in {folder}: {found}; give the same, or leave it out"
        yield Problem("observation", what)
    for name, ends in drawn.items():
        there = record.nuisances.get(name)
        if not differences and there != ends:
            how = "all have the same value" if there is None else f"were drawn from {list(there)}"
            what = f"the volumes in {folder} {how}: give that, or leave it out"
            yield plan.problem(f"priors.{name}", what)
