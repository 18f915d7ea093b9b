"""The meshes on which trained networks can be asked about volumes, and the memory that takes.

Nothing here imports TensorFlow, Horovod or MPI: a command can say what is wrong before its work
begins.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

from flowpm_dist.cosmoflow.planning.folder import TrainedError, is_fresh
from flowpm_dist.cosmoflow.planning.memory import (
    check_training_mesh,
    dataset_memory,
    prediction_memory,
    statistics_memory,
)
from flowpm_dist.cosmoflow.training.saved import SavedTraining
from flowpm_dist.cosmoflow.volumes.record_files import DATASET, read_header
from flowpm_dist.grid.decomposition import default_mesh, parse_mesh
from flowpm_dist.jobs.estimate import Demand, Grid


def asking_mesh(training: SavedTraining, ranks: int, samples: int, shape: str | None) -> str:
    """Returns the mesh on which to ask a network about a number of volumes.

    It is the one that was asked for. Otherwise it is the mesh of the training, where there are as
    many ranks and volumes were split. Otherwise each rank is a replica, as far as there are
    volumes, and the ranks that remain split them.

    Args:
        training: whose network is asked.
        ranks: of the job.
        samples: number of volumes.
        shape: that was asked for.

    Raises:
        ConfigError: it does not fit.
        TrainedError: there are fewer volumes than replicas.
    """
    plan = training.plan
    own = plan.mesh.shape
    before = parse_mesh(own, batched=True) if own else {}
    if shape is None and math.prod(before.values()) == ranks > before.get("replica", 1):
        shape = own
    if shape is None:
        batch = max(n for n in range(1, ranks + 1) if ranks % n == 0 and n <= samples)
    else:
        try:
            batch = parse_mesh(shape, batched=True).get("replica", 1)
        except ValueError:
            batch = 1  # `check_training_mesh` says what is wrong
        if batch > samples:
            raise TrainedError(f"mesh {shape}: {batch} replicas are more than {samples} volumes")
    plan = plan.with_mesh(None)
    run_file = training.folder.run_file
    return check_training_mesh(plan, ranks, source=run_file, shape=shape, batch=batch)


def splits_asked(training: SavedTraining, split: str, *, fits: bool) -> list[str]:
    """Returns the splits whose volumes an evaluation reads on all ranks, as far as they may be few.

    Args:
        training: that is judged.
        split: to judge on, "test", or "validation" in its place.
        fits: whether posteriors are fitted.

    Raises:
        RecordError: the files of the test set cannot serve.
    """
    measured = ["validation"] if fits or not training.plan.simulates else []
    measured += [] if training.plan.simulates else ["train"]
    return list(dict.fromkeys([training.split_there(split)[0], *measured]))


def planned_volumes(training: SavedTraining, split: str) -> int:
    """Returns the number of volumes of a split, without an index of public files.

    Of these it is the batch of the training.

    Args:
        training: whose volumes they are.
        split: "validation", "test" or a fresh test set; "train" of volumes in files.

    Raises:
        RecordError: the dataset is damaged.
    """
    plan, folder = training.plan, training.plan.dataset_folder
    if training.plan.simulates:
        return plan.simulated.test if is_fresh(split) else plan.simulations(split)
    if folder is None:
        return training.samples(split)
    if not (folder / DATASET).exists():
        return plan.training.batch
    return read_header(folder)[1].get(split, {"samples": 1})["samples"]


def common_mesh(
    trainings: Sequence[SavedTraining],
    ranks: int,
    shape: str | None,
    split: str = "test",
    *,
    fits: bool = False,
    planned: bool = False,
) -> str:
    """Returns the mesh on which to ask the networks of several trainings about one test set.

    Args:
        trainings: with one test set, that of the first.
        ranks: of the job.
        shape: that was asked for.
        split: "test", or "validation" in its place.
        fits: whether posteriors are fitted.
        planned: whether volumes are counted by `planned_volumes`, before the work begins.

    Raises:
        ConfigError, TrainedError: see `asking_mesh`.
        RecordError: the files of the test set cannot serve.
    """
    count = planned_volumes if planned else SavedTraining.samples
    samples = min(
        count(training, name)
        for training in trainings
        for name in splits_asked(training, split, fits=fits)
    )
    chosen = asking_mesh(trainings[0], ranks, samples, shape)
    for training in trainings[1:]:
        asking_mesh(training, ranks, samples, chosen)
    return chosen


def asking_demand(
    training: SavedTraining,
    mesh: str,
    what: str,
    *,
    networks: int = 1,
    simulating: bool = False,
    statistics: Sequence[str] = (),
) -> Demand:
    """Returns the memory that asking networks takes.

    Args:
        training: whose network is asked, the first of several.
        mesh: shape of the mesh of ranks.
        what: names the work in messages.
        networks: their number.
        simulating: whether its universes are simulated again, where they were simulated.
        statistics: names of those that are measured of its volumes.
    """
    kinds: list[Callable[..., int]] = [functools.partial(prediction_memory, networks=networks)]
    if statistics:
        kinds.append(functools.partial(statistics_memory, names=statistics))
    if simulating and training.plan.simulates:
        kinds.append(dataset_memory)

    def memory(grid: Grid, axes: Mapping[str, int]) -> int:
        return max(kind(training.plan, grid, axes) for kind in kinds)

    mesh_of = functools.partial(prediction_mesh, training, shape=None)
    return Demand(what, training.plan.grid, mesh, memory, mesh_of, grid_is_free=False)


def prediction_mesh(training: SavedTraining, ranks: int, shape: str | None) -> str:
    """Returns the mesh on which to ask a network about one volume.

    Unless it is given, the volume is split over all ranks, or each rank has the whole volume where
    the network cannot be split.

    Raises:
        ConfigError: it does not fit.
    """
    plan = training.plan
    if shape is None and plan.declaration.whole_because:
        shape = f"replica:{ranks}"
    elif shape is None:
        shape = default_mesh(ranks, plan.grid)
    run_file = training.folder.run_file
    return check_training_mesh(plan, ranks, source=run_file, shape=shape, batch=ranks)
