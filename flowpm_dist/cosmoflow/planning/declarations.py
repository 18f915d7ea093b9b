"""Networks as short declarations, with their shapes and numbers of weights; no TensorFlow.

`sc18` is the network of the CosmoFlow paper (Mathuriya and others 2018, arXiv:1808.04728), and
`mlperf` is the network of MLPerf HPC. `sc18-periodic` is `sc18` with periodic convolutions: the
sides of its volumes stay powers of two, so that volumes can be split over ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from flowpm_dist.options import is_python_name, nearest


@dataclass(frozen=True)
class Convolution:
    """A convolution with `channels` kernels of `kernel` cells a side, bias and activation."""

    channels: int
    kernel: int
    stride: int = 1


@dataclass(frozen=True)
class Pool:
    """The mean or maximum of each cube of `size` cells a side."""

    kind: Literal["average", "max"] = "average"
    size: int = 2


@dataclass(frozen=True)
class Shrink:
    """Averages that reduce a volume of any width to `width` cells a side."""

    width: int


@dataclass(frozen=True)
class Dense:
    """A dense layer of `units` outputs, with bias and activation."""

    units: int


@dataclass(frozen=True)
class Dropout:
    """Sets a share of the features to zero while training, if the run file sets a dropout."""


Layer = Convolution | Pool | Shrink | Dense | Dropout
KINDS = {
    Convolution: "conv", Pool: "pool", Shrink: "shrink", Dense: "dense", Dropout: "dropout",
}  # fmt: skip
"""The first letters of a layer's name, by its kind."""


@dataclass(frozen=True)
class Stage:
    """A layer with the shapes of its input and output.

    Attributes:
        layer: the layer.
        name: the name of the layer, such as "conv1".
        width, channels: the shape of the input volume; a dense layer has `channels` features.
        width_after, channels_after: the same of the output.
        weights: the shape of the kernel; None if the layer has no weights.
    """

    layer: Layer
    name: str
    width: int
    channels: int
    width_after: int
    channels_after: int
    weights: tuple[int, ...] | None

    @property
    def parameters(self) -> int:
        """Number of weights and biases."""
        if self.weights is None:
            return 0
        return math.prod(self.weights) + self.channels_after


@dataclass(frozen=True)
class Declaration:
    """A network of cubic volumes.

    Attributes:
        name: the name of the network in run files.
        layers: the layers in order, without the last dense layer, whose units are the outputs.
        edges: the edges of convolutions: "valid", "periodic" or "zero".
        slope: the slope of the LeakyReLU after each layer but the last.
        bounded: whether the outputs are 1.2 tanh of the last layer, for targets within -1 and 1.
        first_weights: the rule that draws the first weights, see `initial_weights`.
        calibrated: whether features are calibrated unless a run file says otherwise.
    """

    name: str
    layers: tuple[Layer, ...]
    edges: Literal["valid", "periodic", "zero"]
    slope: float
    bounded: bool = False
    first_weights: Literal["he", "glorot"] = "he"
    calibrated: bool = True

    def whole_because(self, ranks: int) -> str:
        """Returns why volumes cannot be split over ranks; an empty text if they can."""
        if not self.is_keras and self.edges != "valid":
            return ""
        reason = "is a Keras model and runs on one rank" if self.is_keras else "has valid edges"
        cannot = f"{self.name} {reason}, so that its volumes cannot be split"
        return f"{cannot}: use sc18-periodic, or the mesh replica:{ranks}"

    @property
    def is_keras(self) -> bool:
        """Whether the network is a Keras model; its layers are unknown until it is made."""
        return is_python_name(self.name)

    def stages(self, width: int, channels: int, outputs: int) -> list[Stage]:
        """Returns every layer with its shapes; for a Keras model, none.

        Args:
            width: cells along each side of the volume.
            channels: channels of the volume.
            outputs: number of the network's outputs.

        Raises:
            ValueError: the volume is too small, or its width is no multiple of a Shrink's.
        """
        stages: list[Stage] = []
        if self.is_keras:
            return stages
        whole, flat = width, False
        counts: Counter[str] = Counter()
        for layer in (*self.layers, Dense(outputs)):
            kind = KINDS[type(layer)]
            counts[kind] += 1
            name = f"{kind}{counts[kind]}"
            after, channels_after = width, channels
            weights: tuple[int, ...] | None = None
            if isinstance(layer, Convolution):
                weights = (layer.kernel,) * 3 + (channels, layer.channels)
                reach = layer.kernel if self.edges == "valid" else 1
                after, channels_after = (width - reach) // layer.stride + 1, layer.channels
            elif isinstance(layer, Pool):
                after = width // layer.size
            elif isinstance(layer, Shrink):
                after = layer.width
            elif isinstance(layer, Dense):
                features = channels if flat else channels * width**3
                weights, flat = (features, layer.units), True
                channels, channels_after = features, layer.units
            if after < 1 or (isinstance(layer, Shrink) and width % after):
                raise ValueError(
                    f"{self.name}: nothing is left of a volume of {whole} cells a side at layer "
                    f"{name}; give a larger one"
                    if after < 1 or width < after
                    else f"{self.name}: {width} cells a side cannot be divided into {after}"
                )
            stages.append(Stage(layer, name, width, channels, after, channels_after, weights))
            width, channels = after, channels_after
        return stages

    def misfit(self, width: int, channels: int) -> str:
        """Returns why the network cannot take volumes of this width; empty where it can."""
        try:
            self.stages(width, channels, 1)
        except ValueError as error:
            return str(error)
        return ""

    def parameters(self, width: int, channels: int = 1, outputs: int = 3) -> int:
        """Number of weights and biases."""
        return sum(stage.parameters for stage in self.stages(width, channels, outputs))


_SC18_VOLUMES = (
    Convolution(16, 3),
    Pool(),
    Convolution(32, 4),
    Pool(),
    Convolution(64, 4),
    Pool(),
    Convolution(128, 3, stride=2),
    Convolution(256, 3),
    Convolution(256, 2),
    Convolution(256, 2),
)
_SC18_DENSE = (Dense(2048), Dropout(), Dense(256), Dropout())

_MLPERF_VOLUMES = tuple(
    layer for n in (32, 64, 128, 256, 512) for layer in (Convolution(n, 3), Pool("max"))
)
_MLPERF_DENSE = (Dense(128), Dropout(), Dense(64), Dropout())

DECLARATIONS: dict[str, Declaration] = {
    declaration.name: declaration
    for declaration in (
        Declaration("sc18", (*_SC18_VOLUMES, *_SC18_DENSE), "valid", 0.01),
        Declaration("sc18-periodic", (*_SC18_VOLUMES, Shrink(2), *_SC18_DENSE), "periodic", 0.01),
        Declaration(
            "mlperf",
            (*_MLPERF_VOLUMES, *_MLPERF_DENSE),
            "zero",
            0.3,
            bounded=True,
            first_weights="glorot",
            calibrated=False,
        ),
    )
}


def declaration(name: str) -> Declaration:
    """Returns the network with a name; "package.module:function" names a Keras model.

    Raises:
        ValueError: there is no such network.
    """
    if is_python_name(name):
        return Declaration(name, (), "zero", 0.0, calibrated=False)
    if name not in DECLARATIONS:
        known = ", ".join(map(repr, DECLARATIONS))
        raise ValueError(f"network {name!r} is not one of {known}{nearest(name, DECLARATIONS)}")
    return DECLARATIONS[name]
