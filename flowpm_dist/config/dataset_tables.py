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


def stated(header: DatasetHeader) -> ObservationRecord | None:
    """Returns what a dataset tells of its observation; None if it tells nothing.

    Raises:
        ObservationError: what it tells cannot be read.
    """
    told = header.attributes.get(ATTRIBUTE)
    if told is not None:
        return ObservationRecord.of_table(told, "dataset.json")
    return BARE if "run" in header.attributes else None  # of a version that knew nothing else


def with_dataset(table: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """Returns the tables of a run file, with what the dataset tells where they do not.

    That is the grid and the size of the box, and the observation with its priors.

    Args:
        table: sections and their keys, not checked yet.
        folder: of the run file.

    Raises:
        ObservationError: what the dataset tells of its observation cannot be read.
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
    asks = "observation" not in table and isinstance(priors, Mapping)
    if asks and (record := stated(header)) is not None:
        keys = record.keys()
        found["priors"] = {**keys.pop("nuisances", {}), **priors}
        found["observation"] = keys
    return found
