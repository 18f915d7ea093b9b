"""Chains of draws from the posterior, after a warm-up that begins with easier posteriors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import tensorflow as tf
from typing_extensions import override

from flowpm_dist.observables.universe_model import MANY
from flowpm_dist.options import in_unit, keep_in_units
from flowpm_dist.reconstruction.likelihoods.base import EXACT, Annealing
from flowpm_dist.reconstruction.posterior import EvenPosterior, Posterior
from flowpm_dist.reconstruction.sampler import Draw, Sampler
from flowpm_dist.reconstruction.staged_run import Checkpoints, StagedRun
from flowpm_dist.reconstruction.unknowns import Memory, Unknowns, Use


@dataclass(frozen=True)
class Phase:
    """A part of the chains.

    Attributes:
        annealing: the annealing of the likelihood.
        moves: the number of moves of each chain.
        held: whether the parameters are held fixed. They must be while the likelihood is annealed:
            with more noise than the data have, smaller amplitudes would fit best.
    """

    annealing: Annealing
    moves: int
    held: bool = False

    def __post_init__(self) -> None:
        keep_in_units(self, moves="")


def warm_up(posterior: Posterior, moves: int, *, easy: bool) -> list[Phase]:
    """Returns the phases of a warm-up.

    The field moves alone first. The parameters move, too, in the last quarter of the moves.

    Args:
        posterior: the posterior of the data.
        moves: the number of moves of each chain in all phases.
        easy: whether half of the moves sample easier posteriors, from large scales to small ones.
    """
    phases: list[Phase] = []
    if easy:
        stages = posterior.likelihood.easier()[:-1]
        ends = np.rint(moves // 2 * np.arange(1, len(stages) + 1) / len(stages)).astype(int)
        counts = np.diff(ends, prepend=0)
        phases = [Phase(a, int(n), True) for a, n in zip(stages, counts, strict=True) if n]
    free = moves // 4
    left = moves - free - sum(phase.moves for phase in phases)
    return [*phases, Phase(EXACT, left, True), Phase(EXACT, free)]


def first_points(posterior: Posterior, seed: int, about: Unknowns | None = None) -> Unknowns:
    """Returns a point for each chain to begin at: a draw of the prior, or a point near another.

    Points near another are drawn from the posterior that a linear universe would have about it.

    Args:
        posterior: the posterior of all chains.
        seed: the seed of the draws.
        about: the point near which the chains begin, such as a search has found; None for draws of
            the prior.
    """
    away = posterior.space.normal(seed, Use.START)
    if about is None:
        return away
    scaling = posterior.scaling()
    return scaling.from_even(scaling.to_even(posterior.space.zeros() + about) + away)


@dataclass(frozen=True)
class Move:
    """A move of all chains.

    Attributes:
        number: the number of the move, from 1, warm-up included.
        drawn: the number of the draw, from 1; 0 in the warm-up.
        phase: the phase that it belongs to.
        draw: where the chains are after it.
    """

    number: int
    drawn: int
    phase: Phase
    draw: Draw


class Chains(StagedRun):
    """Several chains: their warm-up, their draws and their checkpoints.

    Args:
        posterior: the posterior, for as many chains as its space has.
        sampler: the sampler that moves them.
        warm_up: the phases of the warm-up in order, the last with the exact posterior. The step
            size is learnt during the warm-up.
        draws: the number of draws of each chain after the warm-up.
        checkpoints: the checkpoints to write and to resume from; None for none.
        every: the number of moves between checkpoints.
    """

    def __init__(
        self,
        posterior: Posterior,
        sampler: Sampler,
        *,
        warm_up: Sequence[Phase],
        draws: int,
        checkpoints: Checkpoints | None = None,
        every: int = 10,
    ) -> None:
        stages = [*warm_up, Phase(EXACT, in_unit("draws", draws))]
        super().__init__(posterior, sampler, stages, checkpoints, every)
        self._sums = {name: posterior.space.zeros() for name in ("sum", "squares")}

    @property
    def moves(self) -> int:
        """The total number of moves of each chain, warm-up included."""
        return sum(phase.moves for phase in self.stages)

    def run(
        self,
        start: Callable[[], Unknowns],
        after: Callable[[Move], None] | None = None,
        *,
        resume: bool = False,
    ) -> None:
        """Moves the chains to the end. Must be called on all ranks together.

        Args:
            start: returns the points to begin at; not called if a checkpoint is resumed.
            after: called on every rank after each move.
            resume: whether to resume from the latest checkpoint, if there is one.

        Raises:
            FloatingPointError: if the posterior is not finite where a chain begins.
            CheckpointError: if the checkpoint belongs to other chains.
        """
        self._after = after
        self._run_stages(start, resume=resume, sampler=self._scheme.options)

    @override
    def is_long(self, stage: Phase) -> bool:
        return stage.moves * self._scheme.options.evaluations >= MANY

    def _stage(self, objective: EvenPosterior, point: Unknowns) -> Unknowns:
        phase: Phase = self.stages[self.progress.stage]
        is_drawing = self.progress.stage == len(self.stages) - 1
        while self.progress.in_stage < phase.moves:
            draw, now = self._scheme.draw(learn=not is_drawing), self.progress
            point = draw.point
            self.progress = replace(
                now,
                iteration=now.iteration + 1,
                in_stage=now.in_stage + 1,
                evaluations=now.evaluations + draw.evaluations,
            )
            if is_drawing:
                square = Unknowns(tf.square(point.field), tf.square(point.parameters))
                for name, x in (("sum", point), ("squares", square)):
                    self._sums[name] = self._sums[name] + x
            if self._after is not None:
                drawn = self.progress.in_stage if is_drawing else 0
                self._after(Move(self.progress.iteration, drawn, phase, draw))
            self._save_if_due()
        return point

    def _restored(self) -> Memory | None:
        memory = super()._restored()
        if memory is not None:
            self._sums = {name: memory.points[name] for name in self._sums}
        return memory

    def _memory(self) -> Memory:
        memory = super()._memory()
        return Memory({**memory.points, **self._sums}, memory.numbers)

    def moments(self) -> tuple[Unknowns, Unknowns]:
        """Returns the mean and the standard deviation of the draws of each chain so far."""
        count = max(1, self.progress.in_stage)
        mean = self._sums["sum"].times(1 / count)
        square = self._sums["squares"].times(1 / count)
        field = tf.sqrt(tf.maximum(square.field - tf.square(mean.field), 0))
        spread = tf.sqrt(tf.maximum(square.parameters - tf.square(mean.parameters), 0))
        return mean, Unknowns(field, spread)
