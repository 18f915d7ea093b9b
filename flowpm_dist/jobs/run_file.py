"""Run files: read, checked as one model, written with all settings, and compared at a resume.

A kind of run file is a `RunFile` with a field for each section:

    class RunOptions(RunFile):
        box: BoxOptions
        evolution: EvolutionOptions
        lightcone: Annotated[Flat | Full | None, Variants(...)] = None  # only where it is given

        may_differ = ("output.checkpoint_every",)

        def problems(self) -> Iterator[Problem]:  # rules between sections, once all are valid
            if self.evolution.steps > self.box.grid[0]:
                yield self.problem("evolution.steps", "must be at most box.grid")

    options = RunOptions.load("run.toml", {("evolution", "steps"): 20})

All problems of a file are reported at once. Nothing here imports TensorFlow, Horovod or MPI.
"""

from __future__ import annotations

import csv
import io
import math
import re
import reprlib
import tomllib
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import tomli_w
from pydantic import BaseModel, ValidationError, model_validator

from flowpm_dist.grid.decomposition import parse_mesh
from flowpm_dist.io.errors import UserError
from flowpm_dist.io.files import write_text
from flowpm_dist.options import (
    Options,
    Problem,
    Variants,
    as_written,
    keys_of,
    model_of,
    nearest,
    problems_of,
)
from flowpm_dist.options.base import flat_variants
from flowpm_dist.options.regular_files import read_text


class ConfigError(UserError):
    """A run file has mistakes.

    Attributes:
        source: path of the file.
        problems: everything that is wrong with it.
    """

    def __init__(self, source: Path, problems: list[Problem]) -> None:
        self.source, self.problems = source, problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{source}: {count}", *(f"  {p}" for p in problems)]))


