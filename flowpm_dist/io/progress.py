"""What a person sees while a run works: a bar on a terminal, a line for each step otherwise."""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import IO, TYPE_CHECKING

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


class Progress:
    """Steps done, shown on rank 0; a context, and the callback of `Simulation.run`.

    Args:
        steps: how many there will be.
        rank: of this process.
        stream: where to; standard error by default.
    """

    def __init__(self, steps: int, *, rank: int, stream: IO[str] | None = None) -> None:
        self.steps, self.rank = steps, rank
        self.stream = stream or sys.stderr
        self._bar = self._make_bar() if rank == 0 and self._on_terminal() else None
        self._task = self._bar.add_task("", total=steps, a="") if self._bar else None

    def _on_terminal(self) -> bool:
        return can_draw(self.stream) or TERMINAL_VARIABLE in os.environ

    def _make_bar(self) -> Bar:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = os.environ.get(TERMINAL_VARIABLE)
        console = Console(
            file=self.stream, force_terminal=True, width=int(columns) if columns else None
        )
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[a]}"),
            TimeRemainingColumn(),
            console=console,
        )

    def __enter__(self) -> Progress:
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
        if self._bar and self._task is not None:
            self._bar.update(self._task, description=text)
        elif self.rank == 0:
            print(text, file=self.stream, flush=True)

    def __call__(self, step: int, steps: int, a: float, seconds: float) -> None:
        """One more step is done: its number from 1, how many there are, where it led, its time."""
        if self._bar and self._task is not None:
            state = f"a = {a:.3f}  {seconds:.2f} s"
            self._bar.update(self._task, completed=step, a=state, description="evolution")
        elif self.rank == 0:
            width = len(str(steps))
            line = f"step {step:{width}d}/{steps}  a = {a:.4f}  {seconds:.2f} s"
            print(line, file=self.stream, flush=True)
