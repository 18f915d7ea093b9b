"""Checkpoints of fields: zarr groups to which each rank writes its block.

A checkpoint can be resumed on a mesh of any shape.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.box import Box
from flowpm_dist.grid.field import Field
from flowpm_dist.io.errors import WorkError
from flowpm_dist.io.files import WriteError, snapshot_attributes
from flowpm_dist.io.light_cone import MapArray, add_array
from flowpm_dist.io.snapshot import DIMENSIONS, mark_complete, write_snapshot
from flowpm_dist.jobs.folder import numbered_checkpoints


class CheckpointError(WorkError):
    """A checkpoint that is missing, damaged, or of other work."""


class FieldCheckpoints:
    """The latest checkpoints of a job.

    Each is written under another name and then renamed.

    Args:
        folder: the folder of the checkpoints, on a file system that all ranks see.
        unit: what the work is counted in, such as "iteration"; checkpoints are named after it.
        box: the box of the fields.
        keep: the number of checkpoints that are kept.
    """

    def __init__(self, folder: Path, unit: str, box: Box, keep: int) -> None:
        self._folder, self._unit, self._box, self._keep = folder, unit, box, keep

    def save(
        self,
        number: int,
        fields: Mapping[str, Field],
        attributes: Mapping[str, Any],
        dimensions: tuple[str, ...] = DIMENSIONS,
        maps: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Writes a checkpoint. Must be called on all ranks together.

        Args:
            number: number of the iteration or step that it follows.
            fields: by name.
            attributes: what else the work depends on; they can be written as JSON.
            dimensions: see `write_snapshot`.
            maps: arrays by name that rank 0 writes, whole.

        Raises:
            WriteError: on a rank that cannot write. Earlier checkpoints are not changed.
        """
        import zarr

        mesh, final = self._box.mesh, self._path(number)
        aside = final.with_name(f".{final.name}.partial")
        if mesh.rank == 0:
            for cut_short in self._folder.glob(f".{self._unit}-*.partial"):
                shutil.rmtree(cut_short, ignore_errors=True)
            self._folder.mkdir(parents=True, exist_ok=True)
        about = {"grid": list(self._box.grid), **attributes}
        write_snapshot(aside, fields, about, meanings={}, dimensions=dimensions)
        if mesh.rank == 0:
            try:
                group = zarr.open_group(aside, mode="r+")
                for name, values in (maps or {}).items():
                    axes = tuple(f"axis_{n}" for n in range(values.ndim))
                    add_array(group, name, MapArray(values, axes, "1", name))
                mark_complete(aside)
                shutil.rmtree(final, ignore_errors=True)
                aside.rename(final)
                for old in self._all()[: -self._keep]:
                    shutil.rmtree(old, ignore_errors=True)
            except OSError as error:
                raise WriteError.of(final, error) from error
        mesh.barrier()

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._unit}-{number:06d}.zarr"

    def _all(self) -> list[Path]:
        return [self._path(n) for n in numbered_checkpoints(self._folder, self._unit)]

    def latest(self, **ours: Any) -> tuple[Path, Mapping[str, Any]] | None:
        """Returns path and attributes of the latest checkpoint; None if there is none.

        Must be called on all ranks together.

        Args:
            **ours: attributes, besides the grid, that must equal this work's.

        Raises:
            CheckpointError: it is of other work, or its writing was interrupted.
        """
        numbers = numbered_checkpoints(self._folder, self._unit)
        # Rank 0 decides: a file system may show the folder to other ranks later.
        last = tf.constant(numbers[-1] if numbers else -1)
        number = int(self._box.mesh.world.broadcast(last))
        if number < 0:
            return None
        path = self._path(number)
        attributes = snapshot_attributes(path)
        if attributes is None or not attributes.get("complete"):
            raise CheckpointError(self._damaged(path, "it is not complete"))
        for key, own in {"grid": list(self._box.grid), **ours}.items():
            if (found := attributes.get(key)) != own:
                raise CheckpointError(f"{path} is of {key} {found}; here it is {own}")
        return path, attributes

    def block(self, path: Path, name: str) -> tf.Tensor:
        """Returns this rank's block of a field of a checkpoint, in the dtype of the box.

        Raises:
            CheckpointError: it cannot be read, or values are missing.
        """
        return self._read(path, name, self._box.place)

    def whole(self, path: Path, name: str) -> tf.Tensor:
        """Returns a whole array of a checkpoint, likewise."""
        return self._read(path, name, ...)

    def _read(self, path: Path, name: str, place: Any) -> tf.Tensor:
        import zarr

        try:
            block = np.asarray(zarr.open_array(path / name, mode="r")[place])
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise CheckpointError(self._damaged(path, f"{name}: {reason}")) from error
        if not np.isfinite(block).all():
            raise CheckpointError(self._damaged(path, f"{name}: values are missing"))
        return tf.constant(block, self._box.dtype)

    def _damaged(self, path: Path, reason: str) -> str:
        """Returns the message about a damaged checkpoint, with what can be done."""
        before = [other for other in self._all() if other.name < path.name]
        advice = "there is none before it: begin anew with --overwrite"
        if before:
            advice = f"move it away, and --resume goes on from {before[-1].name}, the one before it"
        return f"{path} is damaged ({reason}); {advice}"
