"""Cosmological parameters from density volumes, by a network trained where they are simulated."""

from meshimpl.lazy import lazy_names

_HOMES = {
    "Adam": "optimisers",
    "Constant": "schedules",
    "Cosine": "schedules",
    "Declaration": "declarations",
    "InSituSource": "in_situ",
    "Momentum": "optimisers",
    "Network": "network",
    "Polynomial": "schedules",
    "Predictions": "judging",
    "Priors": "priors",
    "RecordDataset": "records",
    "RecordWriter": "records",
    "StepDecay": "schedules",
    "Trainer": "training",
    "TrainingRun": "run",
    "UniverseMaker": "in_situ",
}

__all__ = sorted(_HOMES)
__getattr__ = lazy_names(__name__, _HOMES)
