"""The reference pages of the documentation, made from declarations when the site is built.

Commands come from the options that `flowpm-dist COMMAND --help` shows, and run-file keys from the
models that check run files. The pages on Python come from the `__all__` of the packages, and
mkdocstrings fills them with docstrings.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import re
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.main import get_command

from flowpm_dist.cli.program import app
from flowpm_dist.jobs.job import JOBS, job_class
from flowpm_dist.options import as_written
from flowpm_dist.options.base import flat_variants
from flowpm_dist.options.types import Variants
from meshimpl.imports import import_tensorflow

PACKAGES = ("flowpm_dist", "meshimpl")
INTERNAL = ("flowpm_dist.particle_mesh.kernels", "flowpm_dist.options", "meshimpl.horovod_wheel")
"""Packages whose names are for this project alone."""


def pages() -> dict[str, str]:
    """Returns the pages: path below docs/ -> Markdown."""
    found = {"reference/commands.md": commands()}
    found |= {f"reference/run_files/{name}.md": run_file(name) for name in JOBS}
    packages = list(public_packages())
    found["reference/python/index.md"] = python_index(packages)
    found |= {f"reference/python/{name}.md": python(name, names) for name, names in packages}
    return found


# Commands


def commands() -> str:
    """Returns the page of all commands."""
    program: Any = get_command(app)
    context = program.context_class(program, info_name="flowpm-dist")
    parts = [
        "# Commands",
        "`flowpm-dist COMMAND --help` prints the same in a terminal. The run files of the jobs "
        f"have [pages of their own](run_files/{next(iter(JOBS))}.md).",
        *_command(program, context, heading="## Options before the command"),
    ]
    for name in program.list_commands(context):
        command = program.get_command(context, name)
        inner = command.context_class(command, info_name=name, parent=context)
        parts += [f"## {name}", *_command(command, inner)]
    return "\n\n".join(parts) + "\n"


def _command(command: Any, context: Any, heading: str = "") -> Iterator[str]:
    """Yields the paragraphs of a command."""
    if heading:
        yield heading
    elif command.help:
        yield _plain(command.help)
        usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
        yield f"```text\n{usage}\n```"
    records = [each.get_help_record(context) for each in command.get_params(context)]
    rows = [[f"`{names}`", _cell(_plain(text))] for names, text in filter(None, records)]
    yield _table(["option", "what it does"], rows)
    if command.epilog and not heading:
        yield re.sub(r"\[bold\](.*?)\[/bold\]", r"`\1`", command.epilog)


def _plain(text: str) -> str:
    """Returns a text without the marks of rich."""
    text = re.sub(r"\[/?(bold|dim|italic|green|red|cyan|yellow)\]", "", inspect.cleandoc(text))
    return text.replace("\\[", "[").replace("\b", "").replace("\f", "").strip()


# Run files


def run_file(name: str) -> str:
    """Returns the page of the run file of a job.

    Args:
        name: the command of the job.
    """
    kind = job_class(name)
    model: Any = kind.options_type
    parts = [
        f"# Run file of {name}",
        f"{kind.command.help} A run file is written in [TOML](https://toml.io): sections, each "
        f"with keys. The command is [`flowpm-dist {name}`](../commands.md#{name}). "
        "A key without a default in this table must be given, if its section is used.",
    ]
    for section, field in model.model_fields.items():
        parts += _section(section, field)
    return "\n\n".join(parts) + "\n"


def _section(name: str, field: FieldInfo) -> Iterator[str]:
    """Yields the paragraphs of a section of a run file."""
    yield f"## [{name}] {{ #{name} }}"
    variants = next((v for v in field.metadata if isinstance(v, Variants) and not v.flat), None)
    models = _models_in(field.annotation)
    if variants is None and not models:  # a free table
        yield _sentence(field.description or "")
        return
    chosen = variants.models if variants else {"": models[0]}
    about = _about(models[0]) if len(chosen) == 1 else ""
    optional = "" if field.is_required() else "The section may be left out."
    if about or optional:
        yield f"{about} {optional}".strip()
    keys = _merged(variants.by if variants else "", {n: _keys(m) for n, m in chosen.items()})
    if not keys:
        yield "The section has no keys of its own."
        return
    yield _key_table(keys)
    for key in keys:
        if key.tables is not None:
            yield f"### {key.name} {{ #{name}-{key.name} }}"
            yield f"The keys of a table of `{key.name}`. {_about(key.tables)}".strip()
            yield _key_table(_keys(key.tables))


_Row = tuple[str, str, str, str, str]


@dataclass
class Key:
    """A key of a run file.

    Attributes:
        name: the key.
        kind: the type of its value.
        default: its default; an empty text if there is none.
        meaning: what it means, from the docstring of its model.
        must: what its value must be, from its declaration.
        only: choices of other keys with which it goes; empty if it goes with all.
        tables: the model of the tables that it holds, if it holds tables.
    """

    name: str
    kind: str
    default: str
    meaning: str
    must: str
    only: str = ""
    tables: type[BaseModel] | None = None

    def row(self) -> list[str]:
        """Returns the row of a table."""
        quoted = re.findall('".*?"', self.must)
        said = self.must == self.kind or (quoted and all(each in self.meaning for each in quoted))
        must = "" if said and self.meaning else f"Must be {self.must}." if self.must else ""
        texts = (_sentence(self.meaning), must, self.only)
        return [f"`{self.name}`", self.kind, self.default, _cell(" ".join(filter(None, texts)))]


def _key_table(keys: list[Key]) -> str:
    return _table(["key", "type", "default", "description"], [key.row() for key in keys])


def _merged(by: str, variants: typing.Mapping[str, list[Key]]) -> list[Key]:
    """Returns the keys of variants; a key that several have in the same way is one.

    Args:
        by: the key that chooses the variant; an empty text without variants.
        variants: name -> the keys of each variant.
    """
    found = dict[_Row, Key]()
    owners = dict[_Row, list[str]]()
    for name, keys in variants.items():
        for key in keys:
            if key.name == by:
                key.default = ""
            same = (key.name, key.kind, key.default, key.must, key.only)
            kept = found.setdefault(same, key)
            if not kept.meaning:
                kept.meaning = key.meaning
            owners.setdefault(same, []).append(name)
    for same, key in found.items():
        if len(owners[same]) < len(variants):
            key.only = (
                f"{key.only} Only with `{by} = {' or '.join(map(as_written, owners[same]))}`."
            )
    return list(found.values())


def _keys(model: type[BaseModel]) -> list[Key]:
    """Returns the keys of a model, with those of its flat variants."""
    meanings = _meanings(model)
    flat = flat_variants(model)
    found = list[Key]()
    for name, field in model.model_fields.items():
        meaning, must = meanings.get(name, ""), field.description or ""
        if (variants := flat.get(name)) is None:
            tables = next(iter(_models_in(field.annotation)), None)
            kind = _type(field.annotation)
            found.append(Key(name, kind, _default(field), meaning, must, tables=tables))
            continue
        default = f'`"{variants.default}"`'
        found.append(Key(name, "text", default, meaning, variants.must))
        found += _merged(name, {each: _keys(m) for each, m in variants.models.items()})
    return found


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    value = field.get_default(call_default_factory=True, validated_data={})
    return "none" if value is None else f"`{_cell(as_written(value))}`"


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """Returns the models that a type is made of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [each for part in typing.get_args(annotation) for each in _models_in(part)]


