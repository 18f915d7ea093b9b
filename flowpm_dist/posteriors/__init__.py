"""Posteriors of parameters given features of data: heads, fitted posteriors, and their tests.

A user's head is a function (features, parameters, hidden) -> `Transform`, named as
"package.module:object".
"""

from meshimpl.imports import lazy_names

_HOMES = {
    "Answers": "calibration",
    "Calibration": "calibration",
    "FeatureDensity": "novelty",
    "HEADS": "options",
    "HeadOptions": "options",
    "Posterior": "heads",
    "Summaries": "heads",
    "Transform": "transforms",
    "calibration_of": "calibration",
    "compressed": "compression",
    "fit_posterior": "heads",
    "measured": "features",
    "mixed": "calibration",
}

__all__ = [*_HOMES]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
