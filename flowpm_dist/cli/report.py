"""The command `flowpm-dist report`: the report of a run again, or a page that compares several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowpm_dist.cli.common import ENDS, planning, printable, refuse_after
from flowpm_dist.cli.runs import runs_in
from flowpm_dist.jobs.folder import REPORT
from flowpm_dist.jobs.report import check_reportable, left_out, page, write_page
from meshimpl import launch

EXAMPLE = "flowpm-dist report one-training another"
COMPARISON = "comparison.html"


def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Runs, or folders of runs.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help=f"The page; by default DIR/{REPORT}, or {COMPARISON} of several."
        ),
    ] = None,
) -> None:
    """Write a page about a run, or one that compares runs: settings, pictures, tables, timings."""
    records = runs_in(folders)
    if output is None:
        output = records[0].folder / REPORT if len(records) == 1 else Path(COMPARISON)
    if launch.detect().rank:
        return
    with planning():
        for record in records:
            check_reportable(record)
    try:
        write_page(output, page(records))
    except ENDS as error:
        refuse_after(error)
    print(printable("\n".join(filter(None, [f"Report in {output}", left_out(records)]))))
