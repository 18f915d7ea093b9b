"""Corrections of the force: one scheme a file."""

from flowpm_dist.evolution.corrections.base import (
    CORRECTIONS,
    Correction,
    CorrectionChoice,
    CorrectionFileError,
    CorrectionWarning,
    Range,
    file_of,
    force_cell,
    load_correction,
)
from flowpm_dist.evolution.corrections.potential_filter import PotentialFilter

CORRECTIONS.update({kind.name: kind for kind in (PotentialFilter,)})

__all__ = [
    "CORRECTIONS",
    "Correction",
    "CorrectionChoice",
    "CorrectionFileError",
    "CorrectionWarning",
    "PotentialFilter",
    "Range",
    "file_of",
    "force_cell",
    "load_correction",
]
