"""Reading and checking run files of any kind. All problems of a file are reported at once.

Each kind of run file brings its sections, and rules between their keys. Nothing here imports
TensorFlow, Horovod or MPI.
"""

from __future__ import annotations

import re
import reprlib
import tomllib
import typing
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from flowpm_dist.config.settings import Settings, with_settings
from flowpm_dist.io.errors import UserError
from flowpm_dist.options import MOVED, RENAMED, Options, nearest


@dataclass(frozen=True)
class Problem:
    """One problem of a run file.

    Attributes:
        where: `section.key`, or an empty text for the whole file.
        what: is wrong, and what is allowed.
    """

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}{' ' if self.where else ''}{self.what}"


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


@dataclass(frozen=True)
class ParsedRunFile:
    """The part of a run file that could be read, which the rules between keys look at.

    Attributes:
        sections: by name; a key whose own value is wrong is None.
        given: the keys of each section as they stand in the file.
        folder: of the file.
    """

    sections: Mapping[str, Options]
    given: Mapping[str, Mapping[str, Any]]
    folder: Path

    def value(self, section: str, key: str) -> Any:
        """Returns the value of a key, or its default; None if the value is wrong."""
        return getattr(self.sections.get(section), key, None)


OF_OTHER_COMMANDS = {"adjoint": "goes with reconstruct, which alone takes gradients of a run"}
"""For a key that not all commands have: which has it, and why."""

Models = Mapping[str, type[Options]]
Rule = Callable[[ParsedRunFile], Iterable[Problem]]


def models_of(config: type[Options]) -> Models:
    """Returns the models of the sections of a kind of run file, by name."""
    models = {}
    for name, field in config.model_fields.items():
        kinds = [field.annotation, *typing.get_args(field.annotation)]
        models[name] = next(kind for kind in kinds if isinstance(kind, type))
    return models


def read_table(path: str | Path, settings: Settings | None = None) -> dict[str, Any]:
    """Returns the tables of a TOML file.

    Args:
        path: of the file.
        settings: values in place of the file's own.

    Raises:
        ConfigError: the file cannot be read, or is not TOML.
    """
    path = Path(path)
    text = ""
    try:
        # Some editors begin a file with a byte-order mark.
        text = path.read_text(encoding="utf-8-sig")
        return with_settings(tomllib.loads(text), settings or {})
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(path, [_not_toml(text, str(error))]) from error
    except UnicodeDecodeError as error:
        raise ConfigError(path, [Problem("", "not TOML: the file is not UTF-8 text")]) from error
    except OSError as error:
        problem = Problem("", f"cannot be read: {error.strerror}")
        raise ConfigError(path, [problem]) from error


_ASSIGNMENT = re.compile(r"\s*([\w.\"'-]+)\s*=")
_SECTION = re.compile(r"\s*\[\s*([\w.\"'-]+)\s*\]")


def _not_toml(text: str, said: str) -> Problem:
    """Returns the problem of a text that is not TOML.

    Args:
        text: of the file.
        said: the parser's message. Of what is given twice, it tells the line alone.
    """
    twice = re.match(r"Cannot (overwrite a value|declare \(.*\) twice)", said)
    line = re.search(r"at line (\d+)", said)
    if not twice:
        return Problem("", f"not TOML: {said}")
    before = text.splitlines()[: int(line[1])] if line else text.splitlines()
    section = next((match[1] for match in map(_SECTION.match, reversed(before)) if match), "")
    where = f"line {len(before)}: "
    if "twice" in twice[0]:
        return Problem("", f"{where}the section [{section}] is given twice: give each once")
    key = next((match[1] for match in map(_ASSIGNMENT.match, reversed(before)) if match), "a key")
    name = f"{section}.{key}" if section else key
    return Problem("", f"{where}{name} is given twice: give each key once")


