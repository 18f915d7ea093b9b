"""The mesh of ranks of a training, and the memory and disk space that the training takes.

The numbers were measured; docs/measurements/memory.md compares the estimates with what runs take.
Nothing here imports TensorFlow, Horovod or MPI.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flowpm_dist.cosmoflow.planning.declarations import Convolution
from flowpm_dist.cosmoflow.planning.options import SimulatedData
from flowpm_dist.grid.decomposition import Grid, default_mesh, misfits, parse_mesh
from flowpm_dist.jobs.folder import FIGURES_AND_TABLES
from flowpm_dist.jobs.run_file import ConfigError, fitting_mesh
from flowpm_dist.observables.light_cone.plan import VALUES_PER_MAP, VALUES_PER_SPECTRUM
from flowpm_dist.options import Problem
from flowpm_dist.particle_mesh.options import ForceOptions
from flowpm_dist.simulation.cost import process_bytes, simulation_bytes
from flowpm_dist.simulation.demand import Demand

if TYPE_CHECKING:
    from flowpm_dist.cosmoflow.planning.folder import TrainingFolder
    from flowpm_dist.cosmoflow.planning.plan import TrainingPlan

TRAINING = 140 * 2**20
"""Memory of the programs and libraries of a training [bytes]."""
LEAST = 570 * 2**20
"""Memory that every training takes while its programs are compiled [bytes]."""
COPIES_OF_WEIGHTS = 6
"""Arrays of the weights' size: weights, gradients, Adam's moments, an update's own."""
OF_A_STEP = 2.0
"""Values in memory for each output of a convolution, in a forward and a backward pass."""
OF_A_PREDICTION = 1.0
"""Values in memory for each output of a convolution, in a forward pass only."""

OF_A_BATCH = 8
"""Values per cell and universe that a batch needs in addition to a simulation."""
VALUES_OF_STATISTICS = {"power": 5, "histograms": 10, "bispectrum": 45}
"""Values in memory for each cell while a statistic is measured."""
VALUES_OF_OTHERS = 10
"""The same for a user's statistic, about which nothing is known."""
LOGS_OF_A_STEP = 2048
"""Disk space of the logs of a step [bytes]."""


def volume_bytes(plan: TrainingPlan, grid: Grid) -> int:
    """Returns the size of a volume, or of maps, with all channels [bytes]."""
    cells = math.prod(grid) if plan.lightcone is None else plan.cells
    return plan.channels * cells * np.dtype(plan.precision).itemsize


def weights_bytes(plan: TrainingPlan, grid: Grid) -> int:
    """Returns the size of a network's weights [bytes]."""
    weights = plan.declaration.parameters(grid[0], plan.channels, plan.outputs)
    return weights * np.dtype(plan.precision).itemsize


def training_bytes(plan: TrainingPlan, folder: TrainingFolder) -> int:
    """Returns an upper estimate of the size of all files that a training writes [bytes]."""
    # Adam keeps two numbers for each weight; a new checkpoint is written before the oldest goes.
    needed = ((plan.training.keep + 1) * 3 + 2) * weights_bytes(plan, plan.grid)
    if plan.simulates and not folder.held_out.exists():
        held_out = plan.simulated.validation + plan.simulated.test
        needed += held_out * volume_bytes(plan, plan.grid)
    return needed + FIGURES_AND_TABLES + LOGS_OF_A_STEP * plan.training.steps


def buffer_bytes(plan: TrainingPlan, grid: Grid, axes: Mapping[str, int]) -> int:
    """Returns the memory of the kept volumes on each rank [bytes]; 0 if none are kept.

    Args:
        plan: the training.
        grid: cells along each side, instead of the plan's.
        axes: sizes of the mesh of ranks by axis.
    """
    if not plan.simulates:
        return 0
    return volume_bytes(plan, grid) * plan.simulated.buffer // math.prod(axes.values())


