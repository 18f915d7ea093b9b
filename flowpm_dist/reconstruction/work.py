"""The work of `flowpm-dist reconstruct`.

Nothing here imports TensorFlow before the work begins.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from flowpm_dist.jobs.folder import OutputError
from flowpm_dist.jobs.job import Command, Costs, Job
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.results import read_rows
from flowpm_dist.jobs.run_file import ConfigError
from flowpm_dist.observables.observations import Observations
from flowpm_dist.options import Problem
from flowpm_dist.reconstruction.folder import ReconstructionFolder, outcome_of
from flowpm_dist.reconstruction.options import ReconstructionOptions
from flowpm_dist.reconstruction.sampler_options import search_mesh
from flowpm_dist.simulation.demand import Demand
from flowpm_dist.simulation.speeds import Pieces
from meshimpl import launch


class ReconstructionJob(Job[ReconstructionOptions, dict[str, Any]]):
    """A reconstruction that was checked and can begin."""

    command = Command(
        "reconstruct",
        "Find the initial conditions that an observed universe most probably grew from.",
        run_file="What is observed, and how to search.",
        example="flowpm-dist reconstruct run.toml --ranks 4 --output found",
    )
    options_type, folder_type = ReconstructionOptions, ReconstructionFolder

    @override
    def check(self) -> None:
        """Check the data, then as every job does.

        Raises:
            ConfigError: the values of the data cannot be used, or have changed.
            OutputError: iterations were made, but there is no checkpoint.
            VolumeError: a file cannot be read.
        """
        folder = self.folder
        check_data(self.options, self.request.run_file)
        super().check()
        if not self.request.resume:
            return
        made = len(read_rows(folder.iterations))
        if made >= self.options.search.checkpoint_every and folder.checkpoints.last is None:
            raise OutputError(folder.no_checkpoint(f"{made} iterations"))

    @override
    def describe(self) -> str:
        options, sampler = self.options, self.options.sampler
        quantity = "convergence of " if options.lightcone is not None else ""
        unknowns = f"{math.prod(options.box.grid):,} cells"
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
    def costs(self) -> Costs:
        options, free = self.options, self.options.with_mesh(None)
        demand = Demand(
            "the reconstruction",
            options.box.grid,
            self.mesh,
            options.memory,
            functools.partial(free.mesh_for, source=Path()),
            grid_is_free=options.is_mock,
            pyramid=options.evolution.pyramid,
            halo=options.usual_halo,
        )
        cells, resume, sampler = math.prod(options.box.grid), self.request.resume, options.sampler
        # Evaluations of the posterior; how many the rest of a search takes is not known.
        searched = resume and bool(self.folder.mark().get("searched"))
        left = 0 if searched else None if resume else options.search.total
        pieces = [Pieces(self._rate_name, cells, left)]
        if sampler is not None:
            moved = (self.folder.chains.last or 0) * resume
            moves = max(0, sampler.warm_up + sampler.draws - moved)
            gradients = round(moves * sampler.method.evaluations)
            together = cells * sampler.chains
            pieces.append(Pieces(self._chains_name, together, gradients, self._rate_name))
        return Costs(demand, options.disk, tuple(pieces))

    @property
    def _rate_name(self) -> str:
        model, steps = self.options.observation.structure, self.options.evolution.step_count
        return f"reconstruct {model}" + (f" {steps} steps" if model == "pm" else "")

    @property
    def _chains_name(self) -> str:
        return f"{self._rate_name}, chains"

    @override
    def speeds(self, result: dict[str, Any]) -> Mapping[str, float]:
        measured = {
            self._rate_name: result.get("seconds_per_evaluation"),
            self._chains_name: result.get("sampling", {}).get("seconds_per_evaluation"),
        }
        return {name: seconds for name, seconds in measured.items() if seconds is not None}

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
        is_searched = self.request.resume and bool(folder.mark().get("searched"))
        if bool(mesh.world.broadcast(tf.constant(is_searched))):
            facts: dict[str, Any] = json.loads(folder.result.read_text())
            facts.pop("seconds_per_evaluation", None)  # of another session, maybe on other ranks
        else:
            search = SearchSession(options.with_mesh(whole), mesh, folder, progress)
            facts = search.run(resume=self.request.resume)
        if options.sampler is not None:
            sampled = SamplingSession(options, ProcessMesh(self.mesh), folder, progress).run()
            facts = {**facts, "sampling": sampled}
        mesh.barrier()  # all is written
        return facts

    @override
    def report(self, result: dict[str, Any]) -> str:
        facts, path = result, self.folder.path
        if self.options.is_mock:
            spectra = "correlation.png     with the truth, and T(k); numbers in metrics.csv"
        else:
            spectra = "power_spectrum.png  of what was found; numbers in metrics.csv"
        lines = [
            f"{name} = {x['value']:.5g} where the joint posterior is highest"
            for name, x in facts["parameters"].items()
        ]
        for row in facts.get("correlations", ()):
            k, r = row["k [h/Mpc]"], row["r initial field"]
            lines.append(f"r(k = {k:.2f} h/Mpc) = {r:.3f} of the initial field")
        for row in facts.get("convergence", ()):
            data, kappa = row["r data"], row["r found"]
            lines.append(f"convergence of {row['source']}: r = {kappa:.3f}, of the data {data:.3f}")
        more = f"\n{'; '.join(lines)}." if lines else ""
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


def check_data(options: ReconstructionOptions, source: Path) -> None:
    """Checks the values of the data and of the other files of an observation.

    Args:
        options: the checked run file.
        source: its path, for messages.

    Raises:
        ConfigError: the values cannot be used.
        VolumeError: a file cannot be read.
    """
    if options.lightcone is not None:  # maps were read with the run file
        return
    data, priors = options.data.file, options.priors.ranges
    observations = Observations(options.observation, options.box.grid, data, priors)
    if wrong := observations.problems():
        raise ConfigError(source, [Problem(key, reason) for key, reason in wrong.items()])


def _of_chains(facts: dict[str, Any]) -> str:
    """Returns how well the chains agree, and the parameters that they give, as a text."""
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
