"""The sections that only the run file of a reconstruction has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from flowpm_dist.cosmology.options import ParameterRanges, PrimordialAmplitude
from flowpm_dist.cosmology.ranges import RANGES
from flowpm_dist.options import AnyPath, Length, Options, Pair, Seed, count, nearest, rows

BIASES = ("b", "b1", "b2", "bs2")
"""Of the density that has formed; and of second order in the initial one."""


def _known_biases(bias: Mapping[str, float]) -> Mapping[str, float]:
    for name in bias:
        if name not in BIASES:
            raise ValueError(f"there is no bias {name!r}{nearest(name, BIASES)}")
    if not bias or ("b" in bias and len(bias) > 1):
        raise ValueError("either b alone, or some of b1, b2, bs2")
    return bias


def _prior(what: str) -> Any:
    return Field(default=None, description=f"[low, high] with low below high, each {what}")


BiasValue = Annotated[float, Field(ge=-20, le=20)]
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

A_SEED = "a whole number of at least 0"
A_BIAS = "a number from -20 to 20"


class ModelSection(Options):
    """From white noise to what is observed, see `reconstruction.forward.ForwardModel`."""

    structure: Literal["linear", "1lpt", "2lpt", "pm"] = Field(
        default="pm", description='"linear", "1lpt", "2lpt" or "pm"'
    )
    redshift_space: Literal["x", "y", "z"] | None = Field(
        default=None, description='the line of sight of redshift space: "x", "y" or "z"'
    )
    bias: Annotated[dict[str, BiasValue], AfterValidator(_known_biases)] | None = Field(
        default=None,
        description="a table such as {b = 1.5} or {b1 = 0.5, b2 = 0.1, bs2 = 0.0}, each "
        f"{A_BIAS}",
    )
    error: float = Field(default=0.0, ge=0, description="a number of at least 0")


class ObservedSection(Options):
    """What is observed: a file, or a mock universe."""

    kind: Literal["density", "counts"] = Field(description='"density" or "counts"')
    file: AnyPath | None = Field(
        default=None,
        description="a .npy file, a zarr array or group, or an HDF5 file, shaped as box.grid",
    )
    mock_seed: Seed | None = Field(default=None, description=A_SEED)
    noise_seed: Seed = Field(default=0, description=A_SEED)
    add_noise: bool = Field(default=True, description="true or false")
    sigma: Length | AnyPath | None = Field(
        default=None,
        description="the standard deviation of a cell's noise in mean densities: a number above "
        "0, or a file of them shaped as box.grid",
    )
    mean_count: float | None = Field(
        default=None, gt=0, description="the mean count of a cell of mean density, above 0"
    )
    mask: AnyPath | None = Field(
        default=None,
        description="a file shaped as box.grid: from 1 where a cell is observed to 0 where not",
    )

    @property
    def files(self) -> dict[str, Path]:
        """Those that are named, by key."""
        named = {key: getattr(self, key) for key in ("file", "sigma", "mask")}
        return {key: path for key, path in named.items() if isinstance(path, Path)}


class FittedSection(ParameterRanges):
    """Parameters that are found along, each uniform between two values."""

    A_s: Pair[PrimordialAmplitude] | None = _prior(RANGES["A_s"].what)
    b: Pair[BiasValue] | None = _prior(A_BIAS)
    b1: Pair[BiasValue] | None = _prior(A_BIAS)
    b2: Pair[BiasValue] | None = _prior(A_BIAS)
    bs2: Pair[BiasValue] | None = _prior(A_BIAS)

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """Lowest and highest value of each parameter that is fitted."""
        return self.model_dump(exclude_none=True)


class SearchSection(Options):
    """How the most probable initial conditions are sought, see `reconstruction.search.Search`."""

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


class SamplerSection(Options):
    """Draws from the posterior after the search, see `reconstruction.chains.Chains`."""

    draws: int = Field(default=0, ge=0, description="a whole number; 0: no chains are drawn")
    chains: int = count(2)
    warm_up: int = count(100)
    start: Literal["prior", "found"] = Field(default="prior", description='"prior" or "found"')
    method: Literal["microcanonical", "hmc"] = Field(
        default="microcanonical", description='"microcanonical" or "hmc"'
    )
    leaps: int = count(32)
    length: float = Field(default=2.0, ge=0.1, description="a number of at least 0.1")
    energy_error: float = Field(default=1e-4, gt=0, lt=1, description="a number between 0 and 1")
    target: float = Field(default=0.8, gt=0, lt=1, description="a number between 0 and 1")
    seed: Seed = Field(default=0, description=A_SEED)
    keep_every: int = count(10)
    checkpoint_every: int = count(10)
