"""A declared network on a mesh: its weights, and one step of its training.

Weights are whole on every rank; the gradients of all of them arrive complete.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmoflow.network.layers import (
    LOSSES,
    SPLIT_CHANNEL,
    mesh_outputs,
    whole_outputs,
)
from flowpm_dist.cosmoflow.planning.declarations import Declaration, Dense, Stage, declaration
from flowpm_dist.cosmoflow.planning.options import NetworkOptions
from flowpm_dist.grid.box import SPLIT
from flowpm_dist.options import constructed, in_unit
from meshimpl.compat import mtf
from meshimpl.graph_guards import Stopwatch
from meshimpl.mesh_function import MeshFunction
from meshimpl.operations.local import layer, together
from meshimpl.process_mesh import ProcessMesh

_DIMENSIONS = {
    1: ("units",),
    2: ("features", "units"),
    5: ("i", "j", "k", "channel", "channel_out"),
}
"""Names of a weight's dimensions, by their number."""

LAST_SCALE = 0.1
"""Scale of the last layer's first weights. The network then begins near the mean predictor, and its
first updates do not silence the layers before, from which trainings of this network seldom recover.
"""

LEAST_SPREAD = 0.03
"""Least spread of a calibrated feature, divided by the largest mean. A feature that varies less is
not enlarged to variance 1: every update of the layers before would shake the dense layers.
"""


