"""The options of a forward model. Nothing here imports TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from flowpm_dist.options import Options, nearest

EULERIAN = ("b",)
"""Bias of the evolved density."""

LAGRANGIAN = ("b1", "b2", "bs2")
"""Bias of second order in the initial density."""

BIASES = (*EULERIAN, *LAGRANGIAN)

A_BIAS = "a number from -20 to 20"

Structure = Literal["linear", "1lpt", "2lpt", "pm"]
LineOfSight = Literal["x", "y", "z"]
BiasValue = Annotated[float, Field(ge=-20, le=20)]


def _one_scheme(bias: Mapping[str, float]) -> Mapping[str, float]:
    for name in bias:
        if name not in BIASES:
            raise ValueError(f"there is no bias {name!r}{nearest(name, BIASES)}")
    if not bias or ("b" in bias and len(bias) > 1):
        raise ValueError("either b alone, or some of b1, b2, bs2")
    return bias


class ForwardModelOptions(Options):
    """The options of the model from white noise to what is observed.

    Attributes:
        structure: what forms structure, by cost: "linear" (linear theory on the grid), "1lpt",
            "2lpt" or "pm" (the particle mesh).
        redshift_space: the line of sight, along which peculiar velocities move the particles.
        bias: the value of each bias parameter; None for matter.
    """

    structure: Structure = Field(default="pm", description='"linear", "1lpt", "2lpt" or "pm"')
    redshift_space: LineOfSight | None = Field(
        default=None, description='the line of sight of redshift space: "x", "y" or "z"'
    )
    bias: Annotated[dict[str, BiasValue], AfterValidator(_one_scheme)] | None = Field(
        default=None,
        description="a table such as {b = 1.5} or {b1 = 0.5, b2 = 0.1, bs2 = 0.0}, each "
        f"{A_BIAS}",
    )

    @property
    def lpt_order(self) -> Literal[1, 2]:
        """The order of LPT that the simulation must have."""
        return 1 if self.structure == "1lpt" else 2