def training_memory(plan: TrainingPlan, grid: Grid, axes: Mapping[str, int]) -> int:
    """Returns the greatest memory of a rank of a training, TensorFlow included [bytes].

    Args:
        plan: the training.
        grid: cells along each side, instead of the plan's.
        axes: sizes of the mesh of ranks by axis.
    """
    ranks = math.prod(axes.values())
    lanes = math.ceil(plan.training.batch / axes.get("replica", 1))
    split = ranks // axes.get("replica", 1)
    step = lanes * OF_A_STEP * _outputs(plan, grid) * _itemsize(plan) / split
    step += COPIES_OF_WEIGHTS * weights_bytes(plan, grid)
    simulating = lanes * _universe_bytes(plan, grid, axes) if plan.simulates else 0
    # A replica of one rank simulates and learns at the same time.
    busy = step + simulating if split == 1 else max(step, simulating)
    held = TRAINING + math.ceil(busy) + buffer_bytes(plan, grid, axes)
    return process_bytes(axes) + max(LEAST, held)


def dataset_memory(plan: TrainingPlan, grid: Grid, axes: Mapping[str, int]) -> int:
    """Returns the greatest memory of a rank that simulates a dataset [bytes], see above."""
    lanes = math.ceil(plan.training.batch / axes.get("replica", 1))
    return process_bytes(axes) + lanes * _universe_bytes(plan, grid, axes)


def _universe_bytes(plan: TrainingPlan, grid: Grid, axes: Mapping[str, int]) -> int:
    """Returns the memory of a universe that is simulated on a rank, with its channels [bytes]."""
    split = axes.get("row", 1) * axes.get("col", 1)
    itemsize = np.dtype(plan.precision).itemsize
    batched = OF_A_BATCH * itemsize * math.prod(grid) // split
    if plan.lightcone is not None:
        maps = (VALUES_PER_SPECTRUM + VALUES_PER_MAP * plan.channels) * plan.cells * itemsize
        return simulation_bytes(plan.solver, grid, axes) + batched + maps
    if plan.channels == 1:
        return simulation_bytes(plan.solver, grid, axes) + batched
    # In memory are all channels one by one, and the volume made of them.
    channels = 2 * volume_bytes(plan, grid) // split
    return simulation_bytes(plan.solver, grid, axes, outputs=True) + batched + channels


def prediction_memory(
    plan: TrainingPlan, grid: Grid, axes: Mapping[str, int], networks: int = 1
) -> int:
    """Returns the greatest memory of a rank while networks predict for a volume [bytes].

    Args:
        plan, grid, axes: as for `training_memory`.
        networks: the number of networks, which predict one after another.
    """
    ranks = math.prod(axes.values())
    split = ranks // axes.get("replica", 1)
    outputs = OF_A_PREDICTION * _outputs(plan, grid) * _itemsize(plan) / split
    weights = 2 * networks * weights_bytes(plan, grid)
    return process_bytes(axes) + LEAST + math.ceil(outputs + weights)


def statistics_memory(
    plan: TrainingPlan, grid: Grid, axes: Mapping[str, int], names: Sequence[str]
) -> int:
    """Returns the greatest memory of a rank that measures statistics of volumes [bytes].

    The volumes of a simulated batch are measured together, volumes in files one at a time.

    Args:
        plan: the training.
        grid: cells along each side, instead of the plan's.
        axes: sizes of the mesh of ranks by axis.
        names: names of the statistics.
    """
    replicas = axes.get("replica", 1)
    lanes = math.ceil(plan.training.batch / replicas) if plan.simulates else 1
    values = sum(VALUES_OF_STATISTICS.get(name, VALUES_OF_OTHERS) for name in names)
    # Channels are measured one after another; all results are kept.
    cells = (values / plan.channels + (plan.channels > 1)) * volume_bytes(plan, grid)
    measuring = math.ceil(cells * lanes * replicas / math.prod(axes.values()))
    return process_bytes(axes) + LEAST + measuring


def _outputs(plan: TrainingPlan, grid: Grid) -> int:
    """Returns the number of all outputs of convolutions for one volume."""
    return sum(
        stage.channels_after * stage.width_after**3
        for stage in plan.declaration.stages(grid[0], plan.channels, plan.outputs)
        if isinstance(stage.layer, Convolution)
    )


def _itemsize(plan: TrainingPlan) -> int:
    return 2 if plan.network.precision == "bfloat16" else np.dtype(plan.network.precision).itemsize


