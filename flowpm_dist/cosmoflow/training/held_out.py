"""Simulations that are never trained on, and the summary statistics of all simulations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmoflow.planning.folder import TrainingFolder
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.cosmoflow.scores.features import Features
from flowpm_dist.cosmoflow.training.parts import block_of_volumes, header_of, maker_of
from flowpm_dist.cosmoflow.volumes.in_situ import Batch
from flowpm_dist.cosmoflow.volumes.records import (
    DatasetHeader,
    RecordError,
    RecordWriter,
    finish_dataset,
    read_header,
)
from flowpm_dist.cosmoflow.volumes.universes import (
    HISTOGRAM_EDGES,
    Generation,
    Lanes,
    UniverseMaker,
    measured,
)
from flowpm_dist.grid.box import Box
from flowpm_dist.grid.field import Field
from flowpm_dist.io.files import read_arrays, save_arrays
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.statistics.cell_values import DENSITIES, CellValues
from meshimpl.process_mesh import ProcessMesh

HELD_OUT = ("validation", "test")
"""Splits that are never trained on."""


class Statistics:
    """Parameters, power spectrum and one-point distribution of simulations, by their number.

    Each rank adds those of its replica, of as many generations as the others; together they are
    gathered on rank 0 and written.

    Args:
        path: of the .npz file.
        mesh: all ranks.
        names: of the parameters.
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

        While none have been added the file, if there is one, stays as it is.

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
        arrays = {"parameters": parameters, "power": power, "histogram": histogram, "k": self._k}
        arrays |= {"index": everything[:, 0].astype(np.int64), "names": np.array(self._names)}
        arrays |= {"edges": self._edges}
        save_arrays(self.path, arrays)

    def _written(self, width: int) -> np.ndarray:
        if not self.path.exists():
            return np.empty((0, width))
        held = read_arrays(self.path)
        if not np.array_equal(edges_of(held), self._edges):
            return np.empty((0, width))  # of a version with other bins
        parts = [held["index"][:, np.newaxis], held["parameters"], held["power"]]
        return np.concatenate([*parts, held["histogram"]], axis=1)


def edges_of(held: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns the edges of the bins of a histogram in a file; older ones do not tell them."""
    return held.get("edges", HISTOGRAM_EDGES)


def features(path: Path, count: int | None = None) -> Features:
    """Returns what `Statistics` wrote, as baselines take it.

    Args:
        path: of the .npz file.
        count: of the first simulations; all by default.

    Raises:
        UnreadableError: the file is missing or damaged.
    """
    held = read_arrays(path)
    power, histogram = held["power"][:count], held["histogram"][:count]
    names, edges = tuple(map(str, held["names"])), tuple(edges_of(held).tolist())
    return Features(names, np.log10(power), histogram, held["parameters"][:count], edges)


def make_volumes(
    maker: UniverseMaker,
    stream: str,
    count: int,
    folder: Path,
    header: DatasetHeader,
    mesh: ProcessMesh,
    statistics: Statistics,
    *,
    first_generation: int = 0,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Simulates the universes of a stream and writes them as a split of a dataset. On all ranks.

    Args:
        maker: of the universes.
        stream: and name of the split.
        count: of simulations; whole generations are made.
        folder: of the dataset; each rank writes its blocks.
        header: of the dataset.
        mesh: all ranks.
        statistics: of the simulations; written at the end.
        first_generation: to begin with.
        overwrite: whether files of that split may be replaced.
        progress: called with simulations made and to be made.
    """
    lanes: Lanes = maker.lanes
    generations = -(-count // lanes.batch)
    options: dict[str, Any] = {"block": block_of_volumes(mesh), "overwrite": overwrite}
    options |= {
        "first_file": mesh.coordinate("replica"),
        "file_stride": mesh.axis_size("replica"),
    }
    with RecordWriter(folder, stream, header, **options) as writer:
        for number in range(first_generation, first_generation + generations):
            made = maker.make(stream, number)
            statistics.add(made)
            for volume, y, seed, index in zip(
                made.volumes, made.parameters, made.seeds, made.index, strict=True
            ):
                writer.write(volume, y, seed=int(seed), index=int(index))
            mesh.barrier()  # replicas are never further apart than a generation
            if progress is not None:
                done = number - first_generation + 1
                progress(min(count, done * lanes.batch), count)
    statistics.write()
    mesh.barrier()


def hold_out(
    plan: TrainingPlan,
    maker: UniverseMaker,
    mesh: ProcessMesh,
    folder: TrainingFolder,
    progress: Progress,
) -> None:
    """Simulates validation and test sets, unless they are there from an earlier session.

    On all ranks together.

    Args:
        plan: of the training.
        maker: of its universes.
        mesh: all ranks.
        folder: of the training.
        progress: of this rank.
    """
    counts = {split: getattr(plan.data, split) for split in HELD_OUT}
    _make_splits(plan, lambda: maker, mesh, folder, counts, progress)


def hold_out_fresh(
    plan: TrainingPlan, mesh: ProcessMesh, folder: TrainingFolder, split: str, progress: Progress
) -> None:
    """Simulates a fresh test set, unless it is there.

    It has as many universes as the first, or a few more where replicas do not divide their number.

    On all ranks together.

    Args:
        plan, folder: of the training.
        mesh: all ranks.
        split: its name, see `fresh_split`.
        progress: of this rank.
    """
    replicas, count = mesh.axis_size("replica"), plan.data.test
    sizes = (replicas * n for n in range(max(1, plan.training.batch // replicas), 0, -1))
    lanes = Lanes.of(mesh, min(sizes, key=lambda size: -count % size))
    made = functools.partial(maker_of, plan, mesh, lanes)
    _make_splits(plan, made, mesh, folder, {split: count}, progress)


def _make_splits(
    plan: TrainingPlan,
    maker_of_them: Callable[[], UniverseMaker],
    mesh: ProcessMesh,
    folder: TrainingFolder,
    counts: Mapping[str, int],
    progress: Progress,
) -> None:
    """Makes splits of one dataset, unless all are there."""
    path, header = folder.dataset(next(iter(counts))), header_of(plan, mesh)
    try:
        there = set(read_header(path)[1]) >= set(counts)
    except (RecordError, OSError):
        there = False
    # As rank 0 sees it: file systems may show it to others later.
    if bool(mesh.world.broadcast(tf.constant(int(there)))):
        mesh.barrier()
        return
    maker = maker_of_them()
    for split, count in counts.items():
        make_volumes(
            maker,
            split,
            count,
            path,
            header,
            mesh,
            Statistics(folder.statistics(split), mesh, maker.targets),
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
        size: of the box [Mpc/h].
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
        size: of the box [Mpc/h].
        mesh: all ranks.
        statistics: to add to, and to write.
        values: what the numbers of the volumes are.
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
