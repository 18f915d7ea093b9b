"""The run file of a job that counts."""

from collections.abc import Iterator

from pydantic import Field

from flowpm_dist.grid.options import MeshOptions
from flowpm_dist.jobs.run_file import RunFile
from flowpm_dist.options import Options, Problem, count


class CountSection(Options):
    """What to count.

    Attributes:
        steps: number of steps, in each of which every rank counts one.
        signal_after: step after which a rank is sent a signal; 0 for none.
    """

    steps: int = count(4)
    signal_after: int = Field(default=0, ge=0, description="a whole number")


class CountOptions(RunFile):
    """A whole run file."""

    count: CountSection
    mesh: MeshOptions

    may_differ = ("count.signal_after",)

    def problems(self) -> Iterator[Problem]:
        if self.count.signal_after > self.count.steps:
            yield self.problem("count.signal_after", f"must be at most {self.count.steps}")
