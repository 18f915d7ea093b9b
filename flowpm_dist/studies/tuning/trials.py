"""The trials of a tuning in optuna's storage, which several workers share.

A trial is counted once it is complete, pruned, collapsed, failed or out of memory. A trial whose
worker has died is not counted: its values wait for a worker again.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import FrozenTrial, TrialState

from flowpm_dist.io.files import UnreadableError, remove
from flowpm_dist.studies.process import COMPLETE, FAILED, STOPPED
from flowpm_dist.studies.subject import RUN
from flowpm_dist.studies.tuning.options import Range, Space, TuneSection
from flowpm_dist.studies.tuning.records import COUNTED, LOST, TrialRecord
from flowpm_dist.studies.tuning.storage import storage_in
from flowpm_dist.studies.workers import Claim, alone

MOST_LOSSES = 3
"""A trial whose workers have died so often has failed."""
AGAIN = (LOST, STOPPED)
"""How trials ended whose values are tried again."""
_TOLD = {COMPLETE: TrialState.COMPLETE} | dict.fromkeys((FAILED, *AGAIN), TrialState.FAIL)
"""optuna knows all other states as pruned: then the sampler keeps away from such values."""


class Trials:
    """The trials of a tuning. Only `next` and `end` change them, one process at a time.

    Args:
        folder: folder of the storage; it is made.
        runs: folder of the trials' folders.
        options: the section [tune].
        space: the values that keys may have.
        first: percentage, or place, at which a trial is first compared with others.
        tried: values that are tried first; empty for none.

    Raises:
        UnreadableError: the storage is damaged, or names folders that no tuning makes.
        WriteError: the storage cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        runs: Path,
        options: TuneSection,
        space: Space,
        *,
        first: int,
        tried: Mapping[str, Any] | None = None,
    ) -> None:
        optuna.logging.set_verbosity(logging.ERROR)
        self._options, self._runs, self._folder = options, runs, folder
        self._distributions = {key: _distribution(values) for key, values in space.items()}
        folder.mkdir(parents=True, exist_ok=True)
        with alone(folder):
            self._storage = storage_in(folder, options.storage)
            self._study = optuna.create_study(
                study_name="tune",
                storage=self._storage,
                pruner=_FairPruner(_pruner(options, first)),
                load_if_exists=True,
            )
            trials = self._study.get_trials(deepcopy=False)
            for each in trials:
                _folder_of(each)
            if tried and not trials:
                self._study.enqueue_trial(dict(tried))

    def next(self) -> Trial | None:
        """Returns a trial for this worker to run; None if there is none to begin now."""
        with alone(self._folder):
            self._end_lost()
            trials = self._study.get_trials(deepcopy=False)
            begun = [each for each in trials if _state(each) in (*COUNTED, "running")]
            waiting = any(each.state == TrialState.WAITING for each in trials)
            if not waiting and len(begun) >= self._options.trials:
                return None
            # The choice depends on the trials so far alone, and differs between workers.
            self._study.sampler = _sampler(self._options, len(trials))
            trial = Trial(self._study.ask(self._distributions), self._runs)
            trial.claim.take()
            return trial

    @property
    def are_done(self) -> bool:
        """Whether all trials have ended."""
        trials = self._study.get_trials(deepcopy=False)
        left = any(not each.state.is_finished() for each in trials)
        return not left and len(self.counted) >= self._options.trials

    @property
    def counted(self) -> list[TrialRecord]:
        """The trials that count, by number."""
        return [record for record in self.records if record.state in COUNTED]

    @property
    def best(self) -> list[TrialRecord]:
        """The complete trials, the best first, each of other values."""
        complete = [r for r in self.records if r.state == COMPLETE and r.value is not None]
        best = dict[tuple[Any, ...], TrialRecord]()
        for record in sorted(complete, key=lambda r: (r.value, r.number)):
            best.setdefault(tuple(record.values.items()), record)
        return list(best.values())

    @property
    def records(self) -> list[TrialRecord]:
        """All trials that have ended, by number."""
        facts = ("value", "seconds", "message")
        return [
            TrialRecord(
                number=each.number,
                state=_state(each),
                values={key: each.params[key] for key in self._distributions if key in each.params},
                folder=_folder_of(each),
                **{name: each.user_attrs[name] for name in facts if name in each.user_attrs},
            )
            for each in self._study.get_trials(deepcopy=False)
            if each.state.is_finished()
        ]

    def importances(self) -> dict[str, float]:
        """Returns how much of the values' variance each key explains, the greatest share first.

        It is found by functional ANOVA of a random forest (Hutter and others 2014), and is empty
        where too few trials are complete.
        """
        values = {record.value for record in self.records if record.state == COMPLETE}
        if len(values) < 3:
            return {}
        try:
            judge = optuna.importance.FanovaImportanceEvaluator(seed=self._options.seed % 2**32)
            return dict(optuna.importance.get_param_importances(self._study, evaluator=judge))
        except (ValueError, RuntimeError):  # no key varies
            return {}

    def end(self, trial: Trial, state: str, **facts: Any) -> None:
        """Write how a trial ended; its run keeps tables and pictures, but no weights.

        Args:
            trial: the trial, whose claim is given up.
            state: one of `COUNTED`, or `STOPPED` for one that is to be tried again.
            facts: `value`, `seconds` and `message`.
        """
        with alone(self._folder):
            self._end(trial.asked, state, **facts)
            trial.claim.give_up()
        for path in trial.folder.glob(f"{RUN}/*"):
            if state != STOPPED and path.is_dir() and not path.is_symlink():
                remove(path, ignore_errors=True)

    def _end_lost(self) -> None:
        """Ends the trials whose workers have died."""
        for each in self._study.get_trials(deepcopy=False):
            if each.state != TrialState.RUNNING:
                continue
            claim = Claim(self._runs / _folder_of(each))
            if claim.take():
                losses = each.user_attrs.get("losses", 0) + 1
                if losses < MOST_LOSSES:
                    self._end(each, LOST, losses=losses)
                else:
                    self._end(each, FAILED, message=f"{losses} of its workers have died")
                claim.give_up()

    def _end(self, trial: Any, state: str, **facts: Any) -> None:
        """Writes how a trial ended; the values of a lost or stopped one wait for a worker first."""
        attributes = {**trial.user_attrs, **facts}
        if state in AGAIN and {*trial.params} == {*self._distributions}:
            again = {"again": trial.number, "folder": _folder_of(trial)}
            again["losses"] = attributes.get("losses", 0)
            trials = self._study.get_trials(deepcopy=False)
            if all(each.user_attrs.get("again") != trial.number for each in trials):
                self._study.enqueue_trial(trial.params, user_attrs=again)
        for name, fact in {**facts, "state": state}.items():
            self._storage.set_trial_user_attr(trial._trial_id, name, fact)
        value = facts["value"] if state == COMPLETE else None
        self._study.tell(trial.number, value, state=_TOLD.get(state, TrialState.PRUNED))


