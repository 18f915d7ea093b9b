"""The inputs of a run, read and checked once, and what a state keeps of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.evolution.nbody import Particles
from flowpm_dist.grid.box import Box
from flowpm_dist.grid.field import Field
from flowpm_dist.initial.conditions import check_white_noise
from flowpm_dist.io.snapshot import Snapshot
from flowpm_dist.options import A_SEED, MOST_SEED, in_unit, keep_in_units
from flowpm_dist.simulation.compiled_solver import CompiledSolver
from flowpm_dist.simulation.options import SolverOptions
from flowpm_dist.simulation.universes import LocalCosmologies

PARTICLES = {"displacement": "Mpc/h", "velocity": "Mpc/h H0"}
"""The fields that a run can begin with, and their units."""


class Start(TypedDict, total=False):
    """What a run starts from, besides a seed; see `Simulation.run`."""

    white_noise: Any
    particles: Any
    cosmology: Cosmology | Sequence[Cosmology] | None
    paired: bool


@dataclass(frozen=True)
class Given:
    """The arguments of a run, as a user gave them.

    Attributes:
        seed: the seed of the white noise, or one for each universe; or
        white_noise: the noise itself; or
        particles: a `State`, or displacement [Mpc/h] and canonical velocity [Mpc/h H0].
        cosmology: instead of the simulation's own, or one for each universe.
        paired: the opposite of the seed's white noise.

    Raises:
        ValueError: not exactly one of seed, white_noise and particles, or `paired` without a seed.
    """

    seed: int | Sequence[int] | None = None
    white_noise: Any = None
    particles: Any = None
    cosmology: Cosmology | Sequence[Cosmology] | None = None
    paired: bool = False

    def __post_init__(self) -> None:
        sources = (self.seed, self.white_noise, self.particles)
        if sum(source is not None for source in sources) != 1:
            raise ValueError("give either a seed, white_noise or particles: exactly one of them")
        if self.paired and self.seed is None:
            raise ValueError("paired goes with a seed")
        keep_in_units(self, seed="", white_noise="")
        if isinstance(self.particles, tuple | list):
            vectors = zip(self.particles, PARTICLES.items(), strict=True)
            plain = tuple(in_unit(name, vector, unit) for vector, (name, unit) in vectors)
            object.__setattr__(self, "particles", plain)

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
            valid = whole_numbers and (seeds >= 0).all() and (seeds <= MOST_SEED).all()
            if seeds.ndim > 1 or not seeds.size or not valid:
                raise ValueError(f"seed = {self.seed!r}: must be {A_SEED}, or a list of them")
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
class WhiteNoiseSource:
    """What the white noise of a universe comes from; nothing, if its particles were given.

    Attributes:
        seeds: int64, one for each universe of the box, and
        paired: whether their noise is taken with the opposite sign; or
        white_noise: this rank's block [..., x, y, z], and
        linear_delta: likewise, where a snapshot had it; or
        snapshot: that holds the state.
        recorded_seed: the seed that a snapshot with the noise names; it is not drawn again.
    """

    seeds: np.ndarray | None = None
    paired: bool = False
    white_noise: tf.Tensor | None = None
    linear_delta: tf.Tensor | None = None
    snapshot: Snapshot | None = None
    recorded_seed: int | None = None

    @classmethod
    def of_snapshot(cls, snapshot: Snapshot) -> WhiteNoiseSource:
        """Returns the source of the state that a snapshot holds."""
        about = snapshot.attributes
        paired, seed = bool(about.get("paired", False)), about.get("seed")
        if "white_noise" in snapshot.arrays or seed is None:
            return cls(paired=paired, snapshot=snapshot, recorded_seed=seed)
        return cls(np.asarray(seed, np.int64), paired, snapshot=snapshot)

    @property
    def seed(self) -> int | None:
        """The seed of a single universe, if it has one that is known."""
        return self.recorded_seed if self.seeds is None else int(self.seeds)

    def held(self, name: Literal["white_noise", "linear_delta"], box: Box) -> tf.Tensor | None:
        """Returns this rank's block of a field, read where a snapshot holds it; None if unknown."""
        snapshot, block = self.snapshot, getattr(self, name)
        if snapshot is None or name not in snapshot.arrays:
            return block
        return tf.convert_to_tensor(np.asarray(snapshot.array(name)[box.place]), box.dtype)

    def without_snapshot(self, box: Box) -> WhiteNoiseSource:
        """Returns the same source, with this rank's blocks instead of the snapshot of them."""
        noise, linear = self.held("white_noise", box), self.held("linear_delta", box)
        return replace(self, white_noise=noise, linear_delta=linear, snapshot=None)


