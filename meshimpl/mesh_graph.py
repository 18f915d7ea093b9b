"""A graph that the ranks of a mesh build together and call together."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from meshimpl import traffic
from meshimpl.graph_guards import check_eager, is_planned, planned_groups
from meshimpl.process_mesh import ProcessMesh
from meshimpl.pulse import at
from meshimpl.rendezvous import build_together

GRAPHLESS = AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError
"""What a function raises that asks a graph for values which it has yet to compute."""
REFUSALS = 8
"""Calls that only a graph refuses, after which `one_graph` makes none."""


class MeshGraph:
    """A function of this rank's tensors as a graph, built when all ranks have built the same.

    Without autograph: rewriting the source of loops' bodies takes seconds and changes nothing. A
    mesh of one rank has nobody to agree with, and its graphs send nothing.

    Args:
        function: from tensors to a list of tensors. It may send.
        mesh: the ranks.
        signature: shape and dtype of this rank's tensors.
        name: for messages and the names of collectives.
        what: the name after an article, for messages; by default from `name`.

    Raises:
        CollectiveError: another rank could not build it, or the ranks built different collectives.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        mesh: ProcessMesh,
        signature: Sequence[tf.TensorSpec],
        name: str,
        what: str = "",
    ) -> None:
        self._mesh, self._what = mesh, what or f"the mesh function {name}"
        self._sent: traffic.Tally = {}
        self._groups: Sequence[tuple[int, ...]] = ()
        plain = tf.autograph.experimental.do_not_convert(function)

        def wrap() -> Any:
            wrapped = tf.compat.v1.wrap_function(plain, signature)
            self._groups = planned_groups()
            return wrapped

        if mesh.size == 1:
            self._wrapped = wrap()
            return
        with traffic.recorded(self._sent):
            self._wrapped = build_together(mesh.world.meetings, name, wrap)

    @property
    def graph(self) -> Any:
        """TensorFlow's graph."""
        return self._wrapped.graph

    def without_assignments(self, inputs: int) -> None:
        """Leaves out what no output depends on, after the first `inputs` inputs."""
        self._wrapped = self._wrapped.prune(self._wrapped.inputs[:inputs], self._wrapped.outputs)

    def __call__(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        """Evaluates the graph; no rank leaves it before all have begun the call."""
        if self._mesh.size == 1:
            return list(self._wrapped(*tensors))
        with at(self._what, meetings=self._groups, is_call=True):
            results = self._wrapped(*tensors)
            traffic.count(self._sent)
        return list(results)


class MeshProgram:
    """A function of this rank's tensors that calls mesh functions, as one graph.

    The graph is built at the first call with tensors of these shapes. Within another graph the
    function becomes a part of that graph. It has no gradient.

    Args:
        function: from tensors to a list of tensors, the same on all ranks.
        mesh: the ranks.
        name: for messages and the names of collectives.
    """

    def __init__(self, function: Callable[..., Any], mesh: ProcessMesh, name: str) -> None:
        self._function, self._mesh, self._name = function, mesh, name
        self._graphs: dict[Any, MeshGraph] = {}

    def __call__(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        """Evaluates the function.

        Raises:
            CollectiveError: see `MeshGraph`.
        """
        if not tf.executing_eagerly():
            return list(self._function(*tensors))
        signature = tuple((tuple(x.shape), x.dtype) for x in tensors)
        if signature not in self._graphs:
            specs = [tf.TensorSpec(shape, dtype) for shape, dtype in signature]
            self._graphs[signature] = MeshGraph(self._function, self._mesh, specs, self._name)
        return self._graphs[signature](*tensors)


def one_graph(function: Callable[..., Any], mesh: ProcessMesh) -> Callable[..., Any]:
    """Returns a function of tensors as one graph, if the mesh has one rank; otherwise the function.

    It is evaluated without a graph first, so that nothing that it keeps for later calls belongs to
    one. TensorFlow then compiles it, which takes seconds. If no graph can be made of
    it, it is evaluated eagerly from then on, and a warning gives the reason. So it is after some
    calls for which an assertion of the graph failed and the function did not: it can do what the
    graph cannot. An error of the function takes the place of the graph's.

    Args:
        function: from tensors to tensors.
        mesh: the ranks.
    """
    if mesh.size > 1:
        return function
    graph = tf.function(function, autograph=False)
    chosen: list[Callable[..., Any]] = []
    refused: list[str] = []

    def give_up(reason: str) -> None:
        first = reason.strip().split("\n")[0]
        warnings.warn(f"evaluated step by step, not as one graph: {first}", stacklevel=3)
        chosen[:] = [function]

    def call(*tensors: tf.Tensor) -> Any:
        if not chosen:
            function(*tensors)
            try:
                graph.get_concrete_function(*tensors)
                chosen.append(graph)
            except GRAPHLESS as error:
                give_up(str(error))
        try:
            return chosen[0](*tensors)
        except tf.errors.InvalidArgumentError as error:
            result = function(*tensors)
            _, failed, text = str(error.message).partition("assertion failed: [")
            if not failed:
                raise
            refused.append(text.partition("]")[0])
            if len(refused) == REFUSALS:
                give_up(refused[-1])
            return result

    return call


def check_place(what: str, mesh: ProcessMesh) -> None:
    """Checks that what builds graphs of its own may be called here.

    Within a graph it may, if the mesh has one rank or the graph is one of a `MeshGraph`. In other
    graphs TensorFlow's optimisers prune collectives, each rank others.

    Args:
        what: what is called, for the message.
        mesh: the ranks.

    Raises:
        RuntimeError: TensorFlow builds a graph, and it may not.
    """
    function = isinstance(tf.compat.v1.get_default_graph(), tf.__internal__.FuncGraph)
    if not (function and (mesh.size == 1 or is_planned())):
        check_eager(what)