def _type(annotation: Any) -> str:
    """Returns a type in the words of a run file."""
    simple = {bool: "true or false", int: "integer", float: "number", str: "text", Path: "path"}
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in simple:
        return simple[annotation]
    if origin is typing.Annotated:
        return _type(parts[0])
    if origin is typing.Literal:
        return " or ".join(dict.fromkeys(simple[type(each)] for each in parts))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type(e) for e in parts if e is not types.NoneType))
    if origin in (tuple, list):
        inner = dict.fromkeys(_type(each) for each in parts if each is not Ellipsis)
        several = (e.replace("list", "lists") if "list" in e else f"{e}s" for e in inner)
        return f"list of {' or '.join(several)}"
    if origin in (dict, typing.Mapping) or _models_in(annotation):
        return "table"
    return "text"


def _about(model: type[BaseModel]) -> str:
    """Returns the first paragraph of a model's docstring."""
    text = inspect.cleandoc(model.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    return _sentence(re.sub(r"^The section \[\w+\]: ", "", text))


def _meanings(model: type[BaseModel]) -> dict[str, str]:
    """Returns what the keys mean, from the docstrings of a model and its bases."""
    found = dict[str, str]()
    for base in reversed(model.__mro__):
        if not (isinstance(base, type) and issubclass(base, BaseModel)):
            continue
        _, _, listed = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")
        block = re.split(r"\n(?=\S)", listed)[0]
        entries = re.split(r"\n(?=\S)", textwrap.dedent(block))
        for entry in entries:
            names, colon, text = entry.partition(":")
            if colon:
                meaning = " ".join(text.split()).removesuffix("; or")
                for name in map(str.strip, names.split(",")):
                    if not (meaning.lower().startswith("see `") and found.get(name)):
                        found[name] = meaning
    return found


# Python


def public_packages() -> Iterator[tuple[str, list[str]]]:
    """Yields the packages that have public names, and the names that no package before has."""
    import_tensorflow()  # without its notices
    seen = set[tuple[str, str]]()
    for name in PACKAGES:
        package = importlib.import_module(name)
        inside = pkgutil.walk_packages(package.__path__, f"{name}.")
        modules = [name, *(each.name for each in inside if each.ispkg)]
        for module in sorted(modules, key=lambda each: (each.split(".")[0], each)):
            if module.startswith(INTERNAL):
                continue
            found = importlib.import_module(module)
            names = []
            for each in getattr(found, "__all__", ()):
                value = getattr(found, each)
                home = (getattr(value, "__module__", module), getattr(value, "__qualname__", each))
                if home not in seen:
                    seen.add(home)
                    names.append(each)
            if names:
                yield module, sorted(names, key=_order)


def _order(name: str) -> tuple[bool, str]:
    """Classes first, then functions, each in alphabetical order."""
    return name[:1].islower(), name.lower()


def _identifier(package: str, name: str) -> str:
    """Returns the path of a name for mkdocstrings, where a module has the same name, too."""
    public = f"{package}.{name}"
    if importlib.util.find_spec(public) is None:
        return public
    return f"{public}.{name}"


def python_index(packages: list[tuple[str, list[str]]]) -> str:
    """Returns the page that lists the packages and their names."""
    parts = [
        "# Python",
        "The public names of each package. `import flowpm_dist as fpm` has the names that most "
        "scripts need; the other packages are imported by their own names.",
    ]
    for package, names in packages:
        links = ", ".join(f"[`{n}`]({package}.md#{_identifier(package, n)})" for n in names)
        parts += [f"## [`{package}`]({package}.md)", _first(package), links]
    return "\n\n".join(parts) + "\n"


def _first(package: str) -> str:
    text = inspect.cleandoc(importlib.import_module(package).__doc__ or "")
    return text.split("\n\n")[0].replace("\n", " ")


def python(package: str, names: list[str]) -> str:
    """Returns the page of a package, which mkdocstrings fills.

    Args:
        package: name of the package.
        names: the names that the page documents.
    """
    docstring = inspect.cleandoc(importlib.import_module(package).__doc__ or "")
    code = textwrap.dedent(docstring.partition("::\n")[2]).strip("\n")
    text = docstring.partition("::\n")[0].strip()
    parts = [f"# {package} {{ #{package.replace('.', '-')} }}", text]
    if code:
        parts.append(f"```python\n{code}\n```")
    parts += [f"::: {_identifier(package, name)}" for name in names]
    return "\n\n".join(parts) + "\n"


# Markdown


def _sentence(text: str) -> str:
    """Returns a text that begins with a capital, unless it begins with a name, and ends."""
    text = text.strip()
    if text[:1].islower() and re.match(r"[a-z]+\b(?![_0-9])", text):
        text = text[0].upper() + text[1:]
    return text if not text or text.endswith(".") else f"{text}."


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
