"""A training step of the networks: compared with Keras, split over ranks, and on more volumes.

    python benchmarks/network.py [--quick] [--case NAME ...] [--output FILE]

A step is forward, backward and Adam without LARC, of one batch that is in memory already. The two
sides of a case are separate jobs that take turns. A job's number is the median of its steps after
warm-up; the case's ratio is the median of the ratios of its turns.

    keras, keras-bfloat16      sc18 128^3 on 1 rank of two threads, compared with the same in Keras
    spatial                    sc18-periodic 128^3, one volume: on 2 ranks, compared with 1
    replicas                   sc18 128^3: a volume on each of 2 ranks, compared with one on 1
    small-spatial, -replicas   sc18-periodic 64^3, two volumes: on 2 ranks, compared with 1

Where the two sides have different numbers of ranks, each rank has one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from common import median_seconds, report, start_worker

from meshimpl import launch

TURNS, STEPS, WARM_UP = 5, 5, 2
QUICK_TURNS, QUICK_STEPS, QUICK_WIDTH = 2, 2, 64
RATE = 1e-4

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Job:
    """One side of a case.

    Attributes:
        network: name of its declaration.
        width: cells along a side of a volume.
        batch: volumes of a step, over all ranks.
        replicas, rows: sides of the mesh, whose size is their product.
        threads: threads of each rank.
        precision: "float32" or "bfloat16", of the layers' work.
        keras: whether it is plain Keras, on one rank.
    """

    network: str
    width: int = 128
    batch: int = 1
    replicas: int = 1
    rows: int = 1
    threads: int = 1
    precision: Precision = "float32"
    keras: bool = False

    @property
    def ranks(self) -> int:
        """The size of the mesh."""
        return self.replicas * self.rows

    @property
    def block(self) -> tuple[int, ...]:
        """Shape of the volumes that one rank has, [batch, x, y, z]."""
        return self.batch // self.replicas, self.width // self.rows, self.width, self.width

    def __str__(self) -> str:
        split = [f"replica:{self.replicas}"] if self.replicas > 1 else []
        split += [f"row:{self.rows}"] if self.rows > 1 else []
        where = "Keras" if self.keras else ",".join(split) or "1 rank"
        return f"{where} x {self.threads}, batch {self.batch}"


@dataclass(frozen=True)
class Case:
    """Two jobs and the bar for their ratio.

    Attributes:
        job, against: the two sides.
        bar: limit of the ratio; None for information only.
        of_times: True: the ratio is job's time divided by against's, and must be at most the bar.
            False: it is job's volumes per second divided by against's, and must be at least that.
    """

    job: Job
    against: Job
    bar: float | None = None
    of_times: bool = False

    def quick(self) -> Case:
        """With smaller volumes, to which no bar applies, where the network allows them."""
        if self.job.network == "sc18":
            return self
        smaller = [replace(side, width=QUICK_WIDTH) for side in (self.job, self.against)]
        return replace(self, job=smaller[0], against=smaller[1], bar=None)

    def ratio(self, job: float, against: float) -> float:
        """The case's ratio, from the two times of a step [s]."""
        if self.of_times:
            return job / against
        return (self.job.batch / job) / (self.against.batch / against)

    def held(self, ratio: float) -> bool | None:
        """Whether the bar is held."""
        if self.bar is None:
            return None
        return ratio <= self.bar if self.of_times else ratio >= self.bar


def against_keras(precision: Precision) -> Case:
    """The same network, precision and threads on both sides."""
    job = Job("sc18", threads=2, precision=precision)
    return Case(job, replace(job, keras=True), bar=1.05, of_times=True)


ONE, PERIODIC = Job("sc18"), Job("sc18-periodic")
SMALL = Job("sc18-periodic", width=64, batch=2)
CASES = {
    "keras": against_keras("float32"),
    "keras-bfloat16": against_keras("bfloat16"),
    "spatial": Case(replace(PERIODIC, rows=2), PERIODIC, bar=1.7),
    "replicas": Case(replace(ONE, replicas=2, batch=2), ONE, bar=1.85),
    "small-spatial": Case(replace(SMALL, rows=2), SMALL),
    "small-replicas": Case(replace(SMALL, replicas=2), SMALL),
}


def worker(job: Job, steps: int) -> None:
    """Times of this job's steps after a few to warm up."""
    launch.configure_threads()
    import numpy as np

    rng = np.random.default_rng(launch.detect().rank)
    volume = rng.gamma(1.0, 1.0, job.block).astype(np.float32)
    target = rng.uniform(-1, 1, [len(volume), 3]).astype(np.float32)
    step, weights = (keras_step if job.keras else mesh_step)(job, volume, target)
    for _ in range(WARM_UP):
        step()
    times = [median_seconds(step, 1) for _ in range(steps)]
    report({"times": times, "weights": weights})


def mesh_step(job: Job, volume: Any, target: Any) -> tuple[Callable[[], Any], int]:
    """A step on the mesh, and the number of weights."""
    import numpy as np
    import tensorflow as tf

    from flowpm_dist.cosmoflow.network.network import Network
    from flowpm_dist.cosmoflow.network.optimisers import Adam, Schedule
    from meshimpl.process_mesh import ProcessMesh

    network = Network(
        job.network,
        ProcessMesh(f"replica:{job.replicas},row:{job.rows},col:1"),
        width=job.width,
        batch=job.batch,
        loss="l1",
        input="density",
        precision=job.precision,
    )
    optimiser = Adam(Schedule(RATE), clip_norm=None)
    block, wanted = tf.constant(volume), tf.constant(target)
    samples = tf.range(len(target), dtype=tf.int64)

    def step() -> float:
        loss, _, gradients = network.step(block, wanted, samples, seed=0)
        if not bool(optimiser.apply(gradients, network.weights)["finite"]):
            raise SystemExit("a gradient is not finite")
        return float(loss)

    return step, sum(int(np.prod(weight.shape)) for weight in network.weights)


