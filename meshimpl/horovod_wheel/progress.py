"""Long commands with their whole output in a log and a short line now and then on the terminal."""

import queue
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

SECONDS_BETWEEN_LINES = 10.0


class CommandError(Exception):
    """A command failed: which step, the log it left, and the log's last lines."""

    def __init__(self, step: str, status: int, log: Path) -> None:
        self.step, self.status, self.log = step, status, log
        super().__init__(f"{step} failed with status {status}")

    def tail(self, lines: int = 25) -> str:
        """Return the last lines of the log before Python's own account of the failure."""
        text = self.log.read_text(errors="replace")
        return "\n".join(text.split("Traceback (most recent call last)")[0].splitlines()[-lines:])


def say(text: str) -> None:
    """Print one line of the set-up's progress at once."""
    print(f"[set-up] {text}", flush=True)


def run(
    step: str,
    command: list[str],
    *,
    log: Path,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    show: str = r"^\s*(Downloading \S+|Installing collected packages)",
) -> None:
    """Run a command; its output goes to the end of `log`.

    Every ten seconds a line tells the step, the seconds so far and the newest piece of output:
    what the groups of `show` match in a line.

    Raises:
        CommandError: the command's exit status is not zero.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    started = told = time.monotonic()
    newest = ""
    say(f"{step} ...")
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {' '.join(command)}\n")
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=env,
            cwd=cwd,
        )
        try:
            for line in _lines(process.stdout):
                file.write(line)
                if match := re.match(show, line):
                    newest = " ".join(match.groups())
                now = time.monotonic()
                if now - told >= SECONDS_BETWEEN_LINES:
                    told = now
                    say(
                        f"  {now - started:4.0f} s  {step.split(' (')[0]}: {newest}".removesuffix(
                            ": "
                        )
                    )
        except BaseException:
            process.kill()
            raise
        finally:
            status = process.wait()
    if status != 0:
        raise CommandError(step, status, log)


def _lines(stream: IO[str] | None) -> Iterator[str]:
    """Lines of a stream as they come, and an empty one whenever a second passes without."""
    assert stream is not None
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=1.0)
        except queue.Empty:
            line = ""
        if line is None:
            return
        yield line
