"""One mtf graph on a mesh of ranks and on one device: the same numbers, and true gradients.

The reference is Mesh TensorFlow's own `PlacementMeshImpl` of one CPU device, whose gradient is
itself held against a finite difference, since an error upstream would be in both.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from meshimpl import ProcessMesh
from meshimpl.compat import mtf
from meshimpl.graph_guards import last_collective
from meshimpl.hvd_simd_mesh_impl import HvdSimdMeshImpl

Arrays = dict[str, np.ndarray]
TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 3e-2}
STEP = 1e-5


def shape(**sizes: int) -> Any:
    """An `mtf.Shape`: `shape(x=8, y=4)`."""
    return mtf.Shape([mtf.Dimension(*pair) for pair in sizes.items()])


def dim(name: str, size: int) -> Any:
    """An `mtf.Dimension`."""
    return mtf.Dimension(name, size)


@dataclass(frozen=True)
class Input:
    """A whole array of random numbers, uniform in [low, high); integers for an integer dtype."""

    shape: Any
    dtype: str = "float64"
    low: float = -2.0
    high: float = 2.0

    def array(self, seed: int) -> np.ndarray:
        values = np.random.default_rng(seed).uniform(
            self.low, self.high, self.shape.to_integer_list
        )
        integer = self.dtype.startswith("int")
        np_dtype = tf.as_dtype(self.dtype).as_numpy_dtype
        return (np.floor(values) if integer else values).astype(np_dtype)


@dataclass(frozen=True, eq=False)
class Case:
    """A graph to hold against one device.

    `build(mesh, *inputs)` returns mtf tensors; `splits` names the dimensions that a layout may
    split; `gradient` says which inputs it is differentiated for (those that are floating).
    """

    name: str
    build: Callable[..., Any]
    inputs: tuple[Input, ...]
    splits: tuple[str, ...]
    gradient: bool = True
    smooth: bool = True  # a finite difference makes sense
    between_neighbours: bool = False  # a ring of four ranks is another thing than one of two
    ordered: bool = False  # which of two dimensions is split over which axis makes a difference
    arrays: list[np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        arrays = [x.array(seed) for seed, x in enumerate(self.inputs)]
        object.__setattr__(self, "arrays", arrays)

    def layouts(self, mesh: ProcessMesh) -> list[str]:
        """The layouts that show something on a mesh, each once.

        On a line of two ranks each dimension is split in turn, and none. On a plane the first is
        split and replicated over the other axis, and each pair is split over both axes. A longer
        line differs from these for operations between neighbours alone.
        """
        axes = [name for name, size in mesh.axes if size > 1]
        if not axes:
            return [""]
        if len(axes) > 1:
            choose = itertools.permutations if self.ordered else itertools.combinations
            pairs = choose(self.splits, 2)
            return [
                f"{self.splits[0]}:{axes[0]}",
                *(f"{a}:{axes[0]};{b}:{axes[1]}" for a, b in pairs),
            ]
        if mesh.size > 2:
            return [f"{self.splits[0]}:{axes[0]}"] * self.between_neighbours
        return ["", *(f"{dimension}:{axes[0]}" for dimension in self.splits)]


class Cases:
    """The cases of a module, with options common to all; `@cases(...)` on a function adds one."""

    def __init__(self, **options: Any) -> None:
        self.all: list[Case] = []
        self.options = options

    def __call__(self, *inputs: Input, splits: str = "x y", **kwargs: Any) -> Callable[..., Any]:
        def add(build: Callable[..., Any]) -> Callable[..., Any]:
            options = self.options | kwargs
            self.all.append(Case(build.__name__, build, inputs, tuple(splits.split()), **options))
            return build

        return add


def build_graph(case: Case, tensors: Sequence[Any]) -> tuple[Any, list[Any], list[Any]]:
    """The mtf mesh, the outputs, and the gradients of a weighted sum of the outputs."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    inputs = [
        mtf.import_tf_tensor(mesh, t, x.shape) for t, x in zip(tensors, case.inputs, strict=True)
    ]
    result = case.build(mesh, *inputs)
    outputs = [result] if isinstance(result, mtf.Tensor) else list(result)
    if not case.gradient:
        return mesh, outputs, []
    ys = [y for y in outputs if y.dtype.is_floating]
    numbers = weights_of([y.shape.to_integer_list for y in ys])
    weights = [
        mtf.import_tf_tensor(mesh, tf.cast(w, y.dtype), y.shape)
        for w, y in zip(numbers, ys, strict=True)
    ]
    xs = [x for x in inputs if x.dtype.is_floating]
    return mesh, outputs, mtf.gradients(ys, xs, weights)


def weights_of(shapes: Sequence[Any]) -> list[np.ndarray]:
    """What the outputs are multiplied with before they are added to one number."""
    return [np.random.default_rng(100 + i).normal(size=s) for i, s in enumerate(shapes)]


def evaluate(
    case: Case, impl: Any, values: Sequence[Sequence[np.ndarray]] | None = None
) -> list[tuple[list[np.ndarray], list[np.ndarray]]]:
    """Outputs and gradients, as whole arrays, for each set of `values` (the case's own)."""
    with tf.Graph().as_default():
        fed = [tf.compat.v1.placeholder(a.dtype, a.shape) for a in case.arrays]
        mesh, outputs, gradients = build_graph(case, fed)
        missing = [i for i, g in enumerate(gradients) if g is None]
        assert not missing, f"no gradient for the floating inputs {missing}"
        lowering = mtf.Lowering(mesh.graph, {mesh: impl}, autostack=False)
        fetched = [lowering.export_to_tf_tensor(t) for t in [*outputs, *gradients]]
        with tf.compat.v1.Session() as session:
            found = [
                session.run(fetched, dict(zip(fed, arrays, strict=True)))
                for arrays in values or [case.arrays]
            ]
    return [(all_[: len(outputs)], all_[len(outputs) :]) for all_ in found]