def keras_step(job: Job, volume: Any, target: Any) -> tuple[Callable[[], Any], int]:
    """A step of Keras in the faster of its two ways, and the number of weights."""
    import keras
    import tensorflow as tf

    if job.precision == "bfloat16":
        keras.mixed_precision.set_global_policy("mixed_bfloat16")
    model = keras_model(job)
    optimizer, distance = keras.optimizers.Adam(RATE), keras.losses.MeanAbsoluteError()
    model.compile(optimizer=optimizer, loss=distance)
    block, wanted = tf.constant(volume[..., None]), tf.constant(target)

    @tf.function
    def train(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = distance(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    def of_function() -> float:
        return float(train(block, wanted))

    def of_model() -> float:
        return float(model.train_on_batch(block, wanted))

    ways = (of_function, of_model)
    for way in ways:
        way()
    return min(ways, key=lambda way: median_seconds(way, WARM_UP)), model.count_params()


def keras_model(job: Job) -> Any:
    """The declaration as a `keras.Sequential`."""
    from keras import Input, Sequential
    from keras import layers as of

    from flowpm_dist.cosmoflow.planning.declarations import Convolution, Dense, Pool, declaration

    declared = declaration(job.network)
    model, flat = Sequential([Input([job.width] * 3 + [1])]), False
    stages = declared.stages(job.width, 1, 3)
    for stage in stages:
        here = stage.layer
        if isinstance(here, Convolution):
            model.add(of.Conv3D(here.channels, here.kernel, here.stride, padding="valid"))
        elif isinstance(here, Pool):
            model.add(of.AveragePooling3D(here.size))
        elif isinstance(here, Dense):
            if not flat:
                model.add(of.Flatten())
            model.add(of.Dense(here.units))
            flat = True
        if stage.weights is not None and stage is not stages[-1]:
            model.add(of.LeakyReLU(negative_slope=declared.slope))
    return model


def measured(name: str, case: Case, turns: int, steps: int) -> dict[str, Any]:
    """Both sides of a case in turn."""
    found: list[list[dict[str, Any]]] = [[], []]
    begin = time.perf_counter()
    for _ in range(turns):
        for side, job in zip(found, (case.job, case.against), strict=True):
            arguments = [f"--job={json.dumps(asdict(job))}", f"--steps={steps}"]
            side.append(start_worker(sys.argv[0], arguments, job.ranks, job.threads))
    print(f"{name}: {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    if len({run["weights"] for side in found for run in side}) > 1:
        raise SystemExit(f"{name}: the two sides have networks of different sizes")
    medians = [[statistics.median(run["times"]) for run in side] for side in found]
    ratios = [case.ratio(*pair) for pair in zip(*medians, strict=True)]
    ratio = statistics.median(ratios)
    return {
        "case": name,
        "job": asdict(case.job),
        "against": asdict(case.against),
        "times": [[run["times"] for run in side] for side in found],
        "seconds": [statistics.median(side) for side in medians],
        "ratios": ratios,
        "ratio": ratio,
        "bar": case.bar,
        "held": case.held(ratio),
    }


def row(found: dict[str, Any], case: Case) -> str:
    """A line of the table."""
    job = case.job
    low, high = min(found["ratios"]), max(found["ratios"])
    bar = "" if case.bar is None else f"{'at most' if case.of_times else 'at least'} {case.bar}x"
    sides = [
        f"{side}: {1e3 * seconds:.0f} ms"
        for side, seconds in zip((case.job, case.against), found["seconds"], strict=True)
    ]
    cells = [
        found["case"],
        f"{job.network} {job.width}^3 {job.precision}",
        *sides,
        "time" if case.of_times else "volumes/s",
        f"{found['ratio']:.2f}x ({low:.2f} to {high:.2f})",
        bar,
        {None: "", True: "held", False: "missed"}[found["held"]],
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("role", nargs="?", default="driver", choices=["driver", "worker"])
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="64^3 but for sc18, fewer steps")
    parser.add_argument("--output", type=Path, metavar="FILE", help="all times, as JSON")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help="timed in each turn")
    parser.add_argument("--turns", type=int, help="jobs of each side")
    options = parser.parse_args()
    steps = options.steps or (QUICK_STEPS if options.quick else STEPS)
    turns = options.turns or (QUICK_TURNS if options.quick else TURNS)
    if options.role == "worker":
        worker(Job(**json.loads(options.job)), steps)
        return
    print(f"A step of training; medians of {turns} turns of {steps} steps after warm-up\n")
    columns = ["case", "network", "job x threads of a rank: step", "against", "ratio of", "ratio"]
    columns += ["bar", ""]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    results = []
    for name in options.case:
        case = CASES[name].quick() if options.quick else CASES[name]
        results.append(measured(name, case, turns, steps))
        print(row(results[-1], case), flush=True)
        if options.output:
            options.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
