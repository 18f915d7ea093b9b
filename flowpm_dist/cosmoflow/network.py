"""A declared network on a mesh: its weights, and what one step of training needs of it.

The density enters in the layout that the simulator leaves it in: batch over `replica`, x over
`row`, y over `col`. Convolutions and pools work on blocks while those are thick; then each replica
gathers its volumes, which are small by now, and every rank of it does the rest. Weights are whole
on every rank; the gradients of all of them arrive complete.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmoflow import losses
from flowpm_dist.cosmoflow.declarations import (
    Convolution,
    Declaration,
    Dense,
    Dropout,
    Pool,
    Shrink,
    Stage,
    declaration,
)
from flowpm_dist.grid.box import SPLIT
from meshimpl.compat import mtf
from meshimpl.mesh_function import MeshFunction
from meshimpl.operations import layers
from meshimpl.operations.convolution import convolution
from meshimpl.operations.local import layer, together
from meshimpl.process_mesh import ProcessMesh
from meshimpl.stopwatch import Stopwatch

Precision = Literal["float32", "bfloat16", "float64"]
INPUTS = ("density", "log1p")
SPLIT_CHANNEL = "channel_split"
LAST = 0.1
"""Scale of the last layer's first weights. The network then begins near the mean predictor, and its
first updates do not silence the layers before, from which trainings of this network seldom recover.
"""
LEAST_SPREAD = 0.03
"""Of calibrated features, over their largest mean: what varies less is not enlarged to variance 1,
or every update of the layers before would shake the dense layers.
"""
_DIMENSIONS = {
    1: ("units",),
    2: ("features", "units"),
    5: ("i", "j", "k", "channel", "channel_out"),
}
"""Names of a weight's dimensions, by their number."""


