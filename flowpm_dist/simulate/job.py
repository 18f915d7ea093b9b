"""The command `flowpm-dist simulate`, and the memory and disk space that a run needs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from flowpm_dist.cosmology.camb_tables import camb_in_background
from flowpm_dist.grid.decomposition import Grid, default_mesh, parse_mesh
from flowpm_dist.io.files import (
    CONE_PARTICLES,
    LIGHT_CONE,
    SNAPSHOTS,
    WriteError,
    human_size,
    read_json,
    read_text,
)
from flowpm_dist.io.particles import ID_BYTES
from flowpm_dist.io.snapshot import VECTORS, snapshot_bytes, snapshot_name
from flowpm_dist.jobs.folder import FIGURES_AND_TABLES
from flowpm_dist.jobs.job import Job
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.results import RunRecord, changed, is_locked
from flowpm_dist.jobs.run_file import settings_in
from flowpm_dist.observables.light_cone.plan import particle_bytes
from flowpm_dist.simulate.folder import STEP, SimulationFolder
from flowpm_dist.simulate.options import KEEP, SimulationOptions, output_name
from flowpm_dist.simulation.cost import process_bytes, simulation_bytes, writing_bytes
from flowpm_dist.simulation.demand import Demand, Fits

if TYPE_CHECKING:
    from flowpm_dist.simulate.session import Summary

POWER_K = 0.1
"""Wave number of the power that `runs` lists [h/Mpc]."""
LENSING_ELL = 300
"""Multipole of the convergence's power that `runs` lists."""


