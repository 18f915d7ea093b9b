"""Keras models that run files of tests name, as "keras_models:small"."""

import keras
from keras import layers


def small(shape, outputs):
    """Convolutions and dense layers; deterministic."""
    return keras.Sequential(
        [
            keras.Input(shape),
            layers.Conv3D(4, 3, activation="relu"),
            layers.Conv3D(6, 2, strides=2, activation="relu"),
            layers.GlobalAveragePooling3D(),
            layers.Dense(8, activation="relu"),
            layers.Dense(outputs),
        ]
    )


def with_all(shape, outputs):
    """What layers keep and draw besides: statistics, counts, dropout, a penalty of the weights."""
    volume = keras.Input(shape)
    x = layers.Normalization()(volume)  # it counts in whole numbers
    x = layers.Conv3D(4, 3, activation="relu", kernel_regularizer="l2")(x)
    x = layers.BatchNormalization()(x)
    x = layers.GlobalAveragePooling3D()(x)
    x = layers.Dropout(0.3)(x)
    return keras.Model(volume, layers.Dense(outputs)(x))


def no_model(shape, outputs):
    return lambda volume: volume


def too_many(shape, outputs):
    return small(shape, outputs + 1)


def failing(shape, outputs):
    raise RuntimeError("no layers today")
