"""What a user says of a job for a batch system: its time limit, and the jobs of an array."""

from __future__ import annotations

import itertools
import re
from collections.abc import Container, Iterable, Sequence

from flowpm_dist.io.errors import UserError

MANY = 10_000
"""Jobs of the largest array."""
_TIME = re.compile(
    r"(?:(?P<days>\d+)-(?P<hours>\d+)(?::(?P<minutes>\d+)(?::(?P<seconds>\d+))?)?)"
    r"|(?:(?P<h>\d+):)?(?P<m>\d+):(?P<s>\d+)|(?P<alone>\d+)"
)
_RANGE = re.compile(r"(\d+)-(\d+)")


def seconds_of(limit: str) -> int:
    """Returns a time limit of sbatch, such as "02:00:00", "90" (minutes) or "1-12" [s].

    Raises:
        UserError: sbatch would not take it.
    """
    found = _TIME.fullmatch(limit)
    if found is None:
        raise UserError(f"--time {limit}: must be as sbatch takes it, such as 02:00:00")
    days, hours, minutes, seconds, h, m, s, alone = (int(n or 0) for n in found.groups())
    if max(minutes, seconds, s, m if found["h"] else 0) > 59 or hours > 23:
        raise UserError(f"--time {limit}: has more than 59 minutes or seconds, or 23 hours")
    return 86400 * days + 3600 * (hours + h) + 60 * (minutes + m + alone) + seconds + s


def check_array(settings: Container[str], fixed: Iterable[str]) -> None:
    """Checks that no key is given both by an array and for all of its jobs.

    Args:
        settings: keys that differ between jobs.
        fixed: keys given by --set.

    Raises:
        UserError: one is.
    """
    if both := [key for key in fixed if key in settings]:
        raise UserError(f"{both[0]} is given by --array and by --set: leave one of them out")


def array_settings(texts: Sequence[str]) -> dict[str, list[str]]:
    """Returns the value of each key in each job of an array.

    Args:
        texts: such as "initial.seed=0-9" or "evolution.steps=5,10".

    Raises:
        UserError: a text is not of this kind, or there would be too many jobs.
    """
    values: dict[str, list[str]] = {}
    for text in texts:
        key, _, given = text.partition("=")
        span = _RANGE.fullmatch(given)
        if span and int(span[1]) > int(span[2]):
            raise UserError(f"--array {text}: {span[1]} is above {span[2]}")
        if span and int(span[2]) - int(span[1]) >= MANY:
            raise UserError(f"--array {text}: more than {MANY} jobs")
        found = list(map(str, range(int(span[1]), int(span[2]) + 1))) if span else given.split(",")
        if not re.fullmatch(r"\w+\.\w+", key) or not all(found):
            raise UserError(
                f"--array {text}: must be SECTION.KEY=VALUES, such as initial.seed=0-9 or "
                "evolution.steps=5,10"
            )
        if key in values:
            raise UserError(f"--array {text}: {key} is given twice")
        if len(set(found)) < len(found):
            raise UserError(f"--array {text}: has a value twice")
        values[key] = found
    combined = list(itertools.islice(itertools.product(*values.values()), MANY + 1))
    if len(combined) > MANY:
        raise UserError(f"--array: more than {MANY} jobs")
    return {key: [row[i] for row in combined] for i, key in enumerate(values)}
