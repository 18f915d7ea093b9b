"""The layers of a declared network as operations on mesh tensors.

The density enters in the layout that the simulator leaves it in: batch over `replica`, x over
`row`, y over `col`. Convolutions and pools work on blocks while those are thick. Then each replica
gathers its volumes, which are small by now, and every rank of it does the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmoflow.network.losses import kept_within
from flowpm_dist.cosmoflow.planning.declarations import (
    Convolution,
    Declaration,
    Dense,
    Dropout,
    Pool,
    Shrink,
    Stage,
)
from meshimpl.compat import mtf
from meshimpl.operations import layers
from meshimpl.operations.convolution import convolution
from meshimpl.operations.local import layer

USUAL_CONVERGENCE = 0.02
"""About that of lines of sight to galaxies at a redshift of 1; networks are given multiples."""

INPUTS: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "density": tf.identity,
    "log1p": lambda density: tf.math.log1p(density) - np.log(2.0),
    "log1p-counts": tf.math.log1p,
    "asinh": lambda density: tf.math.asinh(density - 1),
    "convergence": lambda convergence: convergence / USUAL_CONVERGENCE,
}
"""What may be done to the volumes: "log1p" and "asinh" are 0 at the mean density, "log1p-counts" at
0. "asinh" also takes densities below 0, as noise makes them.
"""
SPLIT_CHANNEL = "channel_split"


@dataclass(frozen=True)
class LayerGraph:
    """A network as a function of mesh tensors: of a volume, of the weights, and of what is dropped.

    Attributes:
        declaration: of the network.
        stages: its layers with their shapes.
        channels: of the volumes.
        parameters: number of parameters to find.
        input: what is done to the density, one of `INPUTS`.
        precision: of the layers' work.
        gather_below: blocks of fewer cells along a split side are gathered.
        dropout: share of the features that is left out in training.
        split_channels: whether the output channels of convolutions are split instead of volumes.
        centre: whether features are those less their mean over the batch in training.
        within: what means are softly kept within, +- this; None where they are not.
    """

    declaration: Declaration
    stages: Sequence[Stage]
    channels: int
    parameters: int
    input: str
    precision: tf.DType
    gather_below: int
    dropout: float
    split_channels: bool
    centre: bool
    within: float | None = None

    def __call__(
        self, volume: Any, weights: Sequence[Any], scaling: tuple[Any, Any], dropping: Any
    ) -> tuple[Any, Any]:
        """Returns the outputs, and the features that the first dense layer is given.

        Args and result: see `with_hidden`, whose last is left out.
        """
        return self.with_hidden(volume, weights, scaling, dropping)[:2]

    def with_hidden(
        self, volume: Any, weights: Sequence[Any], scaling: tuple[Any, Any], dropping: Any
    ) -> tuple[Any, Any, Any]:
        """Returns the outputs, and the features that the first and the last layer are given.

        Args:
            volume: mesh tensor [batch, x, y, z], or with channels.
            weights: kernel and bias of each layer in turn.
            scaling: shift and scale of the features.
            dropping: seed and sample numbers; None outside training.

        Returns:
            Mesh tensors [batch, outputs], [batch, features] and [batch, last features].
        """
        features = hidden = None
        x, rest, split = self._prepared(volume), iter(weights), _split_sides(volume)
        drops = 0
        for stage in self.stages:
            here = stage.layer
            if split and self._too_thin(stage, split):
                x, split = layers.whole(x, list(split)), {}
            if isinstance(here, Convolution):
                x = self._convolved(x, next(rest), stage)
            elif isinstance(here, Pool):
                x = layers.pool(x, here.kind, here.size, name=stage.name)
            elif isinstance(here, Shrink):
                x = layers.pool(x, "average", stage.width // here.width, name=stage.name)
            elif isinstance(here, Dense):
                kernel = next(rest)
                x = mtf.reshape(x, mtf.Shape([x.shape[0], kernel.shape[0]]))
                if features is None:
                    x = features = self._scaled(
                        x, scaling, kernel.dtype, training=dropping is not None
                    )
                hidden = x
                x = layers.dense(x, kernel, name=stage.name)
            elif isinstance(here, Dropout) and dropping is not None and self.dropout:
                drops += 1
                seed, sample = dropping
                x = layers.dropout(x, self.dropout, seed, sample, drops, name=stage.name)
            if stage.weights is not None:
                x = layers.add_bias(x, next(rest), name=f"{stage.name}_bias")
                if stage is not self.stages[-1]:
                    x = layers.leaky_relu(x, self.declaration.slope, name=f"{stage.name}_relu")
        return self._finished(x), features, hidden

    def _scaled(self, x: Any, scaling: tuple[Any, Any], dtype: tf.DType, *, training: bool) -> Any:
        x = mtf.cast(x, dtype)  # few numbers from here on
        shift, scale = scaling
        if self.centre and training:
            # Not the shift and then the mean: a step is the same to the bit whatever the shift is,
            # which follows `recentre`, and with it where a training was stopped.
            shift = mtf.reduce_mean(x, reduced_dim=x.shape[0])
        parts = [x, shift, scale]
        return layer(lambda y, shift, scale: (y - shift) * scale, parts, x.shape, name="scaled")

    def _prepared(self, volume: Any) -> Any:
        dims = volume.shape.dims + ([] if self.channels > 1 else [mtf.Dimension("channel", 1)])
        x = layer(INPUTS[self.input], [volume], volume.shape, name="input")
        return mtf.cast(mtf.reshape(x, mtf.Shape(dims)), self.precision)

    def _finished(self, x: Any) -> Any:
        bounded, within = self.declaration.bounded, self.within
        if not bounded and within is None:
            return x
        kept = functools.partial(
            kept_within, parameters=self.parameters, bounded=bounded, within=within
        )
        return layer(kept, [x], x.shape, name="bounded")

    def _too_thin(self, stage: Stage, split: Mapping[str, int]) -> bool:
        """Whether a layer had better work on whole volumes than on blocks."""
        here = stage.layer
        if isinstance(here, Dense | Shrink | Dropout):
            return True
        step = here.stride if isinstance(here, Convolution) else here.size
        for ranks in split.values():
            block = stage.width // ranks
            if stage.width % ranks or block % step or block < self.gather_below:
                return True
        return False

    def _convolved(self, x: Any, kernel: Any, stage: Stage) -> Any:
        # Renaming adds what is still to be added over ranks, so only where it must split.
        out = SPLIT_CHANNEL if self.split_channels else "channel_out"
        if self.split_channels:
            kernel = mtf.rename_dimension(kernel, "channel_out", out)
        x = convolution(
            x,
            kernel,
            stride=stage.layer.stride,  # type: ignore[union-attr]
            edges=self.declaration.edges,
            name=stage.name,
        )
        return mtf.rename_dimension(x, out, "channel")


def _split_sides(volume: Any) -> dict[str, int]:
    """Sides of a volume [batch, x, y, z, ...] that are split, and over how many ranks."""
    sides = volume.shape.dims[1:4]
    ranks = {dim.name: volume.mesh.impl.ranks_over(dim).size for dim in sides}
    return {side: count for side, count in ranks.items() if count > 1}
