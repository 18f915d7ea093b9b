"""The output folder of `flowpm-dist simulate`, in which all results appear at once.

Results are written into `DIR/.partial-flowpm-dist` and moved into `DIR` when all of them are
complete, the snapshot last. A snapshot in `DIR` makes a finished run, so that an interrupted run
never looks like one. The files of an older run stay until the new ones are moved. The checkpoints
are in the partial folder as well, and are deleted with it when the results are in place.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import get_args

import numpy as np
from typing_extensions import override

from flowpm_dist.catalogues.options import CatalogueFormat
from flowpm_dist.io.files import (
    CONE_PARTICLES,
    GENERATOR,
    LIGHT_CONE,
    SNAPSHOTS,
    WriteError,
    read_json,
    remove,
    remove_unfinished,
    snapshot_attributes,
)
from flowpm_dist.jobs.checkpoints import CheckpointStore
from flowpm_dist.jobs.folder import JobFolder, OutputError, check_foreign
from flowpm_dist.jobs.locks import Lock, is_locked
from flowpm_dist.jobs.results import RunRecord, changed
from flowpm_dist.jobs.run_file import settings_in
from flowpm_dist.options.regular_files import only_in, read_text
from flowpm_dist.statistics.register import short_name
from meshimpl import launch

FILES = ("power_spectrum.csv", "density.png", "power_spectrum.png", "run.toml", "timings.json")
OF_LIGHT_CONE = ("convergence_power.csv", "convergence.png", "convergence_power.png", LIGHT_CONE)
"""Further results of a run with a light cone."""
HALOS, GALAXIES = "halos", "galaxies"
"""Names of catalogues, without the ending of their format."""
OF_HALOS = (
    *(f"{name}.{format}" for name in (HALOS, GALAXIES) for format in get_args(CatalogueFormat)),
    *("halo_mass_function.csv", "halo_mass_function.png", "halos.png"),
    *("halo_power.csv", "halo_power.png", "galaxy_power.csv", "galaxy_power.png"),
    "galaxy_multipoles.csv",
)
"""Further results of a run that finds halos."""
OF_RUN = (*OF_LIGHT_CONE, *OF_HALOS, CONE_PARTICLES)
"""Results that only some runs have."""
STATISTICS, FEATURES = "statistics", "features.json"
"""The folder of a state's statistics, and the file in it with the features of each."""
CAPTIONS = {
    "density.png": "The density of a slab through the box, relative to the mean.",
    "power_spectrum.png": "The power of the density by wavenumber, with linear theory.",
    "power_spectrum.csv": "The power of the density by wavenumber, with linear theory.",
    "convergence.png": "The convergence of the last sources.",
    "convergence_power.png": "The angular power of the convergence, with Halofit.",
    "convergence_power.csv": "The angular power of the convergence, with Halofit.",
    "halos.png": "Halos over the density of a slab through the box.",
    "halo_mass_function.png": "The abundance of halos by mass, with fits to other simulations.",
    "halo_mass_function.csv": "The abundance of halos by mass, with Poisson errors.",
    "halo_power.png": "The power of halos by wavenumber, and their bias.",
    "halo_power.csv": "The power of halos by wavenumber, and their bias.",
    "galaxy_power.png": "The power of galaxies by wavenumber, and their bias.",
    "galaxy_power.csv": "The power of galaxies by wavenumber, and their bias.",
    "galaxy_multipoles.csv": "Multipoles of the power of galaxies in redshift space.",
}
PARTIAL = ".partial-flowpm-dist"
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
    contents = (*FILES, *OF_RUN, STATISTICS, *SNAPSHOTS)
    begun = f"{PARTIAL}/checkpoints/step-*.zarr"
    suffix = "output"
    captions = CAPTIONS

    def __init__(self, path: Path, outputs: Sequence[str] = ()) -> None:
        super().__init__(path)
        self.outputs = tuple(outputs)
        self.partial = path / PARTIAL
        self.lock = Lock(self.owner)
        self.checkpoints = CheckpointStore(self.partial / "checkpoints", self.unit)

    @property
    @override
    def run_file(self) -> Path:
        return (self.path if self.is_complete else self.partial) / "run.toml"

    @property
    def owner(self) -> Path:
        """The file that says which process writes, or wrote, in the partial folder."""
        return self.partial / "owner.json"

    @property
    def cone_particles(self) -> Path:
        """Path of the folder of the particles of a light cone, while it is written."""
        return self.partial / CONE_PARTICLES

    @property
    def written(self) -> tuple[str, ...]:
        """The partial folder alone: results are moved into place as a whole."""
        return (PARTIAL,)

    def checksums(self) -> Mapping[str, str]:
        """Returns the checksums of the run's input files by key, from its latest checkpoint.

        There are none without a checkpoint, or in one of an older version.
        """
        paths = [*self.checkpoints.numbered().values()]
        checksums = (snapshot_attributes(paths[-1]) or {}).get("checksums") if paths else None
        return checksums if isinstance(checksums, Mapping) else {}

    def is_finished(self) -> bool:
        """Returns whether the folder holds all results of a run."""
        with only_in(None):  # a link to a snapshot on another disk is one
            return any(
                (snapshot_attributes(self.path / name) or {}).get("complete") for name in SNAPSHOTS
            )

    @property
    def is_complete(self) -> bool:
        """Whether all results are in place, and no other run was begun after them."""
        return self.is_finished() and not self.owner.is_file()

    @override
    def can_resume(self) -> bool:
        return self.owner.is_file() or self.is_finished()

    @override
    def alternative(self) -> str:
        return "" if self.checkpoints.last is None else super().alternative()

    def older_work(self) -> str | None:
        """Returns "a stopped run" if there are checkpoints, or "a finished run"; None for no run.

        The text is empty for an interrupted run without checkpoints.
        """
        if self.checkpoints.last is not None:
            return "a stopped run"
        if self.is_finished():
            return "a finished run"
        return "" if self.partial.is_dir() else None

    @override
    def check_contents(self, *, overwrite: bool) -> None:
        ours = _outputs_in(self.path)
        others = [name for name in self.outputs if name not in ours]
        if not self._has_its_statistics():
            others.append(STATISTICS)
        check_foreign(self.path, others)
        super().check_contents(overwrite=overwrite)
        self._check_partial()

    def _has_its_statistics(self) -> bool:
        """Whether all in the folder of statistics are files that the run in it has made."""
        names = settings_in(self.path / "run.toml").get("results.statistics", [])
        made = {f"{short_name(name)}{ending}" for name in names for ending in (".csv", ".png")}
        folder = self.path / STATISTICS
        return folder.is_dir() and {path.name for path in folder.iterdir()} <= {FEATURES, *made}

    def _check_partial(self) -> None:
        """Check that what is in the partial folder, if it is there, can be published or removed.

        Raises:
            OutputError: it is not ours, or has a symbolic link among results to be published.
        """
        if not os.path.lexists(self.partial):
            return
        is_folder = self.partial.is_dir() and not self.partial.is_symlink()
        if not (is_folder and (self.owner.is_file() or not any(self.partial.iterdir()))):
            raise OutputError(f"{self.partial} does not belong to an interrupted run: move it away")
        if self.is_publishing:
            self.check_links()

    @property
    def is_publishing(self) -> bool:
        """Whether all results are complete, and moving them into place was interrupted."""
        return (self.partial / "publishing").exists()

    def begin(self, *, resume: bool = False, overwrite: bool = False) -> None:
        """Make the folder to write into, and remove what an interrupted run has left. On rank 0.

        Checkpoints are removed if the run is not resumed. See `JobFolder.begin`.
        """
        with self._being_prepared():
            if not resume:
                self.check_contents(overwrite=overwrite)
            ours = self.older_work() is not None
            self._take_partial(resume=resume)
            if not resume:
                self.check_contents(overwrite=overwrite)
            self._take_lock(generator=GENERATOR)
            if ours:  # figures and reports are written beside the results
                remove_unfinished(self.path)

    def _take_partial(self, *, resume: bool) -> None:
        if not os.path.lexists(self.partial):
            return
        self._check_partial()
        with self.lock:
            self._take_lock(generator=GENERATOR)
            if resume or self.is_publishing:
                self.check_links()
            if self.is_publishing:
                self.publish()
                if resume:
                    raise OutputError(f"the run in {self.path} is complete: its results are there")
            elif resume:
                self._drop_results()
            else:
                remove(self.partial)

    def _drop_results(self) -> None:
        """Remove all from the partial folder that a resumed run does not need."""
        needed = (self.owner, self.run_file, self.checkpoints.path, self.cone_particles)
        for path in self.partial.iterdir():
            if path in needed or path.name in self.outputs:
                continue
            remove(path)

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
                for name in (*self.all_contents, *_outputs_in(self.path)):
                    if os.path.lexists(self.path / name):
                        (self.path / name).rename(self.partial / f"replaced-{name}")
                old_are_away.touch()
            others = _outputs_in(self.partial)
            for name in (*FILES, *OF_RUN, STATISTICS, *others, *SNAPSHOTS):
                if (self.partial / name).exists():
                    (self.partial / name).replace(self.path / name)
            remove(self.partial)
        except OSError as error:
            raise WriteError.of(Path(error.filename or self.path), error) from error
        self.release()

    def discard(self) -> None:
        """Remove what was written so far, on the rank that began; nothing on the others."""
        if self.lock.descriptors:
            self.remove_partial()

    def remove_partial(self) -> None:
        """Remove what was written so far, but checkpoints. On any rank, after rank 0 has begun.

        Results whose publication was interrupted are complete, and stay; so does what another run
        has written since this one has lost its folder.
        """
        if self.lock.is_lost:
            return self.release()
        if not self.is_publishing:
            if self.checkpoints.last is None:
                remove(self.partial, ignore_errors=True)
            else:
                with suppress(OSError):
                    self._drop_results()
        self.release()

    @override
    def record(self) -> RunRecord | None:
        path = self.path
        if not self.is_complete:
            if not self.owner.is_file():
                return None
            state = "running" if is_locked(self.owner) else "stopped"
            settings, last = settings_in(self.run_file), self.checkpoints.last
            edges, steps = settings.get("evolution.edges"), settings.get("evolution.steps")
            of = steps if edges is None else len(edges) - 1
            done = "" if last is None else f"{last}/{of} steps"
            when = changed(self.owner)
            return RunRecord(path, "simulation", state, done, when, {}, settings, CAPTIONS)
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
        return RunRecord(path, "simulation", "complete", done, when, results, settings, CAPTIONS)


def _rows(path: Path, columns: int) -> np.ndarray:
    """Returns the first columns of a table below its line of names; no rows if there is none."""
    try:
        lines = read_text(path).splitlines()
        return np.loadtxt(lines, delimiter=",", skiprows=1, usecols=range(columns), ndmin=2)
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


def _outputs_in(folder: Path) -> list[str]:
    """Returns the names of the folders with earlier states that a run has written in a folder."""
    return [
        path.name
        for path in sorted(folder.glob("a_*"))
        if re.fullmatch(r"a_\d+\.\d{4}", path.name)
        and any("config" in (snapshot_attributes(path / name) or {}) for name in SNAPSHOTS)
    ]
