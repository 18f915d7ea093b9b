"""The memory of a job's parts on a rank.

It counts the values that lie there at the same time, with the halos of fields. The numbers were
measured; docs/measurements/memory.md compares the estimates with what jobs take. Nothing here
imports TensorFlow, Horovod or MPI.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from flowpm_dist.grid.decomposition import (
    COMPONENTS,
    MARGIN,
    PYRAMIDS,
    Grid,
    finer_grid,
    mesh_factor_problem,
    parts_of,
    pyramid_problem,
)
from flowpm_dist.initial.options import CHUNK
from flowpm_dist.simulation.options import SolverOptions

PROCESS = 700 * 2**20
"""Memory of a process that has TensorFlow and the packages, and small compiled graphs [bytes]."""
OF_RANKS = 20 * 2**20
"""Additional memory if there are several ranks: Horovod, MPI and their buffers [bytes]."""
PROGRAMS = {
    "simulate": 40 * 2**20,
    "reconstruct": 160 * 2**20,
    "emulate": 210 * 2**20,
    "train": 140 * 2**20,
}
"""Additional memory by command: compiled programs, of gradients too, and figures [bytes]."""
SHARED = 360 * 2**20
"""The part of `PROCESS` that the ranks of a host share: code and data of libraries [bytes]."""
STARTER = 128 * 2**20
"""Memory of a process that starts jobs, without TensorFlow [bytes]."""

# A simulation: values of each particle, or of each cell of the force mesh, at the same time.
STATE = 6
"""Values of a particle: displacement and velocity."""
KICK = 3
"""The new velocity, while the old one is still needed."""
FORCE = {"finite-difference": 5, "spectral": 11}
"""Values of a cell of the force mesh while it is transformed: fields, spectra, buffers."""
SENT = 4
"""Values of a cell for each field that ranks exchange in its transforms."""
PADDED = {"finite-difference": 12, "spectral": 19}
"""Values of a cell of a halo while it is exchanged: fields with halos, what is sent and arrives."""
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
OUTPUT = 20
"""Values of a particle while an output is measured: the state, its density, a spectrum."""
BATCHED = 6
"""Additional values of a particle in each universe of a batch."""

# The gradient of a loss; it sends everything twice.
GRADIENT = {"linear": 60, "1lpt": 73, "2lpt": 86}
"""Values of a particle while a structure is differentiated; one with steps begins with "2lpt"."""
NETWORK_GRADIENT = 300
"""Additional values while a correction of states is differentiated."""

# Maps of a light cone: values of a pixel.
SPECTRUM = 15
"""Values for one spectrum, for any number of maps."""
MAP = 12
"""Values for each source on the flat sky: painted maps, their sum and their spectra."""
SPHERE = 4.5
"""Values for each map of the full sky while it is painted and measured."""
HARMONICS = 24
"""Memory of one spectrum of the full sky, for any number of maps [bytes a pixel]; it is float64."""
PLANE = 4
"""Values for each plane."""
RAYS = 15
"""Values while rays are traced, besides 6 for each source."""
THEORY = 45 * 2**20
"""Memory of theory and figures of maps [bytes]."""
RAY_PROGRAMS = 48 * 2**20
"""Memory of the code compiled for ray tracing [bytes]."""
PAINTING = 196 * 2**20
"""Memory of painting the full sky, and of its figures [bytes]."""
RECORDING = 160 * 2**20
"""Memory to find and write particles on the light cone [bytes]."""
NS_PER_COPY = 120.0
"""Processor time to paint one copy of a particle on the full sky for one source, measured [ns]."""

# Networks, and statistics of volumes.
COMPILING = 430 * 2**20
"""Memory that every network takes at least, while its programs are compiled [bytes]."""
LEARNING = 2
"""Values for each output of a convolution in a forward and a backward pass."""
LEARNED = 6
"""Values for each weight: weights, gradients, Adam's moments, an update's own."""
SUMMED = 3
"""Additional values for each weight while several ranks sum their gradients."""
STATISTICS = {"power": 5, "histograms": 10, "bispectrum": 45}
"""Values of a cell while a statistic is measured."""
OTHER_STATISTIC = 10
"""The same for a user's statistic, about which nothing is known."""


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
    parts = parts_of(axes)
    return math.prod(n / p + 2 * width * (p > 1) for n, p in zip(grid, parts, strict=True))


