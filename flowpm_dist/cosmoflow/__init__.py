"""Cosmological parameters from density volumes, by a network trained where they are simulated.

A network of your own is a `Declaration` of layers, such as `Convolution` and `Dense`, that is added
to `DECLARATIONS` under its name before a run file that names it is read.
"""

from flowpm_dist.cosmoflow.planning.declarations import (
    DECLARATIONS,
    Convolution,
    Declaration,
    Dense,
    Dropout,
    Pool,
    Shrink,
)
from meshimpl.lazy import lazy_names

_HOMES = {
    "Adam": "network.optimisers",
    "Constant": "network.schedules",
    "Cosine": "network.schedules",
    "DataOptions": "planning.options",
    "InSituSource": "volumes.in_situ",
    "Momentum": "network.optimisers",
    "Network": "network.network",
    "NetworkOptions": "planning.options",
    "TrainingOutcome": "training.outcome",
    "Polynomial": "network.schedules",
    "Predictions": "scores.judging",
    "PriorOptions": "planning.options",
    "Priors": "volumes.priors",
    "RecordDataset": "volumes.records",
    "RecordWriter": "volumes.records",
    "StepDecay": "network.schedules",
    "Trainer": "training.training",
    "TrainingFolder": "planning.folder",
    "TrainingOptions": "planning.options",
    "TrainingPlan": "planning.plan",
    "TrainingRun": "training.run",
    "MapMaker": "volumes.maps",
    "UniverseMaker": "volumes.universes",
    "VolumeMaker": "volumes.universes",
}

__all__ = [
    "DECLARATIONS",
    "Convolution",
    "Declaration",
    "Dense",
    "Dropout",
    "Pool",
    "Shrink",
    *_HOMES,
]
__getattr__ = lazy_names(__name__, _HOMES)