def differences(case: Case, mesh: ProcessMesh) -> list[str]:
    """What differs from one device beyond rounding, in every layout of a case.

    They are lowered into one TensorFlow graph, from one mtf graph, and run together. Each rank
    compares its own blocks. On one rank the gradient of the one device is compared with a central
    difference.
    """
    impls = [HvdSimdMeshImpl(mesh, layout) for layout in case.layouts(mesh)]
    with tf.Graph().as_default():
        fed = [tf.compat.v1.placeholder(a.dtype, a.shape) for a in case.arrays]
        graph_mesh, outputs, gradients = build_graph(case, fed)
        missing = [i for i, g in enumerate(gradients) if g is None]
        assert not missing, f"no gradient for the floating inputs {missing}"
        tensors = [*outputs, *gradients]
        one_device = mtf.placement_mesh_impl.PlacementMeshImpl([("all", 1)], "", ["cpu:0"])
        lowering = mtf.Lowering(graph_mesh.graph, {graph_mesh: one_device}, autostack=False)
        expected = [lowering.export_to_tf_tensor(t) for t in tensors]
        found = []
        for impl in impls:
            lowering = mtf.Lowering(graph_mesh.graph, {graph_mesh: impl}, autostack=False)
            found.append([lowering.tensors[t].to_laid_out_tensor().one_slice for t in tensors])
        last = last_collective()
        with tf.control_dependencies([] if last is None else [last]):
            found = tf.nest.map_structure(tf.identity, found)
        with tf.compat.v1.Session() as session:
            whole, blocks = session.run([expected, found], dict(zip(fed, case.arrays, strict=True)))
            if mesh.size == 1:
                check_gradient(
                    case,
                    whole[len(outputs) :],
                    lambda arrays: session.run(
                        expected[: len(outputs)], dict(zip(fed, arrays, strict=True))
                    ),
                )
    kinds = [("output", i) for i in range(len(outputs))]
    kinds += [("gradient", i) for i in range(len(gradients))]
    troubles = []
    for impl, values in zip(impls, blocks, strict=True):
        for (kind, i), tensor, value, array in zip(kinds, tensors, values, whole, strict=True):
            begin = impl.slice_begin(tensor.shape, impl.mesh.rank)
            size = impl.slice_shape(tensor.shape)
            mine = array[tuple(slice(b, b + n) for b, n in zip(begin, size, strict=True))]
            if trouble := difference(value, mine):
                where = f"{impl.mesh}: {impl.layout_rules}"
                troubles.append(f"{case.name} [{where}] {kind} {i}: {trouble}")
    return troubles


def check_gradient(
    case: Case, gradients: list[np.ndarray], run: Callable[[list[np.ndarray]], list[np.ndarray]]
) -> None:
    """Compare gradients with a central difference of the outputs `run` along one direction."""
    if not gradients or not case.smooth or any(a.dtype == np.float32 for a in case.arrays):
        return
    floating = [np.issubdtype(a.dtype, np.floating) for a in case.arrays]
    along = [
        np.random.default_rng(200 + i).normal(size=a.shape) * is_floating
        for i, (a, is_floating) in enumerate(zip(case.arrays, floating, strict=True))
    ]
    up, down = (
        run(
            [(a + sign * STEP * v).astype(a.dtype) for a, v in zip(case.arrays, along, strict=True)]
        )
        for sign in (1, -1)
    )
    ys = [(u, d) for u, d in zip(up, down, strict=True) if np.issubdtype(u.dtype, np.floating)]
    weights = weights_of([u.shape for u, _ in ys])
    slopes = [((u - d) * w).sum() for (u, d), w in zip(ys, weights, strict=True)]
    found = sum(slopes) / (2 * STEP)
    kept = [v for v, is_floating in zip(along, floating, strict=True) if is_floating]
    projected = sum((g * v).sum() for g, v in zip(gradients, kept, strict=True))
    scale = sum(np.abs(g * v).sum() for g, v in zip(gradients, kept, strict=True)) + 1e-12
    assert abs(found - projected) < 1e-7 * scale, (
        f"{case.name}: one device's gradient is {projected}, a difference says {found}"
    )


def difference(value: np.ndarray, expected: np.ndarray) -> str | None:
    """Why two arrays are not equal to rounding; None when they are."""
    if value.shape != expected.shape or value.dtype != expected.dtype:
        return f"{value.dtype} {value.shape}, not {expected.dtype} {expected.shape}"
    tolerance = TOLERANCE.get(expected.dtype.name)
    if tolerance is None:
        wrong = np.count_nonzero(value != expected)
        return f"{wrong} of {value.size} elements differ" if wrong else None
    value, expected = value.astype(float), expected.astype(float)
    error = np.abs(value - expected).max(initial=0.0)
    scale = max(np.abs(expected).max(initial=0.0), 1.0)
    near = error <= tolerance * scale
    return None if near else f"off by {error:.3g} where |values| <= {scale:.3g}"
