"""The mesh of ranks that a training runs on, and whether its volumes fit into memory.

Nothing here imports TensorFlow, Horovod or MPI.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from flowpm_dist.config.checks import ConfigError, Problem, fitting_mesh
from flowpm_dist.cosmoflow.plan import TrainingPlan
from flowpm_dist.grid.decomposition import default_mesh, misfits, parse_mesh
from flowpm_dist.io.files import human_size
from meshimpl import launch


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
        wrong = misfits(axes, grid, ranks, batch)
        if axes.get("row", 1) * axes.get("col", 1) > 1 and plan.declaration.edges == "valid":
            wrong.append(
                f"{plan.network.name} has valid edges, so that its volumes cannot be split: use "
                f"sc18-periodic, or the mesh replica:{ranks}"
            )
        return wrong

    if shape or plan.mesh:
        return fitting_mesh(shape, plan.mesh, misfits_of, source)
    replicas = math.gcd(ranks, batch)
    if replicas == ranks:
        return f"replica:{ranks}"
    try:
        chosen = f"replica:{replicas},{default_mesh(ranks // replicas, grid)}"
        wrong = misfits_of(chosen)
    except ValueError as error:
        wrong = [str(error)]
    if wrong:
        advice = f"give a batch that {ranks} divides, such as {math.lcm(ranks, batch)}"
        what = f"= {batch}: has volumes for {replicas} of {ranks} ranks, and {wrong[0]}; {advice}"
        raise ConfigError(source, [Problem("training.batch", what)])
    return chosen


def buffer_bytes(plan: TrainingPlan, shape: str) -> int:
    """Returns the memory of the kept volumes on each rank [bytes]; 0 where none are kept.

    Args:
        plan: the training.
        shape: of the mesh, one that `check_training_mesh` has let pass.
    """
    if not plan.simulates:
        return 0
    ranks = math.prod(parse_mesh(shape, batched=True).values())
    value = 8 if plan.network.precision == "float64" else 4
    return value * plan.data.buffer * plan.width**3 // ranks


def check_memory(plan: TrainingPlan, shape: str, ranks: int, source: Path) -> None:
    """Check that the volumes which are kept to draw from fit into this machine.

    Args:
        plan: the training.
        shape: of the mesh.
        ranks: of the job.
        source: the run file, for messages.

    Raises:
        ConfigError: they do not fit.
    """
    here = launch.detect()
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    together = here.local_size if here.size > 1 else math.ceil(ranks / nodes)
    needed = together * buffer_bytes(plan, shape)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        fits = plan.data.buffer * memory // (2 * needed)
        fits -= fits % plan.training.batch
        advice = f"{fits} would leave half of it free"
        if not fits:
            advice = (
                f"not even a batch of {plan.training.batch} leaves half of it free: make box.grid "
                "or training.batch smaller, or take more machines"
            )
        what = (
            f"= {plan.data.buffer}: these volumes take {human_size(needed)}, and this machine "
            f"has {human_size(memory)} of memory; {advice}"
        )
        raise ConfigError(source, [Problem("data.buffer", what)])
