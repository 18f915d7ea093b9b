"""What ends a job that cannot go on, and what does not."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from meshimpl.launch import HOST_LOST
from meshimpl.launch.ending import JOB_FOLDER, JobFolder
from meshimpl.pulse import rank as rank_side
from meshimpl.pulse.judgement import (
    GRACE,
    IDLE_SECONDS,
    PROOF,
    Peer,
    is_deadlock,
    is_stuck,
    trouble,
)
from meshimpl.pulse.launchers import Activity, Srun, children_of, end_launcher
from meshimpl.pulse.process import _STRANGERS, Settings
from meshimpl.pulse.state import (
    ABORTING,
    FINISHED,
    RUNNING,
    Connection,
    Meeting,
    RankState,
    Report,
    SharedState,
)

ROOT = Path(__file__).parents[2]
HERE = socket.gethostname()
LIMIT = 3.0  # [s]
LONG_LIMIT = 60.0
pytestmark = pytest.mark.timeout(120)

COMPUTING, ALONE, LEAVING = (True,), (False,), (True, None, (), FINISHED)
WORLD, ROW = (0, 1, 2, 3), (0, 1)


def beats(number: int, *ranks: tuple[str, int, tuple[object, ...]]) -> list[list[RankState]]:
    """As many equal tables; a rank's place, number of changes, and what it does."""
    return [[RankState(state, changes, *what) for state, changes, what in ranks]] * number  # type: ignore


@pytest.mark.parametrize(
    ("first", "second", "after"),
    [
        (("a", 5, COMPUTING), ("b", 5, COMPUTING), 61),
        (("a", 5, COMPUTING), ("b", 5, ALONE), None),
        (("a", 5, COMPUTING), ("a", 5, COMPUTING), None),
        (("a", 5, COMPUTING), ("b", 5, LEAVING), None),
    ],
)
def test_is_stuck(first, second, after):
    """After a while at different places where all must be; never otherwise."""
    if after is None:
        assert not is_stuck(beats(1000, first, second), 2, 60)
        return
    assert is_stuck(beats(after, first, second), 2, 60)
    assert not is_stuck(beats(after - 1, first, second), 2, 60)
    moved = beats(1, (first[0], 4, first[2]), second)
    assert not is_stuck(moved + beats(after - 1, first, second), 2, 60)


def wait(ordinal: int, *ranks: int, after: tuple[Meeting | None, ...] = ()) -> tuple[object, ...]:
    """What a rank does that waits in a meeting of these ranks, and has begun others before."""
    meeting = Meeting.of(ordinal, ranks)
    return True, meeting, (*after, meeting)


def call(ordinal: int, *ranks: int, after: tuple[Meeting | None, ...] = ()) -> tuple[object, ...]:
    """Likewise of a rank in a call of a mesh function."""
    calls = Meeting.of(ordinal, ranks, True)
    return True, calls, (*after, calls)


FIRST, CALL = Meeting.of(1, WORLD), Meeting.of(1, WORLD, True)


