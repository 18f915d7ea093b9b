"""Initial conditions of a box: white noise, the linear field, the particles' first state."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, get_args

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmology.power import LinearPower
from flowpm_dist.grid.box import Box, BoxFunction, cached_for_all_sizes
from flowpm_dist.grid.fourier import to_field, to_spectrum
from flowpm_dist.initial.lpt import lpt_function
from flowpm_dist.initial.non_gaussianity import local_noise_function
from flowpm_dist.initial.options import CHUNK, InitialOptions, Noise
from flowpm_dist.io.white_noise import noise_moments, warn_of_other_noise, wrong_noise_type
from flowpm_dist.options import in_unit
from meshimpl.compat import mtf
from meshimpl.mesh_function import MeshFunction
from meshimpl.operations.local import pointwise
from meshimpl.operations.noise import mode_noise, white_noise
from meshimpl.tapes import is_watched, not_recorded

NOISES = get_args(Noise)
"""The kinds of noise: generated for each cell, or for each mode."""


@cached_for_all_sizes(16)
def noise_function(
    box: Box, kind: str = "cells", *, fixed: bool = False, paired: bool = False
) -> MeshFunction:
    """Returns `f(seed)`: unit normal white noise [..., x, y, z], the same on any number of ranks.

    Args:
        box: the box; each universe of a batch has its own seed.
        kind: "cells": the noise depends on the seed and the cell, and is reproduced to the bit.
            "nested": it depends on the seed and the mode, and is reproduced to rounding. A grid
            twice as fine in the same box has the same large scales. These are the modes
            (nx, ny, nz) whose |nx|, |ny| and |nz| are below half the cells of the coarse grid.
        fixed: whether every mode has its expected amplitude and only its phase is random.
        paired: whether to change the sign of the noise, which shifts all phases by pi. The mean
            over a fixed universe and its pair has far less sample variance (Angulo and Pontzen
            2016, arXiv:1603.05253).

    Args of f:
        seed: int64 of the box's `number_shape`.

    Raises:
        ValueError: there is no such kind.
    """
    if kind not in NOISES:
        raise ValueError(f"noise {kind!r} is not one of {', '.join(map(repr, NOISES))}")
    space = mtf.Shape(box.shape.dims[-3:])

    def build(_: Any, seed: Any) -> Any:
        if kind == "nested":
            spectrum = mode_noise(seed, space, box.dtype)
            field = to_field(_unit_modes(spectrum, box) if fixed else spectrum, box)
        else:
            field = white_noise(seed, space, box.dtype)
            field = _fixed(field, box) if fixed else field
        return -field if paired else field

    return box.function(build, seed=(box.number_shape, tf.int64))


def _fixed(noise: Any, box: Box) -> Any:
    return to_field(_unit_modes(to_spectrum(noise), box), box)


def _unit_modes(spectrum: Any, box: Box) -> Any:
    scale = math.sqrt(box.cells)

    def unit(value: tf.Tensor) -> tf.Tensor:
        square = tf.reduce_sum(tf.square(value), axis=-1, keepdims=True)
        positive = square > 0
        modulus = tf.sqrt(tf.where(positive, square, tf.ones_like(square)))
        return tf.where(positive, scale * value / modulus, tf.zeros_like(value))

    return pointwise(unit, spectrum)


def check_white_noise(noise: Any, box: Box) -> None:
    """Checks white noise that a user gave, on all ranks together.

    Args:
        noise: the whole array, of which each rank checks its block, or this rank's block.
        box: the box of the simulation.

    Raises:
        ValueError: on every rank, if its shape or dtype does not fit, or a value is not finite.
    """
    whole = tuple(box.shape.to_integer_list)
    block = box.local_batch + box.block
    if noise.shape not in (whole, block):
        raise ValueError(f"white_noise has shape {noise.shape}; the grid is {whole}")
    if wrong := wrong_noise_type(noise.dtype):
        raise ValueError(f"white_noise has {wrong}")
    if noise.shape == whole:
        begin = (box.batch_offset,) * len(box.local_batch) + box.offset
        noise = noise[tuple(slice(b, b + n) for b, n in zip(begin, block, strict=True))]
    bad = noise.size - np.count_nonzero(np.isfinite(noise))
    sums = tf.constant([bad, *noise_moments(noise), noise.size], tf.float64)
    bad, total, squares, count = box.mesh.world.allreduce(sums).numpy().tolist()
    if bad:
        raise ValueError(f"white_noise has {bad:.0f} values that are not finite")
    warn_of_other_noise(total, squares, int(count))


def linear_amplitude(box: Box, power: LinearPower, a: float | None = None) -> tf.Tensor:
    """Returns sqrt(P(k) / cell volume) of this rank's modes, without growth, see `of_modes`.

    Multiplied by the unnormalised spectrum of white noise, it gives the spectrum of the linear
    overdensity before growth.

    Args:
        box: the grid and the size of each universe.
        power: the power; its `without_growth(k)` is used [(Mpc/h)^3].
        a: scale factor of `without_growth(k, a)`, used where growth depends on the wavenumber.

    Returns:
        [kz, ky, kx] in the box's dtype.
    """
    time = () if a is None or not power.growth.by_scale else (a,)
    return _amplitude(box, "power.without_growth(k)", lambda k: power.without_growth(k, *time))


def potential_amplitude(box: Box, power: LinearPower) -> tf.Tensor:
    """Returns sqrt(P_phi(k) / cell volume) of this rank's modes, as `linear_amplitude` does.

    Args:
        box: the grid and the size of each universe.
        power: the power; its `potential(k)` is used [(Mpc/h)^3].
    """
    return _amplitude(box, "power.potential(k)", power.potential)


def _amplitude(box: Box, name: str, power: Callable[[Any], Any]) -> tf.Tensor:
    """Returns sqrt(power(k) / cell volume) of this rank's modes [kz, ky, kx]."""

    def amplitude(k: Any) -> tf.Tensor:
        spectrum = in_unit(name, power(k), "(Mpc/h)^3") / (box.volume / box.cells)
        positive = spectrum > 0  # the mean mode: its derivative by the parameters is 0, not NaN
        root = tf.sqrt(tf.where(positive, spectrum, tf.ones_like(spectrum)))
        return tf.where(positive, root, tf.zeros_like(root))

    return of_modes(box, amplitude)


