"""Cosmological parameters from density volumes, by a network trained where they are simulated.

To add a network, put a `Declaration` of layers, such as `Convolution` and `Dense`, into
`DECLARATIONS` under its name, before a run file with this name is read.
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
from meshimpl.imports import lazy_names

_HOMES = {
    "Adam": "network.optimisers",
    "CosineDecay": "planning.options",
    "DataOptions": "planning.data_options",
    "InSituSource": "volumes.sources",
    "MilestoneDecay": "planning.options",
    "Momentum": "network.optimisers",
    "Network": "network.network",
    "NetworkOptions": "planning.options",
    "TrainingOutcome": "training.session",
    "PolynomialDecay": "planning.options",
    "Predictions": "scores.judging",
    "PriorOptions": "planning.options",
    "Priors": "volumes.draws",
    "RecordDataset": "volumes.records",
    "RecordWriter": "volumes.record_writer",
    "Schedule": "network.optimisers",
    "Trainer": "training.trainer",
    "TrainingFolder": "planning.folder",
    "TrainingOptions": "planning.options",
    "TrainingPlan": "planning.plan",
    "TrainingSession": "training.session",
    "MapMaker": "volumes.universes",
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
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
