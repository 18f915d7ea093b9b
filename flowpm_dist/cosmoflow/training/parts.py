"""The parts of a training, made from its plan."""

from __future__ import annotations

from typing import Any

import numpy as np

from flowpm_dist.cosmoflow.network.keras_network import AnyNetwork, KerasNetwork
from flowpm_dist.cosmoflow.network.losses import Standardiser
from flowpm_dist.cosmoflow.network.network import Network
from flowpm_dist.cosmoflow.network.optimisers import Adam, Momentum, Optimiser
from flowpm_dist.cosmoflow.network.schedules import (
    ByEpochs,
    Constant,
    Cosine,
    Polynomial,
    Schedule,
    StepDecay,
    scaled_rate,
)
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.cosmoflow.volumes.draws import Draws
from flowpm_dist.cosmoflow.volumes.maps import MapMaker
from flowpm_dist.cosmoflow.volumes.priors import Priors
from flowpm_dist.cosmoflow.volumes.record_files import MEAN_DENSITY, MEAN_ONE, ONE_COUNT
from flowpm_dist.cosmoflow.volumes.records import DatasetHeader
from flowpm_dist.cosmoflow.volumes.universes import Lanes, UniverseMaker, VolumeMaker
from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.jobs import cone_record
from flowpm_dist.observables.convergence_model import ConvergenceModel
from flowpm_dist.observables.forward_model import forward_model_of
from flowpm_dist.observables.noise import SurveyNoise
from flowpm_dist.observables.record import ATTRIBUTE, BARE
from flowpm_dist.statistics.cell_values import CellValues
from meshimpl.process_mesh import ProcessMesh


def standardiser_of(plan: TrainingPlan, header: DatasetHeader | None = None) -> Standardiser:
    """Returns the scale that parameters are learned in.

    Args:
        plan: whose priors count for simulations, and for files that name none.
        header: of the files, if any. Public files hold parameters scaled to -1 and 1.
    """
    ranges = dict(plan.priors.ranges)
    if header is not None:
        ranges = dict(header.priors or ranges)
        ranges = {name: ranges.get(name, (-1.0, 1.0)) for name in header.parameters}
    return Standardiser(ranges, bounded=plan.declaration.bounded)


UNITS = {"counts": ONE_COUNT, "convergence": "convergence 1"}
"""Of what is seen, by its kind; see `DatasetHeader`."""

EDGE_OF_PRIOR = np.sqrt(3.0)
"""The ends of a uniform prior, in its standard deviations; no posterior mean lies beyond them."""


def network_of(
    plan: TrainingPlan,
    mesh: ProcessMesh,
    *,
    parameters: int,
    channels: int = 1,
    batch: int | None = None,
) -> AnyNetwork:
    """Returns the network of a training, untrained.

    Args:
        plan: the training.
        mesh: the ranks.
        parameters: number of parameters to find.
        channels: of the volumes.
        batch: volumes at once, over all replicas; by default those of a step of the training.

    Raises:
        ModelError: a Keras model that cannot serve.
    """
    chosen = plan.network
    bounds = chosen.loss == "likelihood" and not plan.declaration.bounded
    common: dict[str, Any] = {
        "width": plan.width,
        "batch": batch or plan.training.batch,
        "parameters": parameters,
        "channels": channels,
        "loss": chosen.loss,
        "input": chosen.input or "log1p",
        "precision": chosen.precision,
        "within": EDGE_OF_PRIOR if bounds else None,
        "seed": plan.training.seed,
    }
    if plan.declaration.is_keras:
        return KerasNetwork(chosen.name, mesh, flat=plan.lightcone is not None, **common)
    return Network(
        chosen.name,
        mesh,
        gather_below=chosen.gather_below,
        dropout=chosen.dropout,
        centre=plan.training.centres,
        **common,
    )


def optimiser_of(plan: TrainingPlan) -> Optimiser:
    """Returns the optimiser of a training, not yet built."""
    asked = plan.training
    options: dict[str, Any] = {
        "larc": asked.trust,
        "weight_decay": asked.weight_decay,
        "clip_norm": asked.longest,
    }
    schedule = schedule_of(plan)
    if asked.optimiser == "sgd":
        return Momentum(schedule, momentum=asked.momentum, **options)
    return Adam(schedule, **options)


