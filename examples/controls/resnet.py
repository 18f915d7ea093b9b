"""Trains ResNet50V2 or ResNet152V2 on images of 128 x 128 pixels in ten classes.

    mpirun -n 2 python examples/controls/resnet.py --depth 50 --epochs 2

The networks are Keras's (He et al. 2016, arXiv:1603.05027), with first weights drawn from a seed.
Images are CIFAR-10's, from a folder with its Python files, or textures that are made from a seed.
"""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path
from typing import TYPE_CHECKING

import harness
import numpy as np
from samples import Data, Samples

from flowpm_dist.io.errors import UserError

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

CLASSES, MADE_SAMPLES = 10, 2048
MOMENTUM = 0.9
CIFAR_SIDE = 32
TRAINING_FILES, TEST_FILES = [f"data_batch_{n}" for n in range(1, 6)], ["test_batch"]


def made_data(side: int, samples: int, seed: int) -> Data:
    """Returns images of stripes. A class has its direction and its width of the stripes.

    Phase, colours and noise differ between the images of a class.

    Args:
        side: width and height [pixels].
        samples: number of training samples; a quarter as many are held out.
        seed: seed of the images.
    """
    y, x = np.mgrid[:side, :side].astype(np.float32) / side

    def image(label: int, draws: np.random.Generator) -> np.ndarray:
        angle, waves = np.pi * (label % 5) / 5, (4, 9)[label // 5]
        phase = 2 * np.pi * draws.random()
        stripes = np.sin(2 * np.pi * waves * (x * np.cos(angle) + y * np.sin(angle)) + phase)
        colour, mean = draws.uniform(20, 60, 3), draws.uniform(80, 175, 3)
        noise = 25 * draws.standard_normal((side, side, 3), np.float32)
        return np.clip(mean + colour * stripes[..., np.newaxis] + noise, 0, 255).astype(np.uint8)

    def split(number: int, count: int) -> Samples:
        labels = np.arange(count, dtype=np.int32) % CLASSES
        draws = [np.random.default_rng([seed, number, sample]) for sample in range(count)]
        return Samples(np.stack([*map(image, labels, draws)]), labels)

    return Data(split(1, samples), split(2, max(1, samples // 4)))


def read_data(folder: Path, samples: int | None) -> Data:
    """Returns the images of CIFAR-10's Python files, which are pickles: use only your own.

    Args:
        folder: folder with the files.
        samples: the most training samples, and four times the most held-out ones; None for all.

    Raises:
        UserError: a file is missing or none of these.
    """

    def split(names: list[str], most: int | None) -> Samples:
        images, labels = [], []
        for name in names:
            try:
                with (folder / name).open("rb") as file:
                    batch = pickle.load(file, encoding="bytes")
                shape = (-1, 3, CIFAR_SIDE, CIFAR_SIDE)
                images.append(np.asarray(batch[b"data"], np.uint8).reshape(shape))
                labels.append(np.asarray(batch[b"labels"], np.int32))
            except (OSError, pickle.UnpicklingError, EOFError, KeyError, ValueError) as error:
                raise UserError(
                    f"--data: {folder / name} is no file of CIFAR-10 for Python: {error!r}"
                ) from error
        x = np.concatenate(images).transpose(0, 2, 3, 1)
        return Samples(np.ascontiguousarray(x[:most]), np.concatenate(labels)[:most])

    held_out = samples and max(1, samples // 4)
    return Data(split(TRAINING_FILES, samples), split(TEST_FILES, held_out))


def load(options: argparse.Namespace) -> Data:
    """Returns the images as uint8; images of CIFAR-10 have 32 x 32 pixels."""
    if options.data is not None:
        return read_data(options.data, options.samples)
    return made_data(options.image_size, options.samples or MADE_SAMPLES, options.seed)


def prepared(images: np.ndarray, side: int) -> tf.Tensor:
    """Returns images of the wanted size, with values from -1 to 1."""
    import tensorflow as tf

    images = tf.cast(images, tf.float32) / 127.5 - 1
    return images if images.shape[1] == side else tf.image.resize(images, (side, side))


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    example = "python examples/controls/resnet.py --depth 50 --epochs 2 --output resnet50"
    defaults = {"batch": 32, "rate": 0.01, "epochs": 10, "samples": MADE_SAMPLES}
    parser = harness.options_parser("resnet", __doc__.splitlines()[0], example, **defaults)
    parser.add_argument(
        "--depth", type=int, choices=(50, 152), default=50, help="layers (default: %(default)s)"
    )
    pixels, text = harness.whole_above(CIFAR_SIDE - 1), "pixels of a side (default: %(default)s)"
    parser.add_argument("--image-size", type=pixels, default=128, help=text)
    return parser


def main(arguments: list[str] | None = None) -> keras.Model:
    """Trains a ResNet as the command line says; returns it."""
    options = parser().parse_args(arguments)

    def network() -> keras.Model:
        import keras

        kinds = {50: keras.applications.ResNet50V2, 152: keras.applications.ResNet152V2}
        shape = (options.image_size, options.image_size, 3)
        return kinds[options.depth](weights=None, input_shape=shape, classes=CLASSES)

    def optimizer(rate: float) -> keras.optimizers.Optimizer:
        import keras

        return keras.optimizers.SGD(rate, momentum=MOMENTUM)

    control = harness.Control(
        load=load,
        prepare=lambda images: prepared(images, options.image_size),
        model=network,
        optimizer=optimizer,
    )
    return control.run(options)


if __name__ == "__main__":
    main()
