"""A network and the scale of its parameters, made from a plan, and the steps of its training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmoflow.network import layers
from flowpm_dist.cosmoflow.network.keras_network import KerasNetwork
from flowpm_dist.cosmoflow.network.layers import Standardiser
from flowpm_dist.cosmoflow.network.network import BaseNetwork, Network, of_all_replicas
from flowpm_dist.cosmoflow.network.optimisers import Adam, Momentum, Optimiser, Schedule
from flowpm_dist.cosmoflow.planning.options import MomentumOptions
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.cosmoflow.scores.judging import Predictions
from flowpm_dist.cosmoflow.volumes.draws import hashed
from flowpm_dist.cosmoflow.volumes.record_files import DatasetHeader
from flowpm_dist.cosmoflow.volumes.sources import Batch, BatchSource, PhaseClock
from meshimpl.process_mesh import ProcessMesh

MOST_FAILURES = 3
"""Steps in a row without a finite gradient after which a training stops."""

EDGE_OF_PRIOR = np.sqrt(3.0)
"""The ends of a uniform prior, in its standard deviations; no posterior mean lies beyond them."""


class DivergedError(FloatingPointError):
    """Gradients are not finite; the weights are from the last step with finite ones."""


@dataclass(frozen=True)
class Regressor:
    """A network that infers parameters, and the scale in which it learns them.

    Attributes:
        network: the network, on a mesh.
        standardiser: the scale of the parameters.
        step: number of steps that the network was trained for.
    """

    network: BaseNetwork
    standardiser: Standardiser
    step: int = 0

    def outputs_and_truth(
        self, batches: Iterable[Batch], count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the network's outputs for volumes, and the truth. On all ranks together.

        Args:
            batches: this rank's blocks. All replicas together have `count` volumes, and others
                that fill the last batch.
            count: number of volumes.

        Returns:
            outputs [count, outputs], standardised, and parameters [count, parameter] in physical
            units; the same on every rank, in the order of the batches.
        """
        outputs, truth = [], []
        for batch in batches:
            output = self.network.predict(batch.volumes)
            outputs.append(of_all_replicas(output, self.network.mesh))
            truth.append(of_all_replicas(batch.parameters, self.network.mesh))
        return np.concatenate(outputs)[:count], np.concatenate(truth)[:count]

    def predict(self, batches: Iterable[Batch], count: int) -> Predictions:
        """Returns predictions for volumes, see `outputs_and_truth`; the same on every rank."""
        outputs, truth = self.outputs_and_truth(batches, count)
        return Predictions(self.standardiser.names, truth, *self.in_physical_units(outputs))

    def mean_errors(self, batches: Iterable[Batch], count: int) -> tuple[float, float]:
        """Returns the mean loss of volumes without dropout, and the mean absolute error.

        The latter is over all parameters, in the scale that they are learned in; see
        `outputs_and_truth`.
        """
        predicted, truth = self.outputs_and_truth(batches, count)
        loss, outputs = self.network.loss, tf.constant(predicted.astype(np.float64))
        targets = self.standardiser.standardise(truth)
        each = layers.LOSSES[loss](tf.constant(targets), outputs)
        mean, _ = layers.split_prediction(loss, outputs)
        return float(tf.reduce_mean(each)), float(np.mean(np.abs(mean.numpy() - targets)))

    def in_physical_units(self, outputs: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns means and error bars, float64 [n, parameter], of whole outputs [n, outputs].

        The error bars are None where the loss trains none.
        """
        mean, sigma = layers.split_prediction(self.network.loss, tf.constant(outputs))
        if sigma is not None:
            sigma = self.standardiser.restore_sigma(sigma.numpy().astype(np.float64))
        return self.standardiser.restore(mean.numpy().astype(np.float64)), sigma


@dataclass(frozen=True)
class StepReport:
    """The result of a step.

    Attributes:
        step: number from 0.
        loss: mean over the batch, before the update.
        rate: learning rate.
        gradient_norm: norm over all weights, before clipping.
        finite: whether the update was made.
        seconds: seconds of each phase.
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
        regressor: its weights are equal on all ranks.
        optimiser: updates the weights.
        source: makes the batches.
        clock: measures the phases; shared with the source.
        seed: decides what dropout leaves out.
    """

    def __init__(
        self,
        regressor: Regressor,
        optimiser: Optimiser,
        source: BatchSource,
        clock: PhaseClock,
        seed: int = 0,
    ) -> None:
        self.regressor, self.optimiser, self._seed = regressor, optimiser, seed
        self.source, self.clock = source, clock
        self._failures = 0

    def step(self, number: int) -> StepReport:
        """Trains on one batch. On all ranks together.

        Raises:
            DivergedError: the gradients of several steps in a row were not finite.
            HaloError, RecordError: from the source.
        """
        batch, network = self.source.batch(number), self.regressor.network
        with self.clock("compute"):
            targets = self.regressor.standardiser.standardise(batch.parameters)
            seed = hashed([self._seed, number])
            loss, _, gradients = network.step(batch.volumes, targets, batch.samples, seed=seed)
            update = self.optimiser.apply(gradients, network.weights)
            loss, finite = float(loss), bool(update["finite"])
        waited = network.stopwatch.lap()
        self.clock.move("allreduce", "compute", waited["allreduce"])
        self.clock.move("halo", "compute", waited["alltoall"] + waited["allgather"])
        self._failures = 0 if finite else self._failures + 1
        if self._failures == MOST_FAILURES:
            raise DivergedError(
                f"the gradients of {MOST_FAILURES} steps in a row, up to step {number}, are not "
                "finite: a lower learning rate, a longer warm-up or clip_norm may help"
            )
        rate, norm = float(update["rate"]), float(update["gradient_norm"])
        return StepReport(number, loss, rate, norm, finite, self.clock.lap())


def standardiser_of(plan: TrainingPlan, header: DatasetHeader | None = None) -> Standardiser:
    """Returns the scale that parameters are learned in.

    Args:
        plan: the training. Its priors count for simulations, and for files without priors.
        header: header of the files, if any. Public files hold parameters scaled to -1 and 1.
    """
    ranges = dict(plan.priors.ranges)
    if header is not None:
        ranges = dict(header.priors or ranges)
        ranges = {name: ranges.get(name, (-1.0, 1.0)) for name in header.parameters}
    return Standardiser(ranges, bounded=plan.declaration.bounded)


def regressor_of(
    plan: TrainingPlan,
    mesh: ProcessMesh,
    header: DatasetHeader | None = None,
    batch: int | None = None,
) -> Regressor:
    """Returns the network of a training, untrained.

    Args:
        plan: the training.
        mesh: the ranks.
        header: header of the files, if any, see `standardiser_of`.
        batch: volumes at once, over all replicas; by default the batch of the training.

    Raises:
        ModelError: a Keras model that cannot be trained.
    """
    standardiser = standardiser_of(plan, header)
    name, bounded = plan.network.name, plan.declaration.bounded
    limited = plan.network.loss == "likelihood" and not bounded
    options: dict[str, Any] = {
        "width": plan.width,
        "batch": batch or plan.training.batch,
        "parameters": len(standardiser.names),
        "channels": plan.channels if header is None else header.channels,
        "within": EDGE_OF_PRIOR if limited else None,
        "seed": plan.training.seed,
        **plan.network.model_dump(exclude={"name"}),
    }
    network: BaseNetwork
    if plan.declaration.is_keras:
        network = KerasNetwork(name, mesh, flat=plan.lightcone is not None, **options)
    else:
        network = Network(name, mesh, centre=plan.training.centres, **options)
    return Regressor(network, standardiser)


def optimiser_of(plan: TrainingPlan) -> Optimiser:
    """Returns the optimiser of a training, not yet built."""
    training = plan.training
    options: dict[str, Any] = {
        "larc": training.trust,
        "weight_decay": training.weight_decay,
        "clip_norm": training.max_gradient_norm,
    }
    schedule = schedule_of(plan)
    if isinstance(training.optimiser, MomentumOptions):
        return Momentum(schedule, momentum=training.optimiser.momentum, **options)
    return Adam(schedule, **options)


def schedule_of(plan: TrainingPlan) -> Schedule:
    """Returns the learning rate of each step."""
    training = plan.training
    # As in MLPerf's reference, where the warm-up starts from the rate without a rule for batches.
    start = Schedule.start_factor
    if training.by_epochs:
        start = training.learning_rate / training.base_rate
    return Schedule(
        training.base_rate,
        training.decay,
        steps=training.steps,
        epochs=training.epochs,
        warmup_steps=training.warmup,
        start_factor=start,
    )
