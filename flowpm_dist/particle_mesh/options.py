"""The options of the force."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from flowpm_dist.grid.decomposition import MeshFactor, PyramidChoice
from flowpm_dist.options import Options

ForceGradient = Literal["finite-difference", "spectral"]
"""The source of the force in a kick: differences of a potential, or a field of the force itself."""


Exchange = Literal["exact", "float16"]
"""How ranks exchange the numbers of a force: unchanged, or rounded to float16."""


def _is_deconvolved(others: Mapping[str, Any]) -> bool:
    """Returns whether the window is divided out by default.

    On a finer mesh the harmonics of the particle lattice replace what the window takes away, and
    a spectral gradient makes the lattice unstable: docs/measurements/force_mesh.md.
    """
    spectral = others.get("force_gradient") == "spectral"
    return not spectral and others.get("mesh_factor", 1) == 1


class ForceOptions(Options):
    """The options of the gravity between the particles, see `Gravity`.

    Attributes:
        force_gradient: the gradient of the potential: "finite-difference" (4 points) or "spectral".
        mesh_factor: the number of cells of the force mesh per particle spacing, along each side. It
            need not be whole, see `mesh_factor_problem`.
        deconvolve: whether the force is divided by the squared cloud-in-cell window; by default
            with finite differences at mesh_factor = 1 alone.
        exchange: how the halos and transforms of the force mesh travel between ranks: "exact", or
            "float16", half the bytes of float32, rounded to 11 bits.
        pyramid: "off", or the error of a force whose long-range part is transformed on a coarser
            mesh and whose short-range part each rank computes alone, see `particle_mesh.pyramid`.
    """

    force_gradient: ForceGradient = Field(
        default="finite-difference", description='"finite-difference" or "spectral"'
    )
    mesh_factor: MeshFactor = Field(
        default=1, description="a number from 1 to 4, cells per particle spacing"
    )
    deconvolve: bool = Field(default_factory=_is_deconvolved, description="true or false")
    exchange: Exchange = Field(default="exact", description='"exact" or "float16"')
    pyramid: PyramidChoice = Field(
        default="off", description='"off", "1%" or "0.1%", the error of the force'
    )
