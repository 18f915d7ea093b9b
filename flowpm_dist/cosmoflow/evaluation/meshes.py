"""Meshes of ranks for predictions of trained networks, and the memory that these take.

Nothing here imports TensorFlow, Horovod or MPI, so that a command reports mistakes before its work
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
from flowpm_dist.grid.decomposition import Grid, default_mesh, parse_mesh
from flowpm_dist.simulation.demand import Demand


def asking_mesh(training: SavedTraining, ranks: int, samples: int, shape: str | None) -> str:
    """Returns the mesh on which a network predicts for a number of volumes.

    A requested mesh is used. Otherwise it is the mesh of the training, if the job has as many ranks
    and the training split its volumes. Otherwise each rank is a replica; if there are more ranks
    than volumes, the other ranks split the volumes.

    Args:
        training: the training of the network.
        ranks: number of ranks of the job.
        samples: number of volumes.
        shape: the requested mesh, if any.

    Raises:
        ConfigError: the mesh does not fit.
        TrainedError: there are fewer volumes than replicas.
    """
    plan = training.plan
    of_training = plan.mesh.shape
    before = parse_mesh(of_training, batched=True) if of_training else {}
    if shape is None and math.prod(before.values()) == ranks > before.get("replica", 1):
        shape = of_training
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


def splits_to_read(training: SavedTraining, split: str, *, fits: bool) -> list[str]:
    """Returns the splits that an evaluation reads on all ranks and that may have few volumes.

    Args:
        training: the training to judge.
        split: the split to judge on: "test" or "validation".
        fits: whether posteriors are fitted.

    Raises:
        RecordError: the files of the test set cannot be used.
    """
    measured = ["validation"] if fits or not training.plan.simulates else []
    measured += [] if training.plan.simulates else ["train"]
    return list(dict.fromkeys([training.split_there(split)[0], *measured]))


def planned_volumes(training: SavedTraining, split: str) -> int:
    """Returns the number of volumes of a split, without making an index of public files.

    For public files it is the batch of the training.

    Args:
        training: the training that the split belongs to.
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
    """Returns the mesh on which the networks of several trainings predict for one test set.

    Args:
        trainings: the trainings; the test set of the first is used for all.
        ranks: number of ranks of the job.
        shape: the requested mesh, if any.
        split: "test" or "validation".
        fits: whether posteriors are fitted.
        planned: whether `planned_volumes` counts the volumes, before the work begins.

    Raises:
        ConfigError, TrainedError: see `asking_mesh`.
        RecordError: the files of the test set cannot be used.
    """
    count = planned_volumes if planned else SavedTraining.samples
    samples = min(
        count(training, name)
        for training in trainings
        for name in splits_to_read(training, split, fits=fits)
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
    """Returns the memory that predictions of networks take.

    Args:
        training: the training of the network, the first of several.
        mesh: shape of the mesh of ranks.
        what: names the work in messages.
        networks: number of networks.
        simulating: whether the universes of a simulating training are simulated again.
        statistics: names of the statistics to measure.
    """
    kinds: list[Callable[..., int]] = [functools.partial(prediction_memory, networks=networks)]
    if statistics:
        kinds.append(functools.partial(statistics_memory, names=statistics))
    if simulating and training.plan.simulates:
        kinds.append(dataset_memory)

    def memory(grid: Grid, axes: Mapping[str, int]) -> int:
        return max(kind(training.plan, grid, axes) for kind in kinds)

    mesh_of = functools.partial(prediction_mesh, training, shape=None)
    return Demand(what, training.plan.box.grid, mesh, memory, mesh_of, grid_is_free=False)


def prediction_mesh(training: SavedTraining, ranks: int, shape: str | None) -> str:
    """Returns the mesh on which a network predicts for one volume.

    By default all ranks share the volume. If the network cannot be split, each rank has the whole
    volume.

    Raises:
        ConfigError: the mesh does not fit.
    """
    plan = training.plan
    if shape is None and plan.declaration.whole_because(ranks):
        shape = f"replica:{ranks}"
    elif shape is None:
        shape = default_mesh(ranks, plan.box.grid)
    run_file = training.folder.run_file
    return check_training_mesh(
        plan, ranks, source=run_file, shape=shape, batch=ranks, simulating=False
    )
