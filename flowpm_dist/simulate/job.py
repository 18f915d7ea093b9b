"""The command `flowpm-dist simulate`, and its output folder, whose results appear all at once.

Results are written into `DIR/.partial-flowpm-dist` and moved into `DIR` when all of them are
complete, the snapshot last. A snapshot in `DIR` makes a finished run, so that an interrupted run
never looks like one. The files of an older run stay until the new ones are moved. The checkpoints
are in the partial folder as well, and are deleted with it when the results are in place.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from flowpm_dist.cosmology.camb_tables import camb_in_background
from flowpm_dist.io.files import (
    CONE_PARTICLES,
    GENERATOR,
    LIGHT_CONE,
    SNAPSHOTS,
    WriteError,
    human_size,
    read_json,
    snapshot_attributes,
)
from flowpm_dist.io.snapshot import snapshot_name
from flowpm_dist.jobs.estimate import Demand
from flowpm_dist.jobs.folder import JobFolder, OutputError, check_foreign, numbered_checkpoints
from flowpm_dist.jobs.job import Job
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.results import RunRecord, changed, is_locked
from flowpm_dist.jobs.run_file import settings_in
from flowpm_dist.observables.light_cone.plan import particle_bytes
from flowpm_dist.simulate.options import (
    SimulationOptions,
    demand_of,
    output_bytes,
    output_name,
    particle_files,
)
from meshimpl import launch

if TYPE_CHECKING:
    from flowpm_dist.simulate.session import Summary

FILES = ("power_spectrum.csv", "density.png", "power_spectrum.png", "run.toml", "timings.json")
OF_LIGHT_CONE = ("convergence_power.csv", "convergence.png", "convergence_power.png", LIGHT_CONE)
"""What a run with a light cone leaves besides."""
OF_RUN = (*OF_LIGHT_CONE, CONE_PARTICLES)
"""All that only some runs leave."""
PARTIAL = ".partial-flowpm-dist"
STEP = "step"
"""What checkpoints are counted in."""
POWER_K = 0.1
"""Wave number of the power that `runs` lists [h/Mpc]."""
LENSING_ELL = 300
"""Multipole of the convergence's power that `runs` lists."""


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore signals to stop in the main thread; other threads receive none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.signal(n, signal.SIG_IGN) for n in launch.STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class SimulationFolder(JobFolder):
    """A folder for the results of one simulation.

    Args:
        path: path of the folder; it is made when the run begins.
        outputs: names of the folders that hold the states before the last one.
    """

    kind = "run"
    contents = (*FILES, *OF_RUN, *SNAPSHOTS)
    begun = f"{PARTIAL}/checkpoints/{STEP}-*.zarr"

    def __init__(self, path: Path, outputs: Sequence[str] = ()) -> None:
        super().__init__(path)
        self.outputs = tuple(outputs)
        self.partial = path / PARTIAL

    @property
    def run_file(self) -> Path:
        """See `JobFolder.run_file`."""
        return (self.path if self.is_complete else self.partial) / "run.toml"

    @property
    def owner(self) -> Path:
        """The file that says which process writes, or wrote, in the partial folder."""
        return self.partial / "owner.json"

    @property
    def checkpoints(self) -> Path:
        """Path of the folder of checkpoints."""
        return self.partial / "checkpoints"

    @property
    def cone_particles(self) -> Path:
        """Path of the folder of the particles of a light cone, while it is written."""
        return self.partial / CONE_PARTICLES

    def last_step(self) -> int | None:
        """Returns the step of the latest checkpoint, or None if there is none."""
        return max(numbered_checkpoints(self.checkpoints, STEP), default=None)

    def checksums(self) -> Mapping[str, str]:
        """Returns the checksums of the run's input files by key, from its latest checkpoint.

        There are none without a checkpoint, or in one of an older version.
        """
        last = self.last_step()
        path = self.checkpoints / f"{STEP}-{last or 0:06d}.zarr"
        found = (snapshot_attributes(path) or {}).get("checksums")
        return found if isinstance(found, Mapping) else {}

    def is_finished(self) -> bool:
        """Returns whether the folder holds all results of a run."""
        return any(
            (snapshot_attributes(self.path / name) or {}).get("complete") for name in SNAPSHOTS
        )

    @property
    def is_complete(self) -> bool:
        """Whether all results are in place, and no other run was begun after them."""
        return self.is_finished() and not self.owner.is_file()

    def can_resume(self) -> bool:
        """See `JobFolder.can_resume`."""
        return self.owner.is_file() or self.is_finished()

    def alternative(self) -> str:
        """See `JobFolder.alternative`."""
        return "" if self.last_step() is None else super().alternative()

    def older_work(self) -> str | None:
        """Returns "a stopped run" if there are checkpoints, or "a finished run"; None for no run.

        The text is empty for an interrupted run without checkpoints.
        """
        if self.last_step() is not None:
            return "a stopped run"
        if self.is_finished():
            return "a finished run"
        return "" if self.partial.is_dir() else None

    def check_contents(self, *, overwrite: bool) -> None:
        """See `JobFolder.check_contents`."""
        ours = _outputs_in(self.path)
        check_foreign(self.path, [name for name in self.outputs if name not in ours])
        super().check_contents(overwrite=overwrite)

    def begin(self, *, resume: bool = False, overwrite: bool = False) -> None:
        """Make the folder to write into, and remove what an interrupted run has left. On rank 0.

        Checkpoints are removed if the run is not resumed. See `JobFolder.begin`.
        """
        with self._being_prepared():
            if not resume:
                self.check_contents(overwrite=overwrite)
            self._take_partial(resume=resume)
            if not resume:
                self.check_contents(overwrite=overwrite)
            self.partial.mkdir(exist_ok=True)
            self._lock = self._locked_partial()

    def _locked_partial(self) -> IO[str]:
        return self._locked(self.owner, generator=GENERATOR)

    def _take_partial(self, *, resume: bool) -> None:
        if not os.path.lexists(self.partial):
            return
        owned = self.owner.is_file()
        if self.partial.is_symlink() or not (owned or not any(self.partial.iterdir())):
            raise OutputError(f"{self.partial} does not belong to an interrupted run: move it away")
        with self._locked_partial():
            if (self.partial / "publishing").exists():
                self.publish()
                if resume:
                    raise OutputError(f"the run in {self.path} is complete: its results are there")
            elif resume:
                self._drop_results()
            else:
                shutil.rmtree(self.partial)

    def _drop_results(self) -> None:
        """Remove all from the partial folder that a resumed run does not need."""
        kept = (self.owner, self.run_file, self.checkpoints, self.cone_particles)
        for path in self.partial.iterdir():
            if path in kept or path.name in self.outputs:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    @_uninterrupted()
    def publish(self) -> None:
        """Move the results, all of them complete, into place. On rank 0.

        Signals to stop are ignored meanwhile. If the moving fails, old and new results stay in
        the partial folder, and the next run that begins here continues it.

        Raises:
            WriteError: a file cannot be moved.
        """
        old_are_away = self.partial / "replaced"
        self.check_held()
        try:
            (self.partial / "publishing").touch()
            if not old_are_away.exists():
                for name in (*self.contents, *_outputs_in(self.path)):
                    if (self.path / name).exists():
                        (self.path / name).rename(self.partial / f"replaced-{name}")
                old_are_away.touch()
            for name in (*FILES, *OF_RUN, *_outputs_in(self.partial), *SNAPSHOTS):
                if (self.partial / name).exists():
                    (self.partial / name).replace(self.path / name)
            shutil.rmtree(self.partial)
        except OSError as error:
            raise WriteError.of(Path(error.filename or self.path), error) from error
        self.release()

    def discard(self) -> None:
        """Remove what was written so far, on the rank that began; nothing on the others."""
        if self._lock is not None:
            self.remove_partial()

    def remove_partial(self) -> None:
        """Remove what was written so far, but checkpoints. On any rank, after rank 0 has begun.

        Results whose publication was interrupted are complete, and stay; so does what another run
        has written since this one has lost its folder.
        """
        if self._lock is not None and not self.is_held:
            return self.release()
        if not (self.partial / "publishing").exists():
            if self.last_step() is None:
                shutil.rmtree(self.partial, ignore_errors=True)
            else:
                with suppress(OSError):
                    self._drop_results()
        self.release()


