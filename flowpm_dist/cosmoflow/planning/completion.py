"""Settings of a run file that come from elsewhere: a published training, or a dataset's header.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowpm_dist.cosmoflow.planning.data_options import ArrayData, FileData
from flowpm_dist.cosmoflow.planning.options import TrainingOptions
from flowpm_dist.cosmoflow.volumes.arrays import arrays_of
from flowpm_dist.cosmoflow.volumes.public_files import samples_of_names
from flowpm_dist.cosmoflow.volumes.record_files import (
    DATASET,
    NOTHING,
    DatasetHeader,
    RecordError,
    read_header,
)
from flowpm_dist.observables.record import ATTRIBUTE, ObservationRecord
from flowpm_dist.options import is_python_name, three
from flowpm_dist.options.base import flat_variants

if TYPE_CHECKING:
    from flowpm_dist.cosmoflow.planning.plan import TrainingPlan

PRESETS = {"mlperf": Path(__file__).with_name("mlperf.toml")}
"""The run files whose settings `training.preset` stands for, by name."""


def with_preset(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the tables of a run file with the settings of the preset that it names, if any.

    Keys of the file replace keys of the preset; `steps` also replaces `epochs`. If the file
    chooses, for example, another optimiser, the options of the preset's optimiser are dropped.
    Keys without a meaning for a Keras model or for simulations are dropped, too.

    Args:
        table: the sections of the run file, not checked yet.
    """
    training = table.get("training")
    path = PRESETS.get(str(training.get("preset"))) if isinstance(training, Mapping) else None
    if path is None:
        return table
    preset = tomllib.loads(path.read_text())
    if not all(isinstance(table.get(name, {}), Mapping) for name in preset):
        return table
    merged = {**table, **{name: {**keys, **table.get(name, {})} for name, keys in preset.items()}}
    file_keys, keys = table["training"], merged["training"]
    of_files = merged["data"].get("source") in ("files", "arrays")
    if "epochs" not in file_keys and ("steps" in file_keys or not of_files):
        keys.pop("epochs")
    if is_python_name(str(merged["network"]["name"])) and "dropout" not in table.get("network", {}):
        merged["network"].pop("dropout")
    for name, variants in flat_variants(TrainingOptions).items():
        named = keys.get(name, variants.default)
        chosen = variants.models.get(named) if isinstance(named, str) else None
        for key in variants.keys():
            if chosen is not None and key not in file_keys and key not in chosen.model_fields:
                keys.pop(key, None)
    return merged


def read_dataset(plan: TrainingPlan) -> tuple[DatasetHeader | None, int | None]:
    """Returns the header of the volumes on disk and the number of those to train on.

    Both are None for simulations. Public files have no header, and they are counted only for a
    training in epochs, and where no index of the files is needed for that.

    Raises:
        RecordError: the dataset cannot be read.
    """
    data = plan.data
    if isinstance(data, ArrayData):
        arrays = arrays_of(plan)
        return arrays.header, len(arrays.rows("train"))
    if not isinstance(data, FileData):
        return None, None
    if not (data.folder / DATASET).exists():
        return None, samples_of_names(data.folder, "train") if plan.training.epochs else None
    header, splits = read_header(data.folder)
    return header, splits.get("train", NOTHING)["samples"]


def dataset_of(plan: TrainingPlan) -> tuple[DatasetHeader | None, int | None]:
    """Returns the same as `read_dataset`, but None for a dataset that cannot be read."""
    with contextlib.suppress(RecordError):
        return read_dataset(plan)
    return None, None


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
    filled = dict(table)
    if isinstance(box, Mapping):
        size = {} if header.box_size is None else {"size": list(three(header.box_size))}
        filled["box"] = {"grid": list(header.grid), **size, **box}
    if "observation" in table or not isinstance(priors, Mapping):
        return filled
    if (record := recorded_observation(header)) is not None:
        keys = record.keys()
        filled["priors"] = {**keys.pop("nuisances", {}), **priors}
        filled["observation"] = keys
    return filled
