"""Jobs and faults on a virtual cluster of two hosts: `make test-cluster`.

    python tests/cluster/run.py [--keep] [PART...]

Without names all parts run. A table of what was seen is printed at the end, and the exit status is
1 if something was wrong. Where there can be no such cluster, one line says so and the status is 0.
"""

from __future__ import annotations

import csv
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from faults import BOX, COSMOLOGY, FLOWPM, HERE, SIMULATE, THERE, Faults, Parts, Row, WrongError
from virtual_cluster import CONTROLLER, HOSTS, ROOT, VirtualCluster, lacking

from flowpm_dist.simulate.folder import SimulationFolder

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


class Jobs(Parts):
    """The jobs; each returns a row: what, what was seen, the message."""

    def srun(self, *words: object, hosts: int = 2, check: bool = True, mpi: str = "pmix") -> str:
        """Runs a command on two ranks; returns what it printed."""
        launcher = ["srun", f"--mpi={mpi}", f"-N{hosts}", "-n2", "--kill-on-bad-exit=1"]
        done = self.cluster.run(HERE, *launcher, *FLOWPM, *words)
        if check and done.returncode:
            raise WrongError(f"status {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
        return done.stdout + done.stderr

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
        return (
            f"{name}: two hosts compared with one",
            f"largest relative difference {worst:.1g}",
            "",
        )

    def doctor(self) -> Row:
        """Its report on two hosts."""
        report = self.srun("doctor")
        for word in (HERE, THERE, "alltoall", "allreduce", "each of 2 received", "pulses of all 2"):
            if word not in report:
                raise WrongError(f"doctor does not report {word}: {report}")
        line = next(line for line in report.splitlines() if "alltoall" in line)
        return "doctor on two hosts", "ok", " ".join(line.split())

    def pmi2(self) -> Row:
        """A launcher that Open MPI does not understand is refused."""
        began = time.monotonic()
        printed = self.srun("simulate", self.run_file("pmi2", SIMULATE), check=False, mpi="pmi2")
        line = _message(printed)
        if "srun --mpi=pmix" not in line:
            raise WrongError(printed[-1000:])
        return "srun --mpi=pmi2", f"refused after {time.monotonic() - began:.0f} s", line

    def folder_of_one_host(self) -> Row:
        """Results in a folder that each host has for itself."""
        printed = self.srun("simulate", self.run_file("own", SIMULATE), "--output", "/tmp/own",
                         check=False)  # fmt: skip
        line = _message(printed)
        if "is not the same folder on all hosts" not in line or THERE not in line:
            raise WrongError(printed[-1000:])
        return "--output in a folder of one host", "refused before the work", line

    def full_disk(self) -> Row:
        """A shared folder that has no room left."""
        disk = self.folder / "small"
        disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk]
        for host in HOSTS:
            self.cluster.run(host, *mount, check=True)
        printed = self.srun("simulate", self.run_file("full", SIMULATE), "--output", disk / "out",
                         check=False)  # fmt: skip
        for host in HOSTS:
            self.cluster.run(host, "umount", disk)
        line = _message(printed)
        if "free" not in line:
            raise WrongError(printed[-1000:])
        return "a full disk", "refused before the work", line

    def requeue(self) -> Row:
        """A job that Slurm warns of its time limit is queued again, and continues."""

        def warn(number: str) -> None:
            # As Slurm does before the time limit.
            self.cluster.run(CONTROLLER, "scancel", "--signal=USR1", number, check=True)

        return self._in_two_turns("warned", 150, warn, lambda: None, "stopped by")

    def requeue_cut(self) -> Row:
        """A job that loses a host is queued again, and continues from its last checkpoint."""
        try:
            return self._in_two_turns(
                "cut off",
                600,
                lambda _: self.cluster.cut(THERE),
                lambda: self.cluster.mend(THERE),
                f"no sign of life.* on host {THERE}",
            )
        finally:
            self.cluster.mend(THERE)

    def study(self) -> Row:
        """A study by two workers, whose runs of two ranks extend over both hosts."""
        run_file = self.run_file("subject", SIMULATE + "[output]\nfields = []\nfigures = false\n")
        text = f'[study]\nsubject = "{run_file}"\nranks = [1, 2]\nrepeats = 2\n'
        study, site = self.run_file("study", text), self.folder / "study-site.toml"
        site.write_text('[site]\nsetup = ["export PYTHONPATH=' + str(ROOT) + '"]\n')
        output, began = self.folder / "study", time.monotonic()
        requested = ("submit", "study", study, "--nodes", 2, "--ranks-per-node", 1, "--time",
                     "00:10:00", "--workers", 2, "--site", site, "--output", output)  # fmt: skip
        done = self.cluster.run(HERE, *FLOWPM, *requested)
        if re.search(r"batch job (\d+)", done.stdout) is None:
            raise WrongError(done.stdout + done.stderr)
        while not json.loads((output / "study.json").read_text())["complete"]:
            if time.monotonic() - began > 300:
                logs = "".join(path.read_text() for path in self.folder.glob("study-*.log"))
                raise WrongError(f"the study is not complete: {logs[-2000:]}")
            time.sleep(0.5)
        with (output / "points.csv").open() as file:
            rows = list(csv.DictReader(file))
        expected = [("complete", "1"), ("complete", "2")] * 2
        if [(row["status"], row["ranks"]) for row in rows] != expected:
            raise WrongError(str(rows))
        about = [json.loads(path.read_text()) for path in output.glob("runs/*/run/provenance.json")]
        if sum(each["ranks on this host"] < each["ranks"] for each in about) != 2:
            raise WrongError(f"runs of two ranks were not on both hosts: {about}")
        return "a study by two workers", f"{time.monotonic() - began:.0f} s", "4 runs, each once"

    def _in_two_turns(
        self,
        fault: str,
        steps: int,
        disturb: Callable[[str], None],
        repair: Callable[[], None],
        expected: str,
    ) -> Row:
        """Disturbs a submitted job; its result must equal the result of an undisturbed run.

        Args:
            fault: the fault's name.
            steps: number of steps of the job.
            disturb: called with the job's number when it has a checkpoint.
            repair: called when the job is queued again.
            expected: pattern in the job's log.
        """
        import numpy as np
        import zarr

        name = fault.replace(" ", "-")
        text = SIMULATE.replace("steps = 3", f"steps = {steps}")
        run_file = self.run_file(name, text + "[output]\ncheckpoint_every = 5\n")
        site, began = self.folder / "site.toml", time.monotonic()
        site.write_text('[site]\nsetup = ["export PYTHONPATH=' + str(ROOT) + '"]\n')
        self.srun("simulate", run_file, "--output", self.folder / f"{name}-at-once")
        requested = ("submit", "simulate", run_file, "--nodes", 2, "--ranks-per-node", 1, "--time",
                 "00:10:00", "--site", site, "--output", self.folder / name)  # fmt: skip
        done = self.cluster.run(HERE, *FLOWPM, *requested)
        found = re.search(r"batch job (\d+)", done.stdout)
        if found is None:
            raise WrongError(done.stdout + done.stderr)

        def log() -> str:
            return "".join(path.read_text() for path in self.folder.glob(f"{name}-*.log"))

        todo = [
            (
                lambda: any((self.folder / name).glob(SimulationFolder.begun)),
                lambda: disturb(found[1]),
            ),
            (lambda: "queued again" in log(), repair),
        ]
        while "COMPLETED" not in (state := self._state(found[1])):
            if time.monotonic() - began > 600 or any(s in state for s in ("FAILED", "TIMEOUT")):
                raise WrongError(f"{state} {log()[-2000:]}")
            if todo and todo[0][0]():
                todo.pop(0)[1]()
            time.sleep(0.2)
        turns = 1 + log().count("queued again")
        if turns < 2:
            raise WrongError(f"the job was not queued again: {log()[-2000:]}")
        a, b = (
            np.asarray(zarr.open(self.folder / folder / "snapshot.zarr" / "displacement")[:])
            for folder in (f"{name}-at-once", name)
        )
        off = float(np.abs(a - b).max())
        same = f"off by {off:.2g}" if off else "the same to the bit"
        if not np.allclose(a, b, rtol=1e-4, atol=1e-4):
            raise WrongError(f"a job in {turns} turns is {same}")
        line = next((line for line in log().splitlines() if re.search(expected, line)), None)
        if line is None:
            raise WrongError(f"no {expected} in the log: {log()[-2000:]}")
        return f"submit, {fault}, in {turns} turns", same, line

    def _state(self, number: str) -> str:
        return self.cluster.run(CONTROLLER, "scontrol", "show", "job", number).stdout.partition(
            "JobState="
        )[2].split()[0]  # fmt: skip


def _message(printed: str) -> str:
    return next((line for line in printed.splitlines() if "error: " in line), "")


def _difference(one: Path, two: Path, name: str) -> float:
    """The largest relative difference between the numbers of two tables, except times."""
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


JOBS = ("simulate", "reconstruct", "train", "doctor", "pmi2", "folder_of_one_host", "full_disk",
        "requeue", "requeue_cut", "study")  # fmt: skip
FAULTS = ("killed_rank", "stopped_rank", "frozen_host", "cut", "mended", "cut_mpirun",
          "killed_srun", "killed_mpirun")  # fmt: skip
PARTS = (*JOBS, *FAULTS)


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
        parts = {name: getattr(Jobs(cluster), name) for name in JOBS}
        parts |= {name: getattr(Faults(cluster), name) for name in FAULTS}
        for name in chosen:
            print(f"{name} ...", end=" ", flush=True)
            try:
                rows.append(parts[name]())
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
