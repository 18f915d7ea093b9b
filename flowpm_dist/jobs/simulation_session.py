"""One session of a simulation: its beginning or where it goes on, its checkpoints, its end."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.evolution.plan import MidRun, Particles
from flowpm_dist.grid.field import Field
from flowpm_dist.io.files import WriteError
from flowpm_dist.io.light_cone_file import LightConeFiles
from flowpm_dist.io.snapshot import VECTORS
from flowpm_dist.io.white_noise_file import open_white_noise
from flowpm_dist.jobs import full_sky_results, light_cone_results
from flowpm_dist.jobs.checkpoints import FieldCheckpoints
from flowpm_dist.jobs.folder import write_run_file
from flowpm_dist.jobs.full_sky import FullSkyWork
from flowpm_dist.jobs.light_cone import LightConeWork
from flowpm_dist.jobs.options import output_name
from flowpm_dist.jobs.output_folder import STEP, OutputFolder
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.simulate import KEEP, SimulationWork
from flowpm_dist.jobs.simulation_results import Summary, write_results, write_state
from flowpm_dist.jobs.stop import StopError, StopRequest
from flowpm_dist.jobs.versions import versions
from flowpm_dist.simulation.simulation import ObserverOf
from flowpm_dist.simulation.state import State
from meshimpl import launch


@dataclass(frozen=True)
class SimulationOutcome:
    """How a session of a simulation ended.

    Attributes:
        summary: of the complete run, on rank 0.
        stopped_by: name of the signal that ended the session before that.
        stopped_at: where, in words.
    """

    summary: Summary | None = None
    stopped_by: str | None = None
    stopped_at: str = ""


class SimulationSession:
    """One session of a simulation.

    Args:
        work: what to simulate.
        mesh: shape of the mesh of this job's ranks.
        folder: of the results; `begin` has been called on rank 0.
        progress: display of this rank.
    """

    def __init__(
        self, work: SimulationWork, mesh: str, folder: OutputFolder, progress: Progress
    ) -> None:
        self.work, self.folder, self.progress = work, folder, progress
        self._shape = mesh
        self.simulation = work.plan.simulation(Cosmology(**work.cosmology), mesh=mesh)
        box = self.simulation.box
        self.checkpoints = FieldCheckpoints(folder.checkpoints, STEP, box, KEEP)
        self._stop = StopRequest(box.mesh, "step", progress.say)
        self._written: list[float] = []
        self._particles: LightConeFiles | None = None
        self._checksums: dict[str, str] = {}
        self._ours = {
            "seed": work.seed,
            "steps": work.plan.steps.step_count,
            "precision": work.plan.run.precision,
            "integrator": type(work.plan.integrator).__name__,
        }

    def run(self, *, resume: bool) -> SimulationOutcome:
        """Simulates and writes the results, or stops after a step. On all ranks together.

        Args:
            resume: go on from the latest checkpoint, if there is one.

        Raises:
            HaloError, FloatingPointError, CheckpointError, WriteError: checkpoints are as they
                were; where there are none, nothing is left.
        """
        with unfinished_removed(self.folder):
            return self._run(resume)

    def _run(self, resume: bool) -> SimulationOutcome:
        work, mesh = self.work, self.simulation.box.mesh
        if mesh.rank == 0:
            write_run_file(self.folder.run_file, work.run_text)
            self._checksums = work.checksums()
        mesh.barrier()  # rank 0 has the folder
        found = self.checkpoints.latest(**self._ours) if resume else None
        last = 0 if found is None else int(found[1]["step"])
        self._written = [] if found is None else list(found[1]["outputs"])
        self._particles = self._particle_files(
            0 if found is None else found[1].get("particle_files", 0)
        )
        times = [a for a in work.output.times(work.plan.steps) if a not in self._written]
        self.progress.note(f"going on after step {last}" if last else "initial conditions")
        noise = None if work.white_noise is None else open_white_noise(work.white_noise)
        cone, seen = work.light_cone, list[Any]()
        try:
            with self._stop.heard(), self._particles or nullcontext():
                state = self.simulation.run_resumably(
                    seed=work.seed,
                    white_noise=noise,
                    paired=work.paired,
                    progress=self.progress.step,
                    outputs=times or None,
                    on_output=self._output,
                    observers=[] if cone is None else _observers_of(cone, self._particles),
                    on_seen=seen.extend,
                    after_step=self._after_step,
                    resume=None if found is None else lambda _: self._restored(*found),
                )
                # A signal that comes now lets the results be written.
                self.progress.note("writing")
                if self._particles is not None:
                    self._particles.complete()
                if cone is not None and mesh.rank == 0:
                    about = {
                        **state.header(),
                        "config": work.run_text,
                        "checksums": self._checksums,
                        "versions": versions(),
                    }
                    _write_seen(self.folder.partial, cone, seen, self.simulation.cosmology, about)
                seen.clear()
                summary = write_results(
                    self.folder, work, self._shape, state, self.simulation.power,
                    threads=launch.threads_per_rank(),
                )  # fmt: skip
        except _StoppedError as stopped:
            self.folder.release()
            return SimulationOutcome(None, stopped.signal, stopped.place)
        return SimulationOutcome(summary)

    def _particle_files(self, sealed: int) -> LightConeFiles | None:
        """Returns this rank's files of particles on the light cone; None if none are asked for."""
        cone, folder = self.work.light_cone, self.folder.cone_particles
        if cone is None or not cone.options.particles:
            return None
        return LightConeFiles(folder, self.simulation.box.mesh, sealed)

    def _seal_particles(self) -> int:
        """Completes the files of particles so far, and returns how many there are."""
        if self._particles is None:
            return 0
        self._particles.seal()
        return self._particles.sealed

    def _output(self, state: State) -> None:
        """Writes a state on the way, in a folder of its own. On every rank."""
        folder, mesh = self.folder.partial / output_name(state.a), state.box.mesh
        if mesh.rank == 0:  # one that came after the checkpoint is made again
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        mesh.barrier()
        write_state(folder, self.work, state, self.simulation.power)
        self._written.append(state.a)

    def _after_step(self, here: MidRun) -> None:
        """Writes a checkpoint where one is due, and ends if a signal came. On every rank."""
        every, steps = self.work.output.checkpoint_every, self.work.plan.steps.step_count
        stopped = self._stop.name()
        if stopped or (every and here.step % every == 0 and here.step < steps):
            self._save(here)
        if stopped:
            raise _StoppedError(stopped, f"after step {here.step} of {steps}")

    def _save(self, here: MidRun) -> None:
        box, particles = self.simulation.box, here.particles
        blocks = (particles.displacement, particles.velocity)
        fields = {str(n): Field(block, box) for n, block in zip(VECTORS, blocks, strict=True)}
        attributes = {
            **self._ours,
            "done": here.done,
            "step": here.step,
            "a": here.a,
            "halo": here.halo,
            "timings": here.timings,
            "outputs": self._written,
            "checksums": self._checksums,
            "particle_files": self._seal_particles(),
        }
        seen = {f"seen_{name}": maps.numpy() for name, maps in here.seen().items()}
        self.checkpoints.save(here.step, fields, {**attributes, "seen": list(seen)}, maps=seen)

    def _restored(self, path: Path, about: Mapping[str, Any]) -> MidRun:
        particles = Particles(*(self.checkpoints.block(path, name) for name in VECTORS))
        rest = {name: about[name] for name in ("done", "step", "a", "halo", "timings")}
        maps = {n.removeprefix("seen_"): self.checkpoints.whole(path, n) for n in about["seen"]}
        return MidRun(particles=particles, seen=lambda: maps, **rest)


