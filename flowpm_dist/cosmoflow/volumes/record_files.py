"""Density volumes with their parameters in TFRecord files: the format and the index.

A dataset is a folder with a `dataset.json` and files such as `<split>-00003.tfrecord`. If volumes
are split over ranks, each rank has its own files, such as
`<split>-00003.block-1-0-of-2-1.tfrecord`: row 1 of 2, column 0 of 1. A record is a
tf.train.Example:

    x            bytes      values of the block, little-endian, x slowest, channel fastest
    y            floats     the parameters, in physical units
    shape        int64      of the block: x, y, z, channel
    parameters   bytes      names of the parameters
    unit         bytes      of a density of 1
    compression  bytes      "zlib" when x is compressed, else empty
    seed, index  int64      of the simulation; index counts all simulations of the dataset

This is the layout of the public CosmoFlow files (x, y) with more features.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from pydantic import ConfigDict, NonNegativeInt
from typing_extensions import TypedDict

from flowpm_dist.cosmoflow.volumes.tfrecords import RecordError, record_bounds
from flowpm_dist.io.files import UnreadableError, write_json
from flowpm_dist.io.opening import checked
from flowpm_dist.options import keep_in_units
from flowpm_dist.options.regular_files import read_text

if TYPE_CHECKING:
    from meshimpl.process_mesh import ProcessMesh

DATASET = "dataset.json"
UNFINISHED = ".unfinished-flowpm-dist"
"""This file marks a folder in which a dataset was begun, until there is a dataset.json."""
SPLITS = ("train", "validation", "test")
FORMAT, VERSION = "flowpm-dist density records", 1
DTYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "int16": np.dtype("<i2")}
MEAN_ONE, MEAN_DENSITY, ONE_COUNT = "mean density 1", "mean density", "one count"
"""Units of volumes, see `DatasetHeader.unit`."""

FREE = ("attributes", "samples_per_file")
"""Properties that may differ between the splits of a dataset."""
_NAME = re.compile(
    r"(?P<split>[\w-]+)-(?P<number>\d{5,})"
    r"(?:\.block-(?P<row>\d+)-(?P<col>\d+)-of-(?P<rows>\d+)-(?P<cols>\d+))?\.tfrecord(?:\.gz)?"
)
_PUBLIC = re.compile(rb"\.tfrecords?(\.gz)?$")


class Block(NamedTuple):
    """One rank's part of a volume: x is split over rows, y over columns."""

    row: int = 0
    rows: int = 1
    col: int = 0
    cols: int = 1

    @classmethod
    def of(cls, mesh: ProcessMesh) -> Block:
        """Returns this rank's block of volumes that are split over a mesh."""
        row, col = mesh.coordinate("row"), mesh.coordinate("col")
        return cls(row, mesh.axis_size("row"), col, mesh.axis_size("col"))

    def cut(self, grid: Sequence[int]) -> tuple[slice, slice]:
        """Returns the cells of this block along x and y of a grid.

        Raises:
            RecordError: if there is no such block, or the grid does not divide.
        """
        if not (0 <= self.row < self.rows and 0 <= self.col < self.cols):
            raise RecordError(f"there is no block {tuple(self)} (row, rows, column, columns)")
        if grid[0] % self.rows or grid[1] % self.cols:
            raise RecordError(
                f"a grid {tuple(grid)} does not divide into {self.rows} x {self.cols} blocks"
            )
        x, y = grid[0] // self.rows, grid[1] // self.cols
        return slice(self.row * x, (self.row + 1) * x), slice(self.col * y, (self.col + 1) * y)


WHOLE = Block()


