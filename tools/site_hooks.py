"""What MkDocs does besides its own work when it builds the documentation (see mkdocs.yml).

- docs/tutorials/*.py are executed and become pages.
- Reference pages are made from declarations.
- Links to files outside docs/ lead to pages that show these files.
- Equations become MathML, so that no script is needed.

Names of functions are those of MkDocs' events.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
from pathlib import Path
from typing import Any

import ziamath
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import flowpm_dist
import site_equations
import site_reference
import site_tutorials

ROOT = Path(__file__).resolve().parent.parent
FONT = "fonts/STIXTwoMath-Regular.ttf"
# Files of the project that are pages of the site, besides docs/.
PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
ALIASES = {"README.md": "index.md", **PAGES}
TEXTS = {".py": "python", ".toml": "toml", ".cc": "cpp", ".h": "cpp", ".json": "json", ".sh": "sh"}
LINK = re.compile(r"(?P<before>\]\()(?P<path>[^)\s#:]+)(?P<anchor>#[^)\s]*)?(?P<after>\))")
HIDDEN = re.compile(r"^<!-- test: .*?-->\n?", re.M | re.S)
FENCE = re.compile(r"^ *(`{3,}|~{3,})")
ITEM = re.compile(r"^ *([-*+]|\d+\.) +\S")


def on_config(config: Any) -> Any:
    """Show the version at the foot of each page."""
    version = f"flowpm_dist {flowpm_dist.__version__}"
    command = ["git", "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    commit = f", commit {result.stdout.strip()}" if result.returncode == 0 else ""
    config.copyright = f"{version}{commit}. MIT licence."
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made: tutorials, reference, and files that pages link to."""
    docs = Path(config.docs_dir)
    made = site_reference.pages()
    made |= {uri: (ROOT / name).read_text() for name, uri in PAGES.items()}
    for uri, text in made.items():
        files.append(File.generated(config, uri, content=text))
    try:
        tutorials = site_tutorials.pages(sorted((docs / "tutorials").glob("*.py")))
    except site_tutorials.TutorialError as error:
        raise PluginError(str(error)) from None
    for path, executed in tutorials.items():
        uri = path.relative_to(docs).as_posix()
        if (script := files.get_file_from_path(uri)) is not None:
            files.remove(script)
        page = posixpath.splitext(uri)[0] + ".md"
        files.append(File.generated(config, page, content=executed.markdown))
        for name, content in executed.files.items():
            files.append(File.generated(config, f"tutorials/{name}", content=content))
    font = (Path(ziamath.__file__).parent / FONT).read_bytes()
    files.append(File.generated(config, f"assets/{posixpath.basename(FONT)}", content=font))
    for file in list(files.documentation_pages()):
        for target in _outside(file):
            if files.get_file_from_path(_shown(target)) is None:
                files.append(File.generated(config, _shown(target), content=_listing(target)))
    config.nav = _expanded(config.nav, sorted(made, key=_index_first))
    return files


def _index_first(uri: str) -> tuple[str, bool, str]:
    folder, name = posixpath.split(uri)
    order = list(site_reference.JOBS).index(name[:-3]) if folder.endswith("run_files") else 0
    return folder, name != "index.md", f"{order}{name[:-3]}"


def _entry(uri: str) -> Any:
    """Returns the entry of a page in the navigation; packages have short names there."""
    name = posixpath.basename(uri)[:-3]
    short = name.removeprefix("flowpm_dist.")
    return uri if short == name else {short: uri}


def _expanded(nav: Any, uris: list[str]) -> Any:
    """Returns the navigation with the pages of folders that are made, named as "FOLDER/*"."""
    if isinstance(nav, dict):
        return {title: _expanded(inner, uris) for title, inner in nav.items()}
    if isinstance(nav, list):
        found = []
        for each in nav:
            if isinstance(each, str) and each.endswith("/*"):
                found += [_entry(uri) for uri in uris if posixpath.dirname(uri) == each[:-2]]
            else:
                found.append(_expanded(each, uris))
        return found
    return nav


def _source(uri: str) -> str:
    """Returns the path in the project of the file that a page was written as."""
    return next((name for name, page in PAGES.items() if page == uri), f"docs/{uri}")


def _target(path: str, uri: str) -> str:
    """Returns the path in the project of what a link of a page leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(_source(uri)), path))


def _outside(file: File) -> list[str]:
    """Returns the files outside docs/ that a page links to, as paths in the project."""
    targets = [_target(link["path"], file.src_uri) for link in _links(file.content_string)]
    return [each for each in targets if _is_outside(each)]


def _is_outside(target: str) -> bool:
    inside = target.startswith(("docs/", "../")) or target in ALIASES
    return not inside and (ROOT / target).is_file()


def _shown(target: str) -> str:
    """Returns the page that shows a file outside docs/."""
    return f"files/{target}.md"


def _listing(target: str) -> str:
    """Returns the page that shows a file."""
    text = (ROOT / target).read_text(errors="replace").rstrip("\n")
    language = TEXTS.get(posixpath.splitext(target)[1], "text")
    return f"---\nsearch:\n  exclude: true\n---\n# `{target}`\n\n`````{language}\n{text}\n`````\n"


def _paragraphs(markdown: str) -> list[tuple[bool, str]]:
    """Returns the lines of a page, each with whether it is text and not code."""
    found, fence = [], ""
    for line in markdown.split("\n"):
        match = FENCE.match(line)
        if match and not fence:
            fence = match[1]
            found.append((False, line))
        elif match and line.strip() == match[1] and match[1].startswith(fence):
            fence = ""
            found.append((False, line))
        else:
            found.append((not fence, line))
    return found


def _links(markdown: str) -> list[re.Match[str]]:
    lines = [line for is_text, line in _paragraphs(markdown) if is_text]
    return list(LINK.finditer("\n".join(lines)))


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Mend what reads differently here than in the project's folder: links, lists and comments."""
    uri = page.file.src_uri
    lines, before = [], ""
    for is_text, line in _paragraphs(HIDDEN.sub("", markdown)):
        if is_text:
            line = LINK.sub(lambda link: _mended(link, uri), line)
            # A list may follow a paragraph without an empty line, as on GitHub.
            if ITEM.match(line) and before.strip() and not _in_list(before):
                lines.append("")
        lines.append(line)
        before = line if is_text else ""
    return "\n".join(lines)


def _in_list(line: str) -> bool:
    return bool(ITEM.match(line)) or line.startswith((" ", "\t"))


def _mended(link: re.Match[str], uri: str) -> str:
    """Returns a link with the path of a page of the site."""
    target = _target(link["path"], uri)
    if target in ALIASES:
        there = ALIASES[target]
    elif re.fullmatch(r"docs/tutorials/\w+\.py", target):
        there = target[len("docs/") : -len(".py")] + ".md"
    elif _is_outside(target):
        there = _shown(target)
    elif target.startswith("docs/"):
        there = target[len("docs/") :]
    else:
        return link[0]
    path = posixpath.relpath(there, posixpath.dirname(uri) or ".")
    return f"{link['before']}{path}{link['anchor'] or ''}{link['after']}"


def on_page_content(html: str, page: Page, config: Any, files: Files) -> str:
    """Turn equations into MathML."""
    try:
        return site_equations.with_mathml(html)
    except site_equations.EquationError as error:
        raise PluginError(f"{page.file.src_uri}: {error}") from None
