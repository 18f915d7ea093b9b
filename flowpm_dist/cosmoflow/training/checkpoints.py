"""Checkpoints of a training: weights, optimiser, step, and the best validation so far.

Everything else follows from the step.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmoflow.network.optimisers import Optimiser
from flowpm_dist.cosmoflow.planning.folder import BEST, TrainedError, TrainingFolder
from flowpm_dist.io.files import WriteError, write_text
from flowpm_dist.jobs.checkpoints import CheckpointStore
from flowpm_dist.jobs.session import on_root
from meshimpl.process_mesh import ProcessMesh

UNIT = TrainingFolder.unit
OTHER = "it belongs to another network or optimiser"


class BestSoFar(tf.Module):
    """The best validation of a training so far, which its checkpoints keep.

    Attributes:
        loss: the least validation loss, a float64 variable; infinite before the first.
        step: the number of steps after which it was found, an int64 variable.
        waited: the number of validations since then, an int64 variable.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loss = tf.Variable(np.inf, dtype=tf.float64, trainable=False)
        self.step = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.waited = tf.Variable(0, dtype=tf.int64, trainable=False)


class Checkpoints:
    """The latest checkpoints of a training, and its best weights, written by rank 0.

    Weights and moments are whole on every rank, so that a checkpoint can be read on a mesh of any
    shape.

    Args:
        folder: folder of the checkpoints.
        mesh: the ranks.
        state: variables of the network.
        optimiser: the optimiser, whose slots have been built.
        keep: number of checkpoints to keep.
        best: the folder for the weights with the least validation loss; None to keep none.

    Attributes:
        best: the best validation so far.
    """

    def __init__(
        self,
        folder: Path,
        mesh: ProcessMesh,
        state: Sequence[tf.Variable],
        optimiser: Optimiser,
        keep: int,
        best: Path | None = None,
    ) -> None:
        self._mesh, self._folder, self._keep, self._best_folder = mesh, folder, keep, best
        self.best = BestSoFar()
        self._step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
        slots = [slot for name in sorted(optimiser.slots) for slot in optimiser.slots[name]]
        known = self.best.loss, self.best.step, self.best.waited
        self._variables = [self._step, optimiser.iterations, *known, *state, *slots]
        self._checkpoint = tf.train.Checkpoint(
            weights=list(state), optimiser=optimiser, step=self._step, best=self.best
        )
        self._best_weights = tf.train.Checkpoint(
            weights=list(state), step=self._step, loss=self.best.loss
        )

    def save(self, step: int) -> None:
        """Writes a checkpoint after `step` steps. On all ranks together.

        All ranks continue with rank 0's values. The ranks stay equal, and equal to a resumed
        training, even if processors of different kinds round differently.

        Raises:
            WriteError: on rank 0, if it cannot be written; earlier checkpoints are unchanged.
        """
        self._step.assign(step)
        for variable in self._variables:
            variable.assign(self._mesh.world.broadcast(variable))
        self._write(self._checkpoint, self._folder, self._keep)

    def validated(self, loss: float, step: int) -> None:
        """Adds a validation loss, and writes the weights if it is the best. On all ranks.

        Args:
            loss: the same on all ranks.
            step: number of steps made.

        Raises:
            WriteError: see `save`.
        """
        if not loss < float(self.best.loss):
            self.best.waited.assign_add(1)
            return
        self.best.loss.assign(loss)
        self.best.step.assign(step)
        self.best.waited.assign(0)
        if self._best_folder is not None:
            self._step.assign(step)
            self._write(self._best_weights, self._best_folder, keep=1)

    def _write(self, checkpoint: tf.train.Checkpoint, folder: Path, keep: int) -> None:
        if self._mesh.rank == 0:
            step = int(self._step)
            name = f"{UNIT}-{step}"
            try:
                with CheckpointStore(folder, UNIT).written(step, keep) as aside:
                    checkpoint.write(aside / name)
            except tf.errors.OpError as error:
                raise WriteError.of(folder / name, error) from error
            # For `tf.train.latest_checkpoint`.
            write_text(folder / "checkpoint", f'model_checkpoint_path: "{name}"\n')
        self._mesh.barrier()

    def restore(self) -> Restored | None:
        """Restores the latest undamaged checkpoint on all ranks; None if there is no checkpoint.

        Raises:
            TrainedError: on all ranks; all checkpoints are damaged, or the latest belongs to
                another network or optimiser.
        """
        return _restore_latest(
            self._folder, self._mesh, self._checkpoint, self._variables, earlier=True
        )


