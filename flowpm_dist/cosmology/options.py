"""Cosmological parameters as options of a run file, and their uniform priors."""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_args

import numpy as np
from pydantic import BeforeValidator, Field, create_model, model_validator
from typing_extensions import override

from flowpm_dist.cosmology.arrays import arrays_within
from flowpm_dist.cosmology.background import A_MAX, Background, expansion_parameters
from flowpm_dist.cosmology.neutrinos import shares_of, sum_and_shares
from flowpm_dist.cosmology.parameters import (
    AMPLITUDES,
    NOT_IN_TABLES,
    PACKAGES,
    PARAMETERS,
    SHAPE,
    VARIABLE,
    ParameterRow,
    Transfer,
    conflicts,
)
from flowpm_dist.cosmology.power_table import LATEST, LengthUnit, Part, PowerTable
from flowpm_dist.options import (
    AnyPath,
    Options,
    Pair,
    Problem,
    ProblemsError,
    Unit,
    either,
    in_unit,
    limits,
    listed,
)
from flowpm_dist.options.base import table_of

KEYS = tuple(name for name, row in PARAMETERS.items() if row.in_run_files)
"""The parameters that run files have."""

REQUIRED = tuple(name for name in KEYS if PARAMETERS[name].required)
"""Those without a default: a run file fixes them or gives them a prior."""


def extremes(cosmology: PartialCosmologyOptions, priors: Any = None) -> list[Background]:
    """Returns the backgrounds of all combinations of the ends of priors; empty if one is unknown.

    Args:
        cosmology: the parameters that are fixed.
        priors: (lowest, highest) value of each parameter that varies, as attributes.
    """
    radiation = cosmology.radiation
    names = [name for name in expansion_parameters(radiation=radiation) if name in KEYS]
    ends = [getattr(priors, name, None) or (getattr(cosmology, name),) for name in names]
    corners = itertools.product(*ends) if (None,) not in ends else ()
    with arrays_within():
        values = [dict(zip(names, each, strict=True)) for each in corners]
        choices = {"radiation": radiation, "m_nu_shares": cosmology.m_nu_shares or ()}
        return [Background({**each, **choices}) for each in values]


def universe_problems(
    cosmology: PartialCosmologyOptions, priors: ParameterRanges | None = None
) -> Iterator[Problem]:
    """Yields problems between the parameters of a run file, fixed or anywhere in their priors.

    Args:
        cosmology: the section [cosmology].
        priors: the section [priors], if there is one.
    """
    ends: dict[str, tuple[float, ...]] = {}
    sections = {}
    for name in KEYS:
        drawn, fixed = getattr(priors, name, None), getattr(cosmology, name)
        sections[name] = "cosmology" if drawn is None else "priors"
        ends[name] = drawn if drawn is not None else () if fixed is None else (fixed,)

    def problem(name: str, message: str) -> Problem:
        shown = list(ends[name]) if len(ends[name]) > 1 else ends[name][0]
        return Problem(f"{sections[name]}.{name}", f"= {shown}: {message}")

    yield from _of_tables(cosmology, {n for n, section in sections.items() if section == "priors"})
    wrong = list(conflicts(ends, cosmology.radiation))
    yield from (problem(name, message) for name, message in wrong)
    a, worlds = np.linspace(0.02, A_MAX, 100), [] if wrong else extremes(cosmology, priors)
    with arrays_within():
        if any(np.any(world.a3_e2(a) <= 0) for world in worlds):
            message = f"with the other parameters the expansion would end before a = {A_MAX:g}"
            yield problem("Omega_k", message)
    code = cosmology.transfer
    if code != "eisenstein-hu" and importlib.util.find_spec(PACKAGES[code]) is None:
        message = f'= "{code}": needs the package {PACKAGES[code]}: pip install {PACKAGES[code]}'
        yield Problem("cosmology.transfer", message)
    if ends["Omega_b"] and min(ends["Omega_b"]) == 0 and code != "eisenstein-hu":
        message = f'transfer = "{code}" needs baryons, above 0; or use transfer = "eisenstein-hu"'
        yield problem("Omega_b", message)


