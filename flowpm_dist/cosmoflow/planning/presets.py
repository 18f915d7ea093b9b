"""Settings of published trainings, which take the place of the defaults of run files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "mlperf": {
        "network": {
            "name": "mlperf",
            "loss": "l2",
            "input": "log1p-counts",
            "dropout": 0.5,
        },
        "training": {
            "batch": 64,
            "optimiser": "sgd",
            "momentum": 0.9,
            "learning_rate": 1e-3,
            "rate_rule": "linear",
            "reference_batch": 64,
            "warmup": 4,
            "decay": "epochs",
            "milestones": [[32, 0.25], [64, 0.125]],
            "epochs": 128,
            "calibrate": 0,
            "centre": False,
            "clip_norm": 0.0,
        },
        "data": {"augment": False},
    }
}
"""name -> section -> key -> value. `mlperf` is configs/cosmo.yaml of the reference of MLPerf HPC
(github.com/sparticlesteve/cosmoflow-benchmark, master): a network with dropout of one half, trained
by gradient descent on the mean squared error of parameters from -1 to 1."""


def with_preset(
    table: Mapping[str, Any], goes_with: Iterable[tuple[str, str, tuple[Any, ...]]]
) -> Mapping[str, Any]:
    """Returns the tables of a run file with the settings of the preset that it names, if any.

    Keys of the file go before those of the preset, and so do `steps` before `epochs`. Keys of the
    preset that have no meaning beside the file's are left out.

    Args:
        table: sections and their keys, not checked yet.
        goes_with: keys that have a meaning only beside some values of another, as "section.key":
            the key, that other, and those values.
    """
    training = table.get("training")
    if not isinstance(training, Mapping):
        return table
    name = training.get("preset")
    if not isinstance(name, str) or name not in PRESETS:
        return table
    merged = dict(table)
    for section, keys in PRESETS[name].items():
        own = table.get(section, {})
        if not isinstance(own, Mapping):
            return table
        merged[section] = {**keys, **own}
    if "steps" in training and "epochs" not in training:
        merged["training"].pop("epochs")
    for full, other, values in goes_with:
        (section, _, key), (of, _, beside) = full.partition("."), other.partition(".")
        from_preset = key in PRESETS[name].get(section, {}) and key not in table.get(section, {})
        given = merged.get(of, {}).get(beside)
        if from_preset and given is not None and given not in values:
            merged[section].pop(key, None)
    return merged
