"""The command `flowpm-dist reconstruct`: the initial conditions of an observed universe."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

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
from flowpm_dist.config.checks import ConfigError, Problem, check_same_values
from flowpm_dist.config.reconstruction import (
    ReconstructionConfig,
    check_reconstruction_mesh,
    load_reconstruction,
)
from flowpm_dist.grid.decomposition import parse_mesh
from flowpm_dist.jobs.estimate import Demand, Estimate
from flowpm_dist.jobs.folder import FIGURES_AND_TABLES, OutputError
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.rates import Kind, kind_of, measured_rate, record_rate
from flowpm_dist.jobs.tables import read_rows
from flowpm_dist.observables.observations import Observations
from flowpm_dist.reconstruction.folder import ReconstructionFolder
from flowpm_dist.reconstruction.memory import memory_at
from flowpm_dist.reconstruction.plan import search_mesh
from meshimpl import launch

if TYPE_CHECKING:
    from flowpm_dist.reconstruction.search_session import ReconstructionOutcome

MAY_DIFFER = ("search.checkpoint_every", "search.keep", "run.halo")
FIELDS = 9  # of the results, at most
OF_ADAM = 4  # fields of a checkpoint
OF_CHAIN = 3  # likewise
MAPS = 3  # data, found and truth


class ReconstructionJob(
    ResumableJob[ReconstructionConfig, ReconstructionFolder, "ReconstructionOutcome"]
):
    """A reconstruction that was checked and can begin."""

    kind = ReconstructionFolder.kind
    begun = ReconstructionFolder.begun

    @classmethod
    def plan(cls, asked: Request) -> Self:
        """See `ResumableJob.plan`.

        Raises:
            ConfigError: the run file, or the values of the data, cannot be used.
            OutputError: the reconstruction cannot be there.
            VolumeError: a file cannot be read.
        """
        config = load_reconstruction(asked.run_file, asked.settings)
        shape = check_reconstruction_mesh(
            config, asked.ranks, source=asked.run_file, shape=asked.mesh
        )
        folder = ReconstructionFolder(asked.output)
        planned = cls(config, shape, folder, asked)
        # Rank 0 alone looks: soon it writes there, and one pass through the data is enough.
        if launch.detect().rank == 0:
            check_data(config, asked.run_file)
            needed = needed_bytes(config)
            planned.check_folder(config.resolved(), needed, may_differ=MAY_DIFFER)
            if asked.resume:
                check_progress(config, folder)
                check_files(config, folder, asked.run_file)
        return planned

    def describe(self) -> str:
        """Returns a line that says what will be found."""
        config = self.config
        seen = "convergence of " if config.lightcone is not None else ""
        unknowns = f"{math.prod(config.box.grid):,} cells"
        if names := ", ".join(config.priors.ranges):
            unknowns += f" and {names}"
        data = "a mock" if config.plan.is_mock else str(config.data.file)
        asked = config.sampler
        chains = ""
        if asked.draws:
            chains = f"; {asked.chains} chains of {asked.draws} draws, mesh {self.mesh}"
        return (
            f"initial conditions of {seen}{data}: {unknowns}; "
            f"model {config.observation.structure}, {config.search.optimiser}, "
            f"mesh {search_mesh(self.mesh)}{chains}"
        )

    @property
    def meshes(self) -> tuple[str, ...]:
        """See `ResumableJob.meshes`."""
        return search_mesh(self.mesh), self.mesh

    @property
    def resolved(self) -> str:
        """See `ResumableJob.resolved`."""
        return self.config.with_mesh(self.mesh).resolved()

    @property
    def demand(self) -> Demand:
        """See `ResumableJob.demand`."""
        config, free = self.config, self.config.with_mesh(None)
        return Demand(
            "the reconstruction",
            config.box.grid,
            self.mesh,
            functools.partial(memory_at, config.plan),
            lambda ranks: check_reconstruction_mesh(free, ranks, source=Path()),
            grid_is_free=config.plan.is_mock,
        )

    @property
    def estimate(self) -> Estimate:
        """See `ResumableJob.estimate`."""
        config = self.config
        # Of chains, and of what remains of a search that is resumed, nothing is known.
        if config.sampler.draws or self.resume:
            rate = None
        else:
            rate = measured_rate(self._kind, self._cells)
        seconds = None if rate is None else rate * self._cells * config.plan.evaluations
        return self.demand.estimate(needed_bytes(config), seconds)

    def remember(self, outcome: ReconstructionOutcome) -> None:
        """See `ResumableJob.remember`."""
        if (seconds := outcome.facts.get("seconds_per_evaluation")) is not None:
            record_rate(self._kind, self._cells, seconds / self._cells)

    @property
    def _kind(self) -> Kind:
        model, steps = self.config.observation.structure, self.config.evolution.step_count
        work = f"reconstruct {model}" + (f" {steps} steps" if model == "pm" else "")
        ranks = math.prod(parse_mesh(self.mesh, batched=True).values())
        return kind_of(work, ranks)

    @property
    def _cells(self) -> int:
        return math.prod(self.config.box.grid)

    def last_checkpoint(self) -> tuple[Path, str] | None:
        """See `ResumableJob.last_checkpoint`."""
        if (move := self.folder.last_move()) is not None:
            return self.folder.chains, f"move {move}"
        last = self.folder.last_iteration()
        return None if last is None else (self.folder.checkpoints, f"iteration {last}")

    def work(self, progress: Progress) -> ReconstructionOutcome:
        """See `ResumableJob.work`."""
        from flowpm_dist.reconstruction.run import reconstruct as whole

        for warning in self.config.warnings:
            progress.warn(warning)
        plan = self.config.plan
        if launch.detect().rank == 0 and plan.files and not self.folder.checksums():
            self.folder.write_checksums(plan.checksums())
        return whole(
            plan,
            self.mesh,
            self.folder,
            progress,
            run_text=self.config.with_mesh(search_mesh(self.mesh)).resolved(),
            resume=self.resume,
        )

    def report(self, outcome: ReconstructionOutcome) -> str:
        """Returns where to look, and the figures that come first."""
        facts, path = outcome.facts, self.folder.path
        if self.config.plan.is_mock:
            spectra = "correlation.png     with the truth, and T(k); numbers in metrics.csv"
        else:
            spectra = "power_spectrum.png  of what was found; numbers in metrics.csv"
        found = [
            f"{name} = {x['value']:.5g} where the joint posterior is highest"
            for name, x in facts["parameters"].items()
        ]
        for row in facts.get("correlations", ()):
            k, r = row["k [h/Mpc]"], row["r initial field"]
            found.append(f"r(k = {k:.2f} h/Mpc) = {r:.3f} of the initial field")
        for row in facts.get("convergence", ()):
            data, kappa = row["r data"], row["r found"]
            found.append(f"convergence of {row['source']}: r = {kappa:.3f}, of the data {data:.3f}")
        more = f"\n{'; '.join(found)}." if found else ""
        if "sampling" in facts:
            more += _of_chains(facts["sampling"])
            spectra += "\n  chains.png          where the chains were; each move in draws.csv"
        picture, files = "slabs.png", ""
        if self.config.lightcone is not None:
            picture = "convergence.png"
            files = "; maps in convergence.zarr, spectra in convergence.csv"
        return f"""
