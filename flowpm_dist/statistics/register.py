"""The register of statistics, by name. Nothing here imports TensorFlow.

To add one, write its measurement in a module of its own, with a `Statistic`, and give the name of
that object here. Run files of simulations, posteriors and studies then know it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator

from flowpm_dist.options import checked_name, is_python_name, object_named, python_object

if TYPE_CHECKING:
    from flowpm_dist.grid.field import Field
    from flowpm_dist.statistics.noisy_maps import NoisyMaps

STATISTICS: dict[str, Any] = {
    "power": "flowpm_dist.statistics.power:POWER",
    "histograms": "flowpm_dist.statistics.histogram:HISTOGRAMS",
    "bispectrum": "flowpm_dist.statistics.bispectra:BISPECTRUM",
    "multipoles": "flowpm_dist.statistics.power:MULTIPOLES",
    "wedges": "flowpm_dist.statistics.power:WEDGES",
    "correlation": "flowpm_dist.statistics.correlation:CORRELATION",
}
"""Name -> `Statistic` of a density or a function, or its "package.module:object"."""

MAP_STATISTICS: dict[str, Any] = {
    "power": "flowpm_dist.statistics.noisy_maps:map_power",
    "peaks": "flowpm_dist.statistics.noisy_maps:map_peaks",
    "histograms": "flowpm_dist.statistics.noisy_maps:map_histograms",
}
"""Name -> "package.module:object" of a statistic of `NoisyMaps`."""

STATISTICS_VERSION = 1
"""Raise it when the features of a statistic above change. Features that a training has kept under
another version are measured again.
"""


ARGUMENTS: dict[str, Any] = {
    "values": "flowpm_dist.statistics.histogram:DENSITIES",
    "axis": None,
    "interlaced": None,
    "shot_noise": 0.0,
    "window": "cic",
}
"""What a statistic can be given besides the density, see `Statistic.measure`, and what it is for a
density in real space without shot noise; "package.module:object" names an object.
"""


def _plain(name: str) -> Any:
    value = ARGUMENTS[name]
    return python_object(value) if is_python_name(str(value)) else value


@dataclass(frozen=True)
class Statistic:
    """A statistic of a density of mean 1, or of maps.

    Attributes:
        measure: a function of a `Field` of one universe or of a batch, or of `NoisyMaps`. All ranks
            that have a part of the density call it together. It returns a
            `flowpm_dist.io.labelled.Labelled` result, or an array [value] or [universe, value], the
            same on these ranks. It receives each of these arguments that it has:

            - `values`: the kind of the density's numbers, a
              `flowpm_dist.statistics.histogram.CellValues`;
            - `axis`: "x", "y" or "z", the line of sight of a density in redshift space;
            - `interlaced`: a density of the same particles half a cell away, or None;
            - `shot_noise`: the shot noise to subtract from the power [(Mpc/h)^3];
            - `window`: the scheme of painting whose window the modes are divided by, or None.
        features: makes of a result the vectors [value] or [universe, value] that parameters are
            inferred from. None if `measure` returns them.
    """

    measure: Callable[..., Any]
    features: Callable[[Any], Any] | None = None

    def takes(self, argument: str) -> bool:
        """Returns whether `measure` has an argument with this name."""
        return argument in inspect.signature(self.measure).parameters

    def measured(self, data: Field | NoisyMaps, **arguments: object) -> Any:
        """Returns the result; arguments that `measure` does not have are left out.

        Args:
            data: a density or maps, see `measure`.
            arguments: what is known of the data, by the names in `measure`. An argument that
                `measure` needs and that is not given has its value in `ARGUMENTS`.
        """
        known = {name: x for name, x in arguments.items() if self.takes(name)}
        needed = [n for n in self.needed if n in ARGUMENTS and n not in known]
        return self.measure(data, **{name: _plain(name) for name in needed}, **known)

    @property
    def needed(self) -> list[str]:
        """The names of the arguments of `measure`, after the first, that have no default."""
        parameters = list(inspect.signature(self.measure).parameters.values())[1:]
        named = (p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
        return [p.name for p in named if p.default is p.empty]

    def vectors(self, result: object) -> Any:
        """Returns the features of a result."""
        return result if self.features is None else self.features(result)


def statistic_named(name: Any, *, of_maps: bool = False) -> Statistic:
    """Returns a statistic.

    Args:
        name: a name of `STATISTICS` or of `MAP_STATISTICS`; or "package.module:object" of a
            `Statistic` or of a function, which is its `measure`.
        of_maps: whether a statistic of maps is meant.

    Raises:
        ValueError: there is no such statistic.
    """
    named = object_named(name, *_register(of_maps))
    return named if isinstance(named, Statistic) else Statistic(named)


def checked_statistic(name: Any, *, of_maps: bool = False) -> Any:
    """Returns the name of a statistic if it exists; a user's module is not imported.

    Raises:
        ValueError: there is no such statistic.
    """
    known, kind = _register(of_maps)
    return checked_name(name, known, kind)


def _register(of_maps: bool) -> tuple[dict[str, Any], str]:
    return (MAP_STATISTICS, "statistic of maps") if of_maps else (STATISTICS, "statistic")


StatisticName = Annotated[str, AfterValidator(checked_statistic)]
"""A name of `STATISTICS`, or "package.module:object", in a run file."""


def short_name(name: str) -> str:
    """Returns what a statistic is called in files and columns: "kurtosis" of "mine:kurtosis"."""
    return name.rpartition(":")[2]


def twice_named(names: Collection[str]) -> list[str]:
    """Returns the short names that several of the statistics have."""
    short = [short_name(name) for name in names]
    return sorted({name for name in short if short.count(name) > 1})
