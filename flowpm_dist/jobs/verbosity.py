"""How much a job says: its results and errors alone, its progress, or everything."""

from __future__ import annotations

import os
from enum import StrEnum

VARIABLE = "FLOWPM_VERBOSITY"
"""Environment variable that tells the ranks."""


class Verbosity(StrEnum):
    """How much a job says."""

    QUIET = "quiet"
    NORMAL = "normal"
    VERBOSE = "verbose"

    def choose(self) -> None:
        """Let this process, and those that it starts, say so much."""
        os.environ[VARIABLE] = self
        if self is Verbosity.VERBOSE:
            # TensorFlow's warnings, which are left out otherwise.
            os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")


def verbosity() -> Verbosity:
    """Returns how much this job says."""
    try:
        return Verbosity(os.environ.get(VARIABLE, Verbosity.NORMAL))
    except ValueError:
        return Verbosity.NORMAL