def _outputs_in(folder: Path) -> list[str]:
    """Returns the names of the folders with earlier states that a run has written in a folder."""
    return [
        path.name
        for path in sorted(folder.glob("a_*"))
        if re.fullmatch(r"a_\d+\.\d{4}", path.name)
        and any("config" in (snapshot_attributes(path / name) or {}) for name in SNAPSHOTS)
    ]


class SimulationJob(Job[SimulationOptions, "Summary | None"]):
    """A simulation that was checked and can begin."""

    name = "simulate"
    help = "Evolve a universe and write its snapshot, power spectrum, figures and timings."
    asks = "What to simulate."
    example = "flowpm-dist simulate run.toml --ranks 4 --output universe"
    options_type, folder_type = SimulationOptions, SimulationFolder
    suffix = "output"
    unit = STEP
    takes_tables = True
    folder: SimulationFolder

    def make_folder(self, path: Path) -> SimulationFolder:
        """See `Job.make_folder`."""
        return SimulationFolder(path, [output_name(a) for a in self.options.output_times])

    def describe(self) -> str:
        """See `Job.describe`."""
        count, steps = math.prod(self.options.box.grid), self.options.evolution.step_count
        cone = self.options.light_cone
        text = f"{count:,} particles, {steps} steps, mesh {self.mesh}"
        if cone is not None and cone.options.sky == "flat" and cone.planes:
            text += f"; {cone.planes} planes of {cone.plane_width:g} Mpc/h on the light cone"
        if cone is None or not cone.particles:
            return text
        itemsize = np.dtype(self.options.run.precision).itemsize
        size = particle_bytes(cone.particles, itemsize, particle_files(self.options, self.ranks))
        return f"{text}; about {cone.particles:,.0f} on the light cone, {human_size(size)}"

    @property
    def warnings(self) -> tuple[str, ...]:
        """See `Job.warnings`."""
        cone = self.options.light_cone
        return (*self.options.warnings, *(() if cone is None else cone.warnings))

    @property
    def demand(self) -> Demand:
        """See `Job.demand`."""
        return demand_of(self.options)

    @property
    def disk(self) -> int:
        """See `Job.disk`."""
        return output_bytes(self.options, self.ranks)

    @property
    def cells(self) -> int:
        """See `Job.cells`."""
        return math.prod(self.options.box.grid)

    @property
    def remaining(self) -> int:
        """The number of steps that are left."""
        return self.options.evolution.step_count - ((self.folder.last_step() or 0) * self.resume)

    def seconds_per_piece(self, result: Summary | None) -> float | None:
        """See `Job.seconds_per_piece`."""
        return None if result is None else 1e-9 * result.ns_per_particle_per_step * self.cells

    def during_tensorflow_import(self) -> AbstractContextManager[None]:
        """See `Job.during_tensorflow_import`."""
        cosmology = self.options.cosmology
        if cosmology.transfer != "camb":
            return nullcontext()
        return camb_in_background(cosmology.model_dump(exclude_none=True))

    def work(self, progress: Progress) -> Summary | None:
        """See `Job.work`. Returns the summary on rank 0."""
        from flowpm_dist.jobs.session import StopError
        from flowpm_dist.simulate.session import SimulationSession

        try:
            session = SimulationSession(self.options, self.folder, progress)
            summary = session.run(resume=self.resume)
            self.stopped_by = session.stopped_by
            return summary
        except StopError:
            self.folder.release()
            raise
        except WriteError:
            # On any rank: a barrier was passed since rank 0 began, so the partial is this job's.
            self.folder.remove_partial()
            raise
        except BaseException:  # what was written so far is removed, but checkpoints
            self.folder.discard()
            raise

    def report(self, result: Summary | None) -> str:
        """Returns where the results are, and the first numbers."""
        summary, path, output = result, self.folder.path, self.options.output
        assert summary is not None
        name, steps = snapshot_name(output.format), self.options.evolution.step_count
        held = f"the particles, in the format {output.format}"
        if output.format == "zarr":
            held = f'{", ".join(output.fields)}; in Python: fpm.State.from_snapshot("{path}")'
            held = held if output.fields else "the attributes of the run alone"
        memory = human_size(max(summary.peak_memory))
        if self.folder.outputs:
            held += f"\n  {', '.join(self.folder.outputs)}: the same at earlier times, with spectra"
        if self.options.lightcone is not None:
            held += f'\n  {LIGHT_CONE:<19} maps; in Python: fpm.io.load_light_cone("{path}")'
            shear = "" if self.options.lightcone.sky == "full" else ", with sticks of shear"
            if output.figures:
                held += f"\n  convergence.png     convergence of the last sources{shear}"
            files = ".png, .csv" if output.figures else ".csv"
            held += f"\n  convergence_power{files}: angular power of all pairs, with theory"
            if self.options.lightcone.particles:
                held += f'\n  {CONE_PARTICLES}: in Python: fpm.io.read_light_cone("{path}")'
        figures = """\
  density.png         a slab of the universe
  power_spectrum.png  with linear theory; numbers in power_spectrum.csv"""
        if not output.figures:
            figures = "  power_spectrum.csv  with linear theory"
        return f"""
Results in {path}:
{figures}
  {name:<19} {held}
  run.toml            the run with all its settings; timings.json: seconds, memory, versions

{steps} steps in {summary.seconds:.3g} s after {summary.compile_seconds:.3g} s of compilation: \
{summary.ns_per_particle_per_step:.0f} ns per particle and step; at most {memory} on a rank.
P(k = {summary.k:.3f} h/Mpc) is {summary.ratio:.3f} of linear theory's."""

    @classmethod
    def record(cls, path: Path) -> RunRecord | None:
        """See `Job.record`."""
        folder = SimulationFolder(path)
        if not folder.is_complete:
            if not folder.owner.is_file():
                return None
            state = "running" if is_locked(folder.owner) else "stopped"
            settings, last = settings_in(folder.run_file), folder.last_step()
            edges, steps = settings.get("evolution.edges"), settings.get("evolution.steps")
            of = steps if edges is None else len(edges) - 1
            done = "" if last is None else f"{last}/{of} steps"
            return RunRecord(path, "simulation", state, done, changed(folder.owner), {}, settings)
        # A snapshot alone was saved from Python: how long its steps took is not known.
        ends = path / "timings.json"
        when = changed(next(p for n in (ends.name, *SNAPSHOTS) if (p := path / n).exists()))
        results, done = {**_power(path / "power_spectrum.csv")}, ""
        results |= _lensing(path / "convergence_power.csv")
        if ends.exists():
            if not isinstance(seconds := read_json(ends).get("steps"), list):
                raise ValueError(f"{ends.name} is damaged")
            results = {"seconds": sum(seconds), **results}
            done = f"{len(seconds)}/{len(seconds)} steps"
        settings = settings_in(path / "run.toml")
        return RunRecord(path, "simulation", "complete", done, when, results, settings)


def _rows(path: Path, columns: int) -> np.ndarray:
    """Returns the first columns of a table below its line of names; no rows if there is none."""
    try:
        return np.loadtxt(path, delimiter=",", skiprows=1, usecols=range(columns), ndmin=2)
    except (OSError, ValueError):
        return np.empty((0, columns))


def _power(path: Path) -> dict[str, float]:
    """Returns the measured power divided by linear theory's, nearest to `POWER_K`, by its name."""
    if not (rows := _rows(path, 4)).size:
        return {}
    k, power, _, linear = rows[np.argmin(np.abs(rows[:, 0] - POWER_K))].tolist()
    return {f"P/linear at {k:.2f} h/Mpc": power / linear}


def _lensing(path: Path) -> dict[str, float]:
    """Returns C_l of the last sources divided by halofit's, near `LENSING_ELL`, by its name."""
    if not (rows := _rows(path, 7)).size:
        return {}
    autos = rows[(rows[:, :2] == rows[:, 0].max()).all(axis=1)]
    nearest = autos[np.argmin(np.abs(autos[:, 2] - LENSING_ELL))].tolist()
    return {f"C_l/halofit at l = {nearest[2]:.0f}": nearest[3] / nearest[6]}
