"""The memory and the time of a job's parts on a rank.

Memory counts the values that lie there at the same time, with the halos of fields. The numbers were
measured; docs/measurements/memory.md compares the estimates with what jobs take. Times come from
jobs that have run here. Nothing here imports TensorFlow, Horovod or MPI.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from flowpm_dist.grid.decomposition import (
    HALO,
    MARGIN,
    PYRAMIDS,
    Grid,
    finer_grid,
    mesh_factor_problem,
    pyramid_problem,
)
from flowpm_dist.initial.options import CHUNK
from flowpm_dist.io.files import WriteError, read_json, write_text
from flowpm_dist.simulation.options import SolverOptions
from meshimpl import launch
from meshimpl.launch import user_cache

PROCESS = 700 * 2**20
"""Memory of a process that has TensorFlow and the packages, and small compiled graphs [bytes]."""
OF_RANKS = 40 * 2**20
"""Additional memory if there are several ranks: Horovod, MPI and their buffers [bytes]."""
PROGRAMS = {"simulate": 40 * 2**20, "reconstruct": 160 * 2**20, "emulate": 210 * 2**20}
"""Additional memory by command: compiled programs, of gradients too, and figures [bytes]."""
SHARED = 360 * 2**20
"""The part of `PROCESS` that the ranks of a host share: code and data of libraries [bytes]."""
STATE = 6
"""Values of a particle: displacement and velocity."""
KICK = 3
"""The new velocity, while the old one is still needed."""
FORCE = {"finite-difference": 5, "spectral": 11}
"""Values of a cell of the force mesh while it is transformed: fields, spectra, buffers."""
LPT = {1: 15, 2: 18, 3: 24}
"""Values of a particle while the initial conditions of an order are made."""
LPT_FIELDS = 5
"""More of them where the integrator keeps LPT fields."""
AMPLITUDE = 3
"""Values of a particle while the power of each mode is looked up: white noise, indices, results."""
POWER_VALUES = 24
"""Values in float64 of a wavenumber while the linear power is evaluated there."""
WRITING = 6
"""Values of a particle that the writing of a snapshot adds, up to a limit."""
CHUNKS = 512 * 2**20
"""That limit: chunks that are compressed at the same time [bytes]."""
NETWORK = 110
"""Values of a particle while a correction of states moves it."""
NETWORK_GRADIENT = 870
"""The same while that is differentiated."""
OUTPUT = 20
"""Values of a particle while an output is measured: the state, its density, a spectrum."""


def process_bytes(axes: Mapping[str, int], command: str | None = None) -> int:
    """Returns the memory of a rank without any field [bytes].

    Args:
        axes: sizes of the mesh's axes.
        command: the command, if it is in `PROGRAMS`.
    """
    ranks = OF_RANKS if math.prod(axes.values()) > 1 else 0
    return PROCESS + ranks + (PROGRAMS[command] if command else 0)


def field_cells(grid: Grid, axes: Mapping[str, int], width: int = 0) -> float:
    """Returns the cells of a field on a rank, with its halo.

    Args:
        grid: cells of the field along each side.
        axes: sizes of the mesh's axes, whose row and col split x and y.
        width: planes of halo on each side of an axis that is split.
    """
    ranks = axes.get("row", 1), axes.get("col", 1), 1
    return math.prod(n / p + 2 * width * (p > 1) for n, p in zip(grid, ranks, strict=True))


def halo_width(solver: SolverOptions) -> int:
    """Returns the halo of the force mesh, planes of its differences included."""
    halo = HALO if solver.halo == "auto" else solver.halo
    return math.ceil(solver.mesh_factor * halo) + MARGIN[solver.force_gradient]


def writing_bytes(solver: SolverOptions, grid: Grid, axes: Mapping[str, int]) -> int:
    """Returns the memory that writing a snapshot adds to `simulation_bytes` on a rank [bytes]."""
    values = WRITING * field_cells(grid, axes)
    return min(CHUNKS, math.ceil(values * np.dtype(solver.precision).itemsize))


def simulation_bytes(
    solver: SolverOptions, grid: Grid, axes: Mapping[str, int], *, outputs: bool = False
) -> int:
    """Returns the memory of the fields of one universe on a rank [bytes].

    Args:
        solver: options of the simulation.
        grid: cells along each side of the box.
        axes: the axes of the mesh of ranks, whose row and col split the box.
        outputs: whether states are measured and written during the run.

    Raises:
        ValueError: the force mesh, or its coarse mesh, does not fit the grid and the ranks.
    """
    if problem := mesh_factor_problem(solver.mesh_factor, grid, axes):
        raise ValueError(f"mesh_factor {problem}")
    finer = finer_grid(grid, solver.mesh_factor)
    if problem := pyramid_problem(solver.pyramid, finer, axes):
        raise ValueError(f"pyramid {problem}")
    cells, width = field_cells(grid, axes), halo_width(solver)
    transformed, padded = field_cells(finer, axes), field_cells(finer, axes, width)
    if solver.pyramid != "off":
        padded = field_cells(finer, axes, PYRAMIDS[solver.pyramid].density_halo(width))
        transformed = padded
    force = ((FORCE[solver.force_gradient] - 1) * transformed + padded) / cells
    lpt = LPT_FIELDS if solver.integrator.uses_lpt else 0
    held = max(force, OUTPUT) if outputs else force
    held = held if solver.state_correction is None else max(held, NETWORK)
    values = max(STATE + KICK + held, LPT[solver.lpt_order]) + lpt
    itemsize = np.dtype(solver.precision).itemsize
    power = AMPLITUDE * itemsize * cells + power_bytes(grid, itemsize)
    return math.ceil(max(values * itemsize * cells, power))


def power_bytes(grid: Grid, itemsize: int) -> int:
    """Returns the memory in which a rank evaluates the linear power, before its modes [bytes].

    Of a cube it is the table of the power by k^2, of which a rank has a part, and its chunks.
    """
    table = sum((n // 2) ** 2 for n in grid)
    return 2 * itemsize * table + 8 * POWER_VALUES * min(CHUNK, table)


COMPARABLE = 64
"""Ratio of cells up to which the speeds of two jobs are comparable."""


def kind_of(work: str, ranks: int) -> str:
    """Returns the name of this host's jobs of a kind; their speeds can be compared.

    Args:
        work: what is done, such as "simulate".
        ranks: number of ranks of the job that this process is part of or will start.
    """
    here = launch.detect()
    if here.size == 1:
        here = launch.RankEnvironment(size=ranks, local_size=launch.ranks_on_host(ranks))
    kind = {"work": work, "ranks": ranks, "threads": launch.threads_per_rank(here)}
    return json.dumps({**kind, "host": socket.gethostname()}, sort_keys=True)


def measured_rate(kind: str, cells: int) -> float | None:
    """Returns the seconds for each cell of the most similar job of a kind; None if there is none.

    Args:
        kind: the job's kind, see `kind_of`.
        cells: number of cells of its box.
    """
    near = {}
    found = _rates().get(kind)
    for size, rate in (found if isinstance(found, dict) else {}).items():
        ratio = max(int(size) / cells, cells / int(size))
        if ratio <= COMPARABLE:
            near[ratio] = rate
    return near[min(near)] if near else None


def measured_seconds(kind: str, cells: int, pieces: int) -> float | None:
    """Returns the duration of pieces of work [s], by `measured_rate`; None if it is not known.

    Args:
        kind, cells: see `measured_rate`.
        pieces: their number, such as steps.
    """
    rate = measured_rate(kind, cells)
    return None if rate is None else rate * cells * pieces


def record_rate(kind: str, cells: int, rate: float) -> None:
    """Keeps the speed of a job, if the file can be written.

    Args:
        kind: the job's kind, see `kind_of`.
        cells: number of cells of its box.
        rate: seconds for each cell in one step, or in another unit of the work.
    """
    rates = _rates()
    rates.setdefault(kind, {})[str(cells)] = rate
    with contextlib.suppress(WriteError):
        write_text(_rates_file(), json.dumps(rates, indent=1) + "\n")


def _rates_file() -> Path:
    return user_cache() / "rates.json"


def _rates() -> dict[str, dict[str, float]]:
    return read_json(_rates_file())
