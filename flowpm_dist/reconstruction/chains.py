"""Chains of draws from the posterior, after a warm-up that begins with easier posteriors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import tensorflow as tf

from flowpm_dist.reconstruction.checkpoints import IterationState, PointCheckpoints
from flowpm_dist.reconstruction.likelihoods import EXACT, Annealing
from flowpm_dist.reconstruction.posterior import EvenPosterior, Posterior
from flowpm_dist.reconstruction.sampler import Draw, Sampler
from flowpm_dist.reconstruction.unknowns import Memory, Unknowns


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


class Chains:
    """Several chains: their warm-up, their draws and their checkpoints.

    Args:
        posterior: the posterior, for as many chains as its space has.
        sampler: the sampler that moves them.
        warm_up: the phases of the warm-up in order, the last with the exact posterior. The step
            size is learnt during the warm-up.
        draws: the number of draws of each chain after the warm-up.
        checkpoints: where to keep what is needed to resume; None: nowhere.
        every: the number of moves between checkpoints.
    """

    def __init__(
        self,
        posterior: Posterior,
        sampler: Sampler,
        *,
        warm_up: Sequence[Phase],
        draws: int,
        checkpoints: PointCheckpoints | None = None,
        every: int = 10,
    ) -> None:
        self.posterior, self.sampler = posterior, sampler
        self.phases = [*warm_up, Phase(EXACT, draws)]
        self._checkpoints, self._every = checkpoints, every
        self._sums = {name: posterior.space.zeros() for name in ("sum", "squares")}
        self.progress = IterationState()

    @property
    def moves(self) -> int:
        """The total number of moves of each chain, warm-up included."""
        return sum(phase.moves for phase in self.phases)

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
        found = self._checkpoints.restore() if resume and self._checkpoints else None
        if found is None:
            point = start()
        else:
            self.progress, memory = found
            self._sums = {name: memory.points[name] for name in self._sums}
            objective = self._objective()
            self.sampler.resume(objective, memory)
            point = objective.scaling.from_even(memory.points["point"])
        for number in range(self.progress.stage, len(self.phases)):
            if number != self.progress.stage or found is None:
                self.progress = replace(self.progress, stage=number, in_stage=0)
                self.sampler.start(self._objective(), point)
            phase = self.phases[number]
            while self.progress.in_stage < phase.moves:
                point = self._move(phase, after).point

    def _move(self, phase: Phase, after: Callable[[Move], None] | None) -> Draw:
        drawing = self.progress.stage == len(self.phases) - 1
        draw, now = self.sampler.draw(learn=not drawing), self.progress
        self.progress = replace(
            now,
            iteration=now.iteration + 1,
            in_stage=now.in_stage + 1,
            evaluations=now.evaluations + draw.evaluations,
        )
        if drawing:
            square = Unknowns(tf.square(draw.point.field), tf.square(draw.point.parameters))
            for name, x in (("sum", draw.point), ("squares", square)):
                self._sums[name] = self._sums[name] + x
        if after is not None:
            drawn = self.progress.in_stage if drawing else 0
            after(Move(self.progress.iteration, drawn, phase, draw))
        if self._checkpoints is not None and self.progress.iteration % self._every == 0:
            self.save()
        return draw

    def _objective(self) -> EvenPosterior:
        phase = self.phases[self.progress.stage]
        return EvenPosterior(self.posterior, phase.annealing, held=phase.held)

    def save(self) -> None:
        """Writes a checkpoint with all that the next move depends on."""
        assert self._checkpoints is not None
        memory = self.sampler.memory()
        points = {**memory.points, **self._sums}
        self._checkpoints.save(self.progress, Memory(points, memory.numbers))

    def moments(self) -> tuple[Unknowns, Unknowns]:
        """Returns the mean and the standard deviation of the draws of each chain so far."""
        count = max(1, self.progress.in_stage)
        mean = self._sums["sum"].times(1 / count)
        square = self._sums["squares"].times(1 / count)
        field = tf.sqrt(tf.maximum(square.field - tf.square(mean.field), 0))
        spread = tf.sqrt(tf.maximum(square.parameters - tf.square(mean.parameters), 0))
        return mean, Unknowns(field, spread)
