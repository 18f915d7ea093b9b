"""What a command tells before its work: the run in full, and what it will take."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from flowpm_dist.cli.common import begin_job, job
from flowpm_dist.grid.decomposition import Grid, default_mesh, parse_mesh, why_default_mesh
from flowpm_dist.io.files import human_size
from flowpm_dist.jobs.estimate import OVERRIDE, Demand, Estimate
from flowpm_dist.jobs.folder import existing_part
from flowpm_dist.jobs.progress import Progress
from meshimpl import launch

Check = Annotated[
    bool,
    typer.Option(
        "--check", help="Only show the run with all its settings, and what it would take."
    ),
]
IgnoreMemory = Annotated[
    bool, typer.Option(OVERRIDE, help="Begin even if the memory seems too small.")
]


@dataclass(frozen=True)
class Preview:
    """Work that was checked and can begin: what is told of it before.

    Attributes:
        resolved: its run file with all settings.
        demand: the memory that it takes on its mesh of ranks.
        estimate: what it will take.
        output: folder of the results; None if there is none.
        explains_mesh: whether it is told why the mesh is that one, where none was asked for.
        warnings: of what a user should know, that are told again when the work begins.
    """

    resolved: str
    demand: Demand
    estimate: Estimate
    output: Path | None = None
    explains_mesh: bool = False
    warnings: tuple[str, ...] = ()

    def check_memory(self, *, ignore: bool) -> None:
        """Check that the work fits into the memory of this host.

        Args:
            ignore: whether it may begin where it does not.

        Raises:
            TooLargeError: it does not fit.
        """
        if not ignore:
            self.demand.check(self.estimate, launch.host_memory())

    @property
    def told(self) -> str:
        """What is told of the estimate when the work begins."""
        return "\n".join(self.estimate.lines(launch.host_memory()))

    def show(self) -> None:
        """Print the run with all its settings, as a run file, and below it what it would take."""
        if launch.detect().rank:
            return
        count, mesh, grid = self.estimate.ranks, self.demand.mesh, self.demand.grid
        ranks = "1 rank" if count == 1 else f"{count} ranks"
        lines = [f"mesh: {mesh}, {ranks}"]
        if self.explains_mesh and _is_default(mesh, grid):
            lines.append(f"that mesh because {why_default_mesh(count, grid)}")
        lines += self.estimate.lines(launch.host_memory())
        if self.output is not None:
            free = shutil.disk_usage(existing_part(self.output)).free
            lines.append(f"results: in {self.output}, where {human_size(free)} are free")
        lines += [f"warning: {each}" for each in self.warnings]
        print("\n".join([self.resolved.rstrip(), "", *(f"# {line}" for line in lines)]))

    @contextmanager
    def begun(self, ranks: int | None, *, check: bool) -> Iterator[Progress]:
        """Begin the work as one of the ranks, see `job`; with `--check`, show it and exit.

        Args:
            ranks: value of `--ranks`.
            check: whether `--check` was given.
        """
        if check:
            self.show()
            raise typer.Exit
        begin_job(ranks)
        with job(self.told) as progress:
            yield progress


def _is_default(mesh: str, grid: Grid) -> bool:
    """Whether a mesh splits one box, and is the one that is taken by default."""
    axes = parse_mesh(mesh, batched=True)
    return axes.get("replica", 1) == 1 and mesh == default_mesh(math.prod(axes.values()), grid)
