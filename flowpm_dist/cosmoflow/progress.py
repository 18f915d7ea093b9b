"""What a person sees while a network trains: a bar on a terminal, a line now and then otherwise."""

from __future__ import annotations

import time
from typing import IO

from flowpm_dist.io.progress import Display

EVERY = 10.0  # [s] between lines, where there is no terminal


class TrainingProgress(Display):
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
