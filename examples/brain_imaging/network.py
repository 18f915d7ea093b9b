"""An unrolled network that reconstructs volumes which are split over ranks.

The scan is y = M F (S x + n): sensitivities S, noise n, the distributed FFT F and a mask M. Each
iteration of the network makes some steps of data consistency, with momentum, down the gradient of
|M F S x - y|^2 / 2. Then a small convolutional network corrects the image (Hammernik et al. 2018;
Aggarwal et al. 2019):

    v <- momentum v - step (M F S)^H (M F S x - y),    x <- x + v
    x <- x + u CNN(x / u, v / u)

Steps, momenta and convolutions are learned, separately for each iteration. u is the phase of the
zero-filled image at low frequencies. Without it, what is left to correct is mostly real.

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
from settings import Design

from meshimpl import MeshFunction, ProcessMesh
from meshimpl.compat import mtf
from meshimpl.graph_guards import fence
from meshimpl.operations.fft import PAIR, fft3d, ifft3d, pencils, spectral_shape
from meshimpl.operations.layers import add_bias, convolution, leaky_relu
from meshimpl.operations.local import layer, local, on_blocks, together
from meshimpl.operations.noise import white_noise

SPLIT = {"replica": ["batch"], "row": ["x", "ky", "x_halo"], "col": ["y", "kz", "y_halo"]}
SLOPE = 0.1
"""Slope of the activation below zero."""
LOW = 0.05
"""Width of the low frequencies, as a share of the modes along each axis."""


def weight_shape(name: str, shape: Sequence[int], last: int) -> Any:
    """Returns the `mtf.Shape` of a weight of `Design`; the last kernel leads to PAIR."""
    kind, *place = name.split("_")
    if not shape:
        return mtf.Shape([])
    n = int(place[1])
    out = PAIR if n == last else mtf.Dimension(f"channel_{n}", shape[-1])
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


def low_phase(image: Any) -> Any:
    """Returns the phase factors of an image [batch, x, y, z, pair] at its low frequencies."""
    numbers = pencils(image.shape, image.mesh.impl).mode_numbers()
    sides = [dim.size for dim in image.shape.dims[1:4]]

    def filtered(impl: Any, modes: tf.Tensor) -> tf.Tensor:
        del impl
        window = math.prod(
            np.exp(-((n / (LOW * s)) ** 2)) for n, s in zip(numbers, sides, strict=True)
        )
        return modes * fence(tf.constant(window[..., None], modes.dtype))

    modes = fft3d(image)
    (low,) = on_blocks(filtered, [modes], [(modes.shape, modes.dtype)], name="low_frequencies")
    return local(
        lambda x: x / (tf.norm(x, axis=-1, keepdims=True) + 1e-12),
        [ifft3d(low, image.shape)],
        [(image.shape, image.dtype)],
        name="low_phase",
    )[0]


def turned(image: Any, phase: Any, back: bool = False) -> Any:
    """Returns an image [batch, x, y, z, pair] times phase factors, or divided by them."""
    return local(
        lambda x, u: _pairs(_complex(x) * (tf.math.conj(_complex(u)) if back else _complex(u))),
        [image, phase],
        [(image.shape, image.dtype)],
        adjoint=lambda _, dys: [turned(dys[0], phase, not back), None],
        name="turned",
    )[0]


def unrolled(zero_filled: Any, scan: Scan, weights: Mapping[str, Any], design: Design) -> Any:
    """Returns the network's image [batch, x, y, z, pair] from the zero-filled one."""
    shape = zero_filled.shape
    image, velocity, phase = zero_filled, None, low_phase(zero_filled)
    joined = mtf.Shape([*shape.dims[:-1], mtf.Dimension("channel_-1", 4)])
    for k in range(design.iterations):
        for j in range(design.consistency):
            residual = scan.adjoint(scan.forward(image)) - zero_filled
            given = [residual, weights[f"step_{k}_{j}"]]
            if velocity is not None:
                given += [velocity, weights[f"momentum_{k}_{j}"]]
            velocity = layer(_accelerated, given, shape, name="velocity")
            image += velocity
        x = layer(
            _joined, [turned(v, phase, back=True) for v in (image, velocity)], joined, name="joined"
        )
        for n in range(design.convolutions):
            x = convolution(x, weights[f"kernel_{k}_{n}"], edges="zero")
            x = add_bias(x, weights[f"bias_{k}_{n}"])
            if n < design.convolutions - 1:
                x = leaky_relu(x, SLOPE)
        image += turned(x, phase)
    return image


def _accelerated(residual: tf.Tensor, step: tf.Tensor, *inertia: tf.Tensor) -> tf.Tensor:
    return math.prod(inertia) - step * residual if inertia else -step * residual


def _joined(image: tf.Tensor, velocity: tf.Tensor) -> tf.Tensor:
    return tf.concat([image, velocity], axis=-1)


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
        self.layout = layout
        volumes, coil = mtf.Dimension("batch", batch), mtf.Dimension("coil", coils)
        space = [*(mtf.Dimension(n, s) for n, s in zip("xyz", sides, strict=True)), PAIR]
        image, maps = mtf.Shape([volumes, *space]), mtf.Shape([volumes, coil, *space])
        probe = MeshFunction(lambda _, x: x, mesh, layout, {"x": (image, dtype)})
        self.impl, self.modes = probe.impl, pencils(image, probe.impl).modes
        spectrum = spectral_shape(maps, probe.impl)
        mask = mtf.Shape([volumes, *spectrum.dims[2:5]])
        self.image, self.maps, self.mask, self.spectrum = image, maps, mask, spectrum
        scan = {"maps": (maps, dtype), "mask": (mask, dtype)}
        truth = {"image": (image, dtype), "seeds": (mtf.Shape([volumes]), tf.int64)}
        last = design.convolutions - 1
        weights = {n: (weight_shape(n, s, last), dtype) for n, s in design.shapes.items()}
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
