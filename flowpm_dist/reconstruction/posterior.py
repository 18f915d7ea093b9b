"""Minus the log posterior of white noise and parameters, and its gradient."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.options import UniformPriors
from flowpm_dist.evolution.nbody import HaloError
from flowpm_dist.observables.universe_model import UniverseModel
from flowpm_dist.reconstruction.curvature import Scaling, mode_filter
from flowpm_dist.reconstruction.likelihoods import EXACT, Annealing, Likelihood
from flowpm_dist.reconstruction.unknowns import Space, Unknowns
from meshimpl.mesh_function import MeshFunction, replicated


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
        model: the model from white noise to what is seen: a density, or maps.
        likelihood: the likelihood of the data, given that.
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
        return self._values(x.parameters)

    def _values(self, normal: tf.Tensor) -> dict[str, tf.Tensor]:
        values = {}
        for number, (name, (low, high)) in enumerate(self.priors.items()):
            share = 0.5 * (1 + tf.math.erf(normal[..., number] / np.sqrt(2.0)))
            values[name] = low + (high - low) * share
        return values

    def evaluate(self, x: Unknowns, annealing: Annealing = EXACT) -> Evaluation:
        """Returns minus the log posterior and its gradient. Must be called on all ranks together.

        Args:
            x: the point, or one for each chain.
            annealing: the annealing of the likelihood.

        Raises:
            HaloError: if a particle left the halo that was asked for.
        """
        parts, field, parameters = self.model.retry_with_wider_halo(
            lambda: self._data(x, annealing)
        )
        data = self.space.total(parts)
        prior = 0.5 * self.space.dot(x, x)
        return Evaluation(data, prior, x + Unknowns(field, parameters))

    def _data(self, x: Unknowns, annealing: Annealing) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([x.field, x.parameters])
            values = self.parameters(x)
            seen = self.model(x.field, values)
            mesh, named = self.likelihood.box.mesh, self.likelihood.parameters
            own = {name: replicated(mesh, values[name]) for name in named if name in values}
            parts = self.likelihood.parts(seen, annealing, **own)
        found = tape.gradient(
            parts, [x.field, x.parameters], unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        return parts, *found

    def scaling(self, annealing: Annealing = EXACT) -> Scaling:
        """Returns the scaling to coordinates in which the annealed posterior is evenly curved.

        Linear theory gives the curvature of each mode: 1 + information x response^2.
        """
        kx, ky, kz = self.space.box.wavenumbers()
        kept = tf.exp(tf.constant(-((kx**2 + ky**2 + kz**2) * annealing.radius**2)))
        information = kept * (self.likelihood.information(annealing) / annealing.inflation**2)

        def root(normal: tf.Tensor) -> tf.Tensor:
            response = tf.cast(self.model.linear_response(self._values(normal)), tf.float64)
            return tf.sqrt(1 + information * tf.square(response))

        return Scaling(self.space, self._filter, root)

    @functools.cached_property
    def _filter(self) -> MeshFunction:
        return mode_filter(self.space)


class EvenPosterior:
    """A posterior in coordinates of even curvature.

    Args:
        posterior: the posterior of the unknowns.
        annealing: the annealing of the likelihood.
        held: whether the parameters are held fixed: their gradient is then 0.
    """

    def __init__(
        self, posterior: Posterior, annealing: Annealing = EXACT, *, held: bool = False
    ) -> None:
        self.posterior, self.annealing, self.held = posterior, annealing, held
        self.space, self.scaling = posterior.space, posterior.scaling(annealing)

    def evaluate(self, u: Unknowns) -> Evaluation:
        """Returns minus the log density in the coordinates and its gradient in them.

        See `Posterior.evaluate`.
        """
        place = self.scaling.place(u)
        found = self.posterior.evaluate(place.point, self.annealing)
        volume = self.space.total(place.volume) if self.space.names else 0.0
        gradient = place.gradient(found.gradient)
        if self.held:
            gradient = Unknowns(gradient.field, tf.zeros_like(gradient.parameters))
        return Evaluation(found.data, found.prior, gradient, volume)


def attempt(objective: EvenPosterior, u: Unknowns) -> Evaluation | None:
    """Returns the evaluation at a point, or None on every rank if the model fails there."""
    try:
        return objective.evaluate(u)
    except (HaloError, FloatingPointError):
        return None
