"""Draws on disk: the group `samples` in reconstruction.zarr.

Each rank writes its block of its chains.
"""

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
    """The draws of the white noise, their mean and their standard deviation, in a file.

    Args:
        fields: the path of reconstruction.zarr, which must exist.
        box: the box of the chains.
        kept: the number of draws of each chain that are kept.
    """

    def __init__(self, fields: Path, box: Box, kept: int) -> None:
        self._path, self._box, self._kept = fields / NAME, box, kept

    def begin(self, *, fresh: bool) -> None:
        """Creates the arrays, or uses those that exist. Must be called on all ranks together.

        Args:
            fresh: whether existing arrays are deleted.

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
        """Writes one draw of each of this rank's chains.

        Args:
            number: the number of the draw among those that are kept, from 0.
            point: the draw of all chains.

        Raises:
            WriteError: on a rank that cannot write; the job must end then.
        """
        self._write("white_noise", (number,), point)

    def finish(self, mean: Unknowns, spread: Unknowns) -> None:
        """Writes the mean and the standard deviation. Raises the errors of `keep`."""
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
