"""An unrolled network that reconstructs volumes which are split over ranks.

The scan is y = M F (S x + n): sensitivities S, noise n, the distributed FFT F and a mask M. Each
iteration of the network follows the gradient of |M F S x - y|^2 / 2, and a small convolutional
network corrects it (Hammernik et al. 2018; Adler and Oktem 2017):

    r = (M F S)^H (M F S x - y),    x <- x - step r + CNN(x, r)

Complex values are pairs in the dimension `PAIR`. x and y, later ky and kz, are split over `row` and
`col`, the batch over `replica`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from meshimpl import MeshFunction, ProcessMesh
from meshimpl.compat import mtf
from meshimpl.operations.fft import PAIR, fft3d, ifft3d, pencils, spectral_shape
from meshimpl.operations.layers import add_bias, convolution, leaky_relu
from meshimpl.operations.local import layer, local, together
from meshimpl.operations.noise import white_noise

SPLIT = {"replica": ["batch"], "row": ["x", "ky", "x_halo"], "col": ["y", "kz", "y_halo"]}
SLOPE = 0.1
"""Slope of the activation below zero."""


@dataclass(frozen=True)
class Design:
    """The network.

    Attributes:
        iterations: the steps of data consistency, each with its own convolutions.
        features: channels between the convolutions.
        convolutions: convolutions of an iteration, with kernels of 3 x 3 x 3 cells.
    """

    iterations: int = 5
    features: int = 16
    convolutions: int = 3

    @property
    def shapes(self) -> dict[str, list[int]]:
        """The shape of each weight, by name."""
        widths = [4, *[self.features] * (self.convolutions - 1), 2]
        found: dict[str, list[int]] = {}
        for k in range(self.iterations):
            found[f"step_{k}"] = []
            for n, (before, after) in enumerate(zip(widths, widths[1:], strict=False)):
                found[f"kernel_{k}_{n}"] = [3, 3, 3, before, after]
                found[f"bias_{k}_{n}"] = [after]
        return found

    def first_weights(self, seed: int) -> dict[str, np.ndarray]:
        """Returns weights with which the network makes steps of gradient descent of length 1.

        The last kernel of an iteration is zero, the others are normal deviates (He et al. 2015).
        """
        rng, last = np.random.default_rng(seed), f"_{self.convolutions - 1}"
        found = {}
        for name, shape in self.shapes.items():
            draws = rng.normal(size=shape)
            if name.startswith("kernel") and not name.endswith(last):
                found[name] = draws * math.sqrt(2 / math.prod(shape[:-1]))
            else:
                found[name] = np.full(shape, float(name.startswith("step")))
        return found

    def tensor_shape(self, name: str) -> Any:
        """Returns the `mtf.Shape` of a weight; its channels are PAIR behind the last kernel."""
        kind, *place = name.split("_")
        if kind == "step":
            return mtf.Shape([])
        shape, n = self.shapes[name], int(place[1])
        out = PAIR if n == self.convolutions - 1 else mtf.Dimension(f"channel_{n}", shape[-1])
        if kind == "bias":
            return mtf.Shape([out])
        kernel = [mtf.Dimension(f"kernel_{axis}", 3) for axis in "xyz"]
        return mtf.Shape([*kernel, mtf.Dimension(f"channel_{n - 1}", shape[-2]), out])


def _complex(pairs: tf.Tensor) -> tf.Tensor:
    return tf.bitcast(pairs, tf.complex64 if pairs.dtype == tf.float32 else tf.complex128)


def _pairs(values: tf.Tensor) -> tf.Tensor:
    return tf.bitcast(values, tf.float32 if values.dtype == tf.complex64 else tf.float64)


def to_coils(image: Any, maps: Any) -> Any:
    """Returns what each coil sees, [batch, coil, x, y, z, pair], of [batch, x, y, z, pair]."""
    return local(
        lambda x, s: _pairs(_complex(x)[:, None] * _complex(s)),
        [image, maps],
        [(maps.shape, image.dtype)],
        adjoint=lambda _, dys: [from_coils(dys[0], maps), None],
        name="to_coils",
    )[0]


def from_coils(coils: Any, maps: Any) -> Any:
    """Returns the adjoint of `to_coils`: the sum over coils with conjugate sensitivities."""
    batch, _, *rest = maps.shape.dims
    return local(
        lambda c, s: _pairs(tf.reduce_sum(tf.math.conj(_complex(s)) * _complex(c), axis=1)),
        [coils, maps],
        [(mtf.Shape([batch, *rest]), coils.dtype)],
        adjoint=lambda _, dys: [to_coils(dys[0], maps), None],
        name="from_coils",
    )[0]


def masked(spectrum: Any, mask: Any, scale: float) -> Any:
    """Returns a spectrum [batch, coil, kz, ky, kx, pair] times a mask [batch, kz, ky, kx]."""
    return local(
        lambda k, m: k * (scale * m[:, None, ..., None]),
        [spectrum, mask],
        [(spectrum.shape, spectrum.dtype)],
        adjoint=lambda _, dys: [masked(dys[0], mask, scale), None],
        name="masked",
    )[0]


@dataclass(frozen=True)
class Scan:
    """The forward operator M F S with an orthonormal FFT.

    Attributes:
        maps: mtf tensor [batch, coil, x, y, z, pair], the sensitivities.
        mask: mtf tensor [batch, kz, ky, kx] of zeros and ones.
    """

    maps: Any
    mask: Any

    @property
    def _scale(self) -> float:
        return math.sqrt(math.prod(dim.size for dim in self.maps.shape.dims[2:5]))

    def spectrum(self, coils: Any) -> Any:
        """Returns M F of what the coils see."""
        return masked(fft3d(coils), self.mask, 1 / self._scale)

    def forward(self, image: Any) -> Any:
        """Returns the spectra of an image [batch, x, y, z, pair]."""
        return self.spectrum(to_coils(image, self.maps))

    def adjoint(self, spectrum: Any) -> Any:
        """Returns the zero-filled image of spectra, combined over the coils."""
        kept = masked(spectrum, self.mask, self._scale)
        return from_coils(ifft3d(kept, self.maps.shape), self.maps)

    def measured(self, image: Any, seeds: Any, noise: float) -> Any:
        """Returns noisy spectra of an image, the same on any mesh.

        Args:
            image: mtf tensor [batch, x, y, z, pair].
            seeds: int64 mtf tensor [batch].
            noise: the standard deviation of a mode's complex noise.
        """
        coils = to_coils(image, self.maps)
        if noise:
            deviates = white_noise(seeds, mtf.Shape(coils.shape.dims[1:]), coils.dtype)
            coils += deviates * (noise / math.sqrt(2))
        return self.spectrum(coils)


def unrolled(zero_filled: Any, scan: Scan, weights: Mapping[str, Any], design: Design) -> Any:
    """Returns the network's image [batch, x, y, z, pair] from the zero-filled one."""
    image, shape = zero_filled, zero_filled.shape
    channel = mtf.Dimension("channel_-1", 4)
    stacked = mtf.Shape([*shape.dims[:-1], channel])
    for k in range(design.iterations):
        residual = scan.adjoint(scan.forward(image)) - zero_filled
        x = layer(_joined, [image, residual], stacked, name="joined")
        for n in range(design.convolutions):
            x = add_bias(
                convolution(x, weights[f"kernel_{k}_{n}"], edges="zero"), weights[f"bias_{k}_{n}"]
            )
            if n < design.convolutions - 1:
                x = leaky_relu(x, SLOPE)
        image = layer(_stepped, [image, residual, x, weights[f"step_{k}"]], shape, name="stepped")
    return image


