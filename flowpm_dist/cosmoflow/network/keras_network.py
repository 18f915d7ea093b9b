"""A Keras model as a network, on replicas that each hold whole volumes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmoflow.network import losses
from flowpm_dist.cosmoflow.network.layer_graph import INPUTS
from flowpm_dist.cosmoflow.network.network import Network, Precision
from flowpm_dist.cosmoflow.planning.declarations import KerasDeclaration
from flowpm_dist.cosmoflow.volumes.priors import hashed
from flowpm_dist.io.errors import UserError
from flowpm_dist.options import python_object
from meshimpl.process_mesh import ProcessMesh
from meshimpl.stopwatch import Stopwatch

if TYPE_CHECKING:
    import keras

POLICIES = {"float32": "float32", "float64": "float64", "bfloat16": "mixed_bfloat16"}
"""Keras's names of the precisions."""


class ModelError(UserError):
    """A function of a user's own does not return a Keras model that can serve."""


class KerasNetwork(tf.Module):
    """A Keras model that is trained and asked like a `Network`, with weights equal on all ranks.

    Each replica is one rank, which works on its own volumes. Gradients are added over the replicas,
    and what layers keep besides, such as the moving averages of batch normalisation, is averaged.
    So a training is the same on any number of replicas, unless layers mix the volumes of a batch or
    draw random numbers: those see the volumes of their own replica. The random numbers of a step
    follow from its seed and from the numbers of its samples.

    Args:
        name: of a function "package.module:function" that is given the shape of the input,
            (width, width, width, channels) or, of maps, (width, width, channels), and the number
            of outputs, and returns a `keras.Model` from batches of such to [batch, outputs].
        mesh: the ranks, of the axis `replica` alone, or others of size 1.
        width, batch, parameters, channels, loss, input, within: see `Network`.
        precision: Keras's policy while the model is made: "bfloat16" is "mixed_bfloat16".
        flat: whether volumes are maps, of one layer [batch, width, width, 1] or with channels.
        seed: of the weights.

    Raises:
        ModelError: there is no such function, or it returns no such model.
        ValueError: a batch that the replicas do not divide, or volumes that would be split.
    """

    centre = False

    def __init__(
        self,
        name: str,
        mesh: ProcessMesh,
        *,
        width: int,
        batch: int,
        parameters: int = 3,
        channels: int = 1,
        loss: str = "likelihood",
        input: str = "log1p",
        precision: Precision = "float32",
        within: float | None = None,
        flat: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(name="keras_network")
        self.declaration = KerasDeclaration(name)
        self.mesh, self.width, self.batch, self.channels = mesh, width, batch, channels
        self.loss, self.parameters, self.within = loss, parameters, within
        self.outputs = losses.outputs_of(loss, parameters)
        self._check_mesh()
        self._input = INPUTS[input]
        self._dtype = tf.float64 if precision == "float64" else tf.float32
        self.stopwatch = Stopwatch()
        self.flat = flat
        shape = (*((width,) * (2 if flat else 3)), channels)
        self.model = made_model(name, shape, self.outputs, precision, seed)
        kept, others = self.model.non_trainable_weights, self.model.non_trainable_variables
        self.weights = [weight.value for weight in self.model.trainable_weights]
        self._statistics = [weight.value for weight in kept]
        known = {id(weight) for weight in kept}
        self._generators = [v.value for v in others if id(v) not in known and "int" in v.dtype]

    def _check_mesh(self) -> None:
        replicas = self.mesh.axis_size("replica")
        if self.batch % replicas:
            raise ValueError(
                f"a batch of {self.batch} volumes does not divide over replica:{replicas}"
            )
        if self.mesh.size > replicas:
            raise ValueError(
                f"{self.declaration.name} {self.declaration.whole_because}, so that its volumes "
                f"cannot be split: use the mesh replica:{self.mesh.size}, or sc18-periodic"
            )

    @property
    def state(self) -> list[tf.Variable]:
        """The variables of a checkpoint: the weights, and what layers keep besides."""
        return [*self.weights, *self._statistics]

    @property
    def saved(self) -> list[tf.Variable]:
        """The variables that `on_whole_volumes` reads."""
        return [variable.value for variable in self.model.variables]

    def _prepared(self, volume: tf.Tensor) -> tf.Tensor:
        x = self._input(tf.cast(volume, self._dtype))
        x = x if self.channels > 1 else x[..., tf.newaxis]
        return tf.squeeze(x, 3) if self.flat else x

    def _outputs(self, volume: tf.Tensor, *, training: bool) -> tf.Tensor:
        outputs = tf.cast(self.model(self._prepared(volume), training=training), self._dtype)
        return losses.kept_within(outputs, self.parameters, bounded=False, within=self.within)

    @functools.cached_property
    def _gradients(self) -> Callable[..., Any]:
        loss_of = losses.loss_function(self.loss)

        def gradients(volume: tf.Tensor, target: tf.Tensor) -> tuple[Any, ...]:
            with tf.GradientTape() as tape:
                outputs = self._outputs(volume, training=True)
                loss = tf.reduce_sum(loss_of(target, outputs)) / self.batch
                penalties = [tf.cast(penalty, loss.dtype) for penalty in self.model.losses]
                loss += sum(penalties) / self._replicas.size
            found = tape.gradient(loss, self.weights, unconnected_gradients="zero")
            return loss, outputs, [tf.convert_to_tensor(g) for g in found]

        return tf.function(gradients, autograph=False)

    @functools.cached_property
    def _predict(self) -> Callable[..., tf.Tensor]:
        return tf.function(functools.partial(self._outputs, training=False), autograph=False)

    @property
    def _replicas(self) -> Any:
        return self.mesh.communicator(*(("replica",) if "replica" in self.mesh.names else ()))

    def step(
        self, volume: Any, target: Any, sample: Any, seed: int
    ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        """Returns loss and gradients of one batch, see `Network.step`. On all ranks together."""
        for number, generator in enumerate(self._generators):
            drawn = np.random.default_rng([seed, number, *map(int, sample)])
            state = drawn.integers(2**31, size=tuple(generator.shape))
            generator.assign(tf.cast(state, generator.dtype))
        target = tf.cast(target, self._dtype)
        loss, outputs, gradients = self._gradients(tf.convert_to_tensor(volume), target)
        count = self._replicas.size
        # A counter of calls is the same on all replicas.
        moving = [statistic for statistic in self._statistics if statistic.dtype.is_floating]
        averaged = [statistic / count for statistic in moving]
        loss, *summed = self._summed([loss, *gradients, *averaged])
        for statistic, mean in zip(moving, summed[len(gradients) :], strict=True):
            statistic.assign(mean)
        return loss, outputs, summed[: len(gradients)]

    def _summed(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns sums over the replicas, in one message."""
        if self._replicas.size == 1:
            return list(tensors)
        begin = tf.timestamp()
        flat = tf.concat([tf.reshape(tf.cast(t, self._dtype), [-1]) for t in tensors], axis=0)
        parts = tf.split(self._replicas.allreduce(flat), [t.shape.num_elements() for t in tensors])
        self.stopwatch.add("allreduce", begin, tf.timestamp())
        pairs = zip(parts, tensors, strict=True)
        return [tf.cast(tf.reshape(part, t.shape), t.dtype) for part, t in pairs]

    def predict(self, volume: Any) -> tf.Tensor:
        """Returns this rank's outputs of a batch [batch, outputs]; layers do not train."""
        return self._predict(tf.convert_to_tensor(volume))

    def on_whole_volumes(self, volumes: tf.Tensor) -> tf.Tensor:
        """Returns the outputs of volumes in TensorFlow that can be traced, see `Network`."""
        return self._outputs(volumes, training=False)

    def calibrate(self, volumes: Iterable[Any]) -> None:
        """Does nothing: the scale of its features is the model's own."""

    def recentre(self, volumes: Iterable[Any]) -> None:
        """Does nothing, as `calibrate`."""

    def whole_outputs(self, outputs: tf.Tensor) -> np.ndarray:
        """Returns the outputs of the whole batch, see `Network.whole_outputs`."""
        return self._replicas.allgather(outputs).numpy()

    def broadcast_weights(self) -> None:
        """Gives every rank the weights of rank 0."""
        for variable in self.state:
            variable.assign(self.mesh.world.broadcast(variable))


AnyNetwork = Network | KerasNetwork
"""What a training may train."""


def made_model(
    name: str, shape: tuple[int, ...], outputs: int, precision: Precision, seed: int
) -> keras.Model:
    """Returns the Keras model of a function, with first weights that follow from a seed.

    Args:
        name: of the function, "package.module:function".
        shape: of the input, without the batch.
        outputs: number of them.
        precision: see `KerasNetwork`.
        seed: also of Python's, NumPy's and TensorFlow's random numbers, while the model is made.

    Raises:
        ModelError: see `KerasNetwork`.
    """
    import keras

    if keras.backend.backend() != "tensorflow":
        raise ModelError(
            f"the backend of Keras is {keras.backend.backend()}: set KERAS_BACKEND=tensorflow"
        )
    try:
        function = python_object(name)
    except Exception as error:  # whatever a user's module raises
        raise ModelError(f"network.name = {name!r}: {_reason(error)}") from error
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(POLICIES[precision])
    keras.utils.set_random_seed(hashed([seed]) % 2**32)
    try:
        model = function(shape, outputs)
    except Exception as error:  # whatever a user's function raises
        raise ModelError(
            f"network.name = {name!r} was called with {shape} and {outputs}: {_reason(error)}"
        ) from error
    finally:
        keras.config.set_dtype_policy(before)
    _check_model(model, name, shape, outputs)
    return model


def _check_model(model: Any, name: str, shape: tuple[int, ...], outputs: int) -> None:
    import keras

    if not isinstance(model, keras.Model):
        raise ModelError(f"{name} returns {type(model).__name__}: it must return a keras.Model")
    wanted = (None, outputs)
    try:
        found = tuple(model.compute_output_shape((None, *shape)))
        if not model.built:
            model.build((None, *shape))
    except Exception as error:  # whatever layers raise for a shape that they cannot take
        raise ModelError(f"{name}: its model cannot take volumes {shape}: {error}") from error
    if found != wanted:
        raise ModelError(f"{name}: its model gives {found} for volumes {shape}; wanted is {wanted}")


def _reason(error: Exception) -> str:
    return f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
