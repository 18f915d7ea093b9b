"""Batch jobs: the site file, what a user asks for, and scripts for sbatch that a site can edit."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import shlex
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from flowpm_dist.io.errors import UserError
from flowpm_dist.jobs.run_file import RunFile
from flowpm_dist.options import Options, Problem, listed
from meshimpl import launch

MOST_JOBS = 10_000
"""Jobs of the largest array."""
_TIME = re.compile(
    r"(?:(?P<days>\d+)-(?P<hours>\d+)(?::(?P<minutes>\d+)(?::(?P<seconds>\d+))?)?)"
    r"|(?:(?P<h>\d+):)?(?P<m>\d+):(?P<s>\d+)|(?P<alone>\d+)"
)
_RANGE = re.compile(r"(\d+)-(\d+)")
_GPUS = re.compile(
    r"--gpus-per-node[= ](?:[\w.-]+:)?(\d+)|--gres[= ](?:\S*,)?gpu"
    r"(?::[\w.-]*[^\d:,][\w.-]*)?(?::(\d+))?(?=,|$)"
)
STOPPED = 128 + 10
"""Exit status of a command that SIGUSR1 has stopped."""
_BODY = "# As written: "

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
        description="the command flowpm-dist, with its path as it is on the nodes; by default that "
        "of this Python",
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
        """See `Options.problems`."""
        for directive in self.directives:
            if not directive.startswith("-"):
                yield Problem("directives", f"= {directive!r}: must begin with --")
        if self.program.startswith("~") or "$" in self.program:
            yield self.problem("program", "must be a path without ~ and $")


class SiteFile(RunFile):
    """A whole site file."""

    site: SiteOptions


def gpus_of_a_node(directives: Iterable[str]) -> int | None:
    """Returns the GPUs of a node for which options of sbatch ask; None if they do not say.

    Args:
        directives: such as "--gres=gpu:a100:4".
    """
    for directive in directives:
        if found := _GPUS.match(directive):
            return int(found[1] or found[2] or 1)
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
    found = _TIME.fullmatch(limit)
    if found is None:
        raise UserError(f"--time {limit}: must be as sbatch takes it, such as 02:00:00")
    days, hours, minutes, seconds, h, m, s, alone = (int(n or 0) for n in found.groups())
    if max(minutes, seconds, s, m if found["h"] else 0) > 59 or hours > 23:
        raise UserError(f"--time {limit}: has more than 59 minutes or seconds, or 23 hours")
    return 86400 * days + 3600 * (hours + h) + 60 * (minutes + m + alone) + seconds + s


def check_array(settings: Container[str], fixed: Iterable[str]) -> None:
    """Checks that no key is given both by an array and for all of its jobs.

    Args:
        settings: keys that differ between jobs.
        fixed: keys given by --set.

    Raises:
        UserError: one is.
    """
    if both := [key for key in fixed if key in settings]:
        raise UserError(f"{both[0]} is given by --array and by --set: leave one of them out")


def array_settings(texts: Sequence[str]) -> dict[str, list[str]]:
    """Returns the value of each key in each job of an array.

    Args:
        texts: such as "initial.seed=0-9" or "evolution.steps=5,10".

    Raises:
        UserError: a text is not of this kind, or there would be too many jobs.
    """
    values: dict[str, list[str]] = {}
    for text in texts:
        key, _, given = text.partition("=")
        span = _RANGE.fullmatch(given)
        if span and int(span[1]) > int(span[2]):
            raise UserError(f"--array {text}: {span[1]} is above {span[2]}")
        if span and int(span[2]) - int(span[1]) >= MOST_JOBS:
            raise UserError(f"--array {text}: more than {MOST_JOBS} jobs")
        found = list(map(str, range(int(span[1]), int(span[2]) + 1))) if span else given.split(",")
        if not re.fullmatch(r"\w+\.\w+", key) or not all(found):
            raise UserError(
                f"--array {text}: must be SECTION.KEY=VALUES, such as initial.seed=0-9 or "
                "evolution.steps=5,10"
            )
        if key in values:
            raise UserError(f"--array {text}: {key} is given twice")
        if len(set(found)) < len(found):
            raise UserError(f"--array {text}: has a value twice")
        values[key] = found
    combined = list(itertools.islice(itertools.product(*values.values()), MOST_JOBS + 1))
    if len(combined) > MOST_JOBS:
        raise UserError(f"--array: more than {MOST_JOBS} jobs")
    return {key: [row[i] for row in combined] for i, key in enumerate(values)}


@dataclass(frozen=True)
class BatchJob:
    """A job of a batch system.

    Attributes:
        name: name of the job and of its log.
        written_by: the command that asked for the script.
        program: the words of the command flowpm-dist.
        words: its command, run file and options, without the results' folder.
        output: folder of the results; in an array, of which each job has its own, the beginning of
            their names; empty if the command has its own place for them, or none.
        begun: pattern of files in the folder of results that are there if work can be resumed;
            empty for a command that cannot be stopped and resumed, and begins anew.
        again: option with which such a command begins anew, if it needs one.
        nodes, ranks_per_node: size of the job.
        time: limit such as "02:00:00".
        site: the site's options, some replaced by the command line.
        mpirun: path of mpirun.
        settings: for each key of the run file that differs, its value in each job of an array.
        complete: numbers of the jobs of the array whose work is done.
        at_once: jobs of an array that may run at one time; 0 for all.
        memory: what the ranks of a node take, in words; empty if it is not known.
    """

    name: str
    written_by: str
    program: Sequence[str]
    words: Sequence[str]
    output: str
    begun: str
    nodes: int
    ranks_per_node: int
    time: str
    site: SiteOptions
    again: str = ""
    mpirun: str = "mpirun"
    settings: Mapping[str, Sequence[str]] = field(default_factory=dict)
    complete: Sequence[int] = ()
    at_once: int = 0
    memory: str = ""

    @property
    def elements(self) -> int:
        """Number of jobs of the array, complete ones too; 0 if it is none."""
        return len(next(iter(self.settings.values()), ()))

    def script(self) -> str:
        """Returns the text of the script."""
        parts = [self._directives(), self._environment(), self._work(), self._end()]
        body = "\n\n".join(part for part in parts if part) + "\n"
        return f"{self._head()}\n{_BODY}{_digest(body)}\n\n{body}"

    def _head(self) -> str:
        lines = [
            "#!/bin/bash",
            f"# Written by: {self.written_by}",
            "# Read it, edit it, and submit it with sbatch.",
        ]
        if self.memory:
            lines.append(f"# Memory: about {self.memory} on each node.")
        return "\n".join(lines)

    def _directives(self) -> str:
        log = f"{self.name}-%A_%a.log" if self.elements else f"{self.name}-%j.log"
        # srun's tasks get the signal themselves; mpirun gets it from this script.
        signal = "USR1" if self.site.launcher == "srun" else "B:USR1"
        options = {
            "job-name": self.name,
            "output": log,
            "open-mode": "append",
            "nodes": self.nodes,
            "ntasks-per-node": self.ranks_per_node,
            "cpus-per-task": self.site.threads or None,
            "gpus-per-node": self.ranks_per_node * self.site.gpus_per_rank or None,
            "time": self.time,
            "signal": f"{signal}@{self.site.warn}" if self.begun else None,
            "partition": self.site.partition or None,
            "account": self.site.account or None,
            "qos": self.site.qos or None,
            "array": self._array() or None,
        }
        lines = [
            f"#SBATCH --{name}={shlex.quote(str(value))}"
            for name, value in options.items()
            if value is not None
        ]
        lines.append("#SBATCH --requeue")
        return "\n".join([*lines, *(f"#SBATCH {text}" for text in self.site.directives)])

    def _array(self) -> str:
        if not self.elements:
            return ""
        left = [n for n in range(self.elements) if n not in set(self.complete)]
        return _ranges(left) + (f"%{self.at_once}" if self.at_once else "")

    def _environment(self) -> str:
        lines = list(self.site.setup)
        if self.site.threads:
            lines.append(f"export MESHIMPL_THREADS={self.site.threads}")
        return "\n".join(lines)

    def _work(self) -> str:
        settings = "settings=()"
        output = shlex.quote(self.output)
        arrays = []
        if self.elements:
            names = {key: key.replace(".", "_") for key in self.settings}
            arrays = [
                f"{names[key]}=({' '.join(map(shlex.quote, values))})"
                for key, values in self.settings.items()
            ]
            given = (f'--set "{key}=${{{name}[$i]}}"' for key, name in names.items())
            arrays.insert(0, "i=$SLURM_ARRAY_TASK_ID")
            settings = f"settings=({' '.join(given)})"
            output = f'{output}-"$i"'
        lines = [*arrays, settings, *([f"output={output}"] if self.output else [])]
        return "\n".join([*lines, "", *self._resume(), "", *self._launch()])

    def _resume(self) -> list[str]:
        if self.begun:
            return [
                "# A job that was stopped, or whose host failed, goes on where its last checkpoint "
                "is.",
                "resume=()",
                f'if (cd "$output" && compgen -G {shlex.quote(self.begun)}) > /dev/null 2>&1',
                "then resume=(--resume)",
                "fi",
            ]
        lines = ["# After the failure of a host this begins anew.", "resume=()"]
        if self.again:
            count = '"${SLURM_RESTART_COUNT:-0}"'
            lines.append(f"if [ {count} -gt 0 ]; then resume=({self.again}); fi")
        return lines

    def _launch(self) -> list[str]:
        ranks = self.nodes * self.ranks_per_node
        command = f"{shlex.join(self.program)} {shlex.join(self.words)}"
        command += ' --output "$output"' if self.output else ""
        command += ' "${settings[@]}" "${resume[@]}"'
        # The status is asked for in ways that "set -e" in a site's set-up does not end.
        if self.site.launcher == "srun":
            # A rank that stops in good order has a status; srun would end the others and lose it.
            options = f"--mpi={shlex.quote(self.site.mpi)} --export=ALL --kill-on-bad-exit=0"
            if self.site.threads:
                # Slurm from 22.05 on does not take it over from sbatch.
                options += f" --cpus-per-task={self.site.threads} --cpu-bind=cores"
            return ["status=0", f"srun {options} \\", f"  {command} || status=$?"]
        options = f"-n {ranks} --map-by ppr:{self.ranks_per_node}:node"
        options += (
            f":PE={self.site.threads} --bind-to core" if self.site.threads else " --bind-to none"
        )
        options += " -x MESHIMPL_FAILURE_FOLDER"
        if self.site.threads:
            options += " -x MESHIMPL_THREADS"
        return [
            "# Ranks note there with which status they end: an mpirun that waits for a lost host",
            "# has to be killed, and has another.",
            "export MESHIMPL_FAILURE_FOLDER=$(mktemp -d)",
            "trap 'warned=yes; [ -z \"$mpirun\" ] || kill -USR1 $mpirun || true' USR1",
            f"{shlex.quote(self.mpirun)} {options} \\",
            f"  {command} &",
            "mpirun=$!",
            "# A signal ends the waiting, not mpirun, whose status is then asked for again.",
            "status=127 warned=yes",
            'while [ -n "$warned" ]; do',
            "  warned= found=0",
            "  wait $mpirun || found=$?",
            "  [ $found -eq 127 ] || status=$found",
            "done",
            'told=$(cat "$MESHIMPL_FAILURE_FOLDER/told" 2> /dev/null || true)',
            "status=${told:-$status}",
            'rm -r "$MESHIMPL_FAILURE_FOLDER"',
        ]

    def _end(self) -> str:
        if not self.begun:
            return "exit $status"
        most = self.site.restarts
        again = f"[ $status -eq {STOPPED} ] || [ $status -eq {launch.HOST_LOST} ]"
        return (
            f"# {STOPPED}: stopped before the time limit, with a checkpoint if a step was made.\n"
            f"# {launch.HOST_LOST}: a host or a rank fell silent. The rest is for another turn.\n"
            f'if {{ {again}; }} && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {most} ]; then\n'
            '  echo "ended with status $status before the work was done; queued again"\n'
            '  scontrol requeue "$SLURM_JOB_ID"\n'
            "fi\n"
            "exit $status"
        )


def is_edited(script: str) -> bool:
    """Returns whether a script says something else than when it was written."""
    head, _, body = script.partition("\n\n")
    return f"{_BODY}{_digest(body)}" not in head.splitlines()


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:16]


def _ranges(numbers: Sequence[int]) -> str:
    """Returns increasing numbers as sbatch takes them, such as "0-3,7"."""
    runs = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    found = [[number for _, number in run] for _, run in runs]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in found)
