"""Learns a correction of the package from TreePM runs.

    python benchmarks/learn_corrections.py NAME FOLDER [--output FILE] [--iterations N]
        [--weights correlation=0.1 ...] [--start FILE]

FOLDER has the sets "train", "opened", "opened2" and "develop" of benchmarks/treepm.py. NAME is a
key of `LEARNED`, with the cheap runs and the weights of the loss. The correction with the lowest
loss of the universes to develop is written whenever there is one, with its scores and the names of
all universes. On one rank.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tensorflow as tf
from emulator import Universe

import flowpm_dist as fpm
from flowpm_dist.corrections import Iteration, Learner, Pair
from flowpm_dist.evolution.corrections import PotentialFilter, ResidualNetwork, load_correction

NETWORK_OPTIONS = {
    "iterations": 2000,
    "correlation": 0.1,
    "displacement": 0.001,
    "histogram": 0.2,
    "redshift_space": 0.1,
}
LEARNED: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "default": (PotentialFilter, {}, {"iterations": 300}),
    "default-2": (PotentialFilter, {"mesh_factor": 2}, {"iterations": 300}),
    "network": (ResidualNetwork, {}, NETWORK_OPTIONS),
    "network-2": (ResidualNetwork, {"mesh_factor": 2}, NETWORK_OPTIONS),
}
"""The kind of a correction, the options of its cheap runs, and the options of its learning."""


def pair(path: Path, options: Mapping[str, Any]) -> Pair:
    """Returns a TreePM run, and the cheap run from its first particles."""
    universe = Universe(path)
    simulation = universe.simulation(options)
    first = simulation.lpt(seed=0, a=simulation.edges[0])
    displacement, velocity = universe.start
    start = replace(
        first,
        displacement=fpm.Field(tf.constant(displacement), first.box),
        velocity=fpm.Field(tf.constant(velocity), first.box),
    )
    return Pair(simulation, start, universe.states, name=universe.name)


def main() -> None:
    """Learn, and write the best correction."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=LEARNED)
    parser.add_argument("folder", type=Path, help="of the TreePM runs")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--iterations", type=int)
    parser.add_argument("--weights", nargs="*", default=[], metavar="OPTION=NUMBER")
    parser.add_argument("--start", type=Path, help="a correction to begin with")
    arguments = parser.parse_args()
    kind, options, learning = LEARNED[arguments.name]
    weights = {key: float(value) for key, value in (w.split("=") for w in arguments.weights)}
    learning = {**learning, **weights}
    if arguments.iterations:
        learning["iterations"] = arguments.iterations
    train, opened, opened2, develop = (
        [pair(path, options) for path in sorted(arguments.folder.glob(f"treepm_{name}-*.npz"))]
        for name in ("train", "opened", "opened2", "develop")
    )
    train += opened + opened2
    if kind is ResidualNetwork:  # whose cheap runs are made once: an iteration takes half as long
        train = [replace(each, truth=each.truth[n::2]) for each in train for n in range(2)]
    begun = kind.begun(1) if arguments.start is None else load_correction(arguments.start)
    learner = Learner(begun, train, develop, seed=1, **learning)
    output = arguments.output or Path(f"{arguments.name}.json")
    since, terms = time.perf_counter(), []

    def after(iteration: Iteration) -> None:
        terms.append(iteration.losses)
        if iteration.held_out is None:
            return
        last = [each for each in terms[-learner.options.validate_every :] if each]
        means = {name: sum(each[name] for each in last) / len(last) for name in last[0]}
        text = ", ".join(f"{name} {value:.3g}" for name, value in means.items())
        seconds = time.perf_counter() - since
        print(f"{iteration.number}, {seconds:.0f} s: {text}; held out {iteration.held_out:.4g}")
        if iteration.is_best:
            learner.correction.save(output)

    learner.run(after).save(output)
    print(learner.correction.scores["verdict"])


if __name__ == "__main__":
    main()
