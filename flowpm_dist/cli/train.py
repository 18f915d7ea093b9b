"""The command `flowpm-dist train`."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowpm_dist.cli.common import (
    Mesh,
    Ranks,
    begin_job,
    default_output,
    job,
    job_size,
    refuse,
    stoppable,
)
from flowpm_dist.config.checks import check_resumed
from flowpm_dist.config.training import load_training
from flowpm_dist.config.training_mesh import buffer_bytes, check_memory, check_training_mesh
from flowpm_dist.cosmoflow.folder import TrainingFolder, training_bytes
from flowpm_dist.cosmoflow.plan import TrainingPlan
from flowpm_dist.io.errors import UserError
from flowpm_dist.io.files import human_size
from flowpm_dist.jobs.folder import OutputError
from meshimpl import launch

if TYPE_CHECKING:
    from flowpm_dist.cosmoflow.outcome import Outcome

MAY_DIFFER = ("training.validate_every", "training.checkpoint_every", "training.keep",
              "data.staging")  # fmt: skip
MAY_GROW = ("training.steps", "training.epochs")

RunFile = Annotated[Path, typer.Argument(metavar="RUN.TOML", help="What to simulate and learn.")]


@dataclass(frozen=True)
class Plan:
    """A training that was checked: what, on which mesh, where, and whether it goes on."""

    training: TrainingPlan
    mesh: str
    folder: TrainingFolder
    resume: bool
    overwrite: bool

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing left to do."""
        mark = self.folder.mark()
        done = mark.get("step") if self.resume and mark.get("complete") else None
        return isinstance(done, int) and done >= self.training.total_steps


def add_to(app: typer.Typer) -> None:
    """Give a program this command."""
    app.command(epilog="Example: [bold]flowpm-dist train run.toml --ranks 4[/bold]")(train)


def train(
    run_file: RunFile,
    ranks: Ranks = None,
    mesh: Mesh = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where all goes; by default RUN-training."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the training in DIR.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the training in DIR.")
    ] = False,
) -> None:
    """Train a network that finds cosmological parameters in volumes, simulated as it learns."""
    output = output or default_output(run_file, "training")
    try:
        if resume and overwrite:
            raise OutputError("--resume goes on with a training, --overwrite drops it: give one")
        plan = make_plan(
            run_file, job_size(ranks), output, resume=resume, overwrite=overwrite, mesh=mesh
        )
    except UserError as error:
        refuse(str(error))
    if plan.is_complete:
        if launch.detect().rank == 0:
            print(f"The training in {output} is complete: {plan.training.total_steps} steps.")
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
        output: folder of the training.
        resume: whether it shall go on there.
        overwrite: whether another training there may be replaced.
        mesh: shape that goes before the run file's.

    Raises:
        ConfigError: what is wrong in the run file.
        OutputError: why the training cannot be there.
    """
    training = load_training(run_file)
    shape = check_training_mesh(training, ranks, source=run_file, shape=mesh)
    check_memory(training, shape, ranks, run_file)
    folder = TrainingFolder(output)
    # Rank 0 alone looks: soon it writes there.
    if launch.detect().rank == 0:
        folder.check(resume=resume, overwrite=overwrite, needed=training_bytes(training, folder))
        if resume and folder.run_file.exists():
            check_same(load_training(folder.run_file), training, run_file, output)
    return Plan(training, shape, folder, resume, overwrite)


def check_same(then: TrainingPlan, now: TrainingPlan, source: Path, output: Path) -> None:
    """See that a run file asks for the training that is to go on, see `check_resumed`.

    Args:
        then: as it was begun.
        now: the run file.
        source: of `now`.
        output: folder of the training.
    """
    check_resumed(
        then.resolved(),
        now.resolved(),
        source,
        f"the training in {output}",
        may_differ=MAY_DIFFER,
        may_grow=MAY_GROW,
    )


def run(plan: Plan) -> None:
    """Train, as one of the ranks of the job."""
    with stoppable(lambda: last_checkpoint(plan.folder)):
        outcome = _train(plan)
    if outcome.stopped_by is not None and outcome.step < outcome.steps:
        sys.exit(128 + signal.Signals[outcome.stopped_by])


def _train(plan: Plan) -> Outcome:
    rank = launch.detect().rank
    with job(describe(plan), lambda: last_checkpoint(plan.folder)) as progress:
        if rank == 0:
            plan.folder.begin(resume=plan.resume, overwrite=plan.overwrite)
        from flowpm_dist.cosmoflow.run import TrainingRun
        from flowpm_dist.cosmoflow.sources import stage_files
        from meshimpl.process_mesh import ProcessMesh

        stage_files(plan.training, progress)
        mesh = ProcessMesh(plan.mesh)
        session = TrainingRun(plan.training, mesh, plan.folder, progress)
        outcome = session.run(resume=plan.resume)
    if rank == 0:
        tell(plan, outcome)
    # A rank that leaves with a status ends the others: not before all is written and told.
    mesh.barrier()
    return outcome


def describe(plan: Plan) -> str:
    """What will be trained, in a line."""
    training = plan.training
    weights = training.declaration.parameters(training.width, outputs=training.outputs)
    kept = buffer_bytes(training, plan.mesh)
    memory = (
        f"; {training.data.buffer} volumes kept: {human_size(kept)} on each rank" if kept else ""
    )
    return f"{training.network.name}, {weights:,} weights, mesh {plan.mesh}{memory}"


def last_checkpoint(folder: TrainingFolder) -> str:
    """What is kept of a training that stopped."""
    import tensorflow as tf

    latest = tf.train.latest_checkpoint(str(folder.checkpoints))
    if latest is None:
        return "there is no checkpoint yet"
    step = latest.rpartition("-")[2]
    return f"the checkpoints are intact, the last after step {step}: go on with --resume"


def tell(plan: Plan, outcome: Outcome) -> None:
    """Print how a training ended, and what comes next."""
    stopped = outcome.stopped_by if outcome.step < outcome.steps else None
    if stopped is not None:
        name = launch.stop_name(stopped)
        print(
            f"stopped by {name} after step {outcome.step} of {outcome.steps}; go on with --resume",
            file=sys.stderr,
            flush=True,
        )
    else:
        print(report(plan, outcome), flush=True)


def report(plan: Plan, outcome: Outcome) -> str:
    """Where to look, and the figures that come first."""
    path, seconds = plan.folder.path, sum(outcome.phases.values())
    shares = sorted(outcome.phases.items(), key=lambda item: -item[1])
    told = ", ".join(f"{name} {100 * s / seconds:.0f} %" for name, s in shares if s) or "-"
    losses = [] if outcome.loss is None else [f"loss {outcome.loss:.4f}"]
    if outcome.validation_loss is not None:
        losses.append(f"of validation {outcome.validation_loss:.4f}")
    rate = f"; {plan.training.training.batch / seconds:.1f} samples/s" if seconds else ""
    return f"""
Training in {path}:
  training.png  losses and learning rate; numbers, a row for each step, in metrics.csv
  phases.png    where the time went: {told}; seconds in phases.json
  tensorboard   the same live: tensorboard --logdir {path / "tensorboard"}
  checkpoints   the latest after step {outcome.step}; run.toml: the run with all its settings

{outcome.step} of {outcome.steps} steps: {", ".join(losses)}{rate}.
Next: flowpm-dist evaluate {path}"""