def check_sections(
    table: Mapping[str, Any],
    source: Path,
    models: Models,
    rules: Iterable[Rule],
    optional: Container[str] = (),
) -> dict[str, Options]:
    """Returns the checked sections of a run file of any kind.

    Args:
        table: sections and their keys.
        source: path of the file; paths inside the file are relative to its folder.
        models: the models of the sections, by name.
        rules: each returns the problems between keys.
        optional: names of sections that mean something only where they are given.

    Raises:
        ConfigError: there are problems; it has all of them.
    """
    problems = list(_unknown_sections(table, models))
    sections: dict[str, Options] = {}
    given: dict[str, Mapping[str, Any]] = {}
    for name, model in models.items():
        if name in optional and name not in table:
            continue
        keys = table.get(name, {})
        if not isinstance(keys, Mapping):
            what = f"= {reprlib.repr(keys)}: must be a section [{name}] with keys below it"
            problems.append(Problem(name, what))
            continue
        given[name] = keys
        try:
            sections[name] = model.model_validate(keys, context={"folder": source.parent})
        except ValidationError as error:
            found = problems_of(name, models, keys, error)
            problems += found
            wrong = {problem.where.partition(".")[2] for problem in found}
            known = {k: v for k, v in keys.items() if k in model.model_fields}
            unusable = dict.fromkeys(wrong & set(model.model_fields))
            sections[name] = model.model_construct(**{**known, **unusable})
    understood = ParsedRunFile(sections, given, source.parent)
    problems += [problem for rule in rules for problem in rule(understood)]
    if problems:
        raise ConfigError(source, problems)
    return sections


def to_toml(config: Options, idle: Mapping[str, Iterable[str]]) -> str:
    """Returns a run file with all defaults and full paths as text, see `to_table`."""
    return tomli_w.dumps(to_table(config, idle))


def to_table(config: Options, idle: Mapping[str, Iterable[str]]) -> dict[str, dict[str, Any]]:
    """Returns the sections and keys of a run file with all defaults and full paths.

    Args:
        config: a whole run file.
        idle: for each section the keys that have no meaning beside the others, to be left out.
    """
    table = config.model_dump(exclude_none=True)
    for section, keys in idle.items():
        for key in keys:
            table.get(section, {}).pop(key, None)
    for keys in table.values():
        keys |= {key: str(value) for key, value in keys.items() if isinstance(value, Path)}
    return {name: keys for name, keys in table.items() if keys}


def _homes(key: str, models: Models) -> str:
    """Returns a hint at the sections that have a key; an empty text if none has."""
    homes = [f"[{name}]" for name, model in models.items() if key in model.model_fields]
    return f"; it belongs in {' or '.join(homes)}" if homes else ""


def _unknown_sections(table: Mapping[str, Any], models: Models) -> Iterator[Problem]:
    for name, keys in table.items():
        if name not in models:
            given = keys if isinstance(keys, Mapping) else ()
            moved = [key for key in given if f"{name}.{key}" in MOVED]
            for key in moved:
                yield Problem(f"{name}.{key}", f"is now {MOVED[f'{name}.{key}']}")
            if moved:
                continue
            hint = _homes(name, models) or nearest(name, models)
            yield Problem(name, f"is not a section{hint} (sections: {', '.join(models)})")


def unknown_key(key: str, section: str, models: Models) -> str:
    """Returns what is wrong with a key that its section does not have."""
    fields = models[section].model_fields
    if (moved := MOVED.get(f"{section}.{key}")) is not None:
        return f"is now {moved}"
    new = RENAMED.get(key, key)
    home = "" if new in fields else _homes(new, models)
    if new in OF_OTHER_COMMANDS and new not in fields and not home:
        return f"{OF_OTHER_COMMANDS[new]}: leave it out"
    if new != key and (new in fields or home):
        return f"is now {new}{home}"
    return f"is not a key{home or nearest(key, fields)} (keys of [{section}]: {', '.join(fields)})"


def problems_of(
    section: str, models: Models, keys: Mapping[str, Any], error: ValidationError
) -> list[Problem]:
    """Returns one problem for each wrong key, however many of its parts are wrong."""
    problems: dict[str, Problem] = {}
    fields = models[section].model_fields
    for detail in error.errors():
        key = str(detail["loc"][0])
        where = f"{section}.{key}"
        if detail["type"] == "extra_forbidden":
            what = unknown_key(key, section, models)
        else:
            described = fields[key].description if key in fields else "[low, high]"
            allowed = f"must be {described}"
            cause = detail.get("ctx", {}).get("error")
            if key not in keys:
                what = f"is missing: {allowed}"
            elif isinstance(cause, ValueError):
                what = f"= {reprlib.repr(keys[key])}: {cause}; {allowed}"
            else:
                what = f"= {reprlib.repr(keys[key])}: {allowed}"
        problems.setdefault(key, Problem(where, what))
    return list(problems.values())


