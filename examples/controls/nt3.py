"""Trains NT3, which tells tumours from normal tissue by the expression of 60,483 genes.

    mpirun -n 2 python examples/controls/nt3.py --features 6048 --epochs 5

Network and training follow the CANDLE benchmark Pilot1 NT3 (github.com/ECP-CANDLE/Benchmarks). Wu
et al. (2018) studied how it scales under Horovod. Samples of the same shape are made from a seed,
or read from the benchmark's files.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import harness
import numpy as np
from samples import Data, Samples

from flowpm_dist.io.errors import UserError

if TYPE_CHECKING:
    import keras

GENES, TRAINING_SAMPLES, CLASSES = 60_483, 1120, 2
FILES = ("nt_train2.csv", "nt_test2.csv")
RUN, MARKED = 32, 0.2
"""Made data: genes in runs of neighbours, and the fraction of runs that differ between classes."""
SHIFT, SCATTER = 0.4, 0.2
"""Their difference in mean expression, and every gene's scatter; mean expressions are below 0.7."""


def made_data(features: int, samples: int, seed: int) -> Data:
    """Returns samples of two classes that differ in the mean expression of some runs of genes.

    Args:
        features: number of genes.
        samples: number of training samples; a quarter as many are held out.
        seed: seed of genes and samples.
    """
    genes = np.random.default_rng([seed, 0])
    mean = genes.uniform(0.1, 0.7, features).astype(np.float32)
    runs = -(-features // RUN)
    shift = np.where(genes.random(runs) < MARKED, genes.choice([-SHIFT, SHIFT], runs), 0)
    shift = np.repeat(shift, RUN)[:features].astype(np.float32)

    def split(number: int, count: int) -> Samples:
        y = np.arange(count, dtype=np.int32) % CLASSES
        x = np.empty((count, features), np.float32)
        for sample in range(count):
            scatter = np.random.default_rng([seed, number, sample])
            x[sample] = SCATTER * scatter.standard_normal(features, np.float32)
        x += mean + y[:, np.newaxis] * shift
        return Samples(np.maximum(x, 0, out=x), y)

    return Data(split(1, samples), split(2, max(1, samples // 4)))


def read_data(folder: Path, features: int, samples: int | None) -> Data:
    """Returns the samples of the benchmark's files: a label, then the expressions, in each line.

    Args:
        folder: folder with both files.
        features: number of genes; further ones are left out.
        samples: the most training samples, and four times the most held-out ones; None for all.

    Raises:
        UserError: a file is missing, no table of numbers, or has too few columns.
    """

    def split(path: Path, most: int | None) -> Samples:
        try:
            table = np.loadtxt(path, np.float32, delimiter=",", ndmin=2, max_rows=most)
        except (OSError, ValueError) as error:
            raise UserError(f"--data: {path} cannot be read: {error}") from error
        if table.shape[1] < 1 + features:
            raise UserError(
                f"--features {features}: {path} has a label and {table.shape[1] - 1} features"
            )
        return Samples(table[:, 1 : 1 + features], table[:, 0].astype(np.int32))

    counts = (samples, samples and max(1, samples // 4))
    return Data(*(split(folder / f, n) for f, n in zip(FILES, counts, strict=True)))


def load(options: argparse.Namespace) -> Data:
    """Returns the samples; each gene is divided by its largest value in both splits."""
    if options.data is None:
        data = made_data(options.features, options.samples or TRAINING_SAMPLES, options.seed)
    else:
        data = read_data(options.data, options.features, options.samples)
    largest = np.max([np.abs(split.x).max(axis=0) for split in data], axis=0)
    for split in data:
        split.x[...] /= np.where(largest > 0, largest, 1)
    return data


def network(features: int, dropout: float) -> keras.Model:
    """Returns NT3's network.

    Args:
        features: number of genes.
        dropout: fraction of the outputs of a dense layer that are dropped.
    """
    import keras
    from keras import layers

    return keras.Sequential(
        [
            keras.Input((features, 1)),
            layers.Conv1D(128, 20, activation="relu"),
            layers.MaxPooling1D(1),
            layers.Conv1D(128, 10, activation="relu"),
            layers.MaxPooling1D(10),
            layers.Flatten(),
            layers.Dense(200, activation="relu"),
            layers.Dropout(dropout),
            layers.Dense(20, activation="relu"),
            layers.Dropout(dropout),
            layers.Dense(CLASSES, activation="softmax"),
        ]
    )


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    example = "python examples/controls/nt3.py --features 6048 --epochs 5 --output nt3"
    defaults = {"batch": 20, "rate": 0.001, "epochs": 400, "samples": TRAINING_SAMPLES}
    parser = harness.options_parser("nt3", __doc__.splitlines()[0], example, **defaults)
    text = "genes of a sample, at least 38 (default: %(default)s)"
    parser.add_argument("--features", type=harness.whole_above(37), default=GENES, help=text)
    text = "fraction of outputs dropped (default: %(default)s)"
    parser.add_argument("--dropout", type=float, default=0.1, help=text)
    return parser


def main(arguments: list[str] | None = None) -> keras.Model:
    """Trains NT3 as the command line says; returns it."""
    options = parser().parse_args(arguments)
    if not 0 <= options.dropout < 1:
        parser().error(f"--dropout {options.dropout}: must be from 0 to below 1")

    def optimizer(rate: float) -> keras.optimizers.Optimizer:
        import keras

        return keras.optimizers.SGD(rate)

    control = harness.Control(
        load=load,
        prepare=lambda x: x[..., np.newaxis],
        model=lambda: network(options.features, options.dropout),
        optimizer=optimizer,
    )
    return control.run(options)


if __name__ == "__main__":
    main()
