"""How the runs of a subject are judged: by which column of which table, and what is no success.

Runs are judged on what is held out for validation, never on a test set.
Nothing here imports TensorFlow or optuna.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flowpm_dist.cosmoflow.planning.data_options import DummyData, SimulatedData
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.cosmoflow.scores.judging import NO_BETTER
from flowpm_dist.emulate.options import EmulationOptions
from flowpm_dist.jobs.results import read_rows
from flowpm_dist.reconstruction.options import ReconstructionOptions
from flowpm_dist.studies.tuning.options import SCRIPT_SEEDS

SAME = "decides what trials are judged by: it must be the same in all"


@dataclass(frozen=True)
class Judge:
    """How the runs of a subject are judged.

    Attributes:
        table: name of the table in the run's folder.
        place: the column that says how far the run is.
        metric: the column of the values; the smaller, the better.
        columns: the columns that may be `metric`; empty for all.
        keeps_best: whether a run's value is its least one, otherwise its last one.
        length: the largest value of `place`; None where it is not known.
        looks: the number of values that a run will have; None where it is not known.
        constant: the value of a constant prediction; None where it is not known.
        seeds: the keys of the seeds.
        fixed: the keys that must be the same in all trials, and why.
        only: the beginnings of the keys that may be tuned; empty for all.
    """

    table: str = "metrics.csv"
    place: str = "step"
    metric: str = "validation_loss"
    columns: tuple[str, ...] = ()
    keeps_best: bool = True
    length: int | None = None
    looks: int | None = None
    constant: float | None = None
    seeds: tuple[str, ...] = SCRIPT_SEEDS
    fixed: Mapping[str, str] = field(default_factory=dict)
    only: tuple[str, ...] = ()

    def percentage(self, place: float) -> int:
        """Returns how much of a run is done, from 0 to 100; its place if its length is unknown."""
        return int(place) if self.length is None else int(100 * place // self.length)

    def values_in(self, table: Path) -> list[tuple[int, float]]:
        """Returns the percentages and the values that a run has left in its table so far."""
        values = []
        for row in read_rows(table):
            try:
                place, value = float(row[self.place]), float(row[self.metric])
            except (KeyError, ValueError, TypeError):  # no validation after this step
                continue
            values.append((self.percentage(place), value))
        return values

    def value(self, values: Sequence[float]) -> float | None:
        """Returns the value of a run; None if it has none that is finite."""
        finite = [value for value in values if math.isfinite(value)]
        if not finite:
            return None
        return min(finite) if self.keeps_best else values[-1]

    def has_collapsed(self, values: Sequence[float]) -> bool:
        """Returns whether a run has learnt nothing so far, or whether its values have diverged.

        Args:
            values: its values so far, at least one.
        """
        value = self.value(values)
        if value is None or not math.isfinite(values[-1]):
            return True
        return self.constant is not None and value >= self.constant

    def why_fixed(self, key: str) -> str:
        """Returns why a key may not be tuned; an empty text if it may."""
        if key in self.fixed:
            return self.fixed[key]
        if key in self.seeds:
            return "is a seed, and trials must not be chosen by luck"
        if self.only and not key.startswith(self.only):
            return f"changes what is found: only keys of {' and '.join(self.only)} can be tuned"
        return ""


def judge_of(
    options: Any, metric: str | None = None, constant: float | None = None
) -> Judge | None:
    """Returns how the runs of a job are judged; None for a job that has no validation.

    Args:
        options: the checked run file of the job; None for a script.
        metric: a column in place of the default one.
        constant: the value of a constant prediction, in place of the one that is known.
    """
    match options:
        case None:
            judge: Judge | None = Judge(metric=metric or "validation_loss")
        case TrainingPlan():
            judge = _of_training(options, metric)
        case EmulationOptions():
            judge = _of_emulation(options, metric)
        case ReconstructionOptions():
            judge = _of_reconstruction(options, metric)
        case _:
            judge = None
    return judge if judge is None or constant is None else replace(judge, constant=constant)


def _of_training(plan: TrainingPlan, metric: str | None) -> Judge | None:
    if isinstance(plan.data, DummyData):
        return None
    metric = metric or "validation_loss"
    fixed = ["data.validation", "training.validate_every", "priors.targets"]
    if metric == "validation_loss":
        fixed += ["network.loss", "network.name"]
    test = {"data.test": "belongs to the test set, which no trial may depend on"}
    seeds: tuple[str, ...] = ("training.seed", "data.seed")
    if not isinstance(plan.data, SimulatedData):
        # Of arrays, data.seed divides the volumes: a fresh one would train on the test set.
        seeds = ("training.seed",)
        test["data.seed"] = "would move volumes into and out of the test set"
    return Judge(
        place="samples",  # which are counted when a step is made; steps are counted from 0
        metric=metric,
        columns=("validation_loss", "validation_mae"),
        length=plan.training.steps * plan.training.batch,
        looks=-(-plan.training.steps // plan.training.validate_every),
        constant=constant_value(plan.network.loss, metric, bounded=plan.declaration.bounded),
        seeds=seeds,
        fixed={**test, **dict.fromkeys(fixed, SAME)},
    )


def constant_value(loss: str, metric: str, *, bounded: bool) -> float | None:
    """Returns the metric up to which a network predicts no better than the priors' mean.

    Targets are uniform, with mean 0. The network may explain the share `NO_BETTER` of their
    variance, as in `flowpm_dist.cosmoflow.scores.judging.describe_collapse`.

    Args:
        loss: the loss of the network.
        metric: the column of the training's table.
        bounded: whether targets are between -1 and 1; otherwise their variance is 1.
    """
    variance = 1 / 3 if bounded else 1.0
    left = (1 - NO_BETTER) * variance
    known = {
        "l1": math.sqrt(3 * left) / 2,
        "l2": left,
        "likelihood": 0.5 * (1 + math.log(left)),
    }
    name = "l1" if metric == "validation_mae" else loss
    return known[name] if metric in ("validation_loss", "validation_mae") else None


def _of_emulation(options: EmulationOptions, metric: str | None) -> Judge:
    emulate = options.emulate
    keys = ("kind", "correlation", "displacement", "validation", "validate_every")
    truth = ("pairs", "universes", "mesh_factor", "steps", "a")
    fixed = [*(f"emulate.{key}" for key in keys), *(f"truth.{key}" for key in truth)]
    return Judge(
        table="iterations.csv",
        place="iteration",
        metric=metric or "held out",
        columns=("held out",),
        length=emulate.iterations,
        looks=-(-emulate.iterations // emulate.validate_every),
        seeds=("emulate.seed",) if options.truth.pairs else ("emulate.seed", "truth.seed"),
        fixed=dict.fromkeys(fixed, SAME),
    )


def _of_reconstruction(options: ReconstructionOptions, metric: str | None) -> Judge:
    return Judge(
        table="iterations.csv",
        place="evaluations",
        metric=metric or "loss",
        columns=("loss",),
        keeps_best=False,  # annealed losses come before the posterior's own
        length=options.search.total,
        seeds=("search.seed", "data.mock_seed") if options.is_mock else ("search.seed",),
        only=("search.",),
    )
