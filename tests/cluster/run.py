"""Jobs and faults on a virtual cluster of two hosts: `make test-cluster`.

    python tests/cluster/run.py [--keep] [PART...]

Without names all parts run. A table of what was seen is printed at the end, and the exit status is
1 if something was wrong. Where there can be no such cluster, one line says so and the status is 0.
"""

from __future__ import annotations

import csv
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from virtual_cluster import CONTROLLER, HOSTS, ROOT, VirtualCluster, lacking

sys.path.insert(0, str(ROOT))
from flowpm_dist.jobs.output_folder import OutputFolder
from meshimpl.launch import HOST_LOST
from meshimpl.launch.job_folder import VARIABLE, JobFolder

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
RECONSTRUCT = (
    BOX.format(grid=8) + COSMOLOGY + '[observation]\nstructure = "2lpt"\nsigma = 0.2\n'
    "[data]\nmock_seed = 1\n[search]\nevaluations = 6\n"
)
TRAIN = (
    BOX.format(grid=32) + "[cosmology]\nOmega_b = 0.049\nh = 0.67\nn_s = 0.96\n"
    "[priors]\nOmega_m = [0.25, 0.35]\nsigma8 = [0.78, 0.95]\n[evolution]\nsteps = 2\n"
    '[training]\nbatch = 2\noptimiser = "sgd"\n'
    "[data]\nsimulations = 2\nreuse = 2\nfill = 2\nvalidation = 2\ntest = 4\n"
)

Row = tuple[str, str, str]


@dataclass
class Running:
    """A job that was begun: its launcher, the file of what it says, and the folder of its notes."""

    launcher: subprocess.Popen[bytes]
    output: Path
    notes: JobFolder

    def told(self) -> str:
        """What it has said so far."""
        return self.output.read_text()


class WrongError(Exception):
    """What was seen is not what should be."""


