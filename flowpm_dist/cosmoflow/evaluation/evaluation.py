"""Judges trained networks on the test or validation set, and compares them with baselines."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmoflow.evaluation import summaries
from flowpm_dist.cosmoflow.evaluation.posterior_fits import (
    check_names,
    judge_posteriors,
    not_uniform,
)
from flowpm_dist.cosmoflow.evaluation.results import Evaluation
from flowpm_dist.cosmoflow.evaluation.trainings import (
    JudgedTraining,
    PosteriorOptions,
    check_comparable,
    check_written,
    network_curves,
    networks_of,
    over_seeds,
)
from flowpm_dist.cosmoflow.planning.folder import is_fresh
from flowpm_dist.cosmoflow.scores.judging import (
    LearningCurve,
    Predictions,
    Scores,
    describe_collapse,
    differences_from,
    score,
)
from flowpm_dist.cosmoflow.training.dataset import statistics_path
from flowpm_dist.cosmoflow.training.held_out import features, hold_out, measure_volumes
from flowpm_dist.cosmoflow.training.saved import SavedTraining, TrainedError, trained_network
from flowpm_dist.cosmoflow.training.trainer import standardiser_of
from flowpm_dist.cosmoflow.volumes.draws import Lanes
from flowpm_dist.cosmoflow.volumes.generations import Statistics
from flowpm_dist.cosmoflow.volumes.record_files import Block
from flowpm_dist.cosmoflow.volumes.sources import Batch, in_order
from flowpm_dist.cosmoflow.volumes.universes import cell_values_of
from flowpm_dist.io.files import UnreadableError, WriteError, read_arrays
from flowpm_dist.jobs.progress import Progress
from meshimpl.process_mesh import ProcessMesh

ON_VALIDATION = (
    "Judged on the validation set, by which the best weights, settings and error bars of the "
    "baselines, and the settings of heads were chosen: figures are a little too good, and tests of "
    "posteriors have no P values."
)

SMALLEST = 125
"""Smallest size in the learning curves [simulations]; each next size is twice as large."""


def evaluate(
    trainings: Sequence[SavedTraining],
    mesh: ProcessMesh,
    progress: Progress,
    *,
    split: str = "test",
    which: str = "best",
    posteriors: PosteriorOptions | None = None,
) -> Evaluation | None:
    """Judge trainings on their common test set. On all ranks together.

    Trainings that differ only in training.seed are judged one by one, and by the mean of their
    predictions. Trainings that differ in data.simulations make a learning curve. The folder of each
    training records that its test set was opened.

    Args:
        trainings: trainings with a checkpoint.
        mesh: the ranks, of axes replica, row and col; no more replicas than volumes.
        progress: of this rank.
        split: "test", "validation" or a fresh test set (see `fresh_split`), which is simulated
            unless the first training has it.
        which: the weights, "best" of the validations or "last".
        posteriors: the options of the posteriors to fit and judge; None for no posteriors.

    Returns:
        The evaluation on rank 0; None on the other ranks.

    Raises:
        TrainedError: the test sets differ, a training is given twice, or a checkpoint is damaged.
        RecordError: the files of the test set are damaged or do not match.
        PosteriorError: there is no such head or statistic.
        OutputError: it would write through a symbolic link in a training.
    """
    check_written(trainings, split)
    request = {"split": split, "which": which, "posteriors": posteriors}
    mesh.check_equal("an evaluation", trainings=[t.folder.path for t in trainings], **request)
    if posteriors is not None:
        check_names(posteriors)
    split, other_split = trainings[0].split_there(split)
    trainings = _fixed(trainings, split, mesh, progress)
    predicted = [ask(training, mesh, progress, split, which) for training in trainings]
    _check_same_truth(predicted)
    same_method = [one for one in predicted if one.method == predicted[0].method]
    largest = max(same_method, key=lambda one: one.samples)
    notes = _notes(predicted, largest, other_split, fits=posteriors is not None)
    needed = tuple(dict.fromkeys(("train", "validation", split)))
    paths = {name: _measured(largest.training, name, mesh, progress) for name in needed}
    if posteriors is not None:
        names = [posteriors.statistics if one is largest else () for one in predicted]
        tables = summaries.summarise(trainings, needed, names, mesh, progress, which)
    if mesh.rank != 0:
        return None
    evaluation = judge(predicted, largest, paths, notes, mesh, progress, split, which)
    if posteriors is None:
        return evaluation
    place, simulates = predicted.index(largest), largest.training.plan.simulates
    priors = standardiser_of(largest.training.plan, largest.training.header())
    more = [] if simulates else not_uniform(priors, tables[place]["train"].truth)
    results = judge_posteriors(predicted, tables, place, priors, split, posteriors, progress.note)
    return replace(evaluation, posteriors=results, notes=(*evaluation.notes, *more))


def _fixed(
    trainings: Sequence[SavedTraining], split: str, mesh: ProcessMesh, progress: Progress
) -> list[SavedTraining]:
    """Returns the trainings with the steps that they have made now, and with a fresh test set.

    Raises:
        TrainedError: see `check_comparable`.
    """
    check_comparable(trainings, split)
    steps = mesh.world.broadcast(tf.constant([t.steps_made for t in trainings])).numpy()
    fixed = [replace(t, steps=int(n)) for t, n in zip(trainings, steps, strict=True)]
    if not is_fresh(split):
        return fixed
    for training in fixed:
        training.check_held_out()
    folder = fixed[0].folder
    hold_out(fixed[0].plan, mesh, folder, progress, [split])
    return [replace(training, fresh_in=folder) for training in fixed]


def _check_same_truth(predicted: Sequence[JudgedTraining]) -> None:
    first = predicted[0]
    for other in predicted[1:]:
        ours, theirs = first.predictions, other.predictions
        if ours.names != theirs.names or not np.array_equal(ours.truth, theirs.truth):
            raise TrainedError(
                f"{first.training.folder.path} and {other.training.folder.path} have different "
                "test sets: their parameters are not the same"
            )


def _notes(
    predicted: Sequence[JudgedTraining], largest: JudgedTraining, other_split: str, *, fits: bool
) -> list[str]:
    """Returns sentences on the trainings and the volumes; `fits`: whether posteriors are fitted."""
    notes = [
        f"{one.training.folder.path} is not complete: {one.training.progress_note(one.step)}."
        for one in predicted
        if not one.training.complete
    ]
    notes += [other_split] if other_split else []
    most = summaries.MOST
    if not largest.training.plan.simulates and largest.samples > most:
        notes.append(f"Baselines see the first {most} of {largest.samples} volumes.")
    judged, there = (len(p.truth) for p in (largest.summarised, largest.predictions))
    if fits and judged < there:
        notes.append(f"Posteriors are judged on the first {judged} of the {there} volumes.")
    return notes


def _opened(predicted: Sequence[JudgedTraining], split: str) -> list[str]:
    """Records that a test set is opened; warns if it was opened before. On rank 0."""
    folders = [one.training.folder for one in predicted]
    before = [opening["time"] for folder in folders for opening in folder.openings(split)]
    try:
        for one in predicted:
            one.training.folder.open_test_set(one.step, split)
    except WriteError as error:
        return [f"The opening of the test set could not be recorded: {error}."]
    if not before:
        return []
    fresh = "take other volumes"
    if predicted[0].training.plan.simulates:
        fresh = "give --fresh a number that was not opened yet"
    return [
        f"The test set was opened before, first at {min(before)}. Later changes may have been "
        f"chosen by its results: for final figures {fresh}."
    ]


def ask(
    training: SavedTraining, mesh: ProcessMesh, progress: Progress, split: str, which: str
) -> JudgedTraining:
    """Returns the predictions of a training's network on a split. On all ranks together."""
    dataset = training.files(split, Block.of(mesh), mesh)
    replicas = mesh.axis_size("replica")
    most = min(training.plan.training.batch, len(dataset))
    lanes = Lanes.of(mesh, replicas * max(1, most // replicas))
    progress.note(f"asking the network of {training.folder.path}; compiling")
    regressor = trained_network(training, mesh, lanes.batch, which)
    batches = _reported(in_order(dataset, lanes), lanes.batch, len(dataset), progress)
    predictions = regressor.predict(batches, len(dataset))
    first = in_order_of_truth(predictions, summaries.count_of(training, split))
    samples = summaries.trained_on(training)
    size = summaries.trained_on(training, planned=True) if training.plan.simulates else samples
    return JudgedTraining(
        training, in_order_of_truth(predictions), first, regressor.step, samples, size
    )


def _reported(
    batches: Iterable[Batch], size: int, total: int, progress: Progress
) -> Iterator[Batch]:
    for number, batch in enumerate(batches):
        yield batch
        progress("predicting", min(total, (number + 1) * size), total)


def in_order_of_truth(predictions: Predictions, count: int | None = None) -> Predictions:
    """Returns predictions sorted by the truth: files may hold the same volumes in any order.

    Args:
        predictions: the predictions in the order of the files.
        count: number of the first samples to return; all by default.
    """
    truth, sigma = predictions.truth, predictions.sigma
    order = np.lexsort(truth[:count].astype(np.float32).T[::-1])  # as in files
    sigma = None if sigma is None else sigma[order]
    return Predictions(predictions.names, truth[order], predictions.mean[order], sigma)


def _measured(training: SavedTraining, split: str, mesh: ProcessMesh, progress: Progress) -> Path:
    """Returns the file with the statistics of a split, and measures them if it is missing."""
    plan, path = training.plan, training.keeper(split).statistics(split)
    if training.plan.simulates:
        return path
    values = cell_values_of(plan)
    folder = plan.dataset_folder
    shared = None if folder is None else statistics_path(folder, split)
    dataset = training.files(split, Block.of(mesh), mesh)
    count = min(len(dataset), summaries.MOST)
    # Rank 0 looks for all ranks: files may come and go in the meantime.
    states = [0, 0]
    if mesh.rank == 0:
        current = _is_current(path, summaries.files_of(training, split), count)
        states = [int(shared is not None and shared.exists()), int(current)]
    is_shared, is_current = mesh.world.broadcast(tf.constant(states)).numpy()
    if is_shared or is_current:
        return shared if shared is not None and is_shared else path
    if mesh.rank == 0:
        path.unlink(missing_ok=True)
    mesh.barrier()
    lanes = Lanes.of(mesh, mesh.axis_size("replica"))
    batches = itertools.islice(in_order(dataset, lanes), -(-count // lanes.batch))
    statistics = Statistics(path, mesh, dataset.header.parameters)
    reported = _reported(batches, lanes.batch, count, progress)
    progress.note(f"measuring the volumes of {split}")
    measure_volumes(reported, plan.box.size, mesh, statistics, values)
    mesh.barrier()
    return path


def _is_current(path: Path, files: Sequence[Path], count: int) -> bool:
    """Returns whether statistics are newer than these files and complete."""
    try:
        whole = len(read_arrays(path)["index"]) >= count
    except (UnreadableError, KeyError):
        return False
    return whole and path.stat().st_mtime > max(file.stat().st_mtime for file in files)


def judge(
    predicted: Sequence[JudgedTraining],
    largest: JudgedTraining,
    paths: dict[str, Path],
    notes: Sequence[str],
    mesh: ProcessMesh,
    progress: Progress,
    split: str = "test",
    which: str = "best",
) -> Evaluation:
    """Returns the scores of networks and baselines, and records that a test set is opened.

    On rank 0.

    Args:
        predicted: the predictions of each training.
        largest: the training whose volumes baselines are fitted to.
        paths: the statistics file of each split.
        notes: the notes so far.
        mesh, progress: see `evaluate`.
        split: the volumes that networks were judged on.
        which: the weights, "best" of the validations or "last".
    """
    opened = [ON_VALIDATION] if split == "validation" else _opened(predicted, split)
    progress.note("fitting baselines")
    networks, groups = networks_of(predicted)
    train_mean, baselines, baseline_curves, more = _baselines(largest, paths, split)
    main, predictions = next(iter(networks)), {**networks, **baselines}
    scores: dict[str, Scores] = {name: score(p, train_mean) for name, p in predictions.items()}
    return Evaluation(
        main=main,
        split=split,
        predictions=predictions,
        scores=scores,
        differences=differences_from(main, predictions),
        train_mean=train_mean,
        seeds={group.name: over_seeds(group, scores) for group in groups if group.several},
        curves={**network_curves(groups, scores), **baseline_curves},
        collapse={name: describe_collapse(p, train_mean) for name, p in networks.items()},
        notes=(*notes, *opened, *more),
        trainings=tuple(_summary_of(one, which) for one in predicted),
        folder=predicted[0].training.folder.evaluation(split),
        mesh=str(mesh),
        progress=progress,
    )


def _baselines(
    largest: JudgedTraining, paths: dict[str, Path], split: str
) -> tuple[np.ndarray, dict[str, Predictions], dict[str, LearningCurve], list[str]]:
    """Returns the mean of the training targets; predictions and curves of baselines; and notes.

    Args:
        largest, paths, split: see `judge`.
    """
    from flowpm_dist.cosmoflow.scores import baselines as methods  # loads scikit-learn

    training, samples = largest.training, len(largest.predictions.truth)
    counts: dict[str, int | None] = {"train": largest.samples, "validation": None, split: samples}
    if not training.plan.simulates:
        counts["train"] = min(largest.samples, summaries.MOST)
        counts["validation"] = summaries.count_of(training, "validation")
    try:
        sets = {name: features(path, counts[name]) for name, path in paths.items()}
    except (KeyError, ValueError) as error:
        note = f"No baselines, as statistics of the volumes cannot be used: {error}."
        try:
            mean = read_arrays(paths["train"])["parameters"].mean(axis=0)
        except (UnreadableError, KeyError):  # the mean of the priors
            mean = standardiser_of(training.plan, training.header()).centre
        return mean, {}, {}, [note]
    train, judged, notes = sets["train"], sets[split], []
    known = methods.baselines_of("P(k)" if training.plan.lightcone is None else "C_l")
    fitted = {b.name: b.fit(train, sets["validation"]) for b in known}
    if (measured := len(judged.truth)) < samples:
        notes.append(
            f"Baselines are judged on {measured} of the {samples} volumes, and not compared in "
            "pairs."
        )
    predictions = {name: in_order_of_truth(f(judged)) for name, f in fitted.items()}
    sizes, count = [SMALLEST], len(train.truth)
    while sizes[-1] < count:
        sizes.append(2 * sizes[-1])
    sizes[-1] = count
    splits = train, sets["validation"], judged
    curves = methods.learning_curve(known[1:], *splits, sizes, fitted)
    return train.truth.mean(axis=0), predictions, curves, notes


def _summary_of(one: JudgedTraining, which: str) -> dict[str, Any]:
    training = one.training
    return {
        "folder": str(training.folder.path.absolute()),
        "step": one.step,
        "saved": training.folder.saved_at(which),
        "steps": training.plan.training.steps,
        "complete": training.complete,
        "seed": one.seed,
        "samples": one.samples,
        "run": training.plan.resolved(),
    }
