"""What a training needs to go on: weights, optimiser, step. All else follows from the step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tensorflow as tf

from flowpm_dist.cosmoflow.optimisers import Optimiser
from flowpm_dist.io.folder import WriteError
from meshimpl.process_mesh import ProcessMesh


class Checkpoints:
    """The latest checkpoints of a training, written by rank 0.

    `tf.train.CheckpointManager` writes each aside and moves it into place, and names the latest
    only then: one that was cut short is never read. Weights and moments are whole on every rank, so
    that a checkpoint serves a mesh of any shape.

    Args:
        folder: of the checkpoints.
        mesh: the ranks.
        state: variables of the network.
        optimiser: whose slots have been built.
        keep: how many are kept.
    """

    def __init__(
        self,
        folder: Path,
        mesh: ProcessMesh,
        state: Sequence[tf.Variable],
        optimiser: Optimiser,
        keep: int,
    ) -> None:
        self._mesh, self._folder = mesh, folder
        self._step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
        slots = [slot for name in sorted(optimiser.slots) for slot in optimiser.slots[name]]
        self._variables = [self._step, optimiser.iterations, *state, *slots]
        self._checkpoint = tf.train.Checkpoint(
            weights=list(state), optimiser=optimiser, step=self._step
        )
        self._manager = tf.train.CheckpointManager(
            self._checkpoint, str(folder), max_to_keep=keep, checkpoint_name="step"
        )

    def save(self, step: int) -> None:
        """Write one, after `step` steps. On all ranks together.

        Raises:
            WriteError: on rank 0, where it cannot be written; those before are as they were.
        """
        self._step.assign(step)
        if self._mesh.rank == 0:
            try:
                self._manager.save(checkpoint_number=step)
            except (tf.errors.OpError, OSError) as error:
                raise WriteError(f"cannot write a checkpoint in {self._folder}: {error}") from error
        self._mesh.barrier()

    def restore(self) -> int | None:
        """Take up the latest, on all ranks; the number of steps it was written after, or None.

        Raises:
            ValueError: it is of another network or optimiser.
        """
        latest = self._manager.latest_checkpoint if self._mesh.rank == 0 else None
        found = self._mesh.world.broadcast(tf.constant(int(latest is not None)))
        if not int(found):
            return None
        if latest is not None:
            try:
                self._checkpoint.restore(latest).assert_existing_objects_matched()
            except (ValueError, AssertionError, tf.errors.OpError) as error:
                raise ValueError(
                    f"{latest} is not of this network and optimiser: {error}"
                ) from error
        for variable in self._variables:
            variable.assign(self._mesh.world.broadcast(variable))
        return int(self._step)