Reconstruction in {path}:
  {picture:19} data, reconstruction, and what is left{files}
  {spectra}
  loss.png            how it was found; a row for each iteration in iterations.csv
  reconstruction.zarr all fields; in Python: flowpm_dist.io.load_snapshot("{self.folder.fields}")
  run.toml            the run with all its settings; result.json: losses, parameters, versions

{outcome.evaluations} gradients in {facts["seconds"]:.3g} s. Minus the log posterior: \
{facts["data_per_observed_cell"]:.3g} from the data for each observed cell, \
{facts["prior_per_cell"]:.3g} from the prior for each cell.{more}"""


def check_data(config: ReconstructionConfig, source: Path) -> None:
    """Check that the values of the data can have been observed.

    Raises:
        ConfigError: they cannot; the error has a problem for each file that is wrong.
        VolumeError: a file cannot be read.
    """
    if config.lightcone is not None:
        return  # read with the run file
    observations = Observations(
        config.observation, config.box.grid, config.data.file, config.priors.ranges
    )
    if wrong := observations.problems():
        raise ConfigError(source, [Problem(key, what) for key, what in wrong.items()])


def needed_bytes(config: ReconstructionConfig) -> int:
    """Returns an upper estimate of the size of what a reconstruction writes [bytes]."""
    field = math.prod(config.box.grid) * np.dtype(config.run.precision).itemsize
    search = config.search
    in_checkpoint = 2 * search.history + 2 if search.optimiser == "lbfgs" else OF_ADAM
    # A new checkpoint is written before the oldest goes.
    searched = (search.keep + 1) * in_checkpoint + FIELDS
    drawn = 0
    if config.sampler.draws:
        kept = config.sampler.draws // config.sampler.keep_every
        drawn = config.sampler.chains * (3 * OF_CHAIN + 2 + kept)
    cone = config.lightcone
    maps = 0 if cone is None else MAPS * len(cone.sources) * cone.pixels**2 * 8
    return (searched + drawn) * field + maps + FIGURES_AND_TABLES


def check_progress(config: ReconstructionConfig, folder: ReconstructionFolder) -> None:
    """Check that the checkpoints of a search that is resumed are still there.

    Raises:
        OutputError: iterations were made, but there is no checkpoint.
    """
    rows = read_rows(folder.iterations)
    if len(rows) >= config.search.checkpoint_every and folder.last_iteration() is None:
        raise OutputError(
            f"{folder.path} has made {len(rows)} iterations, but {folder.checkpoints} holds no "
            "checkpoint: put it back, or begin anew with --overwrite"
        )


def check_files(config: ReconstructionConfig, folder: ReconstructionFolder, source: Path) -> None:
    """Check that the files of a reconstruction that is resumed have not changed since it was begun.

    Raises:
        ConfigError: they have.
    """
    if then := folder.checksums():
        begun = f"the {folder.kind} in {folder.path}"
        check_same_values(then, config.plan.checksums(), config.plan.files, source, begun)


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
            f"effective draws; minus the log posterior: R-hat {facts['loss']['rhat']:.3f}."
        )
    for name, x in facts["parameters"].items():
        agreed = f" (R-hat {x['rhat']:.3f}, {x['ess']:.0f} effective draws)" if "rhat" in x else ""
        drawn = f"{x['mean']:.5g} +- {x['standard_deviation']:.2g}"
        lines.append(f"{name} = {drawn} over the draws{agreed}.")
    return "\n" + "\n".join(lines)


def add_to(app: typer.Typer) -> None:
    """Add this command to a program."""
    app.command(
        epilog="Example: [bold]flowpm-dist reconstruct run.toml --ranks 4 --output found[/bold]"
    )(reconstruct)


def reconstruct(
    run_file: Annotated[
        Path, typer.Argument(metavar="RUN.TOML", help="What is observed, and how to search.")
    ],
    ranks: Ranks = None,
    mesh: Annotated[str | None, mesh_option("row:2,col:2")] = None,
    output: Annotated[Path | None, output_option(ReconstructionJob.kind)] = None,
    resume: Annotated[bool, resume_option(ReconstructionJob.kind)] = False,
    overwrite: Annotated[bool, overwrite_option(ReconstructionJob.kind)] = False,
    check: Check = False,
    ignore_memory: IgnoreMemory = False,
    changes: Set = None,
) -> None:
    """Find the initial conditions that an observed universe most probably grew from."""
    start(
        ReconstructionJob, run_file, ranks, mesh, output, resume=resume, overwrite=overwrite,
        check=check, ignore_memory=ignore_memory, changes=changes,
    )  # fmt: skip
