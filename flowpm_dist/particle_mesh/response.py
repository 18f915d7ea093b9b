"""Factors of the potential that depend on the wavenumber and on numbers of each kick."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import tensorflow as tf


class Response(Hashable, Protocol):
    """A factor of the potential at each wavenumber; equal ones of a class are compiled once."""

    @property
    def size(self) -> int:
        """The number of its coefficients."""

    def __call__(self, k: tf.Tensor, coefficients: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the factor [1]; it is 1 where all coefficients are 0.

        Args:
            k: wavenumbers over the Nyquist wavenumber of the force mesh, of any shape.
            coefficients: `size` of them, which broadcast with k.
        """


@dataclass(frozen=True)
class NeutrinoResponse:
    """The overdensity of all matter over the particles' overdensity, see `cosmology.neutrinos`.

    Its coefficients are each species' fraction of matter, and then their free-streaming wavenumbers
    over the Nyquist wavenumber of the force mesh.
    """

    size: int = 2

    def __call__(self, k: tf.Tensor, coefficients: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the factor, see `Response`."""
        count, k = self.size // 2, tf.where(k > 0, k, tf.ones_like(k))
        fractions, scales = coefficients[:count], coefficients[count:]
        parts = [f * (s / (s + k)) ** 2 for f, s in zip(fractions, scales, strict=True)]
        return (1 - sum(fractions[1:], fractions[0])) / (1 - sum(parts[1:], parts[0]))


@dataclass(frozen=True)
class Product:
    """The product of responses, whose coefficients follow each other."""

    parts: tuple[Response, ...]

    @property
    def size(self) -> int:
        """The number of all coefficients."""
        return sum(part.size for part in self.parts)

    def __call__(self, k: tf.Tensor, coefficients: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the product of the factors of the parts, see `Response`."""
        factor, begin = None, 0
        for part in self.parts:
            end = begin + part.size
            each = part(k, coefficients[begin:end])
            factor, begin = each if factor is None else factor * each, end
        assert factor is not None
        return factor
