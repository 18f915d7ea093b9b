"""Observers of a light cone: painters of convergence and matter, and a recorder of particles.

They measure the particles of a run when their light leaves them, see `Geometry`.
"""

from __future__ import annotations

import abc
import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import tensorflow as tf
from typing_extensions import override

from flowpm_dist.cosmology.arrays import known
from flowpm_dist.cosmology.line_of_sight import lensing_weight
from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.cosmology.theory import Theory
from flowpm_dist.evolution.observers import Measured, Measurement, Moment, Observer
from flowpm_dist.grid.box import Box
from flowpm_dist.io.fits_maps import Shells, cosmology_header, write_fits_maps
from flowpm_dist.io.labelled import Labelled, LabelledArray, leading_axes
from flowpm_dist.io.light_cone import LightConeFiles
from flowpm_dist.observables.lensing.planes import LensPlanes
from flowpm_dist.observables.lensing.shapes import shear
from flowpm_dist.observables.lensing.sources import IntrinsicAlignment, Sources
from flowpm_dist.observables.light_cone.all_matter import (
    all_matter,
    part_distances,
    part_weights,
)
from flowpm_dist.observables.light_cone.geometry import BEHIND, AmountsOf, Geometry, check_that
from flowpm_dist.observables.light_cone.options import PARTS, FlatField, FullSky, SkyOptions
from flowpm_dist.particle_mesh.kernels.base import BOXES
from meshimpl.graph_guards import check_eager
from meshimpl.mesh_function import replicated
from meshimpl.process_mesh import ProcessMesh

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class ConvergenceMaps(Labelled):
    """Maps of the convergence in the Born approximation.

    Attributes:
        kappa: [..., source, x, y] or [..., source, pixel] [1], the latter in HEALPix's order of
            rings; whole on every rank of a universe.
        sky: the sky, with `fov` [rad] or `nside`.
    """

    kappa: tf.Tensor
    sky: SkyOptions

    def shear(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns gamma1 and gamma2 [..., source, x, y] [1] of maps that are taken as periodic.

        Raises:
            ValueError: maps of the whole sky.
        """
        if not isinstance(self.sky, FlatField):
            raise ValueError("the shear of maps is found on the flat sky alone")
        return shear(self.kappa, self.sky.fov)

    def plot(self, axes: Axes | None = None, *, source: int = -1, universe: int = 0) -> Axes:
        """Draws the map of a source: a flat map with sticks of shear, or the whole sky.

        Args:
            axes: what to draw on; by default a new figure of pyplot.
            source: number of the source.
            universe: number of the universe among the universes of this rank.
        """
        from flowpm_dist.observables.light_cone.pictures import draw_field, draw_sky, new_axes

        axes = new_axes(self.sky) if axes is None else axes
        maps = self.kappa.numpy().reshape(-1, *self.kappa.shape[-1 - len(self.sky.map_shape) :])
        kappa, name = maps[universe, source], f"number {source % maps.shape[1]}"
        if isinstance(self.sky, FlatField):
            sticks = (gamma.numpy().T for gamma in shear(tf.constant(kappa), self.sky.fov))
            draw_field(axes, [kappa.T, *sticks], self.sky.field_of_view, name)
        else:
            draw_sky(axes, kappa, f"convergence of sources: {name}")
        return axes

    def write_fits(self, path: str | Path, *, universe: int = 0, overwrite: bool = False) -> None:
        """Writes the maps to a FITS file, as the extension KAPPA; see `LightConeMaps.write_fits`.

        On all ranks together: rank 0 writes, and the others wait for it.

        Args:
            path: the file; one that ends in .gz is compressed.
            universe: number of the universe among the universes of this rank.
            overwrite: whether to replace a file that is there.

        Raises:
            FileExistsError: there is a file, and `overwrite` is False; on every rank.
            WriteError: the file cannot be written; on every rank.
        """
        maps = {"kappa": _of_universe(self.labelled()["kappa"], universe, self.sky)}
        side = _side(self.sky)
        write_fits_maps(path, maps, field_of_view=side, overwrite=overwrite, together=True)

    @override
    def labelled(self) -> dict[str, LabelledArray]:
        return _maps("kappa", self.kappa, "source", self.sky, "convergence")


@dataclass(frozen=True)
class DensityPlanes(Labelled):
    """The matter of slabs of the universe, projected along the lines of sight.

    On the whole sky they are shells about the observer.

    Attributes:
        delta: overdensity against the mean of the universe [..., plane, x, y] or
            [..., plane, pixel] [1], whole on every rank of a universe.
        planes: the places of the planes, as `born` takes them.
        sky: the sky, with `fov` [rad] or `nside`.
    """

    delta: tf.Tensor
    planes: LensPlanes
    sky: SkyOptions

    def plot(self, axes: Axes | None = None, *, plane: int = 0, universe: int = 0) -> Axes:
        """Draws the overdensity of a plane of the flat sky, or of a shell of the whole sky.

        Args:
            axes: what to draw on; by default a new figure of pyplot.
            plane: number of the plane.
            universe: number of the universe among the universes of this rank.
        """
        from flowpm_dist.observables.light_cone.pictures import (
            DELTA,
            draw_plane,
            draw_sky,
            new_axes,
        )

        axes = new_axes(self.sky) if axes is None else axes
        maps = self.delta.numpy().reshape(-1, *self.delta.shape[-1 - len(self.sky.map_shape) :])
        delta = maps[universe, plane]
        title = f"matter at a distance of {float(self.planes.chi[plane]):.0f} Mpc/h"
        if isinstance(self.sky, FlatField):
            draw_plane(axes, delta.T, self.sky.field_of_view, title)
        else:
            draw_sky(axes, delta, title, DELTA)
        return axes

    def write_fits(
        self, path: str | Path, cosmology: Cosmology, *, universe: int = 0, overwrite: bool = False
    ) -> None:
        """Writes the maps to a FITS file: SHELLS on the full sky, PLANES on the flat one.

        A table, SHELLS_EDGES or PLANES_EDGES, has their redshifts Z_MIN, Z_MAX and comoving
        distances CHI_MIN, CHI_MAX [Mpc]. See `LightConeMaps.write_fits`. On all ranks together:
        rank 0 writes, and the others wait for it.

        Args:
            path: the file; one that ends in .gz is compressed.
            cosmology: the cosmology of the run, for the redshifts and the header.
            universe: number of the universe among the universes of this rank.
            overwrite: whether to replace a file that is there.

        Raises:
            FileExistsError: there is a file, and `overwrite` is False; on every rank.
            WriteError: the file cannot be written; on every rank.
        """
        name = "planes" if isinstance(self.sky, FlatField) else "shells"
        write_fits_maps(
            path,
            {name: _of_universe(self.labelled()["delta"], universe, self.sky)},
            field_of_view=_side(self.sky),
            shells={name: Shells(self.planes.edges, cosmology)},
            about=cosmology_header(cosmology),
            overwrite=overwrite,
            together=True,
        )

    @override
    def labelled(self) -> dict[str, LabelledArray]:
        meaning = "comoving distance of the plane"
        chi = LabelledArray(self.planes.chi.numpy(), ("plane",), "Mpc/h", meaning)
        return _maps("delta", self.delta, "plane", self.sky, "overdensity") | {"chi": chi}


def _maps(
    name: str, maps: tf.Tensor, kind: str, sky: SkyOptions, meaning: str
) -> dict[str, LabelledArray]:
    """Returns maps with their axes, and the centres of the pixels of a flat sky.

    Args:
        name: the name of the maps.
        maps: [..., kind, x, y] or [..., kind, pixel].
        kind: what the maps of a universe are numbered by.
        sky: their sky.
        meaning: in words.
    """
    flat = [*"xy"] if isinstance(sky, FlatField) else []
    pixel_axes = (kind, *(flat or ["pixel"]))
    axes = (*leading_axes(maps, len(pixel_axes)), *pixel_axes)
    arrays = {name: LabelledArray(maps.numpy(), axes, "1", meaning)}
    if isinstance(sky, FlatField):
        centres = np.array(sky.centres)
        arrays |= {x: LabelledArray(centres, (x,), "deg", "centre of the pixel") for x in flat}
    return arrays


def _of_universe(maps: LabelledArray, universe: int, sky: SkyOptions) -> LabelledArray:
    """Returns the maps of one universe [map, x, y] or [map, pixel]."""
    axes = 1 + len(sky.map_shape)
    values = maps.values.reshape(-1, *maps.values.shape[-axes:])
    return replace(maps, values=values[universe], dimensions=maps.dimensions[-axes:])


def _side(sky: SkyOptions) -> float | None:
    """Returns the side of a flat field [deg]; None for the full sky."""
    return sky.field_of_view if isinstance(sky, FlatField) else None


T = TypeVar("T")


class _SkyObserver(Observer):
    """Measures the particles that cross the light cone of a geometry.

    Args:
        geometry: the sky.
        crossings: for each kick, the crossings after it, see `Geometry.painting`.
    """

    def __init__(self, geometry: Geometry, crossings: Mapping[int, Sequence[Any]]) -> None:
        self.geometry, self._crossings, self.kicks = geometry, crossings, frozenset(crossings)

    @property
    @override
    def in_graphs(self) -> bool:
        return isinstance(self.geometry.sky, FlatField)

    def measurements(self, kick: int) -> list[Measurement]:
        """Returns one measurement for each crossing after a kick."""
        crossings = self._crossings.get(kick, [])
        return [functools.partial(self.measure, crossing) for crossing in crossings]

    @abc.abstractmethod
    def measure(self, crossing: Any, moment: Moment, inputs: Sequence[tf.Tensor]) -> Measured:
        """Measures the particles of a crossing, see `Measurement`."""


class MapPainter(_SkyObserver):
    """Adds particles to maps, which are named by the numbers of universe and map.

    Args:
        geometry: the sky.
        maps: number of maps.
        edges, amounts_of: see `Geometry.painting`.
    """

    needs_before = False

    def __init__(
        self,
        geometry: Geometry,
        maps: int,
        edges: np.ndarray | None = None,
        amounts_of: AmountsOf | None = None,
    ) -> None:
        self._box, self._maps = geometry.box, maps
        # A rank without particles on the maps measures, too: it takes part in the backward pass.
        self.inputs, crossings = geometry.painting(edges, amounts_of)
        super().__init__(geometry, crossings)
        self._universes = len(geometry.inputs.cosmologies.cosmologies)
        self._shape = geometry.sky.map_shape
        self._group = self._box.mesh.without("replica").world

    def measure(self, crossing: Any, moment: Moment, inputs: Sequence[tf.Tensor]) -> Measured:
        """Returns the maps of a crossing's particles, see `Measurement`."""
        return self.geometry.paint(crossing, moment, inputs)

    def summed(self, measured: Measured) -> tf.Tensor:
        """Returns the sums of the ranks' maps [..., map, *shape].

        Raises:
            FloatingPointError: a particle was not finite, or too far displaced, when it crossed the
                light cone. On every rank.
        """
        nothing = tf.zeros(self._shape, self._box.dtype)
        parts = [
            tf.stack([measured.get((u, m), nothing) for m in range(self._maps)])
            for u in range(self._universes)
        ]

        @tf.custom_gradient
        def whole(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            return self._group.allreduce(x), self._group.allreduce  # which adds the ranks' losses

        maps = whole(tf.stack(parts) if self._box.local_batch else parts[0])
        _check_finite(tf.reduce_all(tf.math.is_finite(maps)), self._box)
        return maps

    def pack(self, measured: Measured) -> dict[str, tf.Tensor]:
        """Returns the maps of this rank's universes, summed over ranks, for a checkpoint."""
        return {"maps": self.summed(measured)}

    def unpack(self, packed: Mapping[str, tf.Tensor]) -> Measured:
        """Returns the packed maps on the first rank, and none on the others."""
        shape = (self._universes, self._maps, *self._shape)
        if "maps" not in packed:
            raise ValueError("a light cone can be resumed only if a checkpoint stores its maps")
        maps = packed["maps"] if self._box.local_batch else packed["maps"][tf.newaxis]
        if maps.shape != shape:
            raise ValueError(f"maps of shape {maps.shape} were kept: those here are {shape}")
        if self._group.index:
            return {}
        maps = tf.cast(maps, self._box.dtype)
        return {(u, m): maps[u, m] for u in range(self._universes) for m in range(self._maps)}


class ConvergencePainter(MapPainter):
    """Paints the convergence of sources.

    Each particle is weighed by its own distance. With massive neutrinos, the maps of the particles
    are painted in parts, see `all_matter`.

    Args:
        geometry: the sky.
        sources: the populations.
        alignment: intrinsic alignments; None for none.

    Raises:
        ValueError: sources behind z_max.
    """

    def __init__(
        self,
        geometry: Geometry,
        sources: Sequence[Sources],
        alignment: IntrinsicAlignment | None = None,
    ) -> None:
        mesh, means = geometry.box.mesh, dict[int, tf.Tensor]()
        sources = [_with_shared_tensors(source, mesh) for source in sources]
        alignment = None if alignment is None else _with_shared_tensors(alignment, mesh)

        self._massive = geometry.inputs.cosmologies.by_scale

        def amounts(theory: Theory) -> tf.Tensor:
            distances = theory.distances
            end = BEHIND * geometry.end_of(theory)
            for number, source in enumerate(sources):
                reach = source.farthest(distances)
                inside, far = reach <= end, ""
                if known(inside) is not None and not inside:
                    far = f" to z = {float(distances.redshift(reach)):.4g},"
                check_that(
                    inside,
                    f"sources[{number}] reach{far} beyond z_max = {geometry.sky.z_max:g}: increase "
                    "it, or cut their distribution",
                )
            nodes = geometry.nodes(theory)
            one = np.ones([1, nodes.chi.shape[0]])
            parts = part_weights(nodes.chi, geometry.end) if self._massive else one
            a = distances.scale_factor(nodes.chi)
            strength = lensing_weight(theory, nodes.chi, a=a)
            weights = [strength * s.efficiency(nodes.chi, distances) for s in sources]
            if alignment is not None:
                response = alignment.response(a, theory)
                weights = [
                    weight + response * source.fractions(nodes.edges, distances) / nodes.widths
                    for weight, source in zip(weights, sources, strict=True)
                ]
            weights = [weight * part for weight in weights for part in tf.unstack(parts)]
            means[id(theory.growth)] = tf.stack([tf.reduce_sum(w * nodes.widths) for w in weights])
            per_particle = nodes.chi * geometry.widening(theory) ** 2
            amounts = tf.stack([weight / per_particle for weight in weights], axis=-1)
            return amounts / geometry.particles_in_pixel

        super().__init__(
            geometry, len(sources) * (PARTS if self._massive else 1), amounts_of=amounts
        )
        cosmologies = geometry.inputs.cosmologies
        self._means = cosmologies.stack(
            [means[id(theory.growth)] for theory in cosmologies.theories]
        )

    def results(self, measured: Measured) -> ConvergenceMaps:
        """Returns the maps of the convergence, minus the mean convergence of the universe."""
        maps = self.geometry.normalised(self.summed(measured))
        means = tf.reshape(self._means, [*self._means.shape, *[1] * len(self._shape)])
        kappa = maps - tf.cast(means, maps.dtype)
        if self._massive:
            chi, (*lead, _) = part_distances(self.geometry.end), self._means.shape
            kappa = tf.reshape(kappa, [*lead, -1, PARTS, *self._shape])
            kappa = all_matter(kappa, chi, self.geometry)
        return ConvergenceMaps(kappa, self.geometry.sky)


class PlanePainter(MapPainter):
    """Paints the matter of slabs.

    Args:
        geometry: the sky.
        given: see `Geometry.slab_edges`.
    """

    def __init__(self, geometry: Geometry, width: np.ndarray) -> None:
        self._edges = geometry.slab_edges(width)
        super().__init__(geometry, len(self._edges) - 1, self._edges)

    @override
    def results(self, measured: Measured) -> DensityPlanes:
        planes, expected = self.geometry.slabs(self._edges)
        counts = self.geometry.normalised(self.summed(measured))
        mean = expected.reshape([-1] + [1] * len(self._shape))
        delta = counts / tf.constant(mean, counts.dtype) - 1.0
        if self.geometry.inputs.cosmologies.by_scale:
            delta = tf.expand_dims(delta, -1 - len(self._shape))
            delta = all_matter(delta, planes.chi[:, tf.newaxis], self.geometry)
        return DensityPlanes(delta, planes, self.geometry.sky)


class Recorder(_SkyObserver):
    """Writes places, velocities and scale factors of particles as they cross; no gradient.

    The integrator's states at the times of the crossings have the same values. What a correction
    adds is taken from the nearest kick.

    Args:
        geometry: the sky of a run of one universe; its options are kept with the particles.
        files: this rank's files.

    Raises:
        ValueError: a batch of universes.
    """

    needs_before = True
    inputs = ()

    def __init__(self, geometry: Geometry, files: LightConeFiles) -> None:
        box, inputs, sky = geometry.box, geometry.inputs, geometry.sky
        if box.batch is not None:
            raise ValueError("the particles of one universe are written, not of a batch")
        check_eager("a recorder of particles")
        super().__init__(geometry, geometry.recording())
        self._files, self._finite = files, True
        files.describe(
            {
                **sky.part(FullSky if isinstance(sky, FullSky) else FlatField).model_dump(),
                "grid": list(box.grid),
                "box_size": list(box.size),
                "cosmology": inputs.cosmologies.cosmologies[0].numbers(),
                "seed": inputs.source.seed,
                "paired": inputs.source.paired,
            }
        )

    def measure(self, crossing: Any, moment: Moment, inputs: Sequence[tf.Tensor]) -> Measured:
        """Writes the particles of a crossing; returns an empty dictionary."""
        if not self._files.closed:  # they are closed in the backward pass
            dtype = self.geometry.box.dtype.as_numpy_dtype
            place, *fields = (t.numpy() for t in moment.tensors)
            boost = np.zeros(1, dtype) if moment.boost is None else moment.boost.numpy()
            boost = np.broadcast_to(boost, place.shape)
            for columns in self.geometry.record(crossing, place, boost, fields):
                self._finite &= all(bool(np.isfinite(column.sum())) for column in columns)
                if len(columns[0]):
                    self._files.append(*(column.astype(dtype) for column in columns))
        return {}

    def results(self, measured: Measured) -> None:
        """Returns None; the files hold all particles.

        Raises:
            FloatingPointError: a particle was not finite, or too far displaced. On every rank.
        """
        _check_finite(self._finite, self.geometry.box)

    def pack(self, measured: Measured) -> dict[str, tf.Tensor]:
        """Returns an empty dictionary, after the checks of `results`; the files hold all."""
        self.results(measured)
        return {}


def _check_finite(finite: tf.Tensor | bool, box: Box) -> None:
    """Checks, on all ranks together, that all particles that crossed have finite positions.

    Raises:
        FloatingPointError: some has not, on this rank or another.
    """
    message = (
        "light cone: a particle that crosses it has a place, a velocity or a weight that is not "
        f"finite, or is displaced by more than {BOXES:g} times the longest side of the box"
    )
    if not tf.executing_eagerly():  # the rank is alone
        tf.debugging.Assert(finite, [message])
    elif int(box.mesh.world.allreduce(tf.constant(int(not finite)), "max")):
        raise FloatingPointError(message)


def _with_shared_tensors(parameters: T, mesh: ProcessMesh) -> T:
    """Returns a copy of parameters whose tensors have gradients that arrive complete on each rank.

    Args:
        parameters: an object with parameters as its attributes, or in lists or dictionaries of
            these; the same on every rank.
        mesh: the ranks.
    """
    shared = copy.copy(parameters)

    def share(value: Any) -> Any:
        is_tensor = isinstance(value, (tf.Tensor, tf.Variable))
        return replicated(mesh, value) if is_tensor else value

    for name, value in vars(parameters).items():
        object.__setattr__(shared, name, tf.nest.map_structure(share, value))
    return shared
