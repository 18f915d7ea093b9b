"""A declared network on a mesh: its weights, and one step of its training.

Weights are whole on every rank; the gradients of all of them arrive complete.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from flowpm_dist.cosmoflow.network import losses
from flowpm_dist.cosmoflow.network.features import FeatureScaling
from flowpm_dist.cosmoflow.network.layer_graph import INPUTS, SPLIT_CHANNEL, LayerGraph
from flowpm_dist.cosmoflow.network.plain_graph import plain_outputs
from flowpm_dist.cosmoflow.network.weights import initial_weights
from flowpm_dist.cosmoflow.planning.declarations import Declaration, Dense, declaration
from flowpm_dist.grid.box import SPLIT
from meshimpl.compat import mtf
from meshimpl.mesh_function import MeshFunction
from meshimpl.operations.local import layer, together
from meshimpl.process_mesh import ProcessMesh
from meshimpl.stopwatch import Stopwatch

Precision = Literal["float32", "bfloat16", "float64"]
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
        input: what is done to the volumes: "density" (nothing), "log1p", the logarithm of
            (1 + density) / 2, which is 0 at the mean density, "asinh", the inverse hyperbolic
            sine of density - 1, or "log1p-counts", the logarithm of
            1 + counts.
        precision: of the layers' work; weights and their gradients are float32, or float64 with it.
        gather_below: blocks of fewer cells along a split side are gathered.
        dropout: share of the features left out where the declaration has dropout.
        split_channels: a mesh axis over which the output channels of convolutions are split
            instead of the volume.
        centre: whether a step takes the mean over the batch off the features, see `recentre`.
        within: limit L of the means, which are then L tanh(mean / L) of what they would be; None
            for no limit, or that of the declaration.
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
        input: Literal["density", "log1p", "log1p-counts", "asinh"] = "log1p",
        precision: Precision = "float32",
        gather_below: int = 4,
        dropout: float = 0.0,
        split_channels: str | None = None,
        centre: bool = False,
        within: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(name="network")
        if input not in INPUTS:
            raise ValueError(f"input {input!r} is not one of {', '.join(map(repr, INPUTS))}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout {dropout}: a share from 0 to below 1 is needed")
        self.declaration = declaration(network) if isinstance(network, str) else network
        self.mesh, self.width, self.batch, self.channels = mesh, width, batch, channels
        self.loss, self.precision = loss, tf.as_dtype(precision)
        self.parameters, self.outputs = parameters, losses.outputs_of(loss, parameters)
        self.split_channels, self.centre, self.dropout = split_channels, centre, dropout
        self.within = within
        self.stopwatch = Stopwatch()
        self.stages = self.declaration.stages(width, channels, self.outputs)
        self._check_mesh()
        self._graph = LayerGraph(
            self.declaration,
            self.stages,
            channels=channels,
            parameters=parameters,
            input=input,
            precision=self.precision,
            gather_below=gather_below,
            dropout=dropout,
            split_channels=split_channels is not None,
            centre=centre,
            within=within,
        )
        master = tf.float64 if precision == "float64" else tf.float32
        self.weights = initial_weights(self.stages, master, seed, self.declaration.first_weights)
        features = next(s.channels for s in self.stages if isinstance(s.layer, Dense))
        self._scaling = FeatureScaling(features, master)

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
        reason = self.declaration.whole_because
        if split > 1 and reason:
            raise ValueError(
                f"{self.declaration.name} {reason}, so that its volumes cannot be split: "
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
        """The dtype of the density."""
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
        shift = self._scaling.shift
        features = mtf.Shape([mtf.Dimension("features", shift.shape[0])])
        return inputs | dict.fromkeys(("shift", "scale"), (features, shift.dtype))

    @property
    def state(self) -> list[tf.Variable]:
        """The variables of a checkpoint: the weights, and the features' shift and scale."""
        return [*self.weights, self._scaling.shift, self._scaling.scale]

    @property
    def saved(self) -> list[tf.Variable]:
        """The variables that `on_whole_volumes` reads."""
        return self.state

    @property
    def _held(self) -> dict[str, tf.Variable | tf.Tensor]:
        weights: dict[str, Any] = {f"weight_{n}": w for n, w in enumerate(self.weights)}
        return weights | {"shift": self._scaling.shift, "scale": self._scaling.scale}

    @functools.cached_property
    def _predict(self) -> MeshFunction:
        def predict(_: Any, volume: Any, *held: Any) -> list[Any]:
            *weights, shift, scale = held
            return list(self._graph(volume, weights, (shift, scale), None))

        return MeshFunction(predict, self.mesh, self.layout, self._inputs())

    @functools.cached_property
    def _step(self) -> MeshFunction:
        targets = [mtf.Dimension("parameter", self.parameters)]
        inputs = self._inputs(target=(targets, self.weights[0].dtype), sample=([], tf.int64))
        inputs["seed"] = (mtf.Shape([]), tf.int64)

        def step(_: Any, volume: Any, target: Any, sample: Any, *rest: Any) -> Any:
            *weights, shift, scale, seed = rest
            prediction, _ = self._graph(volume, weights, (shift, scale), (seed, sample))
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
        """Returns loss and gradients of one batch. On all ranks together.

        Args:
            volume: density, mean 1: this rank's block [batch, x, y, z] or with channels, or all.
            target: standardised parameters [batch, parameter], likewise.
            sample: number of each sample [batch], which decides what dropout leaves out.
            seed: of dropout; another for each step.

        Returns:
            The mean loss over the whole batch, this rank's outputs [batch, outputs], and the
            gradient of the mean to each of `weights`; loss and gradients are equal on all ranks.
        """
        loss, outputs, *gradients = self._step(
            volume=volume, target=target, sample=sample, seed=np.int64(seed), **self._held
        )
        return loss, outputs, gradients

    def predict(self, volume: Any) -> tf.Tensor:
        """Returns this rank's outputs of a batch [batch, outputs], without dropout."""
        return self._predict(volume=volume, **self._held)[0]

    def on_whole_volumes(self, volumes: tf.Tensor) -> tf.Tensor:
        """Returns the outputs of whole volumes [n, x, y, z] or with channels, [n, outputs].

        Each rank by itself, in plain TensorFlow that can be traced and saved; see `predict`.
        """
        scaling = self._scaling.shift, self._scaling.scale
        return plain_outputs(self._graph, volumes, self.weights, scaling)

    @functools.cached_property
    def _predict_with_hidden(self) -> MeshFunction:
        def predict(_: Any, volume: Any, *held: Any) -> list[Any]:
            *weights, shift, scale = held
            return list(self._graph.with_hidden(volume, weights, (shift, scale), None)[::2])

        return MeshFunction(predict, self.mesh, self.layout, self._inputs())

    def predict_with_hidden(self, volume: Any) -> tuple[np.ndarray, np.ndarray]:
        """Returns the outputs, and the features that the last layer makes them of.

        On all ranks together.

        Args:
            volume: as for `step`.

        Returns:
            Those of the whole batch, [batch, outputs] and [batch, features], on every rank.
        """
        outputs, hidden = self._predict_with_hidden(volume=volume, **self._held)
        return of_all_replicas(outputs, self.mesh), of_all_replicas(hidden, self.mesh)

    def calibrate(self, volumes: Iterable[Any]) -> None:
        """Gives the dense layers features of mean 0 and variance 1, see `FeatureScaling`.

        On all ranks together.

        Args:
            volumes: this rank's blocks of batches, as for `step`.
        """
        self._scaling.calibrate(self._features(volumes))

    def recentre(self, volumes: Iterable[Any]) -> None:
        """Gives the dense layers features of mean 0 in `predict`. On all ranks together.

        With `centre` the features of a step are those less their mean over its batch, which follows
        every update of the layers before; a volume that is asked about alone has no batch.

        Args:
            volumes: this rank's blocks of batches, as for `step`.
        """
        self._scaling.recentre(self._features(volumes))

    def _features(self, volumes: Iterable[Any]) -> np.ndarray:
        """Returns the features of each volume of all replicas, not scaled [volume, features]."""
        shift, scale = self._scaling.shift, self._scaling.scale
        held = self._held | {"shift": tf.zeros_like(shift), "scale": tf.ones_like(scale)}
        found = [self._predict(volume=v, **held)[1] for v in volumes]
        return of_all_replicas(tf.concat(found, axis=0), self.mesh)

    def whole_outputs(self, outputs: tf.Tensor) -> np.ndarray:
        """Returns the outputs of the whole batch [batch, outputs] on every rank.

        Args:
            outputs: this rank's own.
        """
        return self._predict.impl.gather(outputs, self._outputs_shape).numpy()

    @property
    def _outputs_shape(self) -> Any:
        dims = mtf.Dimension("batch", self.batch), mtf.Dimension("units", self.outputs)
        return mtf.Shape(dims)

    def broadcast_weights(self) -> None:
        """Gives every rank the weights of rank 0."""
        for variable in self.state:
            variable.assign(self.mesh.world.broadcast(variable))


def of_all_replicas(values: Any, mesh: ProcessMesh) -> np.ndarray:
    """Returns the rows [n, value] of all replicas, on every rank. On all ranks together.

    Args:
        values: this replica's, of as many rows as every other has.
        mesh: all ranks.
    """
    rows = tf.convert_to_tensor(values)
    if mesh.axis_size("replica") > 1:
        rows = mesh.communicator("replica").allgather(rows)
    return rows.numpy()