def _joined(image: tf.Tensor, residual: tf.Tensor) -> tf.Tensor:
    return tf.concat([image, residual], axis=-1)


def _stepped(image: tf.Tensor, residual: tf.Tensor, x: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
    return image - step * residual + x


class Reconstructor:
    """The scan and the network on a mesh, for volumes of one size.

    Args:
        mesh: mesh with axes among replica, row and col.
        design: the network.
        sides: the cells along x, y, z.
        batch: volumes of a call, over all replicas.
        coils: number of coils.
        noise: see `Scan.measured`.
        dtype: of everything, float32 or float64.
    """

    def __init__(
        self,
        mesh: ProcessMesh,
        design: Design,
        sides: Sequence[int],
        *,
        batch: int,
        coils: int,
        noise: float,
        dtype: tf.DType = tf.float32,
    ) -> None:
        self.mesh, self.design, self.noise = mesh, design, noise
        layout = ";".join(f"{d}:{axis}" for axis in mesh.names for d in SPLIT[axis])
        volumes, coil = mtf.Dimension("batch", batch), mtf.Dimension("coil", coils)
        space = [*(mtf.Dimension(n, s) for n, s in zip("xyz", sides, strict=True)), PAIR]
        image, maps = mtf.Shape([volumes, *space]), mtf.Shape([volumes, coil, *space])
        probe = MeshFunction(lambda _, x: x, mesh, layout, {"x": (image, dtype)})
        self.impl, self.image, self.maps = probe.impl, image, maps
        self.modes = pencils(image, probe.impl).modes
        spectrum = spectral_shape(maps, probe.impl)
        mask = mtf.Shape([volumes, *spectrum.dims[2:5]])
        self.mask = mask
        scan = {"maps": (maps, dtype), "mask": (mask, dtype)}
        truth = {"image": (image, dtype), "seeds": (mtf.Shape([volumes]), tf.int64)}
        weights = {name: (design.tensor_shape(name), dtype) for name in design.shapes}
        self.step = MeshFunction(self._step, mesh, layout, truth | scan | weights)
        """Loss and its gradient by each weight, from a truth that is scanned first."""
        self.measure = MeshFunction(self._measure, mesh, layout, truth | scan)
        """Spectra and their zero-filled image."""
        zero_filled = {"zero_filled": (image, dtype)}
        self.reconstruct = MeshFunction(
            self._reconstruct, mesh, layout, zero_filled | scan | weights
        )
        """The network's image, from the zero-filled one."""

    def _weights(self, tensors: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self.design.shapes, tensors, strict=True))

    def _measure(self, _: Any, image: Any, seeds: Any, maps: Any, mask: Any) -> list[Any]:
        scan = Scan(maps, mask)
        spectrum = scan.measured(image, seeds, self.noise)
        return [spectrum, scan.adjoint(spectrum)]

    def _reconstruct(self, _: Any, zero_filled: Any, maps: Any, mask: Any, *weights: Any) -> Any:
        return unrolled(zero_filled, Scan(maps, mask), self._weights(weights), self.design)

    def _step(
        self, graph_mesh: Any, image: Any, seeds: Any, maps: Any, mask: Any, *weights: Any
    ) -> Any:
        _, zero_filled = self._measure(graph_mesh, image, seeds, maps, mask)
        found = self._reconstruct(graph_mesh, zero_filled, maps, mask, *weights)
        each = mtf.Shape(image.shape.dims[:1])
        errors = mtf.reduce_sum(mtf.square(found - image), output_shape=each)
        sizes = mtf.reduce_sum(mtf.square(image), output_shape=each)
        loss = mtf.reduce_mean(errors / sizes)
        return [loss, *together(mtf.gradients([loss], list(weights)))]

    def block(self, shape: Any) -> tuple[slice, ...]:
        """Returns this rank's part of a tensor."""
        begin = self.impl.slice_begin(shape, self.mesh.rank)
        sizes = self.impl.slice_shape(shape)
        return tuple(slice(b, b + n) for b, n in zip(begin, sizes, strict=True))
