"""A residual network of convolutions that moves the particles of a state.

A network takes displacements and velocities of a cheap run on the particles' lattice and gives what
is missing. The idea comes from NECOLA (Kaushal and others 2022, arXiv:2111.02441) and from Jamieson
and others (2024, arXiv:2408.07699). Style parameters scale and shift each layer (Perez and others
2018, arXiv:1709.07871). Here they are the three numbers of `features`. What is missing is
multiplied by the square of the first, so that it vanishes at early times.

The laws that a simulation keeps are kept by construction, whatever is learned:

- The kernels of the first convolution sum to 0: only differences of displacements and velocities
  enter, not a flow of all particles together.
- The kernels of the last one sum to 0, and so do their first moments: no momentum is added, nothing
  to a lattice at rest, and with the symmetries what is added to a small wave alone falls with the
  fourth power of its wavenumber, as the error of the mesh's force does.
- In cubic cells the network commutes with the 48 symmetries of the cube (Cohen and Welling 2016,
  arXiv:1602.07576). There is a channel for each of the eight corners of a cell, several times over:
  a symmetry of the cube exchanges channels as it does corners. A number of theta stands for all
  weights that such symmetries carry into one another.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
from typing_extensions import override

from flowpm_dist.evolution.corrections.base import StateCorrection, force_cell
from flowpm_dist.evolution.corrections.features import EARLIEST, FEATURES, features

if TYPE_CHECKING:
    import tensorflow as tf

    from flowpm_dist.cosmology.power import LinearPower
    from flowpm_dist.grid.box import Box

Kind = Literal["vector", "corners"]
"""How symmetries of the cube change channels: three components, or one channel for each corner."""
WIDTH, HIDDEN = 2, 1
"""Channels for each corner, and convolutions between the first and the last one."""
HIDDEN_SCALE, SCALES = 0.5, {"first": 1.0, "last": 0.0, "style": 0.3}
"""Scales of the first weights, over those that keep the variance if no moment is taken out."""
CORNERS = np.array(list(itertools.product((-1, 1), repeat=3)))
TAPS = np.array(list(itertools.product((-1, 0, 1), repeat=3)))
"""The corners of a cell, and the cells that a kernel reaches, from its middle."""


@dataclass(frozen=True, eq=False)
class ResidualNetwork(StateCorrection):
    """Three convolutions of 3^3 cells and 16 channels, periodic, with smooth activations.

    Attributes:
        theta: the free weights of the convolutions in order, see `KERNELS`, then what makes of the
            style the scales and shifts of each layer. Zeros for the last convolution change
            nothing.
    """

    name: ClassVar[str] = "equivariant-network"

    def __post_init__(self) -> None:
        size, shape = sum(math.prod(s) for s in _shapes().values()), self.theta.shape
        if tuple(shape) != (size,):
            raise ValueError(
                f"theta has shape {tuple(shape)}; the {self.name} has {size} numbers: learn it "
                "again if it is of an earlier version"
            )

    @classmethod
    def begun(cls, seed: int = 0) -> Self:
        """Returns a network that changes nothing yet: its last kernel is 0."""
        rng = np.random.default_rng(seed)
        parts = []
        for name, shape in _shapes().items():
            scale = SCALES.get(name, HIDDEN_SCALE)
            inputs = FEATURES if name == "style" else len(TAPS) * KERNELS[name].inputs
            part = rng.normal(size=shape) * scale / np.sqrt(inputs)
            if name == "style":
                part[:, -1] = 0.0  # what does not depend on the style
            parts.append(part)
        return cls(np.concatenate([part.ravel() for part in parts]))

    @override
    def style(self, power: LinearPower, cell: float, a: float) -> tf.Tensor:
        import tensorflow as tf

        growth, late = power.growth, max(a, EARLIEST)  # at a = 0 the pace is 0 / 0
        pace = growth.d1(late) / growth.g_drift(late)
        return tf.concat([features(power, cell, np.asarray(a, np.float64)), pace[None]], axis=0)

    @override
    def moved(
        self, theta: tf.Tensor, style: tf.Tensor, fields: Sequence[tf.Tensor], box: Box
    ) -> list[tf.Tensor]:
        import tensorflow as tf

        from flowpm_dist.evolution.corrections.network_layers import network_function

        shapes = _shapes()
        *kernels, weights = tf.split(theta, [math.prod(shape) for shape in shapes.values()])
        values, pace = style[..., :FEATURES], style[..., FEATURES:]
        weights = tf.reshape(weights, shapes["style"])
        of_layers = tf.einsum("...f,lfc->...lc", values, weights[:, :FEATURES])
        of_layers = tf.repeat(of_layers + weights[:, FEATURES], len(CORNERS), axis=-1)
        size = math.prod(of_layers.shape[-2:])
        flat = tf.reshape(of_layers, [*style.shape[:-1], size])
        modulation = tf.concat([flat, values[..., :1] ** 2, pace], axis=-1)
        whole = (kernel(free) for kernel, free in zip(KERNELS.values(), kernels, strict=True))
        function = network_function(
            box, WIDTH * len(CORNERS), HIDDEN, force_cell(box.size, box.grid)
        )
        inputs = [tf.cast(x, box.dtype) for x in (modulation, *whole)]
        return list(function(*fields, *inputs))


@dataclass(frozen=True)
class TiedKernel:
    """A kernel of 3^3 cells that commutes with the symmetries of the cube.

    Attributes:
        incoming, outgoing: kinds of channels, and how often they occur.
        moments: the moments of the kernel that are zero: none, its sum, or the first ones as well.
    """

    incoming: tuple[Kind, int]
    outgoing: tuple[Kind, int]
    moments: int = 0

    @property
    def inputs(self) -> int:
        """The number of incoming channels."""
        return self.incoming[1] * len(_turned(self.incoming[0], 0)[0])

    @property
    def size(self) -> int:
        """The number of free weights."""
        return self._tied[2]

    def __call__(self, free: tf.Tensor) -> tf.Tensor:
        """Returns the kernel [3, 3, 3, in, out] of free weights [size].

        What they have of the moments that are zero changes nothing.
        """
        import tensorflow as tf

        places, signs, _ = self._tied
        kernel = tf.gather(free, places) * tf.cast(signs, free.dtype)
        powers = [np.ones(len(TAPS)), *TAPS.T][: (0, 1, 4)[self.moments]]
        for power in powers:  # orthogonal over the taps
            p = tf.constant(power, free.dtype)
            kernel -= tf.einsum("t,io->tio", p, tf.einsum("t,tio->io", p, kernel)) / np.sum(
                power**2
            )
        return tf.reshape(kernel, [3, 3, 3, *kernel.shape[1:]])

    @functools.cached_property
    def _tied(self) -> tuple[np.ndarray, np.ndarray, int]:
        """The free weight of each weight [tap, in, out], its sign or 0, and their number."""
        shape = [len(TAPS)]
        for kind, copies in (self.incoming, self.outgoing):
            shape += [copies, len(_turned(kind, 0)[0])]
        numbers = np.arange(math.prod(shape)).reshape(shape)
        turned = [self._image(numbers, element) for element in range(48)]
        images, signs = (np.array([each[n].ravel() for each in turned]) for n in range(2))
        first = images.min(axis=0)
        # 0 where a symmetry changes the sign of a weight and not its place
        sums = np.sum(np.where(images == first, signs, 0.0), axis=0)
        free = np.unique(first[sums != 0])
        places = np.searchsorted(free, np.where(sums != 0, first, free[0]))
        inward = (-1, math.prod(shape[1:3]), math.prod(shape[3:]))
        return places.reshape(inward), np.sign(sums).reshape(inward), len(free)

    def _image(self, numbers: np.ndarray, element: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns numbers of weights at the places where a symmetry takes them, and the signs."""
        signs = np.ones(numbers.shape)
        for axis, kind in ((0, "taps"), (2, self.incoming[0]), (4, self.outgoing[0])):
            places, change = _turned(kind, element)
            numbers = np.take(numbers, places, axis)
            signs = np.take(signs, places, axis)
            signs = signs * change.reshape([-1 if axis == n else 1 for n in range(5)])
        return numbers, signs


