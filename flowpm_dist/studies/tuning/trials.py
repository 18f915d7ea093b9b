"""The trials of a tuning in optuna's storage, which several workers share.

A trial is counted once it is complete, pruned, collapsed, failed or out of memory. Before, it is
running in optuna's terms: a worker holds the claim on its folder, or was stopped or has died, and
the next worker continues the trial.
"""

from __future__ import annotations

import logging
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

from flowpm_dist.io.files import remove
from flowpm_dist.jobs.locks import Lock
from flowpm_dist.studies.process import COMPLETE, FAILED, STOPPED
from flowpm_dist.studies.subject import RUN
from flowpm_dist.studies.tuning.options import Range, Space, TuneSection
from flowpm_dist.studies.tuning.records import COUNTED, LOST, JudgedRun, TrialRecord
from flowpm_dist.studies.tuning.storage import storage_in
from flowpm_dist.studies.workers import CLAIM, alone

MOST_LOSSES = 3
"""Number of workers that die during a trial before it counts as failed."""
_OPTUNA_STATES = {COMPLETE: TrialState.COMPLETE, FAILED: TrialState.FAIL, LOST: TrialState.FAIL}
"""All other states are "pruned" in optuna, so that the sampler keeps away from such values."""


class Trials:
    """The trials of a tuning. Only `next` and `end` change them, one process at a time.

    Args:
        folder: folder of the storage; it is made.
        runs: folder of the trials' folders.
        options: the section [tune].
        space: the values that keys may have.
        first: percentage, or place, at which a trial is first compared with others.
        begin_with: values of the first trial; None leaves them to the sampler.

    Raises:
        UnreadableError: the storage is damaged.
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
        begin_with: Mapping[str, Any] | None = None,
    ) -> None:
        optuna.logging.set_verbosity(logging.ERROR)
        self._options, self._runs, self._folder = options, runs, folder
        self._distributions = {key: _distribution(values) for key, values in space.items()}
        folder.mkdir(parents=True, exist_ok=True)
        with alone(folder):
            self._study = optuna.create_study(
                study_name="tune",
                storage=storage_in(folder, options.storage),
                pruner=_pruner(options, first),
                load_if_exists=True,
            )
            if begin_with and not self._trials:
                self._study.enqueue_trial(dict(begin_with))

    @property
    def _trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def next(self) -> Trial | None:
        """Returns a trial for this worker to run; None if there is none to begin now.

        Trials that a worker left come first.
        """
        with alone(self._folder):
            trials = self._trials
            for each in trials:
                if each.state == TrialState.RUNNING and (trial := self._continued(each)):
                    return trial
            running = [each for each in self._trials if each.state == TrialState.RUNNING]
            if len(self.counted) + len(running) >= self._options.trials:
                return None
            # The choice depends on the trials so far alone, and differs between workers.
            self._study.sampler = _sampler(self._options, len(trials))
            optuna_trial = self._study.ask(self._distributions)
            claim = Lock(self._runs / folder_name(optuna_trial.number) / CLAIM)
            claim.take()
            return Trial(optuna_trial, claim)

    def _continued(self, running: FrozenTrial) -> Trial | None:
        """Returns a running trial if this worker is to continue it.

        A trial that has lost too many workers is ended.
        """
        claim = Lock(self._runs / folder_name(running.number) / CLAIM)
        if not claim.take():
            return None
        trial = Trial(optuna.Trial(self._study, running._trial_id), claim)
        stopped, losses = (running.user_attrs.get(name, 0) for name in ("stopped", "losses"))
        losses += not stopped
        if losses < MOST_LOSSES and {*running.params} == {*self._distributions}:
            trial.optuna_trial.set_user_attr("losses", losses)
            trial.optuna_trial.set_user_attr("stopped", False)
            return trial
        if losses < MOST_LOSSES:
            self._tell(trial, JudgedRun(LOST))
        else:
            self._tell(trial, JudgedRun(FAILED, message=f"{losses} of its workers have died"))
        return None

    @property
    def are_done(self) -> bool:
        """Whether all trials have ended."""
        left = any(not each.state.is_finished() for each in self._trials)
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
        """All trials that have ended or were stopped, by number."""
        facts = ("state", "value", "seconds", "message")
        return [
            TrialRecord(
                number=each.number,
                values={key: each.params[key] for key in self._distributions if key in each.params},
                folder=folder_name(each.number),
                **{"state": LOST}
                | {name: each.user_attrs[name] for name in facts if name in each.user_attrs},
            )
            for each in self._trials
            if each.state.is_finished() or each.user_attrs.get("stopped")
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

    def end(self, trial: Trial, run: JudgedRun) -> None:
        """Write how a trial ended; its run keeps tables and pictures, but no weights.

        Args:
            trial: the trial, whose claim is given up.
            run: how its run ended; one that was stopped is continued later.
        """
        with alone(self._folder):
            self._tell(trial, run)
        for path in trial.folder.glob(f"{RUN}/*"):
            if run.state != STOPPED and path.is_dir() and not path.is_symlink():
                remove(path, ignore_errors=True)

    def _tell(self, trial: Trial, run: JudgedRun) -> None:
        for name, fact in vars(run).items():
            trial.optuna_trial.set_user_attr(name, fact)
        trial.optuna_trial.set_user_attr("stopped", run.state == STOPPED)
        if run.state != STOPPED:
            value = run.value if run.state == COMPLETE else None
            state = _OPTUNA_STATES.get(run.state, TrialState.PRUNED)
            self._study.tell(trial.number, value, state=state)
        trial.claim.give_up()


class Trial:
    """A trial that this worker runs.

    Args:
        optuna_trial: optuna's trial.
        claim: the claim on its folder, which this worker has.

    Attributes:
        number: number of the trial.
        values: the values to try, by key.
        folder: its folder.
    """

    def __init__(self, optuna_trial: optuna.Trial, claim: Lock) -> None:
        self.optuna_trial = optuna_trial
        self.number, self.values = optuna_trial.number, dict(optuna_trial.params)
        self.claim, self.folder = claim, claim.path.parent
        trials = optuna_trial.study.get_trials(deepcopy=False)
        self._reported = {*trials[self.number].intermediate_values}

    def falls_behind(self, place: int, value: float) -> bool:
        """Returns whether the trial is to be pruned after a validation.

        Args:
            place: how far it is, see `Judge.percentage`.
            value: the finite value of the validation.
        """
        if place in self._reported:
            return False
        self._reported.add(place)
        self.optuna_trial.report(value, place)
        return bool(self.optuna_trial.should_prune())


def folder_name(number: int) -> str:
    """Returns the name of a trial's folder."""
    return f"{number:04d}"


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