class RunFile(Options):
    """A whole run file: a field for each section, whose type is the section's model.

    If a file leaves out a section, all keys of the section have their defaults. If the section's
    field has a default itself, such as None, the field keeps that default. The model may also be
    made from Python.
    """

    may_differ: ClassVar[tuple[str, ...]] = ()
    """The keys that may have another value when the work is resumed, besides the mesh."""
    may_grow: ClassVar[tuple[str, ...]] = ()
    """The keys that may have a greater value when the work is resumed."""
    younger: ClassVar[Mapping[str, Any]] = {}
    """Keys that older versions lacked -> the value with which a run does what they did."""

    @classmethod
    def load(cls, path: str | Path, settings: Settings | None = None) -> Self:
        """Read and check a run file.

        Args:
            path: path of the TOML file; paths inside the file are relative to its folder.
            settings: values that replace the file's own.

        Raises:
            ConfigError: the file has mistakes; the error has all of them.
        """
        return cls.check(read_table(path, settings), Path(path))

    @classmethod
    def check(cls, table: Mapping[str, Any], source: Path) -> Self:
        """Check the tables of a TOML file, and return the run that they describe.

        Args:
            table: sections and their keys.
            source: path of the file; paths inside the file are relative to its folder.

        Raises:
            ConfigError: there are mistakes; the error has all of them.
        """
        problems = list(cls._unknown_sections(table))
        known = {name: keys for name, keys in table.items() if name in cls.model_fields}
        try:
            options = cls.model_validate(known, context={"folder": source.parent})
        except ValidationError as error:
            problems += problems_of(cls, known, error)
        if problems:
            raise ConfigError(source, problems)
        return options

    @classmethod
    def _unknown_sections(cls, table: Mapping[str, Any]) -> Iterator[Problem]:
        sections = cls.model_fields
        for name in table:
            if name in sections:
                continue
            models = {each: model_of(cls, each) for each in sections}
            homes = [
                f"[{each}]" for each, model in models.items() if model and name in keys_of(model)
            ]
            hint = f"; it belongs in {' or '.join(homes)}" if homes else nearest(name, sections)
            yield Problem(name, f"is not a section{hint} (sections: {', '.join(sections)})")

    @model_validator(mode="before")
    @classmethod
    def _give_all_sections(cls, table: Any) -> Any:
        if not isinstance(table, Mapping):
            return table
        needed = [name for name, field in cls.model_fields.items() if field.is_required()]
        return {**{name: {} for name in needed}, **table}

    def to_table(self) -> dict[str, Any]:
        """Returns sections, keys and values with all defaults and full paths.

        Idle keys, which have no effect, are left out.
        """
        return {name: keys for name, keys in super().to_table().items() if keys}

    def resolved(self) -> str:
        """Returns `to_table` as the text of a run file; `load` reads it back."""
        return tomli_w.dumps(self.to_table())

    @property
    def files(self) -> Mapping[str, Path | None]:
        """Paths of the files that are read, by key."""
        return {}

    def checksums(self) -> dict[str, str]:
        """Returns the checksums of the values in these files, by key."""
        return {}

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user should know before the work begins."""
        return ()

    @property
    def meshes(self) -> tuple[str, ...]:
        """Shapes of all meshes of ranks that the work uses."""
        mesh: Any = self.mesh  # type: ignore[attr-defined]
        return (mesh.shape,)

    def mesh_for(self, ranks: int, *, source: Path, shape: str | None = None) -> str:
        """Returns the mesh's shape: the given one, else the run file's, else one that fits.

        Args:
            ranks: number of ranks of the job.
            source: path of the run file, for messages.
            shape: value of `--mesh`.

        Raises:
            ConfigError: the shape does not fit.
        """

        def misfits_of(text: str) -> list[str]:
            count = math.prod(parse_mesh(text, batched=True).values())
            return [] if count == ranks else [f"is for {count} ranks, and the job has {ranks}"]

        mesh: Any = self.mesh  # type: ignore[attr-defined]
        return fitting_mesh(shape, mesh.shape or f"row:{ranks}", misfits_of, source)

    def with_mesh(self, shape: str | None) -> Self:
        """Returns the same run on a mesh of another shape; with None no shape is fixed."""
        mesh: Any = self.mesh  # type: ignore[attr-defined]
        return self.model_copy(update={"mesh": mesh.model_copy(update={"shape": shape})})

    def check_resumed(self, then: Path, source: Path, begun: str) -> None:
        """Check that this run file describes the same work as the run file that started it.

        Args:
            then: path of the resolved run file with which the work was started.
            source: path of this run file.
            begun: name of the work, for messages, such as "the training in FOLDER".

        Raises:
            ConfigError: keys differ, or `then` cannot be read.
        """
        after = flat(self.to_table())
        before = {key: value for key, value in self.younger.items() if key in after}
        before |= flat(read_table(then))
        problems = []
        for key in sorted({*before, *after} - {"mesh.shape", *self.may_differ}):
            was, now = before.get(key), after.get(key)
            grows = key in self.may_grow
            grown = grows and was is not None and now is not None and now > was
            if was == now or grown:
                continue
            shown = "is not given" if now is None else f"= {as_written(now)}"
            there = "has none" if was is None else f"has {as_written(was)}"
            more = " or more" if grows else ""
            reason = f"{shown}: {begun} {there}; to resume it, give that{more}"
            problems.append(Problem(key, reason))
        if problems:
            raise ConfigError(source, problems)


def read_table(path: str | Path, settings: Settings | None = None) -> dict[str, Any]:
    """Returns the tables of a TOML file.

    Args:
        path: path of the file.
        settings: values in place of the file's own.

    Raises:
        ConfigError: the file cannot be read, or is not TOML.
    """
    path = Path(path)
    text = ""
    try:
        # Some editors begin a file with a byte-order mark.
        text = read_text(path, encoding="utf-8-sig")
        return with_settings(toml_of(text), settings or {})
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(path, [_not_toml(text, str(error))]) from error
    except UnicodeDecodeError as error:
        raise ConfigError(path, [Problem("", "not TOML: the file is not UTF-8 text")]) from error
    except OSError as error:
        problem = Problem("", f"cannot be read: {error.strerror}")
        raise ConfigError(path, [problem]) from error


def toml_of(text: str) -> dict[str, Any]:
    """Returns the tables of a text.

    Raises:
        tomllib.TOMLDecodeError: it is not TOML, or more than Python reads.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except ValueError as error:
        raise tomllib.TOMLDecodeError("a whole number has too many digits") from error
    except RecursionError as error:
        raise tomllib.TOMLDecodeError("lists or tables are nested too deep") from error


