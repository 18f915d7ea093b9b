"""Linear bias of the evolved density."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from flowpm_dist.grid.box import Box
from flowpm_dist.observables.bias.base import Bias
from flowpm_dist.observables.options import EULERIAN
from flowpm_dist.observables.universe_model import local_values


class EulerianBias(Bias):
    """The density 1 + b (rho - 1) [mean density].

    It would multiply redshift-space distortions by b, too: see `ObservationOptions`, which refuses
    it there.
    """

    parameters = EULERIAN

    def contrast(self, contrast: tf.Tensor, values: Mapping[str, tf.Tensor], box: Box) -> tf.Tensor:
        """Returns b (rho - 1)."""
        return local_values(values["b"], box) * contrast

    def linear_response(self, factor: tf.Tensor) -> tf.Tensor:
        """Returns b."""
        return factor
