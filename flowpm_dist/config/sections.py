"""The sections of run files: each key with its type, its default, and what it must be.

Sections that only a training has are in `config_training_sections`.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo

from flowpm_dist.grid.decomposition import parse_mesh


def three(value: Any) -> Any:
    """One value for each axis."""
    return tuple(value) if isinstance(value, list | tuple) else (value, value, value)


def from_folder(value: Any, info: ValidationInfo) -> Any:
    """A path relative to the run file's folder, made absolute."""
    folder = (info.context or {}).get("folder", Path())
    return (folder / Path(value).expanduser()).absolute() if isinstance(value, str) else value


def _checked_mesh(shape: str) -> str:
    parse_mesh(shape)
    return shape


def listed(value: Any) -> Any:
    """A list of TOML as a tuple."""
    return tuple(value) if isinstance(value, list) else value


def _increasing(edges: tuple[float, ...]) -> tuple[float, ...]:
    for before, after in itertools.pairwise(edges):
        if after <= before:
            raise ValueError(f"{before:g} is followed by {after:g}")
    return edges


def low_below_high(limits: tuple[float, float]) -> tuple[float, float]:
    """Both ends of a range, in order; ValueError where they are not."""
    low, high = limits
    if low >= high:
        raise ValueError(f"{low:g} is not below {high:g}")
    return limits


EvenSide = Annotated[int, Field(ge=4, multiple_of=2)]
Length = Annotated[float, Field(gt=0)]
ScaleFactor = Annotated[float, Field(ge=0, le=2)]
Edges = Annotated[
    tuple[ScaleFactor, ...],
    Field(min_length=2),
    BeforeValidator(listed),
    AfterValidator(_increasing),
]


