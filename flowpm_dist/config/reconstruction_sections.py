"""The sections that only the run file of a reconstruction has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field

from flowpm_dist.config.sections import (
    OF_PARAMETERS,
    W0,
    Hubble,
    Length,
    OmegaB,
    OmegaM,
    Section,
    Sigma8,
    Tilt,
    Wa,
    from_folder,
    listed,
    low_below_high,
)
from flowpm_dist.grid.decomposition import nearest

BIASES = ("b", "b1", "b2", "bs2")
"""Of the density that has formed; and of second order in the initial one."""

T = TypeVar("T")


def _known_biases(bias: Mapping[str, float]) -> Mapping[str, float]:
    for name in bias:
        if name not in BIASES:
            raise ValueError(f"there is no bias {name!r}{nearest(name, BIASES)}")
    if not bias or ("b" in bias and len(bias) > 1):
        raise ValueError("either b alone, or some of b1, b2, bs2")
    return bias


def _rows(value: Any) -> Any:
    return tuple(map(listed, value)) if isinstance(value, list) else value


def _count(default: int) -> Any:
    return Field(default=default, ge=1, description="a whole number of at least 1")


def _prior(what: str) -> Any:
    return Field(default=None, description=f"[low, high] with low below high, each {what}")


Range = Annotated[tuple[T, T], BeforeValidator(listed), AfterValidator(low_below_high)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Amplitude = Annotated[float, Field(gt=0, lt=1e-6)]
BiasValue = Annotated[float, Field(ge=-20, le=20)]
AnyFile = Annotated[Path, BeforeValidator(from_folder)]
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
    BeforeValidator(_rows),
]

A_SEED = "a whole number of at least 0"
A_BIAS = "a number from -20 to 20"


class ModelSection(Section):
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


class ObservedSection(Section):
    """What is observed: a file, or a mock universe."""

    kind: Literal["density", "counts"] = Field(description='"density" or "counts"')
    file: AnyFile | None = Field(
        default=None,
        description="a .npy file, a zarr array or group, or an HDF5 file, shaped as box.grid",
    )
    mock_seed: Seed | None = Field(default=None, description=A_SEED)
    noise_seed: Seed = Field(default=0, description=A_SEED)
    add_noise: bool = Field(default=True, description="true or false")
    sigma: Length | AnyFile | None = Field(
        default=None,
        description="the standard deviation of a cell's noise in mean densities: a number above "
        "0, or a file of them shaped as box.grid",
    )
    mean_count: float | None = Field(
        default=None, gt=0, description="the mean count of a cell of mean density, above 0"
    )
    mask: AnyFile | None = Field(
        default=None,
        description="a file shaped as box.grid: from 1 where a cell is observed to 0 where not",
    )

    @property
    def files(self) -> dict[str, Path]:
        """Those that are named, by key."""
        named = {key: getattr(self, key) for key in ("file", "sigma", "mask")}
        return {key: path for key, path in named.items() if isinstance(path, Path)}


class FittedSection(Section):
    """Parameters that are found along, each uniform between two values."""

    Omega_m: Range[OmegaM] | None = _prior(OF_PARAMETERS["Omega_m"])
    Omega_b: Range[OmegaB] | None = _prior(OF_PARAMETERS["Omega_b"])
    h: Range[Hubble] | None = _prior(OF_PARAMETERS["h"])
    n_s: Range[Tilt] | None = _prior(OF_PARAMETERS["n_s"])
    A_s: Range[Amplitude] | None = _prior("a number above 0, below 1e-6")
    sigma8: Range[Sigma8] | None = _prior(OF_PARAMETERS["sigma8"])
    w0: Range[W0] | None = _prior(OF_PARAMETERS["w0"])
    wa: Range[Wa] | None = _prior(OF_PARAMETERS["wa"])
    b: Range[BiasValue] | None = _prior(A_BIAS)
    b1: Range[BiasValue] | None = _prior(A_BIAS)
    b2: Range[BiasValue] | None = _prior(A_BIAS)
    bs2: Range[BiasValue] | None = _prior(A_BIAS)

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """Lowest and highest value of each parameter that is fitted."""
        return self.model_dump(exclude_none=True)


class SearchSection(Section):
    """How the most probable initial conditions are sought, see `reconstruction.search.Search`."""

    optimiser: Literal["lbfgs", "adam"] = Field(default="lbfgs", description='"lbfgs" or "adam"')
    evaluations: int = _count(200)
    stages: Stages | None = Field(
        default=None,
        description="a list of [radius in Mpc/h of at least 0, inflation of at least 1, "
        "evaluations of at least 1]",
    )
    history: int = _count(10)
    rate: float = Field(default=0.1, gt=0, description="a number above 0")
    seed: Seed = Field(default=0, description=A_SEED)
    tolerance: float = Field(default=1e-3, ge=0, description="a number of at least 0")
    checkpoint_every: int = _count(10)
    keep: int = _count(2)


class SamplerSection(Section):
    """Draws from the posterior after the search, see `reconstruction.chains.Chains`."""

    draws: int = Field(default=0, ge=0, description="a whole number; 0: no chains are drawn")
    chains: int = _count(2)
    warm_up: int = _count(100)
    start: Literal["prior", "found"] = Field(default="prior", description='"prior" or "found"')
    method: Literal["microcanonical", "hmc"] = Field(
        default="microcanonical", description='"microcanonical" or "hmc"'
    )
    leaps: int = _count(32)
    length: float = Field(default=2.0, ge=0.1, description="a number of at least 0.1")
    energy_error: float = Field(default=1e-4, gt=0, lt=1, description="a number between 0 and 1")
    target: float = Field(default=0.8, gt=0, lt=1, description="a number between 0 and 1")
    seed: Seed = Field(default=0, description=A_SEED)
    keep_every: int = _count(10)
    checkpoint_every: int = _count(10)
