"""Baselines that predict the parameters from summary statistics, without a network on volumes.

Each baseline is fitted to the training set, and its settings are chosen on the validation set. Its
sigma is the root mean square of its residuals on the validation set, the same for all samples. It
is slightly too small, because the settings were chosen on this set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from sklearn.linear_model import Ridge
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures, StandardScaler

from flowpm_dist.cosmoflow.scores.judging import Features, LearningCurve, Predictions, score

Predictor = Callable[[Features], Predictions]


def _predictor(say: Callable[[Features], np.ndarray], validation: Features) -> Predictor:
    """Adds error bars from the residuals on the validation set."""
    sigma = np.sqrt(np.mean((say(validation) - validation.truth) ** 2, axis=0))
    sigma = np.maximum(sigma, np.finfo(np.float64).tiny)

    def predict(features: Features) -> Predictions:
        mean = say(features)
        return Predictions(features.names, features.truth, mean, np.broadcast_to(sigma, mean.shape))

    return predict


@dataclass(frozen=True)
class Mean:
    """The mean of the training targets, whatever the volume."""

    name: str = "mean"

    def fit(self, train: Features, validation: Features) -> Predictor:
        """Learns from `train`; `validation` gives the error bar."""
        mean = train.truth.mean(axis=0)
        return _predictor(lambda features: np.tile(mean, (len(features.truth), 1)), validation)


@dataclass(frozen=True)
class RidgeOnPower:
    """Least squares with an L2 penalty on log P(k): linear, or with all products of two bins.

    Attributes:
        alphas: penalties to choose from, divided by the number of samples; for standardised
            features.
    """

    name: str = "ridge on log P(k)"
    alphas: tuple[float, ...] = tuple(10.0**e for e in range(-7, 3))

    def fit(self, train: Features, validation: Features) -> Predictor:
        """Learns from `train`; `validation` chooses degree and penalty of each parameter."""
        models, errors = [], []
        for degree in (1, 2):
            products = PolynomialFeatures(degree, include_bias=False)
            steps = (products, StandardScaler()) if degree > 1 else ()
            to_features = make_pipeline(StandardScaler(), *steps).fit(train.log_power)
            inputs, held_out = (to_features.transform(f.log_power) for f in (train, validation))
            for alpha in self.alphas:
                ridge = Ridge(alpha=alpha * len(inputs)).fit(inputs, train.truth)
                models.append(make_pipeline(to_features, ridge))
                residuals = _columns(ridge.predict(held_out)) - validation.truth
                errors.append(np.mean(residuals**2, axis=0))
        best = [models[i] for i in np.argmin(errors, axis=0)]

        def say(features: Features) -> np.ndarray:
            each = [_columns(model.predict(features.log_power)) for model in best]
            return np.stack([values[:, i] for i, values in enumerate(each)], axis=1)

        return _predictor(say, validation)


def _columns(values: np.ndarray) -> np.ndarray:
    """Returns predictions as [n, p]; scikit-learn returns [n] if p is 1."""
    return values.reshape(len(values), -1)


@dataclass(frozen=True)
class SmallNetwork:
    """A multilayer perceptron on log P(k), with the density histogram or without.

    The predictions are the mean over networks with different seeds. Each network is trained by Adam
    on standardised inputs and targets. Its training ends when the error on the validation set has
    not improved for `patience` epochs, and the weights of the best epoch are kept.

    Attributes:
        histogram: whether its inputs include the density histogram.
        spectrum: the name of the power.
        hidden: widths of the hidden layers to choose from.
        alphas: L2 penalties to choose from.
        seeds: the number of networks; the settings are chosen with the first.
        epochs: the greatest number of epochs.
        patience: the number of epochs without improvement after which a training ends.
    """

    histogram: bool = False
    spectrum: str = "P(k)"
    hidden: tuple[tuple[int, ...], ...] = ((64,), (64, 64))
    alphas: tuple[float, ...] = (1e-4, 1e-1)
    seeds: int = 3
    epochs: int = 300
    patience: int = 30

    @property
    def name(self) -> str:
        """The name in tables and figures."""
        return f"MLP on log {self.spectrum}{' + histogram' if self.histogram else ''}"

    def fit(self, train: Features, validation: Features) -> Predictor:
        """Learns from `train`, chooses settings on `validation`; repeatable to the bit."""
        inputs = StandardScaler().fit(self._inputs(train))
        targets = StandardScaler().fit(train.truth)
        data = tuple(
            (inputs.transform(self._inputs(features)), targets.transform(features.truth))
            for features in (train, validation)
        )
        first = [self._train(h, a, 0, *data) for h in self.hidden for a in self.alphas]
        best, _ = min(first, key=lambda one: one[1])
        settings = (best.hidden_layer_sizes, best.alpha)
        others = [self._train(*settings, seed, *data)[0] for seed in range(1, self.seeds)]
        networks = [best, *others]

        def say(features: Features) -> np.ndarray:
            scaled = inputs.transform(self._inputs(features))
            outputs = [_columns(network.predict(scaled)) for network in networks]
            return targets.inverse_transform(np.mean(outputs, axis=0))

        return _predictor(say, validation)

    def _inputs(self, features: Features) -> np.ndarray:
        if not self.histogram:
            return features.log_power
        return np.concatenate([features.log_power, features.histogram], axis=1)

    def _train(
        self,
        hidden: tuple[int, ...],
        alpha: float,
        seed: int,
        train: tuple[np.ndarray, np.ndarray],
        validation: tuple[np.ndarray, np.ndarray],
    ) -> tuple[MLPRegressor, float]:
        """Returns the network of the best epoch, and its mean squared validation error."""
        network = MLPRegressor(
            hidden_layer_sizes=hidden,
            alpha=alpha,
            batch_size=min(64, len(train[0])),
            # A generator, not a number: else `partial_fit` would use the same order in every epoch.
            random_state=np.random.RandomState(seed),
        )
        inputs, targets = train
        if targets.shape[1] == 1:
            targets = targets[:, 0]
        best, best_epoch, weights = np.inf, 0, None
        for epoch in range(self.epochs):
            network.partial_fit(inputs, targets)
            residuals = _columns(network.predict(validation[0])) - validation[1]
            error = float(np.mean(residuals**2))
            if error < best:
                best, best_epoch = error, epoch
                weights = [w.copy() for w in (*network.coefs_, *network.intercepts_)]
            elif epoch - best_epoch >= self.patience:
                break
        layers = len(network.coefs_)
        if weights is not None:
            network.coefs_, network.intercepts_ = weights[:layers], weights[layers:]
        return network, best


Baseline = Mean | RidgeOnPower | SmallNetwork


def baselines_of(spectrum: str) -> tuple[Baseline, ...]:
    """Returns all baselines.

    Args:
        spectrum: the name of the power: "P(k)" of volumes, "C_l" of maps.
    """
    return (
        Mean(),
        RidgeOnPower(f"ridge on log {spectrum}"),
        SmallNetwork(spectrum=spectrum),
        SmallNetwork(histogram=True, spectrum=spectrum),
    )


def learning_curve(
    baselines: Sequence[Baseline],
    train: Features,
    validation: Features,
    test: Features,
    sizes: Sequence[int],
    fitted: Mapping[str, Predictor] = MappingProxyType({}),
) -> dict[str, LearningCurve]:
    """Returns the test error of each baseline as a function of the number of training simulations.

    Args:
        baselines: the baselines, which are fitted to the first simulations at each size.
        train: one sample for each simulation.
        validation, test: the same samples at every size.
        sizes: numbers of simulations, at most as many as in `train`.
        fitted: baselines by name that were fitted to all of `train`; they are not fitted again.

    Returns:
        The curve of each baseline by name; errors [size] are divided by the error of the mean of
        all of `train`.
    """
    train_mean = train.truth.mean(axis=0)

    def fit(baseline: Baseline, size: int) -> Predictor:
        if size == len(train.truth) and baseline.name in fitted:
            return fitted[baseline.name]
        return baseline.fit(train.first(size), validation)

    curves = {}
    for baseline in baselines:
        scores = [score(fit(baseline, size)(test), train_mean) for size in sizes]
        errors = {n: np.array([of[n].rmse_over_mean for of in scores]) for n in train.names}
        curves[baseline.name] = LearningCurve(np.asarray(sizes), errors)
    return curves
