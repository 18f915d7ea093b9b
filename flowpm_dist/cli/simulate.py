"""The command `flowpm-dist simulate`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from flowpm_dist.cli.common import (
    ENDS,
    Ranks,
    Set,
    begin_job,
    default_output,
    full_disks_told,
    job_size,
    leave,
    mesh_option,
    refuse,
    refuse_after,
    setting,
    stop_on,
)
from flowpm_dist.cli.preview import Check, IgnoreMemory, show_check, told
from flowpm_dist.config.objects import simulation_plan
from flowpm_dist.config.settings import Settings, parse_settings
from flowpm_dist.config.simulation import RunConfig, check_mesh, load
from flowpm_dist.io.errors import UserError
from flowpm_dist.io.files import WriteError, human_size
from flowpm_dist.jobs.estimate import Estimate
from flowpm_dist.jobs.output_folder import OutputFolder
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.simulate import (
    SimulationWork,
    Summary,
    demand_of,
    results_bytes,
    simulate_and_write,
    usual_seconds,
)
from meshimpl import launch


@dataclass(frozen=True)
class Plan:
    """A run that was checked and can begin.

    Attributes:
        work: what to simulate and to write.
        mesh: shape of the mesh of ranks.
        folder: of the results.
        overwrite: whether a finished run in the folder may be replaced.
        estimate: what the run will take.
    """

    work: SimulationWork
    mesh: str
    folder: OutputFolder
    overwrite: bool
    estimate: Estimate


def add_to(app: typer.Typer) -> None:
    """Add this command to a program."""
    app.command(
        epilog="Example: [bold]flowpm-dist simulate run.toml --ranks 4 --output universe[/bold]"
    )(simulate)


def simulate(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.TOML", help="What to simulate.")],
    ranks: Ranks = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the results; by default RUN-output."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a finished run in DIR.")
    ] = False,
    mesh: Annotated[str | None, mesh_option("row:2,col:2")] = None,
    check: Check = False,
    ignore_memory: IgnoreMemory = False,
    changes: Set = None,
) -> None:
    """Evolve a universe and write its snapshot, power spectrum, figures and timings."""
    output = output or default_output(run_file, "output")
    try:
        plan = make_plan(
            run_file,
            job_size(ranks),
            output,
            overwrite=overwrite,
            mesh=mesh,
            ignore_memory=ignore_memory,
            settings=parse_settings(changes or []),
        )
    except (UserError, launch.LaunchError) as error:
        refuse(str(error))
    if check:
        show_check(plan.work.run_text, plan.mesh, plan.estimate, output)
        return
    begin_job(ranks)
    run(plan)


def make_plan(
    run_file: Path,
    ranks: int,
    output: Path,
    *,
    overwrite: bool,
    mesh: str | None,
    ignore_memory: bool = False,
    settings: Settings | None = None,
) -> Plan:
    """Check everything that can be checked before the work begins.

    Args:
        run_file: TOML file.
        ranks: number of ranks of the job.
        output: folder of the results.
        overwrite: whether a finished run in the folder may be replaced.
        mesh: shape of the mesh, instead of the run file's.
        ignore_memory: whether the run may begin where the memory seems too small.
        settings: values in place of the run file's own.

    Raises:
        ConfigError: the run file has mistakes.
        OutputError: results cannot go to the folder.
        TooLargeError: the run does not fit into the memory.
    """
    config = load(run_file, settings)
    shape = check_mesh(config, ranks, source=run_file, shape=mesh)
    config = config.with_mesh(shape)
    folder = OutputFolder(output)
    work = work_of(config)
    demand = demand_of(work, shape)
    estimate = demand.estimate(results_bytes(work.plan), usual_seconds(work, ranks))
    if not ignore_memory:
        demand.check(estimate, launch.host_memory())
    folder.check(overwrite=overwrite, needed=estimate.disk)
    return Plan(work, shape, folder, overwrite, estimate)


def run(plan: Plan) -> None:
    """Simulate and write the results, as one of the ranks of the job."""
    rank = launch.detect().rank
    try:
        threads = launch.configure_threads()
        with results_of(plan, rank), full_disks_told(), Progress(rank) as progress:
            progress.note("\n".join(filter(None, [setting(), told(plan.estimate), "beginning"])))
            summary = simulate_and_write(
                plan.work, plan.mesh, plan.folder, progress, threads=threads
            )
    except ENDS as error:
        refuse_after(error)
    if summary is not None:
        print(report(plan, summary))


@contextmanager
def results_of(plan: Plan, rank: int) -> Iterator[None]:
    """Begin the output folder on rank 0, and remove what a failed or interrupted run wrote."""
    stop_on(signal.SIGINT, signal.SIGTERM)
    if rank == 0:
        plan.folder.begin(overwrite=plan.overwrite)
    try:
        yield
    except SystemExit as stopped:
        plan.folder.discard()
        if rank == 0:
            print("error: interrupted; no results were written", file=sys.stderr, flush=True)
        leave(int(stopped.code or 0))
    except WriteError:
        # On any rank: a barrier was passed since rank 0 began, so the partial is this job's.
        plan.folder.remove_partial()
        raise
    except BaseException:
        plan.folder.discard()
        raise


def work_of(config: RunConfig) -> SimulationWork:
    """Returns the work that a run file asks for."""
    return SimulationWork(
        plan=simulation_plan(config.box, config.initial, config.evolution, config.run),
        cosmology=config.cosmology.model_dump(exclude_none=True),
        seed=config.initial.seed,
        white_noise=config.initial.white_noise,
        paired=config.initial.paired,
        multipoles=config.results.multipoles,
        run_text=config.resolved(),
    )


def report(plan: Plan, summary: Summary) -> str:
    """Returns what is printed at the end: where the results are, and the first numbers."""
    path, steps = plan.folder.path, plan.work.plan.steps.step_count
    memory = human_size(max(summary.peak_memory))
    return f"""
Results in {path}:
  density.png         a slab of the universe
  power_spectrum.png  beside linear theory; numbers in power_spectrum.csv
  snapshot.zarr       all fields; in Python: flowpm_dist.io.load_snapshot("{path}")
  run.toml            the run with all its settings; timings.json: seconds, memory, versions

{steps} steps in {summary.seconds:.3g} s after {summary.compile_seconds:.3g} s of compilation: \
{summary.ns_per_particle_per_step:.0f} ns per particle and step; at most {memory} on a rank.
P(k = {summary.k:.3f} h/Mpc) is {summary.ratio:.3f} of linear theory's."""
