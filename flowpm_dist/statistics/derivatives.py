"""Derivatives of several numbers at once, row by row, and the Fisher matrix that follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from flowpm_dist.grid.field import Field
from flowpm_dist.options import in_unit
from meshimpl.graph_guards import check_eager
from meshimpl.mesh_function import shares_of_gradients
from meshimpl.process_mesh import ProcessMesh

_SAME = 1e-4
"""Outputs of two ranks that differ by more than this part of the largest are not the same."""

_SINGULAR = 1e-12
"""The smallest eigenvalue of correlations that are not taken as singular."""


@dataclass(frozen=True)
class Jacobian:
    """The derivatives of a function's outputs with respect to its inputs.

    Attributes:
        values: the outputs [...].
        derivatives: for each input by name, [..., *shape of the input]. For a field, this rank's
            block of them.
        fields: names of the inputs that are fields.
    """

    values: np.ndarray
    derivatives: dict[str, np.ndarray]
    fields: frozenset[str]

    def fisher(self, covariance: Any) -> np.ndarray:
        """Returns the Fisher matrix of the parameters, J^T C^-1 J, float64 [parameter, parameter].

        It holds for outputs with Gaussian noise whose covariance does not depend on the parameters.
        The parameters are in the order of the inputs; one that is an array counts once for each of
        its numbers.

        Args:
            covariance: the outputs' covariance [output, output], or their variances [output].

        Raises:
            ValueError: an input is a field, outputs or derivatives are not finite, or the
                covariance does not fit, or is not symmetric and positive definite.
        """
        covariance = in_unit("covariance", covariance)
        if self.fields:
            named = ", ".join(sorted(self.fields))
            raise ValueError(f"a Fisher matrix is one of parameters, and {named} is a field")
        count = self.values.size
        columns = [d.reshape(count, -1).astype(np.float64) for d in self.derivatives.values()]
        rows, c = np.concatenate(columns, axis=1), np.asarray(covariance, np.float64)
        finite = np.isfinite(rows).all(axis=1) & np.isfinite(self.values.ravel())
        if not finite.all():
            raise ValueError(
                f"output {int(np.argmin(finite))} or a derivative of it is not finite: leave bins "
                "without modes out"
            )
        if c.shape not in ((count,), (count, count)):
            raise ValueError(
                f"the covariance has shape {c.shape}, and there are {count} outputs: "
                f"({count}, {count}) or variances ({count},) are needed"
            )
        c = np.diag(c) if c.ndim == 1 else c
        scale = np.sqrt(np.maximum(np.diag(c), 0.0))
        correlation = c / np.outer(scale, scale) if scale.all() else np.zeros_like(c)
        if not np.allclose(correlation, correlation.T, rtol=0, atol=1e-8):  # NaN is not close
            raise ValueError("the covariance is not symmetric, or not finite")
        if not np.linalg.eigvalsh(correlation)[0] > _SINGULAR:
            raise ValueError(
                "the covariance is not positive definite: one that is estimated needs more draws "
                "than there are outputs"
            )
        # Of correlations, so that outputs may have any scales.
        whitened = np.linalg.solve(np.linalg.cholesky(correlation), rows / scale[:, np.newaxis])
        return whitened.T @ whitened


def jacobian(
    function: Callable[[dict[str, Any]], tf.Tensor], inputs: Mapping[str, Any], mesh: ProcessMesh
) -> Jacobian:
    """Returns the derivatives of a few outputs with respect to any number of inputs.

    The function is evaluated once. Each output then takes one backward pass, whatever the number of
    the inputs. Memory does not grow with the outputs, except by the derivatives themselves. All
    ranks must call this together.

    Args:
        function: is given the inputs as a dictionary and returns a tensor that all ranks hold
            alike, such as `binned_power(sim.run(...).density())`. It is called eagerly.
        inputs: by name: a number, an array or a tensor, the same on every rank; or a `Field`.
            Numbers are taken in float64.
        mesh: the ranks, such as `sim.box.mesh`.

    Raises:
        ValueError: on every rank; outputs that are not a floating tensor or differ between ranks,
            or an input that no output depends on.
        RuntimeError: it is called inside a `tf.function`.
    """
    check_eager("jacobian")
    tensors = {name: _tensor(name, value) for name, value in inputs.items()}
    arguments = {
        name: replace(value, block=tensors[name]) if isinstance(value, Field) else tensors[name]
        for name, value in inputs.items()
    }
    # Each rank holds every output, and has a share of the derivatives by a parameter.
    with shares_of_gradients(), tf.GradientTape(persistent=True) as tape:
        for tensor in tensors.values():
            tape.watch(tensor)
        outputs = function(arguments)
        if not (isinstance(outputs, tf.Tensor) and outputs.dtype.is_floating):
            raise ValueError(
                f"the function returned a {type(outputs).__name__}; a floating tensor of numbers "
                "that all ranks hold alike is needed"
            )
        flat = tf.reshape(outputs, [-1])
        _check_same(flat, mesh)
        with tape.stop_recording():
            slopes = _slopes(tape, flat, tensors, 1.0 / mesh.size)
    if lost := [name for name in tensors if name not in slopes]:
        raise ValueError(
            f"no output depends on {', '.join(lost)}: the function must use each input that it is "
            "given, as a tensor and without numpy"
        )
    fields = frozenset(name for name, value in inputs.items() if isinstance(value, Field))
    derivatives = {}
    for name in tensors:
        rows = slopes[name]
        if name not in fields:
            rows = mesh.world.allreduce(tf.constant(rows)).numpy()
        derivatives[name] = rows.reshape(*outputs.shape, *rows.shape[1:])
    return Jacobian(outputs.numpy(), derivatives, fields)


def _slopes(
    tape: tf.GradientTape, outputs: tf.Tensor, inputs: Mapping[str, tf.Tensor], share: float
) -> dict[str, np.ndarray]:
    """Returns this rank's derivatives [output, ...] by those inputs that an output depends on.

    Args:
        tape: has recorded the outputs [output].
        outputs, inputs: what is differentiated, and by what.
        share: what each output is multiplied by.
    """
    count, slopes = int(outputs.shape[0]), dict[str, np.ndarray]()
    for number in range(count):
        row = tf.one_hot(number, count, share, dtype=outputs.dtype)
        for name, slope in tape.gradient(outputs, inputs, output_gradients=row).items():
            if slope is not None:
                zeros = np.zeros([count, *slope.shape], slope.numpy().dtype)
                slopes.setdefault(name, zeros)[number] = slope
    return slopes


def _tensor(name: str, value: Any) -> tf.Tensor:
    """Returns an input as a tensor.

    Raises:
        ValueError: it does not hold floating numbers.
    """
    if isinstance(value, Field):
        value = value.block
    value = in_unit(name, value)
    if isinstance(value, int | float):
        value = np.float64(value)
    tensor = tf.convert_to_tensor(value)
    if not tensor.dtype.is_floating:
        raise ValueError(f"{name} is {tensor.dtype.name}: floating numbers are needed")
    return tensor


def _check_same(outputs: tf.Tensor, mesh: ProcessMesh) -> None:
    """Raises a ValueError on every rank if the ranks do not hold the same outputs."""
    here = tf.stop_gradient(tf.where(tf.math.is_finite(outputs), outputs, tf.zeros_like(outputs)))
    highest = mesh.world.allreduce(here, "max").numpy()
    lowest = -mesh.world.allreduce(-here, "max").numpy()
    if np.max(highest - lowest, initial=0.0) > _SAME * np.max(np.abs(highest), initial=0.0):
        raise ValueError(
            "the outputs differ between ranks: numbers that all ranks hold alike are needed, as "
            "binned_power returns them; sum a rank's part over the ranks, and split no batch over "
            "a replica axis"
        )
