"""Checkpoints of searches and chains in a folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.field import Field
from flowpm_dist.jobs.checkpoints import CheckpointStore
from flowpm_dist.jobs.session import CheckpointError, FieldCheckpoints
from flowpm_dist.reconstruction.staged_run import IterationState
from flowpm_dist.reconstruction.unknowns import Memory, Space, Unknowns


class PointCheckpoints:
    """The latest checkpoints of a search, see `FieldCheckpoints`.

    Args:
        path: the folder of the checkpoints; it may be missing.
        space: the space of the unknowns.
        keep: the number of checkpoints that are kept.
    """

    def __init__(self, path: Path, space: Space, keep: int = 2) -> None:
        self._space = space
        self._files = FieldCheckpoints(CheckpointStore(path, "iteration"), space.box, keep)

    def save(self, progress: IterationState, memory: Memory) -> None:
        """Writes a checkpoint. Must be called on all ranks together.

        Raises:
            WriteError: on a rank that cannot write. Earlier checkpoints are left unchanged.
        """
        points = memory.points.items()
        attributes = {
            "progress": vars(progress),
            "numbers": dict(memory.numbers),
            "names": list(self._space.names),
            "parameters": {name: point.parameters.numpy().tolist() for name, point in points},
        }
        fields = {name: Field(point.field, self._space.box) for name, point in points}
        dimensions = ("chain", "x", "y", "z")[not self._space.chains :]
        self._files.save(progress.iteration, fields, attributes, dimensions)

    def restore(self) -> tuple[IterationState, Memory] | None:
        """Returns the latest checkpoint, or None if there is none.

        Must be called on all ranks together.

        Raises:
            CheckpointError: if it is of another grid or of other parameters, or cannot be read, or
                an older version wrote it for a search.
        """
        latest = self._files.latest(names=list(self._space.names))
        if latest is None:
            return None
        path, attributes = latest
        parameters: Any = attributes["parameters"]
        numbers: Any = attributes["numbers"]
        points = {
            name: Unknowns(
                self._files.block(path, name), tf.constant(np.array(values, dtype=np.float64))
            )
            for name, values in parameters.items()
        }
        progress, of_search = IterationState(**attributes["progress"]), "pairs" in numbers
        if of_search and not isinstance(progress.ended, str):
            raise CheckpointError(
                "an older version wrote the checkpoints of this search, and this version searches "
                "otherwise: begin anew with --overwrite, or in another folder"
            )
        progress = replace(progress, losses=tuple(progress.losses))
        return progress, Memory(points, numbers)
