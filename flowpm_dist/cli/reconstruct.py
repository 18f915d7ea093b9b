"""The command that finds the initial conditions of an observed universe: `reconstruct`."""

from __future__ import annotations

import math
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from flowpm_dist.cli.common import (
    Ranks,
    begin_job,
    default_output,
    job,
    job_size,
    mesh_option,
    refuse,
    stoppable,
)
from flowpm_dist.config.checks import ConfigError, Problem, check_resumed
from flowpm_dist.config.reconstruction import (
    ReconstructionConfig,
    check_reconstruction_mesh,
    load_reconstruction,
)
from flowpm_dist.io.errors import UserError
from flowpm_dist.jobs.folder import OutputError
from flowpm_dist.jobs.tables import read_rows
from flowpm_dist.reconstruction.folder import ReconstructionFolder
from flowpm_dist.reconstruction.observations import Observations
from flowpm_dist.reconstruction.plan import search_mesh
from meshimpl import launch

if TYPE_CHECKING:
    from flowpm_dist.reconstruction.search_session import Outcome

MAY_DIFFER = ("search.checkpoint_every", "search.keep", "run.halo")
FIELDS = 9  # of the results, at most
OF_ADAM = 4  # fields of a checkpoint
OF_CHAIN = 3  # likewise
FIGURES_AND_TABLES = 16 * 2**20  # [bytes], generous


@dataclass(frozen=True)
class Plan:
    """A reconstruction that was checked: what, on which mesh, where, and whether it goes on."""

    config: ReconstructionConfig
    mesh: str
    folder: ReconstructionFolder
    resume: bool
    overwrite: bool

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing left to do."""
        return self.resume and bool(self.folder.mark().get("complete"))


def add_to(app: typer.Typer) -> None:
    """Give a program this command."""
    app.command(
        epilog="Example: [bold]flowpm-dist reconstruct run.toml --ranks 4 --output found[/bold]"
    )(reconstruct)


def reconstruct(
    run_file: Annotated[
        Path, typer.Argument(metavar="RUN.TOML", help="What is observed, and how to search.")
    ],
    ranks: Ranks = None,
    mesh: Annotated[str | None, mesh_option("row:2,col:2")] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where all goes; by default RUN-reconstruction."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the reconstruction in DIR.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the reconstruction in DIR.")
    ] = False,
) -> None:
    """Find the initial conditions that an observed universe most probably grew from."""
    output = output or default_output(run_file, "reconstruction")
    try:
        if resume and overwrite:
            raise OutputError(
                "--resume goes on with a reconstruction, --overwrite drops it: give one"
            )
        plan = make_plan(
            run_file, job_size(ranks), output, resume=resume, overwrite=overwrite, mesh=mesh
        )
    except UserError as error:
        refuse(str(error))
    if plan.is_complete:
        if launch.detect().rank == 0:
            print(f"The reconstruction in {output} is complete.")
        return
    begin_job(ranks, stop_as=signal.SIGUSR1)
    run(plan)


def make_plan(
    run_file: Path, ranks: int, output: Path, *, resume: bool, overwrite: bool, mesh: str | None
) -> Plan:
    """Check everything that can be checked before work begins.

    Args:
        run_file: TOML.
        ranks: of the job.
        output: folder of the reconstruction.
        resume: whether it shall go on there.
        overwrite: whether another one there may be replaced.
        mesh: shape that goes before the run file's.

    Raises:
        ConfigError: what is wrong in the run file, or in the data.
        OutputError: why the reconstruction cannot be there.
        VolumeError: a file that cannot be read.
    """
    config = load_reconstruction(run_file)
    shape = check_reconstruction_mesh(config, ranks, source=run_file, shape=mesh)
    folder = ReconstructionFolder(output)
    # Rank 0 alone looks: soon it writes there; and one pass through the data will do.
    if launch.detect().rank == 0:
        check_data(config, run_file)
        folder.check(resume=resume, overwrite=overwrite, needed=needed_bytes(config))
        if resume:
            check_progress(config, folder)
            if folder.run_file.exists():
                then = folder.run_file.read_text(encoding="utf-8")
                begun = f"the reconstruction in {output}"
                check_resumed(then, config.resolved(), run_file, begun, may_differ=MAY_DIFFER)
    return Plan(config, shape, folder, resume, overwrite)


def check_data(config: ReconstructionConfig, source: Path) -> None:
    """See that the values of the data are such as can be observed.

    Raises:
        ConfigError: with what is wrong in each file.
        VolumeError: a file that cannot be read.
    """
    wrong = Observations(config.data, config.box.grid).problems()
    if wrong:
        raise ConfigError(source, [Problem(f"data.{key}", what) for key, what in wrong.items()])


def needed_bytes(config: ReconstructionConfig) -> int:
    """Size of what a reconstruction will write, about and at most [bytes]."""
    field = math.prod(config.box.grid) * np.dtype(config.run.precision).itemsize
    search = config.search
    in_checkpoint = 2 * search.history + 2 if search.optimiser == "lbfgs" else OF_ADAM
    # A new checkpoint is written before the oldest goes.
    searched = (search.keep + 1) * in_checkpoint + FIELDS
    drawn = 0
    if config.sampler.draws:
        kept = config.sampler.draws // config.sampler.keep_every
        drawn = config.sampler.chains * (3 * OF_CHAIN + 2 + kept)
    return (searched + drawn) * field + FIGURES_AND_TABLES


def check_progress(config: ReconstructionConfig, folder: ReconstructionFolder) -> None:
    """See that what a search has come to is still there.

    Raises:
        OutputError: iterations were made, and there is no checkpoint.
    """
    rows = read_rows(folder.iterations)
    if len(rows) >= config.search.checkpoint_every and folder.last_iteration() is None:
        raise OutputError(
            f"{folder.path} has made {len(rows)} iterations, but {folder.checkpoints} holds no "
            "checkpoint: put it back, or begin anew with --overwrite"
        )


def run(plan: Plan) -> None:
    """Reconstruct, as one of the ranks of the job."""
    with stoppable(lambda: kept(plan.folder)):
        outcome = _reconstruct(plan)
    if outcome.stopped_by is not None:
        sys.exit(128 + signal.Signals[outcome.stopped_by])


def _reconstruct(plan: Plan) -> Outcome:
    rank = launch.detect().rank
    with job(describe(plan), lambda: kept(plan.folder)) as progress:
        if rank == 0:
            plan.folder.begin(resume=plan.resume, overwrite=plan.overwrite)
        from flowpm_dist.reconstruction.run import reconstruct as whole
        from meshimpl.process_mesh import ProcessMesh

        outcome = whole(
            plan.config.plan,
            plan.mesh,
            plan.folder,
            progress,
            run_text=plan.config.with_mesh(search_mesh(plan.mesh)).resolved(),
            resume=plan.resume,
        )
    if rank == 0:
        tell(plan, outcome)
    # A rank that leaves with a status ends the others: not before all is told.
    ProcessMesh(plan.mesh).barrier()
    return outcome


def describe(plan: Plan) -> str:
    """What will be found, in a line."""
    config = plan.config
    unknowns = f"{math.prod(config.box.grid):,} cells"
    if names := ", ".join(config.priors.ranges):
        unknowns += f" and {names}"
    data = "a mock" if config.plan.is_mock else str(config.data.file)
    asked = config.sampler
    chains = ""
    if asked.draws:
        chains = f"; {asked.chains} chains of {asked.draws} draws, mesh {plan.mesh}"
    return (
        f"initial conditions of {data}: {unknowns}; model {config.model.structure}, "
        f"{config.search.optimiser}, mesh {search_mesh(plan.mesh)}{chains}"
    )


def kept(folder: ReconstructionFolder) -> str:
    """What is kept of a reconstruction that stopped."""
    if (move := folder.last_move()) is not None:
        return (
            f"the checkpoints in {folder.chains} are intact, the last after move {move}: go on "
            "with --resume"
        )
    last = folder.last_iteration()
    if last is None:
        return "there is no checkpoint yet"
    return (
        f"the checkpoints in {folder.checkpoints} are intact, the last after iteration {last}: go "
        "on with --resume"
    )


def tell(plan: Plan, outcome: Outcome) -> None:
    """Print how a reconstruction ended, and where to look."""
    if outcome.stopped_by is None:
        print(report(plan, outcome), flush=True)
        return
    name = launch.stop_name(outcome.stopped_by)
    print(
        f"stopped by {name} {outcome.stopped_at}; go on with --resume",
        file=sys.stderr,
        flush=True,
    )


def report(plan: Plan, outcome: Outcome) -> str:
    """Where to look, and the figures that come first."""
    facts, path = outcome.facts, plan.folder.path
    if plan.config.plan.is_mock:
        spectra = "correlation.png     with the truth, and T(k); numbers in metrics.csv"
    else:
        spectra = "power_spectrum.png  of what was found; numbers in metrics.csv"
    found = [
        f"{name} = {x['value']:.5g} where the joint posterior is highest"
        for name, x in facts["parameters"].items()
    ]
    found += [
        f"r(k = {row['k [h/Mpc]']:.2f} h/Mpc) = {row['r initial field']:.3f} of the initial field"
        for row in facts.get("correlations", ())
    ]
    more = f"\n{'; '.join(found)}." if found else ""
    if "sampling" in facts:
        more += _of_chains(facts["sampling"])
        spectra += "\n  chains.png          where the chains were; each move in draws.csv"
    return f"""
