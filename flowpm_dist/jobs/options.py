"""The options of what a simulation leaves on the disk."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from flowpm_dist.cosmology.time_steps import SAME, StepOptions
from flowpm_dist.io.formats import FormatName
from flowpm_dist.io.snapshot import DEFAULT_FIELDS, FIELDS, FieldName
from flowpm_dist.options import Options, distinct, listed


class OutputOptions(Options):
    """The options of what a simulation leaves on the disk.

    Attributes:
        format: of the snapshot: "zarr", or for other codes "gadget-hdf5" or "bigfile", which hold
            the particles alone.
        fields: names of the fields of a zarr snapshot.
        a, redshifts: when states are written before the last one, as scale factors or redshifts.
        checkpoint_every: the number of steps between checkpoints; 0 for none but the one that is
            written when a signal stops the run.
    """

    format: FormatName = Field(default="zarr", description='"zarr", "gadget-hdf5" or "bigfile"')
    fields: Annotated[
        tuple[FieldName, ...],
        Field(min_length=1),
        BeforeValidator(listed),
        AfterValidator(distinct),
    ] = Field(default=DEFAULT_FIELDS, description=f"a list of some of {', '.join(FIELDS)}")
    a: (
        Annotated[
            tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1), BeforeValidator(listed)
        ]
        | None
    ) = Field(default=None, description="a list of scale factors above 0")
    redshifts: (
        Annotated[
            tuple[Annotated[float, Field(ge=0)], ...], Field(min_length=1), BeforeValidator(listed)
        ]
        | None
    ) = Field(default=None, description="a list of redshifts, of at least 0")
    checkpoint_every: int = Field(
        default=0, ge=0, description="a whole number of steps; 0: only when a signal stops the run"
    )

    def times(self, steps: StepOptions | None = None) -> list[float]:
        """Returns the scale factors of states on the way, increasing.

        Args:
            steps: of the run; its last state is not among them.
        """
        asked = sorted(self.a or [1.0 / (1.0 + z) for z in self.redshifts or ()])
        if steps is None or steps.first is None or steps.last is None:
            return asked
        return [max(a, steps.first) for a in asked if a < steps.last * (1.0 - SAME)]


def output_name(a: float) -> str:
    """Returns the name of the folder of the state at a scale factor."""
    return f"a_{a:.4f}"
