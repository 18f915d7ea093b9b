"""How much a job prints, and its progress: a bar on a terminal or in a notebook, else lines."""

from __future__ import annotations

import os
import re
import sys
import time
import warnings
from collections.abc import Callable
from enum import StrEnum
from importlib.util import find_spec
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

from meshimpl import launch

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

VERBOSITY_VARIABLE = "FLOWPM_VERBOSITY"
"""Environment variable that sets the verbosity of the ranks."""
TERMINAL_VARIABLE = "FLOWPM_TERMINAL_COLUMNS"
OUTPUT_VARIABLE = "FLOWPM_OUTPUT_COLUMNS"
EVERY = 10.0
"""Least time between two lines of one count, where there is no terminal [s]."""


class Verbosity(StrEnum):
    """How much a job prints."""

    QUIET = "quiet"
    NORMAL = "normal"
    VERBOSE = "verbose"

    def choose(self) -> None:
        """Sets how much this process and the processes that it starts print."""
        os.environ[VERBOSITY_VARIABLE] = self
        if self is Verbosity.VERBOSE:
            # TensorFlow's warnings, which are left out otherwise.
            os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")


def verbosity() -> Verbosity:
    """Returns how much this job prints."""
    try:
        return Verbosity(os.environ.get(VERBOSITY_VARIABLE, Verbosity.NORMAL))
    except ValueError:
        return Verbosity.NORMAL


def terminal_environment() -> dict[str, str]:
    """Returns the variables that describe the terminal of this process to ranks under mpirun.

    mpirun gives its ranks a pipe for the standard error, and for the standard output a terminal of
    its own, whatever mpirun's own are. So a rank cannot see whether there is a terminal.
    """
    if launch.detect().size > 1:
        return {}
    names = {TERMINAL_VARIABLE: sys.stderr, OUTPUT_VARIABLE: sys.stdout}
    return {
        name: str(os.get_terminal_size(stream.fileno()).columns)
        for name, stream in names.items()
        if can_draw(stream)
    }


def output_columns() -> int | None:
    """Returns the width of the standard output's terminal; None if it goes to no terminal.

    Where there are several ranks, this is what the process that started them found, see
    `terminal_environment`.
    """
    if launch.detect().size > 1:
        return int(os.environ.get(OUTPUT_VARIABLE, 0)) or None
    return os.get_terminal_size(sys.stdout.fileno()).columns if can_draw(sys.stdout) else None


