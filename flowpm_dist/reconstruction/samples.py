"""Draws on disk: `samples` in reconstruction.zarr, each rank writing its block of its chains."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.codecs import BloscCodec

from flowpm_dist.grid.box import Box
from flowpm_dist.io.files import WriteError
from flowpm_dist.io.snapshot import chunk_shape
from flowpm_dist.reconstruction.unknowns import Unknowns

NAME = "samples"
MEANINGS = {
    "white_noise": "draws of the white noise from the posterior",
    "mean": "of the white noise over all draws of a chain",
    "standard_deviation": "of the white noise over all draws of a chain",
}


class SampleFile:
    """White noise that was drawn, its mean and its standard deviation.

    Args:
        fields: reconstruction.zarr, which is there.
        box: of the chains.
        kept: draws of each chain that are kept.
    """

    def __init__(self, fields: Path, box: Box, kept: int) -> None:
        self._path, self._box, self._kept = fields / NAME, box, kept

    def begin(self, *, fresh: bool) -> None:
        """Make the arrays, or use those that are there. On all ranks together.

        Args:
            fresh: older ones are dropped.

        Raises:
            WriteError: on a rank that cannot write; the job must end then.
        """
        if self._box.mesh.rank == 0 and (fresh or not self._path.exists()):
            try:
                shutil.rmtree(self._path, ignore_errors=True)
                self._create()
            except OSError as error:
                raise WriteError.of(self._path, error) from error
        self._box.mesh.barrier()

    def _create(self) -> None:
        box = self._box
        group = zarr.create_group(self._path)
        dtype = np.dtype(box.dtype.as_numpy_dtype)
        chunk = chunk_shape(box.block, dtype.itemsize)
        for name, meaning in MEANINGS.items():
            more = (self._kept,) if name == "white_noise" else ()
            group.create_array(
                name,
                shape=(*more, *box.shape.to_integer_list),
                chunks=(1,) * (len(more) + 1) + chunk,
                dtype=dtype,
                fill_value=np.nan,
                compressors=BloscCodec(cname="zstd", clevel=1, shuffle="shuffle"),
                dimension_names=("draw", "chain", "x", "y", "z")[1 - len(more) :],
                attributes={"units": "1", "meaning": meaning},
            )

    def keep(self, number: int, point: Unknowns) -> None:
        """Write one draw of each of this rank's chains.

        Args:
            number: among those that are kept, from 0.
            point: of the chains.

        Raises:
            WriteError: on a rank that cannot write; the job must end then.
        """
        self._write("white_noise", (number,), point)

    def finish(self, mean: Unknowns, spread: Unknowns) -> None:
        """Write the moments. Raises as `keep`."""
        self._write("mean", (), mean)
        self._write("standard_deviation", (), spread)
        self._box.mesh.barrier()

    def _write(self, name: str, before: tuple[int, ...], point: Unknowns) -> None:
        path = self._path / name
        place: Any = (*before, *self._box.place)
        try:
            zarr.open_array(path, mode="r+")[place] = np.asarray(point.field)
        except OSError as error:
            raise WriteError.of(path, error) from error
