"""One session of a simulation: how it begins or resumes, its checkpoints, and its end."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.evolution.plan import MidRun, Particles
from flowpm_dist.grid.field import Field
from flowpm_dist.io.files import WriteError
from flowpm_dist.io.light_cone import LightConeFiles
from flowpm_dist.io.snapshot import VECTORS
from flowpm_dist.io.volume import open_white_noise
from flowpm_dist.jobs.agreement import StopError, StopRequest
from flowpm_dist.jobs.checkpoints import FieldCheckpoints
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.results import versions, write_run_file
from flowpm_dist.observables.light_cone.results import observers_of, write_light_cone_results
from flowpm_dist.simulate.folder import STEP, SimulationFolder
from flowpm_dist.simulate.job import KEEP
from flowpm_dist.simulate.options import SimulationOptions, output_name
from flowpm_dist.simulate.results import Summary, write_results, write_state
from flowpm_dist.simulation.state import State


class SimulationSession:
    """One session of a simulation.

    Args:
        options: the run file, with the mesh of this job's ranks.
        folder: folder of the results; `begin` has been called on rank 0.
        progress: this rank's display.
    """

    def __init__(
        self, options: SimulationOptions, folder: SimulationFolder, progress: Progress
    ) -> None:
        self.options, self.folder, self.progress = options, folder, progress
        assert options.mesh.shape is not None
        cosmology = Cosmology(**options.cosmology.model_dump(exclude_none=True))
        self.simulation = options.simulation(cosmology, mesh=options.mesh.shape)
        box = self.simulation.box
        self.checkpoints = FieldCheckpoints(folder.checkpoints, STEP, box, KEEP)
        self._stop = StopRequest(box.mesh, "step", progress.say)
        self._written: list[float] = []
        self._particles: LightConeFiles | None = None
        self._checksums: dict[str, str] = {}
        self._ours = {
            "seed": options.initial.seed,
            "steps": options.evolution.step_count,
            "precision": options.run.precision,
            "integrator": type(options.evolution.integrator).__name__,
        }

    def run(self, *, resume: bool) -> Summary | None:
        """Simulates and writes the results, or stops after a step. On all ranks together.

        Args:
            resume: go on from the latest checkpoint, if there is one.

        Returns:
            The summary of the complete run, on rank 0.

        Raises:
            StopError: a signal stopped the run; its checkpoint is there.
            HaloError, FloatingPointError, CheckpointError, WriteError: checkpoints are as they
                were; where there are none, nothing is left.
        """
        with unfinished_removed(self.folder):
            return self._run(resume)

    def _run(self, resume: bool) -> Summary | None:
        options, mesh = self.options, self.simulation.box.mesh
        if mesh.rank == 0:
            write_run_file(self.folder.run_file, options.resolved())
            self._checksums = options.checksums()
        mesh.barrier()  # rank 0 has the folder
        found = self.checkpoints.latest(**self._ours) if resume else None
        last = 0 if found is None else int(found[1]["step"])
        self._written = [] if found is None else list(found[1]["outputs"])
        self._particles = self._particle_files(
            0 if found is None else found[1].get("particle_files", 0)
        )
        times = [a for a in options.output_times if a not in self._written]
        self.progress.note(f"going on after step {last}" if last else "initial conditions")
        initial, cone, maps = options.initial, options.light_cone, list[Any]()
        noise = None if initial.white_noise is None else open_white_noise(initial.white_noise)
        try:
            with self._stop.heard(), self._particles or nullcontext():
                state = self.simulation.run_resumably(
                    seed=initial.seed,
                    white_noise=noise,
                    paired=initial.paired,
                    progress=self.progress.step,
                    outputs=times or None,
                    on_output=self._output,
                    observers=[] if cone is None else observers_of(cone.options, self._particles),
                    on_seen=maps.extend,
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
                        "config": options.resolved(),
                        "checksums": self._checksums,
                        "versions": versions(),
                    }
                    write_light_cone_results(
                        self.folder.partial, cone, maps, self.simulation.cosmology, about
                    )
                maps.clear()
                summary = write_results(self.folder, options, state, self.simulation.power)
        except StopError:
            self.folder.release()
            raise
        return summary

    def _particle_files(self, sealed: int) -> LightConeFiles | None:
        """Returns this rank's files of particles on the light cone; None if none are asked for."""
        cone, folder = self.options.lightcone, self.folder.cone_particles
        if cone is None or not cone.particles:
            return None
        return LightConeFiles(folder, self.simulation.box.mesh, sealed)

    def _seal_particles(self) -> int:
        """Completes the files of particles so far, and returns how many there are."""
        if self._particles is None:
            return 0
        self._particles.seal()
        return self._particles.sealed

    def _output(self, state: State) -> None:
        """Writes a state before the last one, in a folder of its own. On every rank."""
        folder, mesh = self.folder.partial / output_name(state.a), state.box.mesh
        if mesh.rank == 0:  # one that came after the checkpoint is made again
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        mesh.barrier()
        write_state(folder, self.options, state, self.simulation.power)
        self._written.append(state.a)

    def _after_step(self, here: MidRun) -> None:
        """Writes a checkpoint where one is due, and ends if a signal came. On every rank."""
        every, steps = self.options.output.checkpoint_every, self.options.evolution.step_count
        stopped = self._stop.name()
        if stopped or (every and here.step % every == 0 and here.step < steps):
            self._save(here)
        if stopped:
            raise StopError(stopped, f"after step {here.step} of {steps}")

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


@contextmanager
def unfinished_removed(folder: SimulationFolder) -> Iterator[None]:
    """Inside, an error or a signal removes what was written so far, but checkpoints."""
    try:
        yield
    except StopError:
        raise
    except WriteError:
        # On any rank: a barrier was passed since rank 0 began, so the partial is this job's.
        folder.remove_partial()
        raise
    except BaseException:
        folder.discard()
        raise
