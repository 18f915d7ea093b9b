"""The options of a light cone. Nothing here imports TensorFlow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from flowpm_dist.options import A_SEED, Options, Seed


class LightConeOptions(Options):
    """A square field of the flat sky, and how far is seen in it.

    Attributes:
        field_of_view: side of the field [deg].
        pixels: along each side.
        z_max: redshift to which matter is seen.
        tiles: seed of shifts, flips and orders of the copies of the box.
        repeat: whether the box may be repeated across the line of sight, where the field is wider.
    """

    field_of_view: Annotated[float, Field(gt=0, le=60)] = Field(
        description="an angle above 0 and not above 60 [deg]"
    )
    pixels: Annotated[int, Field(ge=2)] = Field(description="a whole number of at least 2")
    z_max: Annotated[float, Field(gt=0)] = Field(description="a redshift above 0")
    tiles: Seed = Field(default=0, description=A_SEED)
    repeat: bool = Field(default=False, description="true or false")

    @property
    def fov(self) -> float:
        """Side of the field [rad]."""
        return math.radians(self.field_of_view)

    def check_begin(self, a: float) -> None:
        """Check that a run begins before the light that is seen leaves.

        Args:
            a: scale factor of its first particles.

        Raises:
            ValueError: it does not.
        """
        if 1.0 / (1.0 + self.z_max) < a:
            raise ValueError(
                f"z_max = {self.z_max:g}: the run begins at z = {1 / a - 1:.4g}; begin it earlier, "
                "or see less far"
            )

    def check_width(self, size: Sequence[float], end: float) -> None:
        """Check that the field is not wider than the box, where that may not be repeated.

        Args:
            size: of the box [Mpc/h].
            end: comoving distance of z_max [Mpc/h].

        Raises:
            ValueError: it is.
        """
        narrowest, wide = min(size), self.fov * end
        if wide > narrowest * (1 + 1e-9) and not self.repeat:
            raise ValueError(
                f"a field of {self.field_of_view:g} degrees is {wide:.4g} Mpc/h wide at z = "
                f"{self.z_max:g}, and the box {narrowest:g}: at most "
                f"{math.degrees(narrowest / end):.3g} degrees fit; repeat = True repeats the box "
                "across the field"
            )
