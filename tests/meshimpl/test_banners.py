"""Mpirun's banners do not follow what a job has said."""

import pytest

from meshimpl.launch import HOST_LOST, find_mpirun, mpirun_command, open_mpi_version
from meshimpl.launch import job as job_module
from meshimpl.launch.job import BannerFilter

RULE = b"-" * 74 + b"\n"
ABORT = (
    RULE + b"MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n"
    b"  Proc: [[1156,1],1]\n  Errorcode: 3\n\n"
    b"NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.\n"
    b"You may or may not see output from other processes, depending on\n"
    b"exactly when Open MPI kills them.\n" + RULE
)
MISSING = RULE + b"prterun was unable to find the specified executable file\n" + RULE


@pytest.mark.parametrize(
    ("printed", "passed_on"),
    [
        (b"error: full\n" + ABORT + b"last\n", b"error: full\nlast\n"),
        (ABORT.replace(b"  Errorcode", b"stopped at step 3\n  Errorcode"), b"stopped at step 3\n"),
        (MISSING, MISSING),
        (b"-----\nmine\n" + RULE + b"and mine", b"-----\nmine\n" + RULE + b"and mine"),
        (RULE + b"many\n" * 30, RULE + b"many\n" * 30),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 10**6])
def test_banners_alone_are_left_out(printed, passed_on, size):
    banners = BannerFilter()
    parts = [banners.feed(printed[at : at + size]) for at in range(0, len(printed), size)]
    assert b"".join([*parts, banners.end()]) == passed_on


def test_a_line_that_is_redrawn_is_passed_on_at_once():
    banners = BannerFilter()
    assert banners.feed(b"50 %\r") == b"50 %\r"
    assert banners.feed(b"-- 60 %\r") == b"-- 60 %\r"


@pytest.mark.parametrize(("noted", "status"), [(str(HOST_LOST), HOST_LOST), ("", 137), (None, 137)])
def test_the_status_of_an_mpirun_that_had_to_be_killed(monkeypatch, noted, status):
    """It waits in vain for a host that was lost: the status is what the watch has noted."""

    def supervise(command, env, folder, stop_as):
        if noted is not None:
            folder.reported.write_text(noted)
        return 137, None

    monkeypatch.setattr(job_module, "_supervise", supervise)
    assert job_module.relaunch(2, []) == status


def test_a_job_that_ends_with_a_status_ends_without_a_banner(capfd):
    if not open_mpi_version(find_mpirun()):
        pytest.skip("the banners are Open MPI's")
    command, environment = mpirun_command(2, ["sh", "-c", "echo well said >&2; exit 138"])
    folder = job_module.JobFolder(None)  # type: ignore[arg-type]  # nobody writes into it
    status, _ = job_module._supervise(command, environment, folder, None)
    assert status == 138
    assert set(capfd.readouterr().err.splitlines()) == {"well said"}
