"""What a search and chains share: stages, progress, and when checkpoints are written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from flowpm_dist.options import in_unit
from flowpm_dist.reconstruction.posterior import EvenPosterior, Posterior
from flowpm_dist.reconstruction.unknowns import Memory, Unknowns


@dataclass(frozen=True)
class IterationState:
    """The progress of a search or of chains.

    Attributes:
        iteration: the number of iterations so far.
        stage: the number of the stage of annealing, from 0.
        in_stage: for chains, the number of moves in the stage so far.
        evaluations: the number of gradient evaluations so far.
        ended: why the stage has ended before its evaluations were used: "converged" or "stalled".
        losses: for a search, the loss where the stage began and after each of its iterations.
        left: for a search, about how much of the log posterior there is to gain, see `Search`; None
            before its first iteration.
    """

    iteration: int = 0
    stage: int = 0
    in_stage: int = 0
    evaluations: int = 0
    ended: str = ""
    losses: tuple[float, ...] = ()
    left: float | None = None


class Checkpoints(Protocol):
    """Where a search or chains keep their checkpoints, such as `PointCheckpoints`.

    All methods are called on all ranks together.
    """

    def save(self, progress: IterationState, memory: Memory) -> None:
        """Keeps a checkpoint."""

    def restore(self) -> tuple[IterationState, Memory] | None:
        """Returns the latest checkpoint, or None if there is none."""


class StagedRun(ABC):
    """A search or chains: one stage of annealing after another, with checkpoints.

    Attributes:
        natural: see `EvenPosterior`.

    Args:
        posterior: the posterior of the data.
        scheme: the minimiser or the sampler, which begins anew in each stage.
        stages: the stages in order, each with an `annealing`, and whether parameters are `held`.
        checkpoints: the checkpoints to write and to resume from; None for none.
        every: the number of iterations between checkpoints.
    """

    natural: ClassVar[bool] = False

    def __init__(
        self,
        posterior: Posterior,
        scheme: Any,
        stages: Sequence[Any],
        checkpoints: Checkpoints | None,
        every: int,
    ) -> None:
        self.posterior, self.stages, self._scheme = posterior, list(stages), scheme
        self._checkpoints, self._every = checkpoints, in_unit("every", every)
        self.progress = IterationState()

    def _run_stages(
        self, start: Callable[[], Unknowns], *, resume: bool, **options: Any
    ) -> Unknowns:
        """Runs the stages from a point, or from the latest checkpoint; returns the last point.

        Args:
            start: returns the point.
            resume: whether to take the checkpoint, if there is one.
            **options: what must be the same on all ranks, besides all that the run has.
        """
        self.posterior.space.box.check_equal(
            "a reconstruction",
            priors=self.posterior.priors,
            likelihood=type(self.posterior.likelihood),
            scheme=type(self._scheme),
            stages=self.stages,
            checkpoints=None if self._checkpoints is None else self._every,
            resume=resume,
            **options,
        )
        memory = self._restored() if resume else None
        if memory is None:
            self.progress, point = IterationState(), start()
        else:
            objective = self._objective()
            self._scheme.resume(objective, memory)
            point = objective.scaling.from_even(memory.points["point"])
        for number in range(self.progress.stage, len(self.stages)):
            if number != self.progress.stage or memory is None:
                now = self.progress
                self.progress = replace(
                    now, stage=number, in_stage=0, ended="", losses=(), left=None
                )
                objective = self._objective()
                self._scheme.start(objective, point)
            point = self._stage(objective, point)
        return point

    @abstractmethod
    def _stage(self, objective: EvenPosterior, point: Unknowns) -> Unknowns:
        """Runs the present stage from a point; returns the last point."""

    def _objective(self) -> EvenPosterior:
        stage = self.stages[self.progress.stage]
        kind = {"natural": self.natural, "whole": self.is_long(stage)}
        return EvenPosterior(self.posterior, stage.annealing, held=stage.held, **kind)

    def is_long(self, stage: Any) -> bool:
        """Whether it is worth to compile the evaluations of a stage whole, see `EvenPosterior`."""
        return False

    def _restored(self) -> Memory | None:
        """Returns what the scheme resumes from, or None if there is no checkpoint."""
        restored = self._checkpoints.restore() if self._checkpoints else None
        if restored is None:
            return None
        self.progress, memory = restored
        return memory

    def _memory(self) -> Memory:
        """Returns all that the next iteration depends on."""
        memory: Memory = self._scheme.memory()
        return memory

    def save(self) -> None:
        """Writes a checkpoint. Must be called on all ranks together."""
        assert self._checkpoints is not None
        self._checkpoints.save(self.progress, self._memory())

    def _save_if_due(self) -> None:
        if self._checkpoints is not None and self.progress.iteration % self._every == 0:
            self.save()
