"""Jobs killed at random moments, begun again, and compared with undisturbed ones.

    python benchmarks/kills.py --kills 30 --table kills.md

Small jobs of two ranks, of the commands simulate, train, reconstruct, dataset and evaluate. Each
gets a fault at a random moment: a rank, mpirun or the command is killed, stopped and then killed,
or asked to end. All processes of the job must end by themselves. Then the command runs again, with
--resume if it has this option. Its results must be identical to the bit to the results of an
undisturbed job. The exit status is 1 if anything hangs, fails or differs.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from common import flowpm

from meshimpl.pulse.launchers import LAUNCHERS, stat_of

MARK = "FLOWPM_KILLS"
LIMIT = 180.0
"""Time in which all processes of a job must have ended [s]."""
TIMEOUT_SECONDS = 1800.0
"""Time that a job may take [s]; the machine may have other work."""

SHAPE = '[cosmology]\nOmega_b = 0.049\nh = 0.67\nn_s = 0.96\ntransfer = "eisenstein-hu"\n'
KNOWN = SHAPE + "Omega_m = 0.31\nsigma8 = 0.81\n"
PRIORS = "[priors]\nOmega_m = [0.25, 0.35]\nsigma8 = [0.78, 0.95]\n"
RUN_FILES = {
    "simulate": KNOWN
    + "[box]\ngrid = 32\nsize = 64.0\n[initial]\nseed = 1\n[evolution]\nsteps = 60\n"
    + "[output]\ncheckpoint_every = 7\n",
    "reconstruct": KNOWN
    + "[box]\ngrid = 8\nsize = 64.0\n[evolution]\nsteps = 2\n"
    + '[observation]\nstructure = "2lpt"\nkind = "density"\nsigma = 0.2\n'
    + "[data]\nmock_seed = 1\n[search]\nevaluations = 12\ncheckpoint_every = 3\n",
    "train": SHAPE
    + PRIORS
    + "[box]\ngrid = 32\nsize = 64.0\n[evolution]\nsteps = 2\n"
    + '[training]\nbatch = 2\noptimiser = "sgd"\nvalidate_every = 6\ncheckpoint_every = 3\n'
    + "[data]\nsimulations = 6\nreuse = 4\nfill = 4\nvalidation = 2\ntest = 4\n",
    "dataset": SHAPE
    + PRIORS
    + "[box]\ngrid = 32\nsize = 64.0\n[evolution]\nsteps = 2\n[training]\nbatch = 2\n"
    + "[data]\nsimulations = 24\nvalidation = 4\ntest = 4\n",
}
JOBS = (*RUN_FILES, "evaluate")
FAULTS = (
    "a rank is killed",
    "a rank is stopped, then killed",
    "mpirun is killed",
    "mpirun is stopped, then killed",
    "the command is killed",
    "the command gets SIGTERM",
)


@dataclass
class Processes:
    """The processes of one job, found by a mark in their environment."""

    mark: str

    def all(self) -> Iterator[tuple[int, dict[str, str]]]:
        """Gives the number and the environment of each process that has not ended."""
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError):
                text = (folder / "environ").read_bytes().decode(errors="replace")
                pairs = (line.partition("=") for line in text.split("\0") if "=" in line)
                environment = {name: value for name, _, value in pairs}
                stat = stat_of(int(folder.name))
                if environment.get(MARK) == self.mark and stat and stat[0] != "Z":
                    yield int(folder.name), environment

    def ranks(self) -> list[int]:
        """Returns the ranks."""
        return sorted(
            process
            for process, environment in self.all()
            if "OMPI_COMM_WORLD_RANK" in environment and not _name(process).startswith("prte")
        )

    def launchers(self) -> list[int]:
        """Returns mpirun."""
        return [process for process, _ in self.all() if _name(process) in LAUNCHERS]

    def wait(self) -> float | None:
        """Returns when all have ended [s]; None if some have not, which are then killed."""
        begin = time.monotonic()
        while left := [process for process, _ in self.all()]:
            if time.monotonic() - begin > LIMIT:
                for process in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                return None
            time.sleep(0.2)
        return time.monotonic() - begin


def _name(process: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/comm").read_text().strip()
    return ""


class Bench:
    """Jobs in a folder.

    Args:
        folder: for run files, results and what the jobs print.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._seconds = folder, dict[str, float]()
        for name, text in RUN_FILES.items():
            (folder / f"{name}.toml").write_text(text)

    def words(self, job: str, output: Path, *more: str) -> list[str]:
        """Returns the command of a job; an evaluation gets its own copy of a training."""
        given = self.folder / f"{job}.toml"
        if job == "evaluate":
            given = output.with_name(f"{output.name}-training")
            if not given.exists():
                shutil.copytree(self.undisturbed("train")[0], given)
        return flowpm(job, given, "--ranks", 2, "--output", output, *more)

    def undisturbed(self, job: str) -> tuple[Path, float]:
        """Returns the results of an undisturbed job, and the time that it took [s]."""
        output = self.folder / f"{job}-undisturbed"
        kept = output.with_suffix(".seconds")
        if kept.exists():  # by an earlier run in this folder
            self._seconds[job] = float(kept.read_text())
        if job not in self._seconds:
            shutil.rmtree(output, ignore_errors=True)
            words = self.words(job, output)
            begin = time.monotonic()
            done = run(words, output)
            if done.returncode:
                raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout}")
            self._seconds[job] = time.monotonic() - begin
            kept.write_text(str(self._seconds[job]))
        return output, self._seconds[job]

    def disturbed(
        self, job: str, fault: str, name: str, share: float
    ) -> tuple[float, float | None, int, Path] | None:
        """Begins a job and disturbs it.

        Args:
            job: name of the command.
            fault: one of `FAULTS`.
            name: name of the folder of results.
            share: moment of the fault, in the time that the undisturbed job took.

        Returns:
            The time of the fault [s]; the time until all processes had ended [s], None if some had
            to be killed; the exit status of the command; the folder. None if the job ended before
            the fault.
        """
        output = self.folder / name
        processes = Processes(str(output))
        words = self.words(job, output)
        moment, begin = share * self.undisturbed(job)[1], time.monotonic()
        with output.with_suffix(".txt").open("w") as printed:
            command = subprocess.Popen(
                words,
                stdout=printed,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, MARK: processes.mark},
            )
            while time.monotonic() < begin + moment or len(processes.ranks()) < 2:
                if command.poll() is not None:
                    return None
                time.sleep(0.05)
            came = time.monotonic() - begin
            draws = random.Random(name)
            if "command" in fault:
                target = command.pid
            elif "mpirun" in fault:
                target = processes.launchers()[0]
            else:
                target = draws.choice(processes.ranks())
            with contextlib.suppress(ProcessLookupError):  # it ends at this moment
                if "stopped" in fault:
                    os.kill(target, signal.SIGSTOP)
                    time.sleep(draws.uniform(1.0, 6.0))
                os.kill(target, signal.SIGTERM if "SIGTERM" in fault else signal.SIGKILL)
            status = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = command.wait(LIMIT)
            seconds = processes.wait()
            if status is None:
                command.kill()
                status, seconds = command.wait(), None
        ended = None if seconds is None else time.monotonic() - begin - came
        return came, ended, status, output

    def again(self, job: str, output: Path) -> tuple[str, bool]:
        """Gives a command again; returns what it did, and whether it succeeded."""
        ways = [["--overwrite"], []]
        if job in ("simulate", "train", "reconstruct"):
            ways = [["--resume"], [], ["--overwrite"]]
        elif job == "evaluate":
            ways = [[]]
        for way in ways:
            done = run(self.words(job, output, *way), output)
            if done.returncode != 2:  # it was refused before any work
                break
        did = {"--resume": "resumed", "--overwrite": "begun anew"}.get(" ".join(way), "begun anew")
        if done.returncode:
            return f"{did}: {done.stdout[-1500:]}", False
        return did, True


