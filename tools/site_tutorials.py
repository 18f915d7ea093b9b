"""Execute the tutorials of the documentation, and turn them into pages with their results.

A tutorial is a script in jupytext's percent format, docs/tutorials/NAME.py. This program executes
tutorials and prints their times; a cell that fails ends it with status 1:

    python tools/site_tutorials.py docs/tutorials/first_universe.py

An executed tutorial is kept below build/tutorials, under a name made from a checksum of all that it
depends on: its text, the two packages, the examples and the pinned packages.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "build" / "tutorials"
WORKERS = 2
# A cell that takes longer hangs: the whole of a tutorial takes seconds.
CELL_SECONDS = 600
SOURCES = ("flowpm_dist", "meshimpl", "examples")
SUFFIXES = {".py", ".cc", ".h", ".json", ".toml", ".txt", ".sbatch"}
HEAD = re.compile(r"\A# ---\n(#.*\n)*?# ---\n")
# The first cell, which the page does not show.
BEFORE = """\
%matplotlib inline
import matplotlib
matplotlib.rcParams.update({"figure.dpi": 150, "savefig.dpi": 150})
"""


class TutorialError(Exception):
    """A cell of a tutorial failed; the message is the report of its kernel."""


@dataclass
class Executed:
    """A tutorial with its results.

    Attributes:
        markdown: the page.
        files: name of a file next to the page -> its contents.
    """

    markdown: str
    files: dict[str, bytes] = field(default_factory=dict)


def checksum(path: Path) -> str:
    """Returns a checksum of a tutorial and of all that its results depend on."""
    files = [path, Path(__file__), *ROOT.glob("requirements*.txt")]
    for folder in SOURCES:
        inside = (ROOT / folder).rglob("*")
        files += sorted(each for each in inside if each.suffix in SUFFIXES and each.is_file())
    digest = hashlib.sha256()
    for each in files:
        name = each.relative_to(ROOT) if each.is_relative_to(ROOT) else each.name
        digest.update(str(name).encode() + b"\0" + each.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def read(path: Path) -> Any:
    """Returns the notebook of a tutorial, not yet executed and without the settings at its head."""
    return jupytext.reads(HEAD.sub("", path.read_text(), count=1), fmt="py:percent")


def execute(path: Path) -> Any:
    """Returns the executed notebook of a tutorial.

    Raises:
        TutorialError: a cell failed.
    """
    notebook = read(path)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(BEFORE))
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    programs = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PATH": os.pathsep.join(filter(None, programs)),
    }
    env.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # At the size of a tutorial, XLA takes longer to optimise than the code takes to run.
    env.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    with tempfile.TemporaryDirectory(prefix="tutorial-") as folder:
        # By files, which no other user of the machine can read.
        kernel = AsyncKernelManager(transport="ipc", ip=f"{folder}/kernel")
        client = NotebookClient(
            notebook, km=kernel, timeout=CELL_SECONDS, resources={"metadata": {"path": folder}}
        )
        try:
            client.execute(env=env)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            raise TutorialError(f"{path}: {error}") from None
    del notebook.cells[0]
    return notebook


def executed(path: Path) -> Path:
    """Returns the path of the executed notebook, which is made unless it is kept.

    Raises:
        TutorialError: a cell failed.
    """
    kept = KEPT / f"{path.stem}-{checksum(path)}.ipynb"
    if not kept.exists():
        # In a process of its own, so that several are executed at the same time.
        command = [sys.executable, __file__, "--write", str(kept), str(path)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise TutorialError((result.stderr or result.stdout).strip())
        print(result.stdout.strip(), flush=True)
    for older in KEPT.glob(f"{path.stem}-*.ipynb"):
        if older != kept and re.fullmatch(r"-[0-9a-f]{16}", older.stem[len(path.stem) :]):
            older.unlink(missing_ok=True)
    return kept


def write(path: Path, kept: Path) -> None:
    """Execute a tutorial and write its notebook.

    Raises:
        TutorialError: a cell failed.
    """
    started = time.monotonic()
    notebook = execute(path)
    kept.parent.mkdir(parents=True, exist_ok=True)
    partial = kept.with_suffix(f".{os.getpid()}.part")
    nbformat.write(notebook, partial)
    partial.replace(kept)
    print(f"{path.name}: executed in {time.monotonic() - started:.0f} s", flush=True)


def pages(paths: list[Path]) -> dict[Path, Executed]:
    """Returns the page of each tutorial; two are executed at a time.

    Raises:
        TutorialError: a cell failed.
    """
    with ThreadPoolExecutor(WORKERS) as workers:
        notebooks = list(workers.map(executed, paths))
    return {
        path: page(nbformat.read(kept, as_version=4), path.stem)
        for path, kept in zip(paths, notebooks, strict=True)
    }


def page(notebook: Any, name: str) -> Executed:
    """Returns the page of an executed notebook.

    Args:
        notebook: the notebook.
        name: name of the page without its suffix; its files are named after it.
    """
    found = Executed("")
    parts = list[str]()
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        elif cell.source.strip():
            parts.append(_fence(cell.source, "python"))
            parts += [shown for each in cell.outputs if (shown := _output(each, name, found))]
    title = parts[0].splitlines()[0] if parts else ""
    if title.startswith("# "):
        download = f"[Download this page as a notebook]({name}.ipynb){{ .download }}"
        parts[0] = parts[0].replace(title, f"{title}\n\n{download}\n", 1)
    found.markdown = "\n\n".join(parts) + "\n"
    found.files[f"{name}.ipynb"] = nbformat.writes(notebook).encode()
    return found


def _output(output: Any, name: str, found: Executed) -> str:
    """Returns the Markdown of a result of a cell; pictures are added to the page's files."""
    if output.output_type == "stream":
        if output.name != "stdout":
            return ""
        # A progress bar overwrites its line: the last state stays.
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in output.text.split("\n")]
        return _fence("\n".join(lines).strip("\n"), "text", "output")
    data = output.get("data", {})
    if "image/png" in data:
        pictures = sum(each.endswith(".png") for each in found.files)
        picture = f"{name}_{pictures + 1}.png"
        found.files[picture] = base64.b64decode(data["image/png"])
        return f"![Figure {pictures + 1}, drawn by the code above]({picture}){{ .figure }}"
    if "text/html" in data:
        # Without empty lines, so that Markdown takes it as one block.
        html = re.sub(r"\n\s*\n", "\n", data["text/html"].strip())
        return f'<div class="output-html">\n{html}\n</div>'
    return _fence(data["text/plain"], "text", "output") if "text/plain" in data else ""


def _fence(text: str, language: str, style: str = "") -> str:
    ticks = max([2, *map(len, re.findall("`+", text))]) + 1
    head = f"{{ .{language} .{style} }}" if style else language
    return f"{'`' * ticks}{head}\n{text}\n{'`' * ticks}" if text else ""


def main() -> int:
    """Execute the tutorials of the command line, return the exit status."""
    arguments = sys.argv[1:]
    try:
        if arguments[:1] == ["--write"]:
            write(Path(arguments[2]).resolve(), Path(arguments[1]))
        else:
            paths = [Path(each) for each in arguments]
            pages([path.resolve() for path in paths or (ROOT / "docs/tutorials").glob("*.py")])
    except TutorialError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