@pytest.mark.parametrize(
    ("ranks", "dead"),
    [
        # What the others do does not matter.
        ([wait(1, *WORLD), wait(1, *ROW), ALONE, COMPUTING], True),
        # A ring of four groups.
        ([wait(1, 0, 1), wait(1, 1, 2), wait(1, 2, 3), wait(1, 0, 3)], True),
        # One has been in the meeting before.
        ([wait(2, *WORLD), wait(1, *ROW, after=(FIRST,)), ALONE, ALONE], True),
        # One calls a function once more than the other, which goes on to a meeting.
        ([call(2, 0, 1), wait(1, 0, 1, after=(Meeting.of(1, (0, 1), True),)), ALONE, ALONE], True),
        # Each calls another function.
        ([call(2, 0, 1), call(2, 0, 1), ALONE, ALONE], True),
        # A call and a meeting, of which one has been in the other's and may be late to leave it.
        ([call(1, *WORLD), *[wait(1, *WORLD, after=(CALL,))] * 3], False),
        ([wait(1, *WORLD), *[call(1, *WORLD, after=(FIRST,))] * 3], True),
        ([call(1, *WORLD), wait(1, *WORLD, after=(CALL,)), ALONE, COMPUTING], False),
        # All have come. The others wait for these.
        ([wait(1, *ROW), wait(1, *ROW), wait(1, *WORLD), wait(1, *WORLD)], False),
        ([wait(1, *WORLD)] * 4, False),
        # Rank 1 was served in the meeting that 0 and 2 are about to leave, and went on.
        ([wait(1, 0, 1, 2), wait(1, *WORLD, after=(Meeting.of(1, (0, 1, 2)),))] * 2, False),
        # Rank 0 is late to leave one that all have begun.
        ([wait(1, *WORLD), wait(1, *ROW, after=(FIRST,)), *[wait(2, *WORLD)] * 2], False),
        # One that is still to come may be computing.
        ([wait(1, *WORLD)] * 3 + [ALONE], False),
        # The same, of a chain: 0 waits for 1, which waits for 2, which computes.
        ([wait(1, 0, 1), wait(1, 1, 2), COMPUTING, COMPUTING], False),
        # Groups that have nothing in common.
        ([wait(1, 0, 2), wait(1, 1, 3), ALONE, ALONE], False),
        # It ends in good order.
        ([wait(1, *WORLD), (*wait(1, *ROW), FINISHED), ALONE, ALONE], False),
        # It is stopped, for which it has its limit.
        ([wait(1, *WORLD), (*wait(1, *ROW), RUNNING, True), ALONE, ALONE], False),
    ],
)
def test_a_deadlock_is_proven_by_who_waits_for_whom(ranks, dead):
    """And believed when nobody has moved for a while."""
    tables = beats(6, *((f"{number}", 5, what) for number, what in enumerate(ranks)))
    assert is_deadlock(tables[-1:]) is dead and is_stuck(tables, 5, 60) is dead
    assert not is_stuck(tables[1:], 5, 60)
    moved = [[state._replace(changes=4) for state in tables[0]], *tables[1:]]
    assert not is_stuck(moved, 5, 60)


@pytest.mark.parametrize("stall", [3.0, 60.0, 100.0, 300.0, 9000.0])
def test_a_deadlock_is_believed_after_six_seconds_and_two_beats(stall):
    """Whatever the limits are."""
    settings = Settings(0, 2, True, stall, 30.0, "", 0, "", [])
    assert settings.proof >= 2 and PROOF <= settings.proof * settings.beat <= 2 * PROOF


def test_shared_state_is_read_as_it_was_written():
    shared_state = SharedState.create()
    assert shared_state.read() == RankState()
    shared_state.write(RankState("the höhe of it" * 100, 7, True))
    shared_state.end(FINISHED)
    wait = Meeting.of(2**32, (1, 3, 5))
    begun = (Meeting(3, 0, 2, 1), wait)
    shared_state.write(RankState("shorter", 8, False, wait, begun))
    assert wait is not None and list(wait.ranks) == [1, 3, 5] and Meeting.of(1, (0, 1, 3)) is None
    state = RankState("shorter", 8, False, wait, begun, FINISHED)
    assert SharedState(shared_state.file).read() == state
    begun = [state.has_begun(RankState(wait=Meeting(*of))) for of in ((3, 0, 2, 1), (4, 0, 2, 1))]
    assert begun == [True, False] and not state.has_begun(RankState(wait=Meeting(1, 0, 3, 1)))
    many = tuple(Meeting(1, 0, size, 1) for size in range(2, 60))
    shared_state.write(RankState("shorter", 9, False, many[0], many))
    assert shared_state.read() == RankState("shorter", 9, False, ending=FINISHED)


STRANGE = (
    b"[]\n",
    b"{}\n",
    b"3\n",
    b"GET / HTTP/1.1\r\n\n",
    b"x" * 2**17,
    b"[" * 60_000 + b"\n",  # nested too deeply to be parsed
    np.random.default_rng(0).bytes(4096) + b"\n",
)


