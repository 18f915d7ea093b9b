"""The universes to simulate: their cosmologies from the priors, their white noise from seeds.

Everything follows from the seed of the data, the name of a stream ("train", "validation", "test"
and those of fresh test sets) and the number of the simulation in it: any rank can say what any
simulation is, in any order, and a test universe is never one that was trained on.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.stats import qmc

from flowpm_dist.cosmology.uniform_priors import UniformPriors

SAMPLINGS = ("sobol", "uniform")
EVENLY = ("train", "validation")
"""Streams that may fill the ranges evenly. Others are to judge by, and what is said of chance, such
as errors and P values, holds for independent draws alone.
"""


@dataclass(frozen=True)
class Priors(UniformPriors):
    """Uniform priors of parameters of `Cosmology`, and how universes are drawn from them.

    Attributes:
        sampling: "sobol", a scrambled Sobol sequence that fills the ranges evenly (Owen 1998) for
            the streams of `EVENLY`, or "uniform", independent draws for all.
        seed: of the data.

    Raises:
        ValueError: another sampling, or a range whose ends are not in order.
    """

    sampling: Literal["sobol", "uniform"] = "sobol"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sampling not in SAMPLINGS:
            known = ", ".join(map(repr, SAMPLINGS))
            raise ValueError(f"sampling {self.sampling!r} is not one of {known}")

    def draw(self, stream: str, first: int, count: int) -> np.ndarray:
        """Returns parameters of the simulations from `first` on of a stream, [count, parameter]."""
        key = [self.seed, _number(stream)]
        if self.sampling == "sobol" and stream in EVENLY:
            scramble = np.random.default_rng(key)
            sequence = qmc.Sobol(len(self.ranges), scramble=True, rng=scramble)
            if first:
                sequence.fast_forward(first)
            points = _quietly(sequence, count)
        else:
            draws = [np.random.default_rng([*key, i]) for i in range(first, first + count)]
            points = np.array([draw.random(len(self.ranges)) for draw in draws])
        return self.low + (self.high - self.low) * points

    def noise_seeds(self, stream: str, first: int, count: int, *key: int) -> np.ndarray:
        """Returns seeds of the white noise of the same simulations, int64 [count].

        Args:
            stream: of the simulations.
            first: number of the first of them.
            count: their number.
            key: of other noise than that which universes grow from.
        """
        numbers = range(first, first + count)
        return np.array([hashed([self.seed, _number(stream), i, *key]) for i in numbers])


def _quietly(sequence: qmc.Sobol, count: int) -> np.ndarray:
    # Any stretch of the sequence is asked for; scipy warns of those that are not powers of two.
    return np.concatenate([sequence.random(1) for _ in range(count)])


def _number(stream: str) -> int:
    return zlib.crc32(stream.encode())


def hashed(key: list[int]) -> int:
    """Returns a seed, from 0 to below 2^63, that follows from several numbers."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))