class Trial:
    """A trial that this worker runs.

    Args:
        asked: optuna's trial.
        runs: folder of the trials' folders.

    Attributes:
        number: number of the trial.
        values: the values to try, by key.
        folder: its folder, which an earlier try of the same values may have used.
        claim: the claim on the folder.
    """

    def __init__(self, asked: optuna.Trial, runs: Path) -> None:
        self.asked = asked
        self.number, self.values = asked.number, dict(asked.params)
        name = _folder_of(asked)
        asked.set_user_attr("folder", name)
        self.folder, self.claim = runs / name, Claim(runs / name)
        self._reported: set[int] = set()

    def falls_behind(self, place: int, value: float) -> bool:
        """Returns whether the trial is to be pruned after a validation.

        Args:
            place: how far it is, see `Judge.percentage`.
            value: the finite value of the validation.
        """
        if place in self._reported:
            return False
        self._reported.add(place)
        self.asked.report(value, place)
        return bool(self.asked.should_prune())


class _CountedStudy:
    """A study without the trials whose values are tried again: these compete only once.

    Args:
        study: optuna's study.
    """

    def __init__(self, study: optuna.Study) -> None:
        self._study = study

    def get_trials(self, *args: Any, **options: Any) -> list[FrozenTrial]:
        """Returns the trials that compete."""
        trials = self._study.get_trials(*args, **options)
        return [trial for trial in trials if trial.user_attrs.get("state") not in AGAIN]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._study, name)


class _FairPruner(optuna.pruners.BasePruner):
    """A pruner that does not compare a trial with an earlier try of the same trial."""

    def __init__(self, pruner: optuna.pruners.BasePruner) -> None:
        self._pruner = pruner

    def prune(self, study: Any, trial: FrozenTrial) -> bool:
        """Returns whether a trial falls behind those that compete."""
        counted: Any = _CountedStudy(study)
        return self._pruner.prune(counted, trial)


def _state(trial: Any) -> str:
    """Returns how a trial ended, or "running" or "waiting"."""
    if not trial.state.is_finished():
        return str(trial.state.name.lower())
    return str(trial.user_attrs.get("state", LOST))


def _folder_of(trial: Any) -> str:
    """Returns the name of a trial's folder: its number, or that of an earlier try of its values.

    Raises:
        UnreadableError: the storage has another name. What is in this folder may be removed.
    """
    name = trial.user_attrs.get("folder") or f"{trial.number:04d}"
    if not (isinstance(name, str) and re.fullmatch(r"[0-9]{4,}", name)):
        raise UnreadableError(
            f"trial {trial.number} in the storage has the folder {name!r}; must be the number of a "
            f"trial, such as {trial.number:04d}: put the storage back as the tuning left it, or "
            "begin anew with --overwrite"
        )
    return name


def _distribution(values: Range | Sequence[Any]) -> BaseDistribution:
    if not isinstance(values, Range):
        return CategoricalDistribution(tuple(values))
    if values.is_whole:
        return IntDistribution(
            int(values.low), int(values.high), log=values.log, step=int(values.step or 1)
        )
    return FloatDistribution(values.low, values.high, log=values.log, step=values.step)


def _pruner(options: TuneSection, first: int) -> optuna.pruners.BasePruner:
    if options.pruning == "asha":
        return optuna.pruners.SuccessiveHalvingPruner(
            min_resource=first, reduction_factor=options.reduction
        )
    if options.pruning == "median":
        return optuna.pruners.MedianPruner(options.startup, n_warmup_steps=first)
    return optuna.pruners.NopPruner()


def _sampler(options: TuneSection, number: int) -> optuna.samplers.BaseSampler:
    seed = int(np.random.default_rng([options.seed, number]).integers(2**31))
    if options.sampler == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    return optuna.samplers.TPESampler(
        n_startup_trials=options.startup, seed=seed, constant_liar=True
    )
