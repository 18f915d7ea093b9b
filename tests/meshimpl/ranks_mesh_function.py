"""Mesh functions: what goes in and out, and gradients through them by a tape."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from meshimpl import ProcessMesh
from meshimpl.compat import mtf
from meshimpl.mesh_function import MeshFunction, mesh_function, replicated

pytestmark = [pytest.mark.ranks(1, 4), pytest.mark.grappler]

FIELD = [("x", 8), ("y", 4), ("z", 3)]
ROW = [("y", 4)]
RNG = np.random.default_rng(3)
WHOLE, TABLE = RNG.normal(size=(8, 4, 3)), RNG.normal(size=4)


def layouts(mesh: ProcessMesh) -> list[str]:
    first, last = mesh.names[0], mesh.names[-1]
    return ["", f"x:{first}", f"y:{first}"] + [f"x:{first};y:{last}"] * (first != last)


def model(mesh: ProcessMesh, layout: str) -> MeshFunction:
    @mesh_function(mesh, layout, a=(FIELD, tf.float64), row=(ROW, tf.float64))
    def function(_: Any, a: Any, row: Any) -> Any:
        moved = mtf.shift(mtf.sin(a), 3, a.shape[0], wrap=True)
        return moved * row, mtf.reduce_sum(mtf.square(moved), output_shape=row.shape)

    return function


def plain(a: tf.Tensor, row: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    moved = tf.roll(tf.sin(a), 3, axis=0)
    return moved * row[:, tf.newaxis], tf.reduce_sum(moved**2, axis=(0, 2))


def replicas(mesh: ProcessMesh, function: MeshFunction, output: int) -> int:
    """How many ranks hold each element of an output."""
    shape = function.output_shapes[output]
    return mesh.size * np.prod(function.impl.slice_shape(shape)) // shape.size


def test_values_from_blocks_and_from_whole_arrays(mesh: ProcessMesh) -> None:
    expected = [t.numpy() for t in plain(tf.constant(WHOLE), tf.constant(TABLE))]
    for layout in layouts(mesh):
        function = model(mesh, layout)
        blocks = [function.block_of("a", WHOLE), function.block_of("row", TABLE)]
        for outputs in (function(WHOLE, TABLE), function(*blocks), function(row=TABLE, a=WHOLE)):
            for i, (block, whole) in enumerate(zip(outputs, expected, strict=True)):
                np.testing.assert_allclose(function.gather(block, i), whole, rtol=0, atol=1e-12)


def test_gradient_by_a_tape(mesh: ProcessMesh) -> None:
    """The loss is the sum over ranks; each replica of an input gets its share of the gradient."""
    weights = [RNG.normal(size=(8, 4, 3)), RNG.normal(size=4)]
    a, row = tf.constant(WHOLE), tf.constant(TABLE)
    with tf.GradientTape() as tape:
        tape.watch([a, row])
        outputs = plain(a, row)
        loss = sum(tf.reduce_sum(w * y) for w, y in zip(weights, outputs, strict=True))
    expected = tape.gradient(loss, [a, row])
    for layout in layouts(mesh):
        function = model(mesh, layout)
        blocks = [function.block_of("a", WHOLE), function.block_of("row", TABLE)]
        with tf.GradientTape() as tape:
            tape.watch(blocks)
            outputs = function(*blocks)
            parts = []
            for i, (y, weight) in enumerate(zip(outputs, weights, strict=True)):
                mine = function.impl.slice(tf.constant(weight), function.output_shapes[i])
                parts.append(tf.reduce_sum(mine.one_slice * y) / replicas(mesh, function, i))
            loss = sum(parts)
        for (name, found), whole in zip(
            zip(function.inputs, tape.gradient(loss, blocks), strict=True), expected, strict=True
        ):
            shape = function.inputs[name][0]
            block = np.prod(function.impl.slice_shape(shape))
            copies = mesh.size * block // shape.size
            gathered = copies * function.impl.gather(found, shape)
            np.testing.assert_allclose(gathered, whole, rtol=0, atol=1e-11, err_msg=layout)


def test_functions_compose_through_a_replicated_tensor(mesh: ProcessMesh) -> None:
    """loss = sum((a - mean(a))^2 p) for a parameter p: through two functions, as through none."""
    shape = mtf.Shape([mtf.Dimension("x", 8), mtf.Dimension("y", 4)])
    whole = RNG.normal(size=(8, 4))
    for layout in layouts(mesh):

        @mesh_function(mesh, layout, a=(shape, tf.float64))
        def mean(_: Any, a: Any) -> Any:
            return mtf.reduce_mean(a)

        @mesh_function(mesh, layout, a=(shape, tf.float64), m=([], tf.float64), p=([], tf.float64))
        def scatter(_: Any, a: Any, m: Any, p: Any) -> Any:
            return mtf.reduce_sum(mtf.square(a - m) * p)

        block, parameter = mean.block_of("a", whole), tf.constant(3.0, tf.float64)
        with tf.GradientTape() as tape:
            tape.watch([block, parameter])
            shared = replicated(mesh, parameter)
            loss = scatter(block, mean(block), shared) / mesh.size
        by_block, by_parameter = tape.gradient(loss, [block, parameter])
        gathered = mean.impl.gather(by_block, shape)
        copies = mesh.size * np.prod(mean.impl.slice_shape(shape)) // shape.size
        expected = 2 * 3.0 * (whole - whole.mean())
        np.testing.assert_allclose(copies * gathered, expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(by_parameter, ((whole - whole.mean()) ** 2).sum(), rtol=1e-12)


def test_an_output_returned_twice_and_an_input_returned(line: ProcessMesh) -> None:
    @mesh_function(line, "x:row", a=([("x", 8)], tf.float64))
    def function(_: Any, a: Any) -> Any:
        b = mtf.sin(a)
        return b, b, a

    block = function.block_of("a", WHOLE[:, 0, 0])
    with tf.GradientTape() as tape:
        tape.watch(block)
        first, second, same = function(block)
        loss = tf.reduce_sum(2.0 * first + 3.0 * second + 4.0 * same)
    np.testing.assert_allclose(tape.gradient(loss, block), 5.0 * np.cos(block) + 4.0, rtol=1e-14)


def test_integers_and_outputs_that_are_not_used(line: ProcessMesh) -> None:
    @mesh_function(line, "x:row", a=([("x", 8)], tf.float32), n=([("x", 8)], tf.int32))
    def function(_: Any, a: Any, n: Any) -> Any:
        return a * mtf.cast(n, tf.float32), n + 1, mtf.stop_gradient(a)

    a, n = function.block_of("a", np.ones(8)), function.block_of("n", np.arange(8))
    with tf.GradientTape() as tape:
        tape.watch(a)
        product, following, _ = function(a, n)
        loss = tf.reduce_sum(product)
    np.testing.assert_array_equal(tape.gradient(loss, a), n.numpy())
    np.testing.assert_array_equal(following, n.numpy() + 1)


def test_the_gradient_of_a_loop_is_refused(line: ProcessMesh) -> None:
    """Mesh TensorFlow has none; that it says so is better than zeros."""

    @mesh_function(line, "x:row", a=([("x", 8)], tf.float32))
    def function(mesh: Any, a: Any) -> Any:
        return mtf.while_loop(
            lambda v: mtf.less(mtf.reduce_sum(v), 100.0), lambda v: [v * 2.0], [a]
        )[0]

    block = function.block_of("a", np.ones(8))
    with tf.GradientTape() as tape:
        tape.watch(block)
        loss = tf.reduce_sum(function(block))
    with pytest.raises(NotImplementedError):
        tape.gradient(loss, block)
    line.barrier()


def test_wrong_inputs(line: ProcessMesh) -> None:
    function = model(line, "x:row")
    with pytest.raises(ValueError, match=r"a has shape \[8, 5, 3\]; this rank's block is"):
        function(np.zeros([8, 5, 3]), TABLE)
    with pytest.raises(ValueError, match="row is float32, it must be float64"):
        function(WHOLE, tf.zeros([4], tf.float32))
    for args, kwargs in (((WHOLE,), {}), ((WHOLE, TABLE, TABLE), {}), ((WHOLE,), {"rwo": TABLE})):
        with pytest.raises(TypeError, match="function takes a, row"):
            function(*args, **kwargs)
    line.barrier()
