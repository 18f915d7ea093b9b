"""The command `flowpm-dist runs`: a list of run folders, and what differs between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from flowpm_dist.cli.common import planning, printable, refuse
from flowpm_dist.jobs.job import records_in
from flowpm_dist.jobs.results import RunRecord
from flowpm_dist.options import as_written

EXAMPLE = "flowpm-dist runs one-training another --compare"


def runs(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="DIR...", help="Runs, or folders of runs; by default this one."),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Show in what their run files and results differ.")
    ] = False,
) -> None:
    """List runs with their state, their steps and their main results."""
    records = runs_in(folders or [Path()])
    if compare and len(records) < 2:
        refuse(f"{records[0].folder} is the only run there: give two or more to compare")
    _print(comparison(records) if compare else listed(records))


def runs_in(folders: Sequence[Path]) -> list[RunRecord]:
    """Returns the runs in some folders, or exits with a message if there is none."""
    with planning():
        for folder in folders:
            if not folder.is_dir():
                refuse(f"{folder}: there is no such folder")
        records = {r.folder.resolve(): r for f in folders for r in records_in(f)}
    if not records:
        refuse(f"no runs in {', '.join(map(str, folders))}: give the folders that commands wrote")
    return list(records.values())


def listed(records: Sequence[RunRecord]) -> list[list[str]]:
    """Returns the rows of a list of runs, the headings first."""
    rows = [["run", "kind", "state", "done", "when", "results"]]
    for record in records:
        results = ", ".join(f"{name} {_text(value)}" for name, value in record.results.items())
        when = f"{record.when:%Y-%m-%d %H:%M}"
        rows.append(
            [str(record.folder), record.kind, record.state, record.steps, when, results or "-"]
        )
    return rows


def comparison(records: Sequence[RunRecord]) -> list[list[str]]:
    """Returns the rows of a table of what differs between runs, the headings first."""
    rows = [["", *(str(record.folder) for record in records)]]
    for name, attribute in {"kind": "kind", "state": "state", "done": "steps"}.items():
        rows += _differing(name, [getattr(record, attribute) for record in records])
    rows += _of_keys([record.settings for record in records], as_written)
    rows += _of_keys([record.results for record in records], _text)
    return rows


def _of_keys(
    tables: Sequence[Mapping[str, Any]], written: Callable[[Any], str]
) -> Iterator[list[str]]:
    for key in dict.fromkeys(key for table in tables for key in table):
        yield from _differing(key, [written(t[key]) if key in t else "-" for t in tables])


def _differing(name: str, values: Sequence[str]) -> list[list[str]]:
    return [[name, *values]] if len(set(values)) > 1 else []


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _print(rows: Sequence[Sequence[str]]) -> None:
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
