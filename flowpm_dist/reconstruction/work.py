"""The work of `flowpm-dist reconstruct`.

Nothing here imports TensorFlow before the work begins.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

from typing_extensions import override

from flowpm_dist.io.files import read_json
from flowpm_dist.jobs.folder import OutputError, numbered_checkpoints
from flowpm_dist.jobs.job import Job
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.results import RunRecord, read_rows, record_of_work
from flowpm_dist.jobs.run_file import ConfigError
from flowpm_dist.observables.observations import Observations
from flowpm_dist.options import Problem
from flowpm_dist.reconstruction.folder import ReconstructionFolder, outcome_of
from flowpm_dist.reconstruction.options import ReconstructionOptions, search_mesh
from flowpm_dist.simulation.demand import Demand
from meshimpl import launch


class ReconstructionJob(Job[ReconstructionOptions, dict[str, Any]]):
    """A reconstruction that was checked and can begin."""

    name = "reconstruct"
    help = "Find the initial conditions that an observed universe most probably grew from."
    asks = "What is observed, and how to search."
    example = "flowpm-dist reconstruct run.toml --ranks 4 --output found"
    options_type, folder_type = ReconstructionOptions, ReconstructionFolder
    unit = "iteration"
    folder: ReconstructionFolder

    def check(self) -> None:
        """See `Job.check`.

        Raises:
            ConfigError: the values of the data cannot be used, or have changed.
            OutputError: iterations were made, but there is no checkpoint.
            VolumeError: a file cannot be read.
        """
        options, folder = self.options, self.folder
        if options.lightcone is None:  # maps were read with the run file
            data, priors = options.data.file, options.priors.ranges
            observations = Observations(options.observation, options.box.grid, data, priors)
            if wrong := observations.problems():
                problems = [Problem(key, what) for key, what in wrong.items()]
                raise ConfigError(self.run_file, problems)
        super().check()
        if not self.resume:
            return
        made = len(read_rows(folder.iterations))
        kept = numbered_checkpoints(folder.checkpoints, self.unit)
        if made >= options.search.checkpoint_every and not kept:
            raise OutputError(folder.no_checkpoint(f"{made} iterations"))

    def describe(self) -> str:
        """Returns a line that says what will be found."""
        options, sampler = self.options, self.options.sampler
        quantity = "convergence of " if options.lightcone is not None else ""
        unknowns = f"{self.cells:,} cells"
        if names := ", ".join(options.priors.ranges):
            unknowns += f" and {names}"
        data = "a mock" if options.is_mock else str(options.data.file)
        chains = ""
        if sampler is not None:
            chains = f"; {sampler.chains} chains of {sampler.draws} draws, mesh {self.mesh}"
        return (
            f"initial conditions of {quantity}{data}: {unknowns}; "
            f"model {options.observation.structure}, mesh {search_mesh(self.mesh)}{chains}"
        )

    @property
    @override
    def meshes(self) -> tuple[str, ...]:
        return search_mesh(self.mesh), self.mesh

    @property
    @override
    def demand(self) -> Demand:
        options, free = self.options, self.options.with_mesh(None)
        return Demand(
            "the reconstruction",
            options.box.grid,
            self.mesh,
            options.memory,
            functools.partial(free.mesh_for, source=Path()),
            grid_is_free=options.is_mock,
            pyramid=options.evolution.pyramid,
        )

    @property
    @override
    def disk(self) -> int:
        return self.options.disk

    @property
    @override
    def warnings(self) -> tuple[str, ...]:
        return self.options.warnings

    @property
    @override
    def rate_name(self) -> str:
        model, steps = self.options.observation.structure, self.options.evolution.step_count
        return f"reconstruct {model}" + (f" {steps} steps" if model == "pm" else "")

    @property
    @override
    def cells(self) -> int:
        return math.prod(self.options.box.grid)

    @property
    def remaining(self) -> int | None:
        """The evaluations of the search; None with chains, or for the rest of a search."""
        known = self.options.sampler is None and not self.resume
        return self.options.search.total if known else None

    @override
    def seconds_per_piece(self, result: dict[str, Any]) -> float | None:
        seconds: float | None = result.get("seconds_per_evaluation")
        return seconds

    @override
    def last_checkpoint(self) -> tuple[Path, str] | None:
        if (move := self.folder.last_move()) is not None:
            return self.folder.chains, f"move {move}"
        return super().last_checkpoint()

    def work(self, progress: Progress) -> dict[str, Any]:
        """Searches, and draws where draws are asked for; returns what result.json holds.

        See `Job.work`.

        Raises:
            StopError: a signal stopped it; a checkpoint was written.
            VolumeError, HaloError, NoProgressError, CheckpointError, WriteError: see
                `SearchSession` and `SamplingSession`.
        """
        import tensorflow as tf

        from flowpm_dist.reconstruction.sampling_session import SamplingSession
        from flowpm_dist.reconstruction.search_session import SearchSession
        from meshimpl.process_mesh import ProcessMesh

        options, folder = self.options, self.folder
        if launch.detect().rank == 0 and options.files:
            folder.keep_checksums(options.checksums())
        whole = search_mesh(self.mesh)  # all ranks, for one universe
        mesh = ProcessMesh(whole)
        is_searched = self.resume and bool(folder.mark().get("searched"))
        if bool(mesh.world.broadcast(tf.constant(is_searched))):
            facts: dict[str, Any] = json.loads(folder.result.read_text())
        else:
            search = SearchSession(options.with_mesh(whole), mesh, folder, progress)
            facts = search.run(resume=self.resume)
        if options.sampler is not None:
            sampled = SamplingSession(options, ProcessMesh(self.mesh), folder, progress).run()
            facts = {**facts, "sampling": sampled}
        mesh.barrier()  # all is written
        return facts

    def report(self, result: dict[str, Any]) -> str:
        """Returns where to look, and the figures that come first."""
        facts, path = result, self.folder.path
        if self.options.is_mock:
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
        if self.options.lightcone is not None:
            picture = "convergence.png"
            files = "; maps in convergence.zarr, spectra in convergence.csv"
        return f"""
