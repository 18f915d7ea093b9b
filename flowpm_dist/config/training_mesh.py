"""The mesh of ranks that a training runs on, and the memory that it takes there.

Nothing here imports TensorFlow, Horovod or MPI.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from flowpm_dist.config.checks import ConfigError, Problem, fitting_mesh
from flowpm_dist.cosmoflow.planning.memory import training_memory
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.grid.decomposition import default_mesh, misfits, parse_mesh
from flowpm_dist.jobs.estimate import Demand


def check_training_mesh(
    plan: TrainingPlan, ranks: int, *, source: Path, shape: str | None = None
) -> str:
    """Returns the shape of the mesh to train on.

    It is the one that was asked for. Otherwise it has as many replicas as divide the batch, and
    splits volumes over the ranks that remain.

    Args:
        plan: the training.
        ranks: number of ranks of the job.
        source: the run file, for messages.
        shape: from the command line; goes before the run file's.

    Returns:
        A text such as `"replica:2,row:2,col:1"`.

    Raises:
        ConfigError: not a mesh, its sizes do not multiply to `ranks`, an axis does not divide the
            batch or its side of the grid, or the network cannot be split.
    """
    return batched_mesh(plan, plan.training.batch, ranks, source=source, shape=shape)


def batched_mesh(
    plan: TrainingPlan,
    batch: int,
    ranks: int,
    *,
    source: Path,
    shape: str | None = None,
) -> str:
    """Returns the mesh for batches of another size than those of the training.

    Args:
        plan, ranks, source, shape: see `check_training_mesh`.
        batch: volumes at once, over all replicas.

    Raises:
        ConfigError: see `check_training_mesh`.
    """
    grid = plan.grid

    def misfits_of(text: str) -> list[str]:
        axes = parse_mesh(text, batched=True)
        if plan.lightcone is not None and axes.get("row", 1) * axes.get("col", 1) > 1:
            return [f"maps are whole on a rank: use the mesh replica:{ranks}"]
        wrong = misfits(axes, grid, ranks, batch)
        reason = plan.declaration.whole_because
        if axes.get("row", 1) * axes.get("col", 1) > 1 and reason:
            wrong.append(
                f"{plan.network.name} {reason}, so that its volumes cannot be split: use "
                f"sc18-periodic, or the mesh replica:{ranks}"
            )
        shared = [name for name, size in axes.items() if size > 1]
        if len(shared) > 2 and shared[0] != "replica":
            wrong.append("replica must come first: replica:...,row:...,col:...")
        return wrong

    if shape or plan.mesh:
        return fitting_mesh(shape, plan.mesh, misfits_of, source)
    replicas = math.gcd(ranks, batch)
    if replicas == ranks:
        return f"replica:{ranks}"
    try:
        if plan.lightcone is not None:
            raise ValueError("maps are whole on a rank")
        chosen = f"replica:{replicas},{default_mesh(ranks // replicas, grid)}"
        wrong = misfits_of(chosen)
    except ValueError as error:
        wrong = [str(error)]
    if wrong:
        advice = f"give a batch that {ranks} divides, such as {math.lcm(ranks, batch)}"
        what = f"= {batch}: has volumes for {replicas} of {ranks} ranks, and {wrong[0]}; {advice}"
        raise ConfigError(source, [Problem("training.batch", what)])
    return chosen


def training_demand(plan: TrainingPlan, shape: str) -> Demand:
    """Returns the memory that a training takes, and what would take less.

    Args:
        plan: of the training.
        shape: of the mesh, one that `check_training_mesh` has let pass.
    """
    axes = parse_mesh(shape, batched=True)
    free = replace(plan, mesh=None)
    return Demand(
        "the training",
        plan.grid,
        shape,
        functools.partial(training_memory, plan),
        lambda ranks: check_training_mesh(free, ranks, source=Path()),
        functools.partial(_lighter, plan, axes),
        grid_is_free=plan.simulates,
    )


def _lighter(
    plan: TrainingPlan, axes: Mapping[str, int], fits: Callable[[int], bool]
) -> Iterator[str]:
    """Yields the largest smaller buffer and the largest smaller batch that fit."""
    buffer, batch = plan.data.buffer, plan.training.batch
    if plan.simulates:
        for size in range(buffer - batch, 2 * plan.data.fill - batch - 1, -batch):
            data = plan.data.model_copy(update={"buffer": size})
            if fits(training_memory(replace(plan, data=data), plan.grid, axes)):
                yield f"data.buffer = {size}"
                break
    for size in range(batch // 2, 0, -1):
        if batch % size or size % axes.get("replica", 1):
            continue
        training = plan.training.model_copy(update={"batch": size})
        if fits(training_memory(replace(plan, training=training), plan.grid, axes)):
            yield f"training.batch = {size}"
            break
