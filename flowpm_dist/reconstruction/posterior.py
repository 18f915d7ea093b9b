"""Minus the log posterior of white noise and parameters, its gradient, and even coordinates.

In even coordinates, minus the log posterior has about the same curvature in every direction. For a
linear universe with the same Gaussian noise everywhere, the curvature with respect to the white
noise is diagonal in Fourier space: 1 + information x |response(k)|^2. Its square root scales the
modes.

Where the response depends on parameters, so do the coordinates. The log determinant of the
transformation is then a part of the posterior in these coordinates. For a linear universe, the
maximum of that posterior over the field is the posterior of the parameters alone, because Laplace's
method is exact there. Its curvature with respect to the parameters is the Fisher information of the
power spectrum.

For a nonlinear universe the scaling is only approximate. The posterior that is sampled does not
depend on it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import tensorflow as tf
from scipy.special import ndtri

from flowpm_dist.cosmology.options import UniformPriors
from flowpm_dist.grid.fourier import to_field, to_spectrum
from flowpm_dist.observables.universe_model import SMALL, UniverseModel
from flowpm_dist.particle_mesh.cloud_in_cell import HaloError
from flowpm_dist.reconstruction.likelihoods.base import EXACT, Annealing, Likelihood
from flowpm_dist.reconstruction.preconditioner import Preconditioner
from flowpm_dist.reconstruction.unknowns import Space, Unknowns
from flowpm_dist.statistics.bins import multiplicities
from meshimpl.compat import mtf
from meshimpl.mesh_function import MeshFunction, replicated
from meshimpl.mesh_graph import one_graph

DIFFERENCE = 1e-3
"""Finite difference of the unit normal parameters, for the slope of the response."""


EDGE = 3.0
"""Unit normal parameters up to here are free in a search. Beyond, within 0.13 % of a prior's width
from its ends, they are drawn back: their slope vanishes there, and steps would not return.
"""


class Scaling:
    """A scaling of the modes and of the parameters by the square root of their curvature.

    Linear theory gives the curvature of each mode: 1 + information x response^2.

    Args:
        posterior: the posterior of the unknowns.
        annealing: the annealing of its likelihood.
    """

    def __init__(self, posterior: Posterior, annealing: Annealing) -> None:
        self._posterior, self._space = posterior, posterior.space
        kx, ky, kz = self._space.box.wavenumbers()
        window = tf.exp(tf.constant(-((kx**2 + ky**2 + kz**2) * annealing.radius**2)))
        known = posterior.likelihood.information(annealing) / annealing.inflation**2
        self._information = window * known

    def _root_of(self, normal: tf.Tensor) -> tf.Tensor:
        """Returns the square root of the curvature with respect to the field, float64.

        Args:
            normal: the unit normal parameters.

        Returns:
            The roots for this rank's modes [kz, ky, kx] or [chain, kz, ky, kx].
        """
        model = self._posterior.model
        response = tf.cast(model.linear_response(self._posterior.values_of(normal)), tf.float64)
        return tf.sqrt(1 + self._information * tf.square(response))

    def to_even(self, x: Unknowns) -> Unknowns:
        """Returns the coordinates of even curvature of a point."""
        if not self._space.names:
            return Unknowns(self.times(x.field, self._constant), x.parameters)
        field = self.times(x.field, self._root_of(x.parameters))
        return Unknowns(field, tf.linalg.matvec(self._factor, x.parameters, transpose_a=True))

    def from_even(self, u: Unknowns) -> Unknowns:
        """Returns the point with the given coordinates."""
        return self.place(u).point

    def place(self, u: Unknowns) -> Place:
        """Returns the point with the given coordinates, as a `Place` that transforms gradients."""
        if not self._space.names:
            inverse = 1 / self._constant
            point = Unknowns(self.times(u.field, inverse), u.parameters)
            none = tf.zeros(self._space.box.local_batch, tf.float64)
            return Place(self, point, none, inverse)
        parameters = tf.linalg.matvec(self.inverse_factor, u.parameters, transpose_a=True)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(parameters)
            root = self._root_of(parameters)
            inverse = 1 / root
            field = self.times(u.field, inverse)
            volume = tf.reduce_sum(tf.math.log(root) * self._counted, axis=[-3, -2, -1])
        return Place(self, Unknowns(field, parameters), volume, inverse, tape)

    def preconditioned(self, u: Unknowns) -> Unknowns:
        """Returns a gradient divided by an estimate of the curvature that masks and noise leave."""
        return Unknowns(self._preconditioner(u.field), u.parameters)

    @functools.cached_property
    def _preconditioner(self) -> Preconditioner:
        likelihood = self._posterior.likelihood
        return Preconditioner(likelihood, 1 / tf.square(self._constant), self.times)

    def times(self, field: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        """Returns F^-1 kernel F field."""
        return self._posterior.filter(field, tf.cast(kernel, field.dtype))

    @functools.cached_property
    def _constant(self) -> tf.Tensor:
        return self._root_of(self._space.zeros().parameters)

    @functools.cached_property
    def _counted(self) -> tf.Tensor:
        """The number of times that each mode counts, [kz, ky, kx]."""
        x, y, z = multiplicities(self._space.box)
        return tf.constant(x * y * z)

    @functools.cached_property
    def inverse_factor(self) -> tf.Tensor:
        """The inverse of the Cholesky factor of the parameters' curvature."""
        return tf.linalg.inv(self._factor)

    @functools.cached_property
    def _factor(self) -> tf.Tensor:
        """The Cholesky factor of the parameters' curvature, at the middle of their priors."""
        count = len(self._space.names)
        slopes = []
        for number in range(count):
            away = np.zeros([*self._space.chains, count])
            away[..., number] = DIFFERENCE
            up, down = (tf.math.log(self._root_of(tf.constant(s * away))) for s in (1.0, -1.0))
            slope = (up - down) / (2 * DIFFERENCE)
            slopes.append(slope[0] if self._space.chains else slope)
        rows = tf.stack(slopes)
        local = 2 * tf.einsum("iabc,jabc,abc->ij", rows, rows, self._counted)
        box = self._space.box
        fisher = box.mesh.world.allreduce(local) / box.mesh.axis_size("replica")
        return tf.linalg.cholesky(tf.eye(count, dtype=tf.float64) + fisher)


