"""What a study or a tuning runs: a job, by its run file, or a Python script.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError
from typing_extensions import override

from flowpm_dist.io.errors import UserError
from flowpm_dist.io.files import UnreadableError, remove, write_json
from flowpm_dist.io.opening import first_problem
from flowpm_dist.jobs.job import JOBS, PROGRAM, Job, Request, command_of, job_class
from flowpm_dist.jobs.run_file import RunFile, Settings, flat, read_table
from flowpm_dist.options import AnyPath, Options, Problem, ProblemsError, as_written
from flowpm_dist.options.regular_files import read_bytes
from flowpm_dist.studies.process import Outcome, run
from meshimpl import launch

LOG, RESULT, RUN = "log.txt", "result.json", "run"
"""Names in the folder of a run: its output, how it ended, and its results."""
Values = Mapping[str, Any]
"""Values of a subject's keys, by "section.key", or by the option of a script."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class Subject:
    """What a study runs: a job, by its run file, or a Python script.

    A script takes the options `--output DIR`, and `--KEY VALUE` for each key of a study. Under
    mpirun each rank runs it. It leaves `metrics.csv` in DIR.

    Attributes:
        path: path of the run file or the script.
    """

    path: Path

    @property
    def is_script(self) -> bool:
        """Whether the subject is a script."""
        return self.path.suffix == ".py"

    @property
    def command(self) -> str:
        """The command of the job; an empty text for a script.

        Raises:
            ConfigError: the run file cannot be read.
        """
        return "" if self.is_script else command_of({*read_table(self.path)})

    def plan(self, values: Values, ranks: int, output: Path) -> Job[Any, Any] | None:
        """Returns the job with these values, after all checks; None for a script.

        Who runs many of them checks the room on the disk for all.

        Raises:
            UserError: the job cannot begin.
        """
        if self.is_script:
            return None
        settings = _settings_of(values)
        request = Request(
            self.path, ranks, output, overwrite=True, settings=settings, elsewhere=True
        )
        return job_class(self.command).plan(request)

    def keys(self, values: Values) -> dict[str, Any]:
        """Returns all keys of a job with these values, by "section.key"; nothing for a script.

        Raises:
            ConfigError: the run file has mistakes.
        """
        if self.is_script:
            return {}
        model: Any = job_class(self.command).options_type
        return flat(model.load(self.path, _settings_of(values)).to_table())

    def run(
        self,
        folder: Path,
        values: Values,
        ranks: int,
        *,
        threads: int | None = None,
        resume: bool = False,
        more: Sequence[str] = (),
        **limits: Any,
    ) -> Outcome:
        """Run the subject to its end, with its results in `RUN` and its output in `LOG`.

        Args:
            folder: the folder of the run.
            values: values of its keys.
            ranks: number of ranks.
            threads: threads of each rank; by default the cores divided by the ranks.
            resume: whether a job that was begun there is resumed; otherwise it is removed.
            more: further options of the command of a job.
            limits: see `run`.

        Raises:
            LaunchError: there is no mpirun.
        """
        output = folder / RUN
        if resume and self._can_resume(output):
            more = [*more, "--resume"]
        else:
            remove(output, ignore_errors=not resume)
        (output if self.is_script else folder).mkdir(parents=True, exist_ok=True)
        environment = {**os.environ}
        if threads is not None:
            environment[launch.THREADS] = str(threads)
        if self.is_script:
            command = [sys.executable, str(self.path), "--output", str(output)]
            for key, value in values.items():
                command += [f"--{key.replace('_', '-')}", _word(value)]
            if ranks > 1:
                command, environment = launch.mpirun_command(ranks, command, threads=threads)
        else:
            command = [*PROGRAM, self.command, str(self.path), "--ranks", str(ranks)]
            command += ["--output", str(output), *more]
            command += [w for k, v in values.items() for w in ("--set", f"{k}={as_written(v)}")]
        return run(command, folder / LOG, environment=environment, **limits)

    def _can_resume(self, output: Path) -> bool:
        return not self.is_script and job_class(self.command).folder_type(output).can_resume()


_adapter: Any = functools.cache(TypeAdapter)


