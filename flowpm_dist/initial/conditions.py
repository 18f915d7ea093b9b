"""Initial conditions of a box: white noise, the linear field, the particles' first state."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from flowpm_dist.grid.box import Box
from flowpm_dist.grid.fourier import to_field, to_spectrum
from flowpm_dist.initial.lpt import lpt_function
from flowpm_dist.initial.options import InitialOptions
from flowpm_dist.initial.white_noise import noise_function
from meshimpl.mesh_function import MeshFunction


@dataclass
class InitialConditions:
    """The functions from a seed to particles, each lowered when it is first needed.

    Attributes:
        box: the box of one universe, or of a batch.
        options: the options of initial conditions.
        lpt_fields: whether `particles` returns psi_1 and psi_2 as well.
    """

    box: Box
    options: InitialOptions
    lpt_fields: bool = False
    _noise: dict[bool, MeshFunction] = field(default_factory=dict)

    def white_noise(self, seeds: Any, *, paired: bool = False) -> tf.Tensor:
        """Returns unit normal noise, this rank's block [..., x, y, z]; see `noise_function`.

        Args:
            seeds: int64, one for each universe.
            paired: whether to return the opposite of the seeds' noise.
        """
        if paired not in self._noise:
            fixed = self.options.fixed_amplitude
            self._noise[paired] = noise_function(
                self.box, self.options.noise, fixed=fixed, paired=paired
            )
        return self._noise[paired](seeds)

    def particles(
        self, noise: tf.Tensor, amplitude: tf.Tensor, factors: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tuple[tf.Tensor, ...]]:
        """Returns displacement [Mpc/h], velocity and LPT fields [Mpc/h], blocks [..., x, y, z, 3].

        Args:
            noise: white noise, block [..., x, y, z].
            amplitude: the amplitude of each mode, see `linear_amplitude`.
            factors: the factors of displacement and velocity, [..., 2, terms]; see `lpt_function`.
        """
        _, x, v, *lpt = self._lpt(noise, amplitude, tf.cast(factors, self.box.dtype))
        return x, v, tuple(lpt)

    def linear_field(self, noise: tf.Tensor, amplitude: tf.Tensor) -> tf.Tensor:
        """Returns the linear overdensity before growth, block [..., x, y, z].

        Args:
            noise, amplitude: as for `particles`.
        """
        return self._linear(noise, amplitude)

    @functools.cached_property
    def _lpt(self) -> MeshFunction:
        return lpt_function(self.box, self.options.lpt_order, fields=self.lpt_fields)

    @functools.cached_property
    def _linear(self) -> MeshFunction:
        return self.box.function(
            lambda _, noise, amplitude: to_field(to_spectrum(noise) * amplitude, self.box),
            white_noise=self.box.shape,
            amplitude=self.box.mode_shape,
        )