def restore_weights(folder: Path, mesh: ProcessMesh, weights: Sequence[tf.Variable]) -> int:
    """Restores the weights alone from the latest checkpoint of a folder, on all ranks.

    Returns:
        The number of steps before it was written.

    Raises:
        TrainedError: on all ranks; it is damaged, missing, or belongs to another network.
    """
    step = tf.Variable(0, dtype=tf.int64, trainable=False)
    checkpoint = tf.train.Checkpoint(weights=list(weights), step=step)
    restored = _restore_latest(folder, mesh, checkpoint, [step, *weights], earlier=False)
    if restored is None:
        raise TrainedError(f"{folder} holds no checkpoint")
    return restored.step


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was restored.

    Attributes:
        step: the number of steps before it was written.
        note: on rank 0, a sentence about later checkpoints that are damaged; else empty.
    """

    step: int
    note: str


def _restore_latest(
    folder: Path,
    mesh: ProcessMesh,
    checkpoint: tf.train.Checkpoint,
    variables: Sequence[tf.Variable],
    *,
    earlier: bool,
) -> Restored | None:
    """Reads the latest checkpoint of a folder on rank 0, and gives it to all ranks.

    Args:
        folder: folder of checkpoints.
        mesh: the ranks.
        checkpoint: the object with the variables; files in the folder may hold more of them.
        variables: its variables; the first is the number of steps.
        earlier: whether to restore an earlier checkpoint if later ones are damaged.

    Returns:
        None if there is no checkpoint.

    Raises:
        TrainedError: on all ranks; the checkpoint is damaged, or lacks these variables.
    """
    read = functools.partial(_read, folder, checkpoint, earlier=earlier)
    try:
        note = on_root(mesh, read, TrainedError)
    except TrainedError as error:
        # TensorFlow would list each variable that it has not restored.
        tf.get_logger().setLevel("ERROR")
        raise TrainedError(f"the latest checkpoint in {folder} cannot be used: {error}") from None
    if note is None:
        return None
    for variable in variables:
        variable.assign(mesh.world.broadcast(variable))
    return Restored(int(variables[0]), "" if mesh.rank else note)


def _read(folder: Path, checkpoint: tf.train.Checkpoint, *, earlier: bool) -> str | None:
    """Restores a checkpoint; returns what was damaged, or None if there is no checkpoint."""
    indices, damaged = [*CheckpointStore(folder, UNIT).numbered().values()][::-1], ""
    for path in (index.with_suffix("") for index in indices):
        if reason := _damage(path):
            damaged = damaged or f"{path} is damaged ({reason})"
            continue
        if damaged and not earlier:
            raise TrainedError(
                f"{damaged}; the earlier {path.name} is whole: move the files {indices[0].stem}.* "
                f"away, and flowpm-dist train --resume continues from {path.name}"
            )
        if reason := _misfit(path, checkpoint.weights):
            raise TrainedError(f"{OTHER} ({reason})")
        try:
            status = checkpoint.read(path).expect_partial()
            status.assert_existing_objects_matched()
        except (ValueError, AssertionError) as error:
            reason = str(error).partition("\n")[0]
            raise TrainedError(f"{OTHER} ({reason})") from error
        return f"{damaged}: continuing from {path.name} before it" if damaged else ""
    if damaged:
        advice = "begin anew with --overwrite"
        if folder.name == BEST:
            advice = f"take the last weights (--checkpoint last), or move {folder} away"
        raise TrainedError(f"{damaged}, and no earlier checkpoint is whole: {advice}")
    return None


def _misfit(path: Path, weights: Sequence[tf.Variable]) -> str:
    """Returns how the weights of a checkpoint differ from a network's; empty if they do not."""
    reader = tf.train.load_checkpoint(str(path))
    shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    keys = [f"weights/{n}/.ATTRIBUTES/VARIABLE_VALUE" for n in range(len(weights))]
    count = sum(bool(re.match(r"weights/\d+/", key)) for key in shapes)
    if count != len(weights):
        return f"it holds {count} tensors of weights, the network has {len(weights)}"
    for key, weight in zip(keys, weights, strict=True):
        stored, needed = (tuple(shapes[key]), dtypes[key]), (tuple(weight.shape), weight.dtype)
        if stored != needed:
            theirs, ours = (f"{dtype.name} {list(shape)}" for shape, dtype in (stored, needed))
            name = weight.name.partition(":")[0]
            return f"its {name} is {theirs}, the network's is {ours}"
    return ""


def _damage(path: Path) -> str:
    """Reads all files of a checkpoint; returns what is wrong with them, or an empty text."""
    try:
        reader = tf.train.load_checkpoint(str(path))
        for name in reader.get_variable_to_shape_map():
            reader.get_tensor(name)
    except Exception as error:  # the kind depends on the damage
        return str(error).partition("\n")[0].removesuffix(".") or type(error).__name__
    return ""