class BaseNetwork(tf.Module):
    """A network that a training can train; its weights are equal on all ranks.

    Args:
        network: its declaration.
        mesh: the ranks, with an axis `replica` if they share a batch.
        width: cells along a side of a volume.
        batch: volumes of one step, over all replicas.
        parameters: number of parameters to find.
        channels: channels of the volumes.
        within: limit L of the means, which are then L tanh(mean / L) of what they would be; None
            for no limit, or the declaration's.
        options: see `NetworkOptions`.

    Attributes:
        weights: the variables that are trained.
        loss: name of the loss.
        outputs: number of outputs.
        stopwatch: seconds of the messages of steps.

    Raises:
        ValueError: a batch that the replicas do not divide, or an option that is not allowed.
        TypeError: an unknown option.
    """

    centre = False
    weights: list[tf.Variable]

    def __init__(
        self,
        network: Declaration,
        mesh: ProcessMesh,
        *,
        width: int,
        batch: int,
        parameters: int = 3,
        channels: int = 1,
        within: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(name="network")
        self.options = constructed(NetworkOptions, options)
        self.declaration, self.mesh = network, mesh
        self.width, self.batch, self.channels, self.within = width, batch, channels, within
        self.loss, self.input = self.options.loss, self.options.input or "log1p"
        self.parameters, self.outputs = parameters, self.options.outputs_of(parameters)
        self.master = tf.float64 if self.options.precision == "float64" else tf.float32
        self.stopwatch = Stopwatch()
        replicas = mesh.axis_size("replica")
        if batch % replicas:
            raise ValueError(f"a batch of {batch} volumes does not divide over replica:{replicas}")

    def _check_split(self, ranks: int) -> None:
        """Checks that volumes may be split over so many ranks."""
        if ranks > 1 and (reason := self.declaration.whole_because(self.mesh.size)):
            raise ValueError(reason)

    @property
    @abstractmethod
    def state(self) -> list[tf.Variable]:
        """The variables of a checkpoint: the weights, and others that change in training."""

    @property
    def saved(self) -> list[tf.Variable]:
        """The variables that `on_whole_volumes` reads."""
        return self.state

    @abstractmethod
    def step(
        self, volume: Any, target: Any, sample: Any, seed: int
    ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        """Returns loss and gradients of one batch. On all ranks together.

        Args:
            volume: density, mean 1: this rank's block [batch, x, y, z] or with channels, or all.
            target: standardised parameters [batch, parameter], likewise.
            sample: number of each sample [batch], which decides what dropout leaves out.
            seed: seed of dropout; another for each step.

        Returns:
            The mean loss over the whole batch, this rank's outputs [batch, outputs], and the
            gradient of the mean to each of `weights`; loss and gradients are equal on all ranks.
        """

    @abstractmethod
    def predict(self, volume: Any) -> tf.Tensor:
        """Returns this rank's outputs of a batch [batch, outputs], without dropout."""

    @abstractmethod
    def on_whole_volumes(self, volumes: tf.Tensor) -> tf.Tensor:
        """Returns the outputs of whole volumes [n, x, y, z] or with channels, [n, outputs].

        Each rank alone, in plain TensorFlow that can be traced and saved; see `predict`.
        """

    def calibrate(self, volumes: Iterable[Any]) -> None:
        """Scales features before the first step, if the network has such a scale."""

    def recentre(self, volumes: Iterable[Any]) -> None:
        """Shifts features for `predict`, if the network has such a shift."""

    def broadcast_weights(self) -> None:
        """Gives every rank the weights of rank 0."""
        for variable in self.state:
            variable.assign(self.mesh.world.broadcast(variable))


class Network(BaseNetwork):
    """A network of cubic volumes, on any mesh of axes `replica`, `row` and `col`.

    The features that enter the first dense layer are averages over a volume. They differ little
    between universes, compared with their mean, which makes learning slow. So they are shifted and
    scaled by constant numbers. The network can express what it could before (data-dependent
    initialisation, arXiv:1602.07868).

    Args:
        network: a declaration, or the name of one.
        mesh: the ranks.
        split_channels: a mesh axis over which the output channels of convolutions are split
            instead of the volume.
        centre: whether a step subtracts the features' mean over the batch, see `recentre`.
        seed: seed of the weights.
        options: width, batch, parameters, channels and within of `BaseNetwork`, and the options
            of `NetworkOptions`.

    Attributes:
        shift, scale: shift and scale of the features, variables [features]; at first 0 and 1.

    Raises:
        ValueError: see `BaseNetwork`; or an unknown name, a volume that is too small, or a split
            that the network's edges do not allow.
    """

    def __init__(
        self,
        network: Declaration | str,
        mesh: ProcessMesh,
        *,
        split_channels: str | None = None,
        centre: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> None:
        declared = declaration(network) if isinstance(network, str) else network
        super().__init__(declared, mesh, **options)
        self.precision = tf.as_dtype(self.options.precision)
        self.split_channels, self.centre = split_channels, centre
        self.stages = declared.stages(self.width, self.channels, self.outputs)
        split = mesh.size // mesh.axis_size("replica")
        if split_channels is not None:
            if split_channels not in mesh.names:
                raise ValueError(f"the mesh {mesh} has no axis {split_channels!r}")
            split //= mesh.axis_size(split_channels)
        self._check_split(split)
        self.weights = initial_weights(self.stages, self.master, seed, declared.first_weights)
        features = next(s.channels for s in self.stages if isinstance(s.layer, Dense))
        self.shift = tf.Variable(tf.zeros([features], self.master), trainable=False, name="shift")
        self.scale = tf.Variable(tf.ones([features], self.master), trainable=False, name="scale")

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
    def input_dtype(self) -> np.dtype:
        """The dtype of the density."""
        return np.dtype("float64" if self.precision == tf.float64 else "float32")

    @property
    def state(self) -> list[tf.Variable]:
        """The variables of a checkpoint: the weights, and the features' shift and scale."""
        return [*self.weights, self.shift, self.scale]

    def _inputs(self, **others: Any) -> dict[str, Any]:
        batch = mtf.Dimension("batch", self.batch)
        sides = [mtf.Dimension(name, self.width) for name in "xyz"]
        channel = [mtf.Dimension("channel", self.channels)] if self.channels > 1 else []
        volume = mtf.Shape([batch, *sides, *channel])
        inputs: dict[str, Any] = {"volume": (volume, tf.as_dtype(self.input_dtype))}
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
    def _held(self) -> dict[str, tf.Variable | tf.Tensor]:
        weights: dict[str, Any] = {f"weight_{n}": w for n, w in enumerate(self.weights)}
        return weights | {"shift": self.shift, "scale": self.scale}

    @functools.cached_property
    def _predict(self) -> MeshFunction:
        def predict(_: Any, volume: Any, *held: Any) -> list[Any]:
            return list(mesh_outputs(self, volume, held, None))

        return MeshFunction(predict, self.mesh, self.layout, self._inputs())

    @functools.cached_property
    def _step(self) -> MeshFunction:
        targets = [mtf.Dimension("parameter", self.parameters)]
        inputs = self._inputs(target=(targets, self.weights[0].dtype), sample=([], tf.int64))
        inputs["seed"] = (mtf.Shape([]), tf.int64)

        def step(_: Any, volume: Any, target: Any, sample: Any, *rest: Any) -> Any:
            *held, seed = rest
            prediction, _, _ = mesh_outputs(self, volume, held, (seed, sample))
            each = layer(
                lambda y, t: LOSSES[self.loss](t, y) / self.batch,
                [prediction, target],
                mtf.Shape([volume.shape[0]]),
                name="loss",
            )
            loss = mtf.reduce_sum(each)
            gradients = mtf.gradients([loss], held[:-2])
            loss, *gradients = together([loss, *gradients])
            return [loss, prediction, *gradients]

        return MeshFunction(step, self.mesh, self.layout, inputs, stopwatch=self.stopwatch)

    def step(
        self, volume: Any, target: Any, sample: Any, seed: int
    ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        """Returns loss and gradients of one batch, see `BaseNetwork.step`."""
        volume, target = in_unit("volume", volume), in_unit("target", target)
        loss, outputs, *gradients = self._step(
            volume=volume, target=target, sample=sample, seed=np.int64(seed), **self._held
        )
        return loss, outputs, gradients

    def predict(self, volume: Any) -> tf.Tensor:
        """Returns this rank's outputs of a batch [batch, outputs], without dropout."""
        return self._predict(volume=in_unit("volume", volume), **self._held)[0]

    def on_whole_volumes(self, volumes: tf.Tensor) -> tf.Tensor:
        """Returns the outputs of whole volumes, see `BaseNetwork.on_whole_volumes`."""
        return whole_outputs(self, volumes)

    def predict_with_hidden(self, volume: Any) -> tuple[np.ndarray, np.ndarray]:
        """Returns the outputs, and the features that the last layer makes them of.

        On all ranks together.

        Args:
            volume: as for `step`.

        Returns:
            Both for the whole batch, [batch, outputs] and [batch, features], on every rank.
        """
        volume = in_unit("volume", volume)
        outputs, _, hidden = self._predict(volume=volume, **self._held)
        return of_all_replicas(outputs, self.mesh), of_all_replicas(hidden, self.mesh)

    def calibrate(self, volumes: Iterable[Any]) -> None:
        """Gives the dense layers features of mean 0 and variance 1. On all ranks together.

        Args:
            volumes: this rank's blocks of batches, as for `step`.
        """
        features = self._features(volumes)
        mean, spread = features.mean(axis=0, dtype=np.float64), features.std(axis=0)
        if spread.max() <= 1e-6 * np.abs(mean).max():
            return  # one volume, again and again: there is nothing to learn from
        self.shift.assign(mean)
        self.scale.assign(1 / np.maximum(spread, LEAST_SPREAD * np.abs(mean).max()))

    def recentre(self, volumes: Iterable[Any]) -> None:
        """Gives the dense layers features of mean 0 in `predict`. On all ranks together.

        With `centre` the features of a step are those less their mean over its batch, which follows
        every update of the layers before; a single volume has no batch.

        Args:
            volumes: this rank's blocks of batches, as for `step`.
        """
        self.shift.assign(self._features(volumes).mean(axis=0, dtype=np.float64))

    def _features(self, volumes: Iterable[Any]) -> np.ndarray:
        """Returns the features of each volume of all replicas, not scaled [volume, features]."""
        shift, scale = tf.zeros_like(self.shift), tf.ones_like(self.scale)
        held = self._held | {"shift": shift, "scale": scale}
        features = [self._predict(volume=v, **held)[1] for v in volumes]
        return of_all_replicas(tf.concat(features, axis=0), self.mesh)


def of_all_replicas(values: Any, mesh: ProcessMesh) -> np.ndarray:
    """Returns the rows [n, value] of all replicas, on every rank. On all ranks together.

    Args:
        values: this replica's, as many rows as every other has.
        mesh: all ranks.
    """
    rows = tf.convert_to_tensor(values)
    if mesh.axis_size("replica") > 1:
        rows = mesh.communicator("replica").allgather(rows)
    return rows.numpy()


def initial_weights(
    stages: Sequence[Stage],
    dtype: tf.DType,
    seed: int,
    rule: Literal["he", "glorot"] = "he",
) -> list[tf.Variable]:
    """Returns kernel and bias of each layer that has them, in turn. Biases are zero.

    Args:
        stages: the layers.
        dtype: dtype of the weights.
        seed: seed of the kernels.
        rule: "he": kernels are normal with variance 2 / inputs (He and others 2015), the last one
            with less, see `LAST_SCALE`. "glorot": they are uniform with variance 2 / (inputs +
            outputs), as in Keras (Glorot and Bengio 2010). The outputs of a convolution are the
            cells of its kernel times its channels.
    """
    weights = []
    for number, stage in enumerate(stages):
        if stage.weights is None:
            continue
        rng, (*cells, channels, after) = np.random.default_rng([seed, number]), stage.weights
        if rule == "glorot":
            limit = np.sqrt(6 / (math.prod(cells) * (channels + after)))
            draw = rng.uniform(-limit, limit, stage.weights)
        else:
            scale = LAST_SCALE if stage is stages[-1] else 1
            deviation = scale * np.sqrt(2 / (math.prod(cells) * channels))
            draw = deviation * rng.standard_normal(stage.weights)
        weights.append(tf.Variable(draw, dtype=dtype, name=f"{stage.name}_kernel"))
        bias = tf.zeros([stage.channels_after], dtype)
        weights.append(tf.Variable(bias, name=f"{stage.name}_bias"))
    return weights