def of_modes(box: Box, amplitude: Callable[[Any], tf.Tensor]) -> tf.Tensor:
    """Returns a function of the wavenumber for this rank's modes.

    It is evaluated in float64. If the squared sides of the box are commensurable, as in a cube, the
    squared wavenumbers are multiples of one unit. The function is then evaluated once for each
    multiple between the smallest and the largest of this rank, `CHUNK` of them at a time. Otherwise
    it is evaluated plane by plane.

    Args:
        box: the grid and the size of each universe.
        amplitude: a function of wavenumbers [h/Mpc], element by element.

    Returns:
        [kz, ky, kx] in the box's dtype.
    """
    lattice = _squares(box)
    if lattice is None:
        kx, ky, kz = box.wavenumbers()
        square = kx[0] ** 2 + ky[0] ** 2
        planes = _in_chunks(
            amplitude, lambda: (np.sqrt(square + k**2) for k in kz[:, 0, 0]), box.dtype
        )
        return tf.stack(planes)
    unit, multiples = lattice
    count = 1 + sum(m * (n // 2) ** 2 for m, n in zip(multiples, box.grid, strict=True))
    x, y, z = (
        np.minimum(m * n**2, count - 1)  # padded modes hold no power
        for m, n in zip(multiples, box.pencils.mode_numbers(), strict=True)
    )
    # Chunks begin at the same multiples on all ranks: P(k) is then the same to the bit.
    first = int(x.min() + y.min() + z.min()) // CHUNK * CHUNK
    last = min(int(x.max() + y.max() + z.max()), count - 1) + 1

    def wavenumbers() -> Iterator[np.ndarray]:
        for begin in range(first, last, CHUNK):
            end = min(begin + CHUNK, count)
            yield np.sqrt(unit * np.arange(begin, end, dtype=np.float64))

    def index() -> tf.Tensor:
        x32, y32, z32 = (tf.constant(n, tf.int32) for n in (x, y, z))
        return tf.minimum(z32 + (x32 + y32), count - 1) - first

    if count <= CHUNK:
        return _look_up(amplitude(next(wavenumbers())), index, box.dtype)
    return _look_up(tf.concat(_in_chunks(amplitude, wavenumbers, box.dtype), 0), index, box.dtype)


def _in_chunks(
    function: Callable[[Any], tf.Tensor],
    chunks: Callable[[], Iterable[np.ndarray]],
    dtype: tf.DType,
) -> list[tf.Tensor]:
    """Returns a function of each chunk, in `dtype`, with the temporaries of one chunk at a time.

    The gradient evaluates the function again, likewise.

    Args:
        function: a function of float64 values, element by element, of any tensors.
        chunks: returns the values, all of one rank, the same at each call.
        dtype: dtype of the results.
    """

    def evaluated() -> list[tf.Tensor]:
        with not_recorded():
            return [tf.cast(function(k), dtype) for k in chunks()]

    if not is_watched([function(np.ones(1))]):
        return evaluated()
    shape = [None] * next(iter(chunks())).ndim
    graph = tf.function(function, autograph=False)
    traced = graph.get_concrete_function(tf.TensorSpec(shape, tf.float64))
    tensors = [x for x in traced.captured_inputs if x.dtype.is_floating]

    @tf.custom_gradient
    def of_tensors(*_: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[tf.Tensor]]]:
        def gradient(*dys: tf.Tensor) -> list[tf.Tensor]:
            total = [tf.zeros_like(x) for x in tensors]
            for k, dy in zip(chunks(), dys, strict=True):
                with tf.GradientTape() as tape:
                    tape.watch(tensors)
                    values = traced(tf.constant(k))
                cotangent, zero = tf.cast(dy, tf.float64), tf.UnconnectedGradients.ZERO
                gradients = tape.gradient(values, tensors, cotangent, unconnected_gradients=zero)
                total = [a + b for a, b in zip(total, gradients, strict=True)]
            return total

        return evaluated(), gradient

    return list(of_tensors(*tensors))


def _squares(box: Box) -> tuple[float, tuple[int, ...]] | None:
    """Returns u and (mx, my, mz) with k^2 = u (mx nx^2 + my ny^2 + mz nz^2).

    Returns None if these would save no work.
    """
    max_side = max(box.size)
    exact = [(max_side / s) ** 2 for s in box.size]
    ratios = [Fraction(r).limit_denominator(1000) for r in exact]
    common = math.lcm(*(r.denominator for r in ratios))
    multiples = tuple(int(r * common) for r in ratios)
    agree = all(math.isclose(r, e, rel_tol=1e-14) for r, e in zip(ratios, exact, strict=True))
    count = sum(m * (n // 2) ** 2 for m, n in zip(multiples, box.grid, strict=True))
    if not agree or count > box.cells // 2:
        return None
    return (2 * math.pi / max_side) ** 2 / common, multiples


def _look_up(table: tf.Tensor, index: Callable[[], tf.Tensor], dtype: tf.DType) -> tf.Tensor:
    """Returns table[index()] in `dtype`.

    Its gradient sums in float64 and computes the index again.
    """

    @tf.custom_gradient
    def look_up(values: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        def gradient(dy: tf.Tensor) -> tf.Tensor:
            flat = tf.reshape(tf.cast(dy, tf.float64), [-1])
            places = tf.reshape(index(), [-1])
            total = tf.math.unsorted_segment_sum(flat, places, values.shape[0])
            return tf.cast(total, values.dtype)

        return tf.gather(tf.cast(values, dtype), index()), gradient

    return look_up(table)


@dataclass
class InitialConditions:
    """The functions from a seed to particles; each is lowered when it is first needed.

    Attributes:
        box: the box of one universe, or of a batch.
        options: the options of initial conditions.
        lpt_fields: whether `particles` returns psi_1 and psi_2 as well.
    """

    box: Box
    options: InitialOptions
    lpt_fields: bool = False

    def white_noise(self, seeds: Any, *, paired: bool = False) -> tf.Tensor:
        """Returns unit normal noise, this rank's block [..., x, y, z]; see `noise_function`.

        Args:
            seeds: int64, one for each universe.
            paired: whether to return the opposite of the seeds' noise.
        """
        fixed = self.options.fixed_amplitude
        return noise_function(self.box, self.options.noise, fixed=fixed, paired=paired)(seeds)

    def particles(
        self, noise: tf.Tensor, amplitude: tf.Tensor, factors: tf.Tensor, *excess: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tuple[tf.Tensor, ...]]:
        """Returns displacement [Mpc/h], velocity and LPT fields [Mpc/h], blocks [..., x, y, z, 3].

        Args:
            noise: white noise, block [..., x, y, z].
            amplitude: the amplitude of each mode, see `linear_amplitude`.
            factors: the factors of displacement and velocity, [..., 2, terms]; see `lpt_function`.
            *excess: the excess of the first velocity, where growth depends on the wavenumber.
        """
        order, by_scale = self.options.lpt_order, bool(excess)
        function = lpt_function(self.box, order, fields=self.lpt_fields, by_scale=by_scale)
        _, x, v, *lpt = function(noise, amplitude, tf.cast(factors, self.box.dtype), *excess)
        return x, v, tuple(lpt)

    def linear_field(self, noise: tf.Tensor, amplitude: tf.Tensor) -> tf.Tensor:
        """Returns the linear overdensity before growth, block [..., x, y, z].

        Args:
            noise, amplitude: as for `particles`.
        """
        return self._linear(noise, amplitude)

    def local_noise(self, noise: tf.Tensor, amplitude: tf.Tensor, f_NL: tf.Tensor) -> tf.Tensor:
        """Returns white noise with local non-Gaussianity, see `local_noise_function`."""
        return self._local(noise, amplitude, tf.cast(f_NL, self.box.dtype))

    @functools.cached_property
    def _local(self) -> BoxFunction:
        return local_noise_function(self.box)

    @functools.cached_property
    def _linear(self) -> BoxFunction:
        return _linear_function(self.box)


@cached_for_all_sizes(16)
def _linear_function(box: Box) -> MeshFunction:
    return box.function(
        lambda _, noise, amplitude: to_field(to_spectrum(noise) * amplitude, box),
        white_noise=box.shape,
        amplitude=box.mode_shape,
    )
