"""Which universes are made: their cosmologies from the priors, their white noise from seeds.

Everything follows from the seed of the data, the name of a stream ("train", "validation", "test")
and the number of the simulation in it: any rank can say what any simulation is, in any order, and a
test universe is never one that was trained on.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.stats import qmc

SAMPLINGS = ("sobol", "uniform")


@dataclass(frozen=True)
class Priors:
    """Uniform priors of some parameters, and how they are drawn from.

    Attributes:
        ranges: name of a parameter of `Cosmology` -> (low, high), in the order of the targets.
        sampling: "sobol", a scrambled Sobol sequence that fills the ranges evenly (Owen 1998), or
            "uniform", independent draws.
        seed: of the data.

    Raises:
        ValueError: another sampling, or a range whose ends are not in order.
    """

    ranges: Mapping[str, tuple[float, float]]
    sampling: Literal["sobol", "uniform"] = "sobol"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sampling not in SAMPLINGS:
            known = ", ".join(map(repr, SAMPLINGS))
            raise ValueError(f"sampling {self.sampling!r} is not one of {known}")
        for name, (low, high) in self.ranges.items():
            if not low < high:
                raise ValueError(f"the prior of {name} from {low} to {high}: low must be below")

    @property
    def names(self) -> tuple[str, ...]:
        """Of the parameters."""
        return tuple(self.ranges)

    @property
    def low(self) -> np.ndarray:
        """Lower ends, float64 [parameter]."""
        return np.array([low for low, _ in self.ranges.values()])

    @property
    def high(self) -> np.ndarray:
        """Upper ends, float64 [parameter]."""
        return np.array([high for _, high in self.ranges.values()])

    def draw(self, stream: str, first: int, count: int) -> np.ndarray:
        """Parameters of the simulations from `first` on of a stream, [count, parameter]."""
        key = [self.seed, _number(stream)]
        if self.sampling == "sobol":
            scramble = np.random.default_rng(key)
            sequence = qmc.Sobol(len(self.ranges), scramble=True, rng=scramble)
            if first:
                sequence.fast_forward(first)
            points = _quietly(sequence, count)
        else:
            draws = [np.random.default_rng([*key, i]) for i in range(first, first + count)]
            points = np.array([draw.random(len(self.ranges)) for draw in draws])
        return self.low + (self.high - self.low) * points

    def noise_seeds(self, stream: str, first: int, count: int) -> np.ndarray:
        """Seeds of the white noise of the same simulations, int64 [count]."""
        numbers = range(first, first + count)
        return np.array([hashed([self.seed, _number(stream), i]) for i in numbers])


def _quietly(sequence: qmc.Sobol, count: int) -> np.ndarray:
    # Any stretch of the sequence is asked for; scipy warns of those that are not powers of two.
    return np.concatenate([sequence.random(1) for _ in range(count)])


def _number(stream: str) -> int:
    return zlib.crc32(stream.encode())


def hashed(key: list[int]) -> int:
    """A seed, from 0 to below 2^63, of several numbers."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))
