"""What the controls share: options, samples, the training loop and its records.

A worker is a rank under Horovod, or a replica of `tf.distribute.MirroredStrategy` in one process.
Each epoch shuffles all samples together, and gives each worker its own part of every step's
samples. A step averages loss, accuracy and gradients over the workers. N workers with batches of B
samples therefore train like one worker with N x B samples, except where layers mix the samples of
a batch (batch normalisation) or draw random numbers (dropout).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from samples import Data, Samples, staged
from workers import Ranks, Replicas

from flowpm_dist.io.errors import UserError, WorkError
from flowpm_dist.io.files import GENERATOR, versions, write_text
from flowpm_dist.jobs.report import commit
from flowpm_dist.jobs.results import Table
from flowpm_dist.jobs.usage import Usage
from meshimpl import launch

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

PHASES = ("load", "broadcast", "read", "compute", "validate")
COLUMNS = (
    "step", "epoch", "samples", "loss", "validation_loss", "accuracy", "validation_accuracy",
    "rate", "samples_per_second", *(f"{phase}_seconds" for phase in PHASES),
)  # fmt: skip
IN_NAMES = ("seed", "samples", "features", "image_size")
"""Options that determine the samples, and so the names of their files."""
SCALINGS: dict[str, Callable[[int], float]] = {
    "linear": float,
    "sqrt": lambda workers: workers**0.5,
    "none": lambda workers: 1.0,
}


def options_parser(
    name: str, description: str, example: str, **defaults: float | None
) -> argparse.ArgumentParser:
    """Returns the parser of a control's command line.

    Args:
        name: name of the control.
        description: what the control trains.
        example: an example of its command.
        defaults: defaults of batch, rate, epochs and samples.
    """
    parser = argparse.ArgumentParser(description=description, epilog=f"example: {example}")
    parser.set_defaults(control=name)
    whole = {"type": whole_above(0)}
    for option, words in {
        "--output": {"type": Path, "default": Path("control"),
            "help": "folder of the results, which replace older ones there"},
        "--epochs": {**whole, "default": defaults["epochs"], "help": "passes over all samples"},
        "--steps": {**whole, "help": "most steps of an epoch, and of its validation"},
        "--batch": {**whole, "default": defaults["batch"], "help": "samples of a worker in a step"},
        "--rate": {"type": float, "default": defaults["rate"],
            "help": "learning rate of a single worker"},
        "--scaling": {"choices": SCALINGS, "default": "linear",
            "help": "how the rate grows with the number of workers"},
        "--warmup": {"type": whole_above(-1), "default": 5,
            "help": "epochs in which the rate grows to its scaled value"},
        "--seed": {"type": whole_above(-1), "default": 0,
            "help": "seed of made samples, weights and shuffles"},
        "--strategy": {"choices": ("horovod", "mirrored"), "default": "horovod",
            "help": "workers are ranks under Horovod, or replicas of MirroredStrategy"},
        "--replicas": {**whole,
            "help": "replicas of `mirrored`; by default the GPUs of the host, or 2 without GPUs"},
        "--data": {"type": Path, "help": "folder with your files; without it, samples are made"},
        "--samples": {**whole, "help": "training samples, with a quarter as many held out "
            f"(default: {defaults['samples']}, or all of --data)"},
        "--reading": {"choices": ("memory", "files"), "default": "memory",
            "help": "where each step takes its samples from; `files` needs --staging"},
        "--staging": {"type": Path, "help": "folder on the storage to measure: the samples are "
            "written there once, and read in each step"},
    }.items():  # fmt: skip
        if words.get("default") is not None:
            words["help"] += " (default: %(default)s)"
        parser.add_argument(option, **words)
    return parser


def whole_above(limit: int) -> Callable[[str], int]:
    """Returns a reader of whole numbers above a limit, for `add_argument`."""

    def whole_number(text: str) -> int:
        if not text.isdigit() or int(text) <= limit:
            raise argparse.ArgumentTypeError(f"{text} must be a whole number above {limit}")
        return int(text)

    return whole_number


def learning_rate(options: argparse.Namespace, workers: int, epoch: float) -> float:
    """Returns the learning rate, which grows in the warm-up from --rate to its scaled value.

    Args:
        options: the options.
        workers: number of workers.
        epoch: epochs done, with a fraction.
    """
    part = min(1.0, epoch / options.warmup) if options.warmup else 1.0
    return options.rate * (1 + (SCALINGS[options.scaling](workers) - 1) * part)


def steps_of_epoch(options: argparse.Namespace, samples: int, workers: int) -> int:
    """Returns the number of steps of an epoch.

    Raises:
        UserError: the samples are too few for one step.
    """
    if samples < workers * options.batch:
        raise UserError(
            f"a step needs {workers} x {options.batch} samples, but there are {samples}: give "
            "more --samples, or a smaller --batch"
        )
    return min(samples // (workers * options.batch), options.steps or sys.maxsize)


def shuffled(samples: int, seed: int, epoch: int, batch: int, workers: int) -> np.ndarray:
    """Returns the numbers of an epoch's samples, [steps, workers, batch], from one shuffle of all.

    Samples that do not fill a step are left out of the epoch.
    """
    order = np.random.default_rng([seed, epoch]).permutation(samples)
    steps = samples // (workers * batch)
    return order[: steps * workers * batch].reshape(steps, workers, batch)


@dataclass(frozen=True)
class Control:
    """A network and its data.

    Attributes:
        load: makes or reads the samples.
        prepare: returns the model's inputs for a batch of stored inputs.
        model: makes the model, from inputs to the probabilities of the classes.
        optimizer: makes the optimizer with a learning rate.
    """

    load: Callable[[argparse.Namespace], Data]
    prepare: Callable[[np.ndarray], Any]
    model: Callable[[], keras.Model]
    optimizer: Callable[[float], keras.optimizers.Optimizer]

    def run(self, options: argparse.Namespace) -> keras.Model:
        """Trains the model, writes `metrics.csv` and `provenance.json`, and returns the model.

        Args:
            options: see `options_parser`.
        """
        try:
            return self._run(options)
        except (UserError, WorkError, launch.LaunchError) as error:
            status = 1 if isinstance(error, WorkError) else 2
            print(error, file=sys.stderr)
            launch.abort(status) if launch.detect().size > 1 else sys.exit(status)

    def _run(self, options: argparse.Namespace) -> keras.Model:
        begin = time.perf_counter()
        if options.reading == "files" and options.staging is None:
            raise UserError("--reading files needs --staging, a folder to write and read files in")
        if options.data is not None and not options.data.is_dir():
            raise UserError(f"--data {options.data}: there is no such folder")
        if options.rate <= 0:
            raise UserError(f"--rate {options.rate}: must be above 0")
        launch.configure_threads()
        import keras

        workers = Replicas(options.replicas) if options.strategy == "mirrored" else Ranks()
        with Usage() as usage:
            clock = _Clock()
            with clock.phase("load"):
                data = self._samples(options, workers)
            steps = steps_of_epoch(options, len(data.training.y), workers.count)
            # Each rank draws its own first weights, as with no common seed. The broadcast replaces
            # them. The random numbers of dropout stay different.
            keras.utils.set_random_seed(options.seed + workers.mine[0])
            with workers.scope():
                network, optimizer = self.model(), self.optimizer(options.rate)
                optimizer.build(network.trainable_variables)
            with clock.phase("broadcast"):
                workers.broadcast([v.value for v in (*network.weights, *optimizer.variables)])
            trainer = Trainer(options, workers, data, self.prepare, network, optimizer, clock)
            trainer.train(steps)
        facts = usage.of_job(workers.gather if workers.hvd is not None else None)
        if workers.is_first:
            about = {
                "generator": GENERATOR,
                "command": options.control,
                "date": datetime.now(UTC).isoformat(" ", timespec="seconds"),
                "duration [s]": round(time.perf_counter() - begin, 1),
                "host": socket.gethostname(),
                "ranks": launch.detect().size,
                "workers": workers.count,
                "threads per rank": launch.threads_per_rank(),
                **facts,
                **({} if (found := commit()) is None else {"commit": found}),
                "versions": versions(),
                "weights": network.count_params(),
                "settings": vars(options),
            }
            text = json.dumps(about, indent=1, default=str)
            write_text(options.output / "provenance.json", text + "\n")
        return network

    def _samples(self, options: argparse.Namespace, workers: Ranks) -> Data:
        if options.reading == "memory":
            return self.load(options)
        values = vars(options)
        words = [f"{key}{values[key]}" for key in IN_NAMES if values.get(key) is not None]
        if options.data is not None:
            files = [(path.name, path.stat()) for path in sorted(options.data.glob("*"))]
            facts = [(name, status.st_size, status.st_mtime_ns) for name, status in files]
            words.append(f"files{zlib.crc32(repr(facts).encode()):08x}")
        name = "-".join([options.control, *words])
        return staged(options.staging, name, lambda: self.load(options), workers)


class _Clock:
    """Time by phase since the last row."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - begin

    def row(self) -> dict[str, float]:
        seconds, self.seconds = self.seconds, dict.fromkeys(PHASES, 0.0)
        return {f"{phase}_seconds": value for phase, value in seconds.items()}