def test_a_report_arrives_as_it_was_sent():
    """On a line of the same job; a message of another one closes the line."""
    wait = Meeting(2, 0, 4, 1)
    report = Report(3, "node1", 77, RankState("höhe", 5, True, wait, (wait,)), 30.0, "LIMIT")
    for secret, reports in (("secret", [report, report]), ("another", [])):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            sender, receiver = Connection(ours, "secret"), Connection(theirs, secret)
            assert receiver.receive() == ([], True)
            sender.send(report)
            sender.send(report)
            assert receiver.receive() == (reports, bool(reports))
    for strange in (*STRANGE, b"secret []\n", b"secret 3\n"):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            ours.send(strange)
            assert Connection(theirs, "secret").receive() == ([], False)


def test_a_half_written_state_is_empty():
    """A rank that was stopped meanwhile."""
    shared_state = SharedState.create()
    wait = Meeting(1, 0, 2, 1)
    shared_state.write(RankState("before", 7, True, wait, (wait,)))
    half, written = len(shared_state._memory) // 100, shared_state._memory[:]
    shared_state.write(RankState("after it", 8, True, wait, (wait, Meeting(4, 0, 4, 1))))
    shared_state._memory[half:] = written[half:]
    assert shared_state.read() == RankState()


def test_shared_state_without_memfd(monkeypatch):
    """Such as on macOS, or in a sandbox: a file without a name."""
    for missing in (AttributeError, OSError):
        monkeypatch.setattr(
            os, "memfd_create", lambda *_, error=missing: (_ for _ in ()).throw(error)
        )
        shared_state = SharedState.create()
        shared_state.write(RankState("here", 1, True))
        assert SharedState(shared_state.file).read() == RankState("here", 1, True)


def peer(rank: int, host: str = "node1", **more: object) -> Peer:
    """A rank as a pulse knows it."""
    return Peer(rank, host, 100 + rank, **more)  # type: ignore[arg-type]


def said(*peers: Peer, status: int = HOST_LOST) -> str:
    """Why a job of these ranks ends, with a status; empty if it goes on."""
    cause = trouble(peers, 30.0, "LIMIT")
    assert cause is None or cause.status == status
    return cause.reason if cause else ""


def test_a_silent_host_is_named_with_its_ranks():
    well = [peer(0), peer(1, silent=29.0), peer(4, "node3", silent=28.0)]
    assert said(*well) == ""
    lost = [peer(2, "node2", silent=30.0), peer(3, "node2", silent=27.0)]
    assert "from ranks 2, 3 on host node2 for 30 s" in said(*well, *lost)
    assert "LIMIT sets another limit" in said(*well, *lost)
    assert "from rank 2 (process 102) on host node2" in said(*well, lost[0])


def test_a_rank_that_ends_is_left_to_the_launcher_for_a_while():
    for ending, grace, status in ((RUNNING, 5.0, HOST_LOST), (ABORTING, 10.0, 1)):
        ended = peer(1)
        ended.hear(RankState(ending=ending))
        ended.gone = grace - 0.1
        assert said(peer(0), ended) == ""
        ended.gone = grace
        message = said(peer(0), ended, status=status)
        assert "rank 1 (process 101) on host node1 has ended" in message
    ended.hear(RankState(ending=FINISHED))
    ended.gone = 1000.0
    assert said(peer(0), ended) == ""


def test_a_stopped_rank_and_a_stopped_job():
    stopped = peer(1)
    stopped.hear(RankState(stopped=True))
    for _ in range(10):
        stopped.beat(3.0)
    assert "rank 1 (process 101) on host node1 was stopped for 30 s" in said(peer(0), stopped)
    assert said(stopped) == ""
    stopped.hear(RankState())
    stopped.beat(3.0)
    assert said(peer(0), stopped) == ""


def test_a_rank_that_stands_still_is_named_once():
    """And once more when it works again."""
    still = peer(1)
    for idle, cause in (
        ("T", "`kill -CONT 101` lets it continue"),
        ("D", "a disk"),
        ("S", "device"),
    ):
        assert still.news() == ""
        still.hear(RankState(idle=idle))
        news = still.news()
        assert news.startswith("rank 1 (process 101) on host node1 has done nothing for 30 s")
        assert cause in news and still.news() == ""
        still.hear(RankState())
        assert still.news() == "rank 1 works again"
    still.hear(RankState(idle="T"))
    assert still.news()
    still.gone = 0.0
    still.hear(RankState())
    assert still.news() == ""  # it has ended, and does not work again


