"""The mesh contract where it is not an operation of its own: variables, random numbers, places."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conformance import shape
from ranks import shared_folder

from meshimpl import ProcessMesh, philox
from meshimpl.compat import mtf
from meshimpl.engine import CollectiveError
from meshimpl.hvd_simd_mesh_impl import HvdSimdMeshImpl, LaidOutTensor
from meshimpl.mesh_function import mesh_function

pytestmark = pytest.mark.ranks(1, 4)

FIELD = shape(x=8, y=4)
WHOLE = np.arange(32.0).reshape(8, 4)


def layouts(mesh: ProcessMesh) -> list[str]:
    first, last = mesh.names[0], mesh.names[-1]
    found = ["", f"x:{first}", f"y:{last}"]
    return [*found, f"x:{first};y:{last}", f"y:{first};x:{last}"] if first != last else found


def test_places_and_slices(any_mesh: ProcessMesh) -> None:
    for layout in layouts(any_mesh):
        impl = HvdSimdMeshImpl(any_mesh, layout)
        assert impl.laid_out_pnum().one_slice.numpy() == any_mesh.rank
        for axis, place in enumerate(any_mesh.coordinates):
            assert impl.laid_out_pcoord(axis).one_slice.numpy() == place
        mine = impl.slice(tf.constant(WHOLE), FIELD)
        begin, size = impl.slice_begin(FIELD, any_mesh.rank), impl.slice_shape(FIELD)
        block = WHOLE[tuple(slice(b, b + n) for b, n in zip(begin, size, strict=True))]
        np.testing.assert_array_equal(mine.one_slice, block)
        assert mine.slice_shape == size and impl.slice_begin_tensor(FIELD).numpy().tolist() == begin
        np.testing.assert_array_equal(impl.gather(mine.one_slice, FIELD), WHOLE)


def test_receive_and_reductions_over_several_axes(any_mesh: ProcessMesh) -> None:
    impl = HvdSimdMeshImpl(any_mesh)
    rank = LaidOutTensor([tf.constant([any_mesh.rank])])
    numbers = np.arange(any_mesh.size).reshape(any_mesh.shape)
    axes = list(range(impl.ndims))
    for name, reduce in (("SUM", np.sum), ("MAX", np.max), ("MIN", np.min)):
        found = impl.allreduce(rank, axes, name).one_slice.numpy()
        assert found == [reduce(numbers)]
    assert impl.allreduce(rank, [], "SUM") is rank
    for axis, size in enumerate(any_mesh.shape):
        sources = [None, *[0] * (size - 1)]
        place = list(any_mesh.coordinates)
        place[axis] = 0
        expected = 0 if any_mesh.coordinates[axis] == 0 else numbers[tuple(place)]
        assert impl.receive(rank, axis, sources).one_slice.numpy() == [expected]
    with pytest.raises(ValueError, match="'PROD' is not one of"):
        impl.allreduce(rank, axes, "PROD")


def expected_random(number: int, call: int, seed: int) -> np.ndarray:
    return philox.uniform(tf.range(32, dtype=tf.int64), call, (seed << 20) + number).numpy()


def test_random_values_depend_on_the_place_alone(mesh: ProcessMesh) -> None:
    """The same for any layout; new for each operation, each call and each seed."""
    for layout, seed in zip(layouts(mesh), itertools.cycle((0, 7)), strict=False):

        @mesh_function(mesh, layout, seed=seed)
        def function(graph_mesh: Any) -> Any:
            random = [mtf.random_uniform(graph_mesh, FIELD, dtype=tf.float64) for _ in "ab"]
            return [*random, mtf.random_normal(graph_mesh, FIELD, dtype=tf.float64)]

        for call in (1, 2):
            values = [function.gather(b, i).ravel() for i, b in enumerate(function())]
            for number in (0, 1):
                expected = expected_random(number, call, seed)
                np.testing.assert_array_equal(values[number], expected)
            key = (seed << 20) + 2
            normal = philox.normal(tf.range(32, dtype=tf.int64), call, key).numpy()
            np.testing.assert_array_equal(values[2], normal)


def test_random_distributions(line: ProcessMesh) -> None:
    many = shape(x=4000)

    @mesh_function(line, "x:row")
    def function(mesh: Any) -> Any:
        truncated = mtf.RandomOperation(mesh, many, tf.random.truncated_normal, dtype=tf.float64)
        return (
            mtf.random_uniform(mesh, many, minval=2, maxval=5, dtype=tf.int32),
            mtf.random_normal(mesh, many, mean=3.0, stddev=0.5),
            truncated.outputs[0],
        )

    integers, normal, truncated = (function.gather(b, i) for i, b in enumerate(function()))
    assert sorted(set(integers.tolist())) == [2, 3, 4]
    assert abs(normal.mean() - 3.0) < 0.05 and abs(normal.std() - 0.5) < 0.03
    assert np.abs(truncated).max() <= 2.0 and abs(truncated.std() - 0.88) < 0.04

    @mesh_function(line, "x:row")
    def unknown(mesh: Any) -> Any:
        return mtf.RandomOperation(mesh, many, tf.random.gamma).outputs[0]

    with pytest.raises(NotImplementedError, match="gamma"):
        unknown()


def test_a_gradient_sees_the_random_values_of_its_call(mesh: ProcessMesh) -> None:
    for layout in layouts(mesh):

        @mesh_function(mesh, layout, a=(FIELD, tf.float64))
        def function(graph_mesh: Any, a: Any) -> Any:
            noise = mtf.random_uniform(graph_mesh, FIELD, dtype=tf.float64)
            return a * noise, noise

        block = function.block_of("a", WHOLE)
        replicas = mesh.size * block.shape.num_elements() / WHOLE.size
        calls = []
        for _ in range(2):
            with tf.GradientTape() as tape:
                tape.watch(block)
                product, noise = function(block)
                loss = tf.reduce_sum(product) / replicas
            calls.append((tape, loss, noise))
        for tape, loss, noise in calls:
            # each replica of the block has its share
            share = noise.numpy() / replicas
            np.testing.assert_allclose(tape.gradient(loss, block), share, rtol=1e-14)


def counting_variable(mesh: Any, name: str = "w", **kwargs: Any) -> Any:
    initializer = tf.compat.v1.random_normal_initializer(dtype=tf.float64)
    return mtf.get_variable(mesh, name, FIELD, dtype=tf.float64, initializer=initializer, **kwargs)


def test_variables(mesh: ProcessMesh) -> None:
    """One random initialisation for all ranks; assignments; reads before and after."""
    for layout in layouts(mesh):

        @mesh_function(mesh, layout, a=(FIELD, tf.float64))
        def function(graph_mesh: Any, a: Any) -> Any:
            value = counting_variable(graph_mesh)
            before = mtf.identity(value)
            update = mtf.assign_add(value, a)
            other = counting_variable(graph_mesh, "other", trainable=False)
            changes = [mtf.assign(other, a), mtf.assign_sub(other, 2.0 * a)]
            return before, mtf.depend(a, [update, changes[0]])

        start = function.gather(function(np.zeros([8, 4]))[0])
        assert np.abs(start).min() > 0
        same = mesh.world.broadcast(tf.constant(start)).numpy()
        np.testing.assert_array_equal(start, same)
        function(WHOLE)
        found = function.gather(function(np.zeros([8, 4]))[0])
        np.testing.assert_allclose(found, start + WHOLE, rtol=1e-14)


def test_a_gradient_sees_the_variables_of_its_call(line: ProcessMesh) -> None:
    """Of `v * a`, which assigns v + a to v: the gradient is v before; asking for it assigns
    nothing."""

    @mesh_function(line, "x:row", a=(FIELD, tf.float64))
    def function(graph_mesh: Any, a: Any) -> Any:
        value = counting_variable(graph_mesh)
        mtf.assign_add(value, a)
        return value * a, value

    block, calls = function.block_of("a", 1.0 + WHOLE), []
    for _ in range(2):
        with tf.GradientTape() as tape:
            tape.watch(block)
            product, value = function(block)
        calls.append((tape, product, value))
    np.testing.assert_allclose(calls[1][2], calls[0][2] + block, rtol=1e-14)
    for tape, product, value in calls:
        np.testing.assert_array_equal(product, value * block)
        np.testing.assert_array_equal(tape.gradient(product, block), value)
    np.testing.assert_allclose(function(block)[1], calls[1][2] + block, rtol=1e-14)


def test_a_variable_read_after_its_assignment(mesh: ProcessMesh) -> None:
    for layout in layouts(mesh):
        with tf.Graph().as_default():
            graph_mesh = mtf.Mesh(mtf.Graph(), "mesh")
            value = mtf.get_variable(
                graph_mesh,
                "w",
                FIELD,
                dtype=mtf.VariableDType(tf.float64, tf.float64, tf.float32),
                initializer=tf.compat.v1.ones_initializer(),
            )
            update = mtf.assign(value, value * 3.0)
            again = mtf.read_variable(value.operation)
            lowering = mtf.Lowering(graph_mesh.graph, {graph_mesh: HvdSimdMeshImpl(mesh, layout)})
            updated, read = lowering.lowered_operation(update), lowering.export_to_tf_tensor(again)
            with tf.compat.v1.Session() as session:
                session.run(tf.compat.v1.global_variables_initializer())
                session.run(lowering.copy_masters_to_slices())
                session.run(updated)
                assert again.dtype == tf.float32
                np.testing.assert_array_equal(session.run(read), np.full([8, 4], 3.0))


def test_stacked_variables(mesh: ProcessMesh) -> None:
    """`Lowering` joins variables of one shape; the masters stay apart."""
    for layout in layouts(mesh):
        with tf.Graph().as_default():
            graph_mesh = mtf.Mesh(mtf.Graph(), "mesh")
            values = [counting_variable(graph_mesh, name) for name in "abc"]
            update = mtf_assign_all(values, [v * 2.0 for v in values])
            impl = HvdSimdMeshImpl(mesh, layout)
            lowering = mtf.Lowering(graph_mesh.graph, {graph_mesh: impl}, autostack=True)
            stacked = [type(v).__name__ for v in lowering.variables]
            assert stacked == (["Variable"] * 3 if mesh.size == 1 else ["StackedVariable"])
            masters = tf.compat.v1.trainable_variables()[:3]
            exported = [lowering.export_to_tf_tensor(v) for v in values]
            updated = lowering.lowered_operation(update)
            with tf.compat.v1.Session() as session:
                session.run(tf.compat.v1.global_variables_initializer())
                session.run(lowering.copy_masters_to_slices())
                start = session.run(exported)
                np.testing.assert_array_equal(session.run(masters), start)
                session.run(updated)
                session.run(lowering.copy_slices_to_masters())
                np.testing.assert_array_equal(session.run(masters), 2.0 * np.array(start))


def mtf_assign_all(variables: list[Any], values: list[Any]) -> Any:
    """One assignment of several variables, which lets them be stacked."""
    return mtf.Assign([v.operation for v in variables], values)


def scaled(mesh: ProcessMesh, layout: str) -> Any:
    @mesh_function(mesh, layout, a=(FIELD, tf.float64))
    def function(graph_mesh: Any, a: Any) -> Any:
        with tf.compat.v1.variable_scope("net"):
            value = counting_variable(graph_mesh)
        mtf.assign_add(value, a)
        return mtf.identity(value)

    return function


def test_no_rank_has_more_of_a_variable_than_its_slice(mesh: ProcessMesh) -> None:
    """Whatever makes its first value, which rank 0 alone calls if elements differ."""
    for layout in layouts(mesh):
        requested = []

        def initializer(
            shape: list[int], dtype: Any, requested: list[Any] = requested
        ) -> tf.Tensor:
            requested.append(shape)
            return tf.constant(WHOLE, dtype)

        @mesh_function(mesh, layout)
        def function(graph_mesh: Any, initializer: Any = initializer) -> Any:
            ones = tf.compat.v1.ones_initializer
            kinds = [initializer, ones(), ones, tf.compat.v1.constant_initializer(WHOLE.tolist())]
            return [
                mtf.get_variable(graph_mesh, name, FIELD, dtype=tf.float64, initializer=kind)
                for name, kind in zip("abcd", kinds, strict=True)
            ]

        found = [function.gather(block, i) for i, block in enumerate(function())]
        for value, expected in zip(found, [WHOLE, 1.0, 1.0, WHOLE], strict=True):
            np.testing.assert_array_equal(value, expected + 0 * WHOLE)
        assert requested == [[8, 4]] * (mesh.rank == 0)
        kept = [v.shape.as_list() for v in function._forward.graph.variables]
        assert kept == [function.impl.slice_shape(FIELD)] * 4


def test_an_initialiser_that_fails_fails_on_every_rank(mesh: ProcessMesh) -> None:
    @mesh_function(mesh, layouts(mesh)[-1])
    def function(graph_mesh: Any) -> Any:
        wrong = lambda shape, dtype: tf.zeros([2, 2], dtype)  # noqa: E731
        return mtf.get_variable(graph_mesh, "w", FIELD, dtype=tf.float64, initializer=wrong)

    kind = ValueError if mesh.rank == 0 else CollectiveError
    with pytest.raises(kind, match=r"initialiser of w makes shape \[2, 2\], not \[8, 4\]"):
        function()


def test_first_values_and_the_seed(mesh: ProcessMesh) -> None:
    """They follow it, differ between variables, and leave the random numbers of all ranks alike."""

    def first_values() -> list[tf.Tensor]:
        @mesh_function(mesh, layouts(mesh)[-1])
        def function(graph_mesh: Any) -> Any:
            return [counting_variable(graph_mesh, name) for name in "ab"]

        return [function.gather(block, i) for i, block in enumerate(function())]

    tf.random.set_seed(1)
    first, after = first_values(), tf.random.normal([1, 3])
    every = mesh.world.allgather(after)
    np.testing.assert_array_equal(every, np.repeat(every[:1], mesh.size, 0))
    assert np.abs(first[0] - first[1]).min() > 0
    tf.random.set_seed(1)
    np.testing.assert_array_equal(first_values(), first)
    tf.random.set_seed(2)
    assert np.abs(np.subtract(first_values(), first)).min() > 0
    tf.random.set_seed(None)


def test_a_checkpoint_that_one_rank_cannot_write_or_read(
    mesh: ProcessMesh, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """An error on every rank, of which nothing is left behind."""
    folder, last = shared_folder(tmp_path_factory), mesh.rank == mesh.size - 1
    if mesh.rank == 0:
        (folder / "file").touch()
        (folder / "taken.index").mkdir()
    mesh.barrier()
    function, zeros = scaled(mesh, layouts(mesh)[-1]), np.zeros([8, 4])
    function(WHOLE)
    before = function.gather(function(zeros))
    function.variables.save(folder / "good")
    broken = folder / "file" if last else folder
    with pytest.raises(OSError if last else CollectiveError, match="Not a directory"):
        function.variables.save(broken / "saved")
    kind = tf.errors.OpError if mesh.rank == 0 else CollectiveError
    with pytest.raises(kind, match=r"taken\.index"):
        function.variables.save(folder / "taken")
    function(WHOLE)
    with pytest.raises(ValueError if last else CollectiveError, match="is no checkpoint"):
        function.variables.restore(broken / "good")
    np.testing.assert_array_equal(function.gather(function(zeros)), before + WHOLE)
    mesh.barrier()
    assert not list(folder.glob("*_parts"))


def test_a_checkpoint_moves_between_meshes(
    mesh: ProcessMesh, line: ProcessMesh, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Written from one mesh and layout, read on others, and by plain TensorFlow on one rank."""
    zeros = np.zeros([8, 4])
    for layout in layouts(mesh):
        source = scaled(mesh, layout)
        source(WHOLE)
        path = str(shared_folder(tmp_path_factory) / "saved")
        source.variables.save(path)
        expected = source.gather(source(zeros))
        plain = tf.Variable(zeros)
        tf.train.Checkpoint(**{"net/w": plain}).read(path).assert_consumed()
        np.testing.assert_array_equal(plain, expected)
    for layout in layouts(line):
        target = scaled(line, layout)
        target(zeros)
        target.variables.restore(path)
        np.testing.assert_array_equal(target.gather(target(zeros)), expected)
        masters = target.variables.masters()
        np.testing.assert_array_equal(masters["net/w"], expected)


