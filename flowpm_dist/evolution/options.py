"""The options of how a run is computed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, model_validator

from flowpm_dist.evolution.adjoints import ADJOINTS
from flowpm_dist.evolution.corrections import Correction, CorrectionFileError, chosen_correction
from flowpm_dist.options import Options, either, known
from flowpm_dist.particle_mesh.options import ForceOptions


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


class CorrectedForceOptions(ForceOptions):
    """The options of a force, for models with a field `correction`.

    A correction brings the options of the force that it was trained with, where none are given.
    """

    @model_validator(mode="before")
    @classmethod
    def _take_trained_force(cls, keys: Any, info: ValidationInfo) -> Any:
        if not isinstance(keys, Mapping):
            return keys
        with suppress(CorrectionFileError):  # reported as a problem of the key itself
            chosen = chosen_correction(keys.get("correction"), (info.context or {}).get("folder"))
            if isinstance(chosen, Correction) and chosen.trained is not None:
                return {**chosen.trained.force, **keys}
        return keys
