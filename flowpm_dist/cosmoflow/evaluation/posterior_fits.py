"""Fits posteriors of networks and of statistics to the same volumes, and judges them.

Rank 0 does everything here, from summaries that all ranks have made together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.stats import kstest

from flowpm_dist.cosmoflow.evaluation.posteriors import Key, PosteriorResults
from flowpm_dist.cosmoflow.evaluation.summaries import HIDDEN, OUTPUTS, SplitSummaries
from flowpm_dist.cosmoflow.evaluation.trainings import (
    Group,
    JudgedTraining,
    PosteriorError,
    PosteriorOptions,
    grouped,
)
from flowpm_dist.cosmoflow.network.layers import DOUBT
from flowpm_dist.cosmoflow.scores.judging import (
    Predictions,
    difference,
    mean_difference,
    resampled_scores,
    universes,
)
from flowpm_dist.cosmology.options import UniformPriors
from flowpm_dist.posteriors.calibration import Answers, calibration_of, mixed
from flowpm_dist.posteriors.compression import FEWEST, compressed
from flowpm_dist.posteriors.heads import Posterior, Summaries, fit_posterior, head_of
from flowpm_dist.posteriors.novelty import FeatureDensity
from flowpm_dist.statistics.register import statistic_named

SAMPLES = 1000
"""Number of samples of each posterior that is judged."""
UNLIKELY = 0.01
"""Parameters count as unevenly drawn if a P-value is below this over the number of tests."""
OWN = "its own Gaussians"
"""The head's name in tables for posteriors that a network's loss has trained, see `own_answers`."""


def check_names(options: PosteriorOptions) -> None:
    """Checks that all heads and statistics exist; imports user modules.

    Raises:
        PosteriorError: a head or a statistic does not exist.
    """
    try:
        for head in options.heads:
            head_of(head)
        for statistic in options.statistics:
            statistic_named(statistic, of_maps=options.of_maps)
    except ValueError as error:
        raise PosteriorError(str(error)) from error


Tables = Mapping[str, SplitSummaries]
"""Summaries by split."""
Sets = tuple[Summaries, Summaries, Summaries]
"""Features of the training and validation set, and of the set to judge on."""


def judge_posteriors(
    predicted: Sequence[JudgedTraining],
    tables: Sequence[Tables],
    largest: int,
    priors: UniformPriors,
    split: str,
    options: PosteriorOptions,
    note: Callable[[str], None],
) -> PosteriorResults:
    """Fits and judges the posteriors of networks and of statistics. On rank 0.

    The folder of each training keeps the posteriors of its network, for predictions.

    Args:
        predicted: the predictions of each training.
        tables: the summaries of each training: splits "train", "validation" and `split`.
        largest: number of the training whose volumes were measured.
        priors: the parameters' priors.
        split: the split to judge on.
        options: the posteriors to fit.
        note: called with a description of the present work.
    """
    fits = _Fits(priors, split, options, note)
    groups = grouped(predicted)
    for group in groups:
        fits.fit_networks(group, [tables[predicted.index(member)] for member in group.members])
    # As many members as the first answer is the mean of.
    members = options.fit.members * len(groups[0].members)
    for names in options.baselines:
        fits.fit_statistics(tables[largest], names, members)
    return fits.results(universes(tables[largest][split].truth))


@dataclass
class _Fits:
    """Fits of posteriors, and their answers for the volumes to judge on.

    Attributes:
        priors, split, options, note: see `judge_posteriors`.
        answers: the answers by the names of features and head.
        chosen: the features that each posterior of a network uses.
    """

    priors: UniformPriors
    split: str
    options: PosteriorOptions
    note: Callable[[str], None]
    answers: dict[Key, Answers] = field(default_factory=dict)
    chosen: dict[str, str] = field(default_factory=dict)

    def fit(self, name: str, head: str, sets: Sets, members: int) -> tuple[Posterior, Answers]:
        """Fits the mean of `members` densities to features with a name."""
        self.note(f"fitting {head} to {name}")
        train, validation, test = sets
        options = self.options.fit.model_copy(update={"members": members})
        posterior = fit_posterior(head, self.priors, train, validation, options)
        gain = posterior.gain(test.truth, test.features)
        samples = posterior.sample(test.features, SAMPLES)
        return posterior, Answers(self.priors, test.truth, samples, gain)

    def fit_networks(self, group: Group, tables: Sequence[Tables]) -> None:
        """Fits all heads to the features of networks that differ in their seed, and saves them.

        Args:
            group: the networks.
            tables: the summaries of each.
        """
        of_heads: dict[str, list[Answers]] = {}
        for member, of_member in zip(group.members, tables, strict=True):
            self._save_density(member, of_member)
            own_gaussians = own_answers(member.summarised, self.priors)
            if own_gaussians is not None:
                of_heads.setdefault(OWN, []).append(own_gaussians)
            for head in self.options.heads:
                answers = self._fit_best(group.member(member), head, member, of_member)
                of_heads.setdefault(head, []).append(answers)
        for head, several in of_heads.items():
            if group.several:
                name = f"{group.name}, mean of {len(several)} densities"
                self.answers[name, head] = mixed(several)
            for member, one in zip(group.members, several, strict=True):
                self.answers[group.member(member), head] = one

    def _save_density(self, member: JudgedTraining, tables: Tables) -> None:
        """Saves the density of a network's features, which tells unlike volumes."""
        part = HIDDEN if HIDDEN in tables["train"].parts else OUTPUTS
        known, held_out = (tables[split].parts[part] for split in ("train", "validation"))
        path = member.training.folder.feature_density(tables["train"].step)
        FeatureDensity.of(known, held_out).save(path)

    def _fit_best(self, name: str, head: str, member: JudgedTraining, tables: Tables) -> Answers:
        """Fits a head to the outputs and to the features of a network, and saves the better fit."""
        train = tables["train"]
        tried = {
            part: self.fit(
                name, head, sets_of(tables, [part], self.split), self.options.fit.members
            )
            for part in (OUTPUTS, HIDDEN)
            if part in train.parts
        }
        best = min(tried, key=lambda part: tried[part][0].loss)
        posterior, answers = tried[best]
        self.chosen[f"{name}, {head}"] = best
        about = {"part": best, "step": train.step}
        replace(posterior, about=about).save(member.training.folder.posterior(head))
        return answers

    def fit_statistics(self, tables: Tables, names: Sequence[str], members: int) -> None:
        """Fits all heads to statistics, compressed together."""
        name = " + ".join(names)
        self.note(f"compressing {name}")
        sets = compressed_sets(self.priors, sets_of(tables, names, self.split))
        for head in self.options.heads:
            _, self.answers[name, head] = self.fit(name, head, sets, members)

    def results(self, groups: np.ndarray) -> PosteriorResults:
        """Returns how good the posteriors are.

        Args:
            groups: the number of the universe of each volume, see `universes`.
        """
        answers, priors = self.answers, self.priors
        main = next(key for key in answers if key[1] == self.options.heads[-1])
        predictions = {
            key: Predictions(priors.names, one.truth, one.mean) for key, one in answers.items()
        }
        places = range(len(priors.names))
        # One standard error of the RMSE of each parameter's mean, [p], by the bootstrap.
        errors = {
            key: np.array([resampled_scores(means, place, groups)[1][0].std() for place in places])
            for key, means in predictions.items()
        }
        # How much better `main` is than each other of the same head.
        pairs = {
            key: (
                mean_difference(answers[main].gain, one.gain, groups),
                difference(predictions[main], predictions[key]),
            )
            for key, one in answers.items()
            if key != main and key[1] in (main[1], OWN)
        }
        arrays = {
            "names": np.array(priors.names),
            "truth": answers[main].truth,
            "samples": answers[main].samples.astype(np.float32),
            "gain": answers[main].gain,
        }
        judgement = {key: calibration_of(one, groups) for key, one in answers.items()}
        return PosteriorResults(
            main, judgement, errors, pairs, self.chosen, arrays, judged_by=self.split
        )


