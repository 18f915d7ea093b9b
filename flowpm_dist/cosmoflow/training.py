"""One step of training after the other, and what the network says of volumes it never saw."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmoflow import losses
from flowpm_dist.cosmoflow.in_situ import Batch
from flowpm_dist.cosmoflow.judging import Predictions
from flowpm_dist.cosmoflow.losses import Standardiser
from flowpm_dist.cosmoflow.network import Network
from flowpm_dist.cosmoflow.optimisers import Optimiser
from flowpm_dist.cosmoflow.phases import PhaseClock
from flowpm_dist.cosmoflow.priors import hashed

PATIENCE = 3
"""Steps in a row without a finite gradient after which a training stops."""


class Source(Protocol):
    """Where batches come from."""

    def start(self, step: int) -> None:
        """Make ready for a first step."""

    def batch(self, step: int) -> Batch:
        """What a step trains on; steps are asked for in order."""

    def preview(self, batches: int) -> Iterator[Batch]:
        """Some batches, before the first step, that change nothing of what steps train on."""

    def close(self) -> None:
        """No more steps will be asked for."""


class DivergedError(FloatingPointError):
    """Gradients are not finite; the weights are those of the last step that was."""


@dataclass(frozen=True)
class StepReport:
    """What is known of a step.

    Attributes:
        step: number from 0.
        loss: mean over the batch, before the update.
        rate: learning rate.
        gradient_norm: over all weights, before clipping.
        finite: whether the update was made.
        seconds: of each phase.
    """

    step: int
    loss: float
    rate: float
    gradient_norm: float
    finite: bool
    seconds: dict[str, float]


class Trainer:
    """Trains a network on batches from a source.

    Args:
        network: with weights that are equal on all ranks.
        optimiser: of the weights.
        standardiser: of the parameters.
        source: of the batches.
        clock: of the phases; shared with the source.
        follow: see `Network.follow`; 0 leaves the features' shift as it is.
        seed: of what dropout leaves out.
    """

    def __init__(
        self,
        network: Network,
        optimiser: Optimiser,
        standardiser: Standardiser,
        source: Source,
        clock: PhaseClock,
        follow: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._follow, self._seed = follow, seed
        self.network, self.optimiser, self.standardiser = network, optimiser, standardiser
        self.source, self.clock = source, clock
        self._failures = 0

    def step(self, number: int) -> StepReport:
        """Train on one batch. On all ranks together.

        Raises:
            DivergedError: the gradients of several steps in a row were not finite.
        """
        batch = self.source.batch(number)
        with self.clock("compute"):
            dtype = self.network.weights[0].dtype.as_numpy_dtype
            target = self.standardiser.standardise(batch.parameters).astype(dtype)
            loss, _, gradients = self.network.step(
                batch.volumes.astype(self.network.input_dtype, copy=False),
                target,
                batch.samples,
                seed=hashed([self._seed, number]),
            )
            update = self.optimiser.apply(gradients, self.network.weights)
            loss, finite = float(loss), bool(update["finite"])
            if self._follow and finite:
                self.network.follow(self._follow)
        waited = self.network.stopwatch.lap()
        self.clock.move("allreduce", "compute", waited["allreduce"])
        self.clock.move("halo", "compute", waited["alltoall"] + waited["allgather"])
        self._failures = 0 if finite else self._failures + 1
        if self._failures == PATIENCE:
            raise DivergedError(
                f"the gradients of {PATIENCE} steps in a row, up to step {number}, are not finite: "
                "a lower learning rate, a longer warm-up or clip_norm may help"
            )
        rate, norm = float(update["rate"]), float(update["gradient_norm"])
        return StepReport(number, loss, rate, norm, finite, self.clock.lap())

    def predict(self, batches: Iterable[Batch], count: int) -> Predictions:
        """What the network finds in volumes. On all ranks together.

        Args:
            batches: this rank's blocks, of all replicas `count` volumes and what fills the last.
            count: of volumes.

        Returns:
            the same on every rank, in the order of the batches.
        """
        return predict(self.network, self.standardiser, batches, count)

    def mean_loss(self, predictions: Predictions) -> float:
        """The loss of predictions [nat or standard deviations], as in training."""
        std = self.standardiser
        outputs = std.standardise(predictions.mean)
        if predictions.sigma is not None:
            log_variance = 2 * np.log(predictions.sigma / std.std)
            limit = losses.LOG_VARIANCE_LIMIT
            raw = limit * np.arctanh(np.clip(log_variance / limit, -1 + 1e-12, 1 - 1e-12))
            outputs = np.concatenate([outputs, raw], axis=1)
        targets = std.standardise(predictions.truth)
        each = losses.loss_function(self.network.loss)(tf.constant(targets), tf.constant(outputs))
        return float(tf.reduce_mean(each))


def predict(
    network: Network, standardiser: Standardiser, batches: Iterable[Batch], count: int
) -> Predictions:
    """As `Trainer.predict`."""
    outputs, truth = [], []
    replicas = network.mesh.axis_size("replica")
    for batch in batches:
        volumes = batch.volumes.astype(network.input_dtype, copy=False)
        outputs.append(network.whole_outputs(network.predict(volumes)))
        parameters = tf.constant(batch.parameters)
        if replicas > 1:
            parameters = network.mesh.communicator("replica").allgather(parameters)
        truth.append(parameters.numpy())
    mean, sigma = in_physical_units(network, standardiser, np.concatenate(outputs)[:count])
    return Predictions(standardiser.names, np.concatenate(truth)[:count], mean, sigma)


def in_physical_units(
    network: Network, standardiser: Standardiser, outputs: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None]:
    """Means and error bars, float64 [n, parameter], of whole outputs [n, outputs].

    The error bars are None where the loss trains none.
    """
    mean, sigma = losses.split_prediction(network.loss, tf.constant(outputs))
    if sigma is not None:
        sigma = standardiser.restore_sigma(sigma.numpy().astype(np.float64))
    return standardiser.restore(mean.numpy().astype(np.float64)), sigma
