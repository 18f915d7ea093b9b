"""The options of a reconstruction. Nothing here imports TensorFlow."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from flowpm_dist.cosmology.options import ParameterRanges, PrimordialAmplitude
from flowpm_dist.cosmology.ranges import RANGES
from flowpm_dist.observables.options import NuisanceRanges
from flowpm_dist.options import (
    A_SEED,
    AnyPath,
    Options,
    Pair,
    Seed,
    checked_python_name,
    count,
    limits,
    rows,
)

Stages = Annotated[
    tuple[
        tuple[
            Annotated[float, Field(ge=0)],
            Annotated[float, Field(ge=1)],
            Annotated[int, Field(ge=1)],
        ],
        ...,
    ],
    Field(min_length=1),
    BeforeValidator(rows),
]


class LikelihoodOptions(Options):
    """The likelihood of what is observed.

    Attributes:
        name: a likelihood of a user's own; by default that of the observation's kind.
        error: the standard deviation of the model, as a share of a cell's density.
    """

    name: Annotated[str, AfterValidator(checked_python_name)] | None = Field(
        default=None, description='"package.module:object" of a likelihood of your own'
    )
    error: float = Field(default=0.0, ge=0, description="a number of at least 0")


class ObservedOptions(Options):
    """The data: a file, or a mock universe.

    Attributes:
        file: the file of the data.
        mock_seed: the seed of the white noise of a mock universe, instead of a file.
        noise_seed, add_noise: the seed of the noise of a mock, and whether it has noise.
    """

    file: AnyPath | None = Field(
        default=None,
        description="a .npy file, a zarr array or group, or an HDF5 file, shaped as box.grid",
    )
    mock_seed: Seed | None = Field(default=None, description=A_SEED)
    noise_seed: Seed = Field(default=0, description=A_SEED)
    add_noise: bool = Field(default=True, description="true or false")


class FittedOptions(ParameterRanges, NuisanceRanges):
    """The parameters that are fitted along, each with a uniform prior between two values.

    Parameters of a user's own likelihood have theirs under their own names, too.
    """

    __pydantic_extra__: dict[str, Pair[float]] = Field(init=False)

    A_s: Pair[PrimordialAmplitude] | None = limits(RANGES["A_s"].what)

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """The lowest and the highest value of each parameter that is fitted."""
        return self.model_dump(exclude_none=True)


class SearchOptions(Options):
    """The options of the search for the most probable initial conditions, see `Search`.

    Attributes:
        optimiser: "lbfgs" or "adam".
        evaluations: the number of gradient evaluations of all default stages.
        stages: the radius [Mpc/h], the inflation of the noise and the evaluations of each stage.
        history: the number of steps that L-BFGS remembers.
        rate: the learning rate of Adam.
        seed: the seed of the small white noise that the search begins with.
        tolerance: see `Search`.
        checkpoint_every: the number of iterations between checkpoints.
        keep: the number of checkpoints that are kept.
    """

    optimiser: Literal["lbfgs", "adam"] = Field(default="lbfgs", description='"lbfgs" or "adam"')
    evaluations: int = count(200)
    stages: Stages | None = Field(
        default=None,
        description="a list of [radius in Mpc/h of at least 0, inflation of at least 1, "
        "evaluations of at least 1]",
    )
    history: int = count(10)
    rate: float = Field(default=0.1, gt=0, description="a number above 0")
    seed: Seed = Field(default=0, description=A_SEED)
    tolerance: float = Field(default=1e-3, ge=0, description="a number of at least 0")
    checkpoint_every: int = count(10)
    keep: int = count(2)


class SamplerOptions(Options):
    """The options of draws from the posterior after the search, see `Chains`.

    Attributes:
        draws: the number of draws of each chain after the warm-up; 0: no chains are run.
        chains: the number of chains.
        warm_up: the number of moves before the draws.
        start: where the chains begin: at draws of the "prior", or about the point that was "found".
        method: "microcanonical", "adjusted-microcanonical" or "hmc".
        leaps: the number of steps of a move, or the greatest of them.
        length: the distance over which a microcanonical momentum is forgotten, or the mean length
            of an adjusted move, where `leaps` allow.
        energy_error: the energy error that the step size of microcanonical chains aims at.
        target: the acceptance that the step size of HMC and of adjusted moves aims at.
        seed: the seed of all random numbers.
        keep_every: the number of draws from one kept field to the next.
        checkpoint_every: the number of moves between checkpoints.
    """

    draws: int = Field(default=0, ge=0, description="a whole number; 0: no chains are drawn")
    chains: int = count(2)
    warm_up: int = count(100)
    start: Literal["prior", "found"] = Field(default="prior", description='"prior" or "found"')
    method: Literal["microcanonical", "adjusted-microcanonical", "hmc"] = Field(
        default="microcanonical",
        description='"microcanonical", "adjusted-microcanonical" or "hmc"',
    )
    leaps: int = count(32)
    length: float = Field(default=2.0, ge=0.1, description="a number of at least 0.1")
    energy_error: float = Field(default=1e-4, gt=0, lt=1, description="a number between 0 and 1")
    target: float = Field(default=0.8, gt=0, lt=1, description="a number between 0 and 1")
    seed: Seed = Field(default=0, description=A_SEED)
    keep_every: int = count(10)
    checkpoint_every: int = count(10)


SAMPLER_DEFAULTS = SamplerOptions()
"""The defaults, also of samplers made from Python."""
