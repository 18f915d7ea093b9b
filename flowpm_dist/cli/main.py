"""The command `flowpm-dist`.

TensorFlow, Horovod and MPI are imported only after everything that can be checked has been, so that
a mistake is told within a second and on one rank alone.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowpm_dist.cli import dataset as cli_dataset
from flowpm_dist.cli import evaluate as cli_evaluate
from flowpm_dist.cli import predict as cli_predict
from flowpm_dist.cli import reconstruct as cli_reconstruction
from flowpm_dist.cli import train as cli_train
from flowpm_dist.cli.common import (
    ENDS,
    PATIENCE,
    Ranks,
    begin_job,
    default_output,
    job_size,
    leave,
    mesh_option,
    refuse,
    refuse_after,
    stop_on,
)
from flowpm_dist.config.simulation import RunConfig, check_mesh, load
from flowpm_dist.io.errors import UserError, WorkError
from flowpm_dist.io.files import WriteError, human_size
from flowpm_dist.io.white_noise_file import open_white_noise
from flowpm_dist.jobs.folder import OutputFolder
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.simulate import Summary, results_bytes, versions, write_results
from meshimpl import launch
from meshimpl.quiet import import_tensorflow

if TYPE_CHECKING:
    from flowpm_dist.simulation.simulation import Simulation

app = typer.Typer(
    name="flowpm-dist",
    help="Particle-mesh universes on many ranks, and networks that learn from them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@dataclass(frozen=True)
class Plan:
    """A run that was checked: what, on which mesh, and where its results go."""

    config: RunConfig
    mesh: str
    folder: OutputFolder
    overwrite: bool


def _show_version(asked: bool) -> None:
    if asked:
        print(f"flowpm-dist {versions().get('flowpm-dist', '(not installed, run from source)')}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show it and leave."),
    ] = False,
) -> None:
    """Particle-mesh universes on many ranks, and networks that learn from them."""


@app.command(
    epilog="Example: [bold]flowpm-dist simulate run.toml --ranks 4 --output universe[/bold]"
)
def simulate(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.TOML", help="What to simulate.")],
    ranks: Ranks = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where results go; by default RUN-output."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a finished run in DIR.")
    ] = False,
    mesh: Annotated[str | None, mesh_option("row:2,col:2")] = None,
) -> None:
    """Evolve a universe and write its snapshot, power spectrum, figures and timings."""
    output = output or default_output(run_file, "output")
    try:
        plan = make_plan(run_file, job_size(ranks), output, overwrite=overwrite, mesh=mesh)
    except UserError as error:
        refuse(str(error))
    begin_job(ranks)
    run(plan)


cli_reconstruction.add_to(app)
for command in (cli_train, cli_dataset, cli_evaluate, cli_predict):
    command.add_to(app)


@app.command(epilog="Example: [bold]flowpm-dist doctor --launch-test[/bold]")
def doctor(
    launch_test: Annotated[
        bool, typer.Option("--launch-test", help="Also start two ranks and let them talk.")
    ] = False,
) -> None:
    """Show what is installed, what is missing, and how to mend it."""
    from flowpm_dist.cli.doctor import run as examine

    sys.exit(examine(launch_test))


def make_plan(
    run_file: Path, ranks: int, output: Path, *, overwrite: bool, mesh: str | None
) -> Plan:
    """Check everything that can be checked before work begins.

    Args:
        run_file: TOML.
        ranks: of the job.
        output: folder for the results.
        overwrite: whether a finished run there may be replaced.
        mesh: shape that goes before the run file's.

    Raises:
        ConfigError: what is wrong in the run file.
        OutputError: why results cannot go there.
    """
    config = load(run_file)
    shape = check_mesh(config, ranks, source=run_file, shape=mesh)
    config = config.with_mesh(shape)
    folder = OutputFolder(output)
    folder.check(overwrite=overwrite, needed=results_bytes(config))
    return Plan(config, shape, folder, overwrite)


def run(plan: Plan) -> None:
    """Simulate and write, as one of the ranks of the job."""
    rank, steps = launch.detect().rank, plan.config.evolution.step_count
    try:
        threads = launch.configure_threads()
        with results_of(plan, rank), Progress(steps, rank=rank) as progress:
            summary = evolve_and_write(plan, progress, threads)
    except ENDS as error:
        refuse_after(error)
    if summary is not None:
        print(report(plan, summary))


@contextmanager
def results_of(plan: Plan, rank: int) -> Iterator[None]:
    """Rank 0's care for the output folder: a run that fails or is interrupted leaves nothing."""
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


def evolve_and_write(plan: Plan, progress: Progress, threads: int) -> Summary | None:
    """The work itself. Returns a summary on rank 0, None on the others."""
    progress.note("loading TensorFlow")
    import_tensorflow()
    from flowpm_dist import HaloError

    config, initial = plan.config, plan.config.initial
    simulation = simulation_of(config, plan.mesh)
    progress.note("initial conditions")
    noise = None if initial.white_noise is None else open_white_noise(initial.white_noise)
    try:
        state = simulation.run(
            seed=initial.seed, white_noise=noise, paired=initial.paired, progress=progress
        )
    except (HaloError, FloatingPointError) as error:
        raise WorkError(str(error)) from error
    progress.note("writing")
    return write_results(plan.folder, config, state, simulation.power, threads=threads)


def simulation_of(config: RunConfig, mesh: str) -> Simulation:
    """The simulation that a run file asks for, on a mesh of this job's ranks."""
    from flowpm_dist.config import objects
    from flowpm_dist.cosmology.parameters import Cosmology

    return objects.simulation_of(
        Cosmology(**config.cosmology.model_dump(exclude_none=True)),
        config.box,
        config.initial,
        config.evolution,
        config.run,
        mesh=mesh,
    )


def report(plan: Plan, summary: Summary) -> str:
    """Where to look, and the figures that come first."""
    path, steps = plan.folder.path, plan.config.evolution.step_count
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


def main() -> None:
    """Entry point of `flowpm-dist` and of `python -m flowpm_dist.cli`."""
    if launch.detect().rank == 0:
        app()
        return
    # Wrong usage is found by every rank, and rank 0 tells it.
    try:
        app(standalone_mode=False)
    except Exception as error:
        status = getattr(error, "exit_code", None)
        if status is None:
            raise
        time.sleep(PATIENCE)
        leave(status)


if __name__ == "__main__":
    main()
