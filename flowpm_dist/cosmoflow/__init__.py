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
    "Adam": "optimisers",
    "Constant": "schedules",
    "Cosine": "schedules",
    "DataOptions": "options",
    "InSituSource": "in_situ",
    "Momentum": "optimisers",
    "Network": "network",
    "NetworkOptions": "options",
    "TrainingOutcome": "outcome",
    "Polynomial": "schedules",
    "Predictions": "judging",
    "PriorOptions": "options",
    "Priors": "priors",
    "RecordDataset": "records",
    "RecordWriter": "records",
    "StepDecay": "schedules",
    "Trainer": "training",
    "TrainingFolder": "folder",
    "TrainingOptions": "options",
    "TrainingPlan": "plan",
    "TrainingRun": "run",
    "UniverseMaker": "in_situ",
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