_ASSIGNMENT = re.compile(r"\s*([\w.\"'-]+)\s*=")
_SECTION = re.compile(r"\s*\[\s*([\w.\"'-]+)\s*\]")


def _not_toml(text: str, message: str) -> Problem:
    """Returns the problem of a text that is not TOML.

    Args:
        text: text of the file.
        message: the parser's message. For a repeated key it names the line alone.
    """
    twice = re.match(r"Cannot (overwrite a value|declare \(.*\) twice)", message)
    line = re.search(r"at line (\d+)", message)
    if not twice:
        return Problem("", f"not TOML: {message}")
    before = text.splitlines()[: int(line[1])] if line else text.splitlines()
    section = next((match[1] for match in map(_SECTION.match, reversed(before)) if match), "")
    where = f"line {len(before)}: "
    if "twice" in twice[0]:
        return Problem("", f"{where}the section [{section}] is given twice: give each once")
    key = next((match[1] for match in map(_ASSIGNMENT.match, reversed(before)) if match), "a key")
    name = f"{section}.{key}" if section else key
    return Problem("", f"{where}{name} is given twice: give each key once")


def fitting_mesh(
    requested: str | None, written: str | None, misfits_of: Callable[[str], list[str]], source: Path
) -> str:
    """Returns the command line's mesh shape, or else the run file's.

    Args:
        requested: shape on the command line.
        written: shape in the run file.
        misfits_of: a function that returns the reasons why a shape does not fit. It raises
            ValueError if a text is not a mesh shape.
        source: path of the run file, for messages.

    Raises:
        ConfigError: the shape does not fit.
    """
    named, shape = ("--mesh", requested) if requested else ("mesh.shape", written or "")
    try:
        wrong = misfits_of(shape)
    except ValueError as error:
        wrong = [str(error)]
    if wrong:
        raise ConfigError(source, [Problem(named, f"= '{shape}': {reason}") for reason in wrong])
    return shape


LEFT_OUT = object()
"""Value of a key that is to be left out, whatever the run file says."""

Settings = Mapping[tuple[str, str], Any]
"""Values by section and key."""

_SETTING = re.compile(r"\s*(\w+)\.(\w+)\s*=\s*(.*?)\s*", re.DOTALL)
_WORD = re.compile(r"[^\s\"'\[\]{}=,]+(?:[ ,][^\s\"'\[\]{}=]+)*")


def parse_settings(texts: Iterable[str]) -> Settings:
    """Returns the values that texts such as "evolution.steps=20" give.

    Args:
        texts: each names a section, a key and a value, written as in a run file. The quotes of a
            word may be omitted. An empty value removes the key from the file. If a key occurs
            several times, its last value counts.

    Raises:
        UserError: a text does not have this form.
    """
    settings: dict[tuple[str, str], Any] = {}
    for text in texts:
        match = _SETTING.fullmatch(text)
        if match is None:
            raise UserError(f"--set {text}: must be SECTION.KEY=VALUE, such as evolution.steps=20")
        section, key, value = match.groups()
        settings[section, key] = _value(text, value) if value else LEFT_OUT
    return settings


def completions(model: type[Options], begun: str) -> list[str]:
    """Returns how a text for `parse_settings` may go on, from the declarations of the options.

    Args:
        model: the model of the run file.
        begun: the text so far, such as "evolution.st". It is completed to "evolution.steps="; if
            one key is left, the values that it can have by name, or its default, are added.
    """
    name = begun.partition("=")[0]
    fields = {
        f"{section}.{key}": (part, key)
        for section in model.model_fields
        for part in _models_of(model, section)
        for key in keys_of(part)
    }
    matching = [f for f in fields if f == name or ("=" not in begun and f.startswith(name))]
    texts = [f"{field}=" for field in matching]
    if len(matching) == 1:
        texts += [f"{matching[0]}={value}" for value in _values_of(*fields[matching[0]])]
    return [text for text in texts if text.startswith(begun)]


