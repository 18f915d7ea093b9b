"""Scripts for Slurm's sbatch that a site can read and edit."""

from __future__ import annotations

import hashlib
import itertools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshimpl import launch

STOPPED = 128 + 10
"""Exit status of a command that SIGUSR1 has stopped."""
_BODY = "# As written: "


@dataclass(frozen=True)
class BatchJob:
    """A job of a batch system.

    Attributes:
        name: of the job and of its log.
        written_by: the command that asked for the script.
        program: the words of the command flowpm-dist.
        words: its command, run file and options, without the results' folder.
        output: folder of the results; in an array, of which each job has its own, the beginning of
            their names; empty if the command has its own place for them, or none.
        begun: pattern of files in the folder of results that are there if work can be resumed;
            empty for a command that cannot be stopped and resumed, and begins anew.
        again: option with which such a command begins anew, if it needs one.
        nodes, ranks_per_node: of the job.
        time: limit such as "02:00:00".
        threads: cores of each rank; 0 leaves them to Slurm.
        gpus_per_rank: of each rank.
        launcher: "srun" or "mpirun".
        mpi: value of srun's --mpi.
        setup: shell lines before the command.
        partition, account, qos: empty for the site's own.
        directives: further options of sbatch.
        warn: time before the limit at which the command is asked to stop [s].
        restarts: how often the job is queued again.
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
    again: str = ""
    threads: int = 0
    gpus_per_rank: int = 0
    launcher: str = "srun"
    mpi: str = "pmix"
    mpirun: str = "mpirun"
    setup: Sequence[str] = ()
    partition: str = ""
    account: str = ""
    qos: str = ""
    directives: Sequence[str] = ()
    warn: int = 120
    restarts: int = 100
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
        signal = "USR1" if self.launcher == "srun" else "B:USR1"
        options = {
            "job-name": self.name,
            "output": log,
            "open-mode": "append",
            "nodes": self.nodes,
            "ntasks-per-node": self.ranks_per_node,
            "cpus-per-task": self.threads or None,
            "gpus-per-node": self.ranks_per_node * self.gpus_per_rank or None,
            "time": self.time,
            "signal": f"{signal}@{self.warn}" if self.begun else None,
            "partition": self.partition or None,
            "account": self.account or None,
            "qos": self.qos or None,
            "array": self._array() or None,
        }
        lines = [
            f"#SBATCH --{name}={shlex.quote(str(value))}"
            for name, value in options.items()
            if value is not None
        ]
        lines.append("#SBATCH --requeue")
        return "\n".join([*lines, *(f"#SBATCH {text}" for text in self.directives)])

    def _array(self) -> str:
        if not self.elements:
            return ""
        left = [n for n in range(self.elements) if n not in set(self.complete)]
        return _ranges(left) + (f"%{self.at_once}" if self.at_once else "")

    def _environment(self) -> str:
        lines = list(self.setup)
        if self.threads:
            lines.append(f"export MESHIMPL_THREADS={self.threads}")
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
        if self.launcher == "srun":
            # A rank that stops in good order has a status; srun would end the others and lose it.
            options = f"--mpi={shlex.quote(self.mpi)} --export=ALL --kill-on-bad-exit=0"
            if self.threads:
                # Slurm from 22.05 on does not take it over from sbatch.
                options += f" --cpus-per-task={self.threads} --cpu-bind=cores"
            return ["status=0", f"srun {options} \\", f"  {command} || status=$?"]
        options = f"-n {ranks} --map-by ppr:{self.ranks_per_node}:node"
        options += f":PE={self.threads} --bind-to core" if self.threads else " --bind-to none"
        options += " -x MESHIMPL_FAILURE_FOLDER"
        if self.threads:
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
        again = f"[ $status -eq {STOPPED} ] || [ $status -eq {launch.HOST_LOST} ]"
        return (
            f"# {STOPPED}: stopped before the time limit, with a checkpoint if a step was made.\n"
            f"# {launch.HOST_LOST}: a host or a rank fell silent. The rest is for another turn.\n"
            f'if {{ {again}; }} && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {self.restarts} ]; then\n'
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