Reconstruction in {path}:
  slabs.png           data, reconstruction, and what is left
  {spectra}
  loss.png            how it was found; a row for each iteration in iterations.csv
  reconstruction.zarr all fields; in Python: flowpm_dist.io.load_snapshot("{plan.folder.fields}")
  run.toml            the run with all its settings; result.json: losses, parameters, versions

{outcome.evaluations} gradients in {facts["seconds"]:.3g} s. Of minus the log posterior, \
{facts["data_per_observed_cell"]:.3g} of the data in each observed cell and \
{facts["prior_per_cell"]:.3g} of the prior in each cell.{more}"""


def _of_chains(facts: dict[str, Any]) -> str:
    """How far the chains agree, and what they say of parameters."""
    modes = facts["modes"]
    lines = [
        f"{facts['chains']} chains of {facts['draws']} draws, {facts['evaluations']} gradients "
        f"each in {facts['seconds']:.3g} s; steps of {facts['step']:.2g}, energy error "
        f"{facts['energy_error']:.1e}, {facts['acceptance']:.0%} of the moves accepted."
    ]
    if "rhat_max" in modes:
        lines.append(
            f"Large scales: R-hat at most {modes['rhat_max']:.3f}, at least {modes['ess_min']:.0f} "
            "effective draws."
        )
    for name, x in facts["parameters"].items():
        agreed = f" (R-hat {x['rhat']:.3f}, {x['ess']:.0f} effective draws)" if "rhat" in x else ""
        drawn = f"{x['mean']:.5g} +- {x['standard_deviation']:.2g}"
        lines.append(f"Of the draws {name} = {drawn}{agreed}.")
    return "\n" + "\n".join(lines)