@dataclass(frozen=True)
class Trainer:
    """A training on all workers.

    Attributes:
        options: see `options_parser`.
        workers: all workers.
        data: the samples.
        prepare: see `Control`.
        network, optimizer: equal on all workers.
        clock: has the time of loading and of the broadcast.
    """

    options: argparse.Namespace
    workers: Ranks
    data: Data
    prepare: Callable[[np.ndarray], Any]
    network: keras.Model
    optimizer: keras.optimizers.Optimizer
    clock: _Clock

    def train(self, steps: int) -> None:
        """Trains, and adds a row to `metrics.csv` for each step.

        Args:
            steps: steps of an epoch.
        """
        options, workers = self.options, self.workers
        group, samples = options.batch * workers.count, len(self.data.training.y)
        step, validate = workers.compiled(self._step), workers.compiled(self._validate)
        path = options.output / "metrics.csv"
        with contextlib.ExitStack() as stack:
            table = Table(path, COLUMNS, 0) if workers.is_first else None
            if table is not None:
                stack.callback(table.close)
            for epoch in range(options.epochs):
                order = shuffled(samples, options.seed, epoch, options.batch, workers.count)
                for number in range(steps):
                    rate = learning_rate(options, workers.count, epoch + number / steps)
                    self.optimizer.learning_rate.assign(rate)
                    with self.clock.phase("read"):
                        parts = self._parts(self.data.training, order[number])
                    with self.clock.phase("compute"):
                        loss, accuracy = map(float, step(parts)[0])
                    taken = self.clock.seconds["read"] + self.clock.seconds["compute"]
                    row = {"step": epoch * steps + number + 1, "loss": loss, "accuracy": accuracy}
                    row["epoch"] = epoch + 1
                    row |= {"samples": row["step"] * group, "samples_per_second": group / taken}
                    if number == steps - 1:
                        with self.clock.phase("validate"):
                            row |= self._validation(validate)
                    row |= {"rate": rate, **self.clock.row()}
                    if table is not None:
                        table.add(row)
                if table is not None:
                    held_out = "loss {validation_loss:.4f}, accuracy {validation_accuracy:.3f}"
                    print(f"epoch {epoch + 1}:", held_out.format(**row), "of held-out samples")

    def _parts(self, samples: Samples, numbers: np.ndarray) -> list[tuple[Any, ...]]:
        """Inputs and labels for each worker of this process; numbers are [workers, batch]."""
        mine = numbers[self.workers.mine]
        return [(self.prepare(samples.x[rows]), samples.y[rows]) for rows in mine]

    def _judged(self, x: tf.Tensor, y: tf.Tensor, *, training: bool) -> tuple[tf.Tensor, tf.Tensor]:
        import keras
        import tensorflow as tf

        outputs = self.network(x, training=training)
        right = tf.equal(tf.argmax(outputs, -1, tf.int32), y)
        return keras.losses.sparse_categorical_crossentropy(y, outputs), tf.cast(right, tf.float32)

    def _step(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        """Updates the weights; returns loss and accuracy, averaged over the workers."""
        import tensorflow as tf

        weights = self.network.trainable_variables
        with tf.GradientTape() as tape:
            losses, right = self._judged(x, y, training=True)
            loss = tf.reduce_mean(losses)
        gradients = self.workers.gradients(tape, loss, [weight.value for weight in weights])
        self.optimizer.apply(gradients, weights)
        return self.workers.mean(tf.stack([loss, tf.reduce_mean(right)]))

    def _validate(self, x: tf.Tensor, y: tf.Tensor, counted: tf.Tensor) -> tf.Tensor:
        """Returns sums of loss and right answers, and the number of samples that count."""
        import tensorflow as tf

        losses, right = self._judged(x, y, training=False)
        return tf.stack([tf.reduce_sum(counted * each) for each in (losses, right, counted)])

    def _validation(self, validate: Callable[..., list[np.ndarray]]) -> dict[str, float]:
        """Returns loss and accuracy of the held-out samples; each worker judges its part."""
        workers, held_out = self.workers, self.data.held_out
        group = self.options.batch * workers.count
        count = min(len(held_out.y), (self.options.steps or sys.maxsize) * group)
        sums = np.zeros(3)
        for first in range(0, count, group):
            numbers = np.arange(first, first + group).reshape(workers.count, -1)
            # The last sample fills up the last batch, where it does not count again.
            parts = self._parts(held_out, np.minimum(numbers, count - 1))
            counted = (numbers[workers.mine] < count).astype(np.float32)
            found = validate([(*part, one) for part, one in zip(parts, counted, strict=True)])
            sums += np.sum(found, axis=0)
        loss, right, counted = workers.total(sums)
        return {"validation_loss": loss / counted, "validation_accuracy": right / counted}
