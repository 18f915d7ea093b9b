"""Checkpoints of a training: weights, optimiser, step. All else follows from the step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tensorflow as tf

from flowpm_dist.cosmoflow.folder import TrainedError
from flowpm_dist.cosmoflow.optimisers import Optimiser
from flowpm_dist.io.files import WriteError
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
        """Writes a checkpoint after `step` steps. On all ranks together.

        All ranks go on with rank 0's values: should processors of different kinds round otherwise,
        the ranks stay equal, and equal to what is resumed.

        Raises:
            WriteError: on rank 0, where it cannot be written; those before are as they were.
        """
        self._step.assign(step)
        for variable in self._variables:
            variable.assign(self._mesh.world.broadcast(variable))
        if self._mesh.rank == 0:
            try:
                self._manager.save(checkpoint_number=step)
            except (tf.errors.OpError, OSError) as error:
                raise WriteError(f"cannot write a checkpoint in {self._folder}: {error}") from error
        self._mesh.barrier()

    def restore(self) -> int | None:
        """Restores the latest checkpoint on all ranks; returns its number of steps, or None.

        Raises:
            TrainedError: on all ranks; it is damaged, or of another network or optimiser.
        """
        found = take_up(self._folder, self._mesh, self._checkpoint, self._variables)
        return int(self._step) if found else None


def take_up(
    folder: Path,
    mesh: ProcessMesh,
    checkpoint: tf.train.Checkpoint,
    variables: Sequence[tf.Variable],
    *,
    partly: bool = False,
) -> bool:
    """Reads the latest checkpoint of a folder on rank 0, and gives it to all ranks.

    Args:
        folder: of checkpoints.
        mesh: the ranks.
        checkpoint: of the variables.
        variables: what it holds.
        partly: it may hold more.

    Returns:
        Whether there is one.

    Raises:
        TrainedError: on all ranks; it is damaged, or does not hold these variables.
    """
    latest, problem = None, ""
    if mesh.rank == 0:
        latest = tf.train.latest_checkpoint(str(folder))
        named = tf.train.get_checkpoint_state(str(folder))
        try:
            if latest is not None:
                status = checkpoint.restore(latest).assert_existing_objects_matched()
                if partly:
                    status.expect_partial()
            elif named is not None:
                problem = f"the files of {named.model_checkpoint_path} are missing"
        except (ValueError, AssertionError) as error:
            problem = f"it is of another network or optimiser: {error}"
        except tf.errors.OpError as error:
            problem = f"it is damaged: {error.message}"
    state = tf.constant([int(latest is not None), int(bool(problem))])
    there, bad = mesh.world.broadcast(state).numpy()
    if bad:
        raise TrainedError(f"the latest checkpoint in {folder} cannot be used; {problem}")
    if there:
        for variable in variables:
            variable.assign(mesh.world.broadcast(variable))
    return bool(there)