def _of_tables(cosmology: PartialCosmologyOptions, drawn: Collection[str]) -> Iterator[Problem]:
    """Yields what does not go with a table of power, which belongs to one universe.

    Args:
        cosmology: the section [cosmology].
        drawn: names of the parameters that have a prior.
    """
    if cosmology.power is None:
        return
    for name in ("A_s", "f_NL"):
        if name in drawn or getattr(cosmology, name) not in (None, 0.0):
            section = "priors" if name in drawn else "cosmology"
            yield Problem(f"{section}.{name}", NOT_IN_TABLES[name])
    for name in (each for each in SHAPE if each in drawn):
        reason = "goes without power, which belongs to one universe; sigma8 alone can vary"
        yield Problem(f"priors.{name}", reason)


_Column = Annotated[int, Field(ge=0)]
_Share = Annotated[float, Field(ge=0)]


class PowerFile(Options):
    """A file with the linear power of one redshift, see `PowerTable`."""

    file: AnyPath = Field(description="a text file with columns k, P")
    columns: Annotated[tuple[_Column, _Column], BeforeValidator(listed)] = Field(
        default=(0, 1), description="two whole numbers: the columns of k and P, from 0"
    )
    redshift: Annotated[float, Unit("redshift"), Field(ge=0, le=LATEST)] = Field(
        default=0.0, description=f"a redshift from 0 to {LATEST:g}"
    )
    of: Part = Field(default="matter", description=either(get_args(Part)))
    unit: LengthUnit = Field(default="Mpc/h", description=either(get_args(LengthUnit)))

    @override
    def problems(self) -> Iterator[Problem]:
        try:
            self.table  # noqa: B018
        except (OSError, ValueError) as error:
            reason = error.__cause__ or error  # without the path
            yield self.problem("file", str(getattr(reason, "strerror", None) or reason))

    @functools.cached_property
    def table(self) -> PowerTable:
        """The table as first read.

        Raises:
            OSError, ValueError: see `PowerTable.read`.
        """
        return PowerTable.read(self.file, self.columns, self.redshift, of=self.of, unit=self.unit)


def _file_alone(value: Any) -> Any:
    return {"file": value} if isinstance(value, str) else value


