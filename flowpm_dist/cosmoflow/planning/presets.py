"""The settings of published trainings.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowpm_dist.cosmoflow.planning.options import TrainingOptions
from flowpm_dist.options import (
    is_python_name,
)
from flowpm_dist.options.base import flat_variants

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


def with_preset(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the tables of a run file with the settings of the preset that it names, if any.

    Keys of the file replace keys of the preset; `steps` also replaces `epochs`. If the file
    chooses, for example, another optimiser, the options of the preset's optimiser are dropped.
    Keys without a meaning for a Keras model or for simulations are dropped, too.

    Args:
        table: the sections of the run file, not checked yet.
    """
    training = table.get("training")
    preset = PRESETS.get(str(training.get("preset"))) if isinstance(training, Mapping) else None
    if preset is None or not all(isinstance(table.get(name, {}), Mapping) for name in preset):
        return table
    merged = {**table, **{name: {**keys, **table.get(name, {})} for name, keys in preset.items()}}
    own, keys = table["training"], merged["training"]
    of_files = merged["data"].get("source") in ("files", "arrays")
    if "epochs" not in own and ("steps" in own or not of_files):
        keys.pop("epochs")
    if is_python_name(str(merged["network"]["name"])) and "dropout" not in table.get("network", {}):
        merged["network"].pop("dropout")
    for name, variants in flat_variants(TrainingOptions).items():
        named = keys.get(name, variants.default)
        chosen = variants.models.get(named) if isinstance(named, str) else None
        for key in variants.keys():
            if chosen is not None and key not in own and key not in chosen.model_fields:
                keys.pop(key, None)
    return merged
