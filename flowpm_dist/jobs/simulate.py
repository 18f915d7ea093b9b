"""The work of `flowpm-dist simulate`, and what it takes; nothing here imports TensorFlow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flowpm_dist.grid.decomposition import Grid, default_mesh, parse_mesh
from flowpm_dist.io.checksums import checksum
from flowpm_dist.io.particles import ID_BYTES
from flowpm_dist.io.snapshot import VECTORS, snapshot_bytes
from flowpm_dist.io.white_noise_file import open_white_noise
from flowpm_dist.jobs.estimate import Demand, Fits, process_bytes
from flowpm_dist.jobs.folder import FIGURES_AND_TABLES
from flowpm_dist.jobs.full_sky import FullSkyWork
from flowpm_dist.jobs.light_cone import LightConeWork
from flowpm_dist.jobs.options import OutputOptions
from flowpm_dist.observables.lensing.options import SourceOptions
from flowpm_dist.simulation.memory import simulation_bytes, writing_bytes
from flowpm_dist.simulation.plan import SimulationPlan

KEEP = 2
"""Checkpoints that are kept: the latest, and one should that be damaged."""


@dataclass(frozen=True)
class SimulationWork:
    """What to simulate, and what to write.

    Attributes:
        plan: how it is simulated.
        cosmology: parameters by name, as `Cosmology` takes them.
        seed: of the white noise; None if the noise is read from a file.
        white_noise: .npy file of the white noise; None if it comes from a seed.
        paired: whether the paired universe of the seed is simulated.
        output: format and fields of the snapshot, and how often a checkpoint is written.
        multipoles: line of sight of the multipoles in redshift space; None leaves them out.
        run_text: the resolved run file, kept with the results.
        light_cone: what is seen on the way; None for nothing.
    """

    plan: SimulationPlan
    cosmology: Mapping[str, Any]
    seed: int | None
    white_noise: Path | None
    paired: bool
    output: OutputOptions
    multipoles: Literal["x", "y", "z"] | None
    run_text: str
    light_cone: LightConeWork | FullSkyWork | None = None

    @property
    def tables(self) -> dict[str, SourceOptions]:
        """The populations of sources that are read from files, by key of the run file."""
        return {} if self.light_cone is None else self.light_cone.options.tables

    @property
    def files(self) -> dict[str, Path | None]:
        """Paths of the files that are read, by key of the run file."""
        noise = {} if self.white_noise is None else {"initial.white_noise": self.white_noise}
        return {**noise, **{key: source.file for key, source in self.tables.items()}}

    def checksums(self) -> dict[str, str]:
        """Returns the checksums of the values in these files, by key."""
        found = {key: source.checksum for key, source in self.tables.items()}
        if self.white_noise is not None:
            found["initial.white_noise"] = checksum(open_white_noise(self.white_noise))
        return found


def output_bytes(
    plan: SimulationPlan,
    output: OutputOptions,
    light_cone: LightConeWork | FullSkyWork | None = None,
    ranks: int = 1,
) -> int:
    """Returns an upper estimate of the size of all that a run writes, checkpoints included [bytes].

    Args:
        plan: of the simulation.
        output: of the run.
        light_cone: what it sees on the way.
        ranks: of the run.
    """
    itemsize = np.dtype(plan.run.precision).itemsize
    checkpoint = snapshot_bytes(plan.box.grid, itemsize, VECTORS)
    if output.format == "zarr":
        results = snapshot_bytes(plan.box.grid, itemsize, output.fields)
    else:
        results = checkpoint + ID_BYTES * math.prod(plan.box.grid)
    # One is written before the oldest goes; the last of them are there while results are written.
    every = output.checkpoint_every
    count = min(KEEP + 1, (plan.steps.step_count - 1) // every) if every else 0
    results *= 1 + len(output.times(plan.steps))
    if light_cone is not None:
        results += light_cone.results(itemsize, particle_files(plan, output, ranks))
        checkpoint += light_cone.checkpoint(itemsize)
    return max(results + count * checkpoint, checkpoint) + FIGURES_AND_TABLES


def particle_files(plan: SimulationPlan, output: OutputOptions, ranks: int) -> int:
    """Returns how many files of particles on a light cone a run writes at most.

    Args:
        plan, output, ranks: as for `output_bytes`.
    """
    every = output.checkpoint_every
    return ranks * (1 + ((plan.steps.step_count - 1) // every if every else 0))


def demand_of(work: SimulationWork, mesh: str) -> Demand:
    """Returns the memory that a run takes.

    Args:
        work: to be done.
        mesh: shape of the mesh of ranks.
    """
    plan, grid, cone = work.plan, work.plan.box.grid, work.light_cone
    itemsize = np.dtype(plan.run.precision).itemsize
    maps = 0 if cone is None else cone.memory(itemsize)

    def without_maps(grid: Grid, axes: Mapping[str, int]) -> int:
        return (
            process_bytes(axes)
            + simulation_bytes(plan, grid, axes, outputs=bool(work.output.times(plan.steps)))
            + writing_bytes(plan, grid, axes)
        )

    def coarser(fits: Fits) -> Iterator[str]:
        rest = without_maps(grid, parse_mesh(mesh))
        every = () if cone is None else cone.coarser()
        fitting = (told for told, seen in every if fits(rest + seen.memory(itemsize)))
        yield from itertools.islice(fitting, 1)

    return Demand(
        "the simulation",
        grid,
        mesh,
        lambda grid, axes: without_maps(grid, axes) + maps,
        lambda ranks: default_mesh(ranks, grid),
        coarser,
        grid_is_free=work.white_noise is None,
    )
