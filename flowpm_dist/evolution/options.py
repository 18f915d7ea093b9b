"""The options of how a run is computed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from flowpm_dist.evolution.adjoints import ADJOINTS
from flowpm_dist.options import Options, either, known


class HaloOptions(Options):
    """The options of the halo: how far particles may stray.

    Attributes:
        halo: planes exchanged along split axes [particle spacings]; "auto" sizes it from the LPT
            displacement.
    """

    halo: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        default="auto", description='"auto" or a whole number of cells, at least 1'
    )


class RunOptions(HaloOptions):
    """The options of the computation of a run.

    Attributes:
        precision: of fields and particles, "float32" or "float64".
    """

    precision: Literal["float32", "float64"] = Field(
        default="float32", description='"float32" or "float64"'
    )


class AdjointOptions(Options):
    """The choice of an adjoint by its name.

    Attributes:
        adjoint: how a run is differentiated, a name in `ADJOINTS`.
    """

    adjoint: Annotated[str, AfterValidator(known(ADJOINTS, "adjoint"))] = Field(
        default="reversible", description=either(ADJOINTS)
    )
