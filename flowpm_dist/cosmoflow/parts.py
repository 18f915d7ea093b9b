"""The parts of a training that its run file asks for."""

from __future__ import annotations

from typing import Any

from flowpm_dist.config.objects import simulation_of
from flowpm_dist.config.training import TrainingConfig
from flowpm_dist.cosmoflow.in_situ import Lanes, UniverseMaker
from flowpm_dist.cosmoflow.losses import Standardiser
from flowpm_dist.cosmoflow.network import Network
from flowpm_dist.cosmoflow.optimisers import SC18_TRUST, Adam, Momentum, Optimiser
from flowpm_dist.cosmoflow.priors import Priors
from flowpm_dist.cosmoflow.records import DatasetHeader, RecordDataset
from flowpm_dist.cosmoflow.schedules import (
    Constant,
    Cosine,
    Polynomial,
    Schedule,
    StepDecay,
    scaled_rate,
)
from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.evolution.options import RunOptions
from meshimpl.process_mesh import ProcessMesh


def standardiser_of(config: TrainingConfig, dataset: RecordDataset | None = None) -> Standardiser:
    """The scale that parameters are learned in.

    Args:
        config: whose priors count for simulations, and for files that name none.
        dataset: of the files, if any. Public files hold parameters scaled to -1 and 1.
    """
    ranges = dict(config.priors.ranges)
    if dataset is not None:
        ranges = dict(dataset.header.priors or ranges)
        ranges = {name: ranges.get(name, (-1.0, 1.0)) for name in dataset.header.parameters}
    low, high = (tuple(float(ends[i]) for ends in ranges.values()) for i in (0, 1))
    return Standardiser(tuple(ranges), low, high, bounded=config.declaration.bounded)


def network_of(
    config: TrainingConfig, mesh: ProcessMesh, *, parameters: int, channels: int = 1
) -> Network:
    """The network that a run file asks for, of so many parameters to find."""
    chosen = config.network
    return Network(
        chosen.name,
        mesh,
        width=config.width,
        batch=config.training.batch,
        parameters=parameters,
        channels=channels,
        loss=chosen.loss,
        input=chosen.input,
        precision=chosen.precision,
        gather_below=chosen.gather_below,
        dropout=chosen.dropout,
        centre=config.training.centres,
        seed=config.training.seed,
    )


def optimiser_of(config: TrainingConfig) -> Optimiser:
    """The optimiser that a run file asks for."""
    asked = config.training
    trust = SC18_TRUST if asked.larc is True else asked.larc or None
    options: dict[str, Any] = {
        "larc": trust,
        "weight_decay": asked.weight_decay,
        "clip_norm": asked.clip_norm,
    }
    schedule = schedule_of(config)
    if asked.optimiser == "sgd":
        return Momentum(schedule, momentum=asked.momentum, **options)
    return Adam(schedule, **options)


def schedule_of(config: TrainingConfig) -> Schedule:
    """The learning rate of each step."""
    asked = config.training
    base = scaled_rate(asked.learning_rate, asked.batch, rule=asked.rate_rule)
    warm = {"warmup_steps": asked.warmup}
    decay_steps = max(1, config.total_steps - asked.warmup)
    if asked.decay == "polynomial":
        return Polynomial(base, asked.end_rate, decay_steps, power=asked.power, **warm)
    if asked.decay == "cosine":
        return Cosine(base, asked.end_rate, decay_steps, **warm)
    if asked.decay == "steps":
        return StepDecay(base, milestones=asked.milestones or (), **warm)
    return Constant(base, **warm)


def maker_of(config: TrainingConfig, mesh: ProcessMesh, lanes: Lanes) -> UniverseMaker:
    """The simulations that a run file asks for."""
    middle = {name: sum(ends) / 2 for name, ends in config.priors.ranges.items()}
    precision: Any = "float64" if config.network.precision == "float64" else "float32"
    simulation = simulation_of(
        Cosmology(**{**config.fixed_parameters, **middle}),
        config.box,
        config.initial,
        config.evolution,
        RunOptions(halo=config.run.halo, precision=precision),
        mesh=mesh.without("replica"),
    )
    priors = Priors(config.priors.ranges, config.priors.sampling, config.data.seed)
    return UniverseMaker(simulation, priors, lanes)


def header_of(config: TrainingConfig, mesh: ProcessMesh, **options: Any) -> DatasetHeader:
    """Of a dataset of the simulations of a run file."""
    return DatasetHeader(
        grid=config.box.grid,
        parameters=tuple(config.priors.ranges),
        blocks=(mesh.axis_size("row"), mesh.axis_size("col")),
        box_size=config.box.size,
        priors=config.priors.ranges,
        attributes={"run": config.resolved()},
        **options,
    )


def block_of_volumes(mesh: ProcessMesh) -> tuple[int, int, int, int]:
    """Which block of every volume is this rank's: row, rows, col, cols."""
    row, col = mesh.coordinate("row"), mesh.coordinate("col")
    return row, mesh.axis_size("row"), col, mesh.axis_size("col")
