"""The inputs of a run, read and checked once: seed, white noise or particles, and cosmologies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.evolution.plan import Particles
from flowpm_dist.grid.box import Box
from flowpm_dist.grid.field import Field
from flowpm_dist.initial.white_noise import check_white_noise
from flowpm_dist.io.snapshot import Snapshot

PAIRED = "paired goes with a seed"


@dataclass(frozen=True)
class Given:
    """The arguments of a run, as a user gave them.

    Attributes:
        seed: of the white noise, or one for each universe; or
        white_noise: the noise itself; or
        particles: displacement [Mpc/h] and canonical velocity [Mpc/h H0].
        cosmology: instead of the simulation's own, or one for each universe.
        paired: the opposite of the seed's white noise.

    Raises:
        ValueError: not exactly one of seed, white_noise and particles, or `paired` without a seed.
    """

    seed: int | Sequence[int] | None = None
    white_noise: Any = None
    particles: tuple[Any, Any] | None = None
    cosmology: Cosmology | Sequence[Cosmology] | None = None
    paired: bool = False

    def __post_init__(self) -> None:
        sources = (self.seed, self.white_noise, self.particles)
        if sum(source is not None for source in sources) != 1:
            raise ValueError("give either a seed, white_noise or particles: exactly one of them")
        if self.paired and self.seed is None:
            raise ValueError(PAIRED)

    def batch(self, box: Box) -> int | None:
        """Returns how many universes this stands for; None where it is a single one.

        Args:
            box: of one universe for each replica of the mesh.

        Raises:
            ValueError: seeds that are not whole numbers, or parts that stand for different numbers.
        """
        counts = {}
        if self.seed is not None:
            seeds = np.asarray(self.seed)
            whole_numbers = np.issubdtype(seeds.dtype, np.integer)
            if seeds.ndim > 1 or not seeds.size or not whole_numbers:
                raise ValueError(
                    f"seed {self.seed!r}: a whole number, or a list of them, is needed"
                )
            if seeds.ndim:
                counts["seeds"] = len(seeds)
        if self.cosmology is not None and not isinstance(self.cosmology, Cosmology):
            counts["cosmologies"] = len(self.cosmology)
        field, rank = self.white_noise, 3
        if self.particles is not None:
            field, rank = self.particles[0], 4
        if field is not None and (fields := _batch_of(field, rank, box)) is not None:
            counts["fields"] = fields
        if len(set(counts.values())) > 1:
            given = ", ".join(f"{n} {name}" for name, n in counts.items())
            raise ValueError(f"a batch of which size? Given are {given}")
        return next(iter(counts.values()), None)


@dataclass(frozen=True)
class Source:
    """What the particles of a state come from, checked: at most one of these is there.

    Attributes:
        seeds: int64, one for each universe of the box, and
        paired: whether their noise is taken with the opposite sign; or
        white_noise: this rank's block [..., x, y, z]; or
        particles: of this rank; or
        snapshot: that holds the state.
    """

    seeds: np.ndarray | None = None
    paired: bool = False
    white_noise: tf.Tensor | None = None
    particles: Particles | None = None
    snapshot: Snapshot | None = None

    @property
    def noise_is_known(self) -> bool:
        """Whether the white noise is known."""
        if self.snapshot is not None:
            return "white_noise" in self.snapshot.arrays
        return self.seeds is not None or self.white_noise is not None

    @classmethod
    def of(cls, given: Given, box: Box) -> Source:
        """Returns the checked source of a run in a box.

        Raises:
            ValueError: on every rank; a field of another shape or dtype, or with values that are
                not finite; particles of a box of another size.
        """
        if given.seed is not None:
            batch = box.number_shape.to_integer_list
            seeds = np.broadcast_to(np.asarray(given.seed, np.int64), batch)
            return cls(seeds=seeds, paired=given.paired)
        if given.particles is None:
            noise = given.white_noise
            if isinstance(noise, Field):
                noise = noise.on(box).block
            elif not isinstance(noise, (tf.Tensor, tf.Variable)):
                noise = np.asanyarray(noise)
                check_white_noise(noise, box)
            return cls(white_noise=box.block_of("white_noise", noise, box.shape))
        displacement, velocity = (
            _vector_block(name, x, box)
            for name, x in zip(("displacement", "velocity"), given.particles, strict=True)
        )
        return cls(particles=Particles(displacement, velocity))


def _vector_block(name: str, vector: Any, box: Box) -> tf.Tensor:
    """Returns this rank's block [..., x, y, z, 3] of lengths or velocities that a user gave."""
    if isinstance(vector, Field):
        if vector.box.size != box.size:
            raise ValueError(
                f"{name} is of a box of {vector.box.size} Mpc/h, the simulation is of one of "
                f"{box.size} Mpc/h"
            )
        vector = vector.on(box).block
    return box.block_of(name, vector, box.vector_shape)


def _batch_of(field: Any, rank: int, box: Box) -> int | None:
    """Returns how many universes a given field holds; None for one without a batch dimension."""
    if isinstance(field, Field):
        return field.box.batch
    if len(field.shape) != rank + 1:
        return None
    mesh = box.mesh
    replicas = mesh.axis_size("replica")
    whole = tuple(field.shape[1:4]) == box.grid
    tensor = isinstance(field, (tf.Tensor, tf.Variable))
    if tensor and whole and mesh.size == replicas > 1:
        raise ValueError(
            f"a tensor of {field.shape[0]} fields: on the mesh {mesh} they may be all of a "
            "batch or this rank's; give a Field, or all of them as an array"
        )
    return field.shape[0] * (1 if whole else replicas)
