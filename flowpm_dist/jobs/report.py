"""The report of a job: one HTML page with what its folder holds, or what several folders hold.

A page needs no other file: pictures and style are inside, and there is no script. It shows the
pictures (.png), tables (.csv) and numbers (.json) of a folder, the run file, and `PROVENANCE`. The
kinds of the files alone decide what a page shows, so a new kind of job has a report as well.
Folders in a folder are included, but not those with a report of their own. Links that lead out of
a folder are left out: a page may be published, and a folder may come from somebody else.

Nothing here imports TensorFlow or matplotlib.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import flowpm_dist
from flowpm_dist.io.errors import UserError, decoration
from flowpm_dist.io.files import GENERATOR, read_json, versions, write_json, write_text
from flowpm_dist.jobs.folder import PROVENANCE, REPORT, OutputError
from flowpm_dist.jobs.html import MARK, bars, card, in_groups, note, rows_of, whole_page
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.results import RunRecord
from flowpm_dist.options import as_written
from flowpm_dist.options.html import Html, element, png_source
from flowpm_dist.options.regular_files import is_inside, only_in, read_bytes, read_text
from meshimpl import launch

ROWS = 16
"""Rows of a table that are shown; a longer table shows rows at equal distances."""
LARGEST_PICTURE = 2**23
"""Size of the largest picture that is put into a page [bytes]."""
TIMINGS = ("timings.json", "phases.json")
"""Files of durations in seconds. Mappings from names to durations are drawn as bars."""
DEPTH = 4
"""Depth to which the numbers of a .json file are listed."""

_SEALS = (b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82")
"""The first and the last bytes of a PNG."""


def leave_report(
    folder: Path,
    command: str,
    mesh: str,
    progress: Progress,
    read: Callable[[], RunRecord | None],
    usage: Mapping[str, Any],
    description: str = "",
) -> None:
    """Write `PROVENANCE` and the report of a job that is complete. On rank 0.

    A report that cannot be made is a warning: it does not fail the job.

    Args:
        folder: the folder of the job.
        command: name of the command.
        mesh: shape of the mesh of ranks.
        progress: the display of the job, which knows its warnings.
        read: returns the record of the folder, see `JobFolder.record`.
        usage: energy and memory of the job, see `Usage.of_job`.
        description: a line that says what the work was.
    """
    with decoration("report", progress.warn, f"To write it: flowpm-dist report {folder}"):
        about = {
            "generator": GENERATOR,
            "command": command,
            **({"description": description} if description else {}),
            "date": datetime.now(UTC).isoformat(" ", timespec="seconds"),
            "duration [s]": round(progress.seconds, 1),
            "host": socket.gethostname(),
            "ranks": launch.detect().size,
            "ranks on this host": launch.detect().local_size,
            "threads per rank": launch.threads_per_rank(),
            "mesh": mesh,
            **usage,
            **({"commit": checkout} if (checkout := commit()) else {}),
            "versions": versions(),
            "warnings": list(dict.fromkeys(progress.warnings)),
        }
        write_json(folder / PROVENANCE, about)
        with only_in(folder):
            record = read()
        if record is not None:
            # The job still holds its folder, and therefore seems to be running.
            write_page(folder / REPORT, page([dataclasses.replace(record, state="complete")]))
            progress.say(f"report in {folder / REPORT}")


@functools.cache
def commit() -> str | None:
    """Returns the commit of the checkout that this package is in; None if it is in none.

    It is read from git's log of commits that were checked out. Running git would start a process,
    which ranks under MPI must not do.
    """
    git = Path(flowpm_dist.__file__).parents[1] / ".git"
    try:
        if git.is_file():  # a work tree beside the repository
            git = git.parent / read_text(git).partition("gitdir:")[2].strip()
        return read_text(git / "logs" / "HEAD").splitlines()[-1].split()[1]
    except (OSError, ValueError, IndexError):
        return None


def write_page(path: Path, text: str) -> None:
    """Write a page; the only file that it may replace is an older page.

    Raises:
        OutputError: the file is no page of this kind.
        WriteError: it cannot be written.
    """
    if os.path.lexists(path) and not (path.is_file() and _is_ours(path)):
        raise OutputError(f"{path} is no report of flowpm-dist: give another --output, or move it")
    # Characters that are not ASCII become references: so the page can be written anywhere.
    write_text(path, text.encode("ascii", "xmlcharrefreplace").decode("ascii"))


def _is_ours(path: Path) -> bool:
    with path.open("rb") as file:
        return MARK.encode() in file.read(1000)


def check_reportable(record: RunRecord) -> None:
    """Check that a page about a folder would show something.

    Raises:
        UserError: its files are damaged, or it has no results yet.
    """
    if record.state == "damaged":
        raise UserError(f"{record.folder} is damaged: {record.results.get('error:', '')}")
    if record.state != "complete" and not any(_files(record.folder, e) for e in (".png", ".csv")):
        done = f" after {record.steps}" if record.steps else ""
        raise UserError(
            f"{record.folder} holds no results yet, as its {record.kind} is {record.state}{done}"
        )


def page(records: Sequence[RunRecord]) -> str:
    """Returns the report of a folder, or a page that compares several.

    Args:
        records: what is known of each folder; see `check_reportable`.
    """
    names, several = [str(record.folder) for record in records], len(records) > 1
    about = [_json(record.folder, PROVENANCE) for record in records]
    facts = [
        {"kind": r.kind, "state": r.state, "done": r.steps or "-", **r.results} for r in records
    ]
    settings = [
        {key: as_written(value) for key, value in record.settings.items()} for record in records
    ]
    sections = {
        "Warnings": _beside(names, [_warnings(each) for each in about]),
        "Results": _facts(names, facts),
        "Pictures": _by_file(names, records, ".png", _picture),
        "Tables": _by_file(names, records, ".csv", _table),
        "Timings": _timings(names, records),
        "Numbers": _by_file(names, records, ".json", _numbers),
        "Settings": _facts(names, settings),
        "Provenance": _facts(
            names, [_provenance(*each) for each in zip(records, about, strict=True)]
        ),
    }
    shown = {title: content for title, content in sections.items() if content}
    title = f"{len(records)} runs" if several else records[0].folder.resolve().name
    state = ", ".join(dict.fromkeys(f"{record.kind}, {record.state}" for record in records))
    when = f"{max(record.when for record in records):%Y-%m-%d %H:%M}"
    work = "" if several else str(about[0].get("description", ""))
    lines = [f"{state}; {when}", work, ", ".join(names) if several else "", left_out(records)]
    return whole_page(title, [*filter(None, lines)], shown)


def left_out(records: Sequence[RunRecord]) -> str:
    """Returns a line about the links that lead out of their folders; empty if there are none."""
    outside = [
        str(path)
        for record in records
        for pattern in ("[!.]*", "[!.]*/[!.]*")
        for path in sorted(record.folder.glob(pattern))
        if path.is_symlink()
        and is_inside(record.folder, path.parent)
        and not is_inside(record.folder, path)
    ]
    return f"Left out, as links lead out of the folder: {', '.join(outside)}" if outside else ""


def _json(folder: Path, name: str) -> dict[str, Any]:
    """Returns what `read_json` does for a file in a folder; nothing if a link leads out of it."""
    return read_json(folder / name) if is_inside(folder, folder / name) else {}


def _files(folder: Path, ending: str) -> dict[str, Path]:
    """Returns the files with an ending, by name, without those in folders with a report."""
    deeper = [
        path
        for path in folder.glob(f"[!.]*/*{ending}")
        if path.parent.suffix != ".zarr" and not (path.parent / PROVENANCE).exists()
    ]
    paths = [*sorted(folder.glob(f"[!.]*{ending}")), *sorted(deeper)]
    return {str(path.relative_to(folder)): path for path in paths if is_inside(folder, path)}


def _beside(names: Sequence[str], parts: Sequence[Html], caption: str = "") -> Html:
    """Returns one part of each run's page, side by side; nothing if no run has the part.

    Args:
        names: names of the runs.
        parts: what is shown of each; empty where there is nothing.
        caption: the name of a file, if it is in one.
    """
    if not any(parts):
        return Html()
    if len(names) == 1:
        return card(caption, parts[0])
    figures = (card(*each) for each in zip(names, (p or note("none") for p in parts), strict=True))
    heading = element("h3", caption) if caption else Html()
    return Html(heading + element("div", *figures, class_="grid beside"))


def _by_file(
    names: Sequence[str],
    records: Sequence[RunRecord],
    ending: str,
    show: Callable[[Path], Html],
) -> Html:
    """Shows the files with an ending; files of the same name in several runs are side by side."""
    of_runs = [_files(record.folder, ending) for record in records]
    shown = []
    for name in dict.fromkeys(name for files in of_runs for name in files):
        parts = [show(files[name]) if name in files else Html() for files in of_runs]
        captions = (record.captions.get(Path(name).name) for record in records)
        sentence = next(filter(None, captions), "")
        shown.append(_beside(names, parts, f"{sentence} ({name})" if sentence else name))
    if len(names) > 1:
        return Html("".join(shown))
    kind = "grid pictures" if ending == ".png" else "grid"
    return element("div", *shown, class_=kind) if any(shown) else Html()


def _facts(names: Sequence[str], tables: Sequence[Mapping[str, Any]]) -> Html:
    """Returns values by name in a column for each run; those that are equal below the others."""
    keys = list(dict.fromkeys(key for table in tables for key in table))
    if not keys:
        return Html()
    rows = {key: [_text(table[key]) if key in table else "-" for table in tables] for key in keys}
    if len(names) == 1:
        return in_groups(rows)
    same = {key: row[:1] for key, row in rows.items() if len(set(row)) == 1}
    differing = {key: row for key, row in rows.items() if key not in same}
    shown = element("div", rows_of(["", *names], differing), class_="card") if differing else Html()
    if same:
        title = f"The same in all runs: {len(same)}"
        shown = Html(shown + element("details", element("summary", title), rows_of([], same)))
    return shown


def _text(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _warnings(about: Mapping[str, Any]) -> Html:
    warnings = about.get("warnings")
    if not isinstance(warnings, list) or not warnings:
        return Html()
    return element("ul", *(element("li", str(text)) for text in warnings), class_="warnings")


def _picture(path: Path) -> Html:
    try:
        data = read_bytes(path, LARGEST_PICTURE)
    except OSError as error:
        return note(f"cannot be read: {error.strerror}")
    if not (data.startswith(_SEALS[0]) and data.endswith(_SEALS[1])):
        return note("damaged: not a whole PNG")
    return element("img", src=png_source(data), alt=path.stem.replace("_", " "))


def _table(path: Path) -> Html:
    try:
        head, *rows = [row for row in csv.reader(read_text(path).splitlines()) if row]
    except OSError as error:
        return note(f"cannot be read: {error.strerror}")
    except (ValueError, csv.Error):
        return note("damaged: not a table of comma-separated values")
    count = len(rows)
    # The first row and the last are among them.
    places = [n * (count - 1) // (ROWS - 1) for n in range(ROWS)] if count > ROWS else range(count)
    shown = [[_rounded(cell) for cell in rows[n]] for n in places]
    classes = [
        "number" if all(_number(row[n]) is not None for row in shown if n < len(row) and row[n])
        else "" for n in range(max(map(len, [head, *shown])))
    ]  # fmt: skip

    def line(kind: str, cells: Sequence[str]) -> Html:
        named = zip(cells, classes, strict=False)
        return element("tr", *(element(kind, cell, class_=name) for cell, name in named))

    table = element(
        "table",
        element("thead", line("th", head)),
        element("tbody", *(line("td", row) for row in shown)),
    )
    remark = note(f"{len(shown)} of {count} rows") if len(shown) < count else Html()
    return Html(element("div", table, class_="wide data") + remark)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _rounded(cell: str) -> str:
    """Returns a cell of a table; a number with many places is rounded."""
    value = _number(cell)
    return cell if value is None or len(cell) < 9 or cell.isdigit() else f"{value:.5g}"


def _timings(names: Sequence[str], records: Sequence[RunRecord]) -> Html:
    timings = [
        {key: value for name in TIMINGS for key, value in _json(record.folder, name).items()}
        for record in records
    ]
    drawn = _beside(names, [Html("".join(bars(*each) for each in one.items())) for one in timings])
    return Html(drawn + _facts(names, [_with_units(one) for one in timings]))


def _with_units(timings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the single values in a file of durations; "units" in it has the units by name."""
    units = timings.get("units")
    known = units if isinstance(units, Mapping) else {}
    return {
        f"{key} [{known[key]}]" if key in known else key: value
        for key, value in timings.items()
        if isinstance(value, str | int | float)
    }


def _numbers(path: Path) -> Html:
    """Returns the values in a .json file, folded; nothing for files that other sections show."""
    if path.name in (PROVENANCE, *TIMINGS):
        return Html()
    rows = {key: [_text(value)] for key, value in _flat(read_json(path))}
    if not rows:
        return Html()
    count = f"{len(rows)} value{'s' * (len(rows) > 1)}"
    return element("details", element("summary", count), rows_of([], rows))


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values inside a value of a .json file, with names such as "loss.rhat"."""
    if isinstance(value, Mapping) and name.count(".") < DEPTH:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list | Mapping):
        yield name, f"{len(value)} values"
    elif value is not None:
        yield name, value


def _provenance(record: RunRecord, about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns where a result comes from: what `leave_report` noted, and the seeds."""
    shown = {"date": f"{record.when:%Y-%m-%d %H:%M}", **dict(_flat(about)), "folder": record.folder}
    seeds = {key: value for key, value in record.settings.items() if key.endswith("seed")}
    hidden = ("generator", "warnings")
    return {key: value for key, value in {**shown, **seeds}.items() if key not in hidden}
