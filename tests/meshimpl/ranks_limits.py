"""Limits of operations in docs/reference/mesh_operations.md: an error, or a known value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conformance import Case, Input, evaluate, shape

from meshimpl import ProcessMesh
from meshimpl.compat import mtf
from meshimpl.hvd_simd_mesh_impl import HvdSimdMeshImpl

pytestmark = pytest.mark.ranks(2)

FIELD = Input(shape(x=8, h=4, w=4, i=4))
KERNEL = Input(shape(fh=1, fw=1, i=4, o=4))


def lowered(line: ProcessMesh, build: Callable[..., Any], layout: str, *inputs: Input) -> Any:
    case = Case("limit", build, inputs or (FIELD,), (), gradient=False)
    [(outputs, _)] = evaluate(case, HvdSimdMeshImpl(line, layout))
    return outputs


@pytest.mark.parametrize(
    ("layout", "build"),
    [
        ("x:row", lambda _, a: mtf.concat([a, a], "x")),
        ("x:row", lambda _, a: mtf.split(a, a.shape[0], 2)),
        ("x:row", lambda _, a: mtf.unstack(a, a.shape[0])),
        ("t:row", lambda _, a: mtf.stack([a] * 4, "t")),
        ("x:row", lambda _, a: mtf.slice(a, 0, 4, "x")),
        ("x:row", lambda _, a: mtf.pad(a, [4, 4], "x")),
    ],
    ids=["concat", "split", "unstack", "stack", "slice", "pad"],
)
def test_a_dimension_that_cannot_be_split(
    line: ProcessMesh, layout: str, build: Callable[..., Any]
) -> None:
    with pytest.raises(ValueError, match="can't"):
        lowered(line, build, layout)
    line.barrier()


def test_a_function_that_does_not_declare_a_dimension(line: ProcessMesh) -> None:
    """A TypeError, since upstream's ValueError stumbles over its own text."""

    def build(_: Any, a: Any) -> Any:
        return mtf.slicewise(tf.cumsum, [a], splittable_dims=a.shape.dims[1:])

    with pytest.raises((ValueError, TypeError)):
        lowered(line, build, "x:row")
    line.barrier()


def test_a_convolution_cannot_be_split_in_space(line: ProcessMesh) -> None:
    with pytest.raises(ValueError, match="can't slice along dimension h"):
        lowered(
            line,
            lambda _, a, f: mtf.Conv2dOperation(a, f, [1] * 4, "SAME").outputs[0],
            "h:row",
            FIELD,
            KERNEL,
        )
    line.barrier()


def test_remainders_have_no_gradient(line: ProcessMesh) -> None:
    case = Case("mod", lambda _, a: mtf.mod(a, 1.0), (FIELD,), ())
    with pytest.raises(ValueError, match="(?i)gradient not impl"):
        evaluate(case, HvdSimdMeshImpl(line, "x:row"))
    line.barrier()


def test_equal_extremes_each_get_the_whole_gradient(line: ProcessMesh) -> None:
    ones = np.ones([8])
    case = Case("ties", lambda _, a: mtf.reduce_max(a), (Input(shape(x=8)),), ())
    [(_, (gradient,))] = evaluate(case, HvdSimdMeshImpl(line, "x:row"), [[ones]])
    assert len(set(gradient)) == 1 and gradient[0] != 0
    both = Case("both", lambda _, a: mtf.maximum(a, mtf.identity(a)), (Input(shape(x=8)),), ())
    once = Case("once", lambda _, a: mtf.identity(a), (Input(shape(x=8)),), ())
    found = [evaluate(c, HvdSimdMeshImpl(line, "x:row"), [[ones]])[0][1][0] for c in (both, once)]
    np.testing.assert_allclose(found[0], 2.0 * found[1], rtol=1e-14)


def test_a_summary_is_an_operation(line: ProcessMesh) -> None:
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        summary = mtf.scalar_summary("name", mtf.constant(mesh, 1.0))
        assert not isinstance(summary, mtf.Tensor)
