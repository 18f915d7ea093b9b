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
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
)

from flowpm_dist.blocks import default_mesh, misfits, nearest, parse_mesh
from flowpm_dist.io.white_noise import WhiteNoiseError, check_white_noise


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


def _three(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else (value, value, value)


def _from_folder(value: Any, info: ValidationInfo) -> Any:
    folder = (info.context or {}).get("folder", Path())
    return (folder / Path(value).expanduser()).absolute() if isinstance(value, str) else value


def _checked_mesh(shape: str) -> str:
    parse_mesh(shape)
    return shape


EvenSide = Annotated[int, Field(ge=4, multiple_of=2)]
Length = Annotated[float, Field(gt=0)]


class _Section(BaseModel):
    """Keys of one section; a key's description is what it must be, told when it is not."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=False
    )


class BoxSection(_Section):
    """The periodic box."""

    grid: Annotated[tuple[EvenSide, EvenSide, EvenSide], BeforeValidator(_three)] = Field(
        description="an even whole number of at least 4, or three of them [nx, ny, nz]"
    )
    size: Annotated[tuple[Length, Length, Length], BeforeValidator(_three)] = Field(
        description="a length above 0 in Mpc/h, or three of them"
    )


class CosmologySection(_Section):
    """A flat universe of cold dark matter, baryons and dark energy w0 + wa (1 - a)."""

    Omega_m: float = Field(gt=0, le=1, description="a number above 0, at most 1")
    Omega_b: float = Field(gt=0, lt=1, description="a number above 0, below Omega_m")
    h: float = Field(gt=0.1, lt=3, description="H0 / (100 km/s/Mpc), from 0.1 to 3")
    n_s: float = Field(gt=0, lt=3, description="a number from 0 to 3")
    A_s: float | None = Field(
        default=None, gt=0, lt=1e-6, description="a number above 0, below 1e-6, such as 2.1e-9"
    )
    sigma8: float | None = Field(
        default=None, gt=0, lt=10, description="a number above 0, below 10"
    )
    w0: float = Field(default=-1.0, ge=-5, lt=0, description="a number from -5 to below 0")
    wa: float = Field(default=0.0, ge=-10, lt=5, description="a number from -10 to 5")
    transfer: Literal["eisenstein-hu", "camb"] = Field(
        default="eisenstein-hu", description='"eisenstein-hu" or "camb"'
    )


class InitialSection(_Section):
    """Where the universe starts from."""

    seed: int | None = Field(
        default=None, ge=0, lt=2**63, description="a whole number of at least 0"
    )
    white_noise: Annotated[Path | None, BeforeValidator(_from_folder)] = Field(
        default=None,
        description="a .npy file: real, shaped as box.grid, unit normal in real space",
    )
    lpt_order: Literal[1, 2] = Field(default=2, description="1 or 2")


class EvolutionSection(_Section):
    """The steps in time, equal in the scale factor."""

    a_start: float = Field(default=0.1, gt=0, lt=2, description="a scale factor above 0, below 2")
    a_stop: float = Field(default=1.0, gt=0, le=2, description="a scale factor above 0, at most 2")
    steps: int = Field(default=10, ge=1, description="a whole number of at least 1")
    integrator: Literal["fastpm"] = Field(default="fastpm", description='"fastpm"')
    gradient: Literal["finite-difference", "spectral"] = Field(
        default="finite-difference", description='"finite-difference" or "spectral"'
    )


class MeshSection(_Section):
    """The ranks as a grid: `row` splits the box's x, `col` its y."""

    shape: Annotated[str, AfterValidator(_checked_mesh)] | None = Field(
        default=None, description='sizes of the axes row and col, as in "row:2,col:2"'
    )


class RunSection(_Section):
    """How to compute."""

    precision: Literal["float32", "float64"] = Field(
        default="float32", description='"float32" or "float64"'
    )
    halo: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        default="auto", description='"auto" or a whole number of cells, at least 1'
    )


class RunConfig(_Section):
    """A whole run file, checked: see `load`."""

    box: BoxSection
    cosmology: CosmologySection
    initial: InitialSection
    evolution: EvolutionSection
    mesh: MeshSection
    run: RunSection

    def resolved(self) -> str:
        """The run as TOML with all defaults and full paths filled in; `load` reads it back."""
        table = self.model_dump(exclude_none=True)
        if self.initial.white_noise is not None:
            table["initial"]["white_noise"] = str(self.initial.white_noise)
        return tomli_w.dumps({name: keys for name, keys in table.items() if keys})

    def with_mesh(self, shape: str) -> RunConfig:
        """The same run on a mesh of another shape."""
        return self.model_copy(update={"mesh": MeshSection(shape=shape)})


SECTIONS: dict[str, type[_Section]] = {
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
    sections: dict[str, _Section] = {}
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
    section: str, model: type[_Section], keys: Mapping[str, Any], error: ValidationError
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


def _between_keys(sections: Mapping[str, _Section], folder: Path) -> Iterator[Problem]:
    """What must hold between keys; a key that is itself wrong is left out."""

    def value(section: str, key: str) -> Any:
        return getattr(sections.get(section), key, None)

    start, stop = value("evolution", "a_start"), value("evolution", "a_stop")
    if start is not None and stop is not None and start >= stop:
        yield Problem("evolution.a_start", f"= {start}: must be below a_stop = {stop}")
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
            check_white_noise(folder / noise, None if grid is None else _three(grid))
        except WhiteNoiseError as error:
            yield Problem("initial.white_noise", f"= '{noise}': {error}")


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
