"""Batch jobs: the site file, what a user asks for, and scripts for sbatch that a site can edit."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from flowpm_dist.io.errors import UserError
from flowpm_dist.jobs.job import JOBS, PROGRAM, Job, job_class
from flowpm_dist.jobs.run_file import RunFile
from flowpm_dist.options import Options, Problem, listed
from flowpm_dist.simulation.demand import human_time
from flowpm_dist.studies.rows import Rows
from meshimpl import launch

_TIME = re.compile(
    r"(?:(?P<days>\d+)-(?P<hours>\d+)(?::(?P<minutes>\d+)(?::(?P<seconds>\d+))?)?)"
    r"|(?:(?P<h>\d+):)?(?P<m>\d+):(?P<s>\d+)|(?P<alone>\d+)"
)
_GPUS = re.compile(
    r"--gpus-per-node[= ](?:[\w.-]+:)?(\d+)|--gres[= ](?:\S*,)?gpu"
    r"(?::[\w.-]*[^\d:,][\w.-]*)?(?::(\d+))?(?=,|$)"
)
STOPPED = 128 + 10
"""Exit status of a command that SIGUSR1 has stopped."""
TEMPLATE = Path(__file__).with_name("job.sbatch")
"""What the scripts of all jobs are made from."""
_NAME = re.compile(r"@(\w+)@")
QUOTED = (
    "name", "log", "time", "partition", "account", "qos", "output", "begun", "mpi", "mpirun",
)  # fmt: skip
"""The template's names whose values are words of a shell."""
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters but the tab, and bytes of a path that are no UTF-8."""
_OPTION_NAMES = {"name": "--output", "values": "--array", "written_by": "the command line"}
"""Names in the template -> the options that set them, where these have another name."""

Texts = Annotated[tuple[str, ...], BeforeValidator(listed)]


class SiteOptions(Options):
    """The section [site] of a site file."""

    launcher: Literal["srun", "mpirun"] = Field(
        default="srun", description='what starts the ranks, "srun" or "mpirun"'
    )
    mpi: str = Field(
        default="pmix",
        pattern=r"^\w+$",
        description='the value of srun\'s --mpi, such as "pmix"',
    )
    setup: Texts = Field(
        default=(), description='a list of shell lines, such as ["module load gcc openmpi"]'
    )
    program: str = Field(
        default="",
        description="the command flowpm-dist, with its path as it is on the nodes; by default the "
        "command installed with this Python",
    )
    partition: str = Field(default="", description="the name of a partition")
    account: str = Field(default="", description="the name of an account")
    qos: str = Field(default="", description="the name of a quality of service")
    directives: Texts = Field(
        default=(), description='a list of further options of sbatch, such as "--exclusive"'
    )
    threads: int = Field(
        default=0, ge=0, description="cores of each rank; 0 leaves them to Slurm and the launcher"
    )
    gpus_per_rank: int = Field(
        default=0, ge=0, le=1, description="GPUs of each rank, of which it uses one: 0 or 1"
    )
    warn: int = Field(
        default=120,
        ge=10,
        le=65535,
        description="seconds before the time limit at which a job is asked to stop, 10 to 65535",
    )
    restarts: int = Field(
        default=100, ge=0, description="how often a job is queued again, a whole number"
    )

    def problems(self) -> Iterator[Problem]:
        """Yields the mistakes of the directives and of the program."""
        for directive in self.directives:
            if not directive.startswith("-"):
                yield Problem("directives", f"= {directive!r}: must begin with --")
        if self.program.startswith("~") or "$" in self.program:
            yield self.problem("program", "must be a path without ~ and $")
        try:
            shlex.split(self.program)
        except ValueError as error:
            yield self.problem("program", f"{error}: must be as in a shell")


class SiteFile(RunFile):
    """A whole site file."""

    site: SiteOptions


def gpus_of_a_node(directives: Iterable[str]) -> int | None:
    """Returns the GPUs of a node for which options of sbatch ask; None if they do not say.

    Args:
        directives: such as "--gres=gpu:a100:4".
    """
    for directive in directives:
        if count := _GPUS.match(directive):
            return int(count[1] or count[2] or 1)
    return None


def default_site_file() -> Path:
    """Returns the path of the user's site file, which may be missing."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(base) / "flowpm-dist" / "site.toml"


