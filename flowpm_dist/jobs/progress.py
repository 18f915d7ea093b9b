"""What a person sees while a run works: a bar on a terminal, a line for each step otherwise."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import IO, TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

TERMINAL_VARIABLE = "FLOWPM_TERMINAL_COLUMNS"


def terminal_environment(stream: IO[str] | None = None) -> dict[str, str]:
    """What the ranks under mpirun need to know of this process's terminal: they see a pipe."""
    stream = stream or sys.stderr
    if not can_draw(stream):
        return {}
    return {TERMINAL_VARIABLE: str(os.get_terminal_size(stream.fileno()).columns)}


def can_draw(stream: IO[str]) -> bool:
    """Whether the stream is a terminal that can redraw a line."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")


class Display:
    """What rank 0 shows, a bar where there is a terminal and lines otherwise; a context.

    Args:
        rank: of this process; the others show nothing.
        stream: where to; standard error by default.
        total: of the bar's steps, where it is known.
    """

    def __init__(
        self, rank: int, stream: IO[str] | None = None, *, total: int | None = None
    ) -> None:
        self._stream = stream or sys.stderr
        self._silent = rank != 0
        self._bar = None if self._silent else self._make_bar()
        if self._bar:
            self._task = self._bar.add_task("", total=total, state="")

    def _make_bar(self) -> Bar | None:
        own, columns = can_draw(self._stream), os.environ.get(TERMINAL_VARIABLE)
        if not own and columns is None:
            return None
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        # The width of a terminal of our own is asked for again when it changes.
        width = None if own or not columns else int(columns)
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
            console=Console(file=self._stream, force_terminal=True, width=width),
            # What a command prints into a file or a pipe stays there.
            redirect_stdout=sys.stdout.isatty(),
        )

    def __enter__(self) -> Self:
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

    def _say(self, line: str) -> None:
        """Where there is no bar."""
        if not self._silent:
            print(line, file=self._stream, flush=True)


class Progress(Display):
    """Steps done, shown on rank 0; a context, and the callback of `Simulation.run`.

    Args:
        steps: how many there will be.
        rank: of this process.
        stream: where to; standard error by default.
    """

    def __init__(self, steps: int, *, rank: int, stream: IO[str] | None = None) -> None:
        super().__init__(rank, stream, total=steps)

    def note(self, text: str) -> None:
        """Say what is being done now."""
        if self._bar:
            self._bar.update(self._task, description=text)
        else:
            self._say(text)

    def __call__(self, step: int, steps: int, a: float, seconds: float) -> None:
        """One more step is done: its number from 1, how many there are, where it led, its time."""
        if self._bar:
            state = f"a = {a:.3f}  {seconds:.2f} s"
            self._bar.update(self._task, completed=step, state=state, description="evolution")
        else:
            width = len(str(steps))
            self._say(f"step {step:{width}d}/{steps}  a = {a:.4f}  {seconds:.2f} s")


EVERY = 10.0  # [s] between lines, where there is no terminal


class WorkProgress(Display):
    """Of one rank; only rank 0 says anything.

    Args:
        rank: of the job.
        stream: written to; standard error by default.
    """

    def __init__(self, rank: int = 0, stream: IO[str] | None = None) -> None:
        super().__init__(rank, stream)
        self._said = -EVERY

    def note(self, text: str) -> None:
        """Say what is being done now; of several lines, all but the last stay above a bar."""
        if self._bar:
            above, _, last = text.rpartition("\n")
            if above:
                self._bar.console.print(above, markup=False, highlight=False)
            # A task that is reset keeps the total of what was done before.
            self._bar.remove_task(self._task)
            self._task = self._bar.add_task(last, total=None, state="")
        else:
            self._say(text)
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
        elif done == total or time.monotonic() - self._said >= EVERY:
            self._said = time.monotonic()
            width = len(str(total))
            self._say(f"{what} {done:{width}d}/{total}  {state}".rstrip())
