"""Garbage sent to the liveness watch of a running job, and the reports that the watch missed.

    python benchmarks/hostile_network.py --minutes 60

Two ranks on this machine meet again and again. After a quiet minute, strangers call the port at
which rank 0's watch listens. They send random bytes, JSON nested too deeply, forged reports, lines
that are too long, and bytes that come one a second. They close connections half, reset them, or
never use them. The watch must close each of these calls, and each rank's watch must hear all
reports of the other; the exit status is 1 if not. The tables also show memory and open files.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = "HOSTILE_NETWORK_FOLDER"
ENOUGH = 3
"""Times the usual time between two beats after which one is late, as on a busy machine."""


def watch(arguments: list[str]) -> None:
    """A rank's watch, which also writes its port and the times of what it hears."""
    from meshimpl.pulse import process

    folder, heard, worst = Path(os.environ[FOLDER]), Counter[str](), Counter[str]()
    last: dict[str, float] = {}

    def counting(method: Callable[..., None], name: str) -> Callable[..., None]:
        def call(self: Any, *given: Any) -> None:
            method(self, *given)
            now, mine, beat = time.monotonic(), self.settings.rank, self.settings.beat
            gap = now - last.setdefault(name, now)
            last[name] = now
            heard[name] += 1
            heard[f"late {name}"] += gap > ENOUGH * beat
            worst[name] = max(worst[name], gap)  # type: ignore[assignment]
            if name == "beats":
                about = {"heard": heard, "worst": worst, "port": self.settings.port, "beat": beat}
                files = len(os.listdir("/proc/self/fd"))
                rows = Path("/proc/self/statm").read_text().split()
                about |= {"files": files, "memory": int(rows[1]) * os.sysconf("SC_PAGE_SIZE")}
                part = folder / f"part-{mine}"
                part.write_text(json.dumps(about))
                part.rename(folder / f"watch-{mine}.json")

        return call

    for cls in (process.Pulse, process.RootPulse):
        cls.take = counting(cls.take, "reports")  # type: ignore[method-assign]
        cls.on_beat = counting(cls.on_beat, "beats")  # type: ignore[method-assign]
    # What RootPulse inherits is counted once.
    process.main(arguments)


def work() -> None:
    """A rank: meets the other one until a file says that it is enough."""
    from meshimpl.pulse import rank

    rank._PROGRAM = (
        "import sys; sys.path.insert(0, {!r}); "
        f"sys.path.insert(0, {str(Path(__file__).parent)!r}); "
        "from hostile_network import watch; watch(sys.argv[1:])"
    )
    from meshimpl import ProcessMesh

    mesh, enough = ProcessMesh("row:2"), Path(os.environ[FOLDER]) / "enough"
    import tensorflow as tf

    over = False
    while not over:
        time.sleep(0.25)
        over = bool(mesh.world.allreduce(tf.constant(enough.exists()), "max"))


class Stranger:
    """One call: a connection, and the bytes that are still to be sent on it."""

    def __init__(self, kind: str, port: int, draws: random.Random) -> None:
        self.kind, self.made = kind, time.monotonic()
        self.call = socket.create_connection(("127.0.0.1", port), timeout=5)
        self.call.setblocking(False)
        secret = draws.randbytes(16).hex().encode()
        report = json.dumps([1, "host", 1, ["", 0, True, None, [], 2, False, ""], 1.0, "X", 1])
        self.left = {
            "random bytes": draws.randbytes(draws.randrange(1, 2**15)),
            "random lines": b"\n".join(draws.randbytes(60) for _ in range(200)) + b"\n",
            "deep JSON": b"[" * 60_000 + b"\n",
            "deep JSON, wrong secret": secret + b" " + b"[" * 60_000 + b"\n",
            "forged report": secret + b" " + report.encode() + b"\n",
            "no text": b"\n" * 1000,
            "long line": b"x" * 2**18,
            "HTTP": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
            "slow": bytes(draws.choices(range(32, 127), k=100)),
        }.get(kind, b"")
        if kind == "half closed":
            self.call.shutdown(socket.SHUT_WR)
        if kind == "reset":
            self.call.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.call.send(b"[")
            self.call.close()

    def is_closed(self) -> bool:
        """Sends what is due, and returns whether the watch has closed the call."""
        if self.call.fileno() < 0:
            return True
        try:
            if self.kind != "slow":
                self.left = self.left[self.call.send(self.left) :] if self.left else b""
            elif time.monotonic() - self.made >= 100 - len(self.left):  # a byte a second
                self.left = self.left[self.call.send(self.left[:1]) :]
            return self.call.recv(1) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True


KINDS = (
    "random bytes",
    "random lines",
    "deep JSON",
    "deep JSON, wrong secret",
    "forged report",
    "no text",
    "long line",
    "HTTP",
    "slow",
    "silent",
    "half closed",
    "reset",
)


