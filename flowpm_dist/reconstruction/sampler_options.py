"""The options of draws and of samplers. Nothing here imports TensorFlow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, InstanceOf
from typing_extensions import override

from flowpm_dist.grid.decomposition import parse_mesh
from flowpm_dist.options import A_SEED, Options, Seed, Variants, count, python_object

if TYPE_CHECKING:
    from flowpm_dist.reconstruction.sampler import Sampler


class MoveOptions(Options):
    """The options of a sampler's moves; a subclass for each sampler.

    Attributes:
        leaps: the number of steps of a move, or the greatest of them.
        seed: the seed of all random numbers.
        scheme: the class of the sampler, "package.module:object".
    """

    scheme: ClassVar[str]

    leaps: int = count(32)
    seed: Seed = Field(default=0, description=A_SEED)

    @property
    def evaluations(self) -> float:
        """The mean number of gradients in a move, or an upper limit of it."""
        return self.leaps

    def sampler(self) -> Sampler:
        """Returns the sampler."""
        sampler: Sampler = python_object(self.scheme)(**dict(self))
        return sampler


class MicrocanonicalOptions(MoveOptions):
    """The options of `Microcanonical`.

    Attributes:
        length: the distance over which the direction is forgotten, in widths of the posterior.
        energy_error: the variance of the change of the energy in a step, divided by the number of
            unknowns, that the step size is adapted to.
    """

    scheme = "flowpm_dist.reconstruction.microcanonical:Microcanonical"

    length: float = Field(default=2.0, ge=0.1, description="a number of at least 0.1")
    energy_error: float = Field(default=1e-4, gt=0, lt=1, description="a number between 0 and 1")


class HMCOptions(MoveOptions):
    """The options of `HMC`.

    Attributes:
        target: the share of accepted moves that the step size is adapted to.
    """

    scheme = "flowpm_dist.reconstruction.hmc:HMC"

    @property
    @override
    def evaluations(self) -> float:
        return 0.75 * self.leaps  # from half of them to all

    target: float = Field(default=0.8, gt=0, lt=1, description="a number between 0 and 1")


class AdjustedMicrocanonicalOptions(HMCOptions):
    """The options of `AdjustedMicrocanonical`.

    Attributes:
        length: the mean length of a move, in widths of the posterior, where `leaps` allow.
    """

    scheme = "flowpm_dist.reconstruction.adjusted_microcanonical:AdjustedMicrocanonical"

    length: float = Field(default=2.0, ge=0.1, description="a number of at least 0.1")

    @property
    @override
    def evaluations(self) -> float:
        return 2 / 3 * self.leaps  # from a third of them to all, or fewer where `length` is short


METHODS = {
    "microcanonical": MicrocanonicalOptions,
    "adjusted-microcanonical": AdjustedMicrocanonicalOptions,
    "hmc": HMCOptions,
}
"""Samplers by the name that run files give them."""


class SamplerOptions(Options):
    """The options of draws from the posterior after the search, see `Chains`.

    Attributes:
        draws: the number of draws of each chain after the warm-up.
        chains: the number of chains.
        warm_up: the number of moves before the draws.
        start: where the chains begin: at draws of the "prior", or about the point that was "found".
        method: the sampler with its options.
        keep_every: the number of draws from one kept field to the next.
        checkpoint_every: the number of moves between checkpoints.
    """

    draws: int = Field(ge=1, description="the draws of each chain, a whole number of at least 1")
    chains: int = count(2)
    warm_up: int = count(100)
    start: Literal["prior", "found"] = Field(default="prior", description='"prior" or "found"')
    method: Annotated[
        InstanceOf[MoveOptions], Variants("method", METHODS, "microcanonical", flat=True)
    ] = Field(
        default_factory=MicrocanonicalOptions,
        description='"microcanonical", "adjusted-microcanonical" or "hmc"',
    )
    keep_every: int = count(10)
    checkpoint_every: int = count(10)

    @property
    def name(self) -> str:
        """The name of the sampler."""
        return next(name for name, model in METHODS.items() if type(self.method) is model)


def search_mesh(shape: str) -> str:
    """Returns the mesh of the search: ranks of the replica axis work on x, too.

    Args:
        shape: the mesh of the whole job, such as "replica:2,row:2".
    """
    axes = parse_mesh(shape, batched=True)
    row = axes.pop("replica", 1) * axes.pop("row", 1)
    return ",".join(f"{name}:{size}" for name, size in {"row": row, **axes}.items())
