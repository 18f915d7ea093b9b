"""The volumes of a training, from simulations, from files or made up, as its plan says."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from flowpm_dist.cosmoflow.planning.folder import TrainingFolder
from flowpm_dist.cosmoflow.planning.phases import PhaseClock
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.cosmoflow.training.held_out import Statistics
from flowpm_dist.cosmoflow.training.parts import block_of_volumes, draws_of, maker_of
from flowpm_dist.cosmoflow.training.training import BatchSource
from flowpm_dist.cosmoflow.volumes.arrays import ArrayDataset, arrays_of
from flowpm_dist.cosmoflow.volumes.file_source import FilesDataset, FileSource
from flowpm_dist.cosmoflow.volumes.in_situ import InSituSource
from flowpm_dist.cosmoflow.volumes.records import DummyDataset, RecordDataset, stage
from flowpm_dist.cosmoflow.volumes.universes import Lanes, UniverseMaker
from flowpm_dist.jobs.progress import Progress
from meshimpl import launch
from meshimpl.process_mesh import ProcessMesh


def stage_files(plan: TrainingPlan, mesh: ProcessMesh, progress: Progress) -> None:
    """Copies the files of a training to the fast folder that it names, if any, once on each node.

    On all ranks together; the files are there for each of them afterwards.

    Raises:
        RecordError, WriteError: on the first rank of a node; see `stage`.
    """
    data = plan.data
    if data.staging is None or data.folder is None:
        return
    if not launch.detect().local_rank:
        for split in ("train", "validation"):
            told = functools.partial(progress, f"staging {split}")
            stage(data.folder, data.staging, split, progress=told)
    mesh.barrier("files are staged")


@dataclass(frozen=True)
class Volumes:
    """The source of the batches of a training.

    Attributes:
        source: of the batches.
        dataset: the files, where volumes are read.
        channels: of a volume.
        maker: of the universes, where they are simulated.
        statistics: of the simulations, for the baselines.
    """

    source: BatchSource
    dataset: FilesDataset | None = None
    channels: int = 1
    maker: UniverseMaker | None = None
    statistics: Statistics | None = None


def volumes_of(
    plan: TrainingPlan, mesh: ProcessMesh, folder: TrainingFolder, lanes: Lanes, clock: PhaseClock
) -> Volumes:
    """Returns the volumes that a training learns from; none is made or read yet.

    Args:
        plan: the training.
        mesh: the ranks.
        folder: of the training.
        lanes: this rank's places of a batch.
        clock: of the phases.

    Raises:
        RecordError: files that cannot serve.
    """
    data, seed = plan.data, plan.training.seed
    augment, seen = data.augment or False, plan.observation
    axis = None if seen is None else seen.options.line_of_sight
    if plan.simulates:
        maker = maker_of(plan, mesh, lanes)
        statistics = Statistics(folder.statistics("train"), mesh, maker.targets)
        source = InSituSource(
            maker,
            mesh,
            draws_of(plan),
            augment=augment,
            axis=axis,
            clock=clock,
            made=statistics.add,
        )
        return Volumes(source, channels=plan.channels, maker=maker, statistics=statistics)
    files = files_of(plan, mesh, folder, "train")
    return Volumes(
        FileSource(files, mesh, lanes, seed=seed, augment=augment, axis=axis, clock=clock),
        None if isinstance(files, DummyDataset) else files,
        files.block_shape[-1],
    )


def files_of(
    plan: TrainingPlan, mesh: ProcessMesh, folder: TrainingFolder, split: str
) -> FilesDataset | DummyDataset:
    """Returns a split that is in files, or made up: of simulations those that are held out.

    Raises:
        RecordError: files that cannot serve.
    """
    data, block = plan.data, block_of_volumes(mesh)
    if data.source == "dummy":
        samples = max(64, plan.training.batch)
        return DummyDataset(
            plan.grid, plan.parameters, block=block, channels=plan.channels, samples=samples
        )
    path = data.staging or (folder.held_out if plan.simulates else data.folder)
    if data.source == "arrays":
        return ArrayDataset(arrays_of(plan), split, block)
    assert path is not None
    parameters = data.parameters if data.source == "files" else None
    return RecordDataset(path, split, grid=plan.seen, block=block, parameters=parameters, mesh=mesh)