def test_a_process_that_does_nothing():
    """Asleep or stopped; one that works is never idle."""
    codes = "while True: pass", "import time; time.sleep(100)"
    busy, idle = (subprocess.Popen([sys.executable, "-c", code]) for code in codes)
    try:
        time.sleep(1.0)
        activities = [Activity(process.pid) for process in (busy, idle)]
        for _ in range(4):
            found = [activity.sample(IDLE_SECONDS / 3) for activity in activities]
            time.sleep(0.3)
        assert found[0][1] == 0.0 and found[1] == ("S", IDLE_SECONDS)
        busy.send_signal(signal.SIGSTOP)
        found = [activities[0].sample(1.0)]
        while found[-1] != ("T", 3.0):
            time.sleep(0.05)
            found.append(activities[0].sample(1.0))
            assert len(found) < 100
    finally:
        busy.kill()
        idle.kill()


def test_a_pulse_that_cannot_be_started(monkeypatch):
    """It is missed, unlike one that nobody wants."""
    monkeypatch.setattr(rank_side, "_start_process", lambda files: None)
    reporter = rank_side.RankReporter()
    assert reporter.is_heard(0) is None
    reporter.start(lambda data: data, stall=1, silence=1)
    assert reporter.is_heard(0) is False


RANK = f"""
import ctypes, json, os, sys, time
from pathlib import Path
from meshimpl.pulse import Meeting, reporter

folder, rank = Path(sys.argv[1]), int(os.environ["OMPI_COMM_WORLD_RANK"])

def from_rank_zero(data):
    if rank == 0:
        (folder / "new").write_bytes(data)
        (folder / "new").rename(folder / "shared")
    while not (folder / "shared").exists():
        time.sleep(0.01)
    shared = json.loads((folder / "shared").read_bytes())
    if sys.argv[2] == "deaf" and rank == 1:
        shared["port"] = 1  # as behind a firewall
    return json.dumps(shared).encode()

limit = {LONG_LIMIT} if sys.argv[2] in ("crossed", "passed") else {LIMIT}
reporter.start(from_rank_zero, stall=limit, silence=limit)
(folder / f"rank-{{rank}}").touch()
while not (folder / "go").exists():
    time.sleep(0.05)
if sys.argv[2] in ("busy", "deaf"):
    (folder / f"heard-{{rank}}").write_text(str(reporter.is_heard({LIMIT})))
if sys.argv[2] == "deaf":
    reporter.stop()
    sys.exit(0)
if sys.argv[2] == "bereft":
    time.sleep(3 * {GRACE[RUNNING]})
    (folder / f"went-on-{{rank}}").touch()
if sys.argv[2] == "busy" and rank == 1:
    ctypes.PyDLL(None).sleep({round(2 * LIMIT)})  # a library that keeps Python's lock
if sys.argv[2] == "busy":
    time.sleep({2.5 * LIMIT})
    reporter.stop()
    sys.exit(0)
if sys.argv[2] == "apart":
    reporter.set_state(f"place {{rank}}", True, None)
row, world = Meeting.of(1, (0, 1)), Meeting.of(1, (0, 1, 2))
if sys.argv[2] == "crossed" and rank < 2:
    reporter.begun = {{0: (row, world)[rank]}}
    reporter.set_state(f"place {{rank}}", True, (row, world)[rank])
if sys.argv[2] == "passed":
    begun = (world, row) if rank == 1 else (world,)
    reporter.begun = dict(enumerate(begun))
    reporter.set_state(f"place {{rank}}", True, begun[-1])
    time.sleep({PROOF + 4})
    reporter.stop()
    sys.exit(0)
time.sleep(100)
"""

STARTER = """
import subprocess, sys
process = subprocess.Popen(sys.argv[1:])
print(process.pid, flush=True)
sys.exit(process.wait())
"""


