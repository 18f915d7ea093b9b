"""The names of the heads of posteriors, and the options of a fit.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from flowpm_dist.options import Options

HEADS: dict[str, Any] = {
    "independent": "flowpm_dist.posteriors.transforms:independent_gaussian",
    "gaussian": "flowpm_dist.posteriors.transforms:Gaussian",
    "flow": "flowpm_dist.posteriors.transforms:SplineFlow",
}
"""Name -> "package.module:object" of (features, parameters, hidden width) -> transform.

A transform works on unbounded parameters. In order: a Gaussian for each parameter, a Gaussian with
full covariance, and a normalising flow.
"""


class HeadOptions(Options):
    """How a head is built and fitted.

    Members differ in their initial weights and in the order of their batches. Their densities are
    averaged. As many members are fitted with each penalty, and the penalty with the lowest
    validation loss is kept.
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
