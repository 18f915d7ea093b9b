"""Keras models of maps of weak lensing, to be named in run files."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import keras

CHANNELS = (32, 64, 128, 128)
"""Of pairs of convolutions, of which there is one for each halving down to at least 4 pixels."""


def convolutions(shape: tuple[int, ...], outputs: int) -> keras.Model:
    """Returns pairs of convolutions of 3 x 3 pixels, with means over 2 x 2, and two dense layers.

    Nothing mixes the maps of a batch or draws random numbers, so that a training is the same on any
    number of ranks.

    Args:
        shape: of the maps, (pixels, pixels, sources).
        outputs: number of them.
    """
    import keras
    from keras import layers

    inputs = keras.Input(shape)
    x = inputs
    for channels in CHANNELS:
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