class _Chosen(Options):
    """What is chosen besides the parameters."""

    transfer: Transfer = Field(default="eisenstein-hu", description=either(get_args(Transfer)))
    radiation: bool = Field(default=False, description="true or false")
    m_nu_shares: Annotated[tuple[_Share, _Share, _Share] | None, BeforeValidator(listed)] = Field(
        default=None, description="three numbers of at least 0: each mass over the sum, m_nu"
    )
    power: Annotated[PowerFile | None, table_of(PowerFile), BeforeValidator(_file_alone)] = Field(
        default=None,
        description='a file with columns k, P; or { file = "pk.txt", redshift = 0.0 } and more',
    )

    @model_validator(mode="before")
    @classmethod
    def _take_masses(cls, keys: Any) -> Any:
        """Makes the sum and the shares of three masses."""
        if not isinstance(keys, Mapping) or not isinstance(keys.get("m_nu"), list):
            return keys
        masses = keys["m_nu"]
        if "m_nu_shares" in keys:
            raise ProblemsError([Problem("m_nu_shares", "goes with the sum of the masses")])
        try:
            total, shares = sum_and_shares(masses)
            return {**keys, "m_nu": total, "m_nu_shares": shares or None}
        except (TypeError, ValueError):
            must = f"= {masses}: must be a sum of masses, or three masses of at least 0"
            raise ProblemsError([Problem("m_nu", must)]) from None

    @override
    def problems(self) -> Iterator[Problem]:
        if self.m_nu_shares:
            try:
                shares_of(self.m_nu_shares)
            except ValueError as error:
                yield self.problem("m_nu_shares", str(error))

    @override
    def idle(self) -> dict[str, str]:
        return {} if self.power is None else {"transfer": "parameters, not with power"}

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of `Cosmology` by name, without those that are missing."""
        table = {} if self.power is None else {"power": self.power.table}
        return {**self.model_dump(exclude_none=True, exclude={"power"}), **table}


if TYPE_CHECKING:  # the keys follow from the table of parameters

    class PartialCosmologyOptions(_Chosen):
        """Parameters that the universes of a training share."""

        def __getattr__(self, name: str) -> Any: ...

    class _Complete(PartialCosmologyOptions): ...

    class ParameterRanges(Options):
        """The lowest and the highest value of each parameter that varies or is fitted."""

        def __getattr__(self, name: str) -> Any: ...

    class FittedRanges(ParameterRanges):
        """The lowest and highest values of fitted parameters, either amplitude among them."""

else:

    def _number(row: ParameterRow) -> Any:
        return Annotated[float, Field(**row.limits)]

    def _keys(*, complete: bool) -> dict[str, Any]:
        """Returns the fields of [cosmology]; those required only if complete."""
        fields: dict[str, Any] = {}
        for name in KEYS:
            row, default = PARAMETERS[name], None if name in REQUIRED else PARAMETERS[name].default
            if name in REQUIRED and complete:
                fields[name] = _number(row), Field(description=row.range_text)
            elif not complete:
                number = _number(row) if default is not None else _number(row) | None
                fields[name] = number, Field(default, description=row.range_text)
        return fields

    def _priors(names: Iterable[str]) -> dict[str, Any]:
        """Returns the fields of a section with priors of these parameters, by name."""
        rows = {name: PARAMETERS[name] for name in names}
        return {n: (Pair[_number(row)] | None, limits(row.range_text)) for n, row in rows.items()}

    PartialCosmologyOptions = create_model(
        "PartialCosmologyOptions", __base__=_Chosen, **_keys(complete=False)
    )
    _Complete = create_model("_Complete", __base__=PartialCosmologyOptions, **_keys(complete=True))
    ParameterRanges = create_model("ParameterRanges", __base__=Options, **_priors(VARIABLE))
    FittedRanges = create_model("FittedRanges", __base__=ParameterRanges, **_priors(AMPLITUDES))


class CosmologyOptions(_Complete):
    """A universe of cold dark matter, baryons and dark energy w0 + wa (1 - a)."""

    @override
    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.power is None or all(map(self.is_given, AMPLITUDES)):
            yield from self.exactly_one(*AMPLITUDES)


@dataclass(frozen=True)
class UniformPriors:
    """Uniform priors of some parameters.

    Attributes:
        ranges: name of a parameter -> (low, high), in the order of the parameters.

    Raises:
        ValueError: the ends of a range are not in order.
    """

    ranges: Mapping[str, tuple[float, float]]

    def __post_init__(self) -> None:
        rows, plain = PARAMETERS, {}
        for name, ends in self.ranges.items():
            plain[name] = in_unit(name, ends, rows[name].unit if name in rows else "")
        object.__setattr__(self, "ranges", plain)
        for name, (low, high) in self.ranges.items():
            if not low < high:
                raise ValueError(f"the prior of {name} from {low} to {high}: low must be below")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters."""
        return tuple(self.ranges)

    @property
    def low(self) -> np.ndarray:
        """The lower ends of the ranges, float64 [parameter]."""
        return np.array([low for low, _ in self.ranges.values()], np.float64)

    @property
    def high(self) -> np.ndarray:
        """The upper ends of the ranges, float64 [parameter]."""
        return np.array([high for _, high in self.ranges.values()], np.float64)

    @property
    def centre(self) -> np.ndarray:
        """The means of the priors, float64 [parameter]."""
        return 0.5 * (self.low + self.high)
