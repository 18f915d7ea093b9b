"""The output folder of a simulation, whose results appear all at once.

Results are written into `DIR/.partial-flowpm-dist` and moved into `DIR` when all of them are
complete, `snapshot.zarr` last. A snapshot in `DIR` makes a finished run, so that an interrupted run
never looks like one. The files of an older run stay until the new ones are moved.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from flowpm_dist.io.files import GENERATOR, SNAPSHOT, WriteError, snapshot_attributes
from flowpm_dist.jobs.folder import JobFolder, OutputError, check_ground, check_room

FILES = ("power_spectrum.csv", "density.png", "power_spectrum.png", "run.toml", "timings.json")
PARTIAL = ".partial-flowpm-dist"


class OutputFolder(JobFolder):
    """A folder for the results of one simulation.

    Args:
        path: of the folder; it is made when the run begins.
    """

    kind = "run"
    contents = (*FILES, SNAPSHOT)

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.partial = path / PARTIAL

    def is_finished(self) -> bool:
        """Returns whether the folder holds all results of a run."""
        return bool((snapshot_attributes(self.path / SNAPSHOT) or {}).get("complete"))

    def older_work(self) -> str | None:
        """Returns "a finished run"; an empty text for an interrupted one; None for neither."""
        if self.is_finished():
            return "a finished run"
        return "" if self.partial.is_dir() else None

    def check(self, *, overwrite: bool, needed: int) -> None:
        """Check that results can go here, without changing anything. On any rank.

        Args:
            overwrite: whether a finished run may be replaced.
            needed: estimated size of the results [bytes].

        Raises:
            OutputError: they cannot; the message says why, and what to do about it.
        """
        check_ground(self.path)
        self.check_contents(overwrite=overwrite)
        check_room(self.path, needed, "the results need about")

    def begin(self, *, overwrite: bool) -> None:
        """Remove what an interrupted run has left, and make the folder to write into. On rank 0.

        Args:
            overwrite: whether a finished run may be replaced.

        Raises:
            OutputError: another run is writing here, or the folder cannot be made.
        """
        with self._being_prepared():
            self._clear_partial()
            self.check_contents(overwrite=overwrite)
            self.partial.mkdir()
            self._lock = self._locked_partial()

    def _locked_partial(self) -> IO[str]:
        return self._locked(self.partial / "owner.json", generator=GENERATOR)

    def _clear_partial(self) -> None:
        if not os.path.lexists(self.partial):
            return
        owned = (self.partial / "owner.json").is_file()
        if self.partial.is_symlink() or not (owned or not any(self.partial.iterdir())):
            raise OutputError(f"{self.partial} is not of an interrupted run: move it away")
        with self._locked_partial():
            if (self.partial / "publishing").exists():
                self.publish()
            else:
                shutil.rmtree(self.partial)

    def publish(self) -> None:
        """Move the results, all of them complete, into place. On rank 0.

        SIGINT and SIGTERM are ignored meanwhile. If the moving fails, old and new results stay in
        the partial folder, and the next run that begins here continues it.

        Raises:
            WriteError: a file cannot be moved.
        """
        with _uninterrupted():
            self._publish()

    def _publish(self) -> None:
        new, old = self.partial / SNAPSHOT, self.path / SNAPSHOT
        try:
            (self.partial / "publishing").touch()
            if new.exists() and old.exists():
                old.rename(self.partial / "replaced.zarr")
            for name in FILES:
                if (self.partial / name).exists():
                    (self.partial / name).replace(self.path / name)
            if new.exists():
                new.rename(old)
            shutil.rmtree(self.partial)
        except OSError as error:
            raise WriteError.of(Path(error.filename or self.path), error) from error
        self.release()

    def discard(self) -> None:
        """Remove what was written so far, on the rank that began; nothing on the others."""
        if self._lock is not None:
            self.remove_partial()

    def remove_partial(self) -> None:
        """Remove what was written so far. On any rank, after rank 0 has begun.

        Results whose publication was interrupted are complete, and stay.
        """
        if not (self.partial / "publishing").exists():
            shutil.rmtree(self.partial, ignore_errors=True)
        self.release()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM in the main thread; other threads receive no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
