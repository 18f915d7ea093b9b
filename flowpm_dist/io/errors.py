"""Errors that a command reports without a traceback, and those that become a warning."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

BACKEND = "MPLBACKEND"
"""Environment variable with the name of matplotlib's backend."""


class UserError(ValueError):
    """A mistake that the user can correct, such as a wrong run file; exit status 2.

    Commands find these mistakes before the work begins.
    """


class WorkError(RuntimeError):
    """The work cannot continue, for example on a full disk or a damaged file; exit status 1.

    A single rank may raise it.
    """


@contextmanager
def decoration(
    what: str, warn: Callable[[str], object] = warnings.warn, remedy: str = ""
) -> Iterator[None]:
    """Inside, results that are safe on disk are shown: by a figure, a report or a summary.

    A failure inside is a warning, as it must not cost the results. No ranks may meet inside: the
    others would wait for one that failed. Matplotlib can be imported inside with any `MPLBACKEND`,
    because figures in files need no display.

    Args:
        what: what is made, such as "density.png".
        warn: shows a warning; that it fails costs the warning alone.
        remedy: a sentence on how to make it later.
    """
    try:
        with _any_backend():
            yield
    except Exception as error:
        cause = re.sub(r"^\[Errno \d+\] ", "", str(error).strip().partition("\n")[0])
        if not isinstance(error, OSError | UserError | WorkError):
            cause = f"{type(error).__name__}: {cause}".removesuffix(": ")
        message = f"no {what}: {cause}. The results are not affected."
        # The standard error may be closed or full, and Python may make an error of a warning.
        with suppress(Exception):
            warn(f"{message} {remedy}".rstrip())


@contextmanager
def _any_backend() -> Iterator[None]:
    """Inside, matplotlib is imported without its backend; afterwards it has the user's, if valid.

    An invalid name in `BACKEND` is an error of the import of matplotlib.
    """
    backend, loaded = os.environ.pop(BACKEND, None), "matplotlib" in sys.modules
    try:
        yield
    finally:
        if backend is not None:
            os.environ[BACKEND] = backend
            if not loaded and (matplotlib := sys.modules.get("matplotlib")) is not None:
                with suppress(ValueError):
                    matplotlib.rcParams["backend"] = backend
