"""Volumes in arrays with a table of their parameters, as CAMELS and Quijote publish them.

All volumes are in one .npy file or in one data set of an HDF5 file, [volume, x, y, z] or with
channels. Or each volume is in a .npy file, [x, y, z] or with channels; their path has "{}" for the
number of the volume. A rank reads only its block of a volume, when it is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flowpm_dist.cosmoflow.volumes.record_files import (
    MEAN_ONE,
    SPLITS,
    WHOLE,
    Block,
    DatasetHeader,
    RecordError,
)
from flowpm_dist.cosmoflow.volumes.records import Dataset, Sample
from flowpm_dist.io.files import UnreadableError, reading
from flowpm_dist.io.opening import check_stored, hdf5_file
from flowpm_dist.io.volume import HDF5, mapped_array
from flowpm_dist.observables.observations import REASON
from flowpm_dist.options.regular_files import read_text

if TYPE_CHECKING:
    from flowpm_dist.cosmoflow.planning.data_options import ArrayData
    from flowpm_dist.cosmoflow.planning.plan import TrainingPlan

NUMBER = "{}"
FIRST = 8
"""Number of volumes whose mean shows whether the unit can be right."""
MOST_TABLE = 2**28
"""Size of the largest table [bytes]."""


class ArraySet:
    """All volumes of an array, and their parameters; it reads only headers and the table.

    Args:
        data: `volumes`, `table`, `columns`, `parameters`, `dtype`, `unit`, and the sizes of the
            splits, see `ArrayData`.
        grid: the cells that volumes must have.
        box_size: sides of the volumes [Mpc/h].
        priors: ranges of the parameters, which the table does not contain. By default the range of
            each column, extended at both ends by half the mean distance of its values, so that no
            value lies on the edge.

    Attributes:
        header: the properties that all volumes share.
        parameters: float64 [volume, parameter].

    Raises:
        TableError: see `read_table`; or a parameter is the same in all rows, or outside its prior.
        RecordError: arrays are missing, or their number, cells or dtype differ from the run file
            or from the table.
    """

    def __init__(
        self,
        data: ArrayData,
        grid: Sequence[int],
        box_size: Sequence[float] | float | None,
        priors: Mapping[str, tuple[float, float]],
    ) -> None:
        self._data, self._one_each = data, NUMBER in str(data.volumes)
        names, self.parameters = read_table(data.table, data.columns, data.parameters)
        ranges = {
            name: self._range(name, column, priors.get(name))
            for name, column in zip(names, self.parameters.T, strict=True)
        }
        self._first = self._open(0)
        shape = self._first.shape if self._one_each else self._first.shape[1:]
        if len(shape) not in (3, 4) or tuple(shape[:3]) != tuple(grid):
            wanted = list(grid) if self._one_each else ["volumes", *grid]
            raise RecordError(
                f"{self._file(0)} has the shape {list(self._first.shape)}; must be {wanted}, or "
                "with channels as a last dimension"
            )
        rows = len(self.parameters)
        if not self._one_each and len(self._first) != rows:
            raise RecordError(
                f"{data.volumes} holds {len(self._first)} volumes, {data.table} has {rows} rows: "
                "one row for each volume, in their order"
            )
        missing = (path for path in self.files[1:] if self._one_each and not path.exists())
        if (path := next(missing, None)) is not None:
            raise RecordError(f"{path} is missing; {data.table} has {rows} rows")
        self.header = DatasetHeader(
            tuple(shape[:3]),
            names,
            shape[3] if len(shape) == 4 else 1,
            box_size=box_size,  # type: ignore[arg-type]
            priors=ranges,
            unit=MEAN_ONE if data.unit == "mass" else data.unit,
        )

    def _range(
        self, name: str, column: np.ndarray, prior: tuple[float, float] | None
    ) -> tuple[float, float]:
        low, high = float(column.min()), float(column.max())
        if low == high:
            raise TableError(f"{self._data.table}: {name} is {low:g} in all rows: nothing to learn")
        if prior is None:
            beyond = 0.5 * (high - low) / (len(column) - 1)
            return low - beyond, high + beyond
        if low < prior[0] or high > prior[1]:
            raise TableError(
                f"{self._data.table}: {name} is from {low:g} to {high:g}, but priors.{name} is "
                f"{list(prior)}"
            )
        return prior

    def check_unit(self) -> None:
        """Checks that the first `FIRST` volumes have the mean of a density, if means are kept.

        Raises:
            RecordError: their mean does not fit the unit.
        """
        limits = {"density": REASON, "overdensity": (-0.5, 0.5)}.get(self._data.unit)
        if limits is None:
            return
        rows = range(min(FIRST, len(self.parameters)))
        mean = float(np.mean([self._means(row) for row in rows]))
        low, high = limits
        if np.isfinite(mean) and not low < mean < high:
            raise RecordError(
                f"{self._file(0)} has volumes of mean {mean:.4g}; with data.unit = "
                f'"{self._data.unit}" it must be from {low:g} to {high:g}; with "mass", volumes '
                "are divided by their means"
            )

    def _file(self, number: int) -> Path:
        return Path(str(self._data.volumes).replace(NUMBER, str(number)))

    def _open(self, number: int) -> Any:
        """Opens the array that holds a volume, and checks its dtype."""
        array = _opened(self._file(number))
        if np.dtype(array.dtype) != np.dtype(self._data.dtype):
            raise RecordError(
                f"{self._file(number)} holds {array.dtype}, data.dtype is {self._data.dtype!r}"
            )
        return array

    def _volume(self, number: int) -> tuple[Any, tuple[int, ...]]:
        """Returns the array that holds a volume, and the index of the volume in it.

        Raises:
            RecordError: the volume is missing, or has another shape than the first.
        """
        if not self._one_each:
            return self._first, (number,)
        array = self._open(number)
        if array.shape != self._first.shape:
            raise RecordError(
                f"{self._file(number)} has the shape {list(array.shape)}; must be "
                f"{list(self._first.shape)}, like the first"
            )
        return array, ()

    def _means(self, number: int) -> np.ndarray:
        """Returns the mean of each channel of a volume, plane by plane."""
        array, index = self._volume(number)
        shape = array.shape[len(index) :]
        total = np.zeros(shape[3:])
        for x in range(shape[0]):
            with reading(self._file(number), raises=RecordError):
                plane = np.asarray(array[(*index, slice(x, x + 1))], np.float64)
            total += plane.sum(axis=(0, 1, 2))
        return total.reshape(-1) / np.prod(shape[:3])

    def read(self, number: int, block: Block = WHOLE) -> np.ndarray:
        """Returns a block of a volume for the network, float32 [x, y, z, channel].

        Raises:
            RecordError: the volume has another shape, or values that no density can have.
        """
        (array, index), unit = self._volume(number), self._data.unit
        with reading(self._file(number), raises=RecordError):
            values = np.asarray(array[(*index, *block.cut(self.header.grid))], np.float64)
        values = values.reshape(self.header.block_shape(block))
        if unit == "overdensity":
            values += 1
        elif unit == "mass":
            values /= self._means(number)
        if not np.isfinite(values).all() or values.min() < 0:
            sign = "below -1" if unit == "overdensity" else "negative"
            raise RecordError(
                f"volume {number} of {self._file(number)} has values that are {sign} or "
                f'not finite: data.unit = "{unit}" allows neither'
            )
        return values.astype(np.float32)

    def rows(self, split: str) -> np.ndarray:
        """Returns the numbers of the volumes of a split, int64, increasing.

        The volumes of test and validation are drawn with `data.seed`; the others are for training.

        Raises:
            RecordError: there is no such split.
        """
        if split not in SPLITS:
            raise RecordError(f"no split {split!r}; the splits there are: {', '.join(SPLITS)}")
        drawn = np.random.default_rng(self._data.seed).permutation(len(self.parameters))
        ends = np.cumsum([self._data.test, self._data.validation])
        test, validation, train = np.split(drawn, ends)
        return np.sort({"train": train, "validation": validation, "test": test}[split])

    @property
    def files(self) -> list[Path]:
        """The file of the table, then the files of the arrays."""
        if self._one_each:
            return [self._data.table, *map(self._file, range(len(self.parameters)))]
        return [self._data.table, file_and_name(self._data.volumes)[0]]


def file_and_name(path: Path) -> tuple[Path, str]:
    """Returns the file and the name in "file.h5:name"; the name is empty without a colon."""
    text, colon, name = str(path).rpartition(":")
    return (Path(text), name) if colon and Path(text).suffix in HDF5 else (path, "")


def _opened(path: Path) -> Any:
    file, name = file_and_name(path)
    is_hdf5 = file.suffix in HDF5
    try:
        opened = hdf5_file(file) if is_hdf5 else mapped_array(file)
    except (OSError, ValueError, EOFError, RuntimeError) as error:
        raise RecordError(f"{file} is no readable .npy or HDF5 file ({error})") from error
    if not is_hdf5:
        return opened
    import h5py

    if not isinstance(opened.get(name or "/"), h5py.Dataset):
        names = [key for key, item in opened.items() if isinstance(item, h5py.Dataset)]
        raise RecordError(
            f"{file} has no data set {name!r}; name one after a colon, as in file.h5:name: those "
            f"it has are {', '.join(names) or 'none'}"
        )
    if opened[name].is_virtual or opened[name].external:
        try:
            check_stored(opened[name], f"{file}:{name}")
        except UnreadableError as error:
            raise RecordError(str(error)) from error
    return opened[name]


class ArrayDataset(Dataset):
    """A split of volumes in arrays, of which this rank reads one block of each.

    Args:
        volumes: all volumes.
        split: "train", "validation" or "test".
        block: this rank's part of each volume.
    """

    def __init__(self, volumes: ArraySet, split: str, block: Sequence[int] = WHOLE) -> None:
        self.volumes, self._block = volumes, Block(*block)
        self.header = volumes.header
        self.block_shape = self.header.block_shape(self._block)
        self._rows = volumes.rows(split)

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, position: int) -> Sample:
        """Returns the sample at a position of the split; its index is its row in the table."""
        row = int(self._rows[position])
        return self.volumes.read(row, self._block), self.volumes.parameters[row], row


def arrays_of(plan: TrainingPlan) -> ArraySet:
    """Returns the volumes of a training on arrays. Raises RecordError, see `ArraySet`."""
    assert plan.data.source == "arrays"
    return ArraySet(plan.data, plan.box.grid, plan.box.size, plan.priors.ranges)


class TableError(RecordError):
    """An error: a table of parameters cannot be read. The message names file and line."""


def read_table(
    path: Path, columns: Sequence[str] | None = None, wanted: Sequence[str] | None = None
) -> tuple[tuple[str, ...], np.ndarray]:
    """Returns the names and the values of the requested columns.

    Columns are separated by commas or by spaces. The first line may name them, with or without a
    "#" in front. Other lines that begin with "#" are skipped, and so are empty lines.

    Args:
        path: the path of the table.
        columns: names of all columns, if the first line does not name them.
        wanted: names of the columns to return, in order; by default all, but for columns of texts
            alone, such as names of simulations.

    Returns:
        The names, and float64 [row, column].

    Raises:
        TableError: there is no such table or column, a row has more or fewer columns than the
            first, or a requested value is no finite number.
    """
    names, body = _rows_of(path, columns)
    if missing := [name for name in wanted or () if name not in names]:
        raise TableError(f"{path} has no column {missing[0]!r}; those it has: {', '.join(names)}")
    wanted = wanted or [name for n, name in enumerate(names) if not _is_of_texts(body, n)]
    if not wanted:
        raise TableError(f"{path} has no column of numbers; those it has: {', '.join(names)}")
    chosen = [names.index(name) for name in wanted]
    rows = []
    for number, cells in body:
        for place in chosen:
            if not _is_number(cells[place]):
                raise TableError(
                    f"{path}, line {number}: {names[place]} = {cells[place]!r} is no finite number"
                )
        rows.append([float(cells[place]) for place in chosen])
    return tuple(wanted), np.array(rows)


def texts_of(path: Path, columns: Sequence[str] | None = None) -> dict[str, list[str]]:
    """Returns the columns of a table that hold no numbers, such as names of simulations.

    Args:
        path, columns: see `read_table`.

    Raises:
        TableError: see `read_table`.
    """
    names, body = _rows_of(path, columns)
    return {
        name: [cells[n] for _, cells in body]
        for n, name in enumerate(names)
        if _is_of_texts(body, n)
    }


def _rows_of(
    path: Path, columns: Sequence[str] | None
) -> tuple[tuple[str, ...], list[tuple[int, list[str]]]]:
    """Returns the names of the columns, and the number of the line and the cells of each row."""
    try:
        lines = list(enumerate(read_text(path, MOST_TABLE, encoding="utf-8-sig").splitlines(), 1))
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"cannot read the table {path}: {error}") from error
    lines = [(number, line) for number, line in lines if line.strip(" \t#")]
    if not lines:
        raise TableError(f"the table {path} is empty")
    first = _cells(lines[0][1].lstrip(" \t#"))
    named = not any(_is_number(cell) for cell in first)
    names = tuple(columns) if columns else tuple(first) if named else None
    if names is None:
        raise TableError(
            f"{path} does not name its {len(first)} columns: give data.columns, a list of names"
        )
    if columns and len(first) != len(columns):
        raise TableError(
            f"{path} has {len(first)} columns, data.columns names {len(columns)}: {list(columns)}"
        )
    body = [(n, _cells(line)) for n, line in lines[named:] if not line.lstrip().startswith("#")]
    if not body:
        raise TableError(f"the table {path} has no rows")
    for number, cells in body:
        if len(cells) != len(names):
            raise TableError(f"{path}, line {number}: {len(cells)} values for {len(names)} columns")
    return names, body


def _is_of_texts(body: Sequence[tuple[int, Sequence[str]]], column: int) -> bool:
    """Returns whether no row of a column is a number, not even one that is not finite."""
    return not any(_is_float(cells[column]) for _, cells in body)


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _cells(line: str) -> list[str]:
    return [c.strip().strip('"') for c in line.split(",")] if "," in line else line.split()


def _is_number(text: str) -> bool:
    return _is_float(text) and math.isfinite(float(text))