def read_result(folder: Path, kind: type[Result]) -> Result | None:
    """Returns how the run in a folder ended; None if it has not.

    Args:
        folder: the folder of the run.
        kind: the dataclass of the result.

    Raises:
        UnreadableError: the file lacks a value, or has one of another type.
    """
    try:
        return _adapter(kind).validate_json(read_bytes(folder / RESULT), strict=True)
    except FileNotFoundError:
        return None
    except ValidationError as error:
        places, message = first_problem(error)
        place = ": ".join([str(folder / RESULT), *places])
        again = "remove this file, and with --resume the run is made again"
        raise UnreadableError(f"{place}: {message}; {again}") from None


def write_result(folder: Path, result: Any) -> None:
    """Write how a run ended.

    Args:
        folder: the folder of the run.
        result: a dataclass, see `read_result`.

    Raises:
        WriteError: it cannot be written.
    """
    write_json(folder / RESULT, asdict(result))


def _settings_of(values: Values) -> Settings:
    settings = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        settings[section, name] = value
    return settings


def _word(value: Any) -> str:
    return value if isinstance(value, str) else as_written(value)


class SubjectSection(Options):
    """The keys about the subject in the section of a command that runs it.

    Attributes:
        subject: the run file of a job, or a Python script.
    """

    subject: AnyPath = Field(description="a run file (.toml) or a Python script (.py)")


class SubjectFile(RunFile):
    """The run file of a command that runs a subject. It has no mesh of its own.

    Attributes:
        section: name of the section with the subject.
        mesh_place: where the meshes of the runs are given, for a message.
    """

    section: ClassVar[str]
    mesh_place: ClassVar[str]

    @property
    def target(self) -> Subject:
        """The subject as a process."""
        section: SubjectSection = getattr(self, self.section)
        return Subject(section.subject)

    @property
    @override
    def files(self) -> dict[str, Path]:
        return {f"{self.section}.subject": self.target.path}

    @override
    def checksums(self) -> dict[str, str]:
        return {
            key: hashlib.blake2b(read_bytes(path), digest_size=16).hexdigest()
            for key, path in self.files.items()
        }

    @override
    def mesh_for(self, ranks: int, *, source: Path, shape: str | None = None) -> str:
        """Returns the mesh of the process that starts the runs, which has one rank.

        Raises:
            UserError: a mesh was given.
        """
        if shape is not None:
            raise UserError(f"--mesh {shape}: {self.mesh_place}")
        return "row:1"

    @override
    def with_mesh(self, shape: str | None) -> Self:
        return self

    @property
    @override
    def meshes(self) -> tuple[str, ...]:
        return ("row:1",)


def check_subject(subject: Subject) -> None:
    """Check that there is such a subject.

    Raises:
        UserError: there is none, or it is neither a run file nor a script.
    """
    if not subject.path.is_file():
        raise UserError(f"there is no {subject.path}")
    if subject.is_script:
        return
    if subject.path.suffix != ".toml":
        raise UserError(f"{subject.path} is neither a run file (.toml) nor a script (.py)")
    if subject.command not in JOBS or job_class(subject.command).command.starts_jobs:
        raise UserError(f"{subject.path} is the run file of a study itself")


def by_key(check: Callable[[Any], Any]) -> BeforeValidator:
    """Returns the validator of a table of the subject's keys, however its tables are nested.

    It makes a table of values by "section.key"; a table with `low` or `high` is a value.

    Args:
        check: returns the value of a key, given what the file has. It raises TypeError
            or ValueError.
    """

    def read(table: Any) -> Any:
        if not isinstance(table, Mapping):
            return table
        values: dict[str, Any] = {}
        problems = []
        for key, written in _keys_and_values(table):
            try:
                if key in values:
                    raise ValueError("is given twice")
                values[key] = check(written)
            except (TypeError, ValueError) as error:
                problems.append(Problem(key, str(error)))
        if problems:
            raise ProblemsError(problems)
        return values

    return BeforeValidator(read)


def _keys_and_values(table: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping) and value and not {*value} & {"low", "high"}:
            yield from _keys_and_values(value, f"{within}{name}.")
        else:
            yield f"{within}{name}", value
