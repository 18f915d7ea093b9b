"""The options of a light cone. Nothing here imports TensorFlow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field

from flowpm_dist.grid.healpix import LARGEST, Healpix, is_nside
from flowpm_dist.options import A_SEED, Options, Seed, listed, rounded_down, rounded_up


def _power_of_two(nside: int) -> int:
    if not is_nside(nside):
        raise ValueError(f"a power of two up to {LARGEST} is needed")
    return nside


MOST_BOXES = 20_000
"""In a sphere that is seen."""
MOST_SHELLS = 1024
"""That are painted in one run."""


def boxes_within(end: float, size: Sequence[float]) -> float:
    """Returns how many times the volume of a box a sphere has.

    Args:
        end: radius [Mpc/h].
        size: of the box [Mpc/h].
    """
    return 4 * math.pi / 3 * end**3 / math.prod(size)


def plane_of_layers(layers: int, depth: float, width: float) -> np.ndarray:
    """Returns the number of the plane that each layer of particles is painted on, int32 [layers].

    The whole number of layers that is nearest to the width makes a plane. Less than half of it that
    is left over at the end joins the last one.

    Args:
        layers: their number.
        depth: of each [Mpc/h].
        width: of a plane [Mpc/h].
    """
    each = max(1, round(width / depth))
    planes = max(1, math.floor(layers / each + 0.5))
    return np.minimum(np.arange(layers) // each, planes - 1).astype(np.int32)


def _too_fine(asked: str, pixel: float, cell: float, enough: str) -> str:
    return (
        f"{asked}: half the way to the farthest sources, where lensing is strongest, a pixel is "
        f"{pixel:.3g} Mpc/h wide and a cell of the force mesh {cell:.3g}; {enough} all that there "
        "is"
    )


class DepthOptions(Options):
    """How far is seen.

    Attributes:
        z_max: redshift to which matter is seen.
    """

    z_max: Annotated[float, Field(gt=0)] = Field(description="a redshift above 0")

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


class LightConeOptions(DepthOptions):
    """A square field of the flat sky, and how far is seen in it.

    Attributes:
        field_of_view: side of the field [deg].
        pixels: along each side.
        tiles: seed of shifts, flips and orders of the copies of the box.
        repeat: whether the box may be repeated across the line of sight, where the field is wider.
    """

    field_of_view: Annotated[float, Field(gt=0, le=60)] = Field(
        description="an angle above 0 and not above 60 [deg]"
    )
    pixels: Annotated[int, Field(ge=2)] = Field(description="a whole number of at least 2")
    tiles: Seed = Field(default=0, description=A_SEED)
    repeat: bool = Field(default=False, description="true or false")

    @property
    def fov(self) -> float:
        """Side of the field [rad]."""
        return math.radians(self.field_of_view)

    def check_width(self, size: Sequence[float], end: float) -> None:
        """Check that the field is not wider than the box, where that may not be repeated.

        Args:
            size: of the box [Mpc/h].
            end: comoving distance of z_max [Mpc/h].

        Raises:
            ValueError: it is.
        """
        # Orders of the axes leave each side where it is or among equals: the third one is along
        # the line of sight.
        narrowest, wide = min(size[:2]), self.fov * end
        if wide > narrowest * (1 + 1e-9) and not self.repeat:
            raise ValueError(
                f"a field of {self.field_of_view:g} degrees is {wide:.4g} Mpc/h wide at z = "
                f"{self.z_max:g}, and the box {narrowest:g}: at most "
                f"{rounded_down(math.degrees(narrowest / end))} degrees fit; repeat = True repeats "
                "the box across the field"
            )

    def too_fine(self, half: float, cell: float) -> str | None:
        """Returns a warning of pixels that are finer than the force mesh; None if they are not.

        Args:
            half: half the distance of the farthest sources [Mpc/h].
            cell: the longest side of a cell of the force mesh [Mpc/h].
        """
        width = self.fov / self.pixels * half
        if width >= cell or self.pixels <= 4:
            return None
        enough = max(4, math.floor(self.fov * half / cell))
        return _too_fine(f"pixels = {self.pixels}", width, cell, f"{enough} pixels show")


class FullSkyOptions(DepthOptions):
    """The whole sky in HEALPix pixels, about an observer in the box.

    Attributes:
        nside: resolution of the maps, a power of two.
        observer: place in the box [Mpc/h]; by default next to its centre, midway between the
            undisplaced places of particles: one at the observer would fill the sky.
    """

    nside: Annotated[int, Field(ge=1), AfterValidator(_power_of_two)] = Field(
        description="a resolution of HEALPix"
    )
    observer: Annotated[tuple[float, float, float], BeforeValidator(listed)] | None = Field(
        default=None, description="[x, y, z] in Mpc/h"
    )

    def check_boxes(self, size: Sequence[float], end: float) -> None:
        """Check that the box is not repeated too often.

        Args:
            size: of the box [Mpc/h].
            end: comoving distance of z_max [Mpc/h].

        Raises:
            ValueError: it is.
        """
        boxes = boxes_within(end, size)
        if boxes > MOST_BOXES:
            larger = rounded_up((boxes / MOST_BOXES) ** (1 / 3))
            raise ValueError(
                f"z_max = {self.z_max:g}: the sphere that is seen holds the box {boxes:.0f} times, "
                f"and may {MOST_BOXES} times: take a box that is {larger} times as wide, or "
                "see less far"
            )

    def shell_count(self, width: float, end: float) -> int:
        """Returns the number of shells of about a width up to a distance.

        Args:
            width: of a shell [Mpc/h].
            end: comoving distance of z_max [Mpc/h].

        Raises:
            ValueError: there are too many.
        """
        shells = max(1, round(end / width))
        if shells > MOST_SHELLS:
            raise ValueError(
                f"width = {width:g}: {shells} shells up to {end:.6g} Mpc/h, at most {MOST_SHELLS} "
                f"are painted: a width of {rounded_up(end / MOST_SHELLS)} Mpc/h would do"
            )
        return shells

    def too_fine(self, half: float, cell: float) -> str | None:
        """Returns a warning as `LightConeOptions.too_fine` does."""
        width = math.sqrt(Healpix(self.nside).pixel_area) * half
        if width >= cell or self.nside == 1:
            return None
        enough = self.nside
        while enough > 1 and width * self.nside / enough < cell:
            enough //= 2
        return _too_fine(f"nside = {self.nside}", width, cell, f"nside = {enough} shows")

    def place(self, size: Sequence[float], grid: Sequence[int]) -> tuple[float, float, float]:
        """Returns the place of the observer in a box [Mpc/h].

        Args:
            size: sides of the box [Mpc/h].
            grid: particles along each side.

        Raises:
            ValueError: it lies outside.
        """
        middle = ((n // 2 + 0.5) * side / n for side, n in zip(size, grid, strict=True))
        x, y, z = middle if self.observer is None else self.observer
        if not all(0 <= at <= side for at, side in zip((x, y, z), size, strict=True)):
            sides = " x ".join(f"{side:g}" for side in size)
            raise ValueError(
                f"observer at {x:g}, {y:g}, {z:g} Mpc/h: must be in the box of {sides} Mpc/h"
            )
        return x, y, z
