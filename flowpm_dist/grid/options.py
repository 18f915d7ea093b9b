"""The box and the mesh of ranks as options."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from flowpm_dist.grid.decomposition import parse_mesh
from flowpm_dist.options import EvenSide, Options, Unit, three

Scheme = Literal["cic", "tsc", "pcs"]
"""How points are painted: cloud in cell, triangular-shaped cloud or piecewise cubic spline."""
SCHEMES: dict[Scheme, int] = {"cic": 2, "tsc": 3, "pcs": 4}
"""The order of each scheme's B-spline: how many cells along each axis a point reaches. A
scheme has the window sinc(k cell / 2) to this power along each axis."""


def _mesh(shape: str) -> str:
    parse_mesh(shape)
    return shape


def _batched_mesh(shape: str) -> str:
    parse_mesh(shape, batched=True)
    return shape


SMALLEST, LARGEST = 0.01, 1e5
"""Limits of a side [Mpc/h]: below is no cosmology, and beyond is more than can be observed."""
Side = Annotated[float, Field(ge=SMALLEST, le=LARGEST)]
Sides = Annotated[tuple[Side, Side, Side], BeforeValidator(three)]
"""The sides of a box [Mpc/h]; one number for a cube."""
A_SIZE = "a length from 0.01 to 100000 in Mpc/h, or three of them"


class BoxOptions(Options):
    """The periodic box."""

    grid: Annotated[tuple[EvenSide, EvenSide, EvenSide], BeforeValidator(three)] = Field(
        description="an even whole number from 4 to 2^20, or three of them [nx, ny, nz]"
    )
    size: Annotated[Sides, Unit("Mpc/h")] = Field(description=A_SIZE)


class MeshOptions(Options):
    """The ranks as a grid: `row` splits the box's x, `col` its y."""

    shape: Annotated[str, AfterValidator(_mesh)] | None = Field(
        default=None, description='sizes of the axes row and col, as in "row:2,col:2"'
    )


class BatchedMeshOptions(MeshOptions):
    """The ranks as a grid: `replica` splits the batch, `row` the box's x, `col` its y."""

    shape: Annotated[str, AfterValidator(_batched_mesh)] | None = Field(
        default=None, description='sizes of the axes replica, row and col, as in "replica:2,row:2"'
    )
