"""Every operation of Mesh TensorFlow on the ranks, forward and gradient, against one device."""

from __future__ import annotations

import inspect
from pathlib import Path

import cases_control
import cases_elementwise
import cases_layout
import cases_linear
import pytest
import tensorflow as tf
from conformance import Case, build_graph, differences
from ranks import SIZE, process_mesh

from meshimpl.compat import mtf_ops

pytestmark = pytest.mark.ranks(1, 4)

CASES: list[Case] = [
    case
    for module in (cases_elementwise, cases_linear, cases_layout, cases_control)
    for case in module.cases.all
]
# Held to the truth by tests of their own.
ELSEWHERE = {
    "Assign": "ranks_mesh_impl.py",
    "ImportLaidOutTensorOperation": "ranks_mesh_function.py",
    "RandomOperation": "ranks_mesh_impl.py",
    "ReadVariable": "ranks_mesh_impl.py",
    "StackedVariable": "ranks_mesh_impl.py",
    "Variable": "ranks_mesh_impl.py",
}
SHAPES = {1: ["row:1,col:1"], 4: ["row:2,col:2", "row:4"]}.get(SIZE, [f"row:{SIZE}"])
# On two rows and two columns both neighbours of a rank are the same, so these need a line of four.
BOTH = ("halos", "shift", "conv3d_on_blocks")
# Another case runs on one of the meshes in turn; on the others it is a long test.
ON_MESHES = [
    pytest.param(
        case,
        shape,
        marks=[] if case.name in BOTH or turn == number % len(SHAPES) else pytest.mark.long,
    )
    for number, case in enumerate(CASES)
    for turn, shape in enumerate(SHAPES)
]
TABLE = Path(__file__).parents[2] / "docs" / "reference" / "mesh_operations.md"


@pytest.mark.parametrize("case, shape", ON_MESHES, ids=lambda x: getattr(x, "name", x))
def test_same_as_one_device(case: Case, shape: str) -> None:
    found = differences(case, process_mesh(shape))
    assert not found, "\n".join(found)


def operation_classes() -> set[str]:
    """Names of the operation classes of Mesh TensorFlow that are lowered."""
    classes = inspect.getmembers(mtf_ops, inspect.isclass)
    return {
        name
        for name, c in classes
        if issubclass(c, mtf_ops.Operation) and c.lower is not mtf_ops.Operation.lower
    }


@pytest.mark.ranks(1)
def test_every_operation_class_has_a_case() -> None:
    covered: set[str] = set()
    for case in CASES:
        with tf.Graph().as_default():
            mesh, _, _ = build_graph(case, [tf.constant(a) for a in case.arrays])
            covered |= {type(op).__name__ for op in mesh.graph.operations}
    left = operation_classes() - covered
    assert left == set(ELSEWHERE), "an operation without a case, or one listed for nothing"


@pytest.mark.ranks(1)
def test_every_operation_class_is_in_the_table() -> None:
    text = TABLE.read_text()
    assert not [name for name in operation_classes() if f"`{name}`" not in text]