_CORNERS: tuple[Kind, int] = ("corners", WIDTH)
_VECTORS: tuple[Kind, int] = ("vector", 2)
KERNELS = {
    "first": TiedKernel(_VECTORS, _CORNERS, moments=1),
    **{f"hidden_{n}": TiedKernel(_CORNERS, _CORNERS) for n in range(HIDDEN)},
    "last": TiedKernel(_CORNERS, _VECTORS, moments=2),
}
"""The kernels in the order of their weights in theta."""


def _shapes() -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the learned numbers, in their order in theta."""
    # of each modulated layer: weights of the features, and a constant; of scales and shifts
    style = (HIDDEN + 1, FEATURES + 1, 2 * WIDTH)
    return {**{name: (kernel.size,) for name, kernel in KERNELS.items()}, "style": style}


@functools.cache
def _turned(kind: str, element: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns where a symmetry of the cube takes channels or taps, and the signs that they get.

    Args:
        kind: the kind of channels, or "taps".
        element: the number of the symmetry, 0 to 47.
    """
    axes = np.array(list(itertools.permutations(range(3)))[element // 8])
    flips = np.array([-1 if element >> axis & 1 else 1 for axis in range(3)])
    if kind == "vector":
        places = np.argsort(axes)
        return places, flips[places]
    points = TAPS if kind == "taps" else CORNERS
    images = flips * points[:, axes]
    equal = (images[:, None] == points[None]).all(axis=-1)
    return equal.argmax(axis=1), np.ones(len(points))
