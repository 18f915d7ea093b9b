"""Corrections of runs, in the force or of the states that leave them: one scheme a file."""

from flowpm_dist.evolution.corrections.base import (
    CORRECTIONS,
    LPT_ONLY,
    SHIPPED,
    Correction,
    CorrectionFileError,
    CorrectionWarning,
    ForceCorrection,
    Range,
    StateCorrection,
    chosen_correction,
    file_of,
    force_cell,
    load_correction,
)
from flowpm_dist.evolution.corrections.potential_filter import PotentialFilter
from flowpm_dist.evolution.corrections.residual_network import ResidualNetwork

CORRECTIONS.update({kind.name: kind for kind in (PotentialFilter, ResidualNetwork)})

__all__ = [
    "CORRECTIONS",
    "LPT_ONLY",
    "SHIPPED",
    "Correction",
    "CorrectionFileError",
    "CorrectionWarning",
    "ForceCorrection",
    "PotentialFilter",
    "Range",
    "ResidualNetwork",
    "StateCorrection",
    "chosen_correction",
    "file_of",
    "force_cell",
    "load_correction",
]