class SimulationJob(Job[SimulationOptions, "Summary | None"]):
    """A simulation that was checked and can begin."""

    name = "simulate"
    help = "Evolve a universe and write its snapshot, power spectrum, figures and timings."
    asks = "What to simulate."
    example = "flowpm-dist simulate run.toml --ranks 4 --output universe"
    options_type, folder_type = SimulationOptions, SimulationFolder
    suffix = "output"
    unit = STEP
    takes_tables = True
    folder: SimulationFolder

    @override
    def make_folder(self, path: Path) -> SimulationFolder:
        return SimulationFolder(path, [output_name(a) for a in self.options.output_times])

    @override
    def describe(self) -> str:
        count, steps = math.prod(self.options.box.grid), self.options.evolution.step_count
        cone = self.options.light_cone
        text = f"{count:,} particles, {steps} steps, mesh {self.mesh}"
        if cone is not None and cone.options.sky == "flat" and cone.planes:
            text += f"; {cone.planes} planes of {cone.plane_width:g} Mpc/h on the light cone"
        if cone is None or not cone.particles:
            return text
        itemsize = np.dtype(self.options.run.precision).itemsize
        size = particle_bytes(cone.particles, itemsize, particle_files(self.options, self.ranks))
        return f"{text}; about {cone.particles:,.0f} on the light cone, {human_size(size)}"

    @property
    @override
    def warnings(self) -> tuple[str, ...]:
        cone = self.options.light_cone
        return (*self.options.warnings, *(() if cone is None else cone.warnings))

    @property
    @override
    def demand(self) -> Demand:
        return demand_of(self.options)

    @property
    @override
    def disk(self) -> int:
        return output_bytes(self.options, self.ranks)

    @property
    @override
    def cells(self) -> int:
        return math.prod(self.options.box.grid)

    @property
    def remaining(self) -> int:
        """The number of steps that are left."""
        return self.options.evolution.step_count - ((self.folder.last_step() or 0) * self.resume)

    @override
    def seconds_per_piece(self, result: Summary | None) -> float | None:
        return None if result is None else 1e-9 * result.ns_per_particle_per_step * self.cells

    @override
    def during_tensorflow_import(self) -> AbstractContextManager[None]:
        cosmology = self.options.cosmology
        if cosmology.transfer != "camb":
            return nullcontext()
        return camb_in_background(cosmology.model_dump(exclude_none=True))

    def work(self, progress: Progress) -> Summary | None:
        """See `Job.work`. Returns the summary on rank 0."""
        from flowpm_dist.jobs.job import StopError
        from flowpm_dist.simulate.session import SimulationSession

        try:
            session = SimulationSession(self.options, self.folder, progress)
            summary = session.run(resume=self.resume)
            self.stopped_by = session.stopped_by
            return summary
        except StopError:
            self.folder.release()
            raise
        except WriteError:
            # On any rank: a barrier was passed since rank 0 began, so the partial is this job's.
            self.folder.remove_partial()
            raise
        except BaseException:  # what was written so far is removed, but checkpoints
            self.folder.discard()
            raise

    def report(self, result: Summary | None) -> str:
        """Returns where the results are, and the first numbers."""
        summary, path, output = result, self.folder.path, self.options.output
        assert summary is not None
        name, steps = snapshot_name(output.format), self.options.evolution.step_count
        held = f"the particles, in the format {output.format}"
        if output.format == "zarr":
            held = f'{", ".join(output.fields)}; in Python: fpm.State.from_snapshot("{path}")'
            held = held if output.fields else "the attributes of the run alone"
        memory = human_size(max(summary.peak_memory))
        if self.folder.outputs:
            held += f"\n  {', '.join(self.folder.outputs)}: the same at earlier times, with spectra"
        if self.options.lightcone is not None:
            held += f'\n  {LIGHT_CONE:<19} maps; in Python: fpm.io.load_light_cone("{path}")'
            shear = "" if self.options.lightcone.sky == "full" else ", with sticks of shear"
            if output.figures:
                held += f"\n  convergence.png     convergence of the last sources{shear}"
            files = ".png, .csv" if output.figures else ".csv"
            held += f"\n  convergence_power{files}: angular power of all pairs, with theory"
            if self.options.lightcone.particles:
                held += f'\n  {CONE_PARTICLES}: in Python: fpm.io.read_light_cone("{path}")'
        figures = """\
  density.png         a slab of the universe
  power_spectrum.png  with linear theory; numbers in power_spectrum.csv"""
        if not output.figures:
            figures = "  power_spectrum.csv  with linear theory"
        return f"""
Results in {path}:
{figures}
  {name:<19} {held}
  run.toml            the run with all its settings; timings.json: seconds, memory, versions

{steps} steps in {summary.seconds:.3g} s after {summary.compile_seconds:.3g} s of compilation: \
{summary.ns_per_particle_per_step:.0f} ns per particle and step; at most {memory} on a rank.
P(k = {summary.k:.3f} h/Mpc) is {summary.ratio:.3f} of linear theory's."""

    @classmethod
    @override
    def record(cls, path: Path) -> RunRecord | None:
        folder = SimulationFolder(path)
        if not folder.is_complete:
            if not folder.owner.is_file():
                return None
            state = "running" if is_locked(folder.owner) else "stopped"
            settings, last = settings_in(folder.run_file), folder.last_step()
            edges, steps = settings.get("evolution.edges"), settings.get("evolution.steps")
            of = steps if edges is None else len(edges) - 1
            done = "" if last is None else f"{last}/{of} steps"
            return RunRecord(path, "simulation", state, done, changed(folder.owner), {}, settings)
        # A snapshot alone was saved from Python: how long its steps took is not known.
        ends = path / "timings.json"
        when = changed(next(p for n in (ends.name, *SNAPSHOTS) if (p := path / n).exists()))
        results, done = {**_power(path / "power_spectrum.csv")}, ""
        results |= _lensing(path / "convergence_power.csv")
        if ends.exists():
            if not isinstance(seconds := read_json(ends).get("steps"), list):
                raise ValueError(f"{ends.name} is damaged")
            results = {"seconds": sum(seconds), **results}
            done = f"{len(seconds)}/{len(seconds)} steps"
        settings = settings_in(path / "run.toml")
        return RunRecord(path, "simulation", "complete", done, when, results, settings)