class Parts:
    """The jobs and the faults; each returns a row: what, what was seen, the message."""

    def __init__(self, cluster: VirtualCluster) -> None:
        self.cluster = cluster
        self.folder = cluster.results

    def srun(self, *words: object, hosts: int = 2, check: bool = True, mpi: str = "pmix") -> str:
        """Runs a command on two ranks; returns what it printed."""
        launcher = ["srun", f"--mpi={mpi}", f"-N{hosts}", "-n2", "--kill-on-bad-exit=1"]
        done = self.cluster.run(HERE, *launcher, *FLOWPM, *words)
        if check and done.returncode:
            raise WrongError(f"status {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
        return done.stdout + done.stderr

    def run_file(self, name: str, text: str) -> Path:
        """Returns the path of a new run file."""
        path = self.folder / f"{name}.toml"
        path.write_text(text)
        return path

    def on_one_and_two_hosts(self, command: str, text: str) -> list[Path]:
        """Returns the folders of results of a job on one host and on two."""
        run_file, folders = self.run_file(command, text), []
        for hosts in (1, 2):
            folders.append(self.folder / f"{command}-{hosts}")
            self.srun(command, run_file, "--output", folders[-1], hosts=hosts)
        return folders

    def simulate(self) -> Row:
        """A universe, to the last digit of its particles."""
        import numpy as np
        import zarr

        one, two = self.on_one_and_two_hosts("simulate", SIMULATE)
        worst = 0.0
        for name in ("displacement", "velocity", "density"):
            a, b = (np.asarray(zarr.open(f / "snapshot.zarr" / name)[:]) for f in (one, two))
            worst = max(worst, float(np.abs(a - b).max() / np.abs(a).max()))
        return self._equal("simulate", worst, 1e-5)

    def reconstruct(self) -> Row:
        """The losses of a search."""
        one, two = self.on_one_and_two_hosts("reconstruct", RECONSTRUCT)
        return self._equal("reconstruct", _difference(one, two, "iterations.csv"), 1e-4)

    def train(self) -> Row:
        """The losses of a training, and the table of its evaluation."""
        one, two = self.on_one_and_two_hosts("train", TRAIN)
        for hosts, folder in ((1, one), (2, two)):
            self.srun("evaluate", folder, hosts=hosts)
        worst = _difference(one, two, "metrics.csv")
        worst = max(worst, _difference(one, two, "evaluation/table.csv"))
        return self._equal("train, evaluate", worst, 1e-3)

    def _equal(self, name: str, worst: float, limit: float) -> Row:
        if not worst <= limit:
            raise WrongError(f"two hosts differ from one by {worst:.2g}")
        return f"{name}: two hosts beside one", f"largest relative difference {worst:.1g}", ""

    def doctor(self) -> Row:
        """Its report on two hosts."""
        told = self.srun("doctor")
        for word in (HERE, THERE, "alltoall", "allreduce", "each of 2 received", "pulses of all 2"):
            if word not in told:
                raise WrongError(f"doctor does not tell of {word}: {told}")
        line = next(line for line in told.splitlines() if "alltoall" in line)
        return "doctor on two hosts", "ok", " ".join(line.split())

    def pmi2(self) -> Row:
        """A launcher that Open MPI does not understand is refused."""
        began = time.monotonic()
        told = self.srun("simulate", self.run_file("pmi2", SIMULATE), check=False, mpi="pmi2")
        line = _message(told)
        if "srun --mpi=pmix" not in line:
            raise WrongError(told[-1000:])
        return "srun --mpi=pmi2", f"refused after {time.monotonic() - began:.0f} s", line

    def folder_of_one_host(self) -> Row:
        """Results in a folder that each host has for itself."""
        told = self.srun("simulate", self.run_file("own", SIMULATE), "--output", "/tmp/own",
                         check=False)  # fmt: skip
        line = _message(told)
        if "is not the same folder on all hosts" not in line or THERE not in line:
            raise WrongError(told[-1000:])
        return "--output in a folder of one host", "refused before the work", line

    def full_disk(self) -> Row:
        """A shared folder that has no room left."""
        disk = self.folder / "small"
        disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk]
        for host in HOSTS:
            self.cluster.run(host, *mount, check=True)
        told = self.srun("simulate", self.run_file("full", SIMULATE), "--output", disk / "out",
                         check=False)  # fmt: skip
        for host in HOSTS:
            self.cluster.run(host, "umount", disk)
        line = _message(told)
        if "free" not in line:
            raise WrongError(told[-1000:])
        return "a full disk", "refused before the work", line

    def requeue(self) -> Row:
        """A job that is warned of its time limit is queued again, and goes on."""
        import numpy as np
        import zarr

        text = SIMULATE.replace("steps = 3", "steps = 150") + "[output]\ncheckpoint_every = 5\n"
        run_file, site = self.run_file("again", text), self.folder / "site.toml"
        site.write_text('[site]\nsetup = ["export PYTHONPATH=' + str(ROOT) + '"]\n')
        self.srun("simulate", run_file, "--output", self.folder / "at-once")
        asked = ("submit", "simulate", run_file, "--nodes", 2, "--ranks-per-node", 1, "--time",
                 "00:10:00", "--site", site, "--output", self.folder / "again")  # fmt: skip
        done = self.cluster.run(HERE, *FLOWPM, *asked)
        found = re.search(r"batch job (\d+)", done.stdout)
        if found is None:
            raise WrongError(done.stdout + done.stderr)
        began, warned = time.monotonic(), False
        while "COMPLETED" not in (state := self._state(found[1])):
            if time.monotonic() - began > 600 or any(s in state for s in ("FAILED", "TIMEOUT")):
                log = "".join(p.read_text() for p in self.folder.glob("again-*.log"))
                raise WrongError(f"{state} {log[-2000:]}")
            if not warned and any((self.folder / "again").glob(OutputFolder.begun)):
                # As Slurm does before the time limit.
                self.cluster.run(CONTROLLER, "scancel", "--signal=USR1", found[1], check=True)
                warned = True
            time.sleep(0.5)
        log = "".join(p.read_text() for p in self.folder.glob("again-*.log"))
        turns = 1 + log.count("queued again")
        if turns < 2:
            raise WrongError(f"the job was not queued again: {log[-2000:]}")
        a, b = (
            np.asarray(zarr.open(self.folder / name / "snapshot.zarr" / "displacement")[:])
            for name in ("at-once", "again")
        )
        off = float(np.abs(a - b).max())
        same = f"off by {off:.2g}" if off else "the same to the bit"
        if not np.allclose(a, b, rtol=1e-4, atol=1e-4):
            raise WrongError(f"a job in {turns} turns is {same}")
        line = next(line for line in log.splitlines() if "stopped by" in line)
        return f"submit, in {turns} turns", same, line

    def _state(self, number: str) -> str:
        return self.cluster.run(CONTROLLER, "scontrol", "show", "job", number).stdout.partition(
            "JobState="
        )[2].split()[0]  # fmt: skip

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
            for _ in range(2):  # the second look is beyond the limit of silence
                time.sleep(25)
                steps = re.findall(r"step +(\d+)/", job.told())
                if not self.ours(HOSTS) or int(steps[-1]) <= last:
                    raise WrongError(f"the job does not go on: {job.told()[-1500:]}")
                last = int(steps[-1])
            return "cable out for 10 s", "goes on", ""

    def cut_mpirun(self) -> Row:
        """Likewise in a job of mpirun."""
        with self.long_job(mpirun=True) as job:
            self.cluster.cut(THERE)
            try:
                # It waits for the host until it is killed.
                row = self.seen("cut cable (mpirun)", job, f"on host {THERE}", HOST_LOST, 137)
                if job.notes.told_status() != HOST_LOST:
                    raise WrongError("the ranks have not noted that a host was lost")
                return row
            finally:
                self.cluster.mend(THERE)

    def frozen_host(self) -> Row:
        """All processes of the other host are stopped."""
        with self.long_job() as job:
            self.cluster.freeze(THERE)
            try:
                return self.seen("frozen host", job, f"on host {THERE}", HOST_LOST, hosts=(HERE,))
            finally:
                self.cluster.thaw(THERE)

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
            return self.seen("killed srun", job, "", -9)

    def killed_mpirun(self) -> Row:
        """Likewise mpirun."""
        with self.long_job(mpirun=True) as job:
            self._kill_launcher("prterun", "mpirun")
            return self.seen("killed mpirun", job, "", 137)

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
        notes.told.unlink(missing_ok=True)
        command = ["srun", "--mpi=pmix", "-N2", "-n2"]
        if mpirun:
            beside = Path(sys.executable).parent / "mpirun"
            # A shell, as in a batch job: salloc takes a command that was killed for successful.
            shell = ["sh", "-c", '"$@"; exit $?', "sh"]
            command = [
                "salloc",
                "-Q",
                "-N2",
                "-n2",
                *shell,
                beside,
                "-np",
                "2",
                "-x",
                MARK,
                "-x",
                VARIABLE,
            ]
        words = [*FLOWPM, "simulate", run_file, "--output", self.folder / "long", "--overwrite"]
        with open(output, "w") as file:
            process = subprocess.Popen(
                self.cluster.inside(HERE, *command, *words, "-v"),
                env=self.cluster.environment(**{MARK: "1", VARIABLE: str(notes.path)}),
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
            if words[1:3] == [b"-m", b"flowpm_dist.cli"]:
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
        seconds, text = time.monotonic() - began, job.told()
        message = next((m for m in text.splitlines() if re.search("error: |noticed", m)), "none")
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


def _message(told: str) -> str:
    return next((line for line in told.splitlines() if "error: " in line), "")


def _difference(one: Path, two: Path, name: str) -> float:
    """The largest relative difference between the numbers of two tables, but those of times."""
    tables = [list(csv.DictReader((folder / name).open())) for folder in (one, two)]
    if len(tables[0]) != len(tables[1]) or not tables[0]:
        raise WrongError(f"{name} has {len(tables[0])} rows and {len(tables[1])}")
    worst = 0.0
    for a, b in zip(*tables, strict=True):
        for key, value in a.items():
            try:
                x, y = float(value), float(b[key])
            except ValueError:
                continue
            if "second" in key or "per_s" in key or "time" in key:
                continue
            worst = max(worst, abs(x - y) / max(abs(x), abs(y), 1e-3))
    return worst


PARTS: dict[str, Callable[[Parts], Row]] = {
    name: getattr(Parts, name)
    for name in (
        "simulate", "reconstruct", "train", "doctor", "pmi2", "folder_of_one_host", "full_disk",
        "requeue", "killed_rank", "stopped_rank", "frozen_host", "cut", "mended",
        "cut_mpirun", "killed_srun", "killed_mpirun",
    )
}  # fmt: skip


def main(words: list[str]) -> int:
    """Runs the parts that are named, or all."""
    if (reason := lacking()) is not None:
        print(f"skipped: no virtual cluster here, {reason}")
        return 0
    keep = "--keep" in words
    chosen = [word for word in words if word != "--keep"] or list(PARTS)
    if unknown := [name for name in chosen if name not in PARTS]:
        print(f"there is no {unknown[0]} (parts: {', '.join(PARTS)})", file=sys.stderr)
        return 2
    cluster, rows, wrong = VirtualCluster(), [], 0
    cluster.up()
    try:
        parts = Parts(cluster)
        for name in chosen:
            print(f"{name} ...", end=" ", flush=True)
            try:
                rows.append(PARTS[name](parts))
                print(rows[-1][1], flush=True)
            except WrongError as error:
                wrong += 1
                rows.append((name, "WRONG", str(error).splitlines()[0][:200]))
                print(f"wrong: {error}", flush=True)
    finally:
        if not keep:
            cluster.down()
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    print()
    for what, seen, message in rows:
        print(f"{what.ljust(widths[0])}  {seen.ljust(widths[1])}  {message}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
