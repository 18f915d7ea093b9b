"""Writes the simulations of a training to files, for other trainings."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowpm_dist.cosmoflow.planning.plan import differences, universes_of
from flowpm_dist.cosmoflow.volumes.record_files import (
    DATASET,
    DTYPES,
    SPLITS,
    UNFINISHED,
    DatasetHeader,
    RecordError,
    read_header,
    split_files,
)
from flowpm_dist.jobs.folder import OutputError, check_alone, check_ground, check_room
from flowpm_dist.jobs.progress import Progress
from flowpm_dist.jobs.results import RunRecord, changed
from flowpm_dist.jobs.run_file import flat, toml_of

if TYPE_CHECKING:
    from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
    from meshimpl.process_mesh import ProcessMesh


def statistics_path(folder: Path, split: str) -> Path:
    """Returns the file of a split's summary statistics, which baselines are fitted to."""
    return folder / "statistics" / f"{split}.npz"


def _check_simulates(plan: TrainingPlan) -> None:
    if not plan.simulates:
        raise OutputError(
            f'data.source = "{plan.data.source}" simulates nothing: give a run file with '
            'data.source = "simulate"'
        )


def check_dataset(
    plan: TrainingPlan,
    folder: Path,
    splits: Sequence[str],
    *,
    dtype: str = "float32",
    compressed: bool = False,
    overwrite: bool = False,
    elsewhere: bool = False,
) -> None:
    """Checks that splits can be written, without changing anything. Needs no TensorFlow.

    Args:
        plan, folder, splits, dtype, compressed, overwrite: see `write_dataset`.
        elsewhere: whether they will not be written here, so that this disk needs no room for them.

    Raises:
        OutputError: they cannot; the message says why, and what to do.
    """
    _check_simulates(plan)
    if plan.lightcone is not None:
        raise OutputError(
            'observation.kind = "convergence": maps are simulated while a network learns, with '
            "flowpm-dist train, and not written as a dataset"
        )
    unknown = [split for split in splits if split not in SPLITS]
    if unknown or not splits:
        raise OutputError(f"splits {list(splits)}: must be of {', '.join(SPLITS)}")
    check_ground(folder)
    if record(folder) is None:
        check_alone(folder, "dataset")
    again = [split for split in splits if split in split_files(folder)]
    if again and not overwrite:
        state = "" if (folder / DATASET).exists() else ", not finished"
        raise OutputError(
            f"{folder} holds the splits {', '.join(again)}{state}: add --overwrite to replace "
            "them, or give another --output"
        )
    needed = 0 if elsewhere else dataset_bytes(plan, splits, dtype=dtype, compressed=compressed)
    check_room(folder, needed, "the dataset needs")


def dataset_bytes(
    plan: TrainingPlan, splits: Sequence[str], *, dtype: str, compressed: bool
) -> int:
    """Returns the size of the volumes of some splits [bytes]; 0 if they are compressed.

    Args:
        plan, splits, dtype, compressed: see `write_dataset`.
    """
    _check_simulates(plan)
    count = sum(plan.simulations(split) for split in splits)
    return 0 if compressed else count * plan.channels * plan.cells * DTYPES[dtype].itemsize


def write_dataset(
    plan: TrainingPlan,
    mesh: ProcessMesh,
    folder: Path,
    splits: Sequence[str] = SPLITS,
    *,
    dtype: str = "float32",
    compressed: bool = False,
    samples_per_file: int = 64,
    progress: Progress,
    overwrite: bool = False,
) -> None:
    """Simulates splits of a dataset. All ranks call it together; each rank writes its blocks.

    dataset.json lists a split only when it is complete, and is written last. Other splits of the
    same simulations stay in the folder. The statistics of each split are written, too:
    `flowpm-dist evaluate` needs them for its baselines.

    Args:
        plan: the plan of a training with data.source = "simulate".
        mesh: the ranks, with the axes replica, row and col.
        folder: the folder of the dataset, on a file system that all ranks see.
        splits: names in `SPLITS`.
        dtype, compressed, samples_per_file: see `DatasetHeader`.
        progress: this rank's progress.
        overwrite: whether existing splits may be replaced.

    Raises:
        OutputError: see `check_dataset`; or other splits in the folder have other simulations.
        RecordError: int16 cannot hold a density.
        WriteError: a file cannot be written; the job must end then.
        HaloError: a particle left the halo.
    """
    from flowpm_dist.cosmoflow.training.held_out import header_of, simulate_dataset
    from flowpm_dist.cosmoflow.volumes.draws import Lanes
    from flowpm_dist.cosmoflow.volumes.universes import maker_of

    folder, splits = Path(folder), tuple(dict.fromkeys(splits))
    files = {"dtype": dtype, "compressed": compressed, "samples_per_file": samples_per_file}
    mesh.check_equal("a dataset", folder=folder, splits=splits, **files, **dict(plan))
    check_dataset(plan, folder, splits, dtype=dtype, compressed=compressed, overwrite=overwrite)
    options: dict[str, Any] = {"dtype": dtype, "compressed": compressed}
    header = header_of(plan, mesh, samples_per_file=samples_per_file, **options)
    _check_kept(folder, header, sorted(set(split_files(folder)) - set(splits)))
    mesh.barrier()
    maker = maker_of(plan, mesh, Lanes.of(mesh, plan.training.batch))
    counts = {split: plan.simulations(split) for split in splits}
    statistics = functools.partial(statistics_path, folder)
    simulate_dataset(maker, counts, folder, header, mesh, statistics, progress)


def _check_kept(folder: Path, header: DatasetHeader, kept: Sequence[str]) -> None:
    """Checks that the remaining splits have the same simulations and the same format."""
    if not kept:
        return
    try:
        written, listed = read_header(folder)
    except RecordError as error:
        raise OutputError(
            f"{folder} holds files of {', '.join(kept)} that no dataset lists ({error}): write "
            "those splits too, or give another --output"
        ) from error
    other = written.differences(header)
    other += differences(*(universes_of(_run_of(each)) for each in (written, header)))
    other += [f"the number of files of {split}" for split in kept if split not in listed]
    if other:
        raise OutputError(
            f"{folder} holds {', '.join(kept)}, which differ in {', '.join(other)}: write all "
            "splits again, or give another --output"
        )


def _run_of(header: DatasetHeader) -> dict[str, Any]:
    """Returns the tables of the run file in a dataset's header; none if it cannot be read."""
    try:
        tables = toml_of(str(header.attributes.get("run", "")))
    except tomllib.TOMLDecodeError:
        return {}
    return {name: table for name, table in tables.items() if isinstance(table, dict)}


def record(path: Path) -> RunRecord | None:
    """Returns the entry of a folder in `flowpm-dist runs`; None if it holds no dataset."""
    try:
        header, splits = read_header(path)
    except RecordError:
        if not (path / UNFINISHED).exists():
            return None
        return RunRecord(path, "dataset", "stopped", "", changed(path / UNFINISHED))
    results = {f"samples of {name}": count["samples"] for name, count in splits.items()}
    state = "stopped" if (path / UNFINISHED).exists() else "complete"
    settings = flat(_run_of(header))
    return RunRecord(path, "dataset", state, "", changed(path / DATASET), results, settings)
