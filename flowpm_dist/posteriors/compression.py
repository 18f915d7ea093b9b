"""A few numbers in the place of many statistics: predictions of the parameters from them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flowpm_dist.cosmology.options import UniformPriors
from flowpm_dist.posteriors.heads import ALPHAS, Summaries, scaled, unbounded
from flowpm_dist.posteriors.novelty import shift_and_scale

FOLDS = 8
"""Number of parts that the training set is divided into."""
FEWEST = 128
"""Smallest training set that is compressed [data sets of different parameters]."""


def compressed(
    priors: UniformPriors, train: Summaries, others: Sequence[np.ndarray], seed: int = 0
) -> list[np.ndarray]:
    """Returns features compressed to two predictions of each parameter, [n, 2 p] each.

    Both predict the unbounded parameters, see `unbounded`. The first is a ridge regression. The
    second is a perceptron with one hidden layer, which predicts the residuals of the regression
    from the same features. A head that is fitted to both predictions weights them. Both are fitted
    to all but one part of the training set, for each of `FOLDS` parts in turn (Wolpert 1992). So no
    prediction for the training set comes from a fit to the same data. Other data get the mean over
    the parts. Repeatable to the bit.

    Args:
        priors: priors of the p parameters.
        train: the training set; data sets of equal parameters are in one part.
        others: features of other data, [n, features] each.
        seed: seed of the parts and of the perceptrons.

    Returns:
        The compressed features of the training set, and of each of the others.

    Raises:
        ValueError: the training set is smaller than `FEWEST`, or has parameters outside the priors.
    """
    from sklearn.linear_model import RidgeCV  # a second to load, on the rank that fits alone
    from sklearn.neural_network import MLPRegressor

    groups = np.unique(train.truth.astype(np.float32), axis=0, return_inverse=True)[1].ravel()
    if groups.max() + 1 < FEWEST:
        raise ValueError(
            f"{groups.max() + 1} data sets cannot be compressed: at least {FEWEST} needed"
        )
    shift, scale = shift_and_scale(train.features)
    data = [scaled(features, shift, scale) for features in (train.features, *others)]
    z = unbounded(priors, train.truth)
    fold = (np.random.default_rng(seed).permutation(groups.max() + 1) % FOLDS)[groups]
    means = [np.zeros((len(features), 2 * z.shape[1])) for features in data]
    for number in range(FOLDS):
        left_out = fold == number
        x, wanted = data[0][~left_out], z[~left_out]
        ridge = RidgeCV(ALPHAS * len(x), alpha_per_target=True).fit(x, wanted)
        rest = wanted - ridge.predict(x).reshape(wanted.shape)
        # It stops when a tenth of these data is predicted no better, and takes its best weights.
        perceptron = MLPRegressor(
            hidden_layer_sizes=(64,),
            alpha=1.0,
            batch_size=64,
            max_iter=1000,
            early_stopping=True,
            random_state=seed,
        ).fit(x, rest if z.shape[1] > 1 else rest[:, 0])

        def predicted(features: np.ndarray) -> np.ndarray:
            each = ridge.predict(features), perceptron.predict(features)  # noqa: B023
            return np.concatenate([y.reshape(len(features), -1) for y in each], axis=1)

        means[0][left_out] = predicted(data[0][left_out])
        for mean, features in zip(means[1:], data[1:], strict=True):
            mean += predicted(features) / FOLDS
    return means
