"""Time a step of the small Transformer of train.py, built with Keras, in one process.

    python examples/upstream/keras_transformer.py [--replicas 2] [--steps 60]

The structure, the sizes, the batch and the optimiser's kind are those of `models.transformer`. With
--replicas the batch is split over virtual CPU devices by `tf.distribute.MirroredStrategy`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import tensorflow as tf
from models import CHARACTERS, sequences

BATCH, LENGTH, WIDTH, HEADS, BLOCKS, DROPOUT = 32, 64, 64, 4, 2, 0.1


def parser() -> argparse.ArgumentParser:
    """Returns the options."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--replicas", type=int, default=1)
    options.add_argument("--steps", type=int, default=60)
    return options


def build() -> Any:
    """Returns the model: characters [batch, length] to logits [batch, length, character]."""
    layers = tf.keras.layers
    ids = tf.keras.Input([LENGTH], dtype=tf.int32)
    x = layers.Embedding(CHARACTERS, WIDTH)(ids)
    places = tf.keras.ops.cumsum(tf.keras.ops.ones_like(ids), axis=1) - 1
    x += layers.Embedding(LENGTH, WIDTH)(places)
    x = layers.Dropout(DROPOUT)(x)
    for _ in range(BLOCKS):
        y = layers.RMSNormalization()(x)
        attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, use_bias=False)
        x += layers.Dropout(DROPOUT)(attention(y, y, use_causal_mask=True))
        y = layers.RMSNormalization()(x)
        y = layers.Dense(4 * WIDTH, "relu", use_bias=False)(y)
        x += layers.Dropout(DROPOUT)(layers.Dense(WIDTH, use_bias=False)(y))
    x = layers.Dropout(DROPOUT)(layers.RMSNormalization()(x))
    return tf.keras.Model(ids, layers.Dense(CHARACTERS, use_bias=False)(x))


def main() -> None:
    """Train for some steps, and print the loss and the median time of a step."""
    options = parser().parse_args()
    (cpu,) = tf.config.list_physical_devices("CPU")
    one = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(cpu, [one] * options.replicas)
    devices = [f"CPU:{number}" for number in range(options.replicas)]
    strategy = tf.distribute.MirroredStrategy(devices)
    with strategy.scope():
        model, optimizer = build(), tf.keras.optimizers.Adam(1e-3)
        optimizer.build(model.trainable_variables)

    def of_replica(targets: tf.Tensor) -> tf.Tensor:
        inputs = tf.pad(targets[:, :-1], [[0, 0], [1, 0]])
        with tf.GradientTape() as tape:
            losses = tf.keras.losses.sparse_categorical_crossentropy(
                targets, model(inputs, training=True), from_logits=True
            )
            loss = tf.reduce_sum(losses) / (BATCH * LENGTH)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def step(*targets: tf.Tensor) -> tf.Tensor:
        values = strategy.experimental_distribute_values_from_function(
            lambda context: targets[context.replica_id_in_sync_group]
        )
        return strategy.reduce("SUM", strategy.run(of_replica, [values]), axis=None)

    print(f"{model.count_params():,} weights")
    seconds = []
    for number, (batch,) in zip(range(options.steps), sequences(BATCH, LENGTH), strict=False):
        begin = time.perf_counter()
        loss = float(step(*tf.split(tf.constant(batch), options.replicas)))
        seconds.append(time.perf_counter() - begin)
        if number % 10 == 0:
            print(f"step {number:4}  loss {loss:.4f}", flush=True)
    print(f"{1e3 * statistics.median(seconds[2:]):.1f} ms a step (median)")


if __name__ == "__main__":
    main()
