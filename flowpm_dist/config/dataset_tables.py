"""What a training's run file takes over from the dataset that it names.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowpm_dist.cosmoflow.volumes.record_files import DatasetHeader, RecordError, read_header
from flowpm_dist.observables.record import ATTRIBUTE, BARE, ObservationRecord
from flowpm_dist.options import three


def with_box_of_files(table: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """Returns the tables of a run file, with the dataset's grid and size where [box] has none.

    Args:
        table: sections and their keys, not checked yet.
        folder: of the run file.
    """
    data, box = table.get("data"), table.get("box", {})
    if not (isinstance(data, Mapping) and isinstance(box, Mapping)):
        return table
    if data.get("source") != "files" or not isinstance(named := data.get("folder"), str):
        return table
    try:
        header, _ = read_header(folder / Path(named).expanduser())
    except RecordError:
        return table
    size = {} if header.box_size is None else {"size": list(three(header.box_size))}
    return {**table, "box": {"grid": list(header.grid), **size, **box}}


def stated(header: DatasetHeader) -> ObservationRecord | None:
    """Returns what a dataset tells of its observation; None if it tells nothing.

    Raises:
        ObservationError: what it tells cannot be read.
    """
    told = header.attributes.get(ATTRIBUTE)
    if told is not None:
        return ObservationRecord.of_table(told, "dataset.json")
    return BARE if "run" in header.attributes else None  # of a version that knew nothing else


def with_observation_of_files(table: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """Returns the tables of a run file, with the dataset's observation where it gives none.

    Args:
        table: sections and their keys, not checked yet.
        folder: of the run file.

    Raises:
        ObservationError: what the dataset tells cannot be read.
    """
    data, priors = table.get("data"), table.get("priors", {})
    if "observation" in table or not (isinstance(data, Mapping) and isinstance(priors, Mapping)):
        return table
    if data.get("source") != "files" or not isinstance(named := data.get("folder"), str):
        return table
    try:
        record = stated(read_header(folder / Path(named).expanduser())[0])
    except RecordError:
        return table
    if record is None:
        return table
    found = record.table()
    found.pop("checksums", None)
    return {**table, "priors": {**found.pop("nuisances", {}), **priors}, "observation": found}