@dataclass(frozen=True)
class DatasetHeader:
    """The properties that all records of a dataset share.

    Attributes:
        grid: the cells of a whole volume.
        parameters: the names of the parameters, in the order of y.
        channels: the number of values per cell; 1 is also written as [x, y, z].
        blocks: the rows and columns that the volumes are split into.
        box_size: the sides of the volume [Mpc/h], or one number for a cube; None if unknown.
        dtype: "float32", or "int16", which holds round(density * scale).
        scale: the scale of int16; the default holds densities up to 127 to within 1/512.
        compressed: whether x is compressed, with zlib.
        samples_per_file: the number of samples in each file but the last.
        unit: the meaning of a value of 1. `MEAN_ONE`: the mean of each volume is 1 by construction.
            `MEAN_DENSITY`: the mean may have any value. `ONE_COUNT`, or another unit in words.
        priors: the lowest and the highest value of each parameter.
        attributes: anything JSON can hold, such as the run's configuration.

    Raises:
        RecordError: the values do not describe a dataset.
    """

    grid: tuple[int, int, int]
    parameters: tuple[str, ...]
    channels: int = 1
    blocks: tuple[int, int] = (1, 1)
    box_size: tuple[float, float, float] | float | None = None
    dtype: str = "float32"
    scale: float = 256.0
    compressed: bool = False
    samples_per_file: int = 64
    unit: str = MEAN_ONE
    priors: Mapping[str, tuple[float, float]] | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    __pydantic_config__: ClassVar = ConfigDict(allow_inf_nan=False, extra="forbid")

    def __post_init__(self) -> None:
        keep_in_units(self, scale="", box_size="Mpc/h")
        size = self.box_size
        normal = {
            "grid": tuple(int(n) for n in self.grid),
            "parameters": tuple(self.parameters),
            "blocks": tuple(int(n) for n in self.blocks),
            "box_size": size if size is None else tuple(np.broadcast_to(size, 3).tolist()),
            "priors": self.priors and {k: (v[0], v[1]) for k, v in self.priors.items()},
        }
        for name, value in normal.items():
            object.__setattr__(self, name, value)
        if len(self.grid) != 3 or min(*self.grid, self.channels, *self.blocks) < 1:
            raise RecordError(f"grid {self.grid}, {self.channels} channels, blocks {self.blocks}")
        if self.dtype not in DTYPES:
            raise RecordError(f"dtype {self.dtype!r}; must be one of {', '.join(DTYPES)}")
        if not self.parameters or self.samples_per_file < 1 or not self.scale > 0:
            raise RecordError("needs parameters, at least one sample per file, and a scale over 0")
        if self.priors and set(self.priors) != set(self.parameters):
            raise RecordError(
                f"the priors are for {list(self.priors)}, the parameters are {self.parameters}"
            )
        self.block_shape()  # checks that the grid divides

    def block_shape(self, block: Block | None = None) -> tuple[int, int, int, int]:
        """Returns the cells and channels of a block; by default of a block of the dataset."""
        x, y = (block or Block(0, self.blocks[0], 0, self.blocks[1])).cut(self.grid)
        return (x.stop - x.start, y.stop - y.start, self.grid[2], self.channels)

    def differences(self, other: DatasetHeader) -> list[str]:
        """Returns the names of properties that splits of a dataset must share, but that differ."""
        names = [each.name for each in fields(self) if each.name not in FREE]
        return [name for name in names if getattr(self, name) != getattr(other, name)]

    @property
    def block_bytes(self) -> int:
        """The size of a block's values without compression [bytes]."""
        return math.prod(self.block_shape()) * DTYPES[self.dtype].itemsize


class SplitCount(TypedDict):
    """The numbers of samples and of files of a split."""

    samples: NonNegativeInt
    files: NonNegativeInt


NOTHING: SplitCount = {"samples": 0, "files": 0}
"""The numbers of a split that a dataset does not have."""


class SplitFile(NamedTuple):
    """A file of a dataset, as its name describes it."""

    path: Path
    split: str
    number: int
    block: Block


def file_name(split: str, number: int, block: Block = WHOLE) -> str:
    """Returns the name of a split's file."""
    row, rows, col, cols = block
    part = "" if (rows, cols) == (1, 1) else f".block-{row}-{col}-of-{rows}-{cols}"
    return f"{split}-{number:05d}{part}.tfrecord"


def split_files(folder: Path) -> dict[str, list[SplitFile]]:
    """Returns the files of each split, sorted, including those packed with gzip."""
    splits = defaultdict(list)
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := _NAME.fullmatch(path.name):
            block = Block(*(int(match[key] or key.endswith("s")) for key in Block._fields))
            file = SplitFile(path, match["split"], int(match["number"]), block)
            splits[file.split].append(file)
    return {split: sorted(files, key=lambda f: f[2:]) for split, files in sorted(splits.items())}


def listed_files(header: DatasetHeader, count: SplitCount) -> int:
    """Returns the number of files that a split has by its header."""
    return count["files"] * math.prod(header.blocks)


