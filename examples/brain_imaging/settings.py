"""What determines a training: its settings, which the command line gives, and its network."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import anatomy
import numpy as np
import sampling
from anatomy import InputError

TRAINING, VALIDATION, HELD_OUT = range(3)
"""Which volumes a seed makes: (seed, one of these, number)."""
SETTINGS = "settings.json"
MOST_SEED = 2**20
FIRST = {"momentum": 0.3, "step": 1.8}
"""First values of weights; the gradient's largest curvature is 1, because of normalised maps."""


@dataclass(frozen=True)
class Design:
    """The network.

    Attributes:
        iterations: repetitions of data consistency and convolutions.
        consistency: steps of data consistency in an iteration.
        features: channels between the convolutions.
        convolutions: convolutions of an iteration, with kernels of 3 x 3 x 3 cells.
    """

    iterations: int
    consistency: int
    features: int
    convolutions: int

    @property
    def shapes(self) -> dict[str, list[int]]:
        """The shape of each weight, by name."""
        widths = [4, *[self.features] * (self.convolutions - 1), 2]
        found: dict[str, list[int]] = {}
        for k in range(self.iterations):
            for j in range(self.consistency):
                found |= {f"step_{k}_{j}": []}
                if k + j > 0:  # at first there is nothing to go on with
                    found |= {f"momentum_{k}_{j}": []}
            for n, (before, after) in enumerate(itertools.pairwise(widths)):
                found[f"kernel_{k}_{n}"] = [3, 3, 3, before, after]
                found[f"bias_{k}_{n}"] = [after]
        return found

    def first_weights(self, seed: int) -> dict[str, np.ndarray]:
        """Returns weights with which the network makes steps of data consistency alone.

        The last kernel of an iteration is zero, the others are normal deviates (He et al. 2015).
        """
        rng, last = np.random.default_rng(seed), f"_{self.convolutions - 1}"
        found = {}
        for name, shape in self.shapes.items():
            kind, draws = name.partition("_")[0], rng.normal(size=shape)
            if kind == "kernel" and not name.endswith(last):
                found[name] = draws * math.sqrt(2 / math.prod(shape[:-1]))
            else:
                found[name] = np.full(shape, FIRST.get(kind, 0.0))
        return found


@dataclass(frozen=True)
class Settings:
    """What determines a training, apart from the mesh; the options of the command line.

    Attributes:
        anatomy: "mni152" or "made-up".
        side: cells along each side of a volume.
        voxel: the smallest and the largest cell [mm].
        volumes: training volumes that are made.
        coils: number of coils.
        acceleration: factors of undersampling; each scan takes one of them.
        noise: standard deviation of the noise of a mode; the brain's brightness is about 1.
        mask: array in k-space that replaces random masks, or None.
        steps, batch, rate: steps of Adam, volumes of a step, learning rate at its largest.
        iterations, consistency, features, convolutions: see `Design`.
        seed: seed of volumes, scans and first weights.
    """

    anatomy: str = "mni152"
    side: int = 48
    voxel: Sequence[float] = (2.0, 3.5)
    volumes: int = 64
    coils: int = 4
    acceleration: Sequence[float] = (4.0, 8.0)
    noise: float = 0.02
    mask: str | None = None
    steps: int = 400
    batch: int = 1
    rate: float = 2e-3
    iterations: int = 5
    consistency: int = 2
    features: int = 16
    convolutions: int = 3
    seed: int = 0

    @property
    def sides(self) -> tuple[int, int, int]:
        """The cells along x, y, z."""
        return (self.side,) * 3

    @property
    def design(self) -> Design:
        """The network."""
        return Design(self.iterations, self.consistency, self.features, self.convolutions)

    def check(self) -> None:
        """Checks what can be checked before the work.

        Raises:
            InputError: a value is impossible.
        """
        least = {"side": 8, "volumes": 1, "coils": 1, "steps": 1, "batch": 1, "iterations": 1}
        least |= {"consistency": 1, "features": 1, "convolutions": 2, "noise": 0, "seed": 0}
        for name, limit in least.items():
            if not limit <= getattr(self, name) < math.inf:  # nor NaN
                raise InputError(f"--{name} {getattr(self, name)}: must be at least {limit}")
        if self.seed > MOST_SEED:
            raise InputError(f"--seed {self.seed}: must be at most {MOST_SEED}")
        if not 0 < self.rate < math.inf:
            raise InputError(f"--rate {self.rate}: must be above 0, and finite")
        if len(self.voxel) > 2 or not 0 < self.voxel[0] <= self.voxel[-1] < math.inf:
            raise InputError(
                f"--voxel {self.voxel}: must be one size [mm], or the least and largest"
            )
        if self.mask is None:
            for factor in self.acceleration:
                sampling.random_mask(self.sides[1:], factor, [0])
        else:
            sampling.read_mask(Path(self.mask), self.sides)
        anatomy.ANATOMIES[self.anatomy]()

    def check_mesh(self, axes: Sequence[tuple[str, int]]) -> None:
        """Checks that the volumes can be split over a mesh.

        Raises:
            InputError: they cannot.
        """
        places = {"replica": ("batch", self.batch), "row": ("side", self.side)}
        places["col"] = places["row"]
        for axis, size in axes:
            if axis not in places:
                raise InputError(f"--mesh: {axis!r} is not one of {', '.join(places)}")
            name, cells = places[axis]
            if cells % size:
                raise InputError(
                    f"--mesh {axis}:{size}: --{name} {cells} must be a multiple of {size}"
                )

    def made(self, kind: int, number: int) -> np.ndarray:
        """Returns a volume, complex64 [x, y, z]."""
        seed = [self.seed, kind, number]
        voxel = np.random.default_rng(seed).uniform(self.voxel[0], self.voxel[-1])
        return anatomy.head(anatomy.ANATOMIES[self.anatomy](), seed, self.side, voxel)

    def sampled(self, kind: int, number: int, acceleration: float | None = None) -> np.ndarray:
        """Returns the mask of a scan, bool [ky, kz] or [kx, ky, kz]."""
        if self.mask is not None:
            return sampling.read_mask(Path(self.mask), self.sides)
        seed = [self.seed, kind, number]
        factor = acceleration or np.random.default_rng(seed).choice(self.acceleration)
        return sampling.random_mask(self.sides[1:], float(factor), seed)


def read_settings(folder: Path) -> Settings:
    """Returns the settings of a training.

    Raises:
        InputError: the folder holds none.
    """
    try:
        return Settings(**json.loads((folder / SETTINGS).read_text())["settings"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"{folder}: not the folder of a training: {error}") from None
