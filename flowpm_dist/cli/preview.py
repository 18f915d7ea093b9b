"""What a command tells before its work: the run in full, and what it will take."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Annotated

import typer

from flowpm_dist.grid.decomposition import Grid, default_mesh, parse_mesh, why_default_mesh
from flowpm_dist.io.files import human_size
from flowpm_dist.jobs.estimate import OVERRIDE, Estimate
from flowpm_dist.jobs.folder import existing_part
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


def show_check(
    resolved: str,
    mesh: str,
    estimate: Estimate,
    output: Path | None = None,
    grid: Grid | None = None,
) -> None:
    """Print a run with all its settings, as a run file, and below it what it would take.

    Args:
        resolved: the run file.
        mesh: shape of the mesh of ranks.
        estimate: of the run.
        output: folder of the results; None if there is none.
        grid: that the mesh splits, for why it is that mesh; None says nothing of it.
    """
    if launch.detect().rank:
        return
    ranks = "1 rank" if estimate.ranks == 1 else f"{estimate.ranks} ranks"
    lines = [f"mesh: {mesh}, {ranks}"]
    if grid is not None and _is_default(mesh, grid):
        lines.append(f"that mesh because {why_default_mesh(estimate.ranks, grid)}")
    lines += estimate.lines(launch.host_memory())
    if output is not None:
        free = shutil.disk_usage(existing_part(output)).free
        lines.append(f"results: in {output}, where {human_size(free)} are free")
    print("\n".join([resolved.rstrip(), "", *(f"# {line}" for line in lines)]))


def _is_default(mesh: str, grid: Grid) -> bool:
    """Whether a mesh splits one box, and is the one that is taken by default."""
    axes = parse_mesh(mesh, batched=True)
    return axes.get("replica", 1) == 1 and mesh == default_mesh(math.prod(axes.values()), grid)


def told(estimate: Estimate) -> str:
    """Returns what is told of an estimate before the work begins."""
    return "\n".join(estimate.lines(launch.host_memory()))
