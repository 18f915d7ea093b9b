"""The mesh of ranks of a training, and the memory and disk space that the training takes.

`simulation/cost.py` has the measured numbers; here are the sizes of networks, volumes and buffers.
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

from flowpm_dist.catalogues.options import FinderOptions
from flowpm_dist.cosmoflow.planning.data_options import SimulatedData
from flowpm_dist.cosmoflow.planning.declarations import Convolution
from flowpm_dist.grid.decomposition import HALO, Grid, default_mesh, misfits, parse_mesh
from flowpm_dist.jobs.folder import FIGURES_AND_TABLES
from flowpm_dist.jobs.run_file import ConfigError, fitting_mesh
from flowpm_dist.options import Problem
from flowpm_dist.particle_mesh.options import ForceOptions
from flowpm_dist.simulation.cost import (
    COMPILING,
    field_bytes,
    learning_bytes,
    map_bytes,
    predicting_bytes,
    process_bytes,
    ranks_of_a_field,
    simulation_bytes,
    statistics_values,
)
from flowpm_dist.simulation.demand import Demand

if TYPE_CHECKING:
    from flowpm_dist.cosmoflow.planning.folder import TrainingFolder
    from flowpm_dist.cosmoflow.planning.plan import TrainingPlan

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
    needed = ((plan.training.keep + 1) * 3 + 2) * weights_bytes(plan, plan.box.grid)
    if plan.simulates and not folder.held_out.exists():
        held_out = plan.simulated.validation + plan.simulated.test
        needed += held_out * volume_bytes(plan, plan.box.grid)
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
    lanes, ranks = _lanes(plan, axes), ranks_of_a_field(axes)
    outputs = lanes * _outputs(plan, grid) // ranks
    step = learning_bytes(outputs, weights_bytes(plan, grid), axes)
    simulating = _universes_bytes(plan, grid, axes) if plan.simulates else 0
    # A replica of one rank simulates and learns at the same time.
    busy = step + simulating if ranks == 1 else max(step, simulating)
    held = max(COMPILING, busy + buffer_bytes(plan, grid, axes))
    return process_bytes(axes, "train") + held


def dataset_memory(plan: TrainingPlan, grid: Grid, axes: Mapping[str, int]) -> int:
    """Returns the greatest memory of a rank that simulates a dataset [bytes], see above."""
    return process_bytes(axes) + _universes_bytes(plan, grid, axes)


def _lanes(plan: TrainingPlan, axes: Mapping[str, int]) -> int:
    """Returns the number of volumes that a replica has at once."""
    return math.ceil(plan.training.batch / axes.get("replica", 1))


def _universes_bytes(plan: TrainingPlan, grid: Grid, axes: Mapping[str, int]) -> int:
    """Returns the memory of a rank that simulates a batch of universes, with channels [bytes]."""
    several = plan.lightcone is None and plan.channels > 1
    each = max(
        simulation_bytes(run.counted_solver(grid), grid, axes, outputs=several, batched=True)
        for run, *_ in plan.run_plans
    )
    if plan.lightcone is not None:
        painted = plan.lightcone.painted_maps(plan.cosmology, plan.priors)
        each += map_bytes(plan.cells, plan.precision, sources=painted)
    if several:  # all channels one by one, and the volume made of them
        each += 2 * volume_bytes(plan, grid) // ranks_of_a_field(axes)
    finder: FinderOptions | None = plan.observation.value("halos")
    finding = 0 if finder is None else field_bytes(finder.values, grid, axes, "float64")
    together = 1 if sum(map(len, plan.run_plans)) > 1 else _lanes(plan, axes)
    return together * each + finding  # halos of one universe after another


def prediction_memory(
    plan: TrainingPlan, grid: Grid, axes: Mapping[str, int], networks: int = 1
) -> int:
    """Returns the greatest memory of a rank while networks predict for a volume [bytes].

    Args:
        plan, grid, axes: as for `training_memory`.
        networks: the number of networks, which predict one after another.
    """
    outputs = _outputs(plan, grid) // ranks_of_a_field(axes)
    predicting = predicting_bytes(outputs, networks * weights_bytes(plan, grid))
    return process_bytes(axes, "train") + COMPILING + predicting


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
    volumes = _lanes(plan, axes) if plan.simulates else 1
    # Channels are measured one after another; all results are kept.
    values = statistics_values(names) / plan.channels + (plan.channels > 1)
    measuring = math.ceil(values * volumes * volume_bytes(plan, grid) / ranks_of_a_field(axes))
    return process_bytes(axes, "train") + COMPILING + measuring


def _outputs(plan: TrainingPlan, grid: Grid) -> int:
    """Returns the size of all outputs of convolutions for one volume [bytes]."""
    precision = plan.network.precision
    itemsize = 2 if precision == "bfloat16" else np.dtype(precision).itemsize
    return itemsize * sum(
        stage.channels_after * stage.width_after**3
        for stage in plan.declaration.stages(grid[0], plan.channels, plan.outputs)
        if isinstance(stage.layer, Convolution)
    )


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
            divide the batch or its side of the grid, the network cannot be split, or a linking
            length of halos spans a rank's block.
    """
    chosen = _training_mesh(plan, ranks, source, shape, batch, simulating)
    finder: FinderOptions | None = plan.observation.value("halos")
    if plan.simulates and simulating and finder is not None:
        axes, box = parse_mesh(chosen, batched=True), plan.box
        if problem := finder.mesh_problem("observation.halos", box.grid, box.size, axes):
            raise ConfigError(source, [problem])
    return chosen


