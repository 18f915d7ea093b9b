"""Cases: operations that move elements: reshape, shift, concatenation, slices, order."""

from typing import Any

import tensorflow as tf
from conformance import Cases, Input, dim, shape

from meshimpl.compat import mtf

cases = Cases(between_neighbours=True, ordered=True)
FIELD = Input(shape(x=8, y=8, z=3))


@cases(FIELD)
def reshape_to_another_layout(mesh: Any, a: Any) -> Any:
    """Every change of split: dimensions renamed, exchanged, one of them after the other."""
    targets = [
        shape(p=8, q=8, z=3),
        shape(y=8, x=8, z=3),
        shape(x=8, q=8, z=3),
        shape(p=8, y=8, z=3),
        shape(p=8, x=8, z=3),
        shape(y=8, q=8, z=3),
        shape(z=3, x=8, y=8),
        shape(x=64, z=3),
        shape(z=3, y=64),
        shape(q=64, z=3),
    ]
    return [mtf.reshape(a, target) for target in targets]


@cases(Input(shape(x=8, y=8)))
def reshape_that_merges_and_parts(mesh: Any, a: Any) -> Any:
    """Splits that the old shape cannot express, and dimensions too short to be split before."""
    return [
        mtf.reshape(a, s)
        for s in (
            shape(p=2, x=4, y=8),
            shape(p=2, y=4, x=8),
            shape(y=4, p=2, x=8),
            shape(x=4, p=4, y=4),
            shape(y=16, x=4),
            shape(p=4, x=16),
            shape(p=1, y=8, q=2, x=4),
        )
    ] + [mtf.reshape(mtf.reshape(a, shape(p=2, q=4, y=8)), shape(x=64))]


@cases(FIELD)
def reshape_of_a_lazy_sum(mesh: Any, a: Any) -> Any:
    plane = mtf.reduce_sum(a, output_shape=shape(y=8, z=3))
    return [
        mtf.reshape(plane, shape(p=2, q=4, z=3)),
        mtf.reshape(plane, shape(x=8, z=3)),
        mtf.reshape(plane, shape(p=8, z=3)),
    ]


@cases(FIELD)
def renamed_dimensions(mesh: Any, a: Any) -> Any:
    return [
        mtf.rename_dimension(a, "x", "p"),
        mtf.anonymize(a),
        mtf.replace_dimensions(a, [a.shape[0]], [dim("p", 8)]),
        mtf.transpose(a, shape(z=3, y=8, x=8)),
    ]


@cases(FIELD)
def shift(mesh: Any, a: Any) -> Any:
    """By parts of a block, whole blocks, more than a block, more than the whole dimension."""
    x, y = a.shape.dims[:2]
    total = [mtf.shift(a, offset, x, wrap=True) for offset in (1, -2, -5, 8, 11)]
    total += [mtf.shift(a, offset, x, wrap=False) for offset in (1, -3, 7, -8, 9)]
    total += [mtf.shift(a, -3, y, wrap=True), mtf.shift(a, 5, y, wrap=False)]
    return mtf.stack(total, "shifts")


@cases(FIELD, Input(shape(y=8), "int32", -9, 10), splits="x y")
def dynamic_shift(mesh: Any, a: Any, offset: Any) -> Any:
    return [mtf.dynamic_shift(a, offset, a.shape[0], wrap) for wrap in (True, False)]


@cases(Input(shape(x=8, b=4, z=3)), splits="x b")
def halos(mesh: Any, a: Any) -> Any:
    found = [mtf.halo_exchange(a, a.shape[0], a.shape[2], 0)]
    for wrap in (True, False):
        found += [mtf.halo_exchange(a, a.shape[0], a.shape[2], n, wrap=wrap) for n in (1, 4)]
        found.append(mtf.left_halo_exchange(a, a.shape[0], a.shape[2], 2, wrap=wrap))
    return found


@cases(FIELD, Input(shape(x=8, y=8, z=2)))
def concat_split_stack_unstack(mesh: Any, a: Any, b: Any) -> Any:
    joined = mtf.concat([a, b], "z")
    first, second, _ = mtf.split(joined, joined.shape[2], [1, 3, 1])
    halves = mtf.split(mtf.concat([b, b], "z"), dim("z", 4), 2)
    layers = mtf.unstack(a, a.shape[2])
    return [joined, mtf.stack([layers[2], layers[0]], "t", 1), first * second, halves[1], layers[1]]


@cases(FIELD)
def slice_and_pad(mesh: Any, a: Any) -> Any:
    part = mtf.slice(a, 1, 2, "z")
    return [part, mtf.pad(part, [2, 1], "z")]


@cases(FIELD, splits="x y")
def order(mesh: Any, a: Any) -> Any:
    """Largest values over a split and an unsplit dimension: one, few, many, more than a block."""
    found: list[Any] = []
    for i in (0, 1):
        for k in (1, 3, 6):
            found += mtf.top_k(a, a.shape[i], dim("k", k))
    return [*found, mtf.argmax(a, a.shape[0]), mtf.top_1(a, a.shape[2])[0]]


@cases(FIELD)
def order_statistics(mesh: Any, a: Any) -> Any:
    return [
        mtf.nth_largest_element(a, 2, a.shape[0]),
        mtf.nth_smallest_element(a, 1, a.shape[1]),
        mtf.reduce_first(a, a.shape[1]),
        mtf.stride_tensor_1d(a, a.shape[2], 3),
    ]


@cases(Input(shape(x=8)))
def made_here(mesh: Any, a: Any) -> Any:
    """Ranges, constants, and tensors that come in whole."""
    field = shape(x=8, y=8)
    counted = mtf.range(mesh, dim("y", 8), tf.float64)
    whole = tf.reshape(tf.range(64, dtype=tf.float64), [8, 8])
    return [
        a * counted,
        mtf.range(mesh, dim("x", 8), tf.int32),
        mtf.zeros(mesh, field),
        mtf.ones(mesh, field, tf.float64) * a,
        mtf.constant(mesh, 3.0, field, tf.float64),
        mtf.import_fully_replicated(mesh, whole, field),
        mtf.import_tf_tensor(mesh, whole, field),
    ]