def _observers_of(
    cone: LightConeWork | FullSkyWork, files: LightConeFiles | None
) -> list[ObserverOf]:
    """Returns what looks at a run with a light cone."""
    if isinstance(cone, FullSkyWork):
        return full_sky_results.observers_of(cone.options, files)
    return light_cone_results.observers_of(cone.options, files)


def _write_seen(
    folder: Path,
    cone: LightConeWork | FullSkyWork,
    seen: list[Any],
    cosmology: Cosmology,
    about: dict[str, Any],
) -> None:
    """Writes what was seen. On rank 0."""
    if isinstance(cone, FullSkyWork):
        full_sky_results.write_full_sky_results(folder, cone, seen, cosmology, about)
    else:
        light_cone_results.write_light_cone_results(folder, cone, seen, cosmology, about)


class _StoppedError(StopError):
    """The run was stopped by a signal, at a place."""

    def __init__(self, signal: str, place: str) -> None:
        super().__init__(signal, place)
        self.signal, self.place = signal, place


@contextmanager
def unfinished_removed(folder: OutputFolder) -> Iterator[None]:
    """Inside, an error or a signal removes what was written so far, but checkpoints."""
    try:
        yield
    except WriteError:
        # On any rank: a barrier was passed since rank 0 began, so the partial is this job's.
        folder.remove_partial()
        raise
    except BaseException:
        folder.discard()
        raise
