"""Fits posteriors of networks and of statistics to the same volumes, and judges them.

Rank 0 does everything here, from summaries that all ranks have made together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from scipy.stats import kstest

from flowpm_dist.cosmoflow.evaluation.posteriors import PosteriorResults
from flowpm_dist.cosmoflow.evaluation.summaries import HIDDEN, OUTPUTS, SplitSummaries
from flowpm_dist.cosmoflow.evaluation.trainings import (
    Judged,
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
from flowpm_dist.posteriors.features import statistic_of
from flowpm_dist.posteriors.heads import Posterior, Summaries, fit_posterior, head_of
from flowpm_dist.posteriors.novelty import FeatureDensity

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
            statistic_of(statistic, of_maps=options.of_maps)
    except ValueError as error:
        raise PosteriorError(str(error)) from error


Tables = Mapping[str, SplitSummaries]
"""Summaries by split."""
Sets = tuple[Summaries, Summaries, Summaries]
"""Features of the training and validation set, and of the set to judge on."""


def judge_posteriors(
    predicted: Sequence[Judged],
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
    judged = tables[largest][split]
    groups = universes(judged.truth)
    answers: dict[tuple[str, str], Answers] = {}
    chosen: dict[str, str] = {}

    def fit(name: str, head: str, sets: Sets, members: int) -> tuple[Posterior, Answers]:
        note(f"fitting {head} to {name}")
        train, validation, test = sets
        fit_options = options.fit.model_copy(update={"members": members})
        posterior = fit_posterior(head, priors, train, validation, fit_options)
        gain = posterior.gain(test.truth, test.features)
        samples = posterior.sample(test.features, SAMPLES)
        return posterior, Answers(priors, test.truth, samples, gain)

    for group in grouped(predicted):
        of_members: dict[str, list[Answers]] = {}
        for member in group.members:
            of, name = tables[predicted.index(member)], group.member(member)
            folder, step = member.training.folder, of["train"].step
            part = HIDDEN if HIDDEN in of["train"].parts else OUTPUTS
            known, held_out = (of[s].parts[part] for s in ("train", "validation"))
            FeatureDensity.of(known, held_out).save(folder.feature_density(step))
            own = own_answers(member.summarised, priors)
            if own is not None:
                of_members.setdefault(OWN, []).append(own)
            for head in options.heads:
                tried = {
                    part: fit(name, head, sets_of(of, [part], split), options.fit.members)
                    for part in (OUTPUTS, HIDDEN)
                    if part in of["train"].parts
                }
                best = min(tried, key=lambda part: tried[part][0].loss)
                posterior, found = tried[best]
                chosen[f"{name}, {head}"] = best
                about = {"part": best, "step": step}
                replace(posterior, about=about).save(folder.posterior(head))
                of_members.setdefault(head, []).append(found)
        for head, several in of_members.items():
            if group.several:
                answers[f"{group.name}, mean of {len(several)} densities", head] = mixed(several)
            for member, one in zip(group.members, several, strict=True):
                answers[group.member(member), head] = one
    # As many members as the first answer is the mean of.
    members = options.fit.members * len(grouped(predicted)[0].members)
    for names in options.baselines:
        name = " + ".join(names)
        note(f"compressing {name}")
        sets = compressed_sets(priors, sets_of(tables[largest], names, split))
        for head in options.heads:
            _, answers[name, head] = fit(name, head, sets, members)
    judgement = {key: calibration_of(one, groups) for key, one in answers.items()}
    main = next(key for key in answers if key[1] == options.heads[-1])
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
    kept = answers[main]
    arrays = {
        "names": np.array(priors.names),
        "truth": kept.truth,
        "samples": kept.samples.astype(np.float32),
        "gain": kept.gain,
    }
    return PosteriorResults(main, judgement, errors, pairs, chosen, arrays, judged_by=split)


def sets_of(of: Tables, parts: Sequence[str], split: str) -> Sets:
    """Returns the training and validation set, and that to judge on, with the features of parts."""
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
    found = [float(kstest(column, "uniform").pvalue) for column in shares.T]
    limit = UNLIKELY / len(found)
    names = [name for name, p in zip(priors.names, found, strict=True) if p < limit]
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