def besiege(port: int, seconds: float, rate: float, most: int, seed: int) -> dict[str, list[float]]:
    """Calls again and again.

    Args:
        port: port of the watch.
        seconds: for how long.
        rate: calls a second.
        most: calls that are open at one time.
        seed: seed of the order of calls and of the bytes.

    Returns:
        kind -> the number of calls, of those that the watch closed, and the longest time until then
        [s]; the last calls may not have been closed yet.
    """
    draws, begin, calls = random.Random(seed), time.monotonic(), list[Stranger]()
    found = {kind: [0.0, 0.0, 0.0] for kind in KINDS}
    made = 0
    while (now := time.monotonic()) < begin + seconds + 15:
        if now < begin + seconds and made < (now - begin) * rate and len(calls) < most:
            kind = draws.choice(KINDS)
            calls.append(Stranger(kind, port, draws))
            found[kind][0] += 1
            made += 1
        else:
            time.sleep(min(0.02, 1 / rate))
        for stranger in list(calls):
            if stranger.is_closed():
                calls.remove(stranger)
                with contextlib.suppress(OSError):
                    stranger.call.close()
                row = found[stranger.kind]
                row[1] += 1
                row[2] = max(row[2], time.monotonic() - stranger.made)
        if now > begin + seconds and not calls:
            break
    return found


def readings(folder: Path) -> list[dict[str, Any]]:
    """What the watches of both ranks have written last."""
    return [json.loads((folder / f"watch-{rank}.json").read_text()) for rank in (0, 1)]


def run(given: argparse.Namespace, folder: Path) -> tuple[Any, Any, Any, int]:
    """Returns what the watches wrote before and after the calls, the calls, and the job's status.

    Args:
        given: the options.
        folder: for the files of the job.
    """
    from meshimpl import launch

    words = [sys.executable, __file__, "work"]
    command, environment = launch.mpirun_command(2, words, threads=1)
    environment |= {FOLDER: str(folder), "MESHIMPL_STALL_LIMIT": f"{given.limit:g}"}
    root = str(Path(__file__).resolve().parents[1])
    environment["PYTHONPATH"] = os.pathsep.join([root, environment.get("PYTHONPATH", "")])
    with (folder / "output").open("wb") as output:
        job = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            while not all((folder / f"watch-{rank}.json").exists() for rank in (0, 1)):
                if job.poll() is not None:
                    raise SystemExit(f"the job ended:\n{(folder / 'output').read_text()}")
                time.sleep(0.1)
            time.sleep(given.quiet)
            before = readings(folder)
            port, seconds = before[0]["port"], 60 * given.minutes
            found = besiege(port, seconds, given.rate, given.open, given.seed)
            time.sleep(2.0)
            after = readings(folder)
            (folder / "enough").touch()
            return before, after, found, job.wait(60)
        finally:
            job.terminate()


def main() -> int:
    """Run the job and the strangers, print two tables, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=15.0, help="of garbage")
    parser.add_argument("--quiet", type=float, default=60.0, help="seconds without, before")
    parser.add_argument("--rate", type=float, default=20.0, help="calls a second")
    parser.add_argument("--open", type=int, default=300, help="calls open at one time, at most")
    parser.add_argument("--limit", type=float, default=30.0, help="MESHIMPL_STALL_LIMIT [s]")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the job ends, too
    with tempfile.TemporaryDirectory() as place:
        before, after, found, status = run(given, Path(place))
        said = (Path(place) / "output").read_text().strip()
    print("| call | calls | closed by the watch | after at most [s] |\n|---|---|---|---|")
    for kind, (calls, closed, longest) in found.items():
        print(f"| {kind} | {calls:.0f} | {closed:.0f} | {longest:.1f} |")
    columns = "watch of|phase|beats|late beats|reports heard|longest time between beats so far [s]"
    columns = f"{columns}|memory [MB]|open files".split("|")
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for rank, (phase, now, then) in itertools.product(
        (0, 1), (("quiet", before, None), ("garbage", after, before))
    ):
        heard, last = Counter(now[rank]["heard"]), now[rank]
        heard.subtract(then[rank]["heard"] if then else {})
        print(
            f"| rank {rank} | {phase} | {heard['beats']} | {heard['late beats']} | "
            f"{heard['reports']} | {last['worst']['beats']:.2f} | {last['memory'] / 1e6:.1f} | "
            f"{last['files']} |"
        )
    # One may be on its way.
    lost = [max(0, sent["beats"] - heard["reports"] - 1) for sent, heard in _pairs(after)]
    print(f"\nreports that were sent and not heard: of rank 0 {lost[0]}, of rank 1 {lost[1]}")
    print(f"one beat: {after[0]['beat']:g} s; exit status of the job: {status}")
    print(f"what the job printed: {said or 'nothing'}")
    left = sum(calls - closed for calls, closed, _ in found.values())
    return int(bool(status or any(lost) or said or left))


def _pairs(watches: list[dict[str, Any]]) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Returns the counts of each rank's watch, followed by the counts of the other rank's."""
    first, second = (watch["heard"] for watch in watches)
    return [(first, second), (second, first)]


if __name__ == "__main__":
    work() if sys.argv[1:] == ["work"] else sys.exit(main())
