"""The geometry of a light cone on a flat or full sky, for painters and recorders."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.arrays import known, minimum
from flowpm_dist.cosmology.theory import Theory, Universe, theory_of
from flowpm_dist.evolution.observers import Measured, Moment
from flowpm_dist.observables.lensing.planes import LensPlanes
from flowpm_dist.observables.light_cone.options import SkyOptions
from flowpm_dist.options import Problem, ProblemsError
from flowpm_dist.particle_mesh.kernels import kernels
from flowpm_dist.particle_mesh.kernels.base import Shells, farthest_move
from flowpm_dist.simulation.run import Inputs
from meshimpl.tapes import not_recorded

AT_ONCE = 2**17
"""Particles that are processed together."""

BEHIND = 1.0 + 1e-6
"""Over the distance of z_max, the distance at which all that is behind z_max is taken."""

Particles = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Positions [n, 3] [Mpc/h], velocities [n, 3] [km/s] and scale factors [n]."""
Painting = tuple[tuple[tf.Tensor, ...], dict[int, list[Any]]]
"""What `Geometry.painting` returns."""
AmountsOf = Callable[[Theory], tf.Tensor]
"""From the theory of a universe to what its particles add to maps, see `Geometry.amounts`."""


@dataclass(frozen=True)
class Nodes:
    """Distances at which the weights of particles are evaluated.

    Attributes:
        chi: the distances [node] [Mpc/h].
        widths: weights of a quadrature over the distance [node] [Mpc/h].
        edges: distances between which each node stands for the universe [node + 1] [Mpc/h].
    """

    chi: Any
    widths: np.ndarray
    edges: Any


