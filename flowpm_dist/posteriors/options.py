"""Options of the heads of posteriors."""

from __future__ import annotations

from pydantic import Field

from flowpm_dist.options import Options

HEAD_NAMES = ("independent", "gaussian", "flow")
"""Of `HEADS`, known without TensorFlow: the simplest first."""


class HeadOptions(Options):
    """How a head is built and fitted.

    Members differ in their weights at first and in the order of their batches; their densities are
    averaged. There are as many for each penalty, and the penalty that does best on the validation
    set is kept.
    """

    hidden: int = Field(default=64, ge=1, description="a whole number of at least 1")
    members: int = Field(default=4, ge=1, description="a whole number of at least 1")
    penalties: tuple[float, ...] = Field(
        default=(0.1, 3.0, 30.0), min_length=1, description="a list of numbers, 0 or above"
    )
    batch: int = Field(default=64, ge=1, description="a whole number of at least 1")
    learning_rate: float = Field(default=1e-3, gt=0, description="a number above 0")
    epochs: int = Field(default=300, ge=1, description="a whole number of at least 1")
    patience: int = Field(default=20, ge=1, description="a whole number of at least 1")
    seed: int = Field(default=0, ge=0, description="a whole number, 0 or above")
