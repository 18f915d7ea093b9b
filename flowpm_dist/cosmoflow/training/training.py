"""The steps of a training, and the outputs of a network for volumes it was not trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmoflow.network import losses
from flowpm_dist.cosmoflow.network.keras_network import AnyNetwork
from flowpm_dist.cosmoflow.network.losses import Standardiser
from flowpm_dist.cosmoflow.network.network import of_all_replicas
from flowpm_dist.cosmoflow.network.optimisers import Optimiser
from flowpm_dist.cosmoflow.planning.phases import PhaseClock
from flowpm_dist.cosmoflow.scores.judging import Predictions
from flowpm_dist.cosmoflow.volumes.in_situ import Batch
from flowpm_dist.cosmoflow.volumes.priors import hashed

PATIENCE = 3
"""Steps in a row without a finite gradient after which a training stops."""


class BatchSource(Protocol):
    """A source of batches."""

    def start(self, step: int, progress: Callable[[int, int], None] | None = None) -> None:
        """Makes ready for a first step.

        Args:
            step: its number.
            progress: called with simulations made and to be made, over all replicas.
        """

    def simulations(self, step: int) -> int:
        """Returns the number of simulations made when a step begins, over all replicas."""

    def batch(self, step: int) -> Batch:
        """Returns the batch of a step; steps are asked for in order."""

    def preview(self, batches: int) -> Iterator[Batch]:
        """Returns some batches after `start`, without changing what steps train on."""

    def close(self) -> None:
        """Ends the work; no more steps will be asked for."""


class DivergedError(FloatingPointError):
    """Gradients are not finite; the weights are those of the last step that was."""


@dataclass(frozen=True)
class StepReport:
    """The result of a step.

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
        seed: of what dropout leaves out.
    """

    def __init__(
        self,
        network: AnyNetwork,
        optimiser: Optimiser,
        standardiser: Standardiser,
        source: BatchSource,
        clock: PhaseClock,
        seed: int = 0,
    ) -> None:
        self._seed = seed
        self.network, self.optimiser, self.standardiser = network, optimiser, standardiser
        self.source, self.clock = source, clock
        self._failures = 0

    def step(self, number: int) -> StepReport:
        """Trains on one batch. On all ranks together.

        Raises:
            DivergedError: the gradients of several steps in a row were not finite.
            HaloError, RecordError: from the source.
        """
        batch = self.source.batch(number)
        with self.clock("compute"):
            loss, _, gradients = self.network.step(
                batch.volumes,
                self.standardiser.standardise(batch.parameters),
                batch.samples,
                seed=hashed([self._seed, number]),
            )
            update = self.optimiser.apply(gradients, self.network.weights)
            loss, finite = float(loss), bool(update["finite"])
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


def outputs_and_truth(
    network: AnyNetwork, batches: Iterable[Batch], count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the outputs of a network for volumes, and the truth. On all ranks together.

    Args:
        network: on the mesh of these ranks.
        batches: this rank's blocks, of all replicas `count` volumes and what fills the last.
        count: of volumes.

    Returns:
        outputs [count, outputs], standardised, and parameters [count, parameter] in physical units;
        the same on every rank, in the order of the batches.
    """
    outputs, truth = [], []
    for batch in batches:
        outputs.append(network.whole_outputs(network.predict(batch.volumes)))
        truth.append(of_all_replicas(batch.parameters, network.mesh))
    return np.concatenate(outputs)[:count], np.concatenate(truth)[:count]


def predict(
    network: AnyNetwork, standardiser: Standardiser, batches: Iterable[Batch], count: int
) -> Predictions:
    """Returns predictions for volumes, see `outputs_and_truth`; the same on every rank."""
    outputs, truth = outputs_and_truth(network, batches, count)
    mean, sigma = in_physical_units(network, standardiser, outputs)
    return Predictions(standardiser.names, truth, mean, sigma)


def mean_loss(
    network: AnyNetwork, standardiser: Standardiser, batches: Iterable[Batch], count: int
) -> float:
    """Returns the mean loss of volumes without dropout, see `outputs_and_truth`."""
    return mean_errors(network, standardiser, batches, count)[0]


def mean_errors(
    network: AnyNetwork, standardiser: Standardiser, batches: Iterable[Batch], count: int
) -> tuple[float, float]:
    """Returns the mean loss of volumes without dropout, and the mean absolute error.

    The latter is over all parameters, in the scale that they are learned in; see
    `outputs_and_truth`.
    """
    found, truth = outputs_and_truth(network, batches, count)
    targets, outputs = standardiser.standardise(truth), tf.constant(found.astype(np.float64))
    each = losses.loss_function(network.loss)(tf.constant(targets), outputs)
    mean, _ = losses.split_prediction(network.loss, outputs)
    return float(tf.reduce_mean(each)), float(np.mean(np.abs(mean.numpy() - targets)))


def in_physical_units(
    network: AnyNetwork, standardiser: Standardiser, outputs: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns means and error bars, float64 [n, parameter], of whole outputs [n, outputs].

    The error bars are None where the loss trains none.
    """
    mean, sigma = losses.split_prediction(network.loss, tf.constant(outputs))
    if sigma is not None:
        sigma = standardiser.restore_sigma(sigma.numpy().astype(np.float64))
    return standardiser.restore(mean.numpy().astype(np.float64)), sigma
