"""Interlacing: two paintings half a cell apart, whose leading aliases cancel.

Sefusatti, Crocce, Scoccimarro and Couchman (2016), arXiv:1512.07295.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from flowpm_dist.grid.box import Box
from flowpm_dist.grid.fourier import Kernel, filter_imaginary, filter_real


def interlace(spectrum: Any, shifted: Any, box: Box) -> Any:
    """Returns (delta_1 + exp(+i k.h/2) delta_2) / 2, with h the cell.

    With the transform's exp(-i k.x), the modes of the second density have the phase factor
    exp(-i k.h/2), which is undone here. The images with an odd sum of cell numbers then have
    opposite signs in the two and cancel.

    Args:
        spectrum: the spectrum of the density of particles at x, mtf tensor.
        shifted: the spectrum of the density of the same particles at x + h/2.
        box: the box of both.
    """

    def of_phase(function: Callable[[tf.Tensor], tf.Tensor]) -> Kernel:
        def kernel(*k: tf.Tensor) -> tf.Tensor:
            return function(sum(0.5 * h * along for h, along in zip(box.cell, k, strict=True)))

        return kernel

    real = filter_real(shifted, box, of_phase(tf.cos))
    imaginary = filter_imaginary(shifted, box, of_phase(tf.sin))
    return (spectrum + real + imaginary) * 0.5
