"""The run file of `flowpm-dist simulate`: TOML in, checked whole, all problems told at once.

Nothing here imports TensorFlow, Horovod or MPI: a wrong file is told within a second, on every
launcher, before any work begins.
"""

from __future__ import annotations

import reprlib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from flowpm_dist.blocks import default_mesh, misfits, nearest, parse_mesh
from flowpm_dist.config_sections import (
    BoxSection,
    CosmologySection,
    EvolutionSection,
    InitialSection,
    MeshSection,
    ResultsSection,
    RunSection,
    Section,
    three,
)
from flowpm_dist.io.white_noise import WhiteNoiseError, check_white_noise

EQUAL_STEPS = ("a_start", "a_stop", "steps", "spacing")
"""Keys of [evolution] that `edges` replaces."""

HALVES_STEPS = ("fastpm", "cola")
"""Integrators for which `half_step` means something."""

OF_A_SEED = ("noise", "fixed_amplitude", "paired")
"""Keys of [initial] that say what a seed becomes."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong: `section.key` (empty for the whole file), and what, with what is allowed."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}{' ' if self.where else ''}{self.what}"


class ConfigError(ValueError):
    """A run file that cannot be run.

    Attributes:
        source: the file.
        problems: everything found wrong with it.
    """

    def __init__(self, source: Path, problems: list[Problem]) -> None:
        self.source, self.problems = source, problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{source}: {count}", *(f"  {p}" for p in problems)]))


class RunConfig(Section):
    """A whole run file, checked: see `load`."""

    box: BoxSection
    cosmology: CosmologySection
    initial: InitialSection
    evolution: EvolutionSection
    mesh: MeshSection
    run: RunSection
    results: ResultsSection

    def resolved(self) -> str:
        """The run as TOML with all defaults and full paths filled in; `load` reads it back.

        Keys that have no meaning beside the others are left out.
        """
        table = self.model_dump(exclude_none=True)
        idle: dict[str, list[str]] = {"initial": [], "evolution": []}
        if self.initial.white_noise is not None:
            table["initial"]["white_noise"] = str(self.initial.white_noise)
            idle["initial"] += OF_A_SEED
        if self.evolution.edges is not None:
            idle["evolution"] += EQUAL_STEPS
        if self.evolution.integrator not in HALVES_STEPS:
            idle["evolution"].append("half_step")
        for section, keys in idle.items():
            for key in keys:
                del table[section][key]
        return tomli_w.dumps({name: keys for name, keys in table.items() if keys})

    def with_mesh(self, shape: str) -> RunConfig:
        """The same run on a mesh of another shape."""
        return self.model_copy(update={"mesh": MeshSection(shape=shape)})


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in RunConfig.model_fields.items()
    if isinstance(field.annotation, type)
}


def load(path: str | Path) -> RunConfig:
    """Read and check a run file.

    Args:
        path: TOML file; paths inside it are relative to its folder.

    Raises:
        ConfigError: with every problem of the file.
    """
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(path, [Problem("", f"not TOML: {error}")]) from error
    except UnicodeDecodeError as error:
        raise ConfigError(path, [Problem("", "not TOML: the file is not UTF-8 text")]) from error
    except OSError as error:
        problem = Problem("", f"cannot be read: {error.strerror}")
        raise ConfigError(path, [problem]) from error
    return check(table, path)


def check(table: Mapping[str, Any], source: Path) -> RunConfig:
    """A run from the tables of a TOML file.

    Args:
        table: sections and their keys.
        source: the file, for messages and for the paths inside it.

    Raises:
        ConfigError: with every problem.
    """
    problems = list(_unknown_sections(table))
    sections: dict[str, Section] = {}
    for name, model in SECTIONS.items():
        keys = table.get(name, {})
        if not isinstance(keys, Mapping):
            what = f"= {reprlib.repr(keys)}: must be a section [{name}] with keys below it"
            problems.append(Problem(name, what))
            continue
        try:
            sections[name] = model.model_validate(keys, context={"folder": source.parent})
        except ValidationError as error:
            found = _problems_of(name, model, keys, error)
            problems += found
            wrong = {problem.where.partition(".")[2] for problem in found}
            known = {k: v for k, v in keys.items() if k in model.model_fields}
            unusable = dict.fromkeys(wrong & set(model.model_fields))
            sections[name] = model.model_construct(**{**known, **unusable})
    problems += _one_of(table, "cosmology", ("A_s", "sigma8"))
    problems += _one_of(table, "initial", ("seed", "white_noise"))
    problems += _between_keys(sections, source.parent)
    problems += _of_evolution(sections, table.get("evolution"))
    if problems:
        raise ConfigError(source, problems)
    return RunConfig.model_validate(sections)


def _unknown_sections(table: Mapping[str, Any]) -> Iterator[Problem]:
    for name in table:
        if name in SECTIONS:
            continue
        home = [section for section, model in SECTIONS.items() if name in model.model_fields]
        hint = f"; it belongs into [{home[0]}]" if home else nearest(name, SECTIONS)
        yield Problem(name, f"is not a section{hint} (sections: {', '.join(SECTIONS)})")


def _problems_of(
    section: str, model: type[Section], keys: Mapping[str, Any], error: ValidationError
) -> list[Problem]:
    """One problem for each wrong key, however many of its parts are wrong."""
    problems: dict[str, Problem] = {}
    for detail in error.errors():
        key = str(detail["loc"][0])
        where = f"{section}.{key}"
        if detail["type"] == "extra_forbidden":
            home = [name for name, other in SECTIONS.items() if key in other.model_fields]
            hint = f"; it belongs into [{home[0]}]" if home else nearest(key, model.model_fields)
            known = ", ".join(model.model_fields)
            what = f"is not a key{hint} (keys of [{section}]: {known})"
        else:
            allowed = f"must be {model.model_fields[key].description}"
            cause = detail.get("ctx", {}).get("error")
            if key not in keys:
                what = f"is missing: {allowed}"
            elif isinstance(cause, ValueError):
                what = f"= {reprlib.repr(keys[key])}: {cause}; {allowed}"
            else:
                what = f"= {reprlib.repr(keys[key])}: {allowed}"
        problems.setdefault(key, Problem(where, what))
    return list(problems.values())


def _one_of(table: Mapping[str, Any], section: str, keys: tuple[str, str]) -> Iterator[Problem]:
    given = [key for key in keys if key in (table.get(section) or {})]
    if len(given) != 1:
        what = "both are given" if given else "neither is given"
        yield Problem(f"{section}.{keys[0]}, {section}.{keys[1]}", f"{what}: give exactly one")


def _between_keys(sections: Mapping[str, Section], folder: Path) -> Iterator[Problem]:
    """What must hold between keys; a key that is itself wrong is left out."""

    def value(section: str, key: str) -> Any:
        return getattr(sections.get(section), key, None)

    matter, baryons = value("cosmology", "Omega_m"), value("cosmology", "Omega_b")
    if matter is not None and baryons is not None and baryons >= matter:
        yield Problem("cosmology.Omega_b", f"= {baryons}: must be below Omega_m = {matter}")
    w0, wa = value("cosmology", "w0"), value("cosmology", "wa")
    if w0 is not None and wa is not None and w0 + wa > -0.2:
        what = f"= {wa}: w0 + wa must be at most -0.2, or dark energy would matter early"
        yield Problem("cosmology.wa", what)
    noise, grid = value("initial", "white_noise"), value("box", "grid")
    if noise is not None:
        try:
            check_white_noise(folder / noise, None if grid is None else three(grid))
        except WhiteNoiseError as error:
            yield Problem("initial.white_noise", f"= '{noise}': {error}")
        for key in OF_A_SEED:
            if (given := value("initial", key)) not in (None, _default("initial", key)):
                what = f"= {_toml(given)}: goes with a seed, not with white_noise"
                yield Problem(f"initial.{key}", what)


def _of_evolution(sections: Mapping[str, Section], given: Any) -> Iterator[Problem]:
    """What must hold between the keys of the scheme; a key that is itself wrong is left out.

    Args:
        sections: as far as they were understood.
        given: the section [evolution] as it stands in the file.
    """
    evolution, initial = sections.get("evolution"), sections.get("initial")
    if not isinstance(evolution, EvolutionSection) or not isinstance(given, Mapping | None):
        return
    given = given or {}
    scheme, start, stop = evolution.integrator, evolution.a_start, evolution.a_stop
    if "edges" in given:
        if both := [key for key in EQUAL_STEPS if key in given]:
            what = f"is given beside {', '.join(both)}: give either the edges or the equal steps"
            yield Problem("evolution.edges", what)
    elif start is not None and stop is not None and start >= stop:
        yield Problem("evolution.a_start", f"= {start}: must be below a_stop = {stop}")
    elif start == 0 and evolution.spacing == "log a":
        what = '= "log a": must start later than a_start = 0'
        yield Problem("evolution.spacing", what)
    if evolution.first == 0 and scheme in HALVES_STEPS:
        key = "edges" if "edges" in given else "a_start"
        what = f"starts at 0, which only bullfrog can; {scheme} must start later"
        yield Problem(f"evolution.{key}", what)
    if "half_step" in given and scheme not in (None, *HALVES_STEPS):
        what = f"is given, but {scheme} halves no step; it goes with {' and '.join(HALVES_STEPS)}"
        yield Problem("evolution.half_step", what)
    if scheme == "cola" and getattr(initial, "lpt_order", None) == 1:
        yield Problem("initial.lpt_order", "= 1: cola follows LPT of order 2; must be 2 or 3")


def _default(section: str, key: str) -> Any:
    return SECTIONS[section].model_fields[key].default


def _toml(value: Any) -> str:
    """A value as a run file has it."""
    return str(value).lower() if isinstance(value, bool) else f'"{value}"'


def check_mesh(config: RunConfig, ranks: int, *, source: Path, shape: str | None = None) -> str:
    """The mesh shape to run on: the one asked for, or one chosen from the number of ranks.

    Args:
        config: the run.
        ranks: number of ranks of the job.
        source: the run file, for messages.
        shape: from the command line; goes before the run file's.

    Returns:
        A text such as `"row:2,col:2"`.

    Raises:
        ConfigError: not a mesh, its sizes do not multiply to `ranks`, or an axis does not divide
            its side of the grid.
    """
    named = "mesh.shape" if shape is None else "--mesh"
    shape = shape or config.mesh.shape
    grid = config.box.grid
    if shape is None:
        try:
            return default_mesh(ranks, grid)
        except ValueError as error:
            raise ConfigError(source, [Problem("box.grid", f"= {list(grid)}: {error}")]) from error
    try:
        wrong = misfits(parse_mesh(shape), grid, ranks)
    except ValueError as error:
        wrong = [str(error)]
    if wrong:
        raise ConfigError(source, [Problem(named, f"= '{shape}': {what}") for what in wrong])
    return shape