def sets_of(of: Tables, parts: Sequence[str], split: str) -> Sets:
    """Returns the sets to train, to validate and to judge on, with the features of some parts."""
    train, validation, judged = (
        Summaries(np.concatenate([of[s].parts[name] for name in parts], axis=1), of[s].truth)
        for s in ("train", "validation", split)
    )
    return train, validation, judged


def compressed_sets(priors: UniformPriors, sets: Sets) -> Sets:
    """Returns statistics compressed as a network compresses its volumes, to a few numbers.

    They are not compressed if there are too few universes.
    """
    if len(np.unique(sets[0].truth, axis=0)) < FEWEST:
        return sets
    few = compressed(priors, sets[0], [one.features for one in sets[1:]])
    train, validation, judged = map(Summaries, few, [one.truth for one in sets])
    return train, validation, judged


def not_uniform(priors: UniformPriors, truth: np.ndarray) -> list[str]:
    """Returns a sentence if parameters are not drawn evenly from their ranges.

    Args:
        priors: ranges of the parameters.
        truth: parameters [n, p] of an external table; parts of one universe count as one sample.
    """
    truth = np.unique(truth.astype(np.float32), axis=0)
    shares = (truth - priors.low) / (priors.high - priors.low)
    p_values = [float(kstest(column, "uniform").pvalue) for column in shares.T]
    limit = UNLIKELY / len(p_values)
    names = [name for name, p in zip(priors.names, p_values, strict=True) if p < limit]
    if not names:
        return []
    return [
        f"Values of {', '.join(names)} are not spread evenly over their ranges, as the prior is: "
        "ln(q / prior) also counts what is known of their distribution, and ranks and TARP are of "
        "posteriors with that distribution as their prior."
    ]


def own_answers(predictions: Predictions, priors: UniformPriors) -> Answers | None:
    """Returns the posteriors that a network's loss has trained, if there are any.

    As in `doubting_nll`, each parameter has a separate density: a Gaussian, and the prior with a
    share of `DOUBT`.
    """
    if predictions.sigma is None:
        return None
    pull = (predictions.truth - predictions.mean) / predictions.sigma
    log_normal = -0.5 * pull**2 - np.log(predictions.sigma) - 0.5 * np.log(2 * np.pi)
    over_prior = np.log1p(-DOUBT) + log_normal + np.log(priors.high - priors.low)
    gain = np.logaddexp(over_prior, np.log(DOUBT)).sum(axis=1)
    rng, shape = np.random.default_rng(0), (len(pull), SAMPLES, pull.shape[1])
    mean, sigma = predictions.mean[:, np.newaxis], predictions.sigma[:, np.newaxis]
    normal = mean + sigma * rng.standard_normal(shape)
    uniform = priors.low + (priors.high - priors.low) * rng.random(shape)
    samples = np.where(rng.random(shape) < DOUBT, uniform, normal)
    return Answers(priors, predictions.truth, samples, gain)
