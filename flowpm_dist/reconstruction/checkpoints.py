"""Checkpoints of a search or of chains: fields in zarr, to which each rank writes its block.

A checkpoint can be resumed on a mesh of any shape.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.field import Field
from flowpm_dist.io.errors import WorkError
from flowpm_dist.io.files import WriteError, snapshot_attributes
from flowpm_dist.io.snapshot import mark_complete, write_snapshot
from flowpm_dist.reconstruction.optimisers import Memory
from flowpm_dist.reconstruction.unknowns import Space, Unknowns


class CheckpointError(WorkError):
    """A checkpoint that is missing, damaged, or of another search."""


@dataclass(frozen=True)
class Progress:
    """The progress of a search or of chains.

    Attributes:
        iteration: the number of iterations so far.
        stage: the number of the stage of annealing, from 0.
        in_stage: for chains, the number of moves in the stage so far.
        evaluations: the number of gradient evaluations so far.
        ended: whether the stage has converged or stalled.
    """

    iteration: int = 0
    stage: int = 0
    in_stage: int = 0
    evaluations: int = 0
    ended: bool = False


class Checkpoints:
    """The latest checkpoints of a search.

    Each is written beside its final place and then moved there.

    Args:
        folder: the folder of the checkpoints, on a file system that all ranks see.
        space: the space of the unknowns.
        keep: the number of checkpoints that are kept.
    """

    def __init__(self, folder: Path, space: Space, keep: int = 2) -> None:
        self._folder, self._space, self._keep = folder, space, keep

    def save(self, progress: Progress, memory: Memory) -> None:
        """Writes a checkpoint. Must be called on all ranks together.

        Raises:
            WriteError: on a rank that cannot write. Earlier checkpoints stay as they are.
        """
        box, mesh = self._space.box, self._space.box.mesh
        final = self._folder / f"iteration-{progress.iteration:06d}.zarr"
        aside = final.with_name(f".{final.name}.partial")
        if mesh.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
            self._folder.mkdir(parents=True, exist_ok=True)
        points = memory.points.items()
        attributes = {
            "progress": vars(progress),
            "numbers": dict(memory.numbers),
            "names": list(self._space.names),
            "grid": list(box.grid),
            "parameters": {
                name: p.parameters.numpy().tolist() for name, p in memory.points.items()
            },
        }
        fields = {name: Field(point.field, box) for name, point in points}
        dimensions = ("chain", "x", "y", "z")[not self._space.chains :]
        write_snapshot(aside, fields, attributes, meanings={}, dimensions=dimensions)
        if mesh.rank == 0:
            try:
                mark_complete(aside)
                shutil.rmtree(final, ignore_errors=True)
                aside.rename(final)
                for old in self._all()[: -self._keep]:
                    shutil.rmtree(old, ignore_errors=True)
            except OSError as error:
                raise WriteError.of(final, error) from error
        mesh.barrier()

    def _all(self) -> list[Path]:
        return sorted(self._folder.glob("iteration-*.zarr"))

    def restore(self) -> tuple[Progress, Memory] | None:
        """Returns the latest checkpoint, or None if there is none.

        Must be called on all ranks together.

        Raises:
            CheckpointError: if it is of another grid or of other parameters, or cannot be read.
        """
        world = self._space.box.mesh.world
        there = self._all()
        number = int(there[-1].name.split("-")[1].split(".")[0]) if there else -1
        # Rank 0 decides: a file system may show the folder to other ranks later.
        number = int(world.broadcast(tf.constant(number)))
        if number < 0:
            return None
        path = self._folder / f"iteration-{number:06d}.zarr"
        attributes = snapshot_attributes(path)
        if attributes is None or not attributes.get("complete"):
            raise CheckpointError(self._damaged(path, "it is not complete"))
        box = self._space.box
        for key, ours in (("grid", list(box.grid)), ("names", list(self._space.names))):
            if attributes[key] != ours:
                raise CheckpointError(f"{path} is of {key} {attributes[key]}; here it is {ours}")
        parameters: Any = attributes["parameters"]
        points = {name: self._point(path, name, values) for name, values in parameters.items()}
        numbers: Any = attributes["numbers"]
        progress: Any = attributes["progress"]
        return Progress(**progress), Memory(points, numbers)

    def _damaged(self, path: Path, reason: str) -> str:
        """Returns the message about a damaged checkpoint, with what can be done."""
        before = [other for other in self._all() if other.name < path.name]
        advice = "there is none before it: begin anew with --overwrite"
        if before:
            advice = f"move it away, and --resume goes on from {before[-1].name}, the one before it"
        return f"{path} is damaged ({reason}); {advice}"

    def _point(self, path: Path, name: str, parameters: list[Any]) -> Unknowns:
        import zarr

        box = self._space.box
        try:
            block = np.asarray(zarr.open_array(path / name, mode="r")[box.place])
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise CheckpointError(self._damaged(path, f"{name}: {reason}")) from error
        return Unknowns(
            tf.constant(block, box.dtype), tf.constant(np.array(parameters, dtype=np.float64))
        )
