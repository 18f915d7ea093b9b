"""Cosmological parameters as options of a run file, and their uniform priors."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field, create_model
from typing_extensions import override

from flowpm_dist.cosmology.arrays import arrays_within
from flowpm_dist.cosmology.background import A_MAX, Background, expansion_parameters
from flowpm_dist.cosmology.parameters import (
    AMPLITUDES,
    PARAMETERS,
    VARIABLE,
    ParameterRow,
    Transfer,
    conflicts,
)
from flowpm_dist.options import Options, Pair, Problem, in_unit, limits

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
        return [Background({**each, "radiation": radiation}) for each in values]


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

    wrong = list(conflicts(ends, cosmology.radiation))
    yield from (problem(name, message) for name, message in wrong)
    a, worlds = np.linspace(0.02, A_MAX, 100), [] if wrong else extremes(cosmology, priors)
    with arrays_within():
        if any(np.any(world.a3_e2(a) <= 0) for world in worlds):
            message = f"with the other parameters the expansion would end before a = {A_MAX:g}"
            yield problem("Omega_k", message)
    if ends["Omega_b"] and min(ends["Omega_b"]) == 0 and cosmology.transfer == "camb":
        message = 'transfer = "camb" needs baryons, above 0; or use transfer = "eisenstein-hu"'
        yield problem("Omega_b", message)


if TYPE_CHECKING:  # the keys follow from the table of parameters

    class PartialCosmologyOptions(Options):
        """Parameters that the universes of a training share."""

        transfer: Transfer
        radiation: bool

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

    _TRANSFER = Field(default="eisenstein-hu", description='"eisenstein-hu" or "camb"')
    _RADIATION = Field(default=False, description="true or false")
    PartialCosmologyOptions = create_model(
        "PartialCosmologyOptions",
        __base__=Options,
        **_keys(complete=False),
        transfer=(Transfer, _TRANSFER),
        radiation=(bool, _RADIATION),
    )
    _Complete = create_model("_Complete", __base__=PartialCosmologyOptions, **_keys(complete=True))
    ParameterRanges = create_model("ParameterRanges", __base__=Options, **_priors(VARIABLE))
    FittedRanges = create_model("FittedRanges", __base__=ParameterRanges, **_priors(AMPLITUDES))


class CosmologyOptions(_Complete):
    """A universe of cold dark matter, baryons and dark energy w0 + wa (1 - a)."""

    @override
    def problems(self) -> Iterator[Problem]:
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