def read_header(folder: Path) -> tuple[DatasetHeader, dict[str, SplitCount]]:
    """Returns the header and, for each split, the numbers of "samples" and "files".

    Raises:
        RecordError: if dataset.json is missing, damaged, or of another format.
    """
    path = folder / DATASET
    try:
        stored = json.loads(read_text(path))
        if (stored.pop("format"), stored.pop("version")) != (FORMAT, VERSION):
            raise RecordError(f"must be in format {FORMAT!r}, version {VERSION}")
        splits = checked(dict[str, SplitCount], stored.pop("splits"), f"{path} is damaged:")
        stored["compressed"] = stored.pop("compression") == "zlib"
        return checked(DatasetHeader, stored, f"{path} is damaged:"), splits
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from error
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from error
    except UnreadableError as error:
        raise RecordError(str(error)) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RecordError(f"{path} is damaged: {error!r}") from error


def finish_dataset(folder: Path, header: DatasetHeader) -> dict[str, SplitCount]:
    """Writes dataset.json, which completes the dataset.

    Must be called on one rank, after all writers are closed.

    Returns:
        For each split, the numbers of "samples" and "files".

    Raises:
        RecordError: if a file is truncated, has other blocks than the header, or lacks a block of
            the same number.
        WriteError: if dataset.json cannot be written.
    """
    splits = {split: _count(files, header) for split, files in split_files(folder).items()}
    content = asdict(header)
    content["compression"] = "zlib" if content.pop("compressed") else None
    content = {"format": FORMAT, "version": VERSION, "splits": splits, **content}
    write_json(folder / DATASET, content)
    return splits


def _count(files: Iterable[SplitFile], header: DatasetHeader) -> SplitCount:
    counts: dict[int, dict[Block, int]] = defaultdict(dict)
    for path, _, number, block in files:
        if (block.rows, block.cols) != header.blocks:
            raise RecordError(f"{path} is not split into {header.blocks} blocks: move it away")
        counts[number][block] = len(record_bounds(path)) - 1
    wanted = header.blocks[0] * header.blocks[1]
    for number, of_block in counts.items():
        if len(of_block) != wanted or len(set(of_block.values())) != 1:
            raise RecordError(
                f"file {number} of split {next(iter(files)).split!r} in {path.parent} must have "
                f"{wanted} blocks with equally many records; found "
                f"{[(tuple(block), n) for block, n in of_block.items()]}"
            )
    samples = sum(next(iter(of_block.values())) for of_block in counts.values())
    return {"samples": samples, "files": len(counts)}


def dataset_files(folder: Path, split: str, most: int | None = None) -> list[Path]:
    """Returns the files of a split, sorted by name.

    Args:
        folder: the dataset.
        split: its name.
        most: return so many of the first files only: there may be half a million; None for all.

    Raises:
        RecordError: if there is no such split. The message lists the splits that exist.
    """
    written, is_finished = split_files(folder), (folder / DATASET).exists()
    if is_finished:
        files = [file.path for file in written.get(split, [])[:most]]
    else:
        files = [folder / split / os.fsdecode(name) for name in names_of(folder, split)[:most]]
    if files:
        return files
    known = list(written) if is_finished else splits_of(folder)
    if not known and written:
        raise RecordError(
            f"{folder} has record files, but no {DATASET}: writing it was not finished "
            "(finish_dataset does it)"
        )
    there = f"the splits there are: {', '.join(known)}" if known else "there is none"
    raise RecordError(f"{folder} has no split {split!r}; {there}")


def names_of(folder: Path, split: str) -> list[bytes]:
    """Returns the sorted names of the record files in `folder/split`, without opening them."""
    return sorted(_public_names(folder / split))


def splits_of(folder: Path) -> list[str]:
    """Returns the names of a dataset's splits; in the public layout, its folders of records."""
    if (folder / DATASET).exists():
        return list(read_header(folder)[1])
    folders = folder.iterdir() if folder.is_dir() else ()
    return sorted(path.name for path in folders if any(_public_names(path)))


def _public_names(folder: Path) -> Iterator[bytes]:
    with contextlib.suppress(OSError), os.scandir(os.fsencode(folder)) as entries:
        yield from (entry.name for entry in entries if _PUBLIC.search(entry.name))