def field_bytes(values: float, grid: Grid, axes: Mapping[str, int], precision: str) -> int:
    """Returns the memory of so many values of each cell of a rank [bytes].

    Args:
        values: their number.
        grid, axes: as for `field_cells`.
        precision: dtype of the values.
    """
    return math.ceil(values * np.dtype(precision).itemsize * field_cells(grid, axes))


def ranks_of_a_field(axes: Mapping[str, int]) -> int:
    """Returns the number of ranks that share a field on a mesh of ranks with these axes."""
    return math.prod(parts_of(axes))


def halo_width(solver: SolverOptions) -> int:
    """Returns the halo of the force mesh, planes of its differences included."""
    assert solver.halo != "auto", "give the halo that is expected: see with_usual_halo"
    return math.ceil(solver.mesh_factor * solver.halo) + MARGIN[solver.force_gradient]


def writing_bytes(solver: SolverOptions, grid: Grid, axes: Mapping[str, int]) -> int:
    """Returns the memory that writing a snapshot adds to `simulation_bytes` on a rank [bytes]."""
    return min(CHUNKS, field_bytes(WRITING, grid, axes, solver.precision))


def simulation_bytes(
    solver: SolverOptions,
    grid: Grid,
    axes: Mapping[str, int],
    *,
    outputs: bool = False,
    batched: bool = False,
) -> int:
    """Returns the memory of the fields of one universe on a rank [bytes].

    Args:
        solver: options of the simulation.
        grid: cells along each side of the box.
        axes: the axes of the mesh of ranks, whose row and col split the box.
        outputs: whether states are measured and written during the run.
        batched: whether the universe is one of a batch.

    Raises:
        ValueError: the force mesh, or its coarse mesh, does not fit the grid and the ranks.
    """
    particles, (cells, halos) = field_cells(grid, axes), _force_mesh(solver, grid, axes)
    transformed = cells if solver.pyramid == "off" else cells + halos
    kind = solver.force_gradient
    transforming = FORCE[kind] * transformed + _sent(solver, axes) * cells
    exchanging = COMPONENTS[kind] * cells + PADDED[kind] * halos
    force = max(transforming, exchanging) / particles
    held = max(force, OUTPUT) if outputs else force
    held = held if solver.state_correction is None else max(held, NETWORK)
    values = max(STATE + KICK + held, LPT[solver.lpt_order]) + BATCHED * batched
    values += LPT_FIELDS if solver.integrator.uses_lpt else 0
    itemsize = np.dtype(solver.precision).itemsize
    power = AMPLITUDE * itemsize * particles + power_bytes(grid, itemsize)
    return math.ceil(max(values * itemsize * particles, power))


def _force_mesh(solver: SolverOptions, grid: Grid, axes: Mapping[str, int]) -> tuple[float, float]:
    """Returns the cells of the force mesh on a rank, and the cells of its halos.

    Raises:
        ValueError: as `simulation_bytes`.
    """
    if problem := mesh_factor_problem(solver.mesh_factor, grid, axes):
        raise ValueError(f"mesh_factor {problem}")
    finer = finer_grid(grid, solver.mesh_factor)
    if problem := pyramid_problem(solver.pyramid, finer, axes):
        raise ValueError(f"pyramid {problem}")
    width = halo_width(solver)
    if solver.pyramid != "off":
        width = PYRAMIDS[solver.pyramid].density_halo(width)
    cells = field_cells(finer, axes)
    return cells, field_cells(finer, axes, width) - cells


def _sent(solver: SolverOptions, axes: Mapping[str, int]) -> int:
    """Returns the values of a cell of the force mesh for messages of transforms."""
    whole = ranks_of_a_field(axes) == 1 or solver.pyramid != "off"
    return 0 if whole else SENT * COMPONENTS[solver.force_gradient]