class Section(BaseModel):
    """Keys of one section; a key's description is what it must be, told when it is not."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=False
    )


class BoxSection(Section):
    """The periodic box."""

    grid: Annotated[tuple[EvenSide, EvenSide, EvenSide], BeforeValidator(three)] = Field(
        description="an even whole number of at least 4, or three of them [nx, ny, nz]"
    )
    size: Annotated[tuple[Length, Length, Length], BeforeValidator(three)] = Field(
        description="a length above 0 in Mpc/h, or three of them"
    )


OmegaM = Annotated[float, Field(gt=0, le=1)]
OmegaB = Annotated[float, Field(gt=0, lt=1)]
Hubble = Annotated[float, Field(gt=0.1, lt=3)]
Tilt = Annotated[float, Field(gt=0, lt=3)]
Sigma8 = Annotated[float, Field(gt=0, lt=10)]
W0 = Annotated[float, Field(ge=-5, lt=0)]
Wa = Annotated[float, Field(ge=-10, lt=5)]

OF_PARAMETERS = {
    "Omega_m": "a number above 0, at most 1",
    "Omega_b": "a number above 0, below Omega_m",
    "h": "H0 / (100 km/s/Mpc), from 0.1 to 3",
    "n_s": "a number from 0 to 3",
    "sigma8": "a number above 0, below 10",
    "w0": "a number from -5 to below 0",
    "wa": "a number from -10 to 5",
}
"""What each cosmological parameter that may vary must be."""


class FixedCosmologySection(Section):
    """What is the same in many flat universes of matter and dark energy w0 + wa (1 - a)."""

    Omega_m: OmegaM | None = Field(default=None, description=OF_PARAMETERS["Omega_m"])
    Omega_b: OmegaB | None = Field(default=None, description=OF_PARAMETERS["Omega_b"])
    h: Hubble | None = Field(default=None, description=OF_PARAMETERS["h"])
    n_s: Tilt | None = Field(default=None, description=OF_PARAMETERS["n_s"])
    A_s: float | None = Field(
        default=None, gt=0, lt=1e-6, description="a number above 0, below 1e-6, such as 2.1e-9"
    )
    sigma8: Sigma8 | None = Field(default=None, description=OF_PARAMETERS["sigma8"])
    w0: W0 = Field(default=-1.0, description=OF_PARAMETERS["w0"])
    wa: Wa = Field(default=0.0, description=OF_PARAMETERS["wa"])
    transfer: Literal["eisenstein-hu", "camb"] = Field(
        default="eisenstein-hu", description='"eisenstein-hu" or "camb"'
    )


class CosmologySection(FixedCosmologySection):
    """A flat universe of cold dark matter, baryons and dark energy w0 + wa (1 - a)."""

    Omega_m: OmegaM = Field(description=OF_PARAMETERS["Omega_m"])
    Omega_b: OmegaB = Field(description=OF_PARAMETERS["Omega_b"])
    h: Hubble = Field(description=OF_PARAMETERS["h"])
    n_s: Tilt = Field(description=OF_PARAMETERS["n_s"])


class ModesSection(Section):
    """What white noise becomes."""

    lpt_order: Literal[1, 2, 3] = Field(default=2, description="1, 2 or 3")
    noise: Literal["cells", "nested"] = Field(
        default="cells", description='"cells" or "nested" (large scales that no finer grid changes)'
    )
    fixed_amplitude: bool = Field(default=False, description="true or false")


class InitialSection(ModesSection):
    """Where the universe starts from."""

    seed: int | None = Field(
        default=None, ge=0, lt=2**63, description="a whole number of at least 0"
    )
    white_noise: Annotated[Path | None, BeforeValidator(from_folder)] = Field(
        default=None,
        description="a .npy file: real, shaped as box.grid, unit normal in real space",
    )
    paired: bool = Field(default=False, description="true or false")


class EvolutionSection(Section):
    """The scheme and its steps: `steps` of them between two scale factors, or their `edges`."""

    a_start: float = Field(default=0.1, ge=0, lt=2, description="a scale factor from 0, below 2")
    a_stop: float = Field(default=1.0, gt=0, le=2, description="a scale factor above 0, at most 2")
    steps: int = Field(default=10, ge=1, description="a whole number of at least 1")
    spacing: Literal["a", "log a", "D"] = Field(
        default="a", description='what the steps are equal in: "a", "log a" or "D"'
    )
    edges: Edges | None = Field(
        default=None, description="a list of two or more increasing scale factors from 0 to 2"
    )
    integrator: Literal["fastpm", "bullfrog", "cola"] = Field(
        default="fastpm", description='"fastpm", "bullfrog" or "cola"'
    )
    half_step: Literal["arithmetic", "geometric"] = Field(
        default="arithmetic", description='"arithmetic" or "geometric"'
    )
    force_gradient: Literal["finite-difference", "spectral"] = Field(
        default="finite-difference", description='"finite-difference" or "spectral"'
    )
    mesh_factor: int = Field(
        default=1, ge=1, le=4, description="a whole number from 1 to 4, cells per particle spacing"
    )
    deconvolve: bool = Field(default=False, description="true or false")

    @property
    def step_count(self) -> int:
        """How many steps there will be."""
        return self.steps if self.edges is None else len(self.edges) - 1

    @property
    def first(self) -> float | None:
        """Scale factor of the start; None where that was not understood."""
        return self.edges[0] if self.edges else self.a_start


class MeshSection(Section):
    """The ranks as a grid: `row` splits the box's x, `col` its y."""

    shape: Annotated[str, AfterValidator(_checked_mesh)] | None = Field(
        default=None, description='sizes of the axes row and col, as in "row:2,col:2"'
    )


def _checked_batched_mesh(shape: str) -> str:
    parse_mesh(shape, batched=True)
    return shape


class BatchedMeshSection(MeshSection):
    """The ranks as a grid: `replica` splits the batch, `row` the box's x, `col` its y."""

    shape: Annotated[str, AfterValidator(_checked_batched_mesh)] | None = Field(
        default=None,
        description='sizes of the axes replica, row and col, as in "replica:2,row:2"',
    )


class HaloSection(Section):
    """How to compute, where the precision is told elsewhere."""

    halo: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        default="auto", description='"auto" or a whole number of cells, at least 1'
    )


class RunSection(HaloSection):
    """How to compute."""

    precision: Literal["float32", "float64"] = Field(
        default="float32", description='"float32" or "float64"'
    )


class ResultsSection(Section):
    """What to measure besides the power spectrum."""

    multipoles: Literal["x", "y", "z"] | None = Field(
        default=None, description='the line of sight of redshift space: "x", "y" or "z"'
    )
