"""The checks of `flowpm-dist doctor`, and their table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: what was checked.
        value: what was found.
        ok: whether it works.
        remedy: what to do if it does not.
    """

    name: str
    value: str
    ok: bool = True
    remedy: str = ""


def print_checks(checks: Sequence[Check], console: Console | None = None) -> bool:
    """Print all checks, and below them a line for each that has failed; return whether none has."""
    console = console or Console()
    table = Table(box=None, show_header=False, pad_edge=False)
    for check in checks:
        table.add_row("[green]ok[/]" if check.ok else "[red]missing[/]", check.name, check.value)
    console.print(table)
    wrong = [check for check in checks if not check.ok]
    for check in wrong:
        console.print(f"[bold red]{check.name}[/]: {check.remedy}", soft_wrap=True)
    if not wrong:
        console.print("Nothing is missing.")
    return not wrong