def exactly_one(file: ParsedRunFile, *keys: tuple[str, str]) -> Iterator[Problem]:
    """Yield a problem unless exactly one of several (section, key) is given."""
    if any(section not in file.given for section, _ in keys):
        return
    given = [f"{s}.{k}" for s, k in keys if k in file.given[s]]
    if len(given) != 1:
        many = "both are" if len(given) == 2 else "all are"
        none = "neither is" if len(keys) == 2 else "none is"
        what = f"{many if given else none} given"
        where = ", ".join(given or [f"{s}.{k}" for s, k in keys])
        yield Problem(where, f"{what}: give exactly one")


def as_written(value: Any) -> str:
    """Returns a value as it is written in a run file."""
    if isinstance(value, str | Path):
        return f'"{value}"'
    return str(value).lower() if isinstance(value, bool) else str(value)


def fitting_mesh(
    asked: str | None, written: str | None, misfits_of: Callable[[str], list[str]], source: Path
) -> str:
    """Returns the mesh shape of the command line, or else that of the run file.

    Args:
        asked: shape on the command line.
        written: shape in the run file.
        misfits_of: returns the reasons why a shape does not fit; raises ValueError if a text is no
            shape.
        source: path of the run file, for messages.

    Raises:
        ConfigError: the shape does not fit.
    """
    named, shape = ("--mesh", asked) if asked else ("mesh.shape", written or "")
    try:
        wrong = misfits_of(shape)
    except ValueError as error:
        wrong = [str(error)]
    if wrong:
        raise ConfigError(source, [Problem(named, f"= '{shape}': {what}") for what in wrong])
    return shape


ADDED = {"observation.structure": "pm", "observation.kind": "density"}
"""Keys that run files of earlier trainings do not have, with the values that they had then."""


def check_resumed(
    then: Path,
    now: str,
    source: Path,
    begun: str,
    *,
    may_differ: Iterable[str],
    may_grow: Iterable[str] = (),
) -> None:
    """Check that a run file asks for the same work as the one that the work was begun with.

    Args:
        then: path of the resolved run file that the work was begun with.
        now: text of the resolved run file; its mesh may differ.
        source: path of the run file of `now`.
        begun: names the work in messages, such as "the training in here".
        may_differ: names of keys that may differ.
        may_grow: names of keys that may be greater than they were.

    Raises:
        ConfigError: keys differ; it has a problem for each of them. Or the file `then` cannot be
            read.
    """
    before, after = _keys(read_table(then)), _keys(tomllib.loads(now))
    before = {**{key: value for key, value in ADDED.items() if key in after}, **before}
    problems, growing = [], set(may_grow)
    for key in sorted({*before, *after} - set(may_differ)):
        was, asked = before.get(key), after.get(key)
        grown = key in growing and was is not None and asked is not None and asked > was
        if was == asked or grown:
            continue
        shown = "is not given" if asked is None else f"= {as_written(asked)}"
        there = "has none" if was is None else f"has {as_written(was)}"
        more = " or more" if key in growing else ""
        problems.append(Problem(key, f"{shown}: {begun} {there}; to resume it, give that{more}"))
    if problems:
        raise ConfigError(source, problems)


def check_same_values(
    then: Mapping[str, str],
    now: Mapping[str, str],
    files: Mapping[str, Path | None],
    source: Path,
    begun: str,
) -> None:
    """Check that the files that a run file names hold the values that the work was begun with.

    Args:
        then, now: checksums of the values, by key.
        files: their paths, likewise.
        source, begun: as for `check_resumed`.

    Raises:
        ConfigError: files have other values; it has a problem for each of them.
    """
    problems = [
        Problem(key, f'= "{files[key]}": it has other values than when {begun} was begun')
        for key, found in now.items()
        if then.get(key, found) != found
    ]
    if problems:
        raise ConfigError(source, problems)


def _keys(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{section}.{key}": value
        for section, keys in table.items()
        if section != "mesh" and isinstance(keys, Mapping)
        for key, value in keys.items()
    }