def test_a_checkpoint_of_plain_tensorflow_is_read(mesh: ProcessMesh, tmp_path: Path) -> None:
    """Slice by slice, and by way of whole arrays, in which it may be among other objects."""
    saved = tf.train.Checkpoint(**{"net/w": tf.Variable(WHOLE), "step": tf.Variable(3)})
    path = saved.write(str(tmp_path / "plain"))
    for layout in layouts(mesh):
        for whole in (True, False):
            target = scaled(mesh, layout)
            target(WHOLE)
            if whole:
                masters = target.variables.masters()
                tf.train.Checkpoint(**masters).read(path).expect_partial()
                target.variables.take(masters)
            else:
                target.variables.restore(path)
            np.testing.assert_array_equal(target.gather(target(np.zeros([8, 4]))), WHOLE)


def test_a_checkpoint_of_other_variables_is_refused(mesh: ProcessMesh, tmp_path: Path) -> None:
    target = scaled(mesh, layouts(mesh)[-1])
    for name, value, message in (
        ("v", WHOLE, "the variables of function are net/w; in .* are none"),
        ("net/w", WHOLE[:4], r"net/w of function has shape \[8, 4\]; in .* is \[4, 4\]"),
    ):
        path = tf.train.Checkpoint(**{name: tf.Variable(value)}).write(str(tmp_path / name[0]))
        with pytest.raises(ValueError, match=message):
            target.variables.restore(path)
    with pytest.raises(ValueError, match="none is no checkpoint"):
        target.variables.restore(tmp_path / "none")
    with pytest.raises(ValueError, match="are net/w; given are v"):
        target.variables.take({"v": WHOLE})
