"""Options of the heads of posteriors."""

from __future__ import annotations

from pydantic import Field

from flowpm_dist.options import Options

HEADS = {
    "independent": "flowpm_dist.posteriors.transforms:independent_gaussian",
    "gaussian": "flowpm_dist.posteriors.transforms:Gaussian",
    "flow": "flowpm_dist.posteriors.transforms:SplineFlow",
}
"""Name -> "package.module:object" of (features, parameters, hidden width) -> transform.

It is on parameters mapped to the line. The simplest first: a Gaussian for each parameter, one of
full covariance, and a normalising flow.
"""


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