Reconstruction in {path}:
  {picture:19} data, reconstruction, and what is left{files}
  {spectra}
  loss.png            how it was found; a row for each iteration in iterations.csv
  reconstruction.zarr all fields; in Python: flowpm_dist.io.load_snapshot("{self.folder.fields}")
  run.toml            the run with all its settings; result.json: losses, parameters, versions

{facts["evaluations"]} gradients in {facts["seconds"]:.3g} s. Minus the log posterior: \
{facts["data_per_observed_cell"]:.3g} from the data for each observed cell, \
{facts["prior_per_cell"]:.3g} from the prior for each cell.{more}
{outcome_of(facts.get("stopped"), facts.get("left"))}."""

    @classmethod
    @override
    def record(cls, path: Path) -> RunRecord | None:
        folder = ReconstructionFolder(path)
        facts = read_json(folder.result)
        results: dict[str, Any] = {}
        if "stopped" in facts:
            results["search"] = facts["stopped"]
        if "data_per_observed_cell" in facts:
            results["data in each cell"] = facts["data_per_observed_cell"]
        for name, found in facts.get("parameters", {}).items():
            results[name] = found["value"]
        for row in facts.get("correlations", ()):
            results[f"r at {row['k [h/Mpc]']:.2f} h/Mpc"] = row["r initial field"]
        sampled = facts.get("sampling", {})
        for name, found in sampled.get("parameters", {}).items():
            results[f"{name} of the draws"] = found["mean"]
        rows = read_rows(folder.iterations)
        steps = f"{len(rows)} iterations" if rows else ""
        return record_of_work(folder, steps, results)


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
