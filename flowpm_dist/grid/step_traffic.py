"""What a rank sends in a step, by formula; `simulation.profile` counts it while a step runs.

A step paints the particles (the halo of the mesh goes to its owners), transforms forward and back,
and reads the field with a halo. Nothing here imports TensorFlow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from meshimpl import traffic
from meshimpl.traffic import Tally, Traffic, added

MARGIN = {"finite-difference": 2, "spectral": 0}
"""Planes of halo beyond the particles' own, which the difference of a potential needs."""
COMPONENTS = {"finite-difference": 1, "spectral": 3}
"""Fields that are transformed back and read."""
LONGEST = 3
"""Numbers whose maximum over all ranks is the reach of the particles."""


@dataclass(frozen=True)
class StepTraffic:
    """The messages of a step with one force.

    Attributes:
        grid: cells of the force mesh [nx, ny, nz].
        rows, cols: ranks along x and y, which divide them.
        halo: of the particles [cells of the force mesh].
        force_gradient: see `Gravity`.
        itemsize: of a number [bytes].
        half: whether all but the reach of the particles travels as float16, each piece with its
            scale.
    """

    grid: tuple[int, int, int]
    rows: int
    cols: int
    halo: int
    force_gradient: str = "finite-difference"
    itemsize: int = 4
    half: bool = False

    @property
    def _carried(self) -> int:
        return 2 if self.half else self.itemsize

    @property
    def _scale(self) -> int:
        return 4 if self.half else 0

    @property
    def tally(self) -> Tally:
        """What the rank sends, by kind of collective."""
        margin, fields = MARGIN[self.force_gradient], COMPONENTS[self.force_gradient]
        total = self.halos(self.halo, 1)
        total = added(total, self.transform, 1 + fields)
        total = added(total, self.halos(self.halo + margin, fields))
        ranks = self.rows * self.cols
        reach = traffic.allreduce(LONGEST * self.itemsize, ranks)
        return added(total, {"allreduce": reach} if ranks > 1 else {})

    @property
    def total(self) -> Traffic:
        """What the rank sends, of all kinds together."""
        total = Traffic()
        for sent in self.tally.values():
            total = total.plus(sent, 1)
        return total

    def halos(self, width: int, fields: int) -> Tally:
        """Returns the exchange of halos of a number of planes, or their way back: y with x's."""
        nx, ny, nz = self.grid
        x, y = nx // self.rows, ny // self.cols
        wide = x + (2 * width if self.rows > 1 else 0)
        total: Tally = {}
        for sent in (
            *self._hops(width, x, self.rows, y * nz * fields),
            *self._hops(width, y, self.cols, wide * nz * fields),
        ):
            total = added(total, sent)
        return total

    def _hops(self, width: int, block: int, ranks: int, plane: int) -> Iterator[Tally]:
        for distance in range(1, -(-width // block) + 1) if ranks > 1 else ():
            planes = min(block, width - (distance - 1) * block)
            sizes = [0] * ranks
            for other in (distance % ranks, -distance % ranks):
                sizes[other] += planes * plane * self._carried + self._scale if other else 0
            if any(sizes):
                yield {"neighbours": traffic.to_each(sizes, 0)}

    @property
    def transform(self) -> Tally:
        """One real-to-complex transform: an all-to-all along each axis that is split."""
        nx, ny, nz = self.grid
        modes = _padded(nz // 2 + 1, self.cols)
        total: Tally = {}
        if self.cols > 1:
            size = 2 * self._carried * math.prod((nx // self.rows, ny // self.cols, modes))
            size += self.cols * self._scale
            total = added(total, {"alltoall": traffic.alltoall(size, self.cols)})
        if self.rows > 1:
            lines = nx // self.rows * (modes // self.cols) * _padded(ny, self.rows)
            size = 2 * self._carried * lines + self.rows * self._scale
            total = added(total, {"alltoall": traffic.alltoall(size, self.rows)})
        return total


def _padded(size: int, parts: int) -> int:
    return -(-size // parts) * parts
