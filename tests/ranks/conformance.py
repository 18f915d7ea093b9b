"""One mtf graph on a mesh of ranks and on one device: the same numbers, and true gradients.

The reference is Mesh TensorFlow's own `PlacementMeshImpl` of one CPU device, whose gradient is
itself held against a finite difference, since an error upstream would be in both.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from meshimpl import ProcessMesh
from meshimpl.compat import mtf
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
    arrays: list[np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        arrays = [x.array(seed) for seed, x in enumerate(self.inputs)]
        object.__setattr__(self, "arrays", arrays)

    def layouts(self, mesh: ProcessMesh) -> list[str]:
        """Each dimension over each axis longer than 1, each ordered pair over two, and none."""
        axes = [name for name, size in mesh.axes if size > 1]
        found = [f"{d}:{axis}" for axis in axes for d in self.splits]
        if len(axes) > 1:
            found = [f"{d}:{axes[0]}" for d in self.splits[:1]]
            found += [f"{d}:{axes[1]}" for d in self.splits[-1:]]
            found += [
                f"{a}:{axes[0]};{b}:{axes[1]}" for a, b in itertools.permutations(self.splits, 2)
            ]
        return ["", *found]


class Cases:
    """The cases of a module; `@cases(...)` above a function adds one."""

    def __init__(self) -> None:
        self.all: list[Case] = []

    def __call__(self, *inputs: Input, splits: str = "x y", **kwargs: Any) -> Callable[..., Any]:
        def add(build: Callable[..., Any]) -> Callable[..., Any]:
            self.all.append(Case(build.__name__, build, inputs, tuple(splits.split()), **kwargs))
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


@functools.cache
def reference(case: Case) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """On one device; the gradient is checked against a central difference along one direction."""
    impl = mtf.placement_mesh_impl.PlacementMeshImpl([("all", 1)], "", ["cpu:0"])
    floating = [np.issubdtype(a.dtype, np.floating) for a in case.arrays]
    along = [
        np.random.default_rng(200 + i).normal(size=a.shape) * is_floating
        for i, (a, is_floating) in enumerate(zip(case.arrays, floating, strict=True))
    ]
    moved = [
        [(a + sign * STEP * v).astype(a.dtype) for a, v in zip(case.arrays, along, strict=True)]
        for sign in (1, -1)
    ]
    (outputs, gradients), (up, _), (down, _) = evaluate(case, impl, [case.arrays, *moved])
    double = all(a.dtype != np.float32 for a in case.arrays) and gradients
    if double and case.smooth:
        ys = [(u, d) for u, d in zip(up, down, strict=True) if np.issubdtype(u.dtype, np.floating)]
        weights = weights_of([u.shape for u, _ in ys])
        slopes = [((u - d) * w).sum() for (u, d), w in zip(ys, weights, strict=True)]
        difference = sum(slopes) / (2 * STEP)
        kept = [v for v, is_floating in zip(along, floating, strict=True) if is_floating]
        projected = sum((g * v).sum() for g, v in zip(gradients, kept, strict=True))
        scale = sum(np.abs(g * v).sum() for g, v in zip(gradients, kept, strict=True)) + 1e-12
        assert abs(difference - projected) < 1e-7 * scale, (
            f"{case.name}: one device's gradient is {projected}, a difference says {difference}"
        )
    return outputs, gradients


def differences(case: Case, mesh: ProcessMesh, layout: str) -> list[str]:
    """What differs from one device beyond rounding."""
    impl = HvdSimdMeshImpl(mesh, layout)
    [(outputs, gradients)] = evaluate(case, impl)
    found = []
    for kind, here, there in zip(
        ("output", "gradient"), (outputs, gradients), reference(case), strict=True
    ):
        for i, (value, expected) in enumerate(zip(here, there, strict=True)):
            trouble = difference(value, expected)
            if trouble:
                found.append(f"{case.name} [{layout or 'replicated'}] {kind} {i}: {trouble}")
    return found


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
