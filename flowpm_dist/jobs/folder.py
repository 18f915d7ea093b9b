"""What the output folders of all jobs share: checks before any work, and one writer at a time."""

from __future__ import annotations

import errno
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from flowpm_dist.io.errors import UserError
from flowpm_dist.io.files import (
    GENERATOR,
    WriteError,
    links_in,
    read_json,
    remove,
    remove_unfinished,
    write_json,
)
from flowpm_dist.jobs.checkpoints import CheckpointStore
from flowpm_dist.jobs.locks import TRIES, Lock, is_locked
from flowpm_dist.jobs.results import RunRecord, changed
from flowpm_dist.jobs.run_file import settings_in
from flowpm_dist.options.regular_files import human_size

CHECKSUMS = "checksums.json"
REPORT, PROVENANCE = "report.html", "provenance.json"
"""The page about a job, and facts on how its results were made: see `jobs.report`."""
OF_EVERY_JOB = (REPORT, PROVENANCE)
TRACE, LONGEST = "trace.json.gz", "trace_summary.csv"
"""What each rank did in some steps, and what took the longest: see `jobs.trace`."""
ON_REQUEST = (TRACE, LONGEST)
FIGURES_AND_TABLES = 16 * 2**20
"""Room that a job's figures, tables and logs take at most [bytes]."""


class OutputError(UserError):
    """Results cannot be written to a folder. Raised before any work."""


def one(kind: str) -> str:
    """Returns a word with its article, such as "an emulation"."""
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def existing_part(path: Path) -> Path:
    """Returns the path, or its nearest parent that exists."""
    path = path.absolute()
    while not (path.exists() or path.is_symlink()):
        path = path.parent
    return path


def no_permission(path: Path, hosts: str = "", option: str = "--output") -> OutputError:
    """Returns the error about a folder that cannot be written in, anywhere or on some hosts."""
    where = f"{existing_part(path)}{' on ' * bool(hosts)}{hosts}"
    return OutputError(f"no permission to write in {where}: give another {option}")


def check_ground(path: Path) -> None:
    """Check that a folder can be written in, or can be made, without changing anything.

    Raises:
        OutputError: the path is not a folder, or there is no permission to write in it.
    """
    ground = existing_part(path)
    if not ground.is_dir():
        raise OutputError(f"{ground} is not a folder: give another --output")
    if not os.access(ground, os.W_OK | os.X_OK):
        raise no_permission(ground)


def check_room(path: Path, needed: int, what: str) -> None:
    """Check that the disk of a folder has room; the folder may still have to be made.

    Args:
        path: path of the folder.
        needed: size of what will be written [bytes].
        what: subject and verb of the message, such as "the results need about".

    Raises:
        OutputError: there is too little room.
    """
    ground = existing_part(path)
    free = shutil.disk_usage(ground).free
    if needed > free:
        raise OutputError(
            f"{ground} has {human_size(free)} free, {what} {human_size(needed)}: make room, or "
            "give another --output"
        )


def check_foreign(path: Path, names: Iterable[str]) -> None:
    """Check that a folder without a job of ours holds no files with the given names.

    Args:
        path: path of the folder.
        names: names of the files that are to be written.

    Raises:
        OutputError: the folder has some of them; the message names these.
    """
    there = [name for name in names if os.path.lexists(path / name)]
    if there:
        raise OutputError(
            f"{path} holds {', '.join(there)} from elsewhere, which would be overwritten: give "
            "another --output, or move them away"
        )


def check_alone(path: Path, kind: str) -> None:
    """Check that a folder, if it is there, holds nothing but hidden files.

    Args:
        path: path of the folder.
        kind: name of the work that will write many files.

    Raises:
        OutputError: it holds other things; the message names some of them.
    """
    try:
        there = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    except OSError as error:
        raise OutputError(f"cannot read {path}: {error.strerror or error}") from error
    others = [name for name in there if not name.startswith(".")]
    if others:
        named = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        raise OutputError(
            f"{path} holds other things ({named}), and {one(kind)} is many files: give it an "
            f"--output of its own, such as {path / kind}"
        )