def run(words: list[str], output: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    done = subprocess.run(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    with output.with_suffix(".txt").open("a") as printed:
        printed.write(f"\n$ {' '.join(words)}\n{done.stdout}")
    return done


def results(folder: Path) -> dict[str, str]:
    """Returns a digest of each result of a job: arrays, records and tables, without times."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or "checkpoints/" in name:
            continue
        if path.suffix == ".npz":
            with np.load(path) as arrays:
                data = b"".join(key.encode() + arrays[key].tobytes() for key in sorted(arrays))
        elif path.suffix == ".csv":
            rows = list(csv.reader(path.open()))
            kept = [i for i, key in enumerate(rows[0]) if "second" not in key]
            data = repr([[row[i] for i in kept] for row in rows]).encode()
        elif path.suffix in (".tfrecord", ".h5", ".keras") or "/c/" in name:
            data = path.read_bytes()
        else:
            continue
        found[name] = hashlib.sha256(data).hexdigest()
    return found


def main() -> int:
    """Kill, begin again, compare; print the table, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=JOBS)
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    parser.add_argument("--table", type=Path, help="file for the table")
    parser.add_argument("--folder", type=Path, help="keep all results there")
    given = parser.parse_args()
    draws = random.Random(given.seed)
    lines = ["| job | fault | at [s] | ended after [s] | status | then | results |"]
    lines.append("|---|---|---|---|---|---|---|")
    wrong = 0

    def tell(line: str) -> None:
        lines.append(line)
        print(line, flush=True)
        if given.table:
            given.table.write_text("\n".join(lines) + "\n")

    with contextlib.ExitStack() as stack:
        place = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        place.mkdir(parents=True, exist_ok=True)
        bench = Bench(place.resolve())
        print("\n".join(lines), flush=True)
        for number in range(given.kills):
            # All pairs of five jobs and six faults in thirty kills.
            job, fault = (of[number % len(of)] for of in (given.jobs, FAULTS))
            name, disturbed = f"kill-{number + 1}", None
            share = draws.uniform(0.15, 1.0)
            whole, seconds = bench.undisturbed(job)
            while disturbed is None:
                shutil.rmtree(place / name, ignore_errors=True)
                disturbed = bench.disturbed(job, fault, name, share)
                share *= 0.7
            came, ended, status, output = disturbed
            did, well = bench.again(job, output)
            expected, resumed = results(whole), results(output)
            paths = sorted(expected.keys() | resumed.keys())
            differ = [path for path in paths if expected.get(path) != resumed.get(path)]
            found = f"differ: {', '.join(differ[:5])}" if differ else "equal to the bit"
            wrong += ended is None or not well or bool(differ)
            after = "never" if ended is None else f"{ended:.1f}"
            tell(
                f"| {job} | {fault} | {came:.1f} of {seconds:.1f} | {after} | {status} | "
                f"{did if well else 'failed'} | {found if well else did} |"
            )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
