"""The options of what a simulation leaves on the disk."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from flowpm_dist.io.formats import FormatName
from flowpm_dist.io.snapshot import DEFAULT_FIELDS, FIELDS, FieldName
from flowpm_dist.options import Options, distinct, listed


class OutputOptions(Options):
    """The options of what a simulation leaves on the disk.

    Attributes:
        format: of the snapshot: "zarr", or for other codes "gadget-hdf5" or "bigfile", which hold
            the particles alone.
        fields: names of the fields of a zarr snapshot.
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
    checkpoint_every: int = Field(
        default=0, ge=0, description="a whole number of steps; 0: only when a signal stops the run"
    )