def power_bytes(grid: Grid, itemsize: int) -> int:
    """Returns the memory in which a rank evaluates the linear power, before its modes [bytes].

    Of a cube it is the table of the power by k^2, of which a rank has a part, and its chunks.
    """
    table = sum((n // 2) ** 2 for n in grid)
    return 2 * itemsize * table + 8 * POWER_VALUES * min(CHUNK, table)


def gradient_bytes(
    structure: str,
    solver: SolverOptions,
    grid: Grid,
    axes: Mapping[str, int],
    *,
    steps: int,
    network: bool = False,
) -> int:
    """Returns the memory of a rank while a loss of one universe is differentiated [bytes].

    Args:
        structure: the model's structure; one that is not in `GRADIENT` has steps.
        solver, grid, axes: as for `simulation_bytes`.
        steps: their number, with whose kicks the kept fields of forces grow. What massive neutrinos
            add to a kick is not counted.
        network: whether a network moves the particles of states.

    Raises:
        ValueError: as `simulation_bytes`.
    """
    cells, halos = _force_mesh(solver, grid, axes)
    values = 2 * (_sent(solver, axes) * cells + PADDED[solver.force_gradient] * halos)
    values += 0 if structure in GRADIENT else FORCE[solver.force_gradient] * cells
    each = GRADIENT.get(structure, GRADIENT["2lpt"]) + NETWORK_GRADIENT * network
    values += each * field_cells(grid, axes)
    itemsize = np.dtype(solver.precision).itemsize
    of_fields = 0
    if structure not in GRADIENT:
        field = COMPONENTS[solver.force_gradient] * cells
        if solver.pyramid != "off":
            field = field_cells(finer_grid(grid, solver.mesh_factor), axes, halo_width(solver))
        field += cells * (solver.force_correction is not None)
        of_particles = int(field_cells(grid, axes) * itemsize)
        # integrators make a kick for each step, or one more
        of_fields = max(
            solver.adjoint.kept_bytes(kicks, int(field * itemsize), of_particles)
            for kicks in (steps, steps + 1)
        )
    return math.ceil(values * itemsize) + of_fields


def map_bytes(
    pixels: int,
    precision: str,
    *,
    sources: int,
    planes: int = 0,
    full_sky: bool = False,
    rays: bool = False,
) -> int:
    """Returns the memory of maps of a light cone and of their spectra [bytes].

    Args:
        pixels: number of pixels of a map.
        precision: dtype of the maps.
        sources: number of source distributions, each with a map.
        planes: number of planes, or shells, of matter that are painted.
        full_sky: whether the maps show the full sky.
        rays: whether rays are traced through the planes.
    """
    itemsize = np.dtype(precision).itemsize
    if full_sky:
        values = SPHERE * (sources + planes) * itemsize
        return math.ceil((HARMONICS + values) * pixels) + PAINTING
    values = SPECTRUM + MAP * sources + PLANE * planes
    if rays:
        return (values + RAYS + 6 * sources) * pixels * itemsize + RAY_PROGRAMS
    return values * pixels * itemsize


def painting_seconds(copies: float) -> float:
    """Returns the processor time to paint so many copies of particles on the full sky [s]."""
    return 1e-9 * NS_PER_COPY * copies


def learning_bytes(outputs: float, weights: int, axes: Mapping[str, int]) -> int:
    """Returns the memory of a rank while a network learns [bytes].

    Args:
        outputs: size of all outputs of convolutions, of the rank's part of its volumes [bytes].
        weights: size of the network's weights [bytes].
        axes: sizes of the mesh of ranks by axis.
    """
    copies = LEARNED + (SUMMED if math.prod(axes.values()) > 1 else 0)
    return math.ceil(LEARNING * outputs) + copies * weights


def predicting_bytes(outputs: float, weights: int) -> int:
    """Returns the memory of a rank while a network predicts; see `learning_bytes` [bytes]."""
    return math.ceil(outputs) + 2 * weights


def statistics_values(names: Iterable[str]) -> int:
    """Returns the values of a cell while statistics of these names are measured."""
    return sum(STATISTICS.get(name, OTHER_STATISTIC) for name in names)