def schedule_of(plan: TrainingPlan) -> Schedule:
    """Returns the learning rate of each step."""
    asked = plan.training
    base = scaled_rate(
        asked.learning_rate, asked.batch, asked.reference_batch, rule=asked.rate_rule
    )
    warm = {"warmup_steps": asked.warmup}
    decay_steps = max(1, plan.total_steps - asked.warmup)
    if asked.decay == "polynomial":
        return Polynomial(base, asked.end_rate, decay_steps, power=asked.power, **warm)
    if asked.decay == "cosine":
        return Cosine(base, asked.end_rate, decay_steps, **warm)
    if asked.decay == "epochs":
        assert asked.epochs is not None
        return ByEpochs(
            base,
            milestones=asked.milestones or (),
            start_factor=asked.learning_rate / base,
            steps=plan.total_steps,
            epochs=asked.epochs,
            **warm,
        )
    if asked.decay == "steps":
        return StepDecay(base, milestones=asked.milestones or (), **warm)
    return Constant(base, **warm)


def maker_of(plan: TrainingPlan, mesh: ProcessMesh, lanes: Lanes) -> UniverseMaker:
    """Returns what simulates the universes of a training.

    Its simulation has the cosmology in the middle of the priors.

    Raises:
        ObservationError: an object of the user's own that cannot serve.
        VolumeError: a mask or noise in a file that cannot be read.
    """
    simulation = plan.simulation.simulation(Cosmology(**plan.middle), mesh=mesh.without("replica"))
    asked, targets = (plan.observation or BARE).options, tuple(plan.priors.ranges)
    if plan.lightcone is not None:
        cone = plan.lightcone
        seen = ConvergenceModel(simulation, cone.light_cone(), *cone.population())
        return MapMaker(seen, cone, priors_of(plan), lanes, targets)
    noise = None
    if asked.is_noisy or asked.mask is not None:
        noise = SurveyNoise(asked, simulation.box)
    model = forward_model_of(asked, simulation)
    values, times = cell_values_of(plan), asked.scale_factors(float(simulation.edges[-1]))
    return VolumeMaker(model, priors_of(plan), lanes, targets, noise, values, times)


def cell_values_of(plan: TrainingPlan) -> CellValues:
    """Returns what the numbers of a training's volumes are, as far as it is known."""
    asked = (plan.observation or BARE).options
    return CellValues(asked.is_positive, asked.mean_count)


def priors_of(plan: TrainingPlan) -> Priors:
    """Returns the priors of simulated universes, and how they are drawn from them."""
    return Priors(plan.priors.drawn, plan.priors.sampling, plan.data.seed)


def draws_of(plan: TrainingPlan) -> Draws:
    """Returns the order in which simulated universes are trained on."""
    data, training = plan.data, plan.training
    return Draws(
        simulations=data.simulations,
        reuse=data.reuse,
        buffer=data.buffer,
        fill=data.fill,
        batch=training.batch,
        seed=training.seed,
        balanced=data.balanced and plan.priors.sampling == "sobol",
    )


def header_of(plan: TrainingPlan, mesh: ProcessMesh, **options: Any) -> DatasetHeader:
    """Returns the header of a dataset of the simulations of a training."""
    seen = plan.observation or BARE
    attributes = {"run": plan.resolved(), ATTRIBUTE: seen.table()}
    if plan.lightcone is not None:
        attributes[cone_record.ATTRIBUTE] = cone_record.cone_table(plan.lightcone)
    unit = MEAN_ONE if seen.has_mean_one else MEAN_DENSITY
    return DatasetHeader(
        grid=plan.seen,
        parameters=tuple(plan.priors.ranges),
        channels=plan.channels,
        blocks=(mesh.axis_size("row"), mesh.axis_size("col")),
        box_size=plan.box_size if plan.lightcone is None else None,
        priors=plan.priors.ranges,
        attributes=attributes,
        unit=UNITS.get(seen.options.kind, unit),
        **options,
    )


def block_of_volumes(mesh: ProcessMesh) -> tuple[int, int, int, int]:
    """Returns which block of every volume is this rank's: row, rows, col, cols."""
    row, col = mesh.coordinate("row"), mesh.coordinate("col")
    return row, mesh.axis_size("row"), col, mesh.axis_size("col")
