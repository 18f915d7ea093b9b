"""The command `flowpm-dist simulate`."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import numpy as np
import typer

from flowpm_dist.cli.common import Ranks, Set, mesh_option
from flowpm_dist.cli.preview import Check, IgnoreMemory
from flowpm_dist.cli.resumable import (
    Request,
    ResumableJob,
    output_option,
    overwrite_option,
    resume_option,
    start,
)
from flowpm_dist.config.checks import check_same_values
from flowpm_dist.config.objects import simulation_plan
from flowpm_dist.config.simulation import RunConfig, check_mesh, load
from flowpm_dist.cosmology.camb_spline import camb_beside
from flowpm_dist.grid.decomposition import parse_mesh
from flowpm_dist.io.files import CONE_PARTICLES, LIGHT_CONE, human_size
from flowpm_dist.io.formats import snapshot_name
from flowpm_dist.jobs.estimate import Demand, Estimate
from flowpm_dist.jobs.light_cone import LightConeWork, particle_bytes
from flowpm_dist.jobs.options import output_name
from flowpm_dist.jobs.output_folder import OutputFolder
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.rates import Kind, kind_of, measured_rate, record_rate
from flowpm_dist.jobs.simulate import SimulationWork, demand_of, output_bytes, particle_files
from meshimpl import launch

if TYPE_CHECKING:
    from flowpm_dist.jobs.simulation_session import SimulationOutcome

MAY_DIFFER = ("output.checkpoint_every", "output.format", "output.fields", "results.multipoles",
              "run.halo")  # fmt: skip


class SimulationJob(ResumableJob[RunConfig, OutputFolder, "SimulationOutcome"]):
    """A simulation that was checked and can begin."""

    kind = OutputFolder.kind
    begun = OutputFolder.begun
    suffix = "output"

    @classmethod
    def plan(cls, asked: Request) -> Self:
        """See `ResumableJob.plan`.

        Raises:
            ConfigError: the run file has mistakes.
            OutputError: results cannot go to the folder.
        """
        config = load(asked.run_file, asked.settings)
        shape = check_mesh(config, asked.ranks, source=asked.run_file, shape=asked.mesh)
        times = config.output.times(config.evolution)
        folder = OutputFolder(asked.output, [output_name(a) for a in times])
        planned = cls(config.with_mesh(shape), shape, folder, asked)
        # Rank 0 alone looks: soon it writes there.
        if launch.detect().rank == 0:
            needed = planned.estimate.disk
            planned.check_folder(planned.resolved, needed, may_differ=MAY_DIFFER)
            planned._check_files()
        return planned

    def _check_files(self) -> None:
        """Check that the files of a run that is resumed have not changed since it was begun.

        Raises:
            ConfigError: they have.
        """
        then = self.folder.checksums() if self.resume else {}
        if then:
            work, begun = self.simulation, f"the {self.kind} in {self.folder.path}"
            check_same_values(then, work.checksums(), work.files, self.run_file, begun)

    @property
    def simulation(self) -> SimulationWork:
        """What the run file asks for."""
        config = self.config
        return SimulationWork(
            plan=simulation_plan(config.box, config.initial, config.evolution, config.run),
            cosmology=config.cosmology.model_dump(exclude_none=True),
            seed=config.initial.seed,
            white_noise=config.initial.white_noise,
            paired=config.initial.paired,
            output=config.output,
            multipoles=config.results.multipoles,
            run_text=self.resolved,
            light_cone=config.light_cone,
        )

    def describe(self) -> str:
        """See `ResumableJob.describe`."""
        count, steps = math.prod(self.config.box.grid), self.config.evolution.step_count
        told, cone = f"{count:,} particles, {steps} steps, mesh {self.mesh}", self.config.light_cone
        if isinstance(cone, LightConeWork) and cone.planes:
            told += f"; {cone.planes} planes of {cone.plane_width:g} Mpc/h on the light cone"
        if cone is None or not cone.particles:
            return told
        work, itemsize = self.simulation, np.dtype(self.config.run.precision).itemsize
        files = particle_files(work.plan, work.output, self._ranks)
        size = particle_bytes(cone.particles, itemsize, files)
        return f"{told}; about {cone.particles:,.0f} on the light cone, {human_size(size)}"

    @property
    def resolved(self) -> str:
        """See `ResumableJob.resolved`."""
        return self.config.resolved()

    @property
    def warnings(self) -> tuple[str, ...]:
        """See `ResumableJob.warnings`."""
        cone = self.config.light_cone
        return () if cone is None else cone.warnings

    @property
    def demand(self) -> Demand:
        """See `ResumableJob.demand`."""
        return demand_of(self.simulation, self.mesh)

    @property
    def estimate(self) -> Estimate:
        """See `ResumableJob.estimate`."""
        work, rate = self.simulation, measured_rate(self._kind, self._cells)
        done = (self.folder.last_step() or 0) if self.resume else 0
        steps = work.plan.steps.step_count - done
        seconds = None if rate is None else rate * self._cells * steps
        disk = output_bytes(work.plan, work.output, work.light_cone, self._ranks)
        return self.demand.estimate(disk, seconds)

    def remember(self, outcome: SimulationOutcome) -> None:
        """See `ResumableJob.remember`."""
        if outcome.summary is not None:
            rate = 1e-9 * outcome.summary.ns_per_particle_per_step
            record_rate(self._kind, self._cells, rate)

    @property
    def _kind(self) -> Kind:
        return kind_of("simulate", self._ranks)

    @property
    def _ranks(self) -> int:
        return math.prod(parse_mesh(self.mesh).values())

    @property
    def _cells(self) -> int:
        return math.prod(self.config.box.grid)

    def last_checkpoint(self) -> tuple[Path, str] | None:
        """See `ResumableJob.last_checkpoint`."""
        last = self.folder.last_step()
        return None if last is None else (self.folder.checkpoints, f"step {last}")

    def beside_loading(self) -> AbstractContextManager[None]:
        """See `ResumableJob.beside_loading`."""
        return camb_beside(self.simulation.cosmology)

    def work(self, progress: Progress) -> SimulationOutcome:
        """See `ResumableJob.work`."""
        from flowpm_dist.jobs.simulation_session import SimulationSession, unfinished_removed

        for warning in self.warnings:
            progress.warn(warning)
        with unfinished_removed(self.folder):
            session = SimulationSession(self.simulation, self.mesh, self.folder, progress)
            return session.run(resume=self.resume)

    def report(self, outcome: SimulationOutcome) -> str:
        """Returns where the results are, and the first numbers."""
        summary, path, output = outcome.summary, self.folder.path, self.config.output
        assert summary is not None
        name, steps = snapshot_name(output.format), self.config.evolution.step_count
        held = f"the particles, in the format {output.format}"
        if output.format == "zarr":
            held = f'{", ".join(output.fields)}; in Python: fpm.State.from_snapshot("{path}")'
        memory = human_size(max(summary.peak_memory))
        if self.folder.outputs:
            held += f"\n  {', '.join(self.folder.outputs)}: the same at earlier times, with spectra"
        if self.config.lightcone is not None:
            held += f'\n  {LIGHT_CONE:<19} maps; in Python: fpm.io.load_light_cone("{path}")'
            shear = "" if self.config.lightcone.sky == "full" else ", with sticks of shear"
            held += f"\n  convergence.png     that of the last sources{shear}"
            held += "\n  convergence_power.png, .csv: angular power of all pairs, beside theory"
            if self.config.lightcone.particles:
                held += f'\n  {CONE_PARTICLES}: in Python: fpm.io.read_light_cone("{path}")'
        return f"""
