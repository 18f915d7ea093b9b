"""The command `flowpm-dist simulate`, and the memory and disk space that a run needs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from flowpm_dist.cosmology.boltzmann_tables import power_in_background
from flowpm_dist.grid.decomposition import Grid, default_mesh, parse_mesh
from flowpm_dist.io.files import CONE_PARTICLES, LIGHT_CONE, WriteError
from flowpm_dist.io.particles import ID_BYTES
from flowpm_dist.io.snapshot import VECTORS, snapshot_bytes, snapshot_name
from flowpm_dist.jobs.folder import FIGURES_AND_TABLES
from flowpm_dist.jobs.job import Command, Costs, Job, Request, StopError
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.observables.light_cone.plan import particle_bytes
from flowpm_dist.options.regular_files import human_size
from flowpm_dist.simulate.folder import GALAXIES, HALOS, SimulationFolder
from flowpm_dist.simulate.options import KEEP, SimulationOptions, output_name
from flowpm_dist.simulation.cost import field_bytes, process_bytes, simulation_bytes, writing_bytes
from flowpm_dist.simulation.demand import Demand, Fits
from flowpm_dist.simulation.speeds import Pieces

if TYPE_CHECKING:
    from flowpm_dist.simulate.session import Summary

HALO_BYTES, HALO_PARTICLES = 400, 100
"""Size of a halo in a catalogue, and particles to a halo, about; a halo has 300 in a tree code's
run in cells of 2 Mpc/h."""


class SimulationJob(Job[SimulationOptions, "Summary | None"]):
    """A simulation that was checked and can begin."""

    command = Command(
        "simulate",
        "Evolve a universe and write its snapshot, power spectrum, figures and timings.",
        run_file="What to simulate.",
        example="flowpm-dist simulate run.toml --ranks 4 --output universe",
        takes_tables=True,
    )
    options_type, folder_type = SimulationOptions, SimulationFolder

    def __init__(self, options: SimulationOptions, mesh: str, request: Request) -> None:
        super().__init__(options, mesh, request)
        names = [output_name(a) for a in options.output_times]
        self.folder = SimulationFolder(request.output, names)

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
    def costs(self) -> Costs:
        options, cells = self.options, math.prod(self.options.box.grid)
        done = (self.folder.checkpoints.last or 0) * self.request.resume
        steps = Pieces(self.command.name, cells, options.evolution.step_count - done)
        return Costs(demand_of(options), output_bytes(options, self.ranks), (steps,))

    @override
    def speeds(self, result: Summary | None) -> Mapping[str, float]:
        if result is None:
            return {}
        seconds = 1e-9 * result.ns_per_particle_per_step * math.prod(self.options.box.grid)
        return {self.command.name: seconds}

    @override
    def while_loading(self) -> AbstractContextManager[None]:
        cosmology = self.options.cosmology
        if cosmology.transfer == "eisenstein-hu":
            return nullcontext()
        return power_in_background(cosmology.model_dump(exclude_none=True))

    @override
    def work(self, progress: Progress) -> Summary | None:
        from flowpm_dist.simulate.session import SimulationSession

        try:
            session = SimulationSession(self.options, self.folder, progress)
            summary = session.run(resume=self.request.resume, is_row=self.request.is_row)
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

    @override
    def report(self, result: Summary | None) -> str:
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
        if self.options.halos is not None:
            held += "\n" + self._halo_lines(summary)
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

    def _halo_lines(self, summary: Summary) -> str:
        """Returns the lines of the report about halos and galaxies."""
        section, path, figures = self.options.halos, self.folder.path, self.options.output.figures
        assert section is not None
        name = f"{HALOS}.{section.format}"
        files = ".png, .csv" if figures else ".csv"
        lines = f"""\
  {name:<19} {summary.halos:,} halos; in Python: fpm.Catalogue.read("{path / name}")
  halo_mass_function{files}: their abundance by mass; halo_power{files}: power and bias"""
        if section.galaxies is not None:
            name = f"{GALAXIES}.{section.format}"
            lines += f"""
  {name:<19} {summary.galaxies:,} galaxies; galaxy_power{files}: power and bias; \
galaxy_multipoles.csv: in redshift space"""
        return lines


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
    if options.halos is not None:
        cells = math.prod(options.box.grid)
        results += HALO_BYTES * cells // HALO_PARTICLES + ID_BYTES * cells * options.halos.members
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
    halo = options.usual_halo
    mesh, outputs = options.mesh.shape or "", bool(options.output_times)
    precision = options.run.precision
    maps = 0 if cone is None else cone.memory(precision)

    finder = 0 if options.halos is None else options.halos.values

    def without_maps(grid: Grid, axes: Mapping[str, int]) -> int:
        return (
            process_bytes(axes, "simulate")
            + simulation_bytes(options.counted_solver(grid), grid, axes, outputs=outputs)
            + max(
                writing_bytes(solver, grid, axes),
                field_bytes(options.results.values, grid, axes, precision),
                field_bytes(finder, grid, axes, "float64"),
            )
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
        lambda ranks: default_mesh(ranks, grid, solver.mesh_factor, solver.pyramid, halo),
        coarser,
        grid_is_free=options.initial.white_noise is None,
        pyramid=solver.pyramid,
        halo=halo,
    )