def load_site(path: Path | None) -> SiteOptions:
    """Returns what a site file says.

    Args:
        path: path of the file; None takes the user's own if there is one.

    Raises:
        ConfigError: it has mistakes.
    """
    if path is None:
        path = default_site_file()
        if not path.exists():
            return SiteOptions()
    return SiteFile.load(path).site


def seconds_of(limit: str) -> int:
    """Returns a time limit of sbatch, such as "02:00:00", "90" (minutes) or "1-12" [s].

    Raises:
        UserError: sbatch would not take it.
    """
    match = _TIME.fullmatch(limit)
    if match is None:
        raise UserError(f"--time {limit}: must be as sbatch takes it, such as 02:00:00")
    days, hours, minutes, seconds, h, m, s, alone = (int(n or 0) for n in match.groups())
    if max(minutes, seconds, s, m if match["h"] else 0) > 59 or hours > 23:
        raise UserError(f"--time {limit}: has more than 59 minutes or seconds, or 23 hours")
    return 86400 * days + 3600 * (hours + h) + 60 * (minutes + m + alone) + seconds + s


@dataclass(frozen=True)
class BatchJob:
    """A job of a batch system.

    Attributes:
        command: the command of flowpm-dist.
        paths: its run file, or the files and folders that it works on.
        options: further options of the command.
        results: folder of the results; in an array, of which each job has its own, the beginning of
            their names.
        has_output: whether the command is given that folder.
        mesh: shape of the mesh of ranks; None for the command's own choice.
        rows: the settings that all jobs share, and the settings of each job of an array.
        nodes, ranks_per_node: size of the job.
        time: limit such as "02:00:00".
        site: the site's options, some replaced by the command line.
        at_once: jobs of an array that may run at one time; 0 for all.
        workers: jobs of an array that do the work in one folder together; 0 for a single job.
        complete: numbers of the jobs of the array whose work is done.
        memory: what the ranks of a node take, in words; empty if it is not known.

    Raises:
        UserError: the time limit is none or too short, or there are no jobs of that number.
    """

    command: str
    paths: Sequence[Path]
    options: Sequence[str]
    results: Path
    has_output: bool
    mesh: str | None
    rows: Rows
    nodes: int
    ranks_per_node: int
    time: str
    site: SiteOptions
    at_once: int = 0
    workers: int = 0
    complete: Sequence[int] = ()
    memory: str = ""

    @property
    def checkpoint_warning(self) -> str:
        """What a user should know about a simulation with `checkpoint_every = 0`."""
        return (
            "warning: output.checkpoint_every = 0: a checkpoint is written only when Slurm "
            f"announces the time limit, {self.site.warn} s before it. If a host fails, or if a "
            "step takes longer than that, all work is lost: set checkpoint_every to a number of "
            "steps"
        )

    def __post_init__(self) -> None:
        limit, warn = seconds_of(self.time), self.site.warn
        if limit <= warn and self.kind is not None:
            raise UserError(
                f"--time {self.time} is {human_time(limit)}, and jobs are asked to stop "
                f"{human_time(warn)} before their limit: give more, or lower site.warn"
            )
        if self.at_once and not self.elements:
            raise UserError(
                f"--at-once {self.at_once} is for the jobs of an --array or a --table; there is "
                "none"
            )
        if self.workers and (self.elements or not self.alone):
            raise UserError("--workers is for a study or a tuning, without --array or --table")

    @property
    def kind(self) -> type[Job[Any, Any]] | None:
        """The class of the job; None for a command that cannot be stopped and resumed."""
        return job_class(self.command) if self.command in JOBS else None

    @property
    def alone(self) -> bool:
        """Whether the command is one process that starts the ranks of its runs."""
        return self.kind is not None and self.kind.command.starts_jobs

    @property
    def begun(self) -> str:
        """Pattern of files in the folder of results that are there if work can be resumed."""
        return "" if self.kind is None else self.kind.folder_type.begun

    @property
    def output(self) -> str:
        """The folder of the results; an empty text for a command that is given none."""
        return str(self.results) if self.has_output else ""

    @property
    def words(self) -> list[str]:
        """The command line that all jobs share, without the program."""
        words = [self.command, *map(str, self.paths), *(["--mesh", self.mesh] if self.mesh else [])]
        return [*words, *(w for text in self.rows.changes for w in ("--set", text)), *self.options]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def elements(self) -> int:
        """Number of jobs in the array, including complete ones; 0 without an array."""
        return len(self.rows.values)

    def script(self) -> str:
        """Returns the text of the script, from the template `job.sbatch`.

        Raises:
            UserError: a value would begin a line of its own, which is executed.
        """
        values = self._values()
        parts = {
            "alone" if self.alone else self.site.launcher,
            "waits" if self.alone or self.site.launcher == "mpirun" else "",
            "array" if self.elements else "single",
            "begun" if self.begun else "anew",
            "bound" if self.site.threads else "unbound",
        }
        body = _filled(values, parts).partition("\n\n")[2]
        return _filled({**values, "digest": _digest(body)}, parts)

    def _values(self) -> dict[str, Any]:
        """Returns what the template's names stand for: keys of the site, fields, and others."""
        site, rows = self.site, self.rows.values
        several = self.elements or self.workers
        array = _ranges([n for n in range(several) if n not in set(self.complete)])
        names = {key: key.replace(".", "_") for row in rows[:1] for key in row}
        # srun's tasks get the signal themselves; mpirun gets it from the script.
        signal = "USR1" if site.launcher == "srun" and not self.alone else "B:USR1"
        name, to_output = self.results.name, ' --output "$output"' if self.output else ""
        command = shlex.join([*(shlex.split(site.program) or PROGRAM), *self.words])
        values: dict[str, Any] = {
            **site.model_dump(),
            **vars(self),
            "name": name,
            "log": f"{name}-%A_%a.log" if several else f"{name}-%j.log",
            "threads": site.threads or "",
            "gpus": self.ranks_per_node * site.gpus_per_rank or "",
            "signal": f"{signal}@{site.warn}" if self.begun else "",
            "array": array + (f"%{self.at_once}" if self.at_once and array else ""),
            "ranks": self.ranks,
            "values": tuple(
                f"{name}=({shlex.join(row[key] for row in rows)})" for key, name in names.items()
            ),
            "settings": " ".join(f'--set "{key}=${{{name}[$i]}}"' for key, name in names.items()),
            "output": self.output,
            "begun": self.begun,
            "again": "--overwrite" if self.command == "dataset" else "",
            "mpirun": "mpirun" if site.program else str(launch.find_mpirun()),
            "command": f"{command}{to_output}",
            "stopped": STOPPED,
            "host_lost": launch.HOST_LOST,
            "written_by": shlex.join(["flowpm-dist", *sys.argv[1:]]),
        }
        return values | {name: shlex.quote(values[name]) for name in QUOTED if values[name]}


