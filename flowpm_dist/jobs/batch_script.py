"""Scripts for Slurm's sbatch that a site can read and edit."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

STOPPED = 128 + 10
"""Exit status of a command that SIGUSR1 has stopped."""


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
        settings: for each key of the run file that differs, its value in each job of an array.
        at_once: jobs of an array that may run at one time; 0 for all.
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
    setup: Sequence[str] = ()
    partition: str = ""
    account: str = ""
    qos: str = ""
    directives: Sequence[str] = ()
    warn: int = 120
    restarts: int = 100
    settings: Mapping[str, Sequence[str]] = field(default_factory=dict)
    at_once: int = 0

    @property
    def elements(self) -> int:
        """Number of jobs of the array; 0 if it is none."""
        return len(next(iter(self.settings.values()), ()))

    def script(self) -> str:
        """Returns the text of the script."""
        parts = [self._head(), self._directives(), self._environment(), self._work(), self._end()]
        return "\n\n".join(part for part in parts if part) + "\n"

    def _head(self) -> str:
        return (
            "#!/bin/bash\n"
            f"# Written by: {self.written_by}\n"
            "# Read it, edit it, and submit it with sbatch."
        )

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
        return f"0-{self.elements - 1}" + (f"%{self.at_once}" if self.at_once else "")

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
                f'if compgen -G "$output/{self.begun}" > /dev/null; then resume=(--resume); fi',
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
        if self.launcher == "srun":
            # A rank that stops in good order has a status; srun would end the others and lose it.
            options = f"--mpi={self.mpi} --kill-on-bad-exit=0"
            if self.threads:
                # Slurm from 22.05 on does not take it over from sbatch.
                options += f" --cpus-per-task={self.threads} --cpu-bind=cores"
            return [f"srun {options} \\", f"  {command}", "status=$?"]
        options = f"-n {ranks} --map-by ppr:{self.ranks_per_node}:node"
        options += f":PE={self.threads} --bind-to core" if self.threads else " --bind-to none"
        if self.threads:
            options += " -x MESHIMPL_THREADS"
        return [
            "trap '[ -z \"$mpirun\" ] || kill -USR1 $mpirun' USR1",
            f"mpirun {options} \\",
            f"  {command} &",
            "mpirun=$!",
            "wait $mpirun",
            "status=$?",
            "# A signal ends the waiting, not mpirun.",
            "while kill -0 $mpirun 2> /dev/null; do wait $mpirun; status=$?; done",
        ]

    def _end(self) -> str:
        if not self.begun:
            return "exit $status"
        return (
            "# Stopped before the time limit, with a checkpoint: the rest is for another turn.\n"
            f"if [ $status -eq {STOPPED} ] && "
            f'[ "${{SLURM_RESTART_COUNT:-0}}" -lt {self.restarts} ]; then\n'
            '  echo "stopped before the time limit; queued again"\n'
            '  scontrol requeue "$SLURM_JOB_ID"\n'
            "fi\n"
            "exit $status"
        )
