"""Groups of trainings that are judged together, and options of posteriors; no TensorFlow.

The trainings of one method may differ in their seed and in their number of simulations.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowpm_dist.cosmoflow.planning.folder import FRESH, OPENINGS, is_fresh
from flowpm_dist.cosmoflow.planning.plan import WARMUP, TrainingPlan, differences
from flowpm_dist.cosmoflow.scores.judging import LearningCurve, Predictions, Scores
from flowpm_dist.cosmoflow.training.saved import SavedTraining, TrainedError
from flowpm_dist.io.errors import UserError
from flowpm_dist.options import checked_name
from flowpm_dist.posteriors.options import HEADS, HeadOptions
from flowpm_dist.statistics.register import checked_statistic

WRITES_THERE = "an evaluation writes there"
NOT_THE_METHOD = ("seed", "steps", "warmup", "checkpoint_every", "keep")
"""Keys of [training] that do not change the method, or that follow from others."""


OF_SEEDS = ("rmse", "rmse_over_mean", "r2")
"""Attributes of `Score` that are summarised over seeds."""


def _growing(names: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    return tuple(itertools.accumulate((name,) for name in names))


BASELINES = _growing(["power", "histograms", "bispectrum"])
"""Sets of statistics: the power spectrum, with histograms, and with the bispectrum as well."""
MAP_BASELINES = _growing(["power", "peaks", "histograms"])
"""Sets of statistics of maps: the angular power, with peaks, and with histograms as well."""


class PosteriorError(UserError):
    """There is no such head or statistic, or a requested posterior does not exist."""


@dataclass(frozen=True)
class PosteriorOptions:
    """The features that posteriors are fitted to, and the options of the fits.

    Attributes:
        heads: names of heads, see `posteriors.HEADS`, each once.
        baselines: sets of statistics, see `STATISTICS` and `MAP_STATISTICS`, each once.
        fit: options of the fit of every head.
        of_maps: whether the baselines are statistics of maps.
    """

    heads: tuple[str, ...]
    baselines: tuple[tuple[str, ...], ...] = BASELINES
    fit: HeadOptions = HeadOptions()
    of_maps: bool = False

    def __post_init__(self) -> None:
        for field in ("heads", "baselines"):
            object.__setattr__(self, field, tuple(dict.fromkeys(getattr(self, field))))

    @property
    def statistics(self) -> tuple[str, ...]:
        """All statistics that the baselines need, each once."""
        return tuple(dict.fromkeys(name for names in self.baselines for name in names))


def posterior_options(
    heads: Sequence[str] | None = None,
    baselines: Sequence[str] | None = None,
    *,
    of_maps: bool = False,
) -> PosteriorOptions:
    """Returns the options of posteriors from the names in a command.

    It checks that a user's modules exist, but does not import them.

    Args:
        heads: by default all of `HEADS`.
        baselines: sets of statistics such as "power+histograms"; by default `BASELINES`.
        of_maps: whether baselines are statistics of maps; the default is then `MAP_BASELINES`.

    Raises:
        PosteriorError: there is no such head or statistic.
    """
    sets = tuple(tuple(dict.fromkeys(names.split("+"))) for names in baselines or ())
    sets = sets or (MAP_BASELINES if of_maps else BASELINES)
    chosen = PosteriorOptions(tuple(heads or HEADS), sets, of_maps=of_maps)
    try:
        for head in chosen.heads:
            checked_name(head, HEADS, "head")
        for statistic in chosen.statistics:
            checked_statistic(statistic, of_maps=of_maps)
    except ValueError as error:
        raise PosteriorError(str(error)) from error
    return chosen


def check_written(trainings: Sequence[SavedTraining], split: str) -> None:
    """Checks that an evaluation writes through no symbolic link in trainings, which it also reads.

    Args:
        trainings: the trainings.
        split: "test", "validation" or a fresh test set.

    Raises:
        OutputError: there is a link among what it writes.
    """
    names = (OPENINGS, "summaries", "posterior", "statistics")
    for training in trainings:
        training.folder.check_links(names, WRITES_THERE, "")
    if is_fresh(split):
        trainings[0].folder.check_links([FRESH], WRITES_THERE, "")


@dataclass(frozen=True, eq=False)
class JudgedTraining:
    """The predictions of one training's network on the test set.

    Attributes:
        training: the training.
        predictions: in the order of their truth, see `in_order_of_truth`.
        summarised: predictions for the volumes that posteriors are judged on: all of them, or the
            first `summaries.MOST` of volumes in files.
        step: number of steps that the network was trained for.
        samples: number of volumes that the network was trained on.
        size: the same number, or the planned number if the training ended early. Trainings of
            equal size are compared as different seeds.
    """

    training: SavedTraining
    predictions: Predictions
    summarised: Predictions
    step: int
    samples: int
    size: int

    @property
    def seed(self) -> int:
        """The seed of the weights."""
        return self.training.plan.training.seed

    @property
    def method(self) -> str:
        """A text that is equal for trainings that differ only in seed and number of simulations."""
        return json.dumps(method_of(self.training.plan), sort_keys=True)


def method_of(plan: TrainingPlan) -> dict[str, Any]:
    """Returns the settings of a training without its seed and its number of simulations."""
    table = plan.to_table()
    options, data = plan.training, plan.data
    for section in ("mesh", "run"):
        table.pop(section, None)
    for key in NOT_THE_METHOD:
        table["training"].pop(key, None)
    if options.warmup != min(WARMUP, options.steps // 10):
        table["training"]["warmup"] = options.warmup
    if data.source != "simulate":
        return {**table, "steps": options.steps}
    for key in ("simulations", "fill", "buffer"):
        table["data"].pop(key, None)
    if data.buffer != data.simulations:
        table["data"]["buffer"] = data.buffer
    return {**table, "reuse": round(options.steps * options.batch / data.simulations, 3)}


def check_comparable(trainings: Sequence[SavedTraining], split: str = "test") -> None:
    """Checks that trainings share one test set, and that none is given twice.

    Args:
        trainings: the trainings to judge together.
        split: "test", "validation" or a fresh test set.

    Raises:
        TrainedError: the trainings have different test sets, one is given twice, or a fresh test
            set is requested for a training on files.
    """
    first = trainings[0]
    if is_fresh(split) and not first.plan.simulates:
        raise TrainedError(
            f"{first.folder.path} was trained on volumes that it did not simulate: fresh ones "
            "cannot be made; leave out --fresh"
        )
    known: dict[tuple[Any, ...], SavedTraining] = {}
    for training in trainings:
        other = differences(_held_out(first.plan, split), _held_out(training.plan, split))
        if other:
            raise TrainedError(
                f"{first.folder.path} and {training.folder.path} have different {split} sets: "
                f"{', '.join(other)} differ"
            )
        plan = training.plan
        simulations = plan.simulated.simulations if plan.simulates else None
        key = json.dumps(method_of(plan)), plan.training.seed, simulations
        if key in known:
            raise TrainedError(
                f"{known[key].folder.path} and {training.folder.path} are the same training, with "
                f"seed {plan.training.seed}: leave one out"
            )
        known[key] = training


def _held_out(plan: TrainingPlan, split: str) -> dict[str, Any]:
    """Returns the settings that the test set and the validation set depend on."""
    data = plan.data
    if data.source != "simulate":
        named = ("folder", "volumes", "table")
        paths = {f"data.{key}": getattr(data, key, None) for key in named}
        settings = {name: None if p is None else str(p.resolve()) for name, p in paths.items()}
        if data.source == "arrays":
            keys = ("seed", "test", "validation", "unit")
            settings |= {f"data.{key}": getattr(data, key) for key in keys}
        return {"data.source": data.source, **settings}
    key = "test" if is_fresh(split) else split
    count = {f"data.{key}": getattr(data, key)}
    whole = {} if is_fresh(split) else {f"data.{key} in whole batches": plan.simulations(key)}
    return {"data.source": data.source, **count, **whole, **plan.universes()}


@dataclass(frozen=True)
class Group:
    """Trainings that differ in their seed only.

    Attributes:
        name: the name of the group in tables.
        base: its name in figures, shared with trainings on other numbers of simulations.
        members: the trainings.
    """

    name: str
    base: str
    members: tuple[JudgedTraining, ...]

    @property
    def several(self) -> bool:
        """Whether there are several seeds."""
        return len(self.members) > 1

    def member(self, judged: JudgedTraining) -> str:
        """Returns the name of a member in tables."""
        return f"{self.name}, seed {judged.seed}" if self.several else self.name


def grouped(predicted: Sequence[JudgedTraining]) -> list[Group]:
    """Returns groups of trainings, the first training's method and the largest sizes first."""
    methods = list(dict.fromkeys(one.method for one in predicted))
    groups = []
    for method in methods:
        alike = [one for one in predicted if one.method == method]
        base = "network" if len(methods) == 1 else f"network {alike[0].training.folder.path}"
        sizes = sorted({one.size for one in alike}, reverse=True)
        for size in sizes:
            name = base if len(sizes) == 1 else f"{base}, {size} simulations"
            members = tuple(one for one in alike if one.size == size)
            groups.append(Group(name, base, members))
    return groups


