"""Simulations that are never trained on, and the summary statistics of all simulations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmoflow.planning.folder import TrainingFolder, is_fresh
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.cosmoflow.scores.judging import Features
from flowpm_dist.cosmoflow.volumes.record_files import (
    Block,
    DatasetHeader,
    RecordError,
    finish_dataset,
    read_header,
)
from flowpm_dist.cosmoflow.volumes.record_writer import RecordWriter
from flowpm_dist.cosmoflow.volumes.sources import Batch
from flowpm_dist.cosmoflow.volumes.universes import (
    HISTOGRAM_EDGES,
    Generation,
    Lanes,
    UniverseMaker,
    header_of,
    maker_of,
    measured,
)
from flowpm_dist.grid.box import Box
from flowpm_dist.grid.field import Field
from flowpm_dist.io.files import read_arrays, save_arrays
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.statistics.histogram import DENSITIES, CellValues
from meshimpl.process_mesh import ProcessMesh

HELD_OUT = ("validation", "test")
"""Splits that are never trained on."""


class Statistics:
    """Parameters, power spectrum and one-point distribution of simulations, by their number.

    Each rank adds its replica's simulations, as many generations as the others. Rank 0 gathers and
    writes them.

    Args:
        path: the .npz file.
        mesh: all ranks.
        names: names of the parameters.
    """

    def __init__(self, path: Path, mesh: ProcessMesh, names: tuple[str, ...]) -> None:
        self.path, self._mesh, self._names = path, mesh, names
        self._rows: dict[int, np.ndarray] = {}
        self._sizes: tuple[int, ...] = (0, 0, 0)
        self._k = np.empty(0)
        self._edges = HISTOGRAM_EDGES

    def add(self, generation: Generation) -> None:
        """Adds the simulations of a generation."""
        self._k, self._edges = generation.k, generation.edges
        parts = generation.parameters, generation.power, generation.histogram
        self._sizes = tuple(part.shape[1] for part in parts)
        for place, index in enumerate(generation.index):
            self._rows[int(index)] = np.concatenate([part[place] for part in parts])

    def write(self) -> None:
        """Writes all statistics, with those that the file holds already. On all ranks together.

        If none have been added, an existing file stays unchanged.

        Raises:
            WriteError: on rank 0, where it cannot be written.
        """
        first = self._mesh.without("replica").rank == 0  # of those that share a replica
        rows = sorted(self._rows.items()) if first else []
        width = 1 + sum(self._sizes)
        table = np.array([[index, *row] for index, row in rows]).reshape(-1, width)
        gathered = self._mesh.gather_to_root(table)
        if gathered is None or not self._rows:
            return
        everything = np.concatenate([*gathered, self._written(width)])
        everything = everything[np.unique(everything[:, 0], return_index=True)[1]]
        ends = np.cumsum(self._sizes)[:-1]
        parameters, power, histogram = np.split(everything[:, 1:], ends, axis=1)
        arrays = {"parameters": parameters, "power": power, "histogram": histogram}
        arrays |= {"k": self._k, "edges": self._edges, "names": np.array(self._names)}
        save_arrays(self.path, arrays | {"index": everything[:, 0].astype(np.int64)})

    def _written(self, width: int) -> np.ndarray:
        if not self.path.exists():
            return np.empty((0, width))
        held = read_arrays(self.path)
        parts = [held["index"][:, np.newaxis], held["parameters"], held["power"]]
        return np.concatenate([*parts, held["histogram"]], axis=1)


def features(path: Path, count: int | None = None) -> Features:
    """Returns statistics that `Statistics` wrote, as baselines take them.

    Args:
        path: the .npz file.
        count: number of the first simulations to return; all by default.

    Raises:
        UnreadableError: the file is missing or damaged.
    """
    held = read_arrays(path)
    power, histogram, truth = (held[k][:count] for k in ("power", "histogram", "parameters"))
    return Features(tuple(map(str, held["names"])), np.log10(power), histogram, truth)


def make_volumes(
    maker: UniverseMaker,
    split: str,
    count: int,
    folder: Path,
    header: DatasetHeader,
    mesh: ProcessMesh,
    statistics: Path,
    *,
    overwrite: bool = False,
    progress: Callable[[int, int], None],
) -> None:
    """Simulates the universes of a split and writes them as one of a dataset. On all ranks.

    Args:
        maker: makes the universes.
        split: name of the split, and of the universes' stream.
        count: number of simulations; whole generations are made.
        folder: folder of the dataset; each rank writes its blocks.
        header: header of the dataset.
        mesh: all ranks.
        statistics: file of the simulations' statistics.
        overwrite: whether files of that split may be replaced.
        progress: called with simulations made and to be made.
    """
    lanes, measured_here = maker.lanes, Statistics(statistics, mesh, maker.targets)
    options: dict[str, Any] = {"block": Block.of(mesh), "overwrite": overwrite}
    options |= {
        "first_file": mesh.coordinate("replica"),
        "file_stride": mesh.axis_size("replica"),
    }
    with RecordWriter(folder, split, header, **options) as writer:
        for number in range(-(-count // lanes.batch)):
            made = maker.make(split, number)
            measured_here.add(made)
            samples = zip(made.volumes, made.parameters, made.seeds, made.index, strict=True)
            for volume, y, seed, index in samples:
                writer.write(volume, y, seed=int(seed), index=int(index))
            mesh.barrier()  # replicas are never further apart than a generation
            progress(min(count, (number + 1) * lanes.batch), count)
    measured_here.write()
    mesh.barrier()


def hold_out(
    plan: TrainingPlan,
    mesh: ProcessMesh,
    folder: TrainingFolder,
    progress: Progress,
    splits: Sequence[str] = HELD_OUT,
    maker: UniverseMaker | None = None,
) -> None:
    """Simulates splits of a dataset that are not trained on, unless all are there already.

    On all ranks together. A fresh test set has as many universes as the first, or a few more where
    replicas do not divide their number.

    Args:
        plan: the training's plan.
        mesh: all ranks.
        folder: the training's folder.
        progress: this rank's progress.
        splits: names of the splits, by default validation and test set.
        maker: makes the universes; by default one for batches that fit a fresh test set.
    """
    path, header = folder.dataset(splits[0]), header_of(plan, mesh)
    try:
        there = set(read_header(path)[1]) >= set(splits)
    except (RecordError, OSError):
        there = False
    # As rank 0 sees it: file systems may show it to others later.
    if bool(mesh.world.broadcast(tf.constant(int(there)))):
        mesh.barrier()
        return
    if maker is None:
        replicas, count = mesh.axis_size("replica"), plan.simulated.test
        sizes = (replicas * n for n in range(max(1, plan.training.batch // replicas), 0, -1))
        lanes = Lanes.of(mesh, min(sizes, key=lambda size: -count % size))
        maker = maker_of(plan, mesh, lanes)
    for split in splits:
        make_volumes(
            maker,
            split,
            plan.simulated.test if is_fresh(split) else getattr(plan.simulated, split),
            path,
            header,
            mesh,
            folder.statistics(split),
            overwrite=True,
            progress=functools.partial(progress, f"simulating for {split}"),
        )
    if mesh.rank == 0:
        finish_dataset(path, header)
    mesh.barrier()


def fields_of(
    volumes: np.ndarray, size: tuple[float, float, float], mesh: ProcessMesh
) -> list[Field]:
    """Returns volumes as fields of a batch, float32, one for each channel.

    Args:
        volumes: this rank's blocks of this replica's, [volume, x, y, z] or with channels.
        size: sides of the box [Mpc/h].
        mesh: all ranks.
    """
    blocks = volumes if volumes.ndim == 5 else volumes[..., np.newaxis]
    count, x, y, z, channels = blocks.shape
    grid = x * mesh.axis_size("row"), y * mesh.axis_size("col"), z
    box = Box(grid, size, mesh.without("replica"), tf.float32, batch=count)
    return [
        Field(tf.constant(blocks[..., channel], tf.float32), box) for channel in range(channels)
    ]


def measure_volumes(
    batches: Iterable[Batch],
    size: tuple[float, float, float],
    mesh: ProcessMesh,
    statistics: Statistics,
    values: CellValues = DENSITIES,
) -> None:
    """Measures the statistics of volumes that are in files, numbered in their order. On all ranks.

    Args:
        batches: this rank's blocks of them, of lanes that follow each other over the replicas.
        size: sides of the box [Mpc/h].
        mesh: all ranks.
        statistics: collects and writes the statistics.
        values: the meaning of the volumes' numbers.
    """
    done = 0
    for batch in batches:
        found = measured(fields_of(batch.volumes, size, mesh), values)
        count = len(batch.volumes)
        first = done + mesh.coordinate("replica") * count
        index = np.arange(first, first + count)
        statistics.add(Generation(batch.volumes, batch.parameters, index, index, *found))
        done += count * mesh.axis_size("replica")
    statistics.write()