class Job:
    """Ranks with a pulse, started by processes of their own as a launcher's would."""

    def __init__(self, folder: Path, what: str, ranks: int = 2) -> None:
        self.folder, self.starters, self.ranks = folder / what, [], []
        self.notes = self.folder / "notes"
        self.notes.mkdir(parents=True)
        for rank in range(ranks):
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMPI_COMM_WORLD_RANK": str(rank)}
            environment |= {"OMPI_COMM_WORLD_SIZE": str(ranks), "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
            environment |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", JOB_FOLDER: str(self.notes)}
            starter = subprocess.Popen(
                [sys.executable, "-c", STARTER, sys.executable, "-c", RANK, self.folder, what],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=open(self.folder / f"errors-{rank}", "w"),
                text=True,
            )
            assert starter.stdout is not None
            self.starters.append(starter)
            self.ranks.append(int(starter.stdout.readline()))

    def pulses(self) -> list[int]:
        """The pulses of the ranks, once all have begun."""
        limit = time.monotonic() + 60
        while time.monotonic() < limit:
            if all((self.folder / f"rank-{n}").exists() for n in range(len(self.ranks))):
                return [pulse_of(rank) for rank in self.ranks]
            time.sleep(0.02)
        raise AssertionError("the ranks have not begun")

    def errors(self, rank: int) -> str:
        """What a rank and its pulse have said."""
        return (self.folder / f"errors-{rank}").read_text()

    def status(self, rank: int, seconds: float = 30.0) -> int:
        """A rank's exit status."""
        return self.starters[rank].wait(seconds)


def pulse_of(rank: int) -> int:
    children = Path(f"/proc/{rank}/task/{rank}/children").read_text().split()
    assert len(children) == 1, children
    return int(children[0])


def send(number: signal.Signals, *processes: int) -> None:
    for process in processes:
        os.kill(process, number)


def is_there(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """One job for each test, begun together; their processes have ended at the end."""
    folder = tmp_path_factory.mktemp("jobs")
    names = "frozen stopped killed busy apart orphaned root suspended deaf bereft"
    started = {name: Job(folder, name) for name in names.split()}
    started |= {name: Job(folder, name, ranks=3) for name in ("crossed", "passed")}
    pulses = {name: job.pulses() for name, job in started.items()}
    # mpirun kills the process group of a rank that aborts, whose pulse then has to end mpirun.
    assert all(os.getpgid(pulse) == pulse for both in pulses.values() for pulse in both)
    time.sleep(1.0)  # in which they find each other
    strangers = besiege(started["busy"])
    suspended = started["suspended"]
    send(signal.SIGSTOP, *suspended.ranks, *pulses["suspended"])
    when = time.monotonic()
    send(signal.SIGSTOP, started["frozen"].ranks[1], pulses["frozen"][1])
    send(signal.SIGSTOP, started["stopped"].ranks[1])
    send(signal.SIGKILL, started["killed"].ranks[1], *pulses["bereft"])
    send(signal.SIGKILL, started["orphaned"].starters[1].pid)
    send(signal.SIGSTOP, started["root"].ranks[0], pulses["root"][0])
    for job in started.values():
        (job.folder / "go").touch()
    yield started, pulses, when, strangers
    for name, job in started.items():
        for process in (*job.ranks, *pulses[name], *(s.pid for s in job.starters)):
            if is_there(process):
                os.kill(process, signal.SIGKILL)
        for starter in job.starters:
            starter.wait()


def besiege(job: Job) -> list[bool]:
    """Calls rank 0's pulse with messages that are no reports, then many times without a message.

    Returns which calls the pulse has closed, in the order of the calls.
    """
    shared = json.loads((job.folder / "shared").read_bytes())
    calls = []
    for message in (*STRANGE, *[b""] * 80):
        call = socket.create_connection((shared["addresses"][-1], shared["port"]), timeout=10)
        with contextlib.suppress(OSError):  # it has been closed already
            call.sendall(message)
        calls.append(call)
    time.sleep(0.5)
    closed = []
    for call in calls:
        call.settimeout(0.0)
        try:
            closed.append(call.recv(1) == b"")
        except OSError as error:
            closed.append(not isinstance(error, BlockingIOError))
    return closed


def ended(process: int, seconds: float = 30.0) -> bool:
    """Whether a process ends within a time."""
    limit = time.monotonic() + seconds
    while is_there(process) and time.monotonic() < limit:
        time.sleep(0.05)
    return not is_there(process)


def test_a_host_that_stands_still_ends_the_job(jobs):
    """The rank that is left says which one it misses."""
    job = jobs[0]["frozen"]
    assert job.status(0) == HOST_LOST
    assert f"no sign of life from rank 1 (process {job.ranks[1]}) on host {HERE}" in job.errors(0)
    assert JobFolder(job.notes).reported_status() == HOST_LOST


def test_rank_zero_is_missed_by_the_others(jobs):
    job = jobs[0]["root"]
    assert job.status(1) == HOST_LOST
    assert f"no sign of life from rank 0 (process {job.ranks[0]}) on host {HERE}" in job.errors(1)


def test_a_killed_rank_is_missed_where_the_launcher_does_not_see_to_it(jobs):
    job = jobs[0]["killed"]
    assert job.status(0) == HOST_LOST
    assert f"rank 1 (process {job.ranks[1]}) on host {HERE} has ended" in job.errors(0)


def test_a_pulse_that_is_killed_is_replaced(jobs):
    """On both ranks; the message names it, and the new ones watch the ranks as the old ones did."""
    job, killed = jobs[0]["bereft"], jobs[1]["bereft"]
    limit = time.monotonic() + 4 * GRACE[RUNNING]
    went_on = [job.folder / f"went-on-{rank}" for rank in (0, 1)]
    while not all(path.exists() for path in went_on) and time.monotonic() < limit:
        time.sleep(0.1)
    for rank, process in enumerate(killed):
        assert went_on[rank].exists(), job.errors(rank)
        assert f"warning: process {process}, by which" in job.errors(rank)
        assert f"rank {rank} is alive, has ended (status -9)" in job.errors(rank)
    send(signal.SIGKILL, job.ranks[1])
    assert job.status(0) == HOST_LOST
    assert f"rank 1 (process {job.ranks[1]}) on host {HERE} has ended" in job.errors(0)


def test_ranks_end_with_the_process_that_started_them(jobs):
    """Those whose starter is alive end as well."""
    job, pulses = jobs[0]["orphaned"], jobs[1]["orphaned"]
    assert ended(job.ranks[1]) and ended(pulses[1])
    assert f"started rank 1 (process {job.ranks[1]}) on host {HERE} has ended" in job.errors(1)
    assert job.status(0) == HOST_LOST


def test_ranks_that_wait_for_each_other_end(jobs):
    job = jobs[0]["apart"]
    assert job.status(0) == job.status(1) == 1
    assert "rank 0: place 0\n  rank 1: place 1" in job.errors(0)
    assert not job.errors(1) and JobFolder(job.notes).reported_status() == 1


def test_ranks_that_wait_in_different_meetings_end_long_before_the_limit(jobs):
    """Nothing is said about a third rank, which computes."""
    job = jobs[0]["crossed"]
    assert job.status(0) == job.status(1) == job.status(2) == 1
    assert time.monotonic() - jobs[2] < LONG_LIMIT / 2
    assert "rank 0: place 0\n  rank 1: place 1" in job.errors(0)


def test_a_rank_that_has_been_in_a_meeting_is_not_waited_for_there(jobs):
    """Ranks 0 and 2 are long in one that rank 1 has left, which waits for rank 0 in the next."""
    job = jobs[0]["passed"]
    assert [job.status(rank) for rank in range(3)] == [0, 0, 0]
    assert not any(map(job.errors, range(3)))


def test_a_rank_that_is_only_busy_is_waited_for(jobs):
    """Also if a library keeps Python's lock for longer than the limit; the ranks end in peace."""
    job, pulses = jobs[0]["busy"], jobs[1]["busy"]
    assert job.status(0) == job.status(1) == 0
    assert not job.errors(0) and not job.errors(1)
    assert all(map(ended, pulses))


def test_strangers_do_not_end_a_job(jobs):
    """Calls with a wrong message are closed, and the oldest of too many calls without one."""
    job, closed = jobs[0]["busy"], jobs[3]
    assert [job.status(rank) for rank in (0, 1)] == [0, 0]
    assert not job.errors(0) and not job.errors(1)
    silent = len(closed) - len(STRANGE)
    kept = len(job.ranks) + _STRANGERS
    assert closed == [True] * (len(closed) - kept) + [False] * kept and silent > kept


def test_a_rank_knows_whether_rank_zero_hears_it(jobs):
    """A silent rank that still works."""
    for name, heard in (("busy", "True"), ("deaf", "False")):
        job = jobs[0][name]
        assert [job.status(rank) for rank in (0, 1)] == [0, 0]
        assert (job.folder / "heard-0").read_text() == "True"
        assert (job.folder / "heard-1").read_text() == heard


def test_a_stopped_rank_ends_with_the_job(jobs):
    """Its pulse ends it, because it cannot do so itself."""
    job, pulses = jobs[0]["stopped"], jobs[1]["stopped"]
    assert job.status(0) == HOST_LOST
    assert f"rank 1 (process {job.ranks[1]}) on host {HERE} was stopped" in job.errors(0)
    assert job.status(1) == -signal.SIGKILL % 256 or not is_there(job.ranks[1])
    assert all(map(ended, (*job.ranks, *pulses)))


def test_a_job_that_was_suspended_as_a_whole_goes_on(jobs):
    job, pulses = jobs[0]["suspended"], jobs[1]["suspended"]
    time.sleep(max(0.0, jobs[2] + 3 * LIMIT - time.monotonic()))
    send(signal.SIGCONT, *pulses, *job.ranks)
    time.sleep(1.0)
    assert all(map(is_there, (*job.ranks, *pulses)))
    assert not job.errors(0) and not job.errors(1)


@pytest.mark.parametrize("rank", ["", "sleep"])
def test_an_mpirun_that_waits_for_a_lost_host_ends_with_its_srun(tmp_path, rank):
    """Neither takes a notice of SIGTERM; with a rank both are left alone."""
    programs = {"mpirun": "/bin/bash", "srun": "/bin/sleep"}
    for name, program in programs.items():
        shutil.copy(program, tmp_path / name)
    script = f"trap '' TERM; {tmp_path}/srun 60 & {rank and 'sleep 60 &'} wait; wait; sleep 60"
    launcher = subprocess.Popen([tmp_path / "mpirun", "-c", script], start_new_session=True)
    try:
        names: set[str] = set()
        while names != {"srun", *rank.split()}:
            time.sleep(0.05)
            children = children_of(launcher.pid)
            names = {Path(f"/proc/{child}/comm").read_text().strip() for child in children}
        end_launcher(launcher.pid, 0.6)
        time.sleep(0.1)
        assert launcher.poll() is None or not rank
        assert [is_there(process) for process in children] == [bool(rank)] * len(children)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()


def test_what_another_parent_started_is_left_alone(tmp_path):
    shutil.copy("/bin/sleep", tmp_path / "srun")
    shell = subprocess.Popen(["bash", "-c", f"{tmp_path}/srun 60 & wait"], start_new_session=True)
    try:
        while not (children := children_of(shell.pid)):
            time.sleep(0.05)
        shell.send_signal(signal.SIGTERM)  # it ends by itself
        end_launcher(shell.pid, 0.6)
        assert all(map(is_there, children))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


def test_an_srun_that_was_there_is_missed():
    """At the second check; one that runs elsewhere is not."""
    server = socket.create_server(("127.0.0.1", 0))
    where = {"SLURM_STEP_LAUNCHER_PORT": str(server.getsockname()[1])}
    srun = Srun(where)
    assert not srun.has_gone()
    server.close()
    assert [srun.has_gone() for _ in range(3)] == [False, True, True]
    elsewhere, unknown = Srun(where), Srun({})
    assert not any(elsewhere.has_gone() or unknown.has_gone() for _ in range(5))