class Network(tf.Module):
    """A network of cubic volumes with weights that are equal on all ranks.

    Args:
        network: a declaration, or the name of one.
        mesh: the ranks, of axes `replica`, `row` and `col`.
        width: cells along a side of a volume.
        batch: volumes of one step, over all replicas.
        parameters: number of parameters to find.
        channels: of the volumes.
        loss: "l1", "l2" or "likelihood", which adds an error bar for each parameter.
        input: what is done to the density: "density" (nothing) or "log1p", the logarithm of
            (1 + density) / 2, which is 0 at the mean density.
        precision: of the layers' work; weights and their gradients are float32, or float64 with it.
        gather_below: blocks of fewer cells along a split side are gathered.
        dropout: share of the features left out where the declaration has dropout.
        split_channels: a mesh axis over which the output channels of convolutions are split
            instead of the volume.
        seed: of the weights.

    Raises:
        ValueError: an unknown name, a volume that is too small, a batch that the replicas do not
            divide, or a split that the network's edges do not allow.
    """

    def __init__(
        self,
        network: Declaration | str,
        mesh: ProcessMesh,
        *,
        width: int,
        batch: int,
        parameters: int = 3,
        channels: int = 1,
        loss: str = "likelihood",
        input: Literal["density", "log1p"] = "log1p",
        precision: Precision = "float32",
        gather_below: int = 4,
        dropout: float = 0.0,
        split_channels: str | None = None,
        centre: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(name="network")
        if input not in INPUTS:
            raise ValueError(f"input {input!r} is not one of {', '.join(map(repr, INPUTS))}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout {dropout}: a share from 0 to below 1 is needed")
        self.declaration = declaration(network) if isinstance(network, str) else network
        self.mesh, self.width, self.batch, self.channels = mesh, width, batch, channels
        self.loss, self.input, self.precision = loss, input, tf.as_dtype(precision)
        self.parameters, self.outputs = parameters, losses.outputs_of(loss, parameters)
        self.gather_below, self.dropout = gather_below, dropout
        self.split_channels, self.centre = split_channels, centre
        self.stopwatch = Stopwatch()
        self.stages = self.declaration.stages(width, channels, self.outputs)
        self._check_mesh()
        master = tf.float64 if precision == "float64" else tf.float32
        self.weights = [
            variable
            for number, stage in enumerate(self.stages)
            if stage.weights is not None
            for variable in _initialised(
                stage, master, [seed, number], LAST if stage is self.stages[-1] else 1.0
            )
        ]
        features = next(s.channels for s in self.stages if isinstance(s.layer, Dense))
        self.shift = tf.Variable(tf.zeros([features], master), trainable=False, name="shift")
        self.scale = tf.Variable(tf.ones([features], master), trainable=False, name="scale")

    def _check_mesh(self) -> None:
        replicas = self.mesh.axis_size("replica")
        if self.batch % replicas:
            raise ValueError(
                f"a batch of {self.batch} volumes does not divide over replica:{replicas}"
            )
        split = self.mesh.size // replicas
        if self.split_channels is not None:
            if self.split_channels not in self.mesh.names:
                raise ValueError(f"the mesh {self.mesh} has no axis {self.split_channels!r}")
            split //= self.mesh.axis_size(self.split_channels)
        if split > 1 and self.declaration.edges == "valid":
            raise ValueError(
                f"{self.declaration.name} has valid edges, so that its volumes cannot be split: "
                f"use sc18-periodic, or the mesh replica:{self.mesh.size}"
            )

    @property
    def layout(self) -> str:
        """Tensor dimension to mesh axis; an axis that splits channels splits nothing else."""
        rules = [
            f"{dim}:{axis}"
            for axis in self.mesh.names
            if axis != self.split_channels
            for dim in SPLIT.get(axis, ())
        ]
        if self.split_channels is not None:
            rules.append(f"{SPLIT_CHANNEL}:{self.split_channels}")
        return ";".join(rules)

    @property
    def volume_shape(self) -> Any:
        """`mtf.Shape` of a batch of volumes, [batch, x, y, z] or [batch, x, y, z, channel]."""
        sides = [mtf.Dimension(name, self.width) for name in "xyz"]
        channel = [mtf.Dimension("channel", self.channels)] if self.channels > 1 else []
        return mtf.Shape([mtf.Dimension("batch", self.batch), *sides, *channel])

    @property
    def input_dtype(self) -> np.dtype:
        """Of the density."""
        return np.dtype("float64" if self.precision == tf.float64 else "float32")

    def _inputs(self, **others: Any) -> dict[str, Any]:
        batch = mtf.Dimension("batch", self.batch)
        inputs: dict[str, Any] = {"volume": (self.volume_shape, tf.as_dtype(self.input_dtype))}
        inputs |= {
            name: (mtf.Shape([batch, *dims]), dtype) for name, (dims, dtype) in others.items()
        }
        for number, weight in enumerate(self.weights):
            names = _DIMENSIONS[weight.shape.rank]
            dims = [mtf.Dimension(d, n) for d, n in zip(names, weight.shape, strict=True)]
            inputs[f"weight_{number}"] = (mtf.Shape(dims), weight.dtype)
        features = mtf.Shape([mtf.Dimension("features", self.shift.shape[0])])
        return inputs | dict.fromkeys(("shift", "scale"), (features, self.shift.dtype))

    @property
    def state(self) -> list[tf.Variable]:
        """What a checkpoint must hold: the weights, and the features' shift and scale."""
        return [*self.weights, self.shift, self.scale]

    @property
    def _held(self) -> dict[str, tf.Variable]:
        weights = {f"weight_{n}": w for n, w in enumerate(self.weights)}
        return weights | {"shift": self.shift, "scale": self.scale}

    @functools.cached_property
    def _predict(self) -> MeshFunction:
        def predict(_: Any, volume: Any, *held: Any) -> list[Any]:
            return list(self._outputs_of(volume, held, None))

        return MeshFunction(predict, self.mesh, self.layout, self._inputs())

    @functools.cached_property
    def _step(self) -> MeshFunction:
        targets = [mtf.Dimension("parameter", self.parameters)]
        inputs = self._inputs(target=(targets, self.weights[0].dtype), sample=([], tf.int64))
        inputs["seed"] = (mtf.Shape([]), tf.int64)

        def step(_: Any, volume: Any, target: Any, sample: Any, *rest: Any) -> Any:
            *held, seed = rest
            weights = held[: len(self.weights)]
            prediction, _ = self._outputs_of(volume, held, (seed, sample))
            each = layer(
                lambda y, t: losses.loss_function(self.loss)(t, y) / self.batch,
                [prediction, target],
                mtf.Shape([volume.shape[0]]),
                name="loss",
            )
            loss = mtf.reduce_sum(each)
            gradients = mtf.gradients([loss], weights)
            loss, *gradients = together([loss, *gradients])
            return [loss, prediction, *gradients]

        return MeshFunction(step, self.mesh, self.layout, inputs, stopwatch=self.stopwatch)

    def step(
        self, volume: Any, target: Any, sample: Any, seed: int
    ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        """Loss and gradients of one batch. On all ranks together.

        Args:
            volume: density, mean 1: this rank's block [batch, x, y, z] or with channels, or all.
            target: standardised parameters [batch, parameter], likewise.
            sample: number of each sample [batch], which decides what dropout leaves out.
            seed: of dropout; another for each step.

        Returns:
            the mean loss over the whole batch, this rank's outputs [batch, outputs], and the
            gradient of the mean to each of `weights`; loss and gradients are equal on all ranks.
        """
        loss, outputs, *gradients = self._step(
            volume=volume, target=target, sample=sample, seed=np.int64(seed), **self._held
        )
        return loss, outputs, gradients

    def predict(self, volume: Any) -> tf.Tensor:
        """Outputs of a batch, without dropout: this rank's block [batch, outputs]."""
        return self._predict(volume=volume, **self._held)[0]

    def calibrate(self, volumes: Iterable[Any]) -> None:
        """Give the dense layers features of mean 0 and variance 1. On all ranks together.

        What is left of a volume after averaging over it differs little from one universe to the
        next beside its mean, and learning is slow along it. So the features that enter the first
        dense layer are shifted and scaled, from here on by the same numbers: the network can
        express what it could before (data-dependent initialisation, arXiv:1602.07868).

        Args:
            volumes: this rank's blocks of batches, as for `step`.
        """
        found = self._features(volumes) / self.scale.numpy() + self.shift.numpy()
        mean, spread = found.mean(axis=0), found.std(axis=0)
        if spread.max() <= 1e-6 * np.abs(mean).max():
            return  # one volume, again and again: there is nothing to learn from
        self.shift.assign(mean)
        self.scale.assign(1 / np.maximum(spread, LEAST_SPREAD * np.abs(mean).max()))

    def recentre(self, volumes: Iterable[Any]) -> None:
        """Give the dense layers features of mean 0, where they are asked what a volume is.

        With `centre` the features of a step are those less their mean over its batch, which follows
        every update of the layers before; asked alone, a volume has no batch. On all ranks
        together.

        Args:
            volumes: this rank's blocks of batches, as for `step`.
        """
        self.shift.assign_add(self._features(volumes).mean(axis=0) / self.scale)

    def _features(self, volumes: Iterable[Any]) -> np.ndarray:
        """Those that the first dense layer is given for each volume of all replicas."""
        found = [self._predict(volume=v, **self._held)[1] for v in volumes]
        return self._of_all_replicas(tf.concat(found, axis=0))

    def _of_all_replicas(self, features: tf.Tensor) -> np.ndarray:
        if self.mesh.axis_size("replica") > 1:
            features = self.mesh.communicator("replica").allgather(features)
        return features.numpy()

    def whole_outputs(self, outputs: tf.Tensor) -> np.ndarray:
        """The outputs of the whole batch [batch, outputs], on every rank, from the ranks' own."""
        return self._predict.impl.gather(outputs, self._outputs_shape).numpy()

    @property
    def _outputs_shape(self) -> Any:
        dims = mtf.Dimension("batch", self.batch), mtf.Dimension("units", self.outputs)
        return mtf.Shape(dims)

    def broadcast_weights(self) -> None:
        """Give every rank the weights of rank 0."""
        for variable in self.state:
            variable.assign(self.mesh.world.broadcast(variable))

    def _outputs_of(self, volume: Any, held: Sequence[Any], dropping: Any) -> tuple[Any, Any]:
        """The network itself, and the features that its first dense layer is given.

        Args:
            volume: mtf tensor of `volume_shape`.
            held: mtf tensors: kernel and bias of each layer in turn, and the features' shift and
                scale.
            dropping: seed and sample numbers; None while not training.
        """
        *weights, shift, scale = held
        features = None
        x, rest, split = self._prepared(volume), iter(weights), _split_sides(volume)
        drops = 0
        for stage in self.stages:
            here = stage.layer
            last = stage is self.stages[-1]
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
                    x = mtf.cast(x, kernel.dtype)  # few numbers from here on
                    x = layer(_calibrated, [x, shift, scale], x.shape, name="calibrated")
                    features = x
                    if self.centre and dropping is not None:
                        x = x - mtf.reduce_mean(x, reduced_dim=x.shape[0])
                x = layers.dense(x, kernel, name=stage.name)
            elif isinstance(here, Dropout) and dropping is not None and self.dropout:
                drops += 1
                seed, sample = dropping
                x = layers.dropout(x, self.dropout, seed, sample, drops, name=stage.name)
            if stage.weights is not None:
                x = layers.add_bias(x, next(rest), name=f"{stage.name}_bias")
                if not last:
                    x = layers.leaky_relu(x, self.declaration.slope, name=f"{stage.name}_relu")
        return self._finished(x), features

    def _prepared(self, volume: Any) -> Any:
        dims = volume.shape.dims + ([] if self.channels > 1 else [mtf.Dimension("channel", 1)])
        x = layer(
            tf.identity if self.input == "density" else _logarithm,
            [volume],
            volume.shape,
            name="input",
        )
        return mtf.cast(mtf.reshape(x, mtf.Shape(dims)), self.precision)

    def _finished(self, x: Any) -> Any:
        if not self.declaration.bounded:
            return x
        count = self.parameters

        def bound(y: tf.Tensor) -> tf.Tensor:
            return tf.concat([1.2 * tf.tanh(y[:, :count]), y[:, count:]], axis=1)

        return layer(bound, [x], x.shape, name="bounded")

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
        out = "channel_out" if self.split_channels is None else SPLIT_CHANNEL
        if self.split_channels is not None:
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


def _logarithm(density: tf.Tensor) -> tf.Tensor:
    return tf.math.log1p(density) - np.log(2.0)


def _calibrated(x: tf.Tensor, shift: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    return (x - shift) * scale


def _initialised(
    stage: Stage, dtype: tf.DType, seed: Sequence[int], scale: float
) -> list[tf.Variable]:
    """Kernel and bias of a layer: variance scale^2 2 / inputs (He and others 2015), and zeros."""
    assert stage.weights is not None
    inputs = int(np.prod(stage.weights[:-1]))
    deviation = scale * np.sqrt(2 / inputs)
    draw = deviation * np.random.default_rng(seed).standard_normal(stage.weights)
    kernel = tf.Variable(draw, dtype=dtype, name=f"{stage.name}_kernel")
    return [kernel, tf.Variable(tf.zeros([stage.channels_after], dtype), name=f"{stage.name}_bias")]