def networks_of(predicted: Sequence[JudgedTraining]) -> tuple[dict[str, Predictions], list[Group]]:
    """Returns the predictions of each network, with the mean of each group before its members."""
    groups, networks = grouped(predicted), {}
    for group in groups:
        if group.several:
            name = f"{group.name}, mean of {len(group.members)} seeds"
            networks[name] = ensemble([one.predictions for one in group.members])
        networks |= {group.member(one): one.predictions for one in group.members}
    return networks, groups


def ensemble(members: Sequence[Predictions]) -> Predictions:
    """Returns the mean of several predictions for the same samples in the same order.

    Its variance belongs to a mixture of Gaussians: the mean of the variances plus the variance of
    the means (Lakshminarayanan and others, arXiv:1612.01474).
    """
    first = members[0]
    means = np.stack([one.mean for one in members])
    sigmas = [one.sigma for one in members if one.sigma is not None]
    sigma = None
    if len(sigmas) == len(members):
        sigma = np.sqrt(np.mean(np.square(sigmas), axis=0) + means.var(axis=0))
    return Predictions(first.names, first.truth, means.mean(axis=0), sigma)


def over_seeds(
    group: Group, scores: dict[str, Scores]
) -> dict[str, dict[str, tuple[float, float]]]:
    """Returns mean and standard deviation of the members' scores."""
    members = [scores[group.member(member)] for member in group.members]
    return {
        name: {
            attribute: (float(np.mean(values)), float(np.std(values, ddof=1)))
            for attribute in OF_SEEDS
            for values in [[getattr(of[name], attribute) for of in members]]
        }
        for name in members[0]
    }


def network_curves(groups: list[Group], scores: dict[str, Scores]) -> dict[str, LearningCurve]:
    """Returns the error of each method against the number of simulations, [size, seed]."""
    curves = {}
    for base in dict.fromkeys(group.base for group in groups):
        rows = [group for group in reversed(groups) if group.base == base]
        names = groups[0].members[0].predictions.names
        seeds = max(len(group.members) for group in rows)
        errors = {name: np.full((len(rows), seeds), np.nan) for name in names}
        for row, group in enumerate(rows):
            for place, one in enumerate(group.members):
                for name, value in scores[group.member(one)].items():
                    errors[name][row, place] = value.rmse_over_mean
        curves[base] = LearningCurve(np.array([g.members[0].size for g in rows]), errors)
    return curves