def _models_of(model: type[BaseModel], section: str) -> list[type[BaseModel]]:
    """Returns the models that a section can have."""
    for each in model.model_fields[section].metadata:
        if isinstance(each, Variants) and not each.flat:
            return [*each.models.values()]
    section_model = model_of(model, section)
    return [] if section_model is None else [section_model]


def _values_of(model: type[BaseModel], key: str) -> list[str]:
    """Returns the values that a key can have by name; else its default, if it has one."""
    if key in (flat := flat_variants(model)):
        return [*flat[key].models]
    if key not in model.model_fields:  # of a variant
        return []
    field = model.model_fields[key]
    kinds = [field.annotation, *typing.get_args(field.annotation)]
    if bool in kinds:
        return ["true", "false"]
    if field.examples:
        return [str(each) for each in field.examples]
    for kind in kinds:
        if typing.get_origin(kind) is typing.Literal:
            return [str(value) for value in typing.get_args(kind)]
    default = field.get_default()
    return [as_written(default)] if isinstance(default, int | float) else []


def read_columns(path: Path) -> dict[str, list[str]]:
    """Returns the columns of a CSV file by their headings, which are keys of a run file.

    A value is written as in a run file; where it is empty, the key is left out (`parse_settings`).

    Raises:
        UserError: the file cannot be read, or is not such a table.
    """
    try:
        text = io.StringIO(read_text(path, encoding="utf-8-sig"), newline="")
        head, *rows = [[cell.strip() for cell in row] for row in csv.reader(text) if row]
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, csv.Error) as error:  # no line, or no text
        raise UserError(f"{path}: not a table of comma-separated values ({error})") from error
    for key in head:
        if not re.fullmatch(r"\w+\.\w+", key):
            reason = "must be SECTION.KEY, such as cosmology.Omega_m or initial.seed"
            raise UserError(f"{path}: the column {reprlib.repr(key)} {reason}")
        if head.count(key) > 1:
            raise UserError(f"{path}: the column {key[:80]} is there twice")
    for number, row in enumerate(rows):
        if len(row) != len(head):
            reason = f"has {len(row)} values for {len(head)} columns"
            raise UserError(f"{path}: row {number} (counted from 0) {reason}")
    if not rows:
        raise UserError(f"{path}: has no row below its head")
    return {key: [row[i] for row in rows] for i, key in enumerate(head)}


def _value(text: str, value: str) -> Any:
    try:
        table = toml_of(f"value = {value}")
    except tomllib.TOMLDecodeError as error:
        if _WORD.fullmatch(value):
            return value
        raise UserError(
            f'--set {text}: the value must be as in a run file, such as 3, [1, 2] or "a text"'
        ) from error
    if len(table) != 1:
        raise UserError(f"--set {text}: must be one value")
    return table["value"]


def with_settings(table: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Returns the tables of a run file, in which the given settings replace its own.

    Args:
        table: sections and their keys.
        settings: the values.
    """
    changed = dict(table)
    for (section, key), value in settings.items():
        keys = changed.get(section, {})
        if not isinstance(keys, Mapping):  # the check of the sections reports it
            continue
        others = {name: old for name, old in keys.items() if name != key}
        changed[section] = others if value is LEFT_OUT else {**others, key: value}
    return changed


def write_run_file(path: Path, text: str) -> None:
    """Write the resolved run file of a job.

    Raises:
        WriteError: it cannot be written.
    """
    write_text(path, f"# As run by flowpm-dist.\n{text}")


def settings_in(path: Path) -> dict[str, Any]:
    """Returns the values of a resolved run file by "section.key"; none if it cannot be read.

    A job leaves no symbolic link, so one is not read.
    """
    if path.is_symlink():
        return {}
    try:
        return flat(toml_of(read_text(path)))
    except (OSError, ValueError):
        return {}


def flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a run file's tables by "section.key"."""
    return {
        f"{section}.{key}": value
        for section, keys in table.items()
        if isinstance(keys, Mapping)
        for key, value in keys.items()
    }
