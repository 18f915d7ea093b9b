"""What a person sees while a network trains: a bar on a terminal, a line now and then otherwise."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

EVERY = 10.0  # [s] between lines, where there is no terminal


class TrainingProgress:
    """Of one rank; only rank 0 says anything.

    Args:
        rank: of the job.
        stream: written to.
    """

    def __init__(self, rank: int = 0, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stderr
        self._silent = rank != 0
        self._said = -EVERY
        console = Console(file=self._stream)
        self._bar = None
        if not self._silent and console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[state]}"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task("", total=None, state="")

    def __enter__(self) -> TrainingProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()

    def note(self, text: str) -> None:
        """Say what is being done now."""
        if self._bar:
            self._bar.reset(self._task, description=text, total=None, state="")
        elif not self._silent:
            print(text, file=self._stream, flush=True)
        self._said = -EVERY

    def __call__(self, what: str, done: int, total: int, state: str = "") -> None:
        """So much of something is done.

        Args:
            what: it is.
            done, total: of its pieces.
            state: to say beside them.
        """
        if self._bar:
            self._bar.update(self._task, description=what, completed=done, total=total, state=state)
        elif not self._silent and (done == total or time.monotonic() - self._said >= EVERY):
            self._said = time.monotonic()
            width = len(str(total))
            print(
                f"{what} {done:{width}d}/{total}  {state}".rstrip(), file=self._stream, flush=True
            )
