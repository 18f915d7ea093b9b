"""Arrays with named axes and units, and results made of them: tables of pandas, data of xarray."""

from __future__ import annotations

import abc
import importlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas
    import xarray


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
        return _package("xarray").Dataset(arrays)

    def to_pandas(self) -> pandas.DataFrame:
        """Returns a table with a row for each place along the axes, and a column for each array.

        The axes are its index. `attrs["units"]` holds the units by column.

        Raises:
            ImportError: pandas is not installed.
            ValueError: no array has all axes, so that a table would repeat values.
        """
        pandas, arrays = _package("pandas"), self.labelled()
        largest = max(arrays.values(), key=lambda each: len(each.dimensions))
        sizes = dict(zip(largest.dimensions, largest.values.shape, strict=True))
        if any(not {*each.dimensions} <= {*sizes} for each in arrays.values()):
            raise ValueError("the arrays of this result have different axes: use to_xarray")
        columns = {}
        for name, each in arrays.items():
            if name not in sizes:
                shape = [n if axis in each.dimensions else 1 for axis, n in sizes.items()]
                columns[name] = np.broadcast_to(each.values.reshape(shape), (*sizes.values(),))
        numbers = [arrays[x].values if x in arrays else np.arange(n) for x, n in sizes.items()]
        rows = np.indices([*sizes.values()]).reshape(len(sizes), math.prod(sizes.values()))
        index = [each[row] for each, row in zip(numbers, rows, strict=True)]
        table = pandas.DataFrame(
            {name: values.ravel() for name, values in columns.items()},
            index=pandas.MultiIndex.from_arrays(index, names=[*sizes])
            if len(sizes) > 1
            else pandas.Index(index[0], name=next(iter(sizes))),
        )
        table.attrs["units"] = {name: each.units for name, each in arrays.items()}
        return table


def leading_axes(values: np.ndarray, own: int, name: str = "batch") -> tuple[str, ...]:
    """Returns names of the axes of an array before its last ones.

    Args:
        values: the array.
        own: number of the last axes.
        name: the name of a single axis; several are numbered.
    """
    count = np.ndim(values) - own
    return (name,) * count if count < 2 else tuple(f"{name}_{n}" for n in range(count))


def _package(name: str) -> Any:
    """Returns an optional package.

    Raises:
        ImportError: it is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ImportError(f"{name} is not installed: pip install {name}") from error
