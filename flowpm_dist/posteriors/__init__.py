"""Posteriors of parameters given features of data: heads, fitted ones, and whether they are right.

A head of your own is a function (features, parameters, hidden) -> `Transform`, named as
"package.module:object". Nothing here knows where features come from.
"""

from meshimpl.lazy import lazy_names

_HOMES = {
    "Answers": "calibration",
    "Calibration": "calibration",
    "FeatureDensity": "novelty",
    "HEADS": "options",
    "HeadOptions": "options",
    "Posterior": "heads",
    "PriorMap": "mapping",
    "Summaries": "heads",
    "Transform": "transforms",
    "calibration_of": "calibration",
    "fit_posterior": "heads",
    "mixed": "calibration",
}

__all__ = [*_HOMES]
__getattr__ = lazy_names(__name__, _HOMES)
