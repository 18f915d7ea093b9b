"""Faults of hosts, cables, ranks and launchers in the middle of a job, and how the job ends."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from virtual_cluster import CONTROLLER, HOSTS, ROOT, VirtualCluster

sys.path.insert(0, str(ROOT))
from meshimpl.launch import HOST_LOST
from meshimpl.launch.ending import JOB_FOLDER, JobFolder

FLOWPM = (sys.executable, "-m", "flowpm_dist.cli")
MARK = "FLOWPM_CLUSTER_FAULT"
LIMIT = 60.0
"""Time in which a job ends after a fault [s]."""
OPEN_MPI = (14,)
"""Status with which Open MPI ends a rank whose peer closes the connection, MPI_ERR_UNKNOWN."""
HERE, THERE = HOSTS

BOX = "[box]\ngrid = {grid}\nsize = 64.0\n"
COSMOLOGY = "[cosmology]\nOmega_m = 0.31\nOmega_b = 0.049\nh = 0.68\nn_s = 0.97\nsigma8 = 0.81\n"
COSMOLOGY += 'transfer = "eisenstein-hu"\n'
SIMULATE = BOX.format(grid=16) + COSMOLOGY + "[initial]\nseed = 1\n[evolution]\nsteps = 3\n"
LONG = SIMULATE.replace("steps = 3", "steps = 100000")
Row = tuple[str, str, str]


@dataclass
class Running:
    """A job that was begun: its launcher, the file of what it says, and the folder of its notes."""

    launcher: subprocess.Popen[bytes]
    output: Path
    notes: JobFolder

    def printed(self) -> str:
        """What it has said so far."""
        return self.output.read_text()


class WrongError(Exception):
    """What was seen is not what should be."""


class Parts:
    """What is tried on a cluster."""

    def __init__(self, cluster: VirtualCluster) -> None:
        self.cluster = cluster
        self.folder = cluster.results

    def run_file(self, name: str, text: str) -> Path:
        """Returns the path of a new run file."""
        path = self.folder / f"{name}.toml"
        path.write_text(text)
        return path


class Faults(Parts):
    """The faults; each returns a row: what, what was seen, the message."""

    def cut(self) -> Row:
        """The cable of the other host is pulled."""
        with self.long_job() as job:
            self.cluster.cut(THERE)
            try:
                return self.seen("cut cable (srun)", job, f"on host {THERE}", HOST_LOST)
            finally:
                self.cluster.mend(THERE)

    def mended(self) -> Row:
        """The cable is pulled for ten seconds; the job goes on."""
        with self.long_job() as job:
            self.cluster.cut(THERE)
            time.sleep(10)
            self.cluster.mend(THERE)
            last = 0
            for _ in range(2):  # the second check is beyond the limit of silence
                time.sleep(25)
                steps = re.findall(r"step +(\d+)/", job.printed())
                if not self.ours(HOSTS) or int(steps[-1]) <= last:
                    raise WrongError(f"the job does not go on: {job.printed()[-1500:]}")
                last = int(steps[-1])
            return "cable out for 10 s", "goes on", ""

    def cut_mpirun(self) -> Row:
        """Likewise in a job of mpirun."""
        with self.long_job(mpirun=True) as job:
            self.cluster.cut(THERE)
            try:
                # It waits for the host until it is killed.
                row = self.seen("cut cable (mpirun)", job, f"on host {THERE}", HOST_LOST, 137)
                if job.notes.reported_status() != HOST_LOST:
                    raise WrongError("the ranks have not noted that a host was lost")
                return row
            finally:
                self.cluster.mend(THERE)

    def frozen_host(self) -> Row:
        """All processes of the other host are stopped, and end when they go on."""
        with self.long_job() as job:
            self.cluster.freeze(THERE)
            try:
                row = self.seen("frozen host", job, f"on host {THERE}", HOST_LOST, hosts=(HERE,))
                if not self.ours((THERE,)):
                    raise WrongError("the processes of a frozen host have ended")
            finally:
                self.cluster.thaw(THERE)
            began = time.monotonic()
            while left := self.ours((THERE,)):
                if time.monotonic() - began > LIMIT:
                    names = ", ".join(f"{_name(p)} {p}" for p in left)
                    raise WrongError(f"{LIMIT:.0f} s after the thaw there are still {names}")
                time.sleep(0.2)
            thawed = f"; on {THERE} {time.monotonic() - began:.0f} s after the thaw"
            return row[0], row[1] + thawed, row[2]

    def stopped_rank(self) -> Row:
        """A rank is stopped."""
        with self.long_job() as job:
            os.kill(self.ranks()[1], signal.SIGSTOP)
            return self.seen("stopped rank", job, "rank 1", HOST_LOST)

    def killed_rank(self) -> Row:
        """A rank is killed."""
        with self.long_job() as job:
            os.kill(self.ranks()[1], signal.SIGKILL)
            return self.seen("killed rank", job, "task 1|rank 1", 137, *OPEN_MPI)

    def killed_srun(self) -> Row:
        """The launcher is killed."""
        with self.long_job() as job:
            self._kill_launcher("srun")
            return self.seen("killed srun", job, "Killed .*srun", 137)

    def killed_mpirun(self) -> Row:
        """Likewise mpirun."""
        with self.long_job(mpirun=True) as job:
            self._kill_launcher("prterun", "mpirun")
            return self.seen("killed mpirun", job, "Killed .*mpirun", 137)

    def _kill_launcher(self, *names: str) -> None:
        for process in self.ours(HOSTS):
            if _name(process) in names:
                os.kill(process, signal.SIGKILL)

    @contextmanager
    def long_job(self, *, mpirun: bool = False) -> Iterator[Running]:
        """Gives a simulation that is in the middle of its steps."""
        run_file, output = self.run_file("long", LONG), self.folder / "long.txt"
        notes = JobFolder(self.folder / "notes")
        notes.path.mkdir(exist_ok=True)
        notes.reported.unlink(missing_ok=True)
        words = ["srun", "--mpi=pmix", "-N2", "-n2"]
        if mpirun:
            words = [Path(sys.executable).parent / "mpirun", "-np", 2, "-x", MARK, "-x", JOB_FOLDER]
        words += [*FLOWPM, "simulate", run_file, "--output", self.folder / "long"]
        script = self.folder / "job.sh"
        script.write_text(f"{shlex.join(map(str, words))} --overwrite -v\nexit $?\n")
        command = [*["salloc", "-Q", "-N2", "-n2"][: 4 * mpirun], "bash", script]
        with open(output, "w") as file:
            process = subprocess.Popen(
                self.cluster.inside(HERE, *command),
                env=self.cluster.environment(**{MARK: "1", JOB_FOLDER: str(notes.path)}),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        try:
            limit = time.monotonic() + 240
            while not re.search(r"step +1\d/", output.read_text()):
                if process.poll() is not None or time.monotonic() > limit:
                    raise WrongError(f"the job did not begin: {output.read_text()[-2000:]}")
                time.sleep(0.5)
            yield Running(process, output, notes)
        finally:
            for left in self.ours(HOSTS):
                os.kill(left, signal.SIGKILL)
            process.wait()
            self.cluster.run(CONTROLLER, "scancel", "-u", "root")
            self._settle()

    def _settle(self) -> None:
        """Waits until Slurm takes the hosts for idle."""
        limit = time.monotonic() + 120
        while time.monotonic() < limit:
            idle = self.cluster.run(CONTROLLER, "sinfo", "-h", "-t", "idle", "-o", "%D").stdout
            if idle.strip() == str(len(HOSTS)):
                return
            for host in HOSTS:
                self.cluster.run(
                    CONTROLLER, "scontrol", "update", f"nodename={host}", "state=resume"
                )
            time.sleep(1)
        raise WrongError("the hosts are not idle again")

    def ours(self, hosts: tuple[str, ...]) -> list[int]:
        """The processes of the long job."""
        return [
            process
            for host in hosts
            for process in self.cluster.processes(host)
            if _has_mark(process) and _name(process) not in ("slurmd", "slurmstepd")
        ]

    def ranks(self) -> list[int]:
        """The processes of its ranks, in their order."""
        found = {}
        for process in self.ours(HOSTS):
            words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
            if b"flowpm_dist.cli" in words[2:4]:
                found[int(re.search(rb"PMIX_RANK=(\d+)", _environment(process))[1])] = process  # type: ignore[index]
        return [found[rank] for rank in sorted(found)]

    def seen(
        self, fault: str, job: Running, expected: str, *status: int, hosts: tuple[str, ...] = HOSTS
    ) -> Row:
        """Waits until every process of the job has ended; returns seconds, status and message."""
        began = time.monotonic()
        while left := self.ours(hosts):
            if time.monotonic() - began > 4 * LIMIT:
                break
            time.sleep(0.2)
        seconds, text = time.monotonic() - began, job.printed()
        message = next(
            (m for m in text.splitlines() if re.search("error: |noticed|Killed", m)), "none"
        )
        if left or seconds > LIMIT:
            names = ", ".join(f"{_name(p)} {p}" for p in left)
            raise WrongError(f"{fault}: {seconds:.0f} s, left: {names}; {message}; {text[-1500:]}")
        if not re.search(expected, text):
            raise WrongError(
                f"{fault}: {seconds:.0f} s, no {expected} in the message: {text[-1500:]}"
            )
        if (found := job.launcher.wait(LIMIT)) not in status:
            raise WrongError(f"{fault}: status {found}, not {status}: {text[-1500:]}")
        return fault, f"{seconds:.0f} s, status {found}", message


def _environment(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/environ").read_bytes()
    except OSError:
        return b""


def _has_mark(process: int) -> bool:
    return f"{MARK}=1".encode() in _environment(process).split(b"\0")


def _name(process: int) -> str:
    try:
        return Path(f"/proc/{process}/comm").read_text().strip()
    except OSError:
        return ""
