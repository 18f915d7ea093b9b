"""Results of the doctor's checks, and how they are shown."""

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


def print_checks(checks: Sequence[Check], console: Console | None = None) -> None:
    """Print a table of all checks, and below it a line for each that has failed."""
    console = console or Console()
    table = Table(box=None, show_header=False, pad_edge=False)
    for check in checks:
        mark = "[green]ok[/]" if check.ok else "[red]missing[/]"
        table.add_row(mark, check.name, check.value)
    console.print(table)
    wrong = [check for check in checks if not check.ok]
    for check in wrong:
        console.print(f"[bold red]{check.name}[/]: {check.remedy}", soft_wrap=True)
    if not wrong:
        console.print("Nothing is missing.")