class JobFolder(ABC):
    """A folder that one job at a time writes in.

    Args:
        path: path of the folder; it is made when the job begins.

    Attributes:
        checkpoints: the checkpoints of the work.
        lock: the lock of the process that writes here; its file says which one that is.
    """

    kind: ClassVar[str]
    """What the job is called."""
    contents: ClassVar[tuple[str, ...]]
    """Names of the files and folders that the job leaves."""
    begun: ClassVar[str]
    """Pattern of the files that are there if there is work to resume."""
    alone: ClassVar[bool] = False
    """Whether the job begins only in a folder that holds nothing else."""
    inner: ClassVar[str] = ""
    """Name of the inner folders that other jobs write in."""
    suffix: ClassVar[str] = ""
    """The end of the default folder's name, where it is not the `kind`."""
    unit: ClassVar[str] = "step"
    """What checkpoints are counted in."""
    captions: ClassVar[Mapping[str, str]] = {}
    """What figures and tables show, in a sentence, by the names of their files."""

    def __init__(self, path: Path) -> None:
        self.path, self.checkpoints = path, CheckpointStore(path / "checkpoints", self.unit)
        self.lock = Lock(path / ".lock")

    @classmethod
    def default_path(cls, run_file: Path) -> Path:
        """Returns the default folder of a run file's job, which is used without --output."""
        return Path(f"{run_file.stem}-{cls.suffix or cls.kind}")

    @property
    def all_contents(self) -> tuple[str, ...]:
        """The `contents`, and the files that any job may leave."""
        return (*self.contents, *OF_EVERY_JOB, *ON_REQUEST)

    @property
    @abstractmethod
    def run_file(self) -> Path:
        """Path of the resolved run file of the work that can be resumed."""

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """Whether the work is done, and nothing is left to resume."""

    @abstractmethod
    def record(self) -> RunRecord | None:
        """Returns the entry of the folder in `flowpm-dist runs`; None if it holds no such job."""

    @abstractmethod
    def can_resume(self) -> bool:
        """Returns whether there is work that was begun here, complete or not."""

    @abstractmethod
    def begin(self, *, resume: bool = False, overwrite: bool = False) -> None:
        """Take the folder, and remove older work from it unless that is resumed. On rank 0.

        Args:
            resume: whether the work is resumed.
            overwrite: whether other work of its kind may be replaced.

        Raises:
            OutputError: another process is writing here or has written since the check, or the
                folder cannot be made.
        """

    @abstractmethod
    def older_work(self) -> str | None:
        """Returns what an older job of this kind has left, such as "a training"; None for nothing.

        The text is empty for a remainder that may be removed without asking.
        """

    def checksums(self) -> Mapping[str, str]:
        """Returns the checksums of the input files of the work that was begun here, by key."""
        return {}

    def alternative(self) -> str:
        """Returns what a user can do with older work here besides replacing it."""
        return "--resume to go on with it, "

    def complete_message(self) -> str:
        """Returns the message that is printed when nothing is left to do."""
        return f"The {self.kind} in {self.path} is complete."

    def last_checkpoint(self) -> tuple[Path, str] | None:
        """Returns the folder of the latest checkpoint and when it was made, such as "step 3"."""
        last = self.checkpoints.last
        return None if last is None else (self.checkpoints.path, f"{self.unit} {last}")

    def saved(self) -> str:
        """Returns a sentence about the existing checkpoints, for a user whose work was stopped."""
        last = self.last_checkpoint()
        if last is None:
            return "there is no checkpoint yet"
        folder, place = last
        return (
            f"the checkpoints in {folder} are intact, the last after {place}: go on with --resume"
        )

    def check(self, *, resume: bool = False, overwrite: bool = False, needed: int) -> None:
        """Check that the job can begin or be resumed here, without changing anything.

        Args:
            resume, overwrite: as for `begin`.
            needed: estimated size of what will be written [bytes].

        Raises:
            OutputError: it cannot; the message says why, and what to do about it.
        """
        check_ground(self.path)
        if resume and not self.can_resume():
            raise OutputError(
                f"{self.path} holds no {self.kind} to resume: leave --resume out, or give its "
                "--output"
            )
        if resume:
            self.check_links()
        else:
            self.check_contents(overwrite=overwrite)
        check_room(self.path, needed, f"the {self.kind} needs about")

    def check_contents(self, *, overwrite: bool) -> None:
        """Check that nothing in the folder would be lost against the user's will.

        Args:
            overwrite: whether older work may be replaced.

        Raises:
            OutputError: there is older work, or there are files from elsewhere.
        """
        older = self.older_work()
        if older is None:
            check_foreign(self.path, self.all_contents)
            if self.alone:
                check_alone(self.path, self.kind)
        elif older and not overwrite:
            raise OutputError(
                f"{self.path} holds {older}: add {self.alternative()}--overwrite to replace it, or "
                "give another --output"
            )

    def check_links(
        self,
        names: Iterable[str] | None = None,
        rule: str = "",
        instead: str = ", or give another --output",
    ) -> None:
        """Check that nothing is written through a link in the folder, which may be a link itself.

        Args:
            names: names of what is written in the folder; by default all that the job writes.
            rule: clause of the message on why there may be no link.
            instead: end of the message, on what else a user can do.

        Raises:
            OutputError: there is a link among what is written, or in one of its folders; or one of
                them cannot be read.
        """
        rule = rule or f"{one(self.kind)} writes only in its own folder"
        for name in self.written if names is None else names:
            path = self.path / name
            try:
                link = path if path.is_symlink() else next(links_in(path, self.inner), None)
            except OSError as error:
                where = error.filename or path
                raise OutputError(f"cannot read {where}: {error.strerror or error}") from error
            if link is not None:
                raise OutputError(
                    f"{link} is a symbolic link, and {rule}: put what it points to in its place"
                    f"{instead}"
                )

    @property
    def written(self) -> tuple[str, ...]:
        """Names in the folder that a resumed job writes to."""
        return self.all_contents

    @contextmanager
    def _being_prepared(self) -> Iterator[None]:
        """Make the folder; inside, an error of the system becomes an OutputError."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            yield
        except OSError as error:
            where = error.filename or self.path
            raise OutputError(f"cannot write in {where}: {error.strerror or error}") from error

    def _take_lock(self, *, together: bool = False, **more: object) -> None:
        """Takes the lock of the folder.

        Args:
            together: whether other processes may hold the lock, too.
            more: what its file says besides host and process.

        Raises:
            OutputError: another process holds the lock.
            OSError: the file cannot be opened or written.
        """
        try:
            is_ours = self.lock.take(TRIES, together=together)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            raise OutputError(
                f"the file system of {self.path} grants no locks, so that two jobs could write in "
                "one folder: give another --output, or have it mounted with locks"
            ) from None
        if not is_ours:
            raise OutputError(
                f"another {self.kind} is writing in {self.path}: {self.lock.holder}. If it has "
                "ended, the file system still keeps its lock: wait a minute, or remove "
                f"{self.lock.path}"
            )
        self.lock.sign(**more)

    def check_held(self) -> None:
        """Check that the folder in which this process began is still there. On any rank.

        Raises:
            WriteError: it was removed, or another one is in its place; on rank 0.
        """
        if self.lock.is_lost:
            raise WriteError(
                f"{self.path} was removed or replaced while the {self.kind} was going on, so that "
                "it cannot be saved: begin it anew"
            )

    def release(self) -> None:
        """Let other jobs write in the folder."""
        self.lock.give_up()


class WorkFolder(JobFolder):
    """A folder that one resumable job owns.

    The first of its `contents` is the mark: a file that says that the folder is the job's own, and
    whether the job is complete.

    Args:
        path: path of the folder; it is made when the job begins.
    """

    resumed_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of the mark that a resumed job keeps."""
    shared: ClassVar[bool] = False
    """Whether several processes may resume the job together."""
    alone = True

    @property
    def run_file(self) -> Path:
        """Path of the resolved run file."""
        return self.path / "run.toml"

    def no_checkpoint(self, made: str) -> str:
        """Returns the message that work such as "3 steps" was done, but its checkpoint is gone."""
        return (
            f"{self.path} has made {made}, but {self.checkpoints.path} holds no checkpoint: put it "
            "back, or begin anew with --overwrite"
        )

    @property
    def is_complete(self) -> bool:
        """Whether the mark says that the work is complete."""
        return bool(self.mark().get("complete"))

    @override
    def can_resume(self) -> bool:
        return bool(self.mark())

    def older_work(self) -> str | None:
        """Returns the kind of the job that owns the folder; None if there is none."""
        return one(self.kind) if self.mark() else None

    @override
    def record(self) -> RunRecord | None:
        return self.recorded()

    def recorded(
        self, steps: str = "", results: Mapping[str, object] | None = None
    ) -> RunRecord | None:
        """Returns the `record` of a folder with these numbers; None without a mark.

        Args:
            steps, results: see `RunRecord`.
        """
        if not (mark := self.mark()):
            return None
        state = "complete" if mark.get("complete") else "stopped"
        if is_locked(self.lock.path):
            state = "running"
        when = changed(self.path / self.contents[0])
        settings = settings_in(self.run_file)
        return RunRecord(
            self.path, self.kind, state, steps, when, results or {}, settings, self.captions
        )

    def mark(self) -> dict[str, object]:
        """Returns the entries of the mark; an empty dictionary if there is no mark."""
        mark = read_json(self.path / self.contents[0])
        return mark if mark.get("generator") == GENERATOR else {}

    @override
    def begin(self, *, resume: bool = False, overwrite: bool = False) -> None:
        with self._being_prepared():
            if resume:
                self.check_links()
            together = resume and self.shared
            try:
                self._take_lock()
            except OutputError:
                if not together:
                    raise
                self._take_lock(together=True)
                return
            if not resume:
                self.check_contents(overwrite=overwrite)
            if self.mark():
                remove_unfinished(self.path, self.written if resume else (), self.inner)
            if not resume:
                # The mark goes last: should this be interrupted, the rest is known to be ours.
                for name in reversed(self.all_contents):
                    remove(self.path / name)
            if not together:
                mark = self.mark()
                self.write_mark(
                    complete=False,
                    **{name: mark[name] for name in self.resumed_keys if name in mark},
                )
            while self.shared and not self.lock.take(TRIES, together=True):
                pass  # from now on others may resume it, too; one may do so at this moment

    def checksums(self) -> Mapping[str, str]:
        """Returns checksums of input files by key; none if `CHECKSUMS` is not in `contents`."""
        return read_json(self.path / CHECKSUMS)

    def keep_checksums(self, found: Mapping[str, str]) -> None:
        """Writes the checksums of the input files when the work begins. On rank 0.

        Args:
            found: the checksums by key of the run file.

        Raises:
            WriteError: they cannot be written.
        """
        if not self.checksums():
            write_json(self.path / CHECKSUMS, dict(found))

    def write_mark(self, *, complete: bool, **more: object) -> None:
        """Writes the mark: whether the job is complete, and the entries `more`. On rank 0."""
        mark = {"generator": GENERATOR, "complete": complete, **more}
        write_json(self.path / self.contents[0], mark)
