"""Simulations that are never trained on, and summary statistics of volumes in files."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmoflow.planning.folder import TrainingFolder, is_fresh
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.cosmoflow.scores.judging import Features
from flowpm_dist.cosmoflow.volumes.draws import Lanes
from flowpm_dist.cosmoflow.volumes.generations import Generation, Statistics, measured
from flowpm_dist.cosmoflow.volumes.record_files import (
    DATASET,
    MEAN_DENSITY,
    MEAN_ONE,
    ONE_COUNT,
    UNFINISHED,
    Block,
    DatasetHeader,
    RecordError,
    finish_dataset,
    listed_files,
    read_header,
    split_files,
)
from flowpm_dist.cosmoflow.volumes.record_writer import RecordWriter, clear_split
from flowpm_dist.cosmoflow.volumes.sources import Batch
from flowpm_dist.cosmoflow.volumes.universes import UniverseMaker, maker_of
from flowpm_dist.grid.box import Box
from flowpm_dist.grid.field import Field
from flowpm_dist.io.files import GENERATOR, WriteError, read_arrays, write_text
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.session import on_root
from flowpm_dist.observables.light_cone import map_files
from flowpm_dist.observables.record import ATTRIBUTE, BARE
from flowpm_dist.statistics.histogram import DENSITIES, CellValues
from meshimpl.process_mesh import ProcessMesh

UNITS = {"counts": ONE_COUNT, "galaxies": ONE_COUNT, "convergence": "convergence 1"}
"""Units of observed values by the kind of observation; see `DatasetHeader.unit`."""
NO_POWER = 1.0
"""Power that is taken in the place of 0 [(Mpc/h)^3]."""
HELD_OUT = ("validation", "test")
"""Splits that no training uses."""


def features(path: Path, count: int | None = None) -> Features:
    """Returns the statistics that `Statistics` wrote, in the form that baselines need.

    Args:
        path: the .npz file.
        count: number of the first simulations to return; all by default.

    Raises:
        UnreadableError: the file is missing or damaged.
    """
    arrays = read_arrays(path)
    power, histogram, truth = (arrays[k][:count] for k in ("power", "histogram", "parameters"))
    # Universes without galaxies have no power, and a logarithm below all others.
    log_power = np.log10(np.where(power == 0, NO_POWER, power))
    return Features(tuple(map(str, arrays["names"])), log_power, histogram, truth)


def simulate_dataset(
    maker: UniverseMaker,
    counts: Mapping[str, int],
    folder: Path,
    header: DatasetHeader,
    mesh: ProcessMesh,
    statistics: Callable[[str], Path],
    progress: Progress,
) -> None:
    """Simulates the universes of some splits and writes them as a dataset. On all ranks.

    Other splits of the dataset stay. Each rank writes its blocks. dataset.json lists a split only
    when it is complete, and is written last.

    Args:
        maker: makes the universes.
        counts: the number of simulations of each split, rounded up to whole generations; the name
            of a split is also the stream of its universes.
        folder: the folder of the dataset, on a file system that all ranks see.
        header: header of the dataset.
        mesh: all ranks.
        statistics: returns the file of the statistics of a split.
        progress: this rank's progress.

    Raises:
        WriteError: a file cannot be written.
    """
    places = mesh.coordinate("replica"), mesh.axis_size("replica")
    if mesh.rank == 0:
        # Splits are removed from dataset.json, and so are their files, complete or not.
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_text(folder / UNFINISHED, f"{GENERATOR} is writing a dataset here.\n")
            for split in counts:
                clear_split(folder, split)
                statistics(split).unlink(missing_ok=True)
            if split_files(folder):
                finish_dataset(folder, header)
            else:
                (folder / DATASET).unlink(missing_ok=True)
        except OSError as error:
            raise WriteError.of(Path(error.filename or folder), error) from error
    mesh.barrier()
    for split, count in counts.items():
        written = Statistics(statistics(split), mesh, maker.targets)
        with RecordWriter(folder, split, header, Block.of(mesh), *places) as writer:
            _simulate_split(maker, split, count, writer, written, mesh, progress)
        written.write()
        mesh.barrier()
    if mesh.rank == 0:
        finish_dataset(folder, header)
        (folder / UNFINISHED).unlink(missing_ok=True)
    mesh.barrier()


def _simulate_split(
    maker: UniverseMaker,
    split: str,
    count: int,
    writer: RecordWriter,
    statistics: Statistics,
    mesh: ProcessMesh,
    progress: Progress,
) -> None:
    batch = maker.lanes.batch
    for number in range(-(-count // batch)):
        made = maker.make(split, number)
        statistics.add(made)
        samples = zip(made.volumes, made.parameters, made.seeds, made.index, strict=True)
        for volume, y, seed, index in samples:
            writer.write(volume, y, seed=int(seed), index=int(index))
        mesh.barrier()  # replicas are never further apart than a generation
        progress(f"simulating for {split}", min(count, (number + 1) * batch), count)


def hold_out(
    plan: TrainingPlan,
    mesh: ProcessMesh,
    folder: TrainingFolder,
    progress: Progress,
    splits: Sequence[str] = HELD_OUT,
    maker: UniverseMaker | None = None,
) -> None:
    """Simulates the held-out splits of a dataset, unless all of their files exist.

    On all ranks together. A fresh test set has as many universes as the first test set, or a few
    more if the replicas do not divide their number.

    Args:
        plan: the training's plan.
        mesh: all ranks.
        folder: the training's folder.
        progress: this rank's progress.
        splits: names of the splits, by default validation and test set.
        maker: makes the universes; by default one for batches that fit a fresh test set.
    """
    path, header = folder.dataset(splits[0]), header_of(plan, mesh)
    if on_root(mesh, functools.partial(_is_whole, path, splits), RecordError):
        mesh.barrier()
        return
    if maker is None:
        replicas, count = mesh.axis_size("replica"), plan.simulated.test
        sizes = (replicas * n for n in range(max(1, plan.training.batch // replicas), 0, -1))
        lanes = Lanes.of(mesh, min(sizes, key=lambda size: -count % size))
        maker = maker_of(plan, mesh, lanes)
    counts = {
        split: plan.simulated.test if is_fresh(split) else getattr(plan.simulated, split)
        for split in splits
    }
    simulate_dataset(maker, counts, path, header, mesh, folder.statistics, progress)


def _is_whole(path: Path, splits: Sequence[str]) -> bool:
    """Returns whether a dataset has all files of some splits."""
    try:
        (header, counts), files = read_header(path), split_files(path)
    except (RecordError, OSError):
        return False
    return all(
        split in counts and len(files.get(split, ())) == listed_files(header, counts[split])
        for split in splits
    )


def fields_of(
    volumes: np.ndarray, size: tuple[float, float, float], mesh: ProcessMesh
) -> list[Field]:
    """Returns volumes as fields of a batch, float32, one for each channel.

    Args:
        volumes: this rank's blocks of its replica's volumes, [volume, x, y, z] or with channels.
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
    """Measures the statistics of volumes in files, which are numbered in order. On all ranks.

    Args:
        batches: this rank's blocks of the volumes; the lanes of a batch follow one another over the
            replicas.
        size: sides of the box [Mpc/h].
        mesh: all ranks.
        statistics: collects and writes the statistics.
        values: the meaning of the volumes' numbers.
    """
    done = 0
    for batch in batches:
        measures = measured(fields_of(batch.volumes, size, mesh), values)
        count = len(batch.volumes)
        first = done + mesh.coordinate("replica") * count
        index = np.arange(first, first + count)
        statistics.add(Generation(batch.volumes, batch.parameters, index, index, *measures))
        done += count * mesh.axis_size("replica")
    statistics.write()


def header_of(plan: TrainingPlan, mesh: ProcessMesh, **options: Any) -> DatasetHeader:
    """Returns the header of a dataset of the simulations of a training."""
    record = plan.record or BARE
    attributes = {"run": plan.resolved(), ATTRIBUTE: record.table()}
    if plan.lightcone is not None:
        attributes[map_files.ATTRIBUTE] = map_files.cone_table(plan.lightcone)
    unit = MEAN_ONE if record.has_mean_one else MEAN_DENSITY
    return DatasetHeader(
        grid=plan.input_shape,
        parameters=tuple(plan.priors.ranges),
        channels=plan.channels,
        blocks=(mesh.axis_size("row"), mesh.axis_size("col")),
        box_size=plan.box.size if plan.lightcone is None else None,
        priors=plan.priors.ranges,
        attributes=attributes,
        unit=UNITS.get(record.options.kind, unit),
        **options,
    )