@dataclass(frozen=True)
class Provenance:
    """The provenance of a state.

    Attributes:
        options: the simulation's options. A state from a snapshot has only the options of initial
            conditions and force, and the precision.
        cosmologies: of this rank's universes.
        halo: the halo of the evolution [particle spacings].
        source: what the white noise came from.
    """

    options: SolverOptions
    cosmologies: LocalCosmologies
    halo: int
    source: WhiteNoiseSource


@dataclass(frozen=True)
class Inputs:
    """Everything that a run needs, read and checked.

    Attributes:
        solver: the lowered functions of the run's box.
        options: the simulation's options.
        edges: scale factors at which steps begin and end, float64 [steps + 1].
        halo: "auto" or a number of particle spacings.
        cosmologies: of this rank's universes.
        source: what the white noise comes from.
        given: particles at the first of the edges, in a list from which the run takes them, so that
            they are not kept during the run; empty where LPT makes the particles.
    """

    solver: CompiledSolver
    options: SolverOptions
    edges: np.ndarray
    halo: Literal["auto"] | int
    cosmologies: LocalCosmologies
    source: WhiteNoiseSource
    given: list[Particles]

    @property
    def box(self) -> Box:
        """The box of one universe, or of a batch."""
        return self.solver.box

    @property
    def from_particles(self) -> bool:
        """Whether the run begins with given particles."""
        return self.source.seeds is None and self.source.white_noise is None

    def white_noise(self) -> tf.Tensor:
        """Returns the white noise that was given or is drawn, this rank's block [..., x, y, z]."""
        source = self.source
        if source.white_noise is not None:
            return source.white_noise
        return self.solver.initial.white_noise(source.seeds, paired=source.paired)

    def provenance(self, halo: int) -> Provenance:
        """Returns the provenance of a state that comes of these inputs with a halo."""
        return Provenance(self.options, self.cosmologies, halo, self.source)


def source_of(given: Given, box: Box) -> WhiteNoiseSource:
    """Returns the checked source of a run in a box.

    Raises:
        ValueError: on every rank; a field of another shape or dtype, or with values that are not
            finite.
    """
    if given.seed is not None:
        batch = box.number_shape.to_integer_list
        seeds = np.broadcast_to(np.asarray(given.seed, np.int64), batch)
        return WhiteNoiseSource(seeds=seeds, paired=given.paired)
    noise = given.white_noise
    if noise is None:
        return WhiteNoiseSource()
    if isinstance(noise, Field):
        noise = noise.on(box).block
    elif not isinstance(noise, (tf.Tensor, tf.Variable)):
        noise = np.asanyarray(noise)
        check_white_noise(noise, box)
    return WhiteNoiseSource(white_noise=box.block_of("white_noise", noise, box.shape))


def particles_of(given: Given, box: Box) -> list[Particles]:
    """Returns the particles that a run in a box begins with, if they are given, as a list of one.

    Raises:
        ValueError: a field of another shape or dtype, or of a box of another size.
    """
    if given.particles is None:
        return []
    blocks = []
    for name, vector in zip(PARTICLES, given.particles, strict=True):
        if isinstance(vector, Field):
            if vector.box.size != box.size:
                raise ValueError(
                    f"{name} has a box of {vector.box.size} Mpc/h, the simulation a box of "
                    f"{box.size} Mpc/h"
                )
            vector = vector.on(box).block
        blocks.append(box.block_of(name, vector, box.vector_shape))
    return [Particles(*blocks)]


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
