"""Arrays with named axes and units, and results made of them.

Results become tables of pandas and astropy, data sets of xarray, and files.
"""

from __future__ import annotations

import abc
import csv
import importlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from flowpm_dist.io.drawing import Axes, draw_curves
from flowpm_dist.io.files import written_whole

if TYPE_CHECKING:
    import pandas
    import xarray
    from astropy.table import QTable


@dataclass(frozen=True)
class LabelledArray:
    """An array with the names of its axes.

    Attributes:
        values: a map is [..., y, x] or, of the whole sky, [..., pixel].
        dimensions: names of its axes.
        units: units of the values.
        meaning: in words.
    """

    values: np.ndarray
    dimensions: tuple[str, ...]
    units: str
    meaning: str


class Labelled(abc.ABC):
    """A result whose arrays have named axes and units."""

    @abc.abstractmethod
    def labelled(self) -> dict[str, LabelledArray]:
        """Returns the arrays by name; one with the name of its only axis numbers this axis."""

    def to_xarray(self) -> xarray.Dataset:
        """Returns the arrays with their axes; attributes hold units and meanings.

        Raises:
            ImportError: xarray is not installed.
        """
        arrays = {
            name: (each.dimensions, each.values, {"units": each.units, "long_name": each.meaning})
            for name, each in self.labelled().items()
        }
        return package("xarray").Dataset(arrays)

    def to_pandas(self) -> pandas.DataFrame:
        """Returns a table with a row for each place along the axes, and a column for each array.

        The axes are its index. `attrs["units"]` holds the units by column.

        Raises:
            ImportError: pandas is not installed.
            ValueError: no array has all axes, so that a table would repeat values.
        """
        pandas, arrays = package("pandas"), self.labelled()
        index, columns = _table(arrays)
        names, places = [*index], [*index.values()]
        table = pandas.DataFrame(
            columns,
            index=pandas.MultiIndex.from_arrays(places, names=names)
            if len(names) > 1
            else pandas.Index(places[0], name=names[0]),
        )
        table.attrs["units"] = {name: each.units for name, each in arrays.items()}
        return table

    def to_table(self) -> QTable:
        """Returns a table of astropy with units, a row for each place along the axes.

        Columns that number the places along an axis come first.

        Raises:
            ValueError: see `to_pandas`.
        """
        arrays = self.labelled()
        index, columns = _table(arrays)
        table = package("astropy.table").QTable()
        for name, values in (index | columns).items():
            add_column(table, name, values, arrays.get(name))
        return table

    def write_csv(self, path: str | Path) -> None:
        """Writes the table of `to_pandas` as comma-separated values, without pandas.

        The first line has the names and, in brackets, the units of the columns. Columns that number
        the places along an axis come first.

        Raises:
            ValueError: see `to_pandas`.
            WriteError: the file cannot be written.
        """
        arrays = self.labelled()
        index, columns = _table(arrays)
        units = {name: each.units for name, each in arrays.items() if each.units not in ("", "1")}
        table = index | columns
        with written_whole(Path(path)) as aside, aside.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(f"{x} [{units[x]}]" if x in units else x for x in table)
            kinds = ["d" if x.dtype.kind in "iu" else ".8e" for x in table.values()]
            for row in zip(*table.values(), strict=True):
                writer.writerow(map(format, row, kinds))


def add_column(table: QTable, name: str, values: np.ndarray, about: LabelledArray | None) -> None:
    """Adds a column to a table of astropy.

    Args:
        table: the table.
        name: the name of the column.
        values: [row, ...].
        about: its unit and meaning; None if it has neither. A unit that astropy does not have goes
            into the description.
    """
    unit = None if about is None else astropy_unit(about.units)
    table[name] = values if unit is None else values * unit
    if about is not None:
        is_lost = unit is None and about.units not in ("", "1")
        table[name].info.description = about.meaning + (f" [{about.units}]" if is_lost else "")


def astropy_unit(text: str) -> Any:
    """Returns a unit of this package, such as "(Mpc/h)^3", as astropy's.

    It is None for a pure number, and for a unit that astropy does not have, such as "cells".
    The h of a unit is astropy's `littleh`. Its readers of files know it only if
    `astropy.units.add_enabled_units(astropy.cosmology.units)` was called.
    """
    if text in ("", "1"):
        return None
    units, cosmology = package("astropy.units"), package("astropy.cosmology.units")
    powers = re.fullmatch(r"\((.*)\)\^(-?\d+)", text)  # "(Mpc/h)^3"
    base, power = powers.groups() if powers else (text, "1")
    plain = re.sub(r"\bh\b", "littleh", base.replace("Msun", "solMass"))
    with units.add_enabled_units(cosmology):
        unit = units.Unit(plain, parse_strict="silent")
    return None if isinstance(unit, units.UnrecognizedUnit) else unit ** int(power)


def _table(
    arrays: Mapping[str, LabelledArray],
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns the index and the columns of a table by name, each [row]."""
    largest = max(arrays.values(), key=lambda each: len(each.dimensions))
    sizes = dict(zip(largest.dimensions, largest.values.shape, strict=True))
    if any(not {*each.dimensions} <= {*sizes} for each in arrays.values()):
        raise ValueError("the arrays of this result have different axes: use to_xarray")
    columns = {}
    for name, each in arrays.items():
        if name not in sizes:
            shape = [n if axis in each.dimensions else 1 for axis, n in sizes.items()]
            whole = np.broadcast_to(each.values.reshape(shape), (*sizes.values(),))
            columns[name] = whole.ravel()
    numbers = [arrays[x].values if x in arrays else np.arange(n) for x, n in sizes.items()]
    rows = np.indices([*sizes.values()]).reshape(len(sizes), math.prod(sizes.values()))
    index = {axis: each[row] for axis, each, row in zip(sizes, numbers, rows, strict=True)}
    return index, columns


@dataclass(frozen=True)
class Values(Labelled):
    """The numbers that a user's own statistic returns, without units.

    Attributes:
        values: [value], or [universe, value].
    """

    values: np.ndarray

    def plot(self, axes: Axes | None = None, label: str = "") -> Axes:
        """Draws the values by their numbers, a curve for each universe.

        Args:
            axes: what to draw on; by default a new figure of pyplot.
            label: the label of the curve.
        """
        numbers = np.arange(self.values.shape[-1])
        names = "number of the value", "value"
        return draw_curves(axes, numbers, self.values, names, labels=[label], logarithmic="")

    @override
    def labelled(self) -> dict[str, LabelledArray]:
        axes = (*leading_axes(self.values, 1), "number")
        return {"value": LabelledArray(self.values, axes, "1", "value")}


def leading_axes(values: np.ndarray, own: int, name: str = "batch") -> tuple[str, ...]:
    """Returns names of the axes of an array before its last ones.

    Args:
        values: the array.
        own: number of the last axes.
        name: the name of a single axis; several are numbered.
    """
    count = np.ndim(values) - own
    return (name,) * count if count < 2 else tuple(f"{name}_{n}" for n in range(count))


def package(name: str) -> Any:
    """Returns an optional package.

    Raises:
        ImportError: it is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ImportError(
            f"{name} is not installed: pip install {name}; or, in a checkout of flowpm_dist and "
            "with all that goes with it, pip install '.[interchange]'"
        ) from error
