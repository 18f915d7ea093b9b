"""The estimate of a job, and its refusal. Nothing here imports TensorFlow, Horovod or MPI."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from flowpm_dist.grid.decomposition import HALO, Grid, misfits, parse_mesh
from flowpm_dist.io.errors import UserError
from flowpm_dist.options.regular_files import human_size
from flowpm_dist.simulation.cost import SHARED
from meshimpl import launch

OVERRIDE = "--ignore-memory"
MOST_HOSTS = 1024
"""Largest number of hosts that is proposed."""
SPACING = 16
"""The sides of a proposed grid are multiples of this, if such a grid fits."""


@dataclass(frozen=True)
class Estimate:
    """The memory and the time of a job; `print` compares the memory with this host's.

    Attributes:
        ranks: number of ranks.
        together: ranks that share this host.
        memory: greatest memory of a rank, TensorFlow included [bytes].
        disk: what will be written, at most [bytes].
        seconds: duration of the work; None where nothing like it was measured on this machine.
    """

    ranks: int
    together: int
    memory: int
    disk: int = 0
    seconds: float | None = None

    @property
    def on_host(self) -> int:
        """The memory of all ranks of this host [bytes]."""
        return self.together * self.memory - (self.together - 1) * SHARED

    def lines(self, host: launch.HostMemory) -> list[str]:
        """Returns the estimate as lines for a user."""
        text = f"memory: about {human_size(self.memory)}"
        if self.ranks > 1:
            text += f" on each of {self.ranks} ranks"
        if self.together > 1:
            text += f", {human_size(self.on_host)} on this host"
        text += f"; there are {human_size(host.limit)}"
        if host.free < self.on_host <= host.limit:
            text += f", of which only {human_size(host.free)} are free now"
        if launch.gpus_in_sight():
            text += ". The estimate is for a host and its GPUs together"
        lines = [text]
        if self.disk:
            lines.append(f"disk: at most {human_size(self.disk)}")
        if self.seconds is not None:
            lines.append(f"time: about {human_time(self.seconds)}, as measured here before")
        return lines

    def __str__(self) -> str:
        return "\n".join(self.lines(launch.host_memory()))


def human_time(seconds: float) -> str:
    """Returns a duration as people read it, such as "3 min"."""
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds:.0f} s"


class TooLargeError(UserError):
    """A job needs more memory than there is; found before the work begins."""


MemoryAt = Callable[[Grid, Mapping[str, int]], int]
"""The memory of a rank [bytes] by the grid and by the sizes of the mesh's axes."""


Fits = Callable[[int], bool]
"""Whether a memory of each rank fits."""


@dataclass(frozen=True)
class Demand:
    """The memory that a job takes on its mesh, and on others.

    Attributes:
        job_name: names the job in messages, such as "the simulation".
        grid: cells along each side.
        mesh: shape of the mesh of ranks.
        memory_at: the memory of a rank on a grid and a mesh; raises ValueError for a grid that the
            job cannot have.
        mesh_of: the mesh for another number of ranks; raises ValueError if there is none.
        others: yields what else could be changed so that it fits, such as "training.batch = 2".
        grid_is_free: whether the grid could be another; not where data have it already.
        pyramid, halo: the pyramid force and the halo, which decide about the default mesh.
    """

    job_name: str
    grid: Grid
    mesh: str
    memory_at: MemoryAt
    mesh_of: Callable[[int], str]
    others: Callable[[Fits], Iterable[str]] = lambda fits: ()
    grid_is_free: bool = True
    pyramid: str = "off"
    halo: int = HALO

    @property
    def ranks(self) -> int:
        """The number of ranks of the mesh."""
        return math.prod(parse_mesh(self.mesh, batched=True).values())

    def estimate(self, disk: int = 0, seconds: float | None = None) -> Estimate:
        """Returns the estimate of the job on its mesh.

        Args:
            disk, seconds: see `Estimate`.
        """
        memory = self.memory_at(self.grid, parse_mesh(self.mesh, batched=True))
        together = launch.ranks_on_host(self.ranks)
        return Estimate(self.ranks, together, memory, disk, seconds)

    def check(self, estimate: Estimate, host: launch.HostMemory) -> None:
        """Check that the job fits into the memory of this host.

        Args:
            estimate: the job's estimate.
            host: its memory.

        Raises:
            TooLargeError: it does not fit; the message says what would.
        """
        if estimate.on_host <= host.limit:
            return
        place = "the container or batch job here" if host.is_container else "this host"
        needed = f"{self.job_name} needs about {human_size(estimate.memory)}"
        if estimate.together > 1:
            needed += f" on each of {estimate.together} ranks, {human_size(estimate.on_host)} "
            needed += "together"
        fitting = list(self._that_fit(estimate, host))
        would = ", which is too little for any grid" if self.grid_is_free else ""
        if fitting:
            would = f"; {', or '.join(fitting)} would fit"
        raise TooLargeError(
            f"{needed}, and {place} has {human_size(host.limit)}{would}. "
            f"Use {OVERRIDE} to start anyway"
        )

    def _that_fit(self, estimate: Estimate, host: launch.HostMemory) -> Iterator[str]:
        together = estimate.together
        each = (host.limit + (together - 1) * SHARED) // together
        yield from self.others(lambda memory: memory <= each)
        axes = parse_mesh(self.mesh, batched=True)

        def does(grid: Grid) -> bool:
            try:
                return self.memory_at(grid, axes) <= each
            except ValueError:  # a grid that this work cannot have
                return False

        smaller = _largest_grid(self.grid, axes, does) if self.grid_is_free else None
        if smaller is not None:
            yield f"a grid of {shown(smaller)}"
        for hosts in range(2, MOST_HOSTS + 1):
            ranks = hosts * together
            try:
                mesh = parse_mesh(self.mesh_of(ranks), batched=True)
            except ValueError:
                continue
            if self.memory_at(self.grid, mesh) <= each:
                yield f"{ranks} ranks on {hosts} hosts like this"
                return


def shown(grid: Grid) -> str:
    """Returns a grid as a run file has it, such as "512" or "[512, 512, 256]"."""
    return str(grid[0]) if len(set(grid)) == 1 else str(list(grid))


def _largest_grid(grid: Grid, axes: dict[str, int], fits: Callable[[Grid], bool]) -> Grid | None:
    """Returns the largest grid of the same proportions that fits; None if none does."""
    units = math.gcd(*grid)
    nx, ny, nz = (n // units for n in grid)
    ranks, batch = math.prod(axes.values()), axes.get("replica", 1)
    smaller = [(nx * n, ny * n, nz * n) for n in range(units - 1, 0, -1)]
    for spacing in (SPACING, 2):
        for sides in smaller:
            even = min(sides) >= 4 and not any(n % spacing for n in sides)
            if even and not misfits(axes, sides, ranks, batch) and fits(sides):
                return sides
    return None