class Geometry(abc.ABC):
    """Copies of a run's box about an observer, and the pixels of its maps.

    A particle crosses the light cone when the light leaves its undisplaced place: at the scale
    factor of that distance. From the kick before that time it has drifted by a part of the
    integrator's own drift. Each copy of a particle is observed once, and moves on the sky smoothly
    with all that it depends on (MADLens, Boehm and others 2021, arXiv:2012.07266, section 2.2). It
    is observed at the distance of its displaced place, which decides to which slab it belongs. A
    crossing therefore includes particles whose undisplaced places lie outside of the observed
    range, by at most the largest displacement.

    Args:
        sky: the sky.
        inputs: the run's inputs.

    Attributes:
        end: comoving distance of z_max, the largest of all universes of a run [Mpc/h]; a tensor
            where a graph has yet to compute it.
        most: the same, or in such a graph a number that is not below it.
        step: distance between the nodes at which weights are evaluated [Mpc/h].
        depth: depth of a particle's cloud along the line of sight [Mpc/h].

    Raises:
        ValueError: the run begins too late or ends too early, or its box does not fill the sky.
    """

    step: float
    depth: float

    def __init__(self, sky: SkyOptions, inputs: Inputs) -> None:
        self.sky, self.inputs, self.box = sky, inputs, inputs.box
        self.integrator, self.steps = inputs.options.integrator, inputs.edges.tolist()
        self.end: Any
        self.end, self.most, problems = self._measured()
        if problems := [*sky.begin_problems(inputs.edges[0]), *problems]:
            raise ProblemsError(problems)

    def _measured(self) -> tuple[Any, float, Iterable[Problem]]:
        """Returns `end`, `most`, and the problems of the box with the sky up to there."""
        theories, group = self.inputs.cosmologies.theories, self.box.mesh.world
        ends = [
            max(farthest(self.sky, theory, across=way) for theory in theories)
            for way in (False, True)
        ]
        if group.size > 1:
            ends = group.allreduce(tf.constant(ends, tf.float64), "max").numpy().tolist()
        return ends[0], ends[0], self.sky.box_problems(self.box.size, *ends)

    @property
    def known_end(self) -> float:
        """The distance of z_max as a number [Mpc/h].

        Raises:
            RuntimeError: a graph has yet to compute it.
        """
        if isinstance(self.end, tf.Tensor):
            raise RuntimeError(
                "inside a tf.function, planes of matter need a cosmology of numbers: the distance "
                "of z_max decides how many there are; call run eagerly"
            )
        return self.end

    def check_latest(self, nearest: float) -> None:
        """Checks that the run does not end before the light of the nearest particles leaves.

        Args:
            nearest: their distance [Mpc/h].

        Raises:
            ValueError: it ends before.
        """
        stop = self.inputs.edges[-1]
        message = (
            f"the run ends at a = {stop:g}: a light cone to an observer today needs one that ends "
            "at a = 1"
        )
        for theory in self.inputs.cosmologies.theories:
            check_that(theory.distances.scale_factor(nearest) <= stop, message)

    @property
    def particles_in_pixel(self) -> float:
        """The mean number of particles in a pixel, per length and distance^2 [(h/Mpc)^3]."""
        return self.box.cells / self.box.volume * self.sky.pixel_area

    @abc.abstractmethod
    def slab_edges(self, width: np.ndarray) -> np.ndarray:
        """Returns the distances between which slabs of matter lie [slab + 1] [Mpc/h].

        Args:
            width: the same, or the width of all of them [Mpc/h].

        Raises:
            ValueError: they reach beyond z_max, or there are too many.
        """

    @abc.abstractmethod
    def slabs(self, edges: np.ndarray) -> tuple[LensPlanes, np.ndarray]:
        """Returns slabs as lens planes, and what a uniform universe paints on a pixel [slab]."""

    def end_of(self, theory: Theory) -> Any:
        """Returns the comoving distance of z_max in a universe [Mpc/h], see `end`."""
        chi = theory.distances.comoving(self.sky.earliest)
        value = known(chi)
        return tf.stop_gradient(chi) if value is None else float(value)

    def nodes(self, theory: Theory) -> Nodes:
        """Returns the nodes for the weights, from the observer to two nodes beyond z_max.

        What particles add at a node is the weight over the distance, which is nearly linear between
        nodes. Their number follows `most`. Those farther than two steps behind z_max are there.

        Args:
            theory: the theory of the universe.
        """
        step = self.step
        chi = step * np.arange(math.ceil(self.most / step) + 2)
        edges = np.concatenate([chi[:1], 0.5 * (chi[1:] + chi[:-1]), chi[-1:]])
        # Integrals of chi times what is 1 at one node and 0 at the others, linear in between.
        moments = step * chi
        moments[0], moments[-1] = step**2 / 6, step * chi[-1] / 2 - step**2 / 6
        chi[0] = 1e-9 * step
        widths = moments / chi
        last = self.end_of(theory) + 2 * step
        return Nodes(minimum(chi, last), widths, minimum(edges, last))

    def widening(self, theory: Theory) -> tf.Tensor:
        """Returns lengths across the sky over lengths in flat space, at `nodes` [node]."""
        return tf.ones(self.nodes(theory).chi.shape, tf.float64)

    @abc.abstractmethod
    def painting(self, edges: np.ndarray | None, amounts_of: AmountsOf | None) -> Painting:
        """Returns the crossings whose particles are painted on maps.

        Args:
            edges: distances between which slabs with a map each lie [slab + 1] [Mpc/h]; None if
                all particles are painted on the same maps.
            amounts_of: what particles add; None to count them.

        Returns:
            Tensors, besides the particles, with respect to which the maps can be differentiated;
            and for each kick the crossings after it, the same on all ranks.
        """

    def paint_between(self, edges: np.ndarray | None, power: int) -> None:
        """Stores the borders and amounts of which `shells` returns a part.

        Args:
            edges: see `painting`.
            power: power of the distance by which what particles add is divided.
        """
        # No part of a cloud in front of the last node is cut off.
        last = (math.ceil(self.most / self.step) + 1) * self.step
        ends = np.array([0.0, last + 0.5 * self.depth])
        self._edges = ends if edges is None else edges
        self._power = power

    @abc.abstractmethod
    def paint(self, crossing: Any, moment: Moment, inputs: Sequence[tf.Tensor]) -> Measured:
        """Returns the maps of a crossing's particles, by numbers of universe and map."""

    def reach(self, fields: Sequence[Any], factors: Any) -> Any:
        """Returns a displacement along an axis that no particle of this rank with a place exceeds.

        Args:
            fields: displacement, and velocities and LPT fields that move the particles.
            factors: the largest factor of each, float64 [fields].

        Returns:
            The displacement [Mpc/h], a number or in a graph a tensor; it may be larger than the
            largest.
        """
        farthest = farthest_move(self.box.size)

        def of(field: Any, factor: Any) -> tf.Tensor:
            size = tf.abs(field)
            near = size * tf.cast(factor, size.dtype) <= farthest
            return tf.reduce_max(tf.where(near, size, 0.0))

        total: Any = 0.0
        with not_recorded():
            for field, factor in zip(fields, tf.unstack(factors), strict=True):
                largest = tf.maximum(tf.reduce_max(field), -tf.reduce_min(field))
                is_near = tf.cast(largest, tf.float64) * factor <= farthest
                masked = functools.partial(of, field, factor)
                largest = tf.cond(is_near, functools.partial(tf.identity, largest), masked)
                total += tf.cast(largest, tf.float64) * factor
        return float(total) if tf.executing_eagerly() else total

    def shells(self, near: float, far: float, reach: Any) -> tuple[int, dict[str, Any]]:
        """Returns the slabs that particles may reach, see `Shells`, and the first one's number.

        Args:
            near, far: distances between which the undisplaced places of particles lie [Mpc/h].
            reach: distance that none of them is displaced by [Mpc/h]; infinite for all slabs.
        """
        edges, most = self._edges, reach + self.depth
        first, last = np.searchsorted(edges, [near - most, far + most])
        first = min(max(first - 1, 0), len(edges) - 2)
        borders = edges[first : max(last, first + 1) + 1].astype(np.float64)
        # All that is in front of the observer is in the first slab.
        borders[0] = -np.inf if borders[0] == 0 else borders[0]
        box = self.box
        return int(first), {
            "borders": borders,
            "depth": self.depth,
            "step": self.step,
            "power": self._power,
            "spacing": box.cell,
            "lengths": box.size,
        }

    def painted(
        self,
        kernel: str,
        shape: Shells,
        moment: Moment,
        universes: np.ndarray,
        others: Iterable[tf.Tensor],
        first: int,
    ) -> Measured:
        """Returns the maps of a kernel, with the gradient by its adjoint, as `paint` does.

        Args:
            kernel: name of a method of `Kernels`; its adjoint has the suffix _vjp.
            shape: the kernel's first argument.
            moment: the particles.
            universes: numbers of the universes that are painted.
            others: the kernel's arguments after the fields, factors and amounts.
            first: number of the first map.
        """
        paint = functools.partial(getattr(kernels(), kernel), shape)
        paint_vjp = functools.partial(getattr(kernels(), f"{kernel}_vjp"), shape)
        fields = moment.moving
        count = len(fields)
        if self.box.local_batch == ():
            fields = [field[tf.newaxis] for field in fields]
        elif len(universes) != self.box.local_batch[0]:
            fields = [tf.gather(field, universes) for field in fields]

        @tf.custom_gradient
        def maps_of(*tensors: tf.Tensor) -> tuple[tf.Tensor, Callable[..., list[tf.Tensor]]]:
            arguments = tensors[:count], tensors[count], tensors[count + 1]

            def gradient(dmaps: tf.Tensor) -> list[tf.Tensor]:
                moved, *rest = paint_vjp(*arguments, dmaps)
                return [*moved, *(tf.cast(t, dmaps.dtype) for t in rest)]

            return paint(*arguments), gradient

        maps = maps_of(*fields, *others)
        # Not by slices, whose gradients are each as large as all maps.
        return {
            (int(universe), first + m): each
            for universe, rows in zip(universes, tf.unstack(maps), strict=True)
            for m, each in enumerate(tf.unstack(rows))
        }

    def normalised(self, maps: tf.Tensor) -> tf.Tensor:
        """Returns painted maps for pixels of equal solid angle."""
        return maps

    @abc.abstractmethod
    def recording(self) -> dict[int, list[Any]]:
        """Returns, for each kick, the crossings after it whose particles are recorded."""

    @abc.abstractmethod
    def record(
        self,
        crossing: Any,
        displacement: np.ndarray,
        boost: np.ndarray,
        fields: list[np.ndarray],
    ) -> Iterator[Particles]:
        """Yields the particles of a crossing, including those that are not finite.

        Args:
            crossing: one of the crossings of `recording`.
            displacement: [x, y, z, 3] [Mpc/h].
            boost: see `Moment`, likewise [Mpc/h H0].
            fields: the velocities before and after the kick, and LPT fields, likewise.
        """