def _training_mesh(
    plan: TrainingPlan,
    ranks: int,
    source: Path,
    shape: str | None,
    batch: int | None,
    simulating: bool,
) -> str:
    batch = batch or plan.training.batch
    simulating = simulating and plan.simulates
    forces = [run.solver for run, *_ in plan.run_plans] if simulating else [ForceOptions()]
    misfits_of = functools.partial(_misfits, plan, ranks, batch, forces)
    if shape or plan.mesh.shape:
        return fitting_mesh(shape, plan.mesh.shape, misfits_of, source)
    replicas = math.gcd(ranks, batch)
    if replicas == ranks:
        return f"replica:{ranks}"
    try:
        if reason := _whole_because(plan, ranks):
            raise ValueError(reason)
        each = ranks // replicas
        grid, halo = plan.box.grid, plan.usual_halo if simulating else HALO
        for force in forces:  # the mesh of one must fit all
            split = default_mesh(each, grid, force.mesh_factor, force.pyramid, halo)
            chosen = f"replica:{replicas},{split}"
            if not (wrong := misfits_of(chosen)):
                break
    except ValueError as error:
        wrong = [str(error)]
    if wrong:
        advice = f"give a multiple of {ranks}, such as {math.lcm(ranks, batch)}"
        reason = f"= {batch}: has volumes for {replicas} of {ranks} ranks, and {wrong[0]}; {advice}"
        raise ConfigError(source, [Problem("training.batch", reason)])
    return chosen


def _misfits(
    plan: TrainingPlan, ranks: int, batch: int, forces: Sequence[ForceOptions], text: str
) -> list[str]:
    """Returns why a mesh does not fit a training; nothing if it fits. Raises ValueError."""
    axes = parse_mesh(text, batched=True)
    if ranks_of_a_field(axes) > 1 and (reason := _whole_because(plan, ranks)):
        return [reason]
    wrong = [
        text
        for force in forces
        for text in misfits(axes, plan.box.grid, ranks, batch, force.mesh_factor, force.pyramid)
    ]
    shared = [name for name, size in axes.items() if size > 1]
    if len(shared) > 2 and shared[0] != "replica":
        wrong.append("replica must come first: replica:...,row:...,col:...")
    return wrong


def _halo(plan: TrainingPlan) -> int:
    """Returns the halo for which a mesh is chosen."""
    return plan.usual_halo if plan.simulates else HALO


def _whole_because(plan: TrainingPlan, ranks: int) -> str:
    """Returns why the inputs of the network cannot be split over ranks; empty if they can."""
    if plan.lightcone is not None:
        return f"maps are not split over ranks: use the mesh replica:{ranks}"
    return plan.declaration.whole_because(ranks)


def training_demand(plan: TrainingPlan, shape: str) -> Demand:
    """Returns the memory that a training takes, and settings that would take less.

    Args:
        plan: the training.
        shape: the mesh, checked by `check_training_mesh`.
    """
    memory = functools.partial(training_memory, plan)
    mesh_of = functools.partial(check_training_mesh, plan.with_mesh(None), source=Path())
    lighter = functools.partial(_lighter, plan, parse_mesh(shape, batched=True))
    return Demand(
        "the training",
        plan.box.grid,
        shape,
        memory,
        mesh_of,
        lighter,
        grid_is_free=plan.simulates,
        pyramid=plan.solver.pyramid,
        halo=_halo(plan),
    )


def _lighter(
    plan: TrainingPlan, axes: Mapping[str, int], fits: Callable[[int], bool]
) -> Iterator[str]:
    """Yields the largest buffer and the largest batch that fit in memory."""
    batch, data = plan.training.batch, plan.data
    if isinstance(data, SimulatedData):
        sizes = range(data.buffer - batch, 2 * data.fill - batch - 1, -batch)

        def is_enough(size: int) -> bool:
            smaller = plan.model_copy(update={"data": data.model_copy(update={"buffer": size})})
            return fits(training_memory(smaller, plan.box.grid, axes))

        largest = bisect.bisect_left(sizes, True, key=is_enough)
        if largest < len(sizes):
            yield f"data.buffer = {sizes[largest]}"
    for size in range(batch // 2, 0, -1):
        if batch % size or size % axes.get("replica", 1):
            continue
        training = plan.training.model_copy(update={"batch": size})
        if fits(
            training_memory(plan.model_copy(update={"training": training}), plan.box.grid, axes)
        ):
            yield f"training.batch = {size}"
            break
