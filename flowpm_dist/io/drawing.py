"""Drawing of results that are safe on disk. Nothing here imports matplotlib before it draws."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowpm_dist.io.errors import decoration

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
else:
    Axes = Any


def draw_curves(axes: Axes | None, *arguments: Any, **options: Any) -> Axes:
    """Draws the curves of a result, as `flowpm_dist.io.figures.draw_curves`."""
    from flowpm_dist.io import figures

    return figures.draw_curves(axes, *arguments, **options)


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