def check_training_mesh(
    plan: TrainingPlan,
    ranks: int,
    *,
    source: Path,
    shape: str | None = None,
    batch: int | None = None,
    simulating: bool = True,
) -> str:
    """Returns the shape of the mesh to train on.

    A requested mesh is used. Otherwise the number of replicas is the largest that divides the
    batch and the ranks, and the ranks of a replica split its volumes.

    Args:
        plan: the training.
        ranks: number of ranks of the job.
        source: the run file, for messages.
        shape: the mesh from the command line, which replaces the run file's.
        batch: number of volumes at once, over all replicas; by default the training's batch.
        simulating: whether universes are simulated on the mesh, if the training does so.

    Returns:
        A text such as `"replica:2,row:2,col:1"`.

    Raises:
        ConfigError: the text is no mesh, its sizes do not multiply to `ranks`, an axis does not
            divide the batch or its side of the grid, or the network cannot be split.
    """
    batch = batch or plan.training.batch
    force = plan.solver if plan.simulates and simulating else ForceOptions()
    factor, pyramid = force.mesh_factor, force.pyramid
    whole = plan.declaration.whole_because(ranks)
    if plan.lightcone is not None:
        whole = f"maps are not split over ranks: use the mesh replica:{ranks}"

    def misfits_of(text: str) -> list[str]:
        axes = parse_mesh(text, batched=True)
        if whole and axes.get("row", 1) * axes.get("col", 1) > 1:
            return [whole]
        wrong = misfits(axes, plan.grid, ranks, batch, factor, pyramid)
        shared = [name for name, size in axes.items() if size > 1]
        if len(shared) > 2 and shared[0] != "replica":
            wrong.append("replica must come first: replica:...,row:...,col:...")
        return wrong

    if shape or plan.mesh.shape:
        return fitting_mesh(shape, plan.mesh.shape, misfits_of, source)
    replicas = math.gcd(ranks, batch)
    if replicas == ranks:
        return f"replica:{ranks}"
    try:
        if whole:
            raise ValueError(whole)
        chosen = f"replica:{replicas},{default_mesh(ranks // replicas, plan.grid, factor, pyramid)}"
        wrong = misfits_of(chosen)
    except ValueError as error:
        wrong = [str(error)]
    if wrong:
        advice = f"give a multiple of {ranks}, such as {math.lcm(ranks, batch)}"
        what = f"= {batch}: has volumes for {replicas} of {ranks} ranks, and {wrong[0]}; {advice}"
        raise ConfigError(source, [Problem("training.batch", what)])
    return chosen


def training_demand(plan: TrainingPlan, shape: str) -> Demand:
    """Returns the memory that a training takes, and settings that would take less.

    Args:
        plan: the training.
        shape: the mesh, checked by `check_training_mesh`.
    """
    free, what = plan.simulates, "the training"
    memory = functools.partial(training_memory, plan)
    mesh_of = functools.partial(check_training_mesh, plan.with_mesh(None), source=Path())
    lighter = functools.partial(_lighter, plan, parse_mesh(shape, batched=True))
    return Demand(what, plan.grid, shape, memory, mesh_of, lighter, grid_is_free=free)


def _lighter(
    plan: TrainingPlan, axes: Mapping[str, int], fits: Callable[[int], bool]
) -> Iterator[str]:
    """Yields the largest buffer and the largest batch that fit in memory."""
    batch, data = plan.training.batch, plan.data
    if isinstance(data, SimulatedData):
        sizes = range(data.buffer - batch, 2 * data.fill - batch - 1, -batch)

        def is_enough(size: int) -> bool:
            smaller = plan.model_copy(update={"data": data.model_copy(update={"buffer": size})})
            return fits(training_memory(smaller, plan.grid, axes))

        largest = bisect.bisect_left(sizes, True, key=is_enough)
        if largest < len(sizes):
            yield f"data.buffer = {sizes[largest]}"
    for size in range(batch // 2, 0, -1):
        if batch % size or size % axes.get("replica", 1):
            continue
        training = plan.training.model_copy(update={"batch": size})
        if fits(training_memory(plan.model_copy(update={"training": training}), plan.grid, axes)):
            yield f"training.batch = {size}"
            break