def can_draw(stream: IO[str]) -> bool:
    """Returns whether the stream is a terminal that can redraw a line."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")


def in_notebook() -> bool:
    """Returns whether this process is the kernel of a notebook that can draw a bar."""
    return "ipykernel" in sys.modules and find_spec("ipywidgets") is not None


_COUNT = re.compile(r"(\S.*?) +(\d+)/(\d+)(?:  (.*))?")
"""A line of a count: what is counted, how much is done, of how much, and a state."""


class Progress:
    """The display of progress: a bar on a terminal or in a notebook, lines otherwise.

    ::

        with fpm.Progress() as progress:
            state = sim.run(seed=42, progress=progress.step)

    A quiet job shows nothing; a verbose one shows lines, and every count. A notebook draws a bar
    where the package ipywidgets is installed.

    Args:
        rank: the rank of this process, by default as it was started; ranks other than 0 show
            nothing.
        stream: what is written to; standard error by default.
    """

    def __init__(self, rank: int | None = None, stream: IO[str] | None = None) -> None:
        rank = launch.detect().rank if rank is None else rank
        self._rank, self._stream = rank, stream or sys.stderr
        self._begin = time.monotonic()
        self.warnings: list[str] = []
        """The warnings so far, with those that Python issued inside the context."""
        self.on_count: Callable[[str], None] | None = None
        """Is called on every rank before a count is shown, with the name of what is counted."""
        level = verbosity()
        self._silent = rank != 0 or level is Verbosity.QUIET
        self._every = 0.0 if level is Verbosity.VERBOSE else EVERY
        self._said = -EVERY
        self._bar = None if self._silent else self._make_bar()
        if self._bar:
            self._task = self._bar.add_task("", total=None, state="")

    def _make_bar(self) -> Bar | None:
        if self._every == 0:
            return None
        draws, columns = can_draw(self._stream), os.environ.get(TERMINAL_VARIABLE)
        notebook = in_notebook()
        if not draws and columns is None and not notebook:
            return None
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as Bar

        # Without a width, rich follows the width of the terminal as it changes.
        width = None if draws or not columns else int(columns)
        return Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
            console=Console(
                file=self._stream,
                width=width,
                # A cell knows no codes that move a cursor.
                force_terminal=not notebook,
                force_interactive=False if notebook else None,
                force_jupyter=notebook,
            ),
            # Output that goes to a file, a pipe or a cell is not redirected to the terminal.
            redirect_stdout=output_columns() is not None,
            redirect_stderr=not notebook,
            # A thread that draws the bar in a notebook would take lines printed meanwhile with it.
            auto_refresh=not notebook,
        )

    def __enter__(self) -> Self:
        self._show_warning = show = warnings.showwarning

        def keep(message: Warning | str, *others: Any, **more: Any) -> None:
            self.warnings.append(str(message))
            show(message, *others, **more)

        warnings.showwarning = keep
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        warnings.showwarning = self._show_warning
        if self._bar:
            self._bar.stop()

    @property
    def seconds(self) -> float:
        """The time since this display was made [s]."""
        return time.monotonic() - self._begin

    def note(self, text: str) -> None:
        """Shows what is being done now.

        Args:
            text: one line or more; on a terminal all but the last line stay above the bar.
        """
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

    def say(self, line: str) -> None:
        """Show a line at once, above the bar if there is one; from any thread."""
        if self._bar:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            self._say(line)

    def warn(self, text: str) -> None:
        """Show a warning, also where the job is quiet, and keep it in `warnings`."""
        self.warnings.append(text)
        if self._rank == 0:
            print(f"warning: {text}", file=self._stream, flush=True)

    def __call__(self, what: str, done: int, total: int, state: str = "") -> None:
        """Shows a count. Lines are at least ten seconds apart, except for the last.

        Args:
            what: the name of what is counted.
            done: number of pieces that are done.
            total: number of pieces.
            state: text that is shown after the count.
        """
        if self.on_count is not None:
            self.on_count(what)
        if self._bar:
            self._bar.update(self._task, description=what, completed=done, total=total, state=state)
            if not self._bar.live.auto_refresh:
                self._bar.refresh()
        elif done == total or time.monotonic() - self._said >= self._every:
            self._said = time.monotonic()
            self._say_count(what, done, total, state)

    def relay(self, line: str) -> None:
        """Show a line that another process has printed: a count, which moves the bar, or a text.

        Args:
            line: without its end.
        """
        if self._bar and (count := _COUNT.fullmatch(line)):
            self(count[1], int(count[2]), int(count[3]), count[4] or "")
        elif self._bar:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=self._stream, flush=True)

    def step(self, step: int, steps: int, a: float, seconds: float) -> None:
        """Show a step of an evolution, each on a line: the callback of `Simulation.run`.

        Args:
            step: number of the step that is done, from 1.
            steps: number of steps.
            a: scale factor that the step led to.
            seconds: the time that the step took.
        """
        state = f"a = {a:.4f}  {seconds:.2f} s"
        if self._bar:
            self("evolution", step, steps, state)
        else:
            if self.on_count is not None:
                self.on_count("evolution")
            self._say_count("step", step, steps, state)

    def _say_count(self, what: str, done: int, total: int, state: str) -> None:
        self._say(f"{what} {done:{len(str(total))}d}/{total}  {state}".rstrip())

    def _say(self, line: str) -> None:
        if not self._silent:
            print(line, file=self._stream, flush=True)
