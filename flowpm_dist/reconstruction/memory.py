"""How much memory a reconstruction takes, before TensorFlow is loaded.

The numbers were measured; docs/performance.md compares the estimates with what runs take.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from flowpm_dist.grid.decomposition import Grid
from flowpm_dist.jobs.estimate import process_bytes
from flowpm_dist.jobs.light_cone import MAPS
from flowpm_dist.reconstruction.plan import ReconstructionPlan

GRADIENT = {"pm": 91, "2lpt": 70, "1lpt": 45, "linear": 30}
"""Values of a cell while the gradient is taken, by the structure of the model."""
EXCHANGED = 24
"""More of them, of a rank's own cells, where ranks share the box: blocks with their halos, and what
the transforms send and receive, on the way forward and back."""
SEARCH = 90 * 2**20
"""Memory of the programs of a reconstruction [bytes]."""
OF_HISTORY = 2
"""Values of a cell for each change that L-BFGS remembers."""
OF_ADAM = 4
"""Values of a cell that Adam keeps."""


def memory_at(plan: ReconstructionPlan, grid: Grid, axes: Mapping[str, int]) -> int:
    """Returns the greatest memory of a rank of a reconstruction, TensorFlow included [bytes].

    Args:
        plan: of the reconstruction.
        grid: cells along each side, instead of the plan's.
        axes: of the mesh of ranks; the search splits the box over all of them.
    """
    ranks = math.prod(axes.values())
    search, sampler = plan.search, plan.sampler
    itemsize = np.dtype(plan.simulation.run.precision).itemsize
    kept = OF_HISTORY * search.history if search.optimiser == "lbfgs" else OF_ADAM
    gradient = GRADIENT.get(plan.observation.structure, GRADIENT["pm"])
    searching = (gradient + kept + (EXCHANGED if ranks > 1 else 0)) / ranks
    # A replica's chains go through the model together.
    together = math.ceil(sampler.chains / axes.get("replica", 1)) if sampler.draws else 0
    split = ranks // axes.get("replica", 1)
    drawing = (gradient + (EXCHANGED if split > 1 else 0)) * together / split
    values = max(searching, drawing) * math.prod(grid)
    if plan.lightcone is not None:
        values += MAPS * len(plan.lightcone.sources) * plan.lightcone.pixels**2 * max(1, together)
    return process_bytes(axes) + SEARCH + math.ceil(values * itemsize)