def farthest(sky: SkyOptions, cosmology: Universe, *, across: bool = False) -> float:
    """Returns the comoving distance of z_max, or the largest f_K up to there [Mpc/h]."""
    distances = theory_of(cosmology).distances
    chi = float(known(distances.comoving(sky.earliest)))
    return distances.widest(chi) if across else chi


def check_that(holds: Any, message: str) -> None:
    """Checks a condition; what a graph has yet to compute becomes an assertion of it.

    Raises:
        ValueError: with the message.
    """
    value = known(holds)
    if value is None:
        tf.debugging.Assert(holds, [message])
    elif not value:
        raise ValueError(message)


@contextmanager
def reaching(a: Any) -> Iterator[None]:
    """Adds the redshift of the farthest light to a ValueError that is raised inside.

    Args:
        a: its scale factor.
    """
    try:
        yield
    except ValueError as error:
        value = known(a)
        far = "" if value is None else f" that reaches to z = {1.0 / float(value) - 1.0:.4g}"
        raise ValueError(f"a light cone{far}: {error}") from error


def pieces(shape: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    """Yields slices of the first two of three axes that cut a lattice into small pieces.

    Args:
        shape: shape of the lattice. A piece has at most AT_ONCE particles, or one line of them.
    """
    columns = min(shape[1], max(1, AT_ONCE // shape[2]))
    rows = max(1, AT_ONCE // (columns * shape[2]))
    for i in range(0, shape[0], rows):
        for j in range(0, shape[1], columns):
            yield slice(i, i + rows), slice(j, j + columns)


def placed(moved: np.ndarray, lengths: Sequence[float]) -> np.ndarray:
    """Returns displacements [..., 3] with NaN for those too large to have a place, in place.

    Args:
        moved: displacements [Mpc/h].
        lengths: sides of the box along its axes [Mpc/h].
    """
    moved[~(np.abs(moved) <= farthest_move(lengths))] = np.nan
    return moved
