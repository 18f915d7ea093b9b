"""What is always the same on a cluster: the site file of `flowpm-dist submit`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from flowpm_dist.config.checks import ParsedRunFile, Problem, check_sections, read_table
from flowpm_dist.options import Options, listed

Texts = Annotated[tuple[str, ...], BeforeValidator(listed)]


class SiteOptions(Options):
    """The section [site] of a site file."""

    launcher: Literal["srun", "mpirun"] = Field(
        default="srun", description='what starts the ranks, "srun" or "mpirun"'
    )
    mpi: str = Field(
        default="pmix",
        pattern=r"^\w+$",
        description='the value of srun\'s --mpi, such as "pmix"',
    )
    setup: Texts = Field(
        default=(), description='a list of shell lines, such as ["module load gcc openmpi"]'
    )
    program: str = Field(
        default="",
        description="the command flowpm-dist, with its path as it is on the nodes; by default that "
        "of this Python",
    )
    partition: str = Field(default="", description="the name of a partition")
    account: str = Field(default="", description="the name of an account")
    qos: str = Field(default="", description="the name of a quality of service")
    directives: Texts = Field(
        default=(), description='a list of further options of sbatch, such as "--exclusive"'
    )
    threads: int = Field(
        default=0, ge=0, description="cores of each rank; 0 leaves them to Slurm and the launcher"
    )
    gpus_per_rank: int = Field(
        default=0, ge=0, le=1, description="GPUs of each rank, of which it uses one: 0 or 1"
    )
    warn: int = Field(
        default=120,
        ge=10,
        le=65535,
        description="seconds before the time limit at which a job is asked to stop, 10 to 65535",
    )
    restarts: int = Field(
        default=100, ge=0, description="how often a job is queued again, a whole number"
    )


def _hints(file: ParsedRunFile) -> Iterable[Problem]:
    for directive in file.value("site", "directives") or ():
        if not directive.startswith("-"):
            yield Problem("site.directives", f"= {directive!r}: must begin with --")
    program = file.value("site", "program") or ""
    if program.startswith("~") or "$" in program:
        yield Problem("site.program", f"= {program!r}: must be a path without ~ and $")


_GPUS = re.compile(
    r"--gpus-per-node[= ](?:[\w.-]+:)?(\d+)|--gres[= ](?:\S*,)?gpu"
    r"(?::[\w.-]*[^\d:,][\w.-]*)?(?::(\d+))?(?=,|$)"
)


def gpus_of_a_node(directives: Iterable[str]) -> int | None:
    """Returns the GPUs of a node for which options of sbatch ask; None if they do not say.

    Args:
        directives: such as "--gres=gpu:a100:4".
    """
    for directive in directives:
        if found := _GPUS.match(directive):
            return int(found[1] or found[2] or 1)
    return None


def default_site_file() -> Path:
    """Returns the path of the user's site file, which may be missing."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(base) / "flowpm-dist" / "site.toml"


def load_site(path: Path | None) -> SiteOptions:
    """Returns what a site file says.

    Args:
        path: of the file; None takes the user's own if there is one.

    Raises:
        ConfigError: it has mistakes.
    """
    if path is None:
        path = default_site_file()
        if not path.exists():
            return SiteOptions()
    models: dict[str, type[Options]] = {"site": SiteOptions}
    sections: dict[str, Any] = check_sections(read_table(path), path, models, [_hints])
    found: SiteOptions = sections["site"]
    return found