@dataclass(frozen=True)
class Place:
    """A point of the unknowns, with what transforms its gradients to the coordinates.

    Attributes:
        scaling: the scaling between the point and its coordinates.
        point: the unknowns.
        volume: the log determinant of the transformation of the field, float64: this rank's part,
            for each of its chains. It is 0 where no parameters change it.
        inverse: the inverse of the square root of the curvature.
        tape: the gradient tape of field and volume by the parameters; it can be used once.
    """

    scaling: Scaling
    point: Unknowns
    volume: tf.Tensor
    inverse: tf.Tensor
    tape: tf.GradientTape | None = None

    def gradient(self, by_point: Unknowns) -> Unknowns:
        """Returns the gradient with respect to the coordinates, volume included.

        It can be called once.

        Args:
            by_point: the gradient with respect to the point.
        """
        field = self.scaling.times(by_point.field, self.inverse)
        if self.tape is None:
            return Unknowns(field, by_point.parameters)
        moved = self.tape.gradient(
            [self.point.field, self.volume],
            self.point.parameters,
            output_gradients=[by_point.field, tf.ones_like(self.volume)],
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        slope = by_point.parameters + moved
        return Unknowns(field, tf.linalg.matvec(self.scaling.inverse_factor, slope))


@dataclass(frozen=True)
class Evaluation:
    """Minus the log posterior at a point, up to a constant, for each chain [...], on every rank.

    Attributes:
        data: minus the log likelihood, annealed if asked.
        prior: half the sum of the squares of all unknowns.
        gradient: the gradient of the loss.
        volume: the log determinant of the coordinates, where parameters change it.
    """

    data: np.ndarray
    prior: np.ndarray
    gradient: Unknowns
    volume: np.ndarray | float = 0.0

    @property
    def loss(self) -> np.ndarray:
        """The loss: data + prior + volume."""
        return self.data + self.prior + self.volume


class Posterior:
    """The posterior of the initial conditions of an observed universe.

    Args:
        model: the model from white noise to the expected data: a density, or maps.
        likelihood: the likelihood of the data, given the expected data.
        priors: name -> (low, high) of the parameters that are fitted along, uniform between.

    Raises:
        ValueError: if the model does not have a parameter, or a prior has no width.
    """

    def __init__(
        self,
        model: UniverseModel,
        likelihood: Likelihood,
        priors: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        self.model, self.likelihood = model, likelihood
        self.priors = dict(UniformPriors(priors or {}).ranges)
        for name in self.priors:
            if not model.fitted(name) and name not in likelihood.parameters:
                raise ValueError(f"the model does not depend on {name}")
        self.space = Space(likelihood.box, tuple(self.priors))

    def parameters(self, x: Unknowns) -> dict[str, tf.Tensor]:
        """Returns the values of the parameters by name, float64 [...] of all chains.

        The normal distribution function maps each unit normal unknown to the uniform prior.
        """
        return self.values_of(x.parameters)

    def values_of(self, normal: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns the values of unit normal parameters by name, see `parameters`."""
        values = {}
        for number, (name, (low, high)) in enumerate(self.priors.items()):
            share = 0.5 * (1 + tf.math.erf(normal[..., number] / np.sqrt(2.0)))
            values[name] = low + (high - low) * share
        return values

    def point(self, field: tf.Tensor, values: Mapping[str, float]) -> Unknowns:
        """Returns the unknowns of white noise and of values of the parameters, see `parameters`.

        Args:
            field: this rank's block of the white noise [..., x, y, z].
            values: the value of each parameter with a prior.
        """
        shares = [(values[name] - low) / (high - low) for name, (low, high) in self.priors.items()]
        return Unknowns(field, tf.constant(ndtri(shares), tf.float64))

    def evaluate(self, x: Unknowns, annealing: Annealing = EXACT) -> Evaluation:
        """Returns minus the log posterior and its gradient. Must be called on all ranks together.

        Args:
            x: the point, or one for each chain.
            annealing: the annealing of the likelihood.

        Raises:
            HaloError: if a particle left the halo that was asked for.
        """
        parts, field, parameters = self.model.retry_with_wider_halo(lambda: self.data(x, annealing))
        data = self.space.total(parts)
        prior = 0.5 * self.space.dot(x, x)
        return Evaluation(data, prior, x + Unknowns(field, parameters))

    def data(self, x: Unknowns, annealing: Annealing) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns minus the log likelihood, this rank's part, and its gradient by the unknowns.

        Args:
            x, annealing: as for `evaluate`.
        """
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([x.field, x.parameters])
            values = self.parameters(x)
            expected = self.model(x.field, values)
            mesh, named = self.likelihood.box.mesh, self.likelihood.parameters
            parameters = {name: replicated(mesh, values[name]) for name in named if name in values}
            parts = self.likelihood.parts(expected, annealing, **parameters)
        gradients = tape.gradient(
            parts, [x.field, x.parameters], unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        return parts, *gradients

    def scaling(self, annealing: Annealing = EXACT) -> Scaling:
        """Returns the scaling to coordinates in which the annealed posterior is evenly curved."""
        return Scaling(self, annealing)

    @functools.cached_property
    def filter(self) -> MeshFunction:
        """The compiled `f(field, kernel)`: F^-1 kernel F field, for real kernels even in k."""
        box = self.space.box
        modes = box.mode_shape if self.space.names else mtf.Shape(box.mode_shape.dims[-3:])
        return box.function(
            lambda _, x, kernel: to_field(to_spectrum(x) * kernel, box),
            field=box.shape,
            kernel=modes,
        )


class EvenPosterior:
    """A posterior in coordinates of even curvature.

    Args:
        posterior: the posterior of the unknowns.
        annealing: the annealing of the likelihood.
        held: whether the parameters are held fixed: their gradient is then 0.
        natural: whether the density is that per unit of the parameters' own values, for a search of
            its maximum. Their priors are uniform, so they add nothing then, except beyond `EDGE`. A
            sampler needs the density per unit of the coordinates.
        whole: whether an evaluation in a small box is one graph, see `one_graph`: thousands of
            evaluations are worth the seconds that it takes to compile.
    """

    def __init__(
        self,
        posterior: Posterior,
        annealing: Annealing = EXACT,
        *,
        held: bool = False,
        natural: bool = False,
        whole: bool = False,
    ) -> None:
        self.posterior, self.annealing, self.held = posterior, annealing, held
        self._natural, self._whole = natural, whole
        self.space, self.scaling = posterior.space, posterior.scaling(annealing)

    def evaluate(self, u: Unknowns) -> Evaluation:
        """Returns minus the log density in the coordinates and its gradient in them.

        See `Posterior.evaluate`.
        """
        posterior, space = self.posterior, self.space
        terms = posterior.model.retry_with_wider_halo(lambda: self._terms(u.field, u.parameters))
        parts, squares, prior, volume, field, parameters = terms
        whole = 0.5 * space.total(squares) + prior.numpy()
        return Evaluation(
            space.total(parts),
            whole,
            Unknowns(field, parameters),
            space.total(volume) if space.names else 0.0,
        )

    @functools.cached_property
    def _terms(self) -> Callable[..., tuple[tf.Tensor, ...]]:
        """The function `f(field, parameters)` of coordinates, of this rank's tensors.

        It returns minus the log likelihood, the sum of the squares of the field, half the sum of
        the squares of the parameters as the density counts them, the log determinant, and the
        gradient with respect to field and parameters. The first, second and fourth are this rank's
        part. For a small box it is one graph.
        """
        box = self.space.box
        is_small = math.prod((*box.local_batch, *box.block)) <= SMALL
        return one_graph(self._evaluated, box.mesh) if self._whole and is_small else self._evaluated

    def _evaluated(self, field: tf.Tensor, parameters: tf.Tensor) -> tuple[tf.Tensor, ...]:
        place = self.scaling.place(Unknowns(field, parameters))
        point = place.point
        parts, *slopes = self.posterior.data(point, self.annealing)
        counted = point.parameters
        if self._natural:
            counted = counted - tf.clip_by_value(counted, -EDGE, EDGE)
        slope = Unknowns(*slopes) + Unknowns(point.field, counted)
        squares = tf.reduce_sum(tf.square(tf.cast(point.field, tf.float64)), axis=[-3, -2, -1])
        gradient = place.gradient(slope)
        if self.held:
            gradient = Unknowns(gradient.field, tf.zeros_like(gradient.parameters))
        prior = 0.5 * tf.reduce_sum(tf.square(counted), axis=-1)
        return parts, squares, prior, place.volume, gradient.field, gradient.parameters


def attempt(objective: Posterior | EvenPosterior, u: Unknowns) -> Evaluation | None:
    """Returns the evaluation at a point, or None on every rank if the model fails there."""
    try:
        return objective.evaluate(u)
    except (HaloError, FloatingPointError):
        return None
