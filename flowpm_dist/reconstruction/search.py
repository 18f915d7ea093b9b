"""The search for the most probable initial conditions, in successive stages of annealing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flowpm_dist.options import in_unit, keep_in_units
from flowpm_dist.reconstruction.lbfgs import LBFGS, StalledError
from flowpm_dist.reconstruction.likelihoods.base import EXACT, Annealing
from flowpm_dist.reconstruction.posterior import Evaluation, EvenPosterior, Posterior
from flowpm_dist.reconstruction.staged_run import Checkpoints, StagedRun
from flowpm_dist.reconstruction.unknowns import Unknowns

EASY_LEFT = 1e-3
"""An annealed stage ends early when the squared gradient is below this times the cells: it only
has to lead to the next one.
"""

FIRST_FIELD = 0.01
"""Standard deviation of the white noise that a search begins with."""


@dataclass(frozen=True)
class Stage:
    """A part of a search.

    Attributes:
        annealing: the annealing of the likelihood.
        evaluations: the number of gradient evaluations after which the next stage begins. Those
            that earlier stages did not use are added.
    """

    annealing: Annealing
    evaluations: int

    def __post_init__(self) -> None:
        keep_in_units(self, evaluations="")

    @property
    def held(self) -> bool:
        """Whether the parameters are held fixed.

        They are while the likelihood is annealed: with greater noise, smaller amplitudes would fit
        best.
        """
        return self.annealing != EXACT


@dataclass(frozen=True)
class Row:
    """An iteration of a search.

    Attributes:
        iteration, stage: the numbers of both, from 1.
        evaluations: the number of gradient evaluations so far.
        radius: the radius of the smoothing [Mpc/h].
        inflation: the inflation of the noise.
        loss: data + prior + the log determinant of the coordinates, where parameters change it.
        data: minus the log likelihood, annealed.
        prior: minus the log prior.
        gradient_norm: the norm of the gradient in the coordinates of the minimiser.
        step: see `Report`.
        left: about how much of the log posterior of the stage there is to gain, see `Search`.
    """

    iteration: int
    stage: int
    evaluations: int
    radius: float
    inflation: float
    loss: float
    data: float
    prior: float
    gradient_norm: float
    step: float
    left: float


AfterIteration = Callable[[Row, Unknowns], None]


def default_stages(posterior: Posterior, evaluations: int) -> list[Stage]:
    """Returns a stage for each annealing of `Likelihood.easier`; later ones take more evaluations.

    Args:
        posterior: the posterior of the data.
        evaluations: the number of gradient evaluations of all stages.
    """
    annealings = posterior.likelihood.easier()
    weights = np.arange(1.0, len(annealings) + 1)
    ends = np.rint(evaluations * np.cumsum(weights) / weights.sum()).astype(int)
    counts = np.maximum(1, np.diff(ends, prepend=0))
    return [Stage(a, int(n)) for a, n in zip(annealings, counts, strict=True)]


class Search(StagedRun):
    """A minimisation of minus the log posterior, stage by stage.

    The parameters are fitted in stages with the exact likelihood only. The maximised density is the
    density per unit of the parameters' own values.

    What is left to gain is estimated as the larger of two numbers. The first is the decrease of the
    loss that the minimiser predicts, half g^T H^-1 g. It is far too small where particles cross the
    borders of cells, because the slope jumps there. The second is the decrease in the second half
    of the stage's iterations. It is right where the loss falls as 1 / iterations, and too large
    where it falls faster.

    Args:
        posterior: the posterior, of a single chain.
        minimiser: what searches; it begins anew in each stage.
        stages: the stages in order; by default `default_stages` with 200 evaluations.
        seed: the seed of the small white noise that the search begins with.
        tolerance: an exact stage ends early when less than this is left to gain of the log
            posterior. A direction one standard deviation away from its best value loses 0.5.
        checkpoints: the checkpoints to write and to resume from; None for none.
        every: the number of iterations between checkpoints.
    """

    def __init__(
        self,
        posterior: Posterior,
        minimiser: LBFGS,
        stages: Sequence[Stage] | None = None,
        *,
        seed: int = 0,
        tolerance: float = 0.5,
        checkpoints: Checkpoints | None = None,
        every: int = 10,
    ) -> None:
        stages = stages or default_stages(posterior, 200)
        super().__init__(posterior, minimiser, stages, checkpoints, every)
        self._seed, self._tolerance = in_unit("seed", seed), in_unit("tolerance", tolerance)

    natural = True

    @property
    def outcome(self) -> str:
        """Why the search ended: "converged", "stalled", or "evaluations", which were used up."""
        return self.progress.ended or "evaluations"

    def run(self, after: AfterIteration | None = None, *, resume: bool = False) -> Unknowns:
        """Searches to the end. Must be called on all ranks together.

        Args:
            after: called on every rank after each iteration, with its row and the point.
            resume: whether to resume from the latest checkpoint, if there is one.

        Returns:
            The most probable point that was found.

        Raises:
            NoProgressError: if the loss is not finite wherever a step leads. The latest checkpoint
                is left unchanged.
            CheckpointError: if the checkpoint belongs to another search.
        """
        self._after = after
        space = self.posterior.space
        return self._run_stages(
            lambda: space.normal(self._seed).times(FIRST_FIELD),
            resume=resume,
            seed=self._seed,
            tolerance=self._tolerance,
        )

    def evaluate(self, point: Unknowns) -> Evaluation:
        """Returns the loss that the last, exact stage minimises, and its parts, at a point.

        Must be called on all ranks together.
        """
        objective = EvenPosterior(self.posterior, natural=self.natural)
        return objective.evaluate(objective.scaling.to_even(point))

    def _stage(self, objective: EvenPosterior, point: Unknowns) -> Unknowns:
        annealing = objective.annealing
        is_exact = annealing == EXACT
        easy_limit = EASY_LEFT * self.posterior.likelihood.box.cells
        # Evaluations that earlier stages did not use are available to this one.
        end = sum(stage.evaluations for stage in self.stages[: self.progress.stage + 1])
        while not self.progress.ended and self.progress.evaluations < end:
            now, before = self.progress, self._scheme.evaluations
            try:
                report = self._scheme.iterate()
            except StalledError:
                made = now.evaluations + self._scheme.evaluations - before
                self.progress = replace(now, evaluations=made, ended="stalled")
                break
            evaluation, point = report.evaluation, objective.scaling.from_even(report.point)
            norm = float(self.posterior.space.norm(evaluation.gradient))
            losses = (*(now.losses or (report.before,)), float(evaluation.loss))
            left = max(report.expected, losses[(len(losses) - 1) // 2] - losses[-1])
            is_close = left < self._tolerance if is_exact else norm**2 < easy_limit
            self.progress = replace(
                now,
                iteration=now.iteration + 1,
                evaluations=now.evaluations + self._scheme.evaluations - before,
                ended="converged" if is_close else "",
                losses=losses,
                left=left,
            )
            row = Row(
                iteration=self.progress.iteration,
                stage=self.progress.stage + 1,
                evaluations=self.progress.evaluations,
                radius=annealing.radius,
                inflation=annealing.inflation,
                loss=float(evaluation.loss),
                data=float(evaluation.data),
                prior=float(evaluation.prior),
                gradient_norm=norm,
                step=report.step,
                left=left,
            )
            if self._after is not None:
                self._after(row, point)
            self._save_if_due()
        return point
