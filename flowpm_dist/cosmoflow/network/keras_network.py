"""A Keras model as a network, on replicas that each hold whole volumes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmoflow.network.layers import INPUTS, LOSSES, kept_within
from flowpm_dist.cosmoflow.network.network import BaseNetwork
from flowpm_dist.cosmoflow.planning.declarations import declaration
from flowpm_dist.cosmoflow.volumes.draws import hashed
from flowpm_dist.io.errors import UserError
from flowpm_dist.options import in_unit, python_object
from meshimpl.process_mesh import ProcessMesh

if TYPE_CHECKING:
    import keras

POLICIES = {"float32": "float32", "float64": "float64", "bfloat16": "mixed_bfloat16"}
"""Keras's names of the precisions."""


class ModelError(UserError):
    """A user's function does not return a Keras model that a training can use."""


class KerasNetwork(BaseNetwork):
    """A Keras model that is trained and used like a `Network`, with weights equal on all ranks.

    Each replica is one rank, which works on its own volumes. Gradients are added over the replicas;
    other variables of layers, such as the moving averages of batch normalisation, are averaged. So
    a training is the same on any number of replicas, unless layers mix the volumes of a batch or
    draw random numbers: such layers see only the volumes of their own replica. The random numbers
    of a step follow from its seed and from the numbers of its samples.

    Args:
        name: a function "package.module:function". It is given the shape of the input,
            (width, width, width, channels) or, of maps, (width, width, channels), and the number
            of outputs. It returns a `keras.Model` from batches of such to [batch, outputs].
        mesh: the ranks, of the axis `replica` alone, or others of size 1.
        flat: whether volumes are maps, of one layer [batch, width, width, 1] or with channels.
        seed: seed of the weights.
        options: width, batch, parameters, channels and within of `BaseNetwork`, and loss, input and
            precision of `NetworkOptions`. The precision is Keras's policy while the model is made.

    Raises:
        ModelError: there is no such function, or it returns no such model.
        ValueError: a batch that the replicas do not divide, or volumes that would be split.
    """

    def __init__(
        self, name: str, mesh: ProcessMesh, *, flat: bool = False, seed: int = 0, **options: Any
    ) -> None:
        super().__init__(declaration(name), mesh, **options)
        self._check_split(mesh.size // mesh.axis_size("replica"))
        self.flat = flat
        shape = (*((self.width,) * (2 if flat else 3)), self.channels)
        self.model = made_model(name, shape, self.outputs, self.options.precision, seed)
        statistics, others = self.model.non_trainable_weights, self.model.non_trainable_variables
        self.weights = [weight.value for weight in self.model.trainable_weights]
        self._statistics = [weight.value for weight in statistics]
        known = {id(weight) for weight in statistics}
        self._generators = [v.value for v in others if id(v) not in known and "int" in v.dtype]

    @property
    def state(self) -> list[tf.Variable]:
        """The variables of a checkpoint: the weights and other variables of layers."""
        return [*self.weights, *self._statistics]

    @property
    def saved(self) -> list[tf.Variable]:
        """The variables that `on_whole_volumes` reads."""
        return [variable.value for variable in self.model.variables]

    def _prepared(self, volume: tf.Tensor) -> tf.Tensor:
        x = INPUTS[self.input](tf.cast(volume, self.master))
        x = x if self.channels > 1 else x[..., tf.newaxis]
        return tf.squeeze(x, 3) if self.flat else x

    def _outputs(self, volume: tf.Tensor, *, training: bool) -> tf.Tensor:
        outputs = tf.cast(self.model(self._prepared(volume), training=training), self.master)
        return kept_within(outputs, self.parameters, bounded=False, within=self.within)

    @functools.cached_property
    def _gradients(self) -> Callable[..., Any]:
        loss_of = LOSSES[self.loss]

        def gradients(volume: tf.Tensor, target: tf.Tensor) -> tuple[Any, ...]:
            with tf.GradientTape() as tape:
                outputs = self._outputs(volume, training=True)
                loss = tf.reduce_sum(loss_of(target, outputs)) / self.batch
                penalties = [tf.cast(penalty, loss.dtype) for penalty in self.model.losses]
                loss += sum(penalties) / self._replicas.size
            by_weight = tape.gradient(loss, self.weights, unconnected_gradients="zero")
            return loss, outputs, [tf.convert_to_tensor(g) for g in by_weight]

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
        """Returns loss and gradients of one batch, see `BaseNetwork.step`."""
        volume, target = in_unit("volume", volume), in_unit("target", target)
        for number, generator in enumerate(self._generators):
            drawn = np.random.default_rng([seed, number, *map(int, sample)])
            state = drawn.integers(2**31, size=tuple(generator.shape))
            generator.assign(tf.cast(state, generator.dtype))
        target = tf.cast(target, self.master)
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
        flat = tf.concat([tf.reshape(tf.cast(t, self.master), [-1]) for t in tensors], axis=0)
        parts = tf.split(self._replicas.allreduce(flat), [t.shape.num_elements() for t in tensors])
        self.stopwatch.add("allreduce", begin, tf.timestamp())
        pairs = zip(parts, tensors, strict=True)
        return [tf.cast(tf.reshape(part, t.shape), t.dtype) for part, t in pairs]

    def predict(self, volume: Any) -> tf.Tensor:
        """Returns this rank's outputs of a batch [batch, outputs]; layers do not train."""
        return self._predict(tf.convert_to_tensor(in_unit("volume", volume)))

    def on_whole_volumes(self, volumes: tf.Tensor) -> tf.Tensor:
        """Returns the outputs of whole volumes, see `BaseNetwork.on_whole_volumes`."""
        return self._outputs(volumes, training=False)


def made_model(
    name: str, shape: tuple[int, ...], outputs: int, precision: str, seed: int
) -> keras.Model:
    """Returns the Keras model of a function, with first weights that follow from a seed.

    Args:
        name: the function, "package.module:function".
        shape: shape of the input, without the batch.
        outputs: number of outputs.
        precision: see `KerasNetwork`.
        seed: seed of the weights, and of Python's, NumPy's and TensorFlow's random numbers while
            the model is made.

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
    if not isinstance(model, keras.Model):
        raise ModelError(f"{name} returns {type(model).__name__}: it must return a keras.Model")
    wanted = (None, outputs)
    try:
        output_shape = tuple(model.compute_output_shape((None, *shape)))
        if not model.built:
            model.build((None, *shape))
    except Exception as error:  # whatever layers raise for a shape that they cannot take
        raise ModelError(f"{name}: its model cannot take volumes {shape}: {error}") from error
    if output_shape != wanted:
        gives = f"its model gives {output_shape} for volumes {shape}"
        raise ModelError(f"{name}: {gives}; wanted is {wanted}")
    return model


def _reason(error: Exception) -> str:
    return f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


MAP_CHANNELS = (32, 64, 128, 128)
"""Channels of pairs of convolutions: one pair for each halving, down to at least 4 pixels."""


def map_convolutions(shape: tuple[int, ...], outputs: int) -> keras.Model:
    """Returns pairs of convolutions of 3 x 3 pixels, with means over 2 x 2, and two dense layers.

    Nothing mixes the maps of a batch or draws random numbers, so that a training is the same on any
    number of ranks.

    Args:
        shape: shape of the maps, (pixels, pixels, sources).
        outputs: number of outputs.
    """
    import keras
    from keras import layers

    inputs = keras.Input(shape)
    x = inputs
    for channels in MAP_CHANNELS:
        for _ in range(2):
            x = layers.Conv2D(
                channels, 3, padding="same", activation="silu", kernel_initializer="he_normal"
            )(x)
        if min(x.shape[1:3]) < 8:
            break
        x = layers.AveragePooling2D(2)(x)
    x = layers.Flatten()(x)
    x = layers.Dense(128, activation="silu", kernel_initializer="he_normal")(x)
    return keras.Model(inputs, layers.Dense(outputs)(x))
