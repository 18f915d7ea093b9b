"""The options of a model of the observed density: structure, line of sight and bias.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from typing_extensions import override

from flowpm_dist.io.errors import UserError
from flowpm_dist.options import (
    Options,
    Problem,
    checked_name,
    checked_python_name,
    in_unit,
    nearest,
)

EULERIAN = ("b",)
"""Bias of the evolved density."""

LAGRANGIAN = ("b1", "b2", "bs2")
"""Bias of second order in the initial density."""

BIASES = (*EULERIAN, *LAGRANGIAN)

A_BIAS = "a number from -20 to 20"

STRUCTURE_NAMES = ("linear", "1lpt", "2lpt", "pm")
"""Models of structure formation, in the order of their cost."""


class ObservationError(UserError):
    """An observation cannot be made as requested, or does not fit its use."""


Structure = Annotated[
    Any,
    AfterValidator(lambda name: checked_name(name, STRUCTURE_NAMES, "structure")),
    Field(description='"linear", "1lpt", "2lpt", "pm" or "package.module:object"'),
]
"""One of `STRUCTURE_NAMES`, "package.module:object" of a `StructureFormation`, or itself."""

LineOfSight = Literal["x", "y", "z"]
A_LINE_OF_SIGHT = 'the line of sight of redshift space: "x", "y" or "z"'
"""Description of a `LineOfSight`."""


def _without_units(values: Any) -> Any:
    """Returns a table of numbers whose quantities are plain numbers."""
    return {n: in_unit(n, v) for n, v in values.items()} if isinstance(values, dict) else values


BiasValue = Annotated[float, Field(ge=-20, le=20)]


class TracerOptions(Options):
    """The observed density of matter or of tracers, without noise.

    Attributes:
        structure: see `ObservationOptions`.
        redshift_space: the line of sight, along which peculiar velocities move the particles.
        bias_scheme: a custom `Bias`; by default the one with the names in `bias`.
        bias: the value of each bias parameter; None for matter.
    """

    structure: Structure = "pm"
    redshift_space: LineOfSight | None = Field(default=None, description=A_LINE_OF_SIGHT)
    bias_scheme: Annotated[Any, AfterValidator(checked_python_name)] | None = Field(
        default=None, description='"package.module:object" of a custom bias'
    )
    bias: Annotated[dict[str, BiasValue] | None, BeforeValidator(_without_units)] = Field(
        default=None,
        description="a table such as {b = 1.5} or {b1 = 0.5, b2 = 0.1, bs2 = 0.0}, each "
        f"{A_BIAS}",
    )

    @override
    def idle(self) -> dict[str, str]:
        return {} if self.bias is not None else {"bias_scheme": "bias"}

    @override
    def problems(self) -> Iterator[Problem]:
        bias, with_scheme = self.bias, self.bias_scheme is not None
        if bias is not None and not with_scheme:
            unknown = [name for name in bias if name not in BIASES]
            if unknown:
                hint = nearest(unknown[0], BIASES)
                yield self.problem("bias", f"there is no bias {unknown[0]!r}{hint}")
            elif not bias or ("b" in bias and len(bias) > 1):
                yield self.problem("bias", "either b alone, or some of b1, b2, bs2")
            elif "b" in bias and self.redshift_space is not None:
                yield self.problem(
                    "bias",
                    "b multiplies the observed density, so in redshift space also the "
                    "distortions by velocities, which tracers share with matter; give b1, which "
                    f"weighs particles, with b1 = b - 1 = {bias['b'] - 1:g} for the same bias of "
                    "large scales",
                )
        if self.structure == "linear":
            message = "linear theory on the grid moves no particles; take 1lpt, 2lpt or pm, or"
            if self.redshift_space is not None:
                yield self.problem("redshift_space", f"{message} leave it out")
            if bias and not with_scheme and "b" not in bias:
                yield self.problem("bias", f"{message} give b")

    @property
    def is_positive_without_noise(self) -> bool:
        """Whether the observed density is never below 0 before noise is added."""
        return self.structure in ("1lpt", "2lpt", "pm") and self.bias is None
