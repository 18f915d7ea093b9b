"""The options of light cones: the sky, and the depth. Nothing here imports TensorFlow."""

from __future__ import annotations

import abc
import math
from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field
from typing_extensions import override

from flowpm_dist.cosmology.steps import StepOptions
from flowpm_dist.grid.healpix import Healpix
from flowpm_dist.options import (
    A_SEED,
    Options,
    Problem,
    Seed,
    Unit,
    listed,
    rounded_down,
    rounded_up,
)

MOST_BOXES = 20_000
"""The largest number of boxes in the observed sphere."""
MOST_SHELLS = 1024
"""The largest number of shells that are painted in one run."""
WIDE_FIELD = 20.0
"""The side of a flat field from which on a warning is given [deg]."""
FINER = 1.25
"""Ratio of pixels to the number that would show as much, up to which there is no warning."""
FEWEST_PIXELS = 4
"""The smallest number of pixels along a side of a map whose spectrum is measured."""
PARTS = 4
"""Maps that a map of a source is painted in where neutrinos have a mass, see `all_matter`."""


def plane_of_layers(layers: int, depth: float, width: float) -> np.ndarray:
    """Returns the number of the plane that each layer of particles is painted on, int32 [layers].

    A plane is made of the whole number of layers that is nearest to the width. Less than half a
    plane that is left over at the end joins the last one.

    Args:
        layers: the number of layers.
        depth: depth of a layer [Mpc/h].
        width: width of a plane [Mpc/h].
    """
    each = max(1, round(width / depth))
    planes = max(1, math.floor(layers / each + 0.5))
    return np.minimum(np.arange(layers) // each, planes - 1).astype(np.int32)


class SkyOptions(Options, abc.ABC):
    """The observed part of the universe: the sky, and its depth.

    Attributes:
        z_max: redshift to which matter is observed.
    """

    PIXELS: ClassVar[str]
    """The option that gives the number of pixels."""

    z_max: Annotated[float, Field(gt=0), Unit("redshift")] = Field(description="a redshift above 0")

    @property
    def earliest(self) -> float:
        """The scale factor of z_max."""
        return 1.0 / (1.0 + self.z_max)

    @property
    @abc.abstractmethod
    def map_shape(self) -> tuple[int, ...]:
        """The shape of a map."""

    @property
    @abc.abstractmethod
    def pixel_area(self) -> float:
        """The solid angle of a pixel [sr]."""

    @abc.abstractmethod
    def volume(self, chi_max: float) -> float:
        """Returns the observed volume up to a distance [Mpc/h]: [(Mpc/h)^3]."""

    @abc.abstractmethod
    def box_problems(
        self, size: Sequence[float], chi_max: float, across: float | None = None
    ) -> Iterator[Problem]:
        """Yields the reasons why copies of a box do not fill the light cone.

        Args:
            size: sides of the box [Mpc/h].
            chi_max: comoving distance of z_max [Mpc/h].
            across: the largest f_K up to z_max [Mpc/h]; by default chi_max, as in flat space.
        """

    @abc.abstractmethod
    def enough_pixels(self, scale: float) -> int:
        """Returns the number of pixels, as the option gives it, whose side is 1 / scale times ours.

        Args:
            scale: below 1 for larger pixels.
        """

    def begin_problems(self, a: float) -> Iterator[Problem]:
        """Yields a problem if a run begins after the observed light has left.

        Args:
            a: scale factor of the run's first particles.
        """
        if self.earliest < a:
            begin = f"the run begins at z = {1 / a - 1:.4g}; start it earlier, or reduce z_max"
            yield Problem("z_max", f"= {self.z_max:g}: {begin}")

    def run_problems(
        self,
        steps: StepOptions,
        size: Sequence[float],
        chi_max: float | None,
        across: float | None = None,
    ) -> Iterator[Problem]:
        """Yields the problems of a run file's steps and box with the observed light.

        Args:
            steps: [evolution] of the run file.
            size: sides of the box [Mpc/h].
            chi_max: comoving distance of z_max, the largest that priors allow [Mpc/h]; None if
                the cosmology lacks a parameter, which is reported elsewhere.
            across: see `box_problems`.
        """
        if steps.last is not None and steps.last < 1:
            key = "edges" if steps.edges else "a_stop"
            message = f"ends the run at a = {steps.last:g}: a light cone to an observer today needs"
            yield Problem(f"evolution.{key}", f"{message} a = 1")
        of_box = () if chi_max is None else self.box_problems(size, chi_max, across)
        for problem in (*self.begin_problems(steps.first or 0.0), *of_box):
            yield Problem(f"lightcone.{problem.key}", problem.what)

    def wide_field_warning(self) -> str | None:
        """Returns a warning about a field that is too wide for a flat sky; None if it is not."""
        return None

    def fine_pixels_warning(self, half: float, cell: float) -> str | None:
        """Returns a warning about pixels much finer than the force mesh; None if they are not.

        Args:
            half: half the distance of the farthest sources [Mpc/h].
            cell: the longest side of a cell of the force mesh [Mpc/h].
        """
        pixels, width = getattr(self, self.PIXELS), math.sqrt(self.pixel_area) * half
        enough = self.enough_pixels(width / cell)
        if pixels <= FINER * enough:
            return None
        return (
            f"{self.PIXELS} = {pixels}: half the way to the farthest sources, where lensing is "
            f"strongest, a pixel is {width:.3g} Mpc/h wide and a cell of the force mesh "
            f"{cell:.3g}; {self.PIXELS} = {enough} would show as much"
        )


class FlatField(SkyOptions):
    """A square field of the flat sky, and its depth.

    Attributes:
        field_of_view: side of the field [deg].
        pixels: number of pixels along each side.
        tiles: seed of the shifts, flips and orders of the copies of the box.
        repeat: whether the box may be repeated across the line of sight, where the field is wider.
    """

    PIXELS = "pixels"

    field_of_view: Annotated[float, Field(gt=0, le=60), Unit("deg")] = Field(
        description="an angle above 0 and not above 60 [deg]"
    )
    pixels: Annotated[int, Field(ge=2)] = Field(description="a whole number of at least 2")
    tiles: Seed = Field(default=0, description=A_SEED)
    repeat: bool = Field(default=False, description="true or false")

    @property
    def fov(self) -> float:
        """Side of the field [rad]."""
        return math.radians(self.field_of_view)

    @property
    def map_shape(self) -> tuple[int, ...]:
        """The shape of a map: (x, y)."""
        return self.pixels, self.pixels

    @property
    def centres(self) -> list[float]:
        """The centres of the pixels along a side [deg]."""
        return [(n + 0.5) * self.field_of_view / self.pixels for n in range(self.pixels)]

    @property
    @override
    def pixel_area(self) -> float:
        return (self.fov / self.pixels) ** 2

    @override
    def volume(self, chi_max: float) -> float:
        return self.fov**2 * chi_max**3 / 3  # nearly, where space is curved

    @override
    def wide_field_warning(self) -> str | None:
        if self.field_of_view < WIDE_FIELD:
            return None
        off = math.tan(0.5 * self.fov) / (0.5 * self.fov) - 1
        return (
            f"field_of_view = {self.field_of_view:g}: the sky is taken as flat, which shifts what "
            f"is at the edge of the field by {100 * off:.2g} %; a full sky has no such error"
        )

    def most_across(self, size: Sequence[float]) -> float:
        """Returns the largest f_K [Mpc/h] at which a box is as wide as the field, or may repeat.

        Args:
            size: sides of the box [Mpc/h].
        """
        # Orders of the axes leave each side where it is or among equals: the third one is along
        # the line of sight.
        return math.inf if self.repeat else min(size[:2]) * (1 + 1e-9) / self.fov

    def box_problems(
        self, size: Sequence[float], chi_max: float, across: float | None = None
    ) -> Iterator[Problem]:
        """Yields a problem if the field is wider than the box and must not repeat it."""
        across = chi_max if across is None else across
        narrowest, wide = min(size[:2]), self.fov * across
        if across > self.most_across(size):
            fits = rounded_down(math.degrees(narrowest / across))
            yield self.problem(
                "field_of_view",
                f"the field is {wide:.4g} Mpc/h wide at z = {self.z_max:g}, and the box "
                f"{narrowest:g}: at most {fits} degrees fit; repeat = true repeats the box across "
                "the field",
            )

    @override
    def enough_pixels(self, scale: float) -> int:
        return max(FEWEST_PIXELS, math.floor(self.pixels * scale))


class FullSky(SkyOptions):
    """The whole sky in HEALPix pixels, about an observer in the box.

    Attributes:
        nside: resolution of the maps, a power of two.
        observer: place in the box [Mpc/h]; by default next to its centre, midway between the
            undisplaced places of particles: one at the observer would fill the sky.
    """

    PIXELS = "nside"

    nside: Annotated[int, Field(ge=1), AfterValidator(lambda nside: Healpix(nside).nside)] = Field(
        description="a resolution of HEALPix"
    )
    observer: Annotated[
        Annotated[tuple[float, float, float], BeforeValidator(listed)] | None, Unit("Mpc/h")
    ] = Field(default=None, description="[x, y, z] in Mpc/h")

    @property
    def map_shape(self) -> tuple[int, ...]:
        """The shape of a map: (pixel,)."""
        return (Healpix(self.nside).pixels,)

    @property
    @override
    def pixel_area(self) -> float:
        return Healpix(self.nside).pixel_area

    @override
    def volume(self, chi_max: float) -> float:
        return 4 * math.pi / 3 * chi_max**3

    def box_problems(
        self, size: Sequence[float], chi_max: float, across: float | None = None
    ) -> Iterator[Problem]:
        """Yields problems: an observer outside the box, or too many copies of the box."""
        x, y, z = self.place(size, (1, 1, 1))
        if not all(0 <= at <= side for at, side in zip((x, y, z), size, strict=True)):
            sides = " x ".join(f"{side:g}" for side in size)
            message = f"at {x:g}, {y:g}, {z:g} Mpc/h: must be in the box of {sides} Mpc/h"
            yield Problem("observer", message)
        boxes = self.volume(chi_max) / math.prod(size)
        if boxes > MOST_BOXES:
            larger = rounded_up((boxes / MOST_BOXES) ** (1 / 3))
            yield self.problem(
                "z_max",
                f"the observed sphere holds the box {boxes:.0f} times, at most {MOST_BOXES} are "
                f"possible: take a box that is {larger} times as wide, or reduce z_max",
            )

    def shell_count(self, width: float, chi_max: float) -> int:
        """Returns the number of shells of about a width up to a distance.

        Args:
            width: width of a shell [Mpc/h].
            chi_max: comoving distance of z_max [Mpc/h].

        Raises:
            ValueError: there are too many.
        """
        shells = max(1, round(chi_max / width))
        if shells > MOST_SHELLS:
            enough = rounded_up(chi_max / MOST_SHELLS)
            raise ValueError(
                f"shell_width = {width:g}: {shells} shells up to {chi_max:.6g} Mpc/h, at most "
                f"{MOST_SHELLS} are painted: a width of {enough} Mpc/h would do"
            )
        return shells

    @override
    def enough_pixels(self, scale: float) -> int:
        enough = self.nside
        while enough > 1 and scale * self.nside / enough < 1:
            enough //= 2
        return enough

    def place(self, size: Sequence[float], grid: Sequence[int]) -> tuple[float, float, float]:
        """Returns the place of the observer in a box [Mpc/h].

        Args:
            size: sides of the box [Mpc/h].
            grid: particles along each side.
        """
        middle = ((n // 2 + 0.5) * side / n for side, n in zip(size, grid, strict=True))
        x, y, z = middle if self.observer is None else self.observer
        return x, y, z
