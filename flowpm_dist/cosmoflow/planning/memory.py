"""How much memory a network and its volumes take, before TensorFlow is loaded.

The numbers were measured; docs/performance.md compares the estimates with what runs take.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from flowpm_dist.cosmoflow.planning.declarations import Convolution
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.grid.decomposition import Grid
from flowpm_dist.jobs.estimate import process_bytes
from flowpm_dist.jobs.light_cone import MAPS, SPECTRA
from flowpm_dist.simulation.memory import simulation_bytes

TRAINING = 140 * 2**20
"""Memory of the programs and libraries of a training [bytes]."""
LEAST = 500 * 2**20
"""What every training takes for a while, when its programs are compiled [bytes]."""
COPIES_OF_WEIGHTS = 6
"""Weights, their gradients, Adam's two moments, and what an update makes."""
OF_A_STEP = 2.0
"""Values in memory for each output of a convolution, forward and backward."""
OF_A_PREDICTION = 1.0
"""Values in memory for each output of a convolution, forward alone."""

OF_A_BATCH = 8
"""Values of a cell of each universe of a batch, beyond those of a simulation of one."""
OF_STATISTICS = {"power": 5, "histograms": 10, "bispectrum": 45}
"""Values of a cell while a statistic is measured."""
OF_ANOTHER_STATISTIC = 10
"""The same of a user's own, of which nothing is known."""


def volume_bytes(plan: TrainingPlan, grid: Grid) -> int:
    """Returns the size of a volume, or of maps, with all channels [bytes]."""
    cells = math.prod(grid) if plan.lightcone is None else plan.cells
    return plan.channels * cells * (8 if plan.network.precision == "float64" else 4)


def buffer_bytes(plan: TrainingPlan, grid: Grid, axes: Mapping[str, int]) -> int:
    """Returns the memory of the kept volumes on each rank [bytes]; 0 where none are kept.

    Args:
        plan: of the training.
        grid: cells along each side, instead of the plan's.
        axes: of the mesh of ranks.
    """
    if not plan.simulates:
        return 0
    return volume_bytes(plan, grid) * plan.data.buffer // math.prod(axes.values())


def training_memory(plan: TrainingPlan, grid: Grid, axes: Mapping[str, int]) -> int:
    """Returns the greatest memory of a rank of a training, TensorFlow included [bytes].

    Args:
        plan: of the training.
        grid: cells along each side, instead of the plan's.
        axes: of the mesh of ranks.
    """
    ranks = math.prod(axes.values())
    lanes = math.ceil(plan.training.batch / axes.get("replica", 1))
    split = ranks // axes.get("replica", 1)
    step = lanes * OF_A_STEP * _outputs(plan, grid) * _itemsize(plan) / split
    step += COPIES_OF_WEIGHTS * _weights_bytes(plan, grid)
    simulating = lanes * _universe_bytes(plan, grid, axes) if plan.simulates else 0
    # A replica of one rank simulates while it learns.
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
    itemsize = np.dtype(plan.simulation.run.precision).itemsize
    batched = OF_A_BATCH * itemsize * math.prod(grid) // split
    if plan.lightcone is not None:
        maps = (SPECTRA + MAPS * plan.channels) * plan.cells * itemsize
        return simulation_bytes(plan.simulation, grid, axes) + batched + maps
    if plan.channels == 1:
        return simulation_bytes(plan.simulation, grid, axes) + batched
    # Each channel is kept beside the volume of all of them.
    channels = 2 * volume_bytes(plan, grid) // split
    return simulation_bytes(plan.simulation, grid, axes, outputs=True) + batched + channels


def prediction_memory(
    plan: TrainingPlan, grid: Grid, axes: Mapping[str, int], networks: int = 1
) -> int:
    """Returns the greatest memory of a rank that asks networks about a volume [bytes].

    Args:
        plan, grid, axes: as for `training_memory`.
        networks: their number, one of which is asked at a time.
    """
    ranks = math.prod(axes.values())
    split = ranks // axes.get("replica", 1)
    outputs = OF_A_PREDICTION * _outputs(plan, grid) * _itemsize(plan) / split
    weights = 2 * networks * _weights_bytes(plan, grid)
    return process_bytes(axes) + LEAST + math.ceil(outputs + weights)


def statistics_memory(
    plan: TrainingPlan, grid: Grid, axes: Mapping[str, int], names: Sequence[str]
) -> int:
    """Returns the greatest memory of a rank that measures statistics of volumes [bytes].

    Those of a batch that was simulated are measured together, volumes in files one at a time.

    Args:
        plan: of the training.
        grid: cells along each side, instead of the plan's.
        axes: of the mesh of ranks.
        names: of statistics.
    """
    replicas = axes.get("replica", 1)
    lanes = math.ceil(plan.training.batch / replicas) if plan.simulates else 1
    values = sum(OF_STATISTICS.get(name, OF_ANOTHER_STATISTIC) for name in names)
    # One channel after the other, all of which are kept.
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


def _weights_bytes(plan: TrainingPlan, grid: Grid) -> int:
    weights = plan.declaration.parameters(grid[0], plan.channels, plan.outputs)
    return weights * (8 if plan.network.precision == "float64" else 4)


def _itemsize(plan: TrainingPlan) -> int:
    return 2 if plan.network.precision == "bfloat16" else np.dtype(plan.network.precision).itemsize
