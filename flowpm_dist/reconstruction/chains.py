"""Chains of draws from the posterior, after a warm-up that leads from an easier one to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import tensorflow as tf

from flowpm_dist.reconstruction.checkpoints import Checkpoints, Progress
from flowpm_dist.reconstruction.likelihoods import EXACT, Annealing
from flowpm_dist.reconstruction.optimisers import Memory
from flowpm_dist.reconstruction.posterior import EvenPosterior, Posterior
from flowpm_dist.reconstruction.sampler import Draw, Sampler
from flowpm_dist.reconstruction.search import easier
from flowpm_dist.reconstruction.unknowns import Unknowns


@dataclass(frozen=True)
class Phase:
    """A part of the chains.

    Attributes:
        annealing: of the likelihood.
        moves: of each chain.
        held: whether the parameters stay as they are. They must while the likelihood is annealed:
            under greater noise than there is the data would want smaller amplitudes.
    """

    annealing: Annealing
    moves: int
    held: bool = False


def warm_up(posterior: Posterior, moves: int, *, easy: bool) -> list[Phase]:
    """Of the field first, then of the parameters, too, in the last quarter of the moves.

    Args:
        posterior: of the data.
        moves: in all.
        easy: whether half of the moves lead through easier posteriors, from large scales to small
            ones.
    """
    phases: list[Phase] = []
    if easy:
        stages = easier(posterior)[:-1]
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
        number: from 1, of the warm-up too.
        drawn: number of the draw from 1; 0 in the warm-up.
        phase: it belongs to.
        draw: where the chains are.
    """

    number: int
    drawn: int
    phase: Phase
    draw: Draw


class Chains:
    """Draws of several chains.

    Args:
        posterior: of as many chains as its space has.
        sampler: that moves them.
        warm_up: in order, the last with the exact posterior; the step size is learnt in it.
        draws: of each chain after it.
        checkpoints: where to keep what is needed to go on; None: nowhere.
        every: moves between them.
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
        self.posterior, self.sampler = posterior, sampler
        self.phases = [*warm_up, Phase(EXACT, draws)]
        self._checkpoints, self._every = checkpoints, every
        self._curvature = posterior.curvature()
        self._sums = {name: posterior.space.zeros() for name in ("sum", "squares")}
        self.progress = Progress()

    @property
    def moves(self) -> int:
        """Of each chain, in all."""
        return sum(phase.moves for phase in self.phases)

    def run(
        self,
        start: Callable[[], Unknowns],
        told: Callable[[Move], None] | None = None,
        *,
        resume: bool = False,
    ) -> None:
        """Move to the end. On all ranks together.

        Args:
            start: gives the points to begin at, unless a checkpoint does.
            told: called on every rank after each move.
            resume: go on from the latest checkpoint, if there is one.

        Raises:
            FloatingPointError: the posterior is not finite where a chain begins.
            CheckpointError: of other chains.
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
                point = self._move(phase, told).point

    def _move(self, phase: Phase, told: Callable[[Move], None] | None) -> Draw:
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
        if told is not None:
            drawn = self.progress.in_stage if drawing else 0
            told(Move(self.progress.iteration, drawn, phase, draw))
        if self._checkpoints is not None and self.progress.iteration % self._every == 0:
            self.save()
        return draw

    def _objective(self) -> EvenPosterior:
        phase = self.phases[self.progress.stage]
        scaling = self._curvature.scaling(phase.annealing)
        return EvenPosterior(self.posterior, scaling, phase.annealing, held=phase.held)

    def save(self) -> None:
        """Keep what the next move depends on."""
        assert self._checkpoints is not None
        memory = self.sampler.memory()
        points = {**memory.points, **self._sums}
        self._checkpoints.save(self.progress, Memory(points, memory.numbers))

    def moments(self) -> tuple[Unknowns, Unknowns]:
        """Mean and standard deviation of the draws of each chain so far."""
        count = max(1, self.progress.in_stage)
        mean = self._sums["sum"].times(1 / count)
        square = self._sums["squares"].times(1 / count)
        field = tf.sqrt(tf.maximum(square.field - tf.square(mean.field), 0))
        spread = tf.sqrt(tf.maximum(square.parameters - tf.square(mean.parameters), 0))
        return mean, Unknowns(field, spread)
