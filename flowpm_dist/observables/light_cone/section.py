"""The section [lightcone] of run files: the sky, the sources and the maps.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field
from typing_extensions import override

from flowpm_dist.cosmology.arrays import arrays_within
from flowpm_dist.cosmology.background import Distances
from flowpm_dist.cosmology.options import CosmologyOptions, PartialCosmologyOptions, extremes
from flowpm_dist.io.errors import UserError
from flowpm_dist.observables.lensing.options import (
    AlignmentOptions,
    ShapeNoiseOptions,
    SourceOptions,
)
from flowpm_dist.observables.light_cone.options import (
    FEWEST_PIXELS,
    PARTS,
    FlatField,
    FullSky,
    SkyOptions,
)
from flowpm_dist.options import Problem, Unit, table_of

if TYPE_CHECKING:
    from flowpm_dist.observables.lensing.sources import IntrinsicAlignment, Sources

Z_TOLERANCE = 1e-6
"""Relative redshift by which sources may lie beyond z_max, to allow for rounding."""


class LensedSky(SkyOptions):
    """A sky with the sources of lensing.

    Attributes:
        sources: the populations of sources.
        alignment: intrinsic alignments.
    """

    sources: Annotated[tuple[SourceOptions, ...], Field(min_length=1), table_of(SourceOptions)] = (
        Field(
            description="a list of tables such as { redshift = 1.0 }, { smail = [0.3, 2.0, 1.5], "
            'z_max = 1.5 } or { file = "nz.txt" }, each with an optional shift'
        )
    )
    alignment: Annotated[AlignmentOptions | None, table_of(AlignmentOptions)] = Field(
        default=None, description="a table such as { amplitude = 1.0, eta = 0.0, z_pivot = 0.62 }"
    )

    def problems(self) -> Iterator[Problem]:
        """Yields problems: n(z) must be readable, with sources between z = 0 and z_max."""
        for number, source in enumerate(self.sources):
            key = f"sources[{number}]"
            try:
                max_redshift = source.max_redshift
                if 0 < max_redshift <= self.z_max * (1 + Z_TOLERANCE):
                    source.check_members()
            except (UserError, ValueError) as error:
                yield Problem(key, f"cannot be used: {error}")
                continue
            if max_redshift <= 0:
                yield Problem(key, f"have no member above z = 0 with shift = {source.shift:g}")
            elif max_redshift > self.z_max * (1 + Z_TOLERANCE):
                cut = ", or cut them with their own z_max" if source.smail else ""
                cut = ", or end the table there" if source.file else cut
                message = (
                    f"reach to z = {max_redshift:.4g}, beyond z_max = {self.z_max:g}: increase it"
                )
                yield Problem(key, f"{message}{cut}")
            if source.redshift is not None and self.alignment is not None:
                yield Problem(key, "are at one redshift: an alignment needs smail or file")

    @property
    def tables(self) -> dict[str, SourceOptions]:
        """The populations that are read from files, by key of the run file."""
        return {
            f"lightcone.sources[{number}].file": source
            for number, source in enumerate(self.sources)
            if source.file is not None
        }

    def painted_maps(self, cosmology: PartialCosmologyOptions, priors: Any = None) -> int:
        """Returns the number of maps that are painted of the sources.

        Args:
            cosmology: parameters of the run.
            priors: (lowest, highest) value of each parameter that varies, as attributes.
        """
        masses = getattr(priors, "m_nu", None) or (cosmology.m_nu,)
        return len(self.sources) * (PARTS if max(masses) > 0 else 1)

    def population(self) -> tuple[list[Sources], IntrinsicAlignment | None]:
        """Returns the sources and their alignment, as the lensing functions take them."""
        alignment = None if self.alignment is None else self.alignment.alignment()
        return [each.sources() for each in self.sources], alignment


class ConvergenceOptions(LensedSky, FlatField):
    """Maps of convergence on the light cone of the flat sky, in the Born approximation.

    Attributes:
        shape_noise: noise of the shapes of galaxies.
    """

    shape_noise: Annotated[ShapeNoiseOptions | None, table_of(ShapeNoiseOptions)] = Field(
        default=None, description="a table such as { sigma_e = 0.26, n_eff = 5.0, seed = 0 }"
    )

    def pixel_sigma(self) -> float:
        """Returns the standard deviation of the shape noise of a pixel [1]; it must be set."""
        from flowpm_dist.observables.lensing.shapes import shape_noise_sigma

        options = self.shape_noise
        assert options is not None
        return float(shape_noise_sigma(options.sigma_e, options.n_eff, self.pixel_area))

    def noise(self, seed: int, components: int = 1, dtype: Any = np.float64) -> np.ndarray:
        """Returns maps of shape noise [source, component, x, y] [1]; `shape_noise` must be set.

        Args:
            seed: seed of the noise, in place of the one in the options.
            components, dtype: see `shape_noise`.
        """
        from flowpm_dist.observables.lensing.shapes import shape_noise

        options = self.shape_noise
        assert options is not None
        sigma_e = np.full(len(self.sources), options.sigma_e)
        noise = shape_noise(
            self.map_shape, self.fov, sigma_e, options.n_eff, seed, components, dtype
        )
        return np.asarray(noise)


class FlatLensingOptions(ConvergenceOptions):
    """[lightcone] of a simulation on the flat sky: its light cone, and the lensing by it.

    Attributes:
        sky: "flat".
        particles: whether the particles on the light cone are written, too.
        ray_tracing: whether rays are traced through planes; otherwise Born approximation.
        plane_width: width of planes of matter [Mpc/h].
        planes: whether planes of matter are written.
        shape_noise: noise of the shear.
    """

    pixels: Annotated[int, Field(ge=FEWEST_PIXELS)] = Field(
        description=f"a whole number of at least {FEWEST_PIXELS}, to measure a spectrum"
    )
    sky: Literal["flat"] = Field(default="flat", description='"flat" or "full"')
    particles: bool = Field(default=False, description="true or false")
    ray_tracing: bool = Field(default=False, description="true or false")
    plane_width: Annotated[float, Field(gt=0), Unit("Mpc/h")] = Field(
        default=100.0, description="a length above 0 in Mpc/h"
    )
    planes: bool = Field(default=False, description="true or false")

    @override
    def idle(self) -> dict[str, str]:
        idle = {"plane_width": "ray_tracing or planes = true"}
        return {} if self.ray_tracing or self.planes else idle

    @override
    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.alignment is not None and self.ray_tracing:
            message = "cannot be combined with ray_tracing: leave one of them out"
            yield Problem("alignment", message)

    @property
    def matter_width(self) -> float | None:
        """The width of planes of matter [Mpc/h]; None where matter is not painted."""
        return self.plane_width if self.ray_tracing or self.planes else None


class FullSkyLensingOptions(LensedSky, FullSky):
    """[lightcone] of a simulation on the full sky: its light cone, and the lensing by it.

    Attributes:
        sky: "full".
        particles: whether the particles on the light cone are written, too.
        shells: whether shells of matter are written.
        shell_width: width of shells of matter [Mpc/h].
    """

    ray_tracing: ClassVar[bool] = False

    sky: Literal["full"] = Field(description='"flat" or "full"')
    particles: bool = Field(default=False, description="true or false")
    shells: bool = Field(default=False, description="true or false")
    shell_width: Annotated[float, Field(gt=0), Unit("Mpc/h")] = Field(
        default=100.0, description="a length above 0 in Mpc/h"
    )

    @override
    def idle(self) -> dict[str, str]:
        return {} if self.shells else {"shell_width": "shells = true"}

    def box_problems(
        self, size: Sequence[float], chi_max: float, across: float | None = None
    ) -> Iterator[Problem]:
        """Yields the problems of a box with the light cone, and of the number of shells."""
        yield from super().box_problems(size, chi_max, across)
        try:
            if self.shells:
                self.shell_count(self.shell_width, chi_max)
        except ValueError as error:
            key, _, message = str(error).partition(" ")
            yield Problem(key, message)

    @property
    def matter_width(self) -> float | None:
        """The width of shells of matter [Mpc/h]; None where matter is not painted."""
        return self.shell_width if self.shells else None


LensingOptions = FlatLensingOptions | FullSkyLensingOptions
"""The section [lightcone] of a simulation."""
SKIES: dict[str, type[LensedSky]] = {"flat": FlatLensingOptions, "full": FullSkyLensingOptions}
"""The models of the section [lightcone], by the value of the key `sky`."""


def distance_of(
    z: float, cosmology: PartialCosmologyOptions, priors: Any = None, *, across: bool = False
) -> float:
    """Returns the comoving distance of a redshift [Mpc/h].

    Args:
        z: the redshift.
        cosmology: parameters of the run.
        priors: (lowest, highest) value of each parameter that varies, as attributes. The result is
            then the largest distance.
        across: to return the largest f_K up to there, see `Distances.widest`.

    Raises:
        ValueError: a parameter is neither fixed nor has a prior.
    """
    corners = [Distances(background) for background in extremes(cosmology, priors)]
    if not corners:
        raise ValueError("a parameter of its distances is missing")
    with arrays_within():
        reaches = [float(distances.comoving(1 / (1 + z))) for distances in corners]
        if across:
            reaches = [each.widest(chi) for each, chi in zip(corners, reaches, strict=True)]
        return max(reaches)


def map_warnings(
    cone: ConvergenceOptions | FullSkyLensingOptions,
    cosmology: CosmologyOptions,
    size: Sequence[float],
    cells: Sequence[float],
) -> tuple[str, ...]:
    """Returns warnings: pixels finer than the simulation resolves, or a field too wide to be flat.

    Args:
        cone: the light cone.
        cosmology: parameters of the run.
        size: sides of the box [Mpc/h].
        cells: cells of the force mesh along each side of the box.
    """
    half = 0.5 * distance_of(max(source.max_redshift for source in cone.sources), cosmology)
    cell = max(side / n for side, n in zip(size, cells, strict=True))
    warnings = cone.fine_pixels_warning(half, cell), cone.wide_field_warning()
    return tuple(f"lightcone.{each}" for each in warnings if each)