def _rows(path: Path, columns: int) -> np.ndarray:
    """Returns the first columns of a table below its line of names; no rows if there is none."""
    try:
        lines = read_text(path).splitlines()
        return np.loadtxt(lines, delimiter=",", skiprows=1, usecols=range(columns), ndmin=2)
    except (OSError, ValueError):
        return np.empty((0, columns))


def _power(path: Path) -> dict[str, float]:
    """Returns the measured power divided by linear theory's, nearest to `POWER_K`, by its name."""
    if not (rows := _rows(path, 4)).size:
        return {}
    k, power, _, linear = rows[np.argmin(np.abs(rows[:, 0] - POWER_K))].tolist()
    return {f"P/linear at {k:.2f} h/Mpc": power / linear}


def _lensing(path: Path) -> dict[str, float]:
    """Returns C_l of the last sources divided by halofit's, near `LENSING_ELL`, by its name."""
    if not (rows := _rows(path, 7)).size:
        return {}
    autos = rows[(rows[:, :2] == rows[:, 0].max()).all(axis=1)]
    nearest = autos[np.argmin(np.abs(autos[:, 2] - LENSING_ELL))].tolist()
    return {f"C_l/halofit at l = {nearest[2]:.0f}": nearest[3] / nearest[6]}


def output_bytes(options: SimulationOptions, ranks: int = 1) -> int:
    """Returns an upper estimate of the size of all that a run writes, checkpoints included [bytes].

    Args:
        options: the run file.
        ranks: number of ranks.
    """
    itemsize = np.dtype(options.run.precision).itemsize
    checkpoint = snapshot_bytes(options.box.grid, itemsize, VECTORS)
    if options.output.format == "zarr":
        results = snapshot_bytes(options.box.grid, itemsize, options.output.fields)
    else:
        results = checkpoint + ID_BYTES * math.prod(options.box.grid)
    # One is written before the oldest goes; the last of them are there while results are written.
    every = options.output.checkpoint_every
    count = min(KEEP + 1, (options.evolution.step_count - 1) // every) if every else 0
    results *= 1 + len(options.output_times)
    if (cone := options.light_cone) is not None:
        results += cone.results(itemsize, particle_files(options, ranks))
        checkpoint += cone.checkpoint(itemsize)
    return max(results + count * checkpoint, checkpoint) + FIGURES_AND_TABLES


def particle_files(options: SimulationOptions, ranks: int) -> int:
    """Returns how many files of particles on a light cone a run writes at most.

    Args:
        options, ranks: as for `output_bytes`.
    """
    every = options.output.checkpoint_every
    return ranks * (1 + ((options.evolution.step_count - 1) // every if every else 0))


def demand_of(options: SimulationOptions) -> Demand:
    """Returns the memory that a run takes.

    Args:
        options: the run file, with a mesh.
    """
    solver, grid, cone = options.solver, options.box.grid, options.light_cone
    mesh, outputs = options.mesh.shape or "", bool(options.output_times)
    precision = options.run.precision
    maps = 0 if cone is None else cone.memory(precision)

    def without_maps(grid: Grid, axes: Mapping[str, int]) -> int:
        return (
            process_bytes(axes, "simulate")
            + simulation_bytes(solver, grid, axes, outputs=outputs)
            + writing_bytes(solver, grid, axes)
        )

    def coarser(fits: Fits) -> Iterator[str]:
        rest = without_maps(grid, parse_mesh(mesh))
        every = () if cone is None else cone.coarser()
        fitting = (advice for advice, other in every if fits(rest + other.memory(precision)))
        yield from itertools.islice(fitting, 1)

    return Demand(
        "the simulation",
        grid,
        mesh,
        lambda grid, axes: without_maps(grid, axes) + maps,
        lambda ranks: default_mesh(ranks, grid, solver.mesh_factor, solver.pyramid),
        coarser,
        grid_is_free=options.initial.white_noise is None,
        pyramid=solver.pyramid,
    )