def _filled(values: Mapping[str, Any], parts: set[str]) -> str:
    """Returns the template with values for its names, such as @nodes@.

    Args:
        values: by name, and others; a line that has the name of an empty one, or of none, is left
            out. For a tuple the line is repeated with each of its texts.
        parts: names of the parts that stay. A line "#? part part" begins one, a line "#?" ends it.

    Raises:
        UserError: a text is more than a line.
    """
    template = TEMPLATE.read_text()
    used = {*_NAME.findall(template)}
    texts = {
        name: value if isinstance(value, tuple) else (str(value),)
        for name, value in values.items()
        if name in used
    }
    for name, several in texts.items():
        for text in several:
            if control := _CONTROL.search(text):
                raise UserError(
                    f"{_OPTION_NAMES.get(name, name)} has the character {control[0]!r}, which "
                    "cannot be in a job script, whose lines are executed: leave it out"
                )
    lines, stays = [], True
    for line in template.splitlines():
        names = _NAME.findall(line)
        if line.startswith("#?"):
            stays = parts.issuperset(line.split()[1:])
        elif stays and all(any(texts.get(name, ())) for name in names):
            rows = zip(*(texts[name] for name in names), strict=True) if names else [()]
            lines += [_with_words(line, row) for row in rows]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def _with_words(line: str, words: Iterable[str]) -> str:
    """Returns a line of the template with words for its names, in order."""
    word = iter(words)
    return _NAME.sub(lambda _: next(word), line)


def is_edited(script: str) -> bool:
    """Returns whether a script differs from what was written."""
    head, _, body = script.partition("\n\n")
    return f"# As written: {_digest(body)}" not in head.splitlines()


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:16]


def _ranges(numbers: Sequence[int]) -> str:
    """Returns increasing numbers as sbatch takes them, such as "0-3,7"."""
    runs = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    spans = [[number for _, number in run] for _, run in runs]
    return ",".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else f"{span[0]}" for span in spans)
