"""Figures of results that are safe on disk. Nothing here imports matplotlib before one is drawn."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flowpm_dist.io.errors import decoration


@contextmanager
def drawing(
    path: Path, warn: Callable[[str], object] = warnings.warn
) -> Iterator[Callable[[Any], None]]:
    """A `decoration` in which a figure is drawn, and then saved by the function that it yields.

    Args:
        path: path of the PNG file.
        warn: shows a warning, if the figure cannot be drawn or written.
    """

    def save(figure: Any) -> None:
        from flowpm_dist.io.figures import save_figure

        save_figure(figure, path)

    with decoration(path.name, warn):
        yield save