Results in {path}:
  density.png         a slab of the universe
  power_spectrum.png  beside linear theory; numbers in power_spectrum.csv
  {name:<19} {held}
  run.toml            the run with all its settings; timings.json: seconds, memory, versions

{steps} steps in {summary.seconds:.3g} s after {summary.compile_seconds:.3g} s of compilation: \
{summary.ns_per_particle_per_step:.0f} ns per particle and step; at most {memory} on a rank.
P(k = {summary.k:.3f} h/Mpc) is {summary.ratio:.3f} of linear theory's."""


def add_to(app: typer.Typer) -> None:
    """Add this command to a program."""
    app.command(
        epilog="Example: [bold]flowpm-dist simulate run.toml --ranks 4 --output universe[/bold]"
    )(simulate)


def simulate(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.TOML", help="What to simulate.")],
    ranks: Ranks = None,
    mesh: Annotated[str | None, mesh_option("row:2,col:2")] = None,
    output: Annotated[Path | None, output_option(SimulationJob.kind, SimulationJob.suffix)] = None,
    resume: Annotated[bool, resume_option(SimulationJob.kind)] = False,
    overwrite: Annotated[bool, overwrite_option(SimulationJob.kind)] = False,
    check: Check = False,
    ignore_memory: IgnoreMemory = False,
    changes: Set = None,
) -> None:
    """Evolve a universe and write its snapshot, power spectrum, figures and timings."""
    start(
        SimulationJob, run_file, ranks, mesh, output, resume=resume, overwrite=overwrite,
        check=check, ignore_memory=ignore_memory, changes=changes,
    )  # fmt: skip
