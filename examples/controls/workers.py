"""The workers of a control: ranks under Horovod, or replicas of MirroredStrategy.

A worker computes with its own part of a step's samples; the gradients are averaged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flowpm_dist.io.errors import UserError
from meshimpl import launch

if TYPE_CHECKING:
    import tensorflow as tf


class Ranks:
    """Workers that are the ranks of a job under Horovod. One rank imports neither it nor MPI."""

    def __init__(self) -> None:
        here = launch.detect()
        self.count, self.mine = here.size, [here.rank]
        self.is_first, self.is_first_on_host = here.rank == 0, here.local_rank == 0
        self.hvd: Any = None
        if self.count > 1:
            from meshimpl.process_mesh import place_devices

            launch.check_launcher()
            launch.set_horovod_defaults()
            import horovod.tensorflow as hvd

            self.hvd = hvd
            hvd.init()
            launch.abort_on_error()
            place_devices(shared=not hvd.nccl_built())

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context in which models are made."""
        return contextlib.nullcontext()

    def gradients(self, tape: tf.GradientTape, loss: tf.Tensor, weights: Sequence[Any]) -> Any:
        """Returns the gradients for this worker's optimizer, which are the mean over all."""
        tape = tape if self.hvd is None else self.hvd.DistributedGradientTape(tape)
        return tape.gradient(loss, weights)

    def mean(self, values: tf.Tensor) -> tf.Tensor:
        """Returns the mean over the workers, within a step."""
        return values if self.hvd is None else self.hvd.allreduce(values, name="metrics")

    def compiled(self, step: Callable[..., tf.Tensor]) -> Callable[..., list[np.ndarray]]:
        """Returns a step as a graph: from the arguments of each worker here to their results."""
        import tensorflow as tf

        graph = tf.function(step, autograph=False)
        return lambda parts: [graph(*map(tf.convert_to_tensor, parts[0])).numpy()]

    def broadcast(self, variables: Sequence[Any]) -> None:
        """Gives all workers the values of the first one."""
        if self.hvd is not None:
            self.hvd.broadcast_variables(variables, root_rank=0)

    def total(self, values: np.ndarray) -> np.ndarray:
        """Returns the sum over the processes."""
        if self.hvd is None:
            return values
        return self.hvd.allreduce(values, op=self.hvd.Sum, name="total").numpy()

    def gather(self, values: np.ndarray) -> np.ndarray:
        """Returns the values of all processes, [processes, values]."""
        return self.hvd.allgather(values[np.newaxis], name="gather").numpy()


class Replicas(Ranks):
    """Workers that are replicas of MirroredStrategy in this process.

    Args:
        count: their number; None for the host's GPUs, or two where it has none.

    Raises:
        UserError: there are several ranks, or fewer GPUs than replicas.
    """

    def __init__(self, count: int | None) -> None:
        import tensorflow as tf

        if launch.detect().size > 1:
            raise UserError("--strategy mirrored runs in one process: start it without mpirun")
        super().__init__()
        devices, kind = tf.config.list_physical_devices("GPU"), "GPU"
        self.count = count or len(devices) or 2
        if not devices:
            kind, (cores, *_) = "CPU", tf.config.list_physical_devices("CPU")
            logical = [tf.config.LogicalDeviceConfiguration() for _ in range(self.count)]
            tf.config.set_logical_device_configuration(cores, logical)
        elif len(devices) < self.count:
            raise UserError(f"--replicas {self.count}: this host has {len(devices)} GPUs")
        self.mine = list(range(self.count))
        self.strategy = tf.distribute.MirroredStrategy([f"/{kind}:{n}" for n in self.mine])

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context in which models are made."""
        return self.strategy.scope()

    def gradients(self, tape: tf.GradientTape, loss: tf.Tensor, weights: Sequence[Any]) -> Any:
        """Returns this worker's part of the mean gradients; Keras's optimizer adds the parts."""
        return [gradient / self.count for gradient in tape.gradient(loss, weights)]

    def mean(self, values: tf.Tensor) -> tf.Tensor:
        """Returns the mean over the workers, within a step."""
        import tensorflow as tf

        return tf.distribute.get_replica_context().all_reduce("MEAN", values)

    def compiled(self, step: Callable[..., tf.Tensor]) -> Callable[..., list[np.ndarray]]:
        """Returns a step as a graph: from the arguments of each worker here to their results."""
        import tensorflow as tf

        strategy = self.strategy
        graph = tf.function(lambda *words: strategy.run(step, args=words), autograph=False)

        def call(parts: Sequence[tuple[np.ndarray, ...]]) -> list[np.ndarray]:
            columns = [
                [tf.convert_to_tensor(part) for part in column]
                for column in zip(*parts, strict=True)
            ]
            words = [
                strategy.experimental_distribute_values_from_function(
                    lambda worker, column=column: column[worker.replica_id_in_sync_group]
                )
                for column in columns
            ]
            return [x.numpy() for x in strategy.experimental_local_results(graph(*words))]

        return call
